//! How each statement is asked, and how its answer is read: types, nulls, and every outcome.
//!
//! Invariant: columns are here of the types that docs/design/sqlserver-feed.md gives them.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlserver::{
    Handled, InboxOptions, OnDuplicate, SchemaOnOpen, SqlServerInbox, SqlServerStore, schema_sql,
};
use serde_json::{Value as Json, json};
use uuid::Uuid;

use crate::support::*;
use crate::tds::wire::{Type, Value};
use crate::tds::{Answer, Mock, Request, Set};

const EVENT_ID: Uuid = Uuid::from_u128(0x0198_0000_0000_7000_8000_0000_0000_0042);

fn json_of(request: &Request, at: usize) -> Json {
    match &request.values()[at] {
        Value::Text(text) => serde_json::from_str(text).expect("a parameter of JSON"),
        other => panic!("parameter {at} is {other:?}"),
    }
}

fn standing(values: [Value; 5]) -> Set {
    Set::of(&[
        ("number", Type::Int),
        ("generation", Type::Int),
        ("ended", Type::Int),
        ("state_ms", Type::BigInt),
        ("now_ms", Type::BigInt),
    ])
    .row(values)
}

fn page() -> Set {
    Set::of(&[
        ("ulid", Type::Binary(16)),
        ("appended_ms", Type::BigInt),
        ("id", Type::UniqueIdentifier),
        ("key", Type::NVarChar(1024)),
        ("topic", Type::NVarChar(255)),
        ("type", Type::NVarChar(255)),
        ("content_type", Type::NVarChar(255)),
        ("headers", Type::NVarCharMax),
        ("payload", Type::VarBinaryMax),
        ("found", Type::Int),
    ])
}

fn row(low: u64, key: &str, headers: Value, payload: &[u8], found: i64) -> [Value; 10] {
    [
        bytes(&ulid(1_000, low).to_bytes()),
        int(999),
        Value::Uuid(EVENT_ID),
        text(key),
        text("orders"),
        text("OrderPlaced"),
        text("application/json"),
        headers,
        bytes(payload),
        int(found),
    ]
}

/// `read` is a method of two seams.
trait Reads {
    async fn read_feed(
        &self,
        of: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage>;

    async fn read_document(
        &self,
        partition_key: &str,
        id: &str,
        known: Option<&ETag>,
    ) -> Result<DocumentRead>;
}

impl Reads for SqlServerStore {
    async fn read_feed(
        &self,
        of: &PartitionId,
        after: &Position,
        limit: BatchLimit,
    ) -> Result<FeedPage> {
        Feed::read(self, of, after, limit).await
    }

