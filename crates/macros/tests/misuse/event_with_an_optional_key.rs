use postrider::DomainEvent;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: Option<u64>,
}

fn main() {}
