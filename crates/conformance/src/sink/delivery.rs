//! What every sink promises when all goes well.
//!
//! What lives here: fidelity, order, ids, confirmation, closing, secrets. What does not: faults of
//! the receiver.
//! Invariant: what was confirmed is at the receiver, as it was appended.

use std::time::Duration;

use postrider_core::{EventId, NewEvent, Record};

use super::{Delivered, SinkHarness, is_confirmed, publish, publish_all, until_waiting};
use crate::samples::{
    event, event_with_id, foreign_event, fresh_id, record, rich_event, sized_event,
};

pub(super) fn records(events: Vec<NewEvent>) -> Vec<Record> {
    events.into_iter().zip(0..).map(|(event, n)| record(event, n)).collect()
}

pub(super) fn ids(delivered: &[Delivered]) -> Vec<EventId> {
    delivered.iter().map(|one| one.id).collect()
}

async fn assert_arrives<H: SinkHarness>(events: Vec<NewEvent>) {
    let harness = H::fresh().await;
    for one in records(events) {
        let outcomes = publish(&*harness.sink(), std::slice::from_ref(&one)).await;
        assert!(is_confirmed(&outcomes[0]), "{outcomes:?}");
        let delivered = harness.delivered().await;
        assert!(delivered.last() == Some(&Delivered::of(&one.event)), "{:?}", one.event);
    }
}

/// Payload bytes that are no text, every attribute and every header arrive as appended.
pub async fn bytes_and_attributes_arrive_unchanged<H: SinkHarness>() {
    assert_arrives::<H>(vec![rich_event(fresh_id()), event("a", 1)]).await;
}

/// Texts beyond ASCII arrive as appended, whatever the medium allows in its own headers.
pub async fn texts_that_are_not_ascii_arrive_unchanged<H: SinkHarness>() {
    assert_arrives::<H>(vec![foreign_event(fresh_id())]).await;
}

/// An empty payload is a message too, and a large one (within the sink's limit) is not cut.
pub async fn empty_and_large_payloads_arrive_whole<H: SinkHarness>() {
    const MAX: usize = 1024 * 1024;
    let limits = H::fresh().await.sink().capabilities().max_event_bytes;
    let large = limits.map_or(MAX, |limit| limit.min(MAX));
    let template = event("a", 1).identified(fresh_id);
    let empty = NewEvent::builder(
        template.key().clone(),
        template.topic().clone(),
        template.event_type().clone(),
    );
    let empty = empty.build().expect("an empty payload is allowed");
    assert_arrives::<H>(vec![empty, sized_event("a", 2, large)]).await;
}

/// Events of a key arrive in the order in which they were given, over calls as large as the sink
/// takes, and every event is confirmed and arrives once.
pub async fn order_within_a_key_is_kept<H: SinkHarness>() {
    let harness = H::fresh().await;
    let events = records((0..60).map(|n| event(&format!("k{}", n % 4), n)).collect());
    let outcomes = publish_all(&*harness.sink(), &events).await;
    assert!(outcomes.iter().all(is_confirmed), "{outcomes:?}");
    let delivered = harness.delivered().await;
    assert_eq!(delivered.len(), events.len());
    for key in ["k0", "k1", "k2", "k3"] {
        let sent = events.iter().filter(|one| one.event.key().as_str() == key);
        let sent: Vec<EventId> = sent.map(|one| one.event.id()).collect();
        let arrived = delivered.iter().filter(|one| one.key == key);
        let arrived: Vec<EventId> = arrived.map(|one| one.id).collect();
        assert_eq!(arrived, sent, "{key}");
    }
}

/// The same event sent again carries the same id, so that it can be told from a new one.
pub async fn a_redelivery_carries_the_same_id<H: SinkHarness>() {
    let harness = H::fresh().await;
    let id = fresh_id();
    let events = records(vec![event_with_id(id, "a", 1)]);
    for _ in 0..2 {
        let outcomes = publish(&*harness.sink(), &events).await;
        assert!(is_confirmed(&outcomes[0]), "{outcomes:?}");
    }
    let delivered = harness.delivered().await;
    assert!(!delivered.is_empty() && delivered.iter().all(|one| one.id == id), "{delivered:?}");
}

/// A call without events reaches nobody and has no outcomes.
pub async fn an_empty_call_is_answered_with_nothing<H: SinkHarness>() {
    let harness = H::fresh().await;
    assert!(publish(&*harness.sink(), &[]).await.is_empty());
    assert!(harness.delivered().await.is_empty());
}

