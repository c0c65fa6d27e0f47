//! From a sink's outcomes to the window, a retry, or the dead letters.
//!
//! What lives here: applying what `react` decided. What does not: the decision itself.
//! Invariant: of a chain only what comes before its first failure is confirmed; the rest is sent
//! again in the same order.

use std::cmp::Reverse;
use std::sync::atomic::Ordering;
use std::time::Duration;

use postrider_core::{
    Attempt, DeadLetterState, Error, ErrorKind, NewDeadLetter, Outcome, Reaction, RetryPolicy,
    react,
};

use super::{Exit, HOLD_BACK_AT_MOST, Pipeline, Published};
use crate::health::Failure;
use crate::lanes::{Item, LaneId, Origin, Turn};
use crate::status::SinkState;
use crate::store_ops::StoreOp;
use crate::window::Fate;

/// How often lanes that fill the memory are looked for.
const ROOM_EVERY: Duration = Duration::from_millis(100);
/// The first attempts of an event may fail without a word: most troubles pass within a second.
const TOLD_FROM_ATTEMPT: u32 = 4;

impl Pipeline {
    /// Applies the outcomes of one call.
    pub(super) fn settle(&mut self, published: Published) {
        let Published { turn, chains, outcomes } = published;
        let now = self.set.desk.clock.elapsed();
        let mut outcomes = outcomes.into_iter();
        let mut failures: Vec<(LaneId, Error)> = Vec::new();
        let mut confirmed = 0u64;
        for (lane, taken) in chains.taken {
            let failure = self.settle_chain(lane, taken, &mut outcomes, &mut confirmed);
            failures.extend(failure.map(|error| (lane, error)));
        }
        self.calls.ended(turn, confirmed, failures.len(), now);
        // Who fails where others get through tells nothing of the sink.
        let began = (confirmed == 0).then_some(self.health.successes());
        if confirmed > 0 {
            if self.health.is_open() {
                // It is over: who waited for it need not wait for the end of a long back-off.
                self.lanes.make_waiting_ready(|tries| !tries.asked);
            }
            if self.health.succeeded(confirmed, now) {
                tracing::info!(
                    partition = %self.partition(), sink = %self.set.desk.consumer,
                    "the sink takes events again"
                );
            }
            let status = &self.set.status;
            status.published.fetch_add(confirmed, Ordering::Relaxed);
            status.moved(now);
            status.set_state(SinkState::Flowing);
        }
        for (lane, error) in failures {
            self.set.status.failures.fetch_add(1, Ordering::Relaxed);
            self.failed(lane, error, began);
        }
    }

    /// Confirms a chain up to its first failure, which it returns.
    fn settle_chain(
        &mut self,
        lane: LaneId,
        taken: usize,
        outcomes: &mut impl Iterator<Item = Outcome>,
        confirmed: &mut u64,
    ) -> Option<Error> {
        let mut failure = None;
        let mut left = false;
        let mut done = 0;
        // What the sink gave back unsent behind what it confirmed: it only took too long.
        let mut given_back = false;
        for _ in 0..taken {
            let missing =
                || Outcome::Failed(Error::transient("the sink gave no outcome for this event"));
            match outcomes.next().unwrap_or_else(missing) {
                // Sent again, under the same id.
                _ if failure.is_some() || given_back => {}
                Outcome::Confirmed => {
                    left = self.confirm_head(lane);
                    done += 1;
                }
                Outcome::Duplicate => {
                    self.set.status.duplicates.fetch_add(1, Ordering::Relaxed);
                    left = self.confirm_head(lane);
                    done += 1;
                }
                Outcome::Failed(error) => failure = Some(error),
                Outcome::HeldBack if done > 0 => given_back = true,
                Outcome::HeldBack => {
                    failure = Some(Error::transient("the sink held the event back"));
                }
            }
        }
        *confirmed += done;
        if failure.is_none() && left {
            self.lanes.make_ready(lane);
        }
        failure
    }

    /// Removes a confirmed head; says whether the lane has more.
    fn confirm_head(&mut self, lane: LaneId) -> bool {
        let (item, left) = self.lanes.pop(lane);
        match item.origin {
            Origin::Feed(seq) => self.window.finish(seq, Fate::Published),
            Origin::DeadLetter(id) => {
                self.letters_ended += 1;
                self.ops.push(StoreOp::Resolve { ids: vec![id] });
            }
        }
        left
    }

