//! An inbox: a message that is delivered twice takes effect once.
//!
//! What lives here: the consumer's side. What does not: receiving; the two deliveries are calls.
//! Invariant: the handler's row, its own event and the note "seen" share one transaction.

use postrider::sqlite::{Handled, InboxOptions, SqliteInbox, SqliteOptions, SqliteStore};
use postrider::sqlite::{append, rusqlite};
use postrider::{ConsumerName, DomainEvent, Error, EventId};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "stock", name = "StockReserved", version = 1)]
struct StockReserved {
    #[event(key)]
    order: u64,
}

fn reserve(tx: &rusqlite::Transaction<'_>, order: u64) -> Result<(), Error> {
    let failed = |error: rusqlite::Error| postrider::sqlite::sqlite_error("reserve stock", error);
    tx.execute("INSERT INTO reserved VALUES (?1)", [order.cast_signed()]).map_err(failed)?;
    append(tx, &[StockReserved { order }.to_event()?])?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let store = SqliteStore::open(SqliteOptions::new("stock.db")).await?;
    let stock = rusqlite::Connection::open("stock.db")?;
    stock.execute_batch("CREATE TABLE reserved (\"order\" INTEGER)")?;

    let inbox = SqliteInbox::new(store, InboxOptions::default())?;
    let consumer = ConsumerName::new("stock")?;
    let message_id = EventId::from_uuid(uuid::Uuid::now_v7());
    for delivery in 1..=2 {
        let handled = inbox.handle(&consumer, message_id, |tx| reserve(tx, 42)).await?;
        match handled {
            Handled::Now(()) => println!("delivery {delivery}: reserved"),
            Handled::Before => println!("delivery {delivery}: seen before"),
        }
    }
    let count = |sql: &str| stock.query_row(sql, [], |row| row.get::<_, i64>(0));
    println!("reservations: {}", count("SELECT count(*) FROM reserved")?);
    println!("events: {}", count("SELECT count(*) FROM postrider_outbox")?);
    Ok(())
}
