//! The sink from the outside: what is published stands in the file, byte for byte.
//!
//! What lives here: behaviour through `Sink`, of this sink alone and by the shared suite
//! (`suite.rs`). What does not: failures injected below the file (`log_file.rs`).
//! Invariant: every line is read back by an independent JSON parser.

mod guide;
mod suite;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postrider_core::{
    Clock, ContentType, ErrorKind, EventId, EventType, Headers, Key, NewEvent, Outcome,
    PartitionId, Position, Publish, Record, Sink, Timestamp, Topic,
};
use postrider_sink_jsonl::{JsonLines, JsonlConfig};
use proptest::prelude::*;
use serde_json::value::RawValue;
use uuid::Uuid;

struct Fixed;

#[async_trait::async_trait]
impl Clock for Fixed {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(1_672_671_845_000)
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    async fn sleep(&self, _: Duration) {}
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Line {
    id: Uuid,
    position: String,
    partition: String,
    topic: String,
    key: String,
    r#type: String,
    content_type: String,
    appended_at: String,
    headers: BTreeMap<String, String>,
    data: Option<Box<RawValue>>,
    data_base64: Option<String>,
}

impl Line {
    fn payload(&self) -> Vec<u8> {
        match (&self.data, &self.data_base64) {
            (Some(raw), None) => raw.get().as_bytes().to_vec(),
            (None, Some(text)) => STANDARD.decode(text).expect("base 64"),
            _ => panic!("exactly one of data and dataBase64"),
        }
    }
}

fn record(number: u128, key: &str, content_type: &str, payload: &[u8]) -> Record {
    let mut headers = Headers::new();
    headers.insert("Tenant", "a \"b\" \\ é").expect("valid");
    headers.insert("empty", "").expect("valid");
    let event = NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .id(EventId::from_uuid(Uuid::from_u128(number)))
    .headers(headers)
    .payload(ContentType::new(content_type).expect("valid"), payload.to_vec())
    .build()
    .expect("valid")
    .identified(|| EventId::from_uuid(Uuid::nil()));
    let appended_at = Timestamp::from_millis(1_672_671_845_123);
    Record { position: Position::START, appended_at, event }
}

fn open(config: &JsonlConfig) -> JsonLines {
    JsonLines::new(config, Arc::new(Fixed)).expect("valid settings")
}

async fn publish(sink: &JsonLines, records: &[Record]) -> Vec<Outcome> {
    sink.publish(Publish::new(&PartitionId::numbered(3, 8), records)).await
}

async fn confirm(sink: &JsonLines, records: &[Record]) {
    let outcomes = publish(sink, records).await;
    assert_eq!(outcomes.len(), records.len());
    for outcome in outcomes {
        assert!(matches!(outcome, Outcome::Confirmed), "{outcome:?}");
    }
}

fn lines(path: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(path).expect("readable");
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime")
}

#[tokio::test]
async fn a_line_has_the_documented_members_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    let sink = open(&JsonlConfig::file(&path));
    confirm(&sink, &[record(1, "order-42", "application/json", br#"{"a": 1.0}"#)]).await;
    assert_eq!(
        std::fs::read_to_string(&path).expect("readable"),
        concat!(
            r#"{"id":"00000000-0000-0000-0000-000000000001","#,
            r#""position":"00000000000000000000000000","partition":"3/8","topic":"orders","#,
            r#""key":"order-42","type":"OrderPlaced","contentType":"application/json","#,
            r#""appendedAt":"2023-01-02T15:04:05.123Z","#,
            r#""headers":{"Tenant":"a \"b\" \\ é","empty":""},"data":{"a": 1.0}}"#,
            "\n"
        )
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_payload_comes_back_byte_for_byte(
        key in "[^\\p{Cc}]{1,20}",
        json in any::<bool>(),
        payloads in prop::collection::vec(prop_oneof![
            prop::collection::vec(any::<u8>(), 0..64),
            "[\\[\\]{}\",:0-9 \r\n\\\\]{0,8}".prop_map(String::into_bytes),
            any::<String>().prop_map(|s| serde_json::to_vec_pretty(&[s]).expect("text")),
        ], 1..6),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let content_type = if json { "application/json" } else { "text/plain" };
        let records: Vec<Record> =
            payloads.iter().map(|payload| record(7, &key, content_type, payload)).collect();
        runtime().block_on(confirm(&open(&JsonlConfig::file(&path)), &records));
        let found = lines(&path);
        prop_assert_eq!(found.len(), records.len());
        for (line, record) in found.iter().zip(&records) {
            let event = &record.event;
            prop_assert_eq!(line.payload(), event.payload().to_vec());
            prop_assert_eq!(&line.key, event.key().as_str());
            prop_assert_eq!(EventId::from_uuid(line.id), event.id());
            prop_assert_eq!(&line.content_type, event.content_type().as_str());
            prop_assert_eq!(line.headers.len(), 2);
            prop_assert_eq!(&line.topic, "orders");
            prop_assert_eq!(&line.r#type, "OrderPlaced");
            prop_assert_eq!(&line.partition, "3/8");
            prop_assert_eq!(&line.position, &record.position.to_string());
            prop_assert_eq!(&line.appended_at, "2023-01-02T15:04:05.123Z");
        }
    }
}

/// Several relays share one file, while it is rotated under them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn several_writers_neither_mix_lines_nor_lose_any_across_rotations() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    let config =
        JsonlConfig { rotate_bytes: Some(200_000), fsync: false, ..JsonlConfig::file(&path) };
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..4u128 {
        let sink = open(&config);
        writers.spawn(async move {
            for batch in 0..20u128 {
                let records: Vec<Record> = (0..40u128)
                    .map(|n| {
                        let number = writer * 1_000_000 + batch * 1_000 + n;
                        record(number, &format!("w{writer}"), "application/json", b"[1]")
                    })
                    .collect();
                confirm(&sink, &records).await;
            }
            sink.close().await.expect("closed");
        });
    }
    while let Some(done) = writers.join_next().await {
        done.expect("no writer panics");
    }
    let mut ids = BTreeSet::new();
    let mut files = 0;
    for entry in std::fs::read_dir(folder.path()).expect("listed") {
        let found = lines(&entry.expect("listed").path());
        files += 1;
        // Appends of one writer keep their order within a file.
        let mut last = BTreeMap::new();
        for line in &found {
            let before = last.insert(line.key.clone(), line.id);
            assert!(before.is_none_or(|before| before < line.id));
            assert!(ids.insert(line.id), "once each");
        }
    }
    assert_eq!(ids.len(), 4 * 20 * 40);
    assert!(files >= 3, "{files} files");
}

#[tokio::test]
async fn rotation_keeps_as_many_files_as_asked_and_touches_no_others() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    std::fs::write(folder.path().join("events-notes.jsonl"), "mine").expect("written");
    let config = JsonlConfig { rotate_bytes: Some(1), keep: Some(2), ..JsonlConfig::file(&path) };
    let sink = open(&config);
    for number in 0..6 {
        confirm(&sink, &[record(number, "k", "application/json", b"1")]).await;
    }
    let mut names: Vec<String> = std::fs::read_dir(folder.path())
        .expect("listed")
        .map(|entry| entry.expect("listed").file_name().into_string().expect("text"))
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "events-20230102T150405000Z-003.jsonl",
            "events-20230102T150405000Z-004.jsonl",
            "events-notes.jsonl",
            "events.jsonl",
        ]
    );
}

#[tokio::test]
async fn a_line_torn_by_a_crash_is_gone_at_the_next_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    confirm(&open(&JsonlConfig::file(&path)), &[record(1, "k", "text/plain", b"a")]).await;
    let whole = std::fs::read(&path).expect("readable");
    let torn = [&whole[..], &whole[..whole.len() / 2]].concat();
    std::fs::write(&path, torn).expect("written");
    let sink = open(&JsonlConfig::file(&path));
    sink.check().await.expect("opened");
    assert_eq!(std::fs::read(&path).expect("readable"), whole);
    confirm(&sink, &[record(2, "k", "text/plain", b"b")]).await;
    assert_eq!(lines(&path).len(), 2);
}

