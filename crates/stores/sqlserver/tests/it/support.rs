//! What the tests share: a store in front of the stand-in, and short ways to make its values.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlserver::{SchemaOnOpen, SqlServerOptions, SqlServerStore};
use uuid::Uuid;

use crate::tds::wire::{Type, Value};
use crate::tds::{Answer, Mock, Request, Set};

pub(crate) const TTL: Duration = Duration::from_secs(5);
pub(crate) const LIMIT: BatchLimit = BatchLimit { records: 100, bytes: 1 << 20 };
pub(crate) const STORE_ID: u128 = 0x0198_7654_3210_7abc_8def_0123_4567_89ab;

/// What opening asks for, when the tables are there.
pub(crate) fn opening(request: &Request) -> Option<Answer> {
    let sql = request.sql();
    if sql.contains("as version") {
        return Some(Answer::set(Set::numbers(&[2])));
    }
    if sql.contains("select store_id") {
        let id = Value::Uuid(Uuid::from_u128(STORE_ID));
        return Some(Answer::set(Set::of(&[("store_id", Type::UniqueIdentifier)]).row([id])));
    }
    None
}

pub(crate) fn options(mock: &Mock) -> SqlServerOptions {
    SqlServerOptions::new(mock.connection_string())
        .on_open(SchemaOnOpen::Require)
        .connections(2)
        .connect_timeout(Duration::from_secs(20))
        .statement_timeout(Duration::from_secs(20))
}

/// A server that answers `respond` to all but what opening asks for, and a store in front of it.
pub(crate) async fn world(
    mut respond: impl FnMut(&Request) -> Answer + Send + 'static,
) -> (Mock, SqlServerStore) {
    let answer = move |request: &Request| opening(request).unwrap_or_else(|| respond(request));
    let mock = Mock::start(answer).await;
    let store = SqlServerStore::open(options(&mock)).await.expect("the store opens");
    (mock, store)
}

/// A server that answers each request with the next of these.
pub(crate) async fn scripted(answers: Vec<Answer>) -> (Mock, SqlServerStore) {
    let mut answers = answers.into_iter();
    world(move |request| {
        answers.next().unwrap_or_else(|| panic!("nothing is prepared for {request:?}"))
    })
    .await
}

/// The last request, whose text is the named file's.
pub(crate) fn asked(mock: &Mock, statement: &str) -> Request {
    let seen = mock.seen();
    let request = seen.last().expect("something was asked").clone();
    let file = format!("{}/src/sql/{statement}.sql", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(file).expect("the statement has a file");
    assert_eq!(request.sql(), text.replace("[changefeed]", "[postrider]"), "{statement}");
    request
}

pub(crate) fn int(number: i64) -> Value {
    Value::Int(number)
}

pub(crate) fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

pub(crate) fn bytes(bytes: &[u8]) -> Value {
    Value::Bytes(bytes.to_vec())
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).expect("a valid key")
}

pub(crate) fn event(key_text: &str, payload: &str) -> NewEvent {
    let topic = Topic::new("orders").expect("valid");
    let event_type = EventType::new("OrderPlaced").expect("valid");
    let json = ContentType::new("application/json").expect("valid");
    NewEvent::builder(key(key_text), topic, event_type)
        .payload(json, payload.to_owned())
        .build()
        .expect("within the limits")
}

pub(crate) fn p(index: u32, count: u32) -> PartitionId {
    PartitionId::numbered(index, count)
}

pub(crate) fn consumer(name: &str) -> ConsumerName {
    ConsumerName::new(name).expect("valid")
}

pub(crate) fn group() -> GroupName {
    GroupName::new("group").expect("valid")
}

pub(crate) fn relay_id(name: &str) -> RelayId {
    RelayId::new(name).expect("valid")
}

pub(crate) fn lease() -> HeldLease {
    HeldLease::granted(group(), p(0, 8), relay_id("relay-1"), Epoch::new(7))
}

pub(crate) fn ulid(time_ms: u64, low: u64) -> ulid::Ulid {
    ulid::Ulid::from_parts(Timestamp::from_millis(time_ms), 1, low)
}
