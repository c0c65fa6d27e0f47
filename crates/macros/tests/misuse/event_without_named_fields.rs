use postrider::DomainEvent;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct Tuple(u64);

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
enum Choice {
    Placed { order: u64 },
}

fn main() {}
