//! Hello outbox on PostgreSQL: a business row and its event in one transaction, delivered as a line
//! of JSON.
//!
//! What lives here: the shortest whole program. What does not: a connection pool of the
//! application's own, to whose transactions `Outbox::append` appends alike.
//! Invariant: the guide's first program is this one.

use std::io::stdout;

use postrider::DomainEvent;
use postrider::postgres::{PostgresOptions, PostgresStore, postgres_error};
use postrider::relay::embedded;
use postrider::sinks::jsonl::JsonLines;
use tokio::signal::ctrl_c;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "orders", name = "OrderPlaced", version = 1)]
struct OrderPlaced {
    #[event(key)]
    order: u64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let store = PostgresStore::open(PostgresOptions::new(url)).await?;

    let outbox = store.outbox();
    let place = store.transaction(move |tx| {
        Box::pin(async move {
            tx.batch_execute(
                "CREATE TABLE shop_order (id bigint, total bigint);
                 INSERT INTO shop_order VALUES (42, 1999)",
            )
            .await
            .map_err(|error| postgres_error("place the order", error))?;
            outbox.append(tx, &[OrderPlaced { order: 42 }.to_event()?]).await
        })
    });
    place.await?; // The order and its event are saved together, or neither is.

    Ok(embedded(store).sink("log", JsonLines::to_writer(stdout())?)?.run_until(ctrl_c()).await?)
}