    async fn read_document(
        &self,
        partition_key: &str,
        id: &str,
        known: Option<&ETag>,
    ) -> Result<DocumentRead> {
        DocumentStore::read(self, partition_key, id, known).await
    }
}

fn whole(answer: FeedPage) -> Vec<Record> {
    let records = answer.entries.into_iter().map(|entry| match entry {
        Entry::Record(record) => record,
        Entry::Malformed(malformed) => panic!("{malformed:?}"),
    });
    records.collect()
}

#[tokio::test]
async fn a_page_of_the_feed_is_read_value_by_value() {
    let headers = text("{\"Trace\":\"1\",\"b\":\"é\"}");
    let rows = page().row(row(1, "Zoë 日本", headers, b"{\"total\": 7}", 2)).row(row(
        2,
        "k",
        Value::Null,
        b"",
        2,
    ));
    let known = standing([int(3), int(0), int(0), int(1_000), int(2_000)]);
    let (mock, store) = scripted(vec![Answer::Sets(vec![known, rows])]).await;
    let after = Position::START;
    let answer = store.read_feed(&p(3, 8), &after, LIMIT).await.expect("a page");
    assert_eq!(answer.position, ulid(1_000, 2).into());
    assert_eq!(answer.ended, None);
    let records = whole(answer);
    let event = &records[0].event;
    assert_eq!(records[0].position, ulid(1_000, 1).into());
    assert_eq!(records[0].appended_at, Timestamp::from_millis(999));
    assert_eq!(event.id().as_uuid(), &EVENT_ID);
    assert_eq!((event.key().as_str(), event.topic().as_str()), ("Zoë 日本", "orders"));
    assert_eq!(event.headers().iter().collect::<Vec<_>>(), [("Trace", "1"), ("b", "é")]);
    assert_eq!(event.payload().as_ref(), b"{\"total\": 7}");
    assert!(records[1].event.headers().is_empty() && records[1].event.payload().is_empty());
    let request = asked(&mock, "feed_read");
    let position = bytes(&[0; 16]);
    assert_eq!(request.values(), [int(3), int(8), position, int(100), int(1 << 20)]);
}

#[tokio::test]
async fn a_long_payload_and_an_unreadable_event_come_whole() {
    let long: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    let bad_key = row(2, "a\u{7}", Value::Null, b"raw", 3);
    let bad_headers = row(3, "k", text("[1]"), b"raw", 3);
    let rows = page().row(row(1, "k", Value::Null, &long, 3)).row(bad_key).row(bad_headers);
    let known = standing([int(0), int(0), int(0), Value::Null, int(2_000)]);
    let (_mock, store) = scripted(vec![Answer::Sets(vec![known, rows])]).await;
    let limit = BatchLimit { bytes: 1 << 24, ..LIMIT };
    let answer = store.read_feed(&p(0, 1), &Position::START, limit).await.expect("a page");
    let Entry::Record(first) = &answer.entries[0] else { panic!("{:?}", answer.entries[0]) };
    assert!(first.event.payload() == &long, "the bytes differ");
    for (entry, key, says) in [(1, None, "control character"), (2, Some("k"), "headers")] {
        let Entry::Malformed(malformed) = &answer.entries[entry] else { panic!("it is readable") };
        assert_eq!(malformed.key.as_ref().map(Key::as_str), key);
        assert_eq!(malformed.raw.as_ref(), b"raw");
        assert!(malformed.reason.contains(says), "{}", malformed.reason);
    }
}

/// An insert that does not go through the procedure may hold one; a driver that fails on it would
/// fail on that page for ever.
#[tokio::test]
async fn half_of_a_surrogate_pair_stops_no_reader() {
    let mut half = row(1, "k", Value::Null, b"", 2);
    half[4] = bytes(&[b'a', 0, 0x3d, 0xd8]);
    let rows = page().row(half).row(row(2, "k", Value::Null, b"", 2));
    let known = standing([int(0), int(0), int(0), Value::Null, int(2_000)]);
    let (_mock, store) = scripted(vec![Answer::Sets(vec![known, rows])]).await;
    let answer = store.read_feed(&p(0, 1), &Position::START, LIMIT).await.expect("a page");
    let records = whole(answer);
    assert_eq!(records[0].event.topic().as_str(), "a\u{fffd}");
    assert_eq!(records.len(), 2);
}

#[tokio::test]
async fn a_page_is_cut_at_its_bytes_and_the_next_asks_for_fewer() {
    let known = || standing([int(0), int(0), int(0), Value::Null, int(2_000)]);
    let rows = (1..=3).fold(page(), |set, low| set.row(row(low, "k", Value::Null, &[7; 900], 90)));
    let empty = Answer::Sets(vec![known(), page()]);
    let quiet = Answer::set(Set::of(&[("state_ms", Type::BigInt)]).row([Value::Null]));
    let (mock, store) = scripted(vec![Answer::Sets(vec![known(), rows]), empty, quiet]).await;
    let limit = BatchLimit { records: 2_000, bytes: 6_200 };
    let answer = store.read_feed(&p(0, 1), &Position::START, limit).await.expect("a page");
    assert_eq!(answer.position, ulid(1_000, 2).into(), "the third is above the limit");
    store.read_feed(&p(0, 1), &Position::START, limit).await.expect("a page");
    let sizes: Vec<Value> = mock.seen()[2..4].iter().map(|one| one.values()[3].clone()).collect();
    assert_eq!(sizes, [int(1_000), int(500)]);
}

#[tokio::test]
async fn an_empty_page_tells_a_quiet_position_or_the_end() {
    let after: Position = ulid(1_000, 5).into();
    let head = |state: Value, ended: i64| {
        let known = standing([int(2), int(4), int(ended), state, int(10_000)]);
        Answer::Sets(vec![known, page()])
    };
    let quiet = |ms: Value| Answer::set(Set::of(&[("state_ms", Type::BigInt)]).row([ms]));
    let at = |ms: u64| Position::from(ulid::Ulid::from_time(Timestamp::from_millis(ms)));
    // Known well enough; too old, moved on; something came meanwhile; behind the reader.
    let (mock, store) = scripted(vec![
        head(int(9_500), 0),
        head(int(8_000), 0),
        quiet(int(10_001)),
        head(Value::Null, 0),
        quiet(Value::Null),
        head(int(999), 0),
        quiet(int(999)),
    ])
    .await;
    for expected in [at(9_500), at(10_001), after.clone(), after.clone()] {
        let page = store.read_feed(&p(0, 2), &after, LIMIT).await.expect("an empty page");
        assert_eq!((page.entries.len(), page.position, page.ended), (0, expected, None));
    }
    let request = asked(&mock, "feed_quiet");
    assert_eq!(request.values(), [int(0), int(2), bytes(after.as_bytes())]);
    let next = Set::of(&[("index_no", Type::Int), ("count_no", Type::Int)]);
    let next = next.row([int(0), int(4)]).row([int(2), int(4)]);
    let (mock, store) = scripted(vec![head(int(1), 1), Answer::set(next)]).await;
    let page = store.read_feed(&p(0, 2), &after, LIMIT).await.expect("an end");
    let successors = page.ended.expect("it has ended");
    assert_eq!(
        successors.iter().map(|one| one.partition.clone()).collect::<Vec<_>>(),
        [p(0, 4), p(2, 4)]
    );
    assert!(successors.iter().all(|one| one.from == Position::START));
    assert_eq!(asked(&mock, "partition_successors").values(), [int(0), int(2), int(4)]);
}

#[tokio::test]
async fn what_can_not_be_a_place_here_is_refused_and_what_the_server_refuses_is_told() {
    let nowhere = standing([Value::Null, Value::Null, Value::Null, Value::Null, int(1)]);
    let beyond = "changefeed: the cursor 01 lies beyond the head of the shard";
    let answers =
        vec![Answer::Sets(vec![nowhere, page()]), Answer::Error(vec![], 77_111, 16, beyond)];
    let (mock, store) = scripted(answers).await;
    for _ in 0..2 {
        let read = store.read_feed(&p(0, 3), &Position::START, LIMIT).await;
        let error = read.map(drop).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Permanent);
        let says = ["partition 0/3 does not exist here", "lies beyond the head"];
        assert!(says.iter().any(|says| error.to_string().contains(says)), "{error}");
    }
    let asked = mock.seen().len();
    let foreign = Position::from_bytes(b"0/16B3748").expect("short");
    let range = PartitionId::new("00-1F").expect("valid");
    assert!(store.read_feed(&p(0, 1), &foreign, LIMIT).await.is_err());
    assert!(store.read_feed(&range, &Position::START, LIMIT).await.is_err());
    assert!(store.partitions(&consumer("a ")).await.is_err());
    assert_eq!(mock.seen().len(), asked, "nobody was asked");
}

#[tokio::test]
async fn the_head_and_a_time_are_positions() {
    let found = |number: Value, position: &[u8]| {
        let set = Set::of(&[("number", Type::Int), ("position", Type::Binary(16))]);
        Answer::set(set.row([number, bytes(position)]))
    };
    let place = ulid(5_000, 9);
    let answers = vec![
        found(int(0), &place.to_bytes()),
        found(int(0), &[0; 16]),
        found(Value::Null, &[0; 16]),
    ];
    let (mock, store) = scripted(answers).await;
    assert_eq!(store.head(&p(0, 1)).await.expect("a head"), place.into());
    assert_eq!(asked(&mock, "feed_position").values(), [int(0), int(1), Value::Null]);
    let time = Timestamp::from_millis(u64::MAX);
    let at = store.position_at(&p(0, 1), time).await.expect("a place");
    assert_eq!(at, Position::START);
    let latest = 253_402_300_799_999;
    assert_eq!(asked(&mock, "feed_position").values()[2], int(latest), "SQL Server's last time");
    assert!(store.head(&p(0, 7)).await.is_err());
    let start = store.position_at(&p(0, 1), Timestamp::default()).await;
    assert_eq!(start.expect("no need to ask"), Position::START);
    assert_eq!(store.identity(), format!("sqlserver:{}", Uuid::from_u128(STORE_ID)));
}

