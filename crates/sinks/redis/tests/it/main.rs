//! The Redis sink against real servers.
//!
//! What lives here: what the tests share. What does not: tables of one file, which are tested
//! beside it.
//! Invariant: every test has a server of its own, and reads what arrived from its stream.

mod failover;
mod failures;
mod guide;
mod limits;
mod middle;
mod suite;

use std::sync::Arc;

use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::Delivered;
use postrider_core::{Error, EventId, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_servers::redis::Redis as Server;
use postrider_sink_redis::{Redis, RedisConfig};
use redis::aio::MultiplexedConnection;
use uuid::Uuid;

const EVENT_HEADER: &str = "header-";
/// The stream of all that tests send: their topic.
const STREAM: &str = "orders";

/// A server, started off the runtime's threads.
async fn server(settings: &str) -> Server {
    let settings = settings.to_owned();
    let started = tokio::task::spawn_blocking(move || Server::start(&settings)).await;
    started.expect("no panic").expect("a server")
}

async fn admin(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).expect("an address");
    client.get_multiplexed_async_connection().await.expect("the server answers")
}

/// Runs a command whose answer does not matter.
async fn run(admin: &mut MultiplexedConnection, command: &str) {
    let mut words = command.split(' ');
    let mut command = redis::cmd(words.next().expect("a command"));
    for word in words {
        command.arg(word);
    }
    let _: redis::Value = command.query_async(admin).await.expect("permitted");
}

fn config(url: impl Into<String>) -> RedisConfig {
    RedisConfig { timeout_ms: 3_000, ..RedisConfig::new(Secret::new(url)) }
}

fn sink(config: &RedisConfig) -> Arc<Redis> {
    Arc::new(Redis::new(config).expect("valid settings"))
}

/// Names and values of each entry, in the stream's order.
async fn entries(admin: &MultiplexedConnection) -> Vec<Vec<(String, Vec<u8>)>> {
    let mut admin = admin.clone();
    let mut range = redis::cmd("XRANGE");
    let read = range.arg(STREAM).arg("-").arg("+").query_async(&mut admin).await;
    let entries: Vec<(String, Vec<Vec<u8>>)> = read.expect("a stream, or none");
    let text = |bytes: &Vec<u8>| String::from_utf8(bytes.clone()).expect("a field's name");
    let pairs = |fields: Vec<Vec<u8>>| {
        fields.chunks(2).map(|pair| (text(&pair[0]), pair[1].clone())).collect()
    };
    entries.into_iter().map(|(_, fields)| pairs(fields)).collect()
}

/// All that the stream holds, in its order.
async fn stored(admin: &MultiplexedConnection) -> Vec<Delivered> {
    let entries = entries(admin).await;
    let delivered = |fields: Vec<(String, Vec<u8>)>| {
        let bytes = |name: &str| {
            let found = fields.iter().find(|(field, _)| field == name);
            found.unwrap_or_else(|| panic!("no field {name}")).1.clone()
        };
        let text = |name: &str| String::from_utf8(bytes(name)).expect("text");
        let own = |(name, value): &(String, Vec<u8>)| {
            let name = name.strip_prefix(EVENT_HEADER)?.to_ascii_lowercase();
            Some((name, String::from_utf8(value.clone()).expect("text")))
        };
        let mut headers: Vec<(String, String)> = fields.iter().filter_map(own).collect();
        headers.sort();
        let id: Uuid = text("id").parse().expect("a UUID");
        Delivered {
            id: EventId::from_uuid(id),
            key: text("key"),
            topic: text("topic"),
            event_type: text("type"),
            content_type: text("content-type"),
            headers,
            payload: bytes("payload"),
        }
    };
    entries.into_iter().map(delivered).collect()
}

async fn stored_ids(admin: &MultiplexedConnection) -> Vec<EventId> {
    stored(admin).await.iter().map(|one| one.id).collect()
}

fn ids(records: &[Record]) -> Vec<EventId> {
    records.iter().map(|one| one.event.id()).collect()
}

fn one(key: &str, n: u64) -> Record {
    record(event_with_id(fresh_id(), key, n), n)
}

async fn publish(sink: &Redis, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len());
    outcomes
}

async fn confirm(sink: &Redis, record: &Record) {
    let outcomes = publish(sink, std::slice::from_ref(record)).await;
    assert!(matches!(outcomes[0], Outcome::Confirmed), "{outcomes:?}");
}

/// The first outcome is a failure and nothing else was sent.
async fn fail(sink: &Redis, record: &Record) -> Error {
    match publish(sink, std::slice::from_ref(record)).await.remove(0) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}
