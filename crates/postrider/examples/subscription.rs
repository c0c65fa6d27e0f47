//! A subscription: events handed to a closure, without a broker.
//!
//! What lives here: a reader with a checkpoint of its own. What does not: sinks.
//! Invariant: a batch that the closure refused is handed out again.

use std::sync::Arc;

use postrider::relay::{CancellationToken, SubscriptionOptions, feed_of, this_process};
use postrider::sqlite::{SqliteOptions, SqliteStore, append};
use postrider::{ConsumerName, DomainEvent, Subscription};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "readings", name = "TemperatureRead", version = 1)]
struct TemperatureRead {
    #[event(key)]
    room: &'static str,
    celsius: i32,
}

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let store = SqliteStore::open(SqliteOptions::new("readings.db")).await?;
    let mut events = Vec::new();
    for celsius in 19..=21 {
        events.push(TemperatureRead { room: "kitchen", celsius }.to_event()?);
    }
    store.transaction(move |tx| append(tx, &events)).await?;

    let options = SubscriptionOptions::new(ConsumerName::new("display")?, this_process());
    let subscription = Subscription::new(feed_of(store.clone()), Arc::new(store), options);
    let stop = CancellationToken::new();
    let enough = stop.clone();
    let handler = move |delivery: postrider::relay::Delivery| {
        let enough = enough.clone();
        async move {
            for record in &delivery.records {
                let text = String::from_utf8_lossy(record.event.payload()).into_owned();
                println!("{} {text}", record.event.key());
                if text.contains(r#""celsius":21"#) {
                    enough.cancel();
                }
            }
            Ok(())
        }
    };
    Ok(subscription.run(handler, stop).await?)
}