#[tokio::test]
async fn partitions_are_listed_and_raised() {
    let set = Set::of(&[("index_no", Type::Int), ("count_no", Type::Int)]);
    let set = set.row([int(0), int(2)]).row([int(3), int(4)]);
    let refused = "changefeed: 4 partitions can't become 6; give a multiple, at most 1024";
    let answers =
        vec![Answer::set(set), Answer::nothing(), Answer::Error(vec![], 77_202, 16, refused)];
    let (mock, store) = scripted(answers).await;
    assert_eq!(store.partitions(&consumer("sink")).await.expect("listed"), [p(0, 2), p(3, 4)]);
    store.raise_partitions(8).await.expect("raised");
    assert_eq!(asked(&mock, "partition_raise").values(), [int(8)]);
    let error = store.raise_partitions(6).await.expect_err("no multiple");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("give a multiple"), "{error}");
}

#[tokio::test]
async fn an_append_is_one_request_with_everything_in_it() {
    let (mock, store) = scripted(vec![Answer::nothing(), Answer::nothing()]).await;
    let mut client = store.connect().await.expect("a connection");
    let given = NewEvent::builder(key("b"), Topic::new("t").expect("valid"), {
        EventType::new("E").expect("valid")
    })
    .id(EventId::from_uuid(EVENT_ID))
    .build()
    .expect("valid");
    client.begin_transaction().await.expect("begun");
    let events = [event("b", "{}"), given, event("a", "[1]")];
    let ids = store.outbox().append(&mut client, &events).await.expect("appended");
    client.commit_transaction().await.expect("committed");
    let request = asked(&mock, "append");
    let rows = json_of(&request, 0);
    assert_eq!(rows.as_array().map(Vec::len), Some(3));
    assert_eq!(rows[0]["i"], json!(ids[0].to_string()));
    assert_eq!((&rows[0]["g"], &rows[1]["g"]), (&json!(0), &json!(1)));
    assert_eq!(rows[1]["i"], json!(EVENT_ID.to_string()));
    assert_eq!(rows[2]["h"], json!(0xca97_8112u32), "the hash of \"a\"");
    assert_eq!((&rows[2]["o"], &rows[2]["l"]), (&json!(2), &json!(3)));
    assert_eq!((&rows[2]["t"], &rows[2]["d"]), (&json!("orders"), &Json::Null));
    assert_eq!(request.values()[1..3], [bytes(b"{}[1]"), int(0)]);
    assert_eq!(json_of(&request, 3), json!([{"n": 0, "k": "a"}, {"n": 1, "k": "b"}]));
    let outbox = store.outbox();
    let twice = [events[1].clone(), events[1].clone()];
    let ids = outbox.append_with(&mut client, &twice, OnDuplicate::Ignore).await;
    assert_eq!(ids.expect("appended"), [EventId::from_uuid(EVENT_ID); 2]);
    let request = asked(&mock, "append");
    assert_eq!(json_of(&request, 0).as_array().map(Vec::len), Some(1), "once");
    assert_eq!(request.values()[2], int(1));
    let asked = mock.seen().len();
    let many = vec![event("a", ""); limits::MAX_APPEND_EVENTS + 1];
    assert!(outbox.append(&mut client, &many).await.is_err());
    assert!(outbox.append(&mut client, &[]).await.expect("nothing to do").is_empty());
    assert_eq!(mock.seen().len(), asked, "nobody was asked");
}

fn acquired(epoch: Value, holder: &str, remaining: i64) -> Answer {
    let set = Set::of(&[
        ("epoch", Type::BigInt),
        ("holder", Type::NVarChar(255)),
        ("remaining_ms", Type::BigInt),
    ]);
    Answer::set(set.row([epoch, text(holder), int(remaining)]))
}

#[tokio::test]
async fn a_lease_is_granted_or_told_to_be_anothers() {
    let answers = vec![acquired(int(8), "relay-1", 5_000), acquired(Value::Null, "relay-2", 1_234)];
    let (mock, store) = scripted(answers).await;
    let ours = store.acquire(&group(), &p(0, 8), &relay_id("relay-1"), TTL).await;
    let Ok(Acquired::Held(held)) = ours else { panic!("{ours:?}") };
    assert_eq!((held.epoch(), held.partition()), (Epoch::new(8), &p(0, 8)));
    let values = [text("group"), text("0/8"), text("relay-1"), int(5_000)];
    assert_eq!(asked(&mock, "lease_acquire").values(), values);
    let theirs = store.acquire(&group(), &p(0, 8), &relay_id("relay-1"), TTL).await;
    let Ok(Acquired::Busy { holder, remaining }) = theirs else { panic!("{theirs:?}") };
    assert_eq!((holder, remaining), (relay_id("relay-2"), Duration::from_millis(1_234)));
    let long = PartitionId::new("x".repeat(33)).expect("valid");
    assert!(store.acquire(&group(), &long, &relay_id("r"), TTL).await.is_err());
    assert!(store.acquire(&group(), &p(0, 8), &relay_id("r "), TTL).await.is_err());
}

fn names(names: &[&str]) -> Set {
    let set = Set::of(&[("relay", Type::NVarChar(255))]);
    names.iter().fold(set, |set, name| set.row([text(name)]))
}

#[tokio::test]
async fn a_heartbeat_answers_for_each_lease_and_tells_the_news() {
    let renewed = Set::of(&[("n", Type::Int)]).row([int(1)]);
    let live = names(&["relay-1", "relay-2"]);
    let sets = vec![renewed, live, Set::numbers(&[1])];
    let (mock, store) = scripted(vec![Answer::Sets(sets)]).await;
    let (one, two) =
        (lease(), HeldLease::granted(group(), p(1, 8), relay_id("relay-1"), Epoch::new(9)));
    let beat = store.heartbeat(&group(), &[&one, &two], TTL).await.expect("renewed");
    assert_eq!(beat.renewals, [Renewal::Lost, Renewal::Renewed]);
    let relays = vec![relay_id("relay-1"), relay_id("relay-2")];
    assert_eq!(beat.news, Some(News { relays, requeued: true }));
    let request = asked(&mock, "lease_heartbeat");
    assert_eq!(
        json_of(&request, 0)[1],
        json!({"n": 1, "g": "group", "p": "1/8", "h": "relay-1", "e": 9})
    );
    assert_eq!(request.values()[1..], [int(5_000), text("group")]);
    assert!(store.renew(&[], TTL).await.expect("nothing to do").is_empty());
}

