//! What every store promises of an append.
//!
//! What lives here: visibility, identity and limits of appended events. What does not: reading.
//! Invariant: an event has exactly the fate of the transaction it was appended in.

use postrider_core::limits::{MAX_APPEND_EVENTS, MAX_PAYLOAD_BYTES};
use postrider_core::{ContentType, ErrorKind, Event, EventType, NewEvent, Result, Topic};

use super::{StoreHarness, append, partition, read_all};
use crate::samples::{event, event_with_id, foreign_event, fresh_id, key, number, rich_event};

/// An event is invisible while its transaction is open and visible once it has committed.
pub async fn events_are_seen_after_commit_and_not_before<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let mut transaction = harness.begin().await;
    harness.append(&mut transaction, &[event("a", 1)]).await.expect("the append is accepted");
    let store = harness.store();
    assert!(read_all(&*store, &partition(0, 1)).await.is_empty(), "it is not committed");
    harness.commit(transaction).await.expect("the commit succeeds");
    assert_eq!(read_all(&*store, &partition(0, 1)).await.len(), 1);
}

/// A rolled-back event never appears, and the ones around it do.
pub async fn a_rolled_back_append_leaves_nothing<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[event("a", 1)]).await;
    let mut transaction = harness.begin().await;
    harness.append(&mut transaction, &[event("a", 2)]).await.expect("the append is accepted");
    harness.rollback(transaction).await;
    append(&harness, &[event("a", 3)]).await;
    assert_eq!(numbers(&harness).await, [1, 3]);
}

/// A transaction that is dropped, as by a panic or an early return, is rolled back.
pub async fn a_dropped_transaction_leaves_nothing<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let mut transaction = harness.begin().await;
    harness.append(&mut transaction, &[event("a", 1)]).await.expect("the append is accepted");
    drop(transaction);
    append(&harness, &[event("a", 2)]).await;
    assert_eq!(numbers(&harness).await, [2]);
}

/// Events of one transaction come in the order of their appends.
pub async fn order_within_a_transaction_is_kept<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let mut transaction = harness.begin().await;
    for chunk in [1..4, 4..5, 5..101] {
        let events: Vec<NewEvent> = chunk.map(|n| event(&format!("k{}", n % 3), n)).collect();
        harness.append(&mut transaction, &events).await.expect("the append is accepted");
    }
    harness.commit(transaction).await.expect("the commit succeeds");
    assert_eq!(numbers(&harness).await, (1..101).collect::<Vec<u64>>());
}

/// Every attribute and every byte is read as it was appended.
pub async fn an_event_comes_back_unchanged<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let empty = NewEvent::builder(key("k"), topic("t"), kind("E")).id(fresh_id()).build();
    let empty = empty.expect("an empty payload is allowed");
    let events = [rich_event(fresh_id()), foreign_event(fresh_id()), empty];
    append(&harness, &events).await;
    let read = read_all(&*harness.store(), &partition(0, 1)).await;
    let expected = events.map(|new| new.identified(fresh_id));
    let read: Vec<Event> = read.into_iter().map(|record| record.event).collect();
    assert_eq!(read, expected);
    let headers: Vec<_> = expected.iter().map(|event| event.headers().clone()).collect();
    assert_eq!(read.iter().map(|event| event.headers().clone()).collect::<Vec<_>>(), headers);
}

/// An event without an id gets one that differs from all others and is what `append` returned.
pub async fn an_event_without_an_id_gets_one<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let ids = append(&harness, &[event("a", 1), event("a", 1), event("b", 1)]).await;
    let read = read_all(&*harness.store(), &partition(0, 1)).await;
    assert_eq!(read.iter().map(|record| record.event.id()).collect::<Vec<_>>(), ids);
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    for id in ids {
        assert_eq!(id.as_uuid().get_version_num(), 7, "a store makes UUIDv7");
    }
}

