use postrider::DomainEvent;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: u64,
    #[event(key)]
    customer: u64,
}

fn main() {}