#[tokio::test]
async fn relays_join_and_leave_and_leases_are_listed_and_released() {
    let listed = Set::of(&[
        ("partition", Type::NVarChar(32)),
        ("holder", Type::NVarChar(255)),
        ("epoch", Type::BigInt),
        ("remaining_ms", Type::BigInt),
    ])
    .row([text("0/8"), text("relay-1"), int(7), int(0)]);
    let answers = vec![
        Answer::set(names(&["relay-1"])),
        Answer::nothing(),
        Answer::nothing(),
        Answer::set(listed),
    ];
    let (mock, store) = scripted(answers).await;
    let joined = store.join(&group(), &relay_id("relay-1"), TTL).await.expect("joined");
    assert_eq!(joined, [relay_id("relay-1")]);
    let values = [text("group"), text("relay-1"), int(5_000)];
    assert_eq!(asked(&mock, "lease_join").values(), values);
    store.leave(&group(), &relay_id("relay-1")).await.expect("left");
    assert_eq!(asked(&mock, "lease_leave").values(), &values[..2]);
    store.release(&lease()).await.expect("released");
    let fence = [text("group"), text("0/8"), text("relay-1"), int(7)];
    assert_eq!(asked(&mock, "lease_release").values(), fence);
    let listed = store.leases(&group()).await.expect("listed");
    assert_eq!(asked(&mock, "lease_list").values(), [text("group")]);
    assert_eq!((listed[0].epoch, listed[0].remaining), (Epoch::new(7), Duration::ZERO));
}

#[tokio::test]
async fn a_checkpoint_is_read_moved_and_refused_to_move_back() {
    let kept = Set::of(&[
        ("position", Type::Binary(16)),
        ("published", Type::BigInt),
        ("updated_ms", Type::BigInt),
    ])
    .row([bytes(&ulid(5, 6).to_bytes()), int(42), int(77)]);
    let none = Set::of(&[("position", Type::Binary(16))]);
    let moved = |count| Answer::set(Set::numbers(&[count]));
    let answers = vec![Answer::set(kept), Answer::set(none), moved(1), moved(0), Answer::nothing()];
    let (mock, store) = scripted(answers).await;
    let sink = consumer("sink");
    let kept = store.checkpoint(&sink, &p(0, 8)).await.expect("read").expect("kept");
    assert_eq!((kept.position, kept.published), (ulid(5, 6).into(), 42));
    assert_eq!(kept.updated_at, Timestamp::from_millis(77));
    assert_eq!(asked(&mock, "checkpoint_read").values(), [text("sink"), text("0/8")]);
    assert_eq!(store.checkpoint(&sink, &p(0, 8)).await.expect("read"), None);
    let to: Position = ulid(9, 9).into();
    let tally = Tally { published: 3, parked: 1 };
    store.advance(&lease(), &sink, &to, tally).await.expect("moved");
    let request = asked(&mock, "checkpoint_advance");
    assert_eq!(request.values()[4..], [text("sink"), bytes(to.as_bytes()), int(3)]);
    let back = store.advance(&lease(), &sink, &to, tally).await.expect_err("back");
    assert_eq!(back.kind(), ErrorKind::Permanent);
    assert!(back.to_string().contains("move back"), "{back}");
    let next = [Successor { partition: p(8, 16), from: Position::START }];
    store.finish(&lease(), &sink, &next).await.expect("finished");
    let request = asked(&mock, "checkpoint_finish");
    assert_eq!(json_of(&request, 5), json!([{"n": 0, "p": "8/16", "i": 8, "c": 16}]));
    assert_eq!(request.values()[6], bytes(&[0; 16]));
}

#[tokio::test]
async fn progress_is_read_and_a_consumer_is_removed_unless_it_is_at_work() {
    let set = Set::of(&[
        ("consumer", Type::NVarChar(255)),
        ("partition", Type::NVarChar(32)),
        ("position", Type::Binary(16)),
        ("published", Type::BigInt),
        ("dropped", Type::BigInt),
        ("ended", Type::Int),
        ("updated_ms", Type::BigInt),
        ("parked", Type::BigInt),
        ("pending", Type::BigInt),
        ("oldest_ms", Type::BigInt),
    ]);
    let start = bytes(&[0; 16]);
    let one = [10, 1, 0, 77, 2, 3, 66].map(int);
    let row = [text("sink"), text("0/8"), start.clone()].into_iter().chain(one);
    let two = [text("sink"), text("1/8"), start].into_iter().chain([0, 0, 1, 78, 0, 0].map(int));
    let set = set.row(row).row(two.chain([Value::Null]));
    let removed = |busy: Value, gone: i64| {
        let set = Set::of(&[("busy", Type::NVarChar(32)), ("gone", Type::Int)]);
        Answer::set(set.row([busy, int(gone)]))
    };
    let answers = vec![
        Answer::set(set),
        removed(text("0/8"), 0),
        removed(Value::Null, 0),
        removed(Value::Null, 3),
    ];
    let (mock, store) = scripted(answers).await;
    let all = store.progress().await.expect("read");
    let [one, two] = &all[..] else { panic!("{all:?}") };
    assert_eq!((one.checkpoint.published, one.dropped, one.parked, one.pending), (10, 1, 2, 3));
    assert_eq!(one.oldest_pending_at, Some(Timestamp::from_millis(66)));
    assert!(!one.ended && two.ended && two.oldest_pending_at.is_none());
    let sink = consumer("sink");
    let busy = store.remove_consumer(&sink).await.expect_err("at work");
    assert_eq!(busy.kind(), ErrorKind::Transient);
    assert!(!store.remove_consumer(&sink).await.expect("not known"));
    assert!(store.remove_consumer(&sink).await.expect("removed"));
    assert_eq!(asked(&mock, "checkpoint_remove").values(), [text("sink")]);
}

