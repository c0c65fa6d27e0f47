use postrider::DomainEvent;

#[derive(DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: u64,
}

fn main() {}