/// While the receiver has not confirmed, the call does not end; once it has, it does.
pub async fn nothing_is_confirmed_before_the_receiver_has_it<H: SinkHarness>() {
    let harness = H::fresh().await;
    let sink = harness.sink();
    let events = records(vec![event("a", 1)]);
    if !harness.can_hold() {
        // Without a receiver to hold, what counts is that it has the event when the call ends.
        let outcomes = publish(&*sink, &events).await;
        assert!(is_confirmed(&outcomes[0]), "{outcomes:?}");
        assert_eq!(ids(&harness.delivered().await), [events[0].event.id()]);
        return;
    }
    harness.hold().await;
    let mut call = std::pin::pin!(publish(&*sink, &events));
    tokio::select! {
        outcomes = &mut call => panic!("nobody took it, yet {outcomes:?}"),
        () = until_waiting(&harness) => {}
    }
    let early = tokio::time::timeout(Duration::from_millis(50), &mut call).await;
    assert!(early.is_err(), "the receiver is held, yet {early:?}");
    assert!(harness.delivered().await.is_empty());
    harness.release().await;
    let outcomes = call.await;
    assert!(is_confirmed(&outcomes[0]), "{outcomes:?}");
    assert_eq!(ids(&harness.delivered().await), [events[0].event.id()]);
}

/// A call that was dropped leaves the sink able to send the same events again, to a confirmation
/// that is the receiver's own.
pub async fn a_cancelled_call_confirms_nothing<H: SinkHarness>() {
    let harness = H::fresh().await;
    let sink = harness.sink();
    let events = records(vec![event("a", 1)]);
    if harness.can_hold() {
        harness.hold().await;
    }
    {
        let mut call = std::pin::pin!(publish(&*sink, &events));
        tokio::select! {
            biased;
            _ = &mut call => {}
            () = until_waiting(&harness), if harness.can_hold() => {}
            () = tokio::task::yield_now(), if !harness.can_hold() => {}
        }
    }
    if harness.can_hold() {
        assert!(harness.delivered().await.is_empty());
        harness.release().await;
    }
    let outcomes = publish(&*sink, &events).await;
    assert!(is_confirmed(&outcomes[0]), "{outcomes:?}");
    let delivered = harness.delivered().await;
    assert!(delivered.iter().any(|one| *one == Delivered::of(&events[0].event)), "{delivered:?}");
}

/// Closing flushes: everything confirmed is there afterwards, and nothing is confirmed later.
pub async fn what_was_confirmed_is_there_after_closing<H: SinkHarness>() {
    let harness = H::fresh().await;
    let sink = harness.sink();
    let events = records((0..10).map(|n| event(&format!("k{n}"), n)).collect());
    let outcomes = publish_all(&*sink, &events).await;
    assert!(outcomes.iter().all(is_confirmed), "{outcomes:?}");
    sink.close().await.expect("closed");
    let mut delivered = ids(&harness.delivered().await);
    delivered.sort();
    let mut sent: Vec<EventId> = events.iter().map(|one| one.event.id()).collect();
    sent.sort();
    assert_eq!(delivered, sent);
    let late = records(vec![event("late", 11)]);
    let outcomes = publish(&*sink, &late).await;
    let arrived = ids(&harness.delivered().await).contains(&late[0].event.id());
    assert!(!is_confirmed(&outcomes[0]) && !arrived, "nothing is published after closing");
}

/// A check of a receiver that works succeeds and delivers nothing.
pub async fn a_check_finds_a_working_receiver<H: SinkHarness>() {
    let harness = H::fresh().await;
    harness.sink().check().await.expect("the receiver works");
    assert!(harness.delivered().await.is_empty(), "a check is no event");
}

/// The capabilities let a relay work: at least one record, byte, call; one oversize event alone.
pub async fn capabilities_can_be_kept_to<H: SinkHarness>() {
    let harness = H::fresh().await;
    let sink = harness.sink();
    let capabilities = sink.capabilities();
    assert!(capabilities.max_batch_records >= 1 && capabilities.max_in_flight >= 1);
    assert!(capabilities.max_batch_bytes >= 1);
    let fits = capabilities.max_event_bytes.unwrap_or(usize::MAX);
    let bytes = capabilities.max_batch_bytes.min(1024 * 1024).min(fits);
    let events = records((0..3).map(|n| sized_event(&format!("k{n}"), n, bytes)).collect());
    let outcomes = publish_all(&*sink, &events).await;
    assert!(outcomes.iter().all(is_confirmed), "{outcomes:?}");
}

/// No secret of the configuration can be read from what the sink prints of itself, nor from what
/// it says of a failure.
pub async fn secrets_are_never_printed<H: SinkHarness>() {
    let harness = H::fresh().await;
    let mut text = harness.printed();
    let fault = super::ReceiverFault::Unreachable;
    if harness.can(fault) {
        harness.fail_next(1, fault).await;
        let outcomes = publish(&*harness.sink(), &records(vec![event("a", 1)])).await;
        text.push_str(&format!("{outcomes:?}"));
    }
    for secret in harness.secrets() {
        assert!(!secret.is_empty() && !text.contains(&secret), "a secret is printed: {text}");
    }
}