fn letters() -> Set {
    Set::of(&[
        ("number", Type::BigInt),
        ("consumer", Type::NVarChar(255)),
        ("partition", Type::NVarChar(32)),
        ("position", Type::Binary(16)),
        ("state", Type::NVarChar(8)),
        ("reason", Type::NVarCharMax),
        ("attempts", Type::BigInt),
        ("parked_ms", Type::BigInt),
        ("updated_ms", Type::BigInt),
        ("appended_ms", Type::BigInt),
        ("malformed", Type::NVarCharMax),
        ("id", Type::UniqueIdentifier),
        ("key", Type::NVarChar(1024)),
        ("topic", Type::NVarChar(255)),
        ("type", Type::NVarChar(255)),
        ("content_type", Type::NVarChar(255)),
        ("headers", Type::NVarCharMax),
        ("payload", Type::VarBinaryMax),
    ])
}

fn letter_row(number: i64, state: &str, malformed: Value) -> Vec<Value> {
    let readable = malformed == Value::Null;
    let or_null = |value: Value| if readable { value } else { Value::Null };
    vec![
        int(number),
        text("sink"),
        text("0/8"),
        bytes(&ulid(5, 6).to_bytes()),
        text(state),
        text("refused: 400"),
        int(i64::from(u32::MAX) + 5),
        int(70),
        int(71),
        int(60),
        malformed,
        or_null(Value::Uuid(EVENT_ID)),
        text("k"),
        or_null(text("orders")),
        or_null(text("OrderPlaced")),
        or_null(text("application/json")),
        Value::Null,
        bytes(b"{}"),
    ]
}

#[tokio::test]
async fn dead_letters_are_read_in_every_form() {
    let two = || {
        let set = letters().row(letter_row(1, "parked", Value::Null));
        Answer::set(set.row(letter_row(2, "skipped", text("id is no UUID"))))
    };
    let answers = vec![two(), two(), two(), Answer::set(letters()), two()];
    let (mock, store) = scripted(answers).await;
    let filter = DeadLetterFilter {
        ids: vec![DeadLetterId::new(1), DeadLetterId::new(2)],
        consumer: Some(consumer("sink")),
        key: Some(key("a")),
        state: Some(DeadLetterState::Parked),
    };
    let listed = store.list(&filter, Some(DeadLetterId::new(9)), 50).await.expect("listed");
    let request = asked(&mock, "dead_letter_list");
    assert_eq!(json_of(&request, 0), json!([{"i": 1}, {"i": 2}]));
    let values = [text("sink"), int(0xca97_8112), text("a"), text("parked"), int(9), int(50)];
    assert_eq!(request.values()[1..], values);
    assert_eq!(listed[0].attempts, u32::MAX);
    assert_eq!(listed[0].parked_at, Timestamp::from_millis(70));
    let Entry::Record(record) = &listed[0].entry else { panic!("{:?}", listed[0]) };
    assert_eq!(record.event.id().as_uuid(), &EVENT_ID);
    let Entry::Malformed(malformed) = &listed[1].entry else { panic!("{:?}", listed[1]) };
    assert_eq!((malformed.reason.as_str(), malformed.raw.as_ref()), ("id is no UUID", &b"{}"[..]));
    store.list(&DeadLetterFilter::default(), None, usize::MAX).await.expect("listed");
    let request = asked(&mock, "dead_letter_list");
    let any = [text("[]"), text(""), Value::Null, text(""), text("")];
    assert_eq!(request.values()[..5], any);
    let at: Position = ulid(5, 6).into();
    let found = store.at(&consumer("sink"), &p(0, 8), &at).await.expect("looked up");
    assert!(found.is_some());
    let values = [text("sink"), text("0/8"), bytes(at.as_bytes())];
    assert_eq!(asked(&mock, "dead_letter_at").values(), values);
    assert_eq!(store.at(&consumer("sink"), &p(0, 8), &at).await.expect("none"), None);
    let limit = BatchLimit { records: 7, bytes: 10 };
    let free = store.released(&consumer("sink"), &p(0, 8), limit).await.expect("released");
    assert_eq!(free.len(), 1, "one at least, and no more than the bytes allow");
    let values = [text("sink"), text("0/8"), int(7), int(10)];
    assert_eq!(asked(&mock, "dead_letter_released").values(), values);
}

