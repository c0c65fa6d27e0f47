use postrider::{Entity, PendingEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Entity)]
#[entity(coalesce)]
struct NoType {
    #[entity(id)]
    id: String,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<NoType>,
}

#[derive(Serialize, Deserialize, Entity)]
#[entity(type = "contact")]
struct NoId {
    id: String,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<NoId>,
}

#[derive(Serialize, Deserialize, Entity)]
#[entity(type = "contact")]
struct NoEvents {
    #[entity(id)]
    id: String,
}

fn main() {}
