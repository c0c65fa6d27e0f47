use postrider::DomainEvent;

#[derive(serde::Serialize, DomainEvent)]
struct NoTopic {
    #[event(key)]
    order: u64,
}

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", version = 1)]
struct NoName {
    #[event(key)]
    order: u64,
}

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced")]
struct NoVersion {
    #[event(key)]
    order: u64,
}

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 0)]
struct VersionZero {
    #[event(key)]
    order: u64,
}

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1, topics = "b")]
struct Unknown {
    #[event(key)]
    order: u64,
}

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", topic = "more", name = "OrderPlaced", version = 1)]
struct Twice {
    #[event(key)]
    order: u64,
}

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct UnknownMark {
    #[event(id)]
    order: u64,
}

fn main() {}