#[tokio::test]
async fn dead_letters_are_written_moved_and_counted() {
    let count = |number| Answer::set(Set::of(&[("", Type::BigInt)]).row([int(number)]));
    let blocked = Set::of(&[("n", Type::Int)]).row([int(2)]).row([int(0)]);
    let answers = vec![
        Answer::set(Set::numbers(&[2])),
        Answer::set(blocked),
        count(4),
        Answer::nothing(),
        Answer::nothing(),
        count(1),
        count(2),
        count(3),
    ];
    let (mock, store) = scripted(answers).await;
    let sink = consumer("sink");
    let event = event("a", "{}").identified(|| EventId::from_uuid(EVENT_ID));
    let record =
        Record { position: ulid(5, 6).into(), appended_at: Timestamp::from_millis(5), event };
    let malformed = Malformed {
        position: ulid(5, 7).into(),
        appended_at: Timestamp::from_millis(6),
        key: None,
        reason: "no id".to_owned(),
        raw: (&b"raw"[..]).into(),
    };
    let letter = |entry| NewDeadLetter {
        entry,
        state: DeadLetterState::Parked,
        reason: "refused".to_owned(),
        attempts: 3,
    };
    let new = [letter(Entry::Record(record)), letter(Entry::Malformed(malformed))];
    assert_eq!(store.park(&lease(), &sink, &new).await.expect("parked"), 2);
    let request = asked(&mock, "dead_letter_park");
    let rows = json_of(&request, 5);
    assert_eq!(
        (&rows[0]["i"], &rows[0]["h"]),
        (&json!(EVENT_ID.to_string()), &json!(0xca97_8112u32))
    );
    assert_eq!(
        (&rows[1]["w"], &rows[1]["k"], &rows[1]["o"]),
        (&json!("no id"), &Json::Null, &json!(2))
    );
    let positions = [ulid(5, 6).to_bytes(), ulid(5, 7).to_bytes()].concat();
    assert_eq!(request.values()[6..], [bytes(b"{}raw"), bytes(&positions)]);
    let keys = [key("a"), key("b"), key("c")];
    let found = store.blocked(&sink, &p(0, 8), &keys).await.expect("looked up");
    assert_eq!(found, [key("a"), key("c")]);
    let request = asked(&mock, "dead_letter_blocked");
    assert_eq!(json_of(&request, 2)[0], json!({"n": 0, "h": 0xca97_8112u32, "k": "a"}));
    assert_eq!(store.blocking(&sink, &p(0, 8)).await.expect("counted"), 4);
    let ids = [DeadLetterId::new(5)];
    store.resolve(&lease(), &sink, &ids).await.expect("resolved");
    assert_eq!(asked(&mock, "dead_letter_resolve").values()[5], text("[{\"i\":5}]"));
    let skipped = DeadLetterState::Skipped;
    store.refuse(&lease(), ids[0], skipped, "again", 2).await.expect("refused");
    let values = [int(5), text("skipped"), text("again"), int(2)];
    assert_eq!(asked(&mock, "dead_letter_refuse").values()[4..], values);
    let waiting = DeadLetterState::Waiting;
    assert!(store.refuse(&lease(), ids[0], waiting, "", 0).await.is_err());
    let all = DeadLetterFilter::default();
    assert_eq!(store.requeue(&all).await.expect("requeued"), 1);
    let values = [text("parked"), text("skipped"), text("requeued")];
    assert_eq!(asked(&mock, "dead_letter_transit").values()[5..], values);
    assert_eq!(store.skip(&all).await.expect("skipped"), 2);
    let values = [text("parked"), text("requeued"), text("skipped")];
    assert_eq!(asked(&mock, "dead_letter_transit").values()[5..], values);
    assert_eq!(store.discard(&all).await.expect("dropped"), 3);
    asked(&mock, "dead_letter_discard");
    assert!(store.blocked(&sink, &p(0, 8), &[]).await.expect("nothing to ask").is_empty());
}

fn document(id: &str) -> Document {
    Document {
        id: id.to_owned(),
        partition_key: "p".to_owned(),
        document_type: "contact".to_owned(),
        data: (&b"{\"a\":1}"[..]).into(),
        ttl_seconds: -1,
        deleted: false,
        etag: ETag::new(""),
        written_at: Timestamp::default(),
    }
}

fn document_set(numbers: &[i64]) -> Answer {
    let set = Set::of(&[
        ("id", Type::NVarChar(255)),
        ("partition_key", Type::NVarChar(255)),
        ("type", Type::NVarChar(255)),
        ("data", Type::VarBinaryMax),
        ("ttl", Type::BigInt),
        ("deleted", Type::Int),
        ("etag", Type::Binary(8)),
        ("written_ms", Type::BigInt),
        ("number", Type::BigInt),
    ]);
    Answer::set(numbers.iter().fold(set, |set, number| {
        let etag = bytes(&[0, 0, 0, 0, 0, 0, 7, 0xd1]);
        let id = text(&format!("c{number}"));
        let data = bytes(b"{\"a\":1}");
        let ttl = int(-1);
        set.row([id, text("p"), text("contact"), data, ttl, int(0), etag, int(66), int(*number)])
    }))
}

#[tokio::test]
async fn documents_are_read_by_id_and_by_page() {
    let answers = vec![
        document_set(&[1]),
        document_set(&[1]),
        document_set(&[]),
        document_set(&[1, 2, 5]),
        document_set(&[5]),
    ];
    let (mock, store) = scripted(answers).await;
    let Ok(DocumentRead::Found(found)) = store.read_document("p", "c1", None).await else {
        panic!("it is there")
    };
    assert_eq!(found.etag.as_str(), "\"00000000000007d1\"");
    assert_eq!(found.written_at, Timestamp::from_millis(66));
    assert_eq!(asked(&mock, "document_read").values(), [text("p"), text("c1")]);
    let known = store.read_document("p", "c1", Some(&found.etag)).await;
    assert_eq!(known.expect("read"), DocumentRead::NotModified);
    let none = store.read_document("p", "c2", None).await;
    assert_eq!(none.expect("read"), DocumentRead::NotFound);
    let spaced = store.read_document("p", "c2 ", None).await;
    assert_eq!(spaced.expect("nobody is asked"), DocumentRead::NotFound);
    let document_type = "contact".to_owned();
    let mut request = PageRequest { document_type, size: 2, continuation: None };
    let page = store.read_page(&request).await.expect("a page");
    assert_eq!(page.documents.len(), 2);
    request.continuation = page.continuation;
    let page = store.read_page(&request).await.expect("a page");
    assert_eq!((page.documents.len(), page.continuation), (1, None));
    assert_eq!(asked(&mock, "document_page").values(), [text("contact"), int(2), int(3)]);
    request.continuation = Some("0".repeat(32));
    let foreign = store.read_page(&request).await.map(drop).expect_err("foreign");
    assert_eq!(foreign.kind(), ErrorKind::Permanent);
}

fn verdict(outcome: i64, n: i64, etag: Value) -> Set {
    let set = Set::of(&[("outcome", Type::Int), ("n", Type::Int), ("etag", Type::Binary(8))]);
    set.row([int(outcome), int(n), etag])
}

fn batch(events: Vec<NewEvent>) -> DocumentBatch {
    let operations = vec![
        DocumentOperation::Create(document("a")),
        DocumentOperation::Delete { id: "b".to_owned(), if_match: None },
    ];
    DocumentBatch { partition_key: "p".to_owned(), operations, events }
}

