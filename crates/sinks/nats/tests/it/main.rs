//! The NATS sink against real servers, of an old and a new version.
//!
//! What lives here: what both versions' tests share. What does not: tables of one file, which are
//! tested beside it.
//! Invariant: every test has a server of its own, and reads what arrived from its stream.

mod failures;
mod guide;
mod middle;
mod suite;

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::{self, stream};
use postrider_conformance::samples::{event_with_id, fresh_id, record};
use postrider_conformance::sink::Delivered;
use postrider_core::{Error, EventId, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_encoding::decode_header_value;
use postrider_servers::nats::{Nats as Server, Version};
use postrider_sink_nats::{Nats, NatsConfig};
use uuid::Uuid;

const EVENT_HEADER: &str = "postrider-header-";
const STREAM: &str = "EVENTS";

/// A server, started off the runtime's threads.
async fn server(version: Version, settings: &'static str) -> Server {
    let started = tokio::task::spawn_blocking(move || Server::start(version, settings)).await;
    started.expect("no panic").expect("a server")
}

async fn admin(url: &str) -> jetstream::Context {
    jetstream::new(async_nats::connect(url).await.expect("the server answers"))
}

/// The stream of all that tests send.
fn everything() -> stream::Config {
    stream::Config {
        name: STREAM.into(),
        subjects: vec!["events.>".into()],
        max_message_size: -1,
        duplicate_window: Duration::from_secs(120),
        discard: stream::DiscardPolicy::New,
        ..stream::Config::default()
    }
}

fn config(url: impl Into<String>) -> NatsConfig {
    NatsConfig {
        subject: "events.{topic}".into(),
        timeout_ms: 3_000,
        ..NatsConfig::new(vec![Secret::new(url)])
    }
}

fn sink(config: &NatsConfig) -> Arc<Nats> {
    Arc::new(Nats::new(config).expect("valid settings"))
}

/// All that the stream holds, in its order.
async fn stored(context: &jetstream::Context) -> Vec<Delivered> {
    let Ok(mut stream) = context.get_stream(STREAM).await else { return Vec::new() };
    let state = stream.info().await.expect("the stream's state").state.clone();
    let mut found = Vec::new();
    for sequence in state.first_sequence.max(1)..=state.last_sequence {
        let message = stream.get_raw_message(sequence).await.expect("a message");
        let decoded = |name: &str| {
            let value = message.headers.get(name).expect(name).as_str();
            decode_header_value(value.as_bytes()).expect("percent-encoded")
        };
        let mut headers: Vec<(String, String)> = Vec::new();
        for (name, values) in message.headers.iter() {
            let name: &str = name.as_ref();
            if let Some(own) = name.strip_prefix(EVENT_HEADER) {
                let value = decode_header_value(values[0].as_str().as_bytes()).expect("encoded");
                headers.push((own.to_ascii_lowercase(), value));
            }
        }
        headers.sort();
        let id: Uuid = decoded("Nats-Msg-Id").parse().expect("a UUID");
        found.push(Delivered {
            id: EventId::from_uuid(id),
            key: decoded("postrider-key"),
            topic: decoded("postrider-topic"),
            event_type: decoded("postrider-type"),
            content_type: message.headers.get("content-type").expect("one").to_string(),
            headers,
            payload: message.payload.to_vec(),
        });
    }
    found
}

fn one(key: &str, n: u64) -> Record {
    record(event_with_id(fresh_id(), key, n), n)
}

async fn publish(sink: &Nats, records: &[Record]) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    let outcomes = sink.publish(Publish::new(&partition, records)).await;
    assert_eq!(outcomes.len(), records.len());
    outcomes
}

async fn confirm(sink: &Nats, record: &Record) {
    let outcomes = publish(sink, std::slice::from_ref(record)).await;
    assert!(matches!(outcomes[0], Outcome::Confirmed), "{outcomes:?}");
}

async fn fail(sink: &Nats, record: &Record) -> Error {
    match publish(sink, std::slice::from_ref(record)).await.remove(0) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}