/// As another relay's rotation, or logrotate, does it.
#[tokio::test]
async fn a_file_renamed_or_deleted_by_others_is_made_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    let moved = folder.path().join("moved.jsonl");
    let sink = open(&JsonlConfig::file(&path));
    confirm(&sink, &[record(1, "k", "text/plain", b"a")]).await;
    std::fs::rename(&path, &moved).expect("renamed");
    confirm(&sink, &[record(2, "k", "text/plain", b"b")]).await;
    assert_eq!((lines(&moved).len(), lines(&path).len()), (1, 1));
    std::fs::remove_file(&path).expect("deleted");
    confirm(&sink, &[record(3, "k", "text/plain", b"c")]).await;
    assert_eq!(lines(&path).len(), 1);
}

#[tokio::test]
async fn json_with_any_line_break_travels_as_base64() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    let sink = open(&JsonlConfig::file(&path));
    for payload in [&b"[1,\n2]"[..], b"[1,\r2]", b"[1]\n", b" [1]"] {
        confirm(&sink, &[record(1, "k", "application/json", payload)]).await;
        let found = lines(&path).pop().expect("a line");
        assert!(found.data.is_none(), "{payload:?}");
        assert_eq!(found.payload(), payload);
    }
}

#[tokio::test]
async fn an_output_that_cannot_be_written_parks_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let missing = JsonlConfig::file(folder.path().join("no").join("events.jsonl"));
    let sink = open(&missing);
    assert!(sink.check().await.is_err());
    let records = [record(1, "a", "text/plain", b"x"), record(2, "b", "text/plain", b"x")];
    for outcome in publish(&sink, &records).await {
        let Outcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.to_string().contains("create it"), "{error:?}");
    }
    std::fs::create_dir(folder.path().join("no")).expect("created");
    confirm(&sink, &records).await;
}

