//! The memory sink's own scripts.
//!
//! What lives here: keys, events, outages, latency, counting. What does not: the shared suite.
//! Invariant: a script touches only what it names.

use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::clock::ManualClock;
use postrider_conformance::samples::{event, event_with_id, fresh_id, key, number, record};
use postrider_core::{Capabilities, Clock, ErrorKind, Outcome, PartitionId, Publish, Record, Sink};
use postrider_sink_memory::{Fault, MemorySink};

const REFUSED: Fault = Fault::Refuse(ErrorKind::Permanent);

fn sink() -> (MemorySink, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::default());
    (MemorySink::new(clock.clone()), clock)
}

fn records(keys: &[&str]) -> Vec<Record> {
    keys.iter().zip(0..).map(|(key, n)| record(event(key, n), n)).collect()
}

async fn publish(sink: &MemorySink, records: &[Record]) -> String {
    let outcomes = sink.publish(Publish::new(&PartitionId::numbered(0, 1), records)).await;
    let letter = |outcome: &Outcome| match outcome {
        Outcome::Confirmed => 'c',
        Outcome::Duplicate => 'd',
        Outcome::Failed(_) => 'f',
        Outcome::HeldBack => 'h',
    };
    outcomes.iter().map(letter).collect()
}

fn delivered(sink: &MemorySink) -> Vec<u64> {
    sink.deliveries().iter().map(|delivery| number(&delivery.event)).collect()
}

#[tokio::test]
async fn a_failing_key_fails_until_it_is_mended_and_alone() {
    let (sink, _) = sink();
    let all = records(&["a", "b", "a"]);
    sink.fail_key(key("a"), REFUSED);
    assert_eq!(publish(&sink, &all).await, "fch");
    assert_eq!(publish(&sink, &all[2..]).await, "f");
    sink.mend_key(&key("a"));
    assert_eq!(publish(&sink, &all[2..]).await, "c");
    assert_eq!(delivered(&sink), [1, 2]);
}

#[tokio::test]
async fn a_failing_event_fails_as_often_as_it_was_told() {
    let (sink, _) = sink();
    let all = records(&["a", "b"]);
    sink.fail_event(all[1].event.id(), 2, REFUSED);
    assert_eq!(publish(&sink, &all).await, "cf");
    assert_eq!(publish(&sink, &all[1..]).await, "f");
    assert_eq!(publish(&sink, &all[1..]).await, "c");
}

#[tokio::test]
async fn the_next_events_fail_by_their_number() {
    let (sink, _) = sink();
    sink.fail_next(2, Fault::Refuse(ErrorKind::Transient));
    assert_eq!(publish(&sink, &records(&["a", "b", "c"])).await, "ffc");
}

#[tokio::test]
async fn a_lost_confirmation_leaves_the_event_in_the_log() {
    let (sink, _) = sink();
    let all = records(&["a"]);
    sink.fail_next(1, Fault::LoseConfirm);
    assert_eq!(publish(&sink, &all).await, "f");
    assert_eq!(publish(&sink, &all).await, "c");
    assert_eq!(delivered(&sink), [0, 0]);
}

#[tokio::test]
async fn an_outage_fails_everything_and_the_check() {
    let (sink, _) = sink();
    sink.set_outage(Some(Fault::Refuse(ErrorKind::Transient)));
    assert!(sink.check().await.is_err());
    assert_eq!(publish(&sink, &records(&["a", "b"])).await, "ff");
    sink.set_outage(None);
    assert!(sink.check().await.is_ok());
    assert_eq!(publish(&sink, &records(&["a", "b"])).await, "cc");
}

#[tokio::test]
async fn latency_passes_by_the_clock() {
    let (sink, clock) = sink();
    sink.set_latency(Duration::from_millis(30));
    let all = records(&["a"]);
    let mut call = std::pin::pin!(publish(&sink, &all));
    let early = tokio::select! {
        biased;
        done = &mut call => Some(done),
        () = tokio::task::yield_now() => None,
    };
    assert_eq!(early, None);
    clock.advance(Duration::from_millis(30));
    assert_eq!(call.await, "c");
    assert_eq!(sink.deliveries()[0].at, clock.now());
}

#[tokio::test]
async fn a_window_of_duplicates_stores_an_id_once() {
    let (sink, _) = sink();
    let window = Some(Duration::from_secs(1));
    let sink = sink
        .clone()
        .with_capabilities(Capabilities { dedup_window: window, ..sink.capabilities() });
    let one = vec![record(event_with_id(fresh_id(), "a", 1), 1)];
    assert_eq!(publish(&sink, &one).await, "c");
    assert_eq!(publish(&sink, &one).await, "d");
    assert_eq!(delivered(&sink), [1]);
}

#[tokio::test]
async fn a_counting_sink_counts_and_keeps_nothing() {
    let sink = MemorySink::counting(Arc::new(ManualClock::default()));
    assert_eq!(publish(&sink, &records(&["a", "b", "a"])).await, "ccc");
    assert_eq!(sink.delivered(), 3);
    assert!(sink.deliveries().is_empty());
}

#[tokio::test]
async fn a_cleared_log_is_empty() {
    let (sink, _) = sink();
    publish(&sink, &records(&["a"])).await;
    sink.clear();
    assert_eq!((sink.delivered(), sink.deliveries().len()), (0, 0));
}