/// An id that is there already is refused, within one transaction and across two, for good.
pub async fn the_same_id_twice_is_refused<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let id = fresh_id();
    append(&harness, &[event_with_id(id, "a", 1)]).await;
    let again = append_and_commit(&harness, &[event("a", 2), event_with_id(id, "b", 3)]).await;
    assert_eq!(again.map_err(|error| error.kind()), Err(ErrorKind::Permanent));
    let other = fresh_id();
    let twice = [event_with_id(other, "a", 4), event_with_id(other, "a", 5)];
    let twice = append_and_commit(&harness, &twice).await;
    assert_eq!(twice.map_err(|error| error.kind()), Err(ErrorKind::Permanent));
    assert_eq!(numbers(&harness).await, [1], "nothing of a refused transaction stays");
}

/// When asked to, an append leaves out what is there already and adds the rest.
pub async fn the_same_id_twice_can_be_ignored<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let id = fresh_id();
    append(&harness, &[event_with_id(id, "a", 1)]).await;
    let mut transaction = harness.begin().await;
    let events = [event_with_id(id, "a", 2), event("a", 3)];
    let ids = harness.append_ignoring_repeats(&mut transaction, &events).await;
    assert_eq!(ids.expect("repeats are no error")[0], id, "it answers for each event");
    harness.commit(transaction).await.expect("the commit succeeds");
    assert_eq!(numbers(&harness).await, [1, 3]);
}

/// The business row and the event are both there or both absent.
pub async fn an_event_and_the_business_row_share_one_fate<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let mut transaction = harness.begin().await;
    harness.write_row(&mut transaction, "order-1", "placed").await;
    harness.append(&mut transaction, &[event("order-1", 1)]).await.expect("accepted");
    harness.rollback(transaction).await;
    assert_eq!(harness.read_row("order-1").await, None);
    assert!(numbers(&harness).await.is_empty());
    let mut transaction = harness.begin().await;
    harness.write_row(&mut transaction, "order-1", "placed").await;
    harness.append(&mut transaction, &[event("order-1", 1)]).await.expect("accepted");
    harness.commit(transaction).await.expect("the commit succeeds");
    assert_eq!(harness.read_row("order-1").await.as_deref(), Some("placed"));
    assert_eq!(numbers(&harness).await, [1]);
}

/// A payload above the limit is no event at all, so that no store ever sees it.
pub async fn an_oversize_payload_is_refused_before_any_io<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let error = large_event(MAX_PAYLOAD_BYTES + 1).map(drop).expect_err("it is too large");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(numbers(&harness).await.is_empty());
}

/// A payload of the largest size is stored and read back, byte for byte.
pub async fn the_largest_payload_comes_back_whole<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let large = large_event(MAX_PAYLOAD_BYTES).expect("it is just within the limit");
    append(&harness, std::slice::from_ref(&large)).await;
    let read = read_all(&*harness.store(), &partition(0, 1)).await;
    assert_eq!(read.len(), 1);
    let expected = large.identified(fresh_id);
    assert!(read[0].event.payload() == expected.payload(), "the bytes differ");
}

/// An append above the limit of events is refused, and its transaction leaves nothing.
pub async fn too_many_events_are_refused_whole<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let events = vec![event("a", 1); MAX_APPEND_EVENTS + 1];
    let mut transaction = harness.begin().await;
    let refused = harness.append(&mut transaction, &events).await.map(drop);
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::Permanent));
    harness.rollback(transaction).await;
    assert!(numbers(&harness).await.is_empty());
}

async fn append_and_commit<H: StoreHarness>(harness: &H, events: &[NewEvent]) -> Result<()> {
    let mut transaction = harness.begin().await;
    match harness.append(&mut transaction, events).await {
        Ok(_) => harness.commit(transaction).await,
        Err(error) => {
            harness.rollback(transaction).await;
            Err(error)
        }
    }
}

async fn numbers<H: StoreHarness>(harness: &H) -> Vec<u64> {
    let records = read_all(&*harness.store(), &partition(0, 1)).await;
    records.iter().map(|record| number(&record.event)).collect()
}

fn large_event(bytes: usize) -> Result<NewEvent> {
    let bytes: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    let octets = ContentType::new("application/octet-stream").expect("a valid media type");
    NewEvent::builder(key("large"), topic("t"), kind("E")).payload(octets, bytes).build()
}

fn topic(text: &str) -> Topic {
    Topic::new(text).expect("a valid topic")
}

fn kind(text: &str) -> EventType {
    EventType::new(text).expect("a valid type")
}
