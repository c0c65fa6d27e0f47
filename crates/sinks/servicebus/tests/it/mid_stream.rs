//! Troubles amid a stream of events, as a relay goes through them.
//!
//! What lives here: a sink that is given events one after another, a trouble that begins and ends
//! meanwhile, and that all of them are there at last, in order, without a new sink. What does not:
//! the kind of each condition (`failures.rs`).
//! Invariant: time is the emulator's and the sink's own; a trouble lasts until it was felt.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{ErrorKind, Outcome, Record};
use postrider_servicebus_emulator::Status;
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use tokio::time::timeout;

use crate::{Bus, Moved, QUEUE, ids, publish, record};

const AGAIN: ErrorKind = ErrorKind::Transient;
/// The emulator's text names four seconds.
const THROTTLED: ErrorKind = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(4)) };
const FULL: ErrorKind = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(10)) };
/// So often a trouble is felt before it ends.
const FELT: usize = 3;

struct Stream {
    bus: Bus,
    clock: Arc<Moved>,
    sink: ServiceBus,
}

impl Stream {
    async fn start() -> Self {
        let bus = Bus::start().await;
        let clock = Arc::new(Moved::default());
        let config = ServiceBusConfig { timeout_ms: 1_000, ..bus.config() };
        let sink = ServiceBus::new(&config, clock.clone()).expect("valid");
        Self { bus, clock, sink }
    }

    /// Begins the trouble at the tenth of thirty events and ends it once it was felt. What was
    /// felt has this kind and, the first time, says this.
    async fn through(
        &self,
        (kind, says): (ErrorKind, &str),
        begin: impl Fn(&Self),
        end: impl Fn(&Self),
    ) {
        let events: Vec<Record> = (0..30).map(|number| record(number, "k", b"{}")).collect();
        let mut felt = Vec::new();
        let streaming = async {
            for (at, event) in events.iter().enumerate() {
                if at == 10 {
                    begin(self);
                }
                loop {
                    match publish(&self.sink, std::slice::from_ref(event)).await.remove(0) {
                        Outcome::Confirmed => break,
                        Outcome::Failed(error) => felt.push(error),
                        other => panic!("{other:?}"),
                    }
                    if felt.len() == FELT {
                        end(self);
                    }
                }
            }
        };
        timeout(crate::DEADLINE, streaming).await.expect("it flows again");
        assert!(felt.len() >= FELT, "{felt:?}");
        assert!(felt[0].to_string().contains(says), "{felt:?}");
        assert!(felt.iter().all(|error| error.kind() == kind || error.kind() == AGAIN), "{felt:?}");
        assert!(felt.iter().any(|error| error.kind() == kind), "{felt:?}");
        let mut arrived = self.bus.session("k");
        arrived.dedup();
        assert_eq!(arrived, ids(&events));
    }
}

#[tokio::test]
async fn an_entity_that_is_disabled_and_enabled_again() {
    for status in [Status::Disabled, Status::SendDisabled] {
        let stream = Stream::start().await;
        let set = |status| move |on: &Stream| on.bus.emulator.faults().set_status(QUEUE, status);
        let felt = (AGAIN, "com.microsoft:entity-disabled");
        stream.through(felt, set(status), set(Status::Active)).await;
    }
}

#[tokio::test]
async fn throttling_for_thirty_seconds() {
    let stream = Stream::start().await;
    let time = Duration::from_secs(30);
    let begin = |on: &Stream| on.bus.emulator.faults().throttle_for(QUEUE, time);
    let felt = (THROTTLED, "com.microsoft:server-busy");
    stream.through(felt, begin, |on| on.bus.emulator.advance(time)).await;
    assert_eq!(stream.bus.tap.connections(), 1, "it is no reason to connect anew");
}

#[tokio::test]
async fn an_entity_that_is_full_for_a_while() {
    let stream = Stream::start().await;
    let set = |full| move |on: &Stream| on.bus.emulator.faults().set_full(QUEUE, full);
    stream.through((FULL, "amqp:resource-limit-exceeded"), set(true), set(false)).await;
    assert_eq!(stream.bus.tap.connections(), 1, "it is no reason to connect anew");
}

#[tokio::test]
async fn a_token_that_expires_because_the_sinks_clock_is_behind() {
    let stream = Stream::start().await;
    let time = Duration::from_secs(3_600);
    // The service counts the token as expired, and every other that the sink's clock can make.
    let begin = |on: &Stream| on.bus.emulator.advance(time);
    let felt = (AGAIN, "the credentials are refused");
    stream.through(felt, begin, |on| on.clock.pass(time)).await;
    assert!(stream.bus.tap.tokens() > FELT, "{} tokens", stream.bus.tap.tokens());
}

#[tokio::test]
async fn tokens_that_are_taken_away_and_refused_for_a_while() {
    let stream = Stream::start().await;
    let begin = |on: &Stream| {
        on.bus.emulator.faults().refuse_tokens(u64::MAX);
        on.bus.emulator.faults().expire_tokens();
    };
    let felt = (AGAIN, "the credentials are refused");
    stream.through(felt, begin, |on| on.bus.emulator.faults().refuse_tokens(0)).await;
}

#[tokio::test]
async fn transfers_that_are_stored_and_never_answered_for_a_while() {
    let stream = Stream::start().await;
    let lose = |lost| move |on: &Stream| on.bus.emulator.faults().lose_confirmations(QUEUE, lost);
    stream.through((AGAIN, "whether it was taken is unknown"), lose(u64::MAX), lose(0)).await;
}

#[tokio::test]
async fn credit_that_is_withheld_for_a_while() {
    let stream = Stream::start().await;
    let begin = |on: &Stream| {
        on.bus.emulator.faults().withhold_credit(QUEUE, true);
        on.bus.emulator.faults().detach_links(QUEUE, "amqp:link:detach-forced");
    };
    let end = |on: &Stream| on.bus.emulator.faults().withhold_credit(QUEUE, false);
    stream.through((AGAIN, ""), begin, end).await;
}
