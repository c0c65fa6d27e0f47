use postrider::DomainEvent;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: u64,
}

fn main() {}
