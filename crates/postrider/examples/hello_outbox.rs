//! Hello outbox: a business row and its event in one transaction, delivered as a line of JSON.
//!
//! What lives here: the first program of the README, word for word. What does not: error handling
//! beyond `?`.
//! Invariant: everything below this head is the README's first block of Rust.

use std::io::stdout;

use postrider::DomainEvent;
use postrider::relay::embedded;
use postrider::sinks::jsonl::JsonLines;
use postrider::sqlite::{SqliteOptions, SqliteStore, append, rusqlite::Connection};
use tokio::signal::ctrl_c;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: u64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = SqliteStore::open(SqliteOptions::new("shop.db")).await?;

    let mut shop = Connection::open("shop.db")?;
    let tx = shop.transaction()?;
    tx.execute_batch("CREATE TABLE orders (id, total); INSERT INTO orders VALUES (42, 1999)")?;
    append(&tx, &[OrderPlaced { order: 42 }.to_event()?])?;
    tx.commit()?; // The order and its event are saved together, or neither is.

    Ok(embedded(store).sink("log", JsonLines::to_writer(stdout())?)?.run_until(ctrl_c()).await?)
}