#[tokio::test]
async fn a_commit_saves_documents_and_events_in_one_transaction() {
    let version = |last: u8| bytes(&[0, 0, 0, 0, 0, 0, 0, last]);
    let saved = Set::of(&[("n", Type::Int), ("etag", Type::Binary(8))]);
    let saved = saved.row([int(0), version(1)]).row([int(1), version(2)]);
    let answers = vec![
        Answer::nothing(),
        Answer::Sets(vec![verdict(0, 2, Value::Null), saved]),
        Answer::nothing(),
        Answer::nothing(),
    ];
    let (mock, store) = scripted(answers).await;
    let saved = store.commit(batch(vec![event("a", "{}")])).await.expect("saved");
    let tags: Vec<&str> = saved.iter().map(|one| one.etag.as_str()).collect();
    assert_eq!(tags, ["\"0000000000000001\"", "\"0000000000000002\""]);
    let seen = mock.seen();
    let texts: Vec<&str> = seen[2..].iter().map(|one| one.sql().trim()).collect();
    assert_eq!((texts[0], texts[3]), ("begin transaction;", "commit transaction;"));
    assert_eq!(json_of(&seen[3], 0)[0]["p"], "c");
    let Value::Text(lock) = &seen[3].values()[3] else { panic!("no lock") };
    assert!(lock.starts_with("[postrider]/document/") && lock.len() < 255, "{lock}");
    assert_eq!(json_of(&seen[4], 0)[0]["k"], "a");
    assert_eq!(mock.logins().len(), 1, "the connection stays");
}

#[tokio::test]
async fn a_commit_that_can_not_be_says_why_and_rolls_back() {
    let current = bytes(&[0, 0, 0, 0, 0, 0, 0, 9]);
    for (outcome, n, etag, says) in [
        (1, 0, Value::Null, "Conflict { id: \"a\" }"),
        (2, 1, Value::Null, "NotFound { id: \"b\" }"),
        (3, 1, current, "0000000000000009"),
        (4, 0, Value::Null, "transient"),
    ] {
        let none = Set::of(&[("n", Type::Int), ("etag", Type::Binary(8))]);
        let refused = Answer::Sets(vec![verdict(outcome, n, etag), none]);
        let (mock, store) = scripted(vec![Answer::nothing(), refused, Answer::nothing()]).await;
        let error = store.commit(batch(Vec::new())).await.expect_err("refused");
        assert!(format!("{error:?}").contains(says), "{error:?}");
        assert!(mock.seen()[4].sql().contains("rollback transaction"));
        assert_eq!(mock.logins().len(), 1);
    }
}

#[tokio::test]
async fn an_event_that_was_appended_before_is_a_conflict_of_its_id() {
    let twice = NewEvent::builder(key("k"), Topic::new("t").expect("valid"), {
        EventType::new("E").expect("valid")
    })
    .id(EventId::from_uuid(EVENT_ID))
    .build()
    .expect("valid");
    let known = Set::of(&[("id", Type::UniqueIdentifier)]).row([Value::Uuid(EVENT_ID)]);
    let answers = vec![
        Answer::nothing(),
        Answer::Error(vec![], 2627, 14, "duplicate"),
        Answer::nothing(),
        Answer::set(known),
    ];
    let (mock, store) = scripted(answers).await;
    let operations = Vec::new();
    let batch = DocumentBatch { partition_key: "p".to_owned(), operations, events: vec![twice] };
    let error = store.commit(batch).await.expect_err("twice");
    let DocumentError::Conflict { id } = &error else { panic!("{error:?}") };
    assert_eq!(id, &EVENT_ID.to_string());
    assert_eq!(json_of(&asked(&mock, "append_known"), 0), json!([{"i": EVENT_ID.to_string()}]));
}

#[tokio::test]
async fn what_is_too_large_or_misnamed_is_refused_before_anybody_is_asked() {
    let (mock, store) = scripted(Vec::new()).await;
    let mut large = document("a");
    large.data = vec![b'1'; 2 * 1024 * 1024 + 1].into();
    for changed in [
        large,
        Document { id: "x".repeat(256), ..document("a") },
        Document { id: "a ".to_owned(), ..document("a") },
        Document { partition_key: "q".to_owned(), ..document("a") },
        Document { ttl_seconds: 0, ..document("a") },
    ] {
        let operations = vec![DocumentOperation::Create(changed)];
        let partition_key = "p".to_owned();
        let batch = DocumentBatch { partition_key, operations, events: Vec::new() };
        assert!(store.commit(batch).await.is_err());
    }
    let partition_key = "p".to_owned();
    let none = DocumentBatch { partition_key, operations: Vec::new(), events: Vec::new() };
    assert!(store.commit(none).await.expect("nothing to do").is_empty());
    assert_eq!(mock.seen().len(), 2, "opening alone");
}

#[tokio::test]
async fn retention_tells_what_went_and_the_horizon() {
    let set = || {
        let columns =
            [("events", Type::BigInt), ("more", Type::Int), ("horizon", Type::Binary(16))];
        Set::of(&columns)
    };
    let pruned = set().row([int(7), int(1), bytes(&ulid(5, 6).to_bytes())]);
    let counted = set().row([int(3), int(0), Value::Null]);
    let answers = vec![Answer::nothing(), Answer::set(pruned), Answer::set(counted)];
    let (mock, store) = scripted(answers).await;
    let keep = Duration::from_secs(60);
    let policy = RetentionPolicy { keep, batch: 500, dry_run: false };
    let pruned = store.prune(Some(&lease()), &policy).await.expect("pruned");
    let horizon = Some(ulid(5, 6).into());
    assert_eq!(pruned, Pruned { events: 7, horizon, more: true });
    let seen = mock.seen();
    assert_eq!(seen[2].values(), [int(500)], "expired documents");
    let values = asked(&mock, "retention_prune").values().to_vec();
    assert_eq!(values[2..], [text("relay-1"), int(7), int(60_000), int(500), int(0)]);
    let policy = RetentionPolicy { keep: Duration::MAX, dry_run: true, ..policy };
    let pruned = store.prune(None, &policy).await.expect("counted");
    assert_eq!(pruned, Pruned { events: 3, horizon: None, more: false });
    let values = asked(&mock, "retention_prune").values().to_vec();
    assert_eq!(values[..4], [text(""), text(""), text(""), Value::Null]);
    assert_eq!(values[4..], [int(50 * 366 * 86_400_000), int(500), int(1)]);
}

