use postrider::{EventType, NewEvent, Topic};

fn place_order(topic: Topic, event_type: EventType) {
    let _ = NewEvent::builder("order-42", topic, event_type);
}

fn main() {}
