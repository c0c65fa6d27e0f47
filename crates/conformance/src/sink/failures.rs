//! What every sink promises when its receiver fails.
//!
//! What lives here: kinds, outcomes of each event, and what follows a failure. What does not:
//! retries, which are the relay's.
//! Invariant: a behaviour about a fault that can't happen in the medium has nothing to ask.

use std::time::Duration;

use postrider_core::{Chain, ErrorKind, Outcome};

use super::delivery::{ids, records};
use super::{ReceiverFault, SinkHarness, is_confirmed, publish, publish_all};
use crate::samples::{event, sized_event};

const THROTTLE: ReceiverFault = ReceiverFault::Throttling { retry_after: Duration::from_secs(7) };

fn kind(outcome: &Outcome) -> Option<ErrorKind> {
    match outcome {
        Outcome::Failed(error) => Some(error.kind()),
        Outcome::Confirmed | Outcome::Duplicate | Outcome::HeldBack => None,
    }
}

/// One failure, told by its kind; the same event is taken afterwards.
async fn assert_told<H: SinkHarness>(fault: ReceiverFault, expected: ErrorKind) {
    let harness = H::fresh().await;
    if !harness.can(fault) {
        return;
    }
    harness.fail_next(1, fault).await;
    let events = records(vec![event("a", 1)]);
    let outcomes = publish(&*harness.sink(), &events).await;
    assert_eq!(kind(&outcomes[0]), Some(expected), "{outcomes:?}");
    assert!(harness.delivered().await.is_empty());
    let outcomes = publish(&*harness.sink(), &events).await;
    assert!(is_confirmed(&outcomes[0]), "it is over, yet {outcomes:?}");
    assert_eq!(ids(&harness.delivered().await), [events[0].event.id()]);
}

/// When one event of several fails, the others' outcomes are their own.
pub async fn each_event_has_its_own_outcome<H: SinkHarness>() {
    let harness = H::fresh().await;
    let fault = ReceiverFault::Refusing;
    if !harness.can(fault) {
        return;
    }
    let events = records((0..5).map(|n| event(&format!("k{n}"), n)).collect());
    let poisoned = events[2].event.id();
    harness.fail_event(poisoned, fault).await;
    let outcomes = publish_all(&*harness.sink(), &events).await;
    let confirmed: Vec<bool> = outcomes.iter().map(is_confirmed).collect();
    assert_eq!(confirmed, [true, true, false, true, true], "{outcomes:?}");
    assert_eq!(kind(&outcomes[2]), Some(ErrorKind::Permanent));
    let mut delivered = ids(&harness.delivered().await);
    delivered.sort();
    let mut others: Vec<_> = events.iter().map(|one| one.event.id()).collect();
    others.retain(|id| *id != poisoned);
    others.sort();
    assert_eq!(delivered, others);
}

/// In one call, no later event of a key is sent after one that failed; other keys go on.
pub async fn nothing_of_a_key_follows_its_failure<H: SinkHarness>() {
    let harness = H::fresh().await;
    let fault = ReceiverFault::Refusing;
    let sink = harness.sink();
    if !harness.can(fault) || sink.capabilities().chain == Chain::One {
        return;
    }
    let keys = ["a", "b", "a", "a", "b"];
    let events = records(keys.iter().zip(0..).map(|(key, n)| event(key, n)).collect());
    harness.fail_event(events[2].event.id(), fault).await;
    let outcomes = publish(&*sink, &events).await;
    let confirmed: Vec<bool> = outcomes.iter().map(is_confirmed).collect();
    assert_eq!(confirmed, [true, true, false, false, true], "{outcomes:?}");
    assert!(matches!(outcomes[3], Outcome::HeldBack), "{outcomes:?}");
    let delivered = ids(&harness.delivered().await);
    assert!(!delivered.contains(&events[3].event.id()), "it overtook the one that failed");
}

/// A receiver that can't be reached, or breaks off, may be better later.
pub async fn an_unreachable_receiver_is_transient<H: SinkHarness>() {
    assert_told::<H>(ReceiverFault::Unreachable, ErrorKind::Transient).await;
}

/// A receiver that says no for good is not asked again by the sink itself.
pub async fn a_refusal_is_permanent<H: SinkHarness>() {
    assert_told::<H>(ReceiverFault::Refusing, ErrorKind::Permanent).await;
}

/// A receiver that asks for patience is told apart, with the wait that it named.
pub async fn a_throttled_sink_names_the_wait<H: SinkHarness>() {
    let retry_after = Some(Duration::from_secs(7));
    assert_told::<H>(THROTTLE, ErrorKind::Throttled { retry_after }).await;
}

/// When the confirmation is lost the event's fate is unknown: not confirmed, and sent again under
/// the same id.
pub async fn a_lost_confirmation_is_not_a_confirmation<H: SinkHarness>() {
    let harness = H::fresh().await;
    let fault = ReceiverFault::LosingConfirms;
    if !harness.can(fault) {
        return;
    }
    harness.fail_next(1, fault).await;
    let events = records(vec![event("a", 1)]);
    let outcomes = publish(&*harness.sink(), &events).await;
    assert_eq!(kind(&outcomes[0]), Some(ErrorKind::Transient), "{outcomes:?}");
    let outcomes = publish(&*harness.sink(), &events).await;
    assert!(is_confirmed(&outcomes[0]), "{outcomes:?}");
    let delivered = ids(&harness.delivered().await);
    assert!(delivered.iter().all(|id| *id == events[0].event.id()) && !delivered.is_empty());
}

/// An event above the sink's own limit is refused for good, and the events beside it pass.
pub async fn an_oversize_event_is_refused_and_others_pass<H: SinkHarness>() {
    let harness = H::fresh().await;
    let sink = harness.sink();
    let capabilities = sink.capabilities();
    let Some(limit) = capabilities.max_event_bytes else { return };
    let events = records(vec![event("a", 1), sized_event("b", 2, limit + 1), event("c", 3)]);
    let mut outcomes = Vec::new();
    for one in &events {
        outcomes.extend(publish(&*sink, std::slice::from_ref(one)).await);
    }
    let confirmed: Vec<bool> = outcomes.iter().map(is_confirmed).collect();
    assert_eq!(confirmed, [true, false, true], "{outcomes:?}");
    assert_eq!(kind(&outcomes[1]), Some(ErrorKind::Permanent));
}