#[tokio::test]
async fn the_inbox_runs_a_handler_once_and_forgets_what_is_old() {
    let first = |number| Answer::set(Set::numbers(&[number]));
    let count = Answer::set(Set::of(&[("", Type::BigInt)]).row([int(4)]));
    let done = Answer::nothing;
    let answers =
        vec![done(), first(1), done(), done(), first(0), done(), done(), first(-1), done(), count];
    let (mock, store) = scripted(answers).await;
    let inbox = SqlServerInbox::new(store.clone(), InboxOptions::default()).expect("sound");
    let (sink, id) = (consumer("sink"), EventId::from_uuid(EVENT_ID));
    let handle = || inbox.handle(&sink, id, |_| Box::pin(async { Ok::<_, Error>("ran") }));
    assert_eq!(handle().await.expect("the first time"), Handled::Now("ran"));
    let request = &mock.seen()[3];
    assert_eq!(request.values()[..2], [text("sink"), Value::Uuid(EVENT_ID)]);
    assert_eq!(handle().await.expect("again"), Handled::Before);
    let late = handle().await.expect_err("no lock");
    assert_eq!(late.kind(), ErrorKind::Transient);
    assert_eq!(inbox.prune(&sink, None, 50).await.expect("pruned"), 4);
    let fortnight = 14 * 24 * 60 * 60 * 1_000;
    let values = [text("sink"), int(fortnight), Value::Null, int(50)];
    assert_eq!(asked(&mock, "inbox_prune").values(), values);
    let short = InboxOptions { dedup_window: Duration::ZERO, ..InboxOptions::default() };
    assert!(SqlServerInbox::new(store, short).is_err());
}

/// A database without tables, which says of itself what has been made in it.
async fn empty_database(cut: Option<&'static str>) -> Mock {
    let (mut version, mut partitions, mut cut) = (0, false, cut);
    Mock::start(move |request| {
        let sql = request.sql();
        if sql.contains("as version") {
            return Answer::set(Set::numbers(&[version]));
        }
        if sql.contains("select store_id") && !partitions {
            return Answer::set(Set::of(&[("store_id", Type::UniqueIdentifier)]));
        }
        if cut.is_some_and(|at| sql.contains(at)) {
            cut = None;
            return Answer::Close;
        }
        if sql.contains("(version) values (2)") {
            version = 2;
        }
        partitions |= sql.contains("create_partitions] @P1");
        opening(request).unwrap_or_else(Answer::nothing)
    })
    .await
}

#[tokio::test]
async fn init_runs_every_batch_of_the_scripts_and_makes_the_partitions() {
    let mock = empty_database(None).await;
    let options = options(&mock).on_open(SchemaOnOpen::Migrate).schema("mail").partitions(3);
    SqlServerStore::open(options.clone()).await.expect("the tables are made");
    let seen = mock.seen();
    let said: Vec<&str> = seen.iter().map(Request::sql).collect();
    assert!(said[1].contains("sp_getapplock") && said[1].contains("[mail]/init"), "{}", said[1]);
    assert!(said[2].contains("as version"), "behind the lock it is looked at again");
    let script = schema_sql(&options);
    let batches: Vec<&str> = script.split("\ngo\n").collect();
    let made = said.iter().filter(|sql| batches.iter().any(|batch| batch.trim() == sql.trim()));
    assert!(made.count() > 40, "all batches are sent");
    let first = seen.iter().find(|one| one.sql().contains("create_partitions] @P1"));
    assert_eq!(first.expect("the first partitions").values(), [int(3)]);
    assert!(said.iter().all(|sql| !sql.contains("[changefeed]")), "the schema's own name");
    let before = seen.len();
    SqlServerStore::open(options).await.expect("it is there already");
    assert_eq!(mock.seen().len(), before + 2, "nothing is made again");
}

/// Cut between the tables and the partitions, a program that only opens says what is missing, and
/// one that migrates makes it.
#[tokio::test]
async fn an_init_that_was_cut_short_behind_the_tables_is_made_up_for() {
    let mock = empty_database(Some("create_partitions] @P1")).await;
    let migrate = options(&mock).on_open(SchemaOnOpen::Migrate);
    SqlServerStore::open(migrate.clone()).await.expect_err("the connection went");
    let error = SqlServerStore::open(options(&mock)).await.expect_err("no partitions");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("call create_partitions"), "{error}");
    SqlServerStore::open(migrate).await.expect("it makes the partitions");
    SqlServerStore::open(options(&mock)).await.expect("they are there");
}

#[tokio::test]
async fn tables_that_another_program_has_made_meanwhile_are_left_alone() {
    let mut looks = 0;
    let mock = Mock::start(move |request| {
        if request.sql().contains("as version") {
            looks += 1;
            return Answer::set(Set::numbers(&[if looks == 1 { 0 } else { 2 }]));
        }
        opening(request).unwrap_or_else(Answer::nothing)
    })
    .await;
    let migrate = options(&mock).on_open(SchemaOnOpen::Migrate);
    SqlServerStore::open(migrate).await.expect("the store opens");
    assert!(!mock.seen().iter().any(|one| one.sql().contains("create table")));
}

#[tokio::test]
async fn no_table_is_made_without_the_lock() {
    let mock = Mock::start(|request| {
        let sql = request.sql();
        if sql.contains("as version") {
            return Answer::set(Set::numbers(&[0]));
        }
        match sql.contains("/init") {
            true => Answer::Error(vec![], 77_103, 16, "changefeed: another program makes it"),
            false => Answer::nothing(),
        }
    })
    .await;
    let migrate = options(&mock).on_open(SchemaOnOpen::Migrate);
    let error = SqlServerStore::open(migrate).await.expect_err("it is not granted");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(!mock.seen().iter().any(|one| one.sql().contains("create table")));
}

#[tokio::test]
async fn advice_names_the_setting_and_the_remedy() {
    let settings = |snapshots, level| Answer::set(Set::numbers(&[snapshots, level]));
    let none = Set::of(&[("snapshots", Type::Int), ("compatibility", Type::Int)]);
    let answers = vec![
        settings(1, 130),
        settings(1, 130),
        settings(0, 120),
        settings(0, 120),
        Answer::set(none),
    ];
    let (_mock, store) = scripted(answers).await;
    assert!(store.warnings().await.expect("asked").is_empty());
    assert!(store.weaker().await.expect("asked").is_empty());
    assert!(store.warnings().await.expect("asked")[0].contains("COMPATIBILITY_LEVEL = 130"));
    assert!(store.weaker().await.expect("asked")[0].contains("READ_COMMITTED_SNAPSHOT ON"));
    assert!(store.weaker().await.expect("asked").is_empty());
}
