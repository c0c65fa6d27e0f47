use postrider::{Entity, PendingEvents};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Entity)]
#[entity(type = "account")]
struct Account {
    #[entity(id)]
    id: String,
    #[serde(skip)]
    #[entity(pending)]
    events: PendingEvents<String>,
}

fn main() {}
