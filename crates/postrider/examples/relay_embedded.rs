//! A relay inside the application, with two sinks, its status, and a stop that drains.
//!
//! What lives here: the full form of what `embedded` shortens. What does not: a broker.
//! Invariant: each sink has a checkpoint of its own, so both get every event.

use std::sync::Arc;
use std::time::Duration;

use postrider::relay::{
    CancellationToken, Relay, RelayOptions, SinkOptions, SystemClock, feed_of, this_process,
};
use postrider::sinks::jsonl::{JsonLines, JsonlConfig};
use postrider::sqlite::{SqliteOptions, SqliteStore, append};
use postrider::{ConsumerName, DomainEvent, GroupName, NewEvent};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[derive(serde::Serialize, DomainEvent)]
#[event(topic = "parcels", name = "ParcelMoved", version = 1)]
struct ParcelMoved {
    #[event(key)]
    parcel: u32,
    step: u32,
}

const PARCELS: u32 = 5;
const STEPS: u32 = 4;

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let store = SqliteStore::open(SqliteOptions::new("parcels.db")).await?;
    let events: Result<Vec<NewEvent>, _> = (1..=STEPS)
        .flat_map(|step| (1..=PARCELS).map(move |parcel| ParcelMoved { parcel, step }))
        .map(|moved| moved.to_event())
        .collect();
    let events = events?;
    store.transaction(move |tx| append(tx, &events)).await?;

    let options = RelayOptions::new(GroupName::new("parcels")?, this_process());
    let clock = Arc::new(SystemClock);
    let first = JsonLines::new(&JsonlConfig::file("first.jsonl"), clock.clone())?;
    let second = JsonLines::new(&JsonlConfig::file("second.jsonl"), clock)?;
    let relay = Relay::builder(feed_of(store.clone()), Arc::new(store), options)
        .sink(SinkOptions::new(ConsumerName::new("first")?), Arc::new(first))
        .sink(SinkOptions::new(ConsumerName::new("second")?), Arc::new(second))
        .build()?;

    let status = relay.status();
    let stop = CancellationToken::new();
    let watch = async {
        let all = u64::from(PARCELS * STEPS);
        while !status.snapshot().sinks.iter().all(|sink| sink.published == all) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(relay.run(stop.clone()), watch);
    ended?;
    for sink in status.snapshot().sinks {
        println!("{}: {} published, {} parked", sink.name, sink.published, sink.parked);
    }
    Ok(())
}
