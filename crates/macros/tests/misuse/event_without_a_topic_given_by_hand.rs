use postrider::{EventType, Key, NewEvent};

fn place_order(key: Key, event_type: EventType) {
    let _ = NewEvent::builder(key, event_type);
}

fn main() {}