    /// Decides what follows a failure of a lane's head, and does it. `began` is what a first
    /// failure in its call tells of the sink.
    pub(super) fn failed(&mut self, lane: LaneId, error: Error, began: Option<u64>) {
        let now = self.set.desk.clock.elapsed();
        let jitter = self.jitter();
        let policy = self.set.options.retry.clone();
        let key = self.lanes.key(lane).clone();
        let was_letter = self.lanes.head(lane).earlier_attempts > 0;
        let tries = self.lanes.tries(lane);
        if tries.all == 0 {
            tries.began = began.filter(|_| !was_letter);
        }
        let was_open = self.health.is_open();
        let failure = Failure { kind: error.kind(), began: tries.began };
        if self.health.failed(&key, failure, &policy, jitter, now) {
            // Once for an outage: it may last for days.
            tracing::warn!(
                partition = %self.partition(), sink = %self.set.desk.consumer,
                error = %error.chain(),
                "the sink takes no events: an outage; they wait, and it is tried on"
            );
        }
        if self.health.is_open() && !was_open {
            // Those that were not tried yet tell the most.
            self.calls.next(Turn::First);
        }
        if self.health.is_outage() {
            self.set.status.set_state(SinkState::Outage { reason: error.chain() });
        }
        let successes = self.health.successes();
        let tries = self.lanes.tries(lane);
        tries.all = tries.all.saturating_add(1);
        // While the sink takes nothing at all, or asks for patience, no attempt is used up.
        let patience = matches!(error.kind(), ErrorKind::Throttled { .. });
        if successes > tries.successes_seen && !patience {
            tries.counted = tries.counted.saturating_add(1);
            tries.successes_seen = successes;
        }
        tries.asked = matches!(error.kind(), ErrorKind::Throttled { retry_after: Some(_) });
        tries.reason = error.chain();
        self.set.status.failed(now, error.chain());
        let (all, counted) = (tries.all, tries.counted);
        let reaction = if counted >= policy.max_attempts {
            react(error.kind(), Attempt(counted), &policy, jitter)
        } else {
            let endless = RetryPolicy { max_attempts: u32::MAX, ..policy };
            react(error.kind(), Attempt(all.min(u32::MAX - 1)), &endless, jitter)
        };
        match reaction {
            Reaction::RetryAfter(wait) => {
                self.tell_of_failure(lane, all, &error, now);
                self.lanes.make_wait(lane);
                self.retries.push(Reverse((now + wait, lane)));
            }
            Reaction::Park => self.give_up(lane, DeadLetterState::Parked, &error),
            Reaction::Skip => self.give_up(lane, DeadLetterState::Skipped, &error),
            Reaction::Halt => {
                self.lanes.make_wait(lane);
                self.begin_drain(Some(error));
            }
            Reaction::StepDown => self.step_down(
                &error,
                "the sink says that another relay is at work; this worker stops",
            ),
        }
    }

    /// Ends at once, and lets go of the lease.
    pub(super) fn step_down(&mut self, error: &Error, why: &'static str) {
        tracing::warn!(
            partition = %self.partition(), sink = %self.set.desk.consumer,
            epoch = self.set.desk.lease.epoch().get(), error = %error.chain(), "{why}"
        );
        // The partition's other sinks stop as well: only a fresh lease ends the doubt.
        self.set.trust.lose();
        self.exit = Some(Exit::LeaseLost);
    }

    /// A line for an event that goes on failing: ever rarer, however many do, and none while an
    /// outage explains it.
    fn tell_of_failure(&mut self, lane: LaneId, attempt: u32, error: &Error, now: Duration) {
        let told = attempt >= TOLD_FROM_ATTEMPT && attempt.is_power_of_two();
        if !told || self.health.is_open() || !self.failures.is_due(now) {
            return;
        }
        tracing::warn!(
            partition = %self.partition(), sink = %self.set.desk.consumer,
            position = %self.lanes.head(lane).entry.position(), attempt, error = %error.chain(),
            keys_waiting = self.lanes.waiting_count() + 1,
            "an event was not taken; its key waits, and it is tried on"
        );
    }

    fn give_up(&mut self, lane: LaneId, state: DeadLetterState, error: &Error) {
        let reason = error.chain();
        let item = self.lanes.head(lane);
        // A letter keeps its earlier attempts, and these are added to them.
        let attempts = self.lanes.tries_of(lane).all;
        tracing::warn!(
            partition = %self.partition(), sink = %self.set.desk.consumer,
            position = %item.entry.position(), error = %reason,
            attempt = item.earlier_attempts.saturating_add(attempts),
            "an event can't be delivered and becomes a dead letter"
        );
        match state {
            DeadLetterState::Skipped => self.skip_head(lane, reason, attempts),
            DeadLetterState::Parked | DeadLetterState::Waiting | DeadLetterState::Requeued => {
                self.park_lane(lane, state, reason, attempts);
            }
        }
    }

