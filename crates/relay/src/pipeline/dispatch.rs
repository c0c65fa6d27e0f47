//! From the lanes to calls of the sink.
//!
//! What lives here: which lanes are sent, and when. What does not: what follows (`settle.rs`).
//! Invariant: events that failed before are sent apart from those that were not tried yet, and take
//! half of the places for calls at most, or all but one once a whole call of them got through: who
//! gets no answer, or a slow one, holds up nobody else.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use postrider_core::{Error, Outcome, Publish, Sink};

use super::{Phase, Pipeline, Published};
use crate::failpoint::failpoint;
use crate::lanes::{Item, Origin, Turn};
use crate::window::Seq;

/// A sink begins to send for this part of a call's time; the rest is for the answers.
const SENDING_SHARE: u32 = 3;
/// After a call with events that failed before, and none of which got through, the next one waits
/// for so long: however many wait for a destination that is missing, they make few calls.
const AGAIN_EVERY: Duration = Duration::from_millis(50);

/// What the calls under way and the last ones tell of the next.
#[derive(Debug)]
pub(super) struct Calls {
    /// Under way with events that failed before.
    again: usize,
    /// When the next such call may begin.
    again_from: Duration,
    /// All events of the last such call got through, as after an outage.
    again_flows: bool,
    last: Turn,
}

impl Default for Calls {
    fn default() -> Self {
        Self { again: 0, again_from: Duration::ZERO, again_flows: false, last: Turn::Again }
    }
}

impl Calls {
    fn began(&mut self, turn: Turn) {
        self.again += usize::from(turn == Turn::Again);
        self.last = turn;
    }

    /// Whose turn is next.
    pub(super) fn next(&mut self, turn: Turn) {
        self.last = turn.other();
    }

    /// A call ended, with so many events confirmed and so many keys failed.
    pub(super) fn ended(&mut self, turn: Turn, confirmed: u64, failed: usize, now: Duration) {
        if turn == Turn::Again {
            self.again -= 1;
            self.again_flows = confirmed > 0 && failed == 0;
            self.again_from = if confirmed > 0 { now } else { now + AGAIN_EVERY };
        }
    }

    fn may(&self, turn: Turn, most: usize, now: Duration) -> bool {
        match turn {
            Turn::First => true,
            Turn::Again => {
                let places = if self.again_flows { most.saturating_sub(1) } else { most / 2 };
                self.again < places.max(1) && self.again_from <= now
            }
        }
    }
}

impl Pipeline {
    /// Starts as many calls as the sink, the circuit and the phase allow.
    pub(super) fn dispatch(&mut self, now: Duration) {
        if self.finishing {
            // What is left belongs to the successors, whose relays may be at work already.
            return;
        }
        while let Some(lane) = self.lanes.take_unsendable() {
            let error = self.why_unsendable(lane);
            self.failed(lane, error, None);
        }
        if matches!(self.phase, Phase::Draining { halted: Some(_), .. }) {
            return;
        }
        self.limits = self.set.sink.capabilities();
        while self.publishes.len() < self.health.allowed(now, self.limits.max_in_flight).calls {
            // By turns, so that neither kind starves the other.
            let turn = self.calls.last.other();
            if !self.call(turn, now) && !self.call(turn.other(), now) {
                return;
            }
        }
    }

    /// Starts a call with ready lanes; says whether there were any that may go.
    fn call(&mut self, turn: Turn, now: Duration) -> bool {
        let most = self.limits.max_in_flight;
        let untried_only = self.health.allowed(now, most).untried_only;
        if !self.calls.may(turn, most, now) || (untried_only && turn == Turn::Again) {
            return false;
        }
        let gaps_below = match self.phase {
            Phase::Running => Seq::MAX,
            Phase::Draining { .. } => self.window.high(),
        };
        let fits = |item: &Item| match item.origin {
            Origin::Feed(seq) => seq < gaps_below,
            Origin::DeadLetter(_) => gaps_below == Seq::MAX,
        };
        let mut records = Vec::new();
        let chains = self.lanes.take(turn, &self.limits, &mut records, fits);
        if records.is_empty() {
            return false;
        }
        self.calls.began(turn);
        self.health.tries();
        self.set.status.calls.fetch_add(1, Ordering::Relaxed);
        let sink = Arc::clone(&self.set.sink);
        let partition = self.partition().clone();
        let timeout = self.set.options.publish_timeout;
        let clock = Arc::clone(&self.set.desk.clock);
        self.publishes.spawn(async move {
            let timeout_after = async {
                clock.sleep(timeout).await;
                timeout
            };
            let publish = Publish::new(&partition, &records).within(timeout / SENDING_SHARE);
            let outcomes = publish_within(&*sink, publish, timeout_after).await;
            Published { turn, chains, outcomes }
        });
        true
    }

    /// When time alone lets the next call through. Whatever else it waits for wakes the loop.
    pub(super) fn next_call_at(&self, now: Duration) -> Option<Duration> {
        let at = |turn| {
            let circuit = self.health.opens_at(turn == Turn::First).unwrap_or_default();
            let pace = if turn == Turn::Again { self.calls.again_from } else { Duration::ZERO };
            let at = circuit.max(pace);
            (at > now && self.lanes.has_ready(turn)).then_some(at)
        };
        at(Turn::First).into_iter().chain(at(Turn::Again)).min()
    }
}

/// One call of the sink. After `timeout` its fate is unknown, which counts as failed.
async fn publish_within(
    sink: &dyn Sink,
    publish: Publish<'_>,
    timeout: impl Future<Output = Duration> + Send,
) -> Vec<Outcome> {
    failpoint!("relay::before_publish");
    let outcomes = tokio::select! {
       biased;
        outcomes = sink.publish(publish) => outcomes,
        waited = timeout => {
            let late = || Error::transient(format!("no confirmation within {waited:?}"));
            publish.records().iter().map(|_| Outcome::Failed(late())).collect()
        }
    };
    failpoint!("relay::after_publish");
    outcomes
}