/// Takes so many bytes, then fails once like a pipe whose reader went away, then takes all.
#[derive(Clone)]
struct Pipe {
    text: Arc<Mutex<Vec<u8>>>,
    left: Arc<Mutex<Option<usize>>>,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut left = self.left.lock().expect("not poisoned");
        let count = match *left {
            Some(0) => {
                *left = None;
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Some(rest) => rest.min(bytes.len()),
            None => bytes.len(),
        };
        if let Some(rest) = left.as_mut() {
            *rest -= count;
        }
        self.text.lock().expect("not poisoned").extend_from_slice(&bytes[..count]);
        Ok(count)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_broken_pipe_is_transient_and_its_torn_line_is_ended_before_the_next() {
    let pipe = Pipe { text: Arc::default(), left: Arc::new(Mutex::new(Some(25))) };
    let sink = JsonLines::to_writer(pipe.clone()).expect("started");
    let records = [record(1, "k", "application/json", b"1")];
    let outcomes = publish(&sink, &records).await;
    let [Outcome::Failed(error)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("start the reader"), "{error}");
    confirm(&sink, &records).await;
    let text = String::from_utf8(pipe.text.lock().expect("not poisoned").clone()).expect("text");
    let (torn, rest) = text.split_once('\n').expect("ended");
    assert_eq!(torn.len(), 25);
    serde_json::from_str::<Line>(rest).expect("a whole line");
}

#[tokio::test]
async fn after_close_nothing_is_confirmed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("events.jsonl");
    let sink = open(&JsonlConfig::file(&path));
    let records = [record(1, "k", "text/plain", b"x")];
    confirm(&sink, &records).await;
    sink.close().await.expect("closed");
    sink.close().await.expect("closing twice is fine");
    assert!(matches!(&publish(&sink, &records).await[..], [Outcome::Failed(_)]));
    assert_eq!(lines(&path).len(), 1);
}