    /// The head is given up and the lane goes on.
    fn skip_head(&mut self, lane: LaneId, reason: String, attempts: u32) {
        let (item, left) = self.lanes.pop(lane);
        let state = DeadLetterState::Skipped;
        match item.origin {
            Origin::Feed(seq) => {
                let letter = NewDeadLetter { entry: item.entry, state, reason, attempts };
                self.park(vec![letter], vec![seq], None);
            }
            Origin::DeadLetter(id) => {
                self.letters_ended += 1;
                self.ops.push(StoreOp::Refuse { id, state, reason, attempts });
            }
        }
        if left {
            self.lanes.make_ready(lane);
        }
    }

    /// The head takes `state` and all behind it wait, in order, among the dead letters.
    pub(super) fn park_lane(
        &mut self,
        lane: LaneId,
        state: DeadLetterState,
        reason: String,
        attempts: u32,
    ) {
        let key = self.lanes.key(lane).clone();
        let mut items = self.lanes.pop_all(lane).into_iter();
        let head = items.next().expect("a lane has a head");
        let (mut letters, mut seqs) = (Vec::new(), Vec::new());
        match head.origin {
            Origin::Feed(seq) => {
                letters.push(NewDeadLetter { entry: head.entry, state, reason, attempts });
                seqs.push(seq);
            }
            Origin::DeadLetter(id) => {
                self.letters_ended += 1;
                self.ops.push(StoreOp::Refuse { id, state, reason, attempts });
            }
        }
        for Item { entry, origin, .. } in items {
            // A released letter behind the head is among the dead letters already.
            let Origin::Feed(seq) = origin else {
                self.letters_ended += 1;
                continue;
            };
            let reason = "waits behind an earlier event of its key".to_owned();
            let state = DeadLetterState::Waiting;
            letters.push(NewDeadLetter { entry, state, reason, attempts: 0 });
            seqs.push(seq);
        }
        if !letters.is_empty() {
            self.park(letters, seqs, Some(key));
        }
    }

    /// A lane between attempts that holds the whole window up goes to the dead letters for now,
    /// already requeued, so that the others' checkpoint can move.
    pub(super) fn set_aside_the_oldest(&mut self) {
        let oldest = self.window.oldest();
        for lane in self.lanes.waiting(|item| item.origin == Origin::Feed(oldest)) {
            self.set_aside(lane);
        }
    }

    /// Whether lanes between attempts may be what fills the memory, and it is time to look. A
    /// backlog fills it, too, for as long as it lasts: all lanes are looked through ten times a
    /// second at most, and only if some wait.
    pub(super) fn lacks_room(&mut self, now: Duration) -> bool {
        let lacks = self.lanes.bytes() >= self.set.budget_bytes / 4 * 3
            && !self.retries.is_empty()
            && !self.health.is_open()
            && now >= self.room_at;
        if lacks {
            self.room_at = now + ROOM_EVERY;
        }
        lacks
    }

    /// Lanes that have failed for seconds while the sink takes others go to the dead letters for
    /// now, the oldest first, until there is room: or those of a destination that is missing would
    /// fill the memory, and nothing more be read for the others.
    pub(super) fn set_aside_who_fails_on(&mut self) {
        let mut lanes = self.lanes.waiting(|item| matches!(item.origin, Origin::Feed(_)));
        lanes.retain(|lane| self.lanes.tries_of(*lane).all > TOLD_FROM_ATTEMPT);
        lanes.sort_unstable_by_key(|lane| match self.lanes.head(*lane).origin {
            Origin::Feed(seq) => Some(seq),
            Origin::DeadLetter(_) => None,
        });
        for lane in lanes {
            if self.lanes.bytes() < self.set.budget_bytes / 2 {
                break;
            }
            self.set_aside(lane);
        }
    }

    /// Whether one key keeps the checkpoint, and with it other keys' letters, back for too long. In
    /// an outage nothing is gained by letting them go.
    pub(super) fn holds_letters_back(&mut self, now: Duration) -> bool {
        let oldest = self.window.oldest();
        if self.oldest.0 != oldest || self.window.len() == 0 {
            self.oldest = (oldest, now);
        }
        let stuck = now.saturating_sub(self.oldest.1) >= HOLD_BACK_AT_MOST;
        if stuck {
            // All lanes are looked through: once a second at most.
            self.oldest.1 = now.saturating_sub(HOLD_BACK_AT_MOST - Duration::from_secs(1));
        }
        stuck && self.blocking > 0 && !self.health.is_open()
    }

    pub(super) fn set_aside(&mut self, lane: LaneId) {
        let tries = self.lanes.tries_of(lane);
        let (reason, attempts) = (tries.reason.clone(), tries.all);
        let reason = match reason.is_empty() {
            true => "set aside, not tried: the sink took nothing when the relay stopped".to_owned(),
            false => format!("set aside between attempts: {reason}"),
        };
        self.park_lane(lane, DeadLetterState::Requeued, reason, attempts);
    }
}
