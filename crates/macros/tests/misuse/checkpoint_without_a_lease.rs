use postrider::{Checkpoints, ConsumerName, Position, Tally, sqlite::SqliteStore};

async fn advance(store: &SqliteStore, consumer: &ConsumerName, position: &Position) {
    let _ = store.advance(consumer, position, Tally::default()).await;
}

fn main() {}
