use postrider::{DomainEvent, Entity, PendingEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Entity)]
#[entity(type = "contact")]
struct Contact {
    #[entity(id)]
    id: String,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<Contact>,
}

#[derive(Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: u64,
}

impl Contact {
    fn rename(&mut self) {
        self.events.raise(OrderPlaced { order: 42 });
    }
}

fn main() {}
