//! Replay: sends a range of a feed to a sink again, beside the checkpoints.
//!
//! What lives here: reading a range and sending it in order per key. What does not: leases and
//! checkpoints, which a replay neither needs nor moves.
//! Invariant: ids stay the same unless new ones are asked for; a key's order is the feed's.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{
    Attempt, Clock, ConsumerName, Entry, Error, EventId, Feed, Jitter, Key, PartitionId, Position,
    Publish, Reaction, Record, Result, RetryPolicy, Sink, StartFrom, Successor, Timestamp, react,
};

use crate::lanes::{Lanes, NewItem, Origin, Turn};
use crate::reading::PAGE;

/// What to send again, and how.
pub struct Replay {
    /// The outbox's feed.
    pub feed: Arc<dyn Feed>,
    /// Where to; none counts only.
    pub sink: Option<Arc<dyn Sink>>,
    /// Waits between attempts.
    pub clock: Arc<dyn Clock>,
    /// Where to begin.
    pub from: StartFrom,
    /// Events appended after this time are left out.
    pub to_time: Option<Timestamp>,
    /// Events after this position are left out.
    pub to_position: Option<Position>,
    /// Events of this key only.
    pub key: Option<Key>,
    /// Makes a new id for each event, so that brokers and inboxes do not drop it as a repetition.
    pub new_ids: Option<Box<dyn Fn() -> EventId + Send + Sync>>,
    /// How failures are met; after the last attempt an event is reported and passed over.
    pub retry: RetryPolicy,
}

/// How far a replay is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplayProgress {
    /// Records read.
    pub read: u64,
    /// Events that match.
    pub matched: u64,
    /// Events that the sink confirmed.
    pub published: u64,
    /// Those of them that the broker said it had already: it may not have published them again.
    pub duplicates: u64,
    /// Append time of the last record read.
    pub at: Timestamp,
}

/// What a replay did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReplayReport {
    /// The totals.
    pub progress: ReplayProgress,
    /// Events that were not confirmed: position and reason; at most the first 1,000.
    pub failed: Vec<(Position, String)>,
    /// How many were not confirmed.
    pub failures: u64,
}

/// The first tries may fail without a word: most troubles pass within a second.
const TOLD_FROM_ROUND: u32 = 4;
const MAX_REPORTED: usize = 1_000;

impl Replay {
    /// Sends the range, partition by partition, calling `progress` after each page.
    ///
    /// # Errors
    /// When the feed can't be read, or the start is refused (the text names the horizon).
    pub async fn run(
        &self,
        consumer: &ConsumerName,
        mut progress: impl FnMut(&ReplayProgress) + Send,
    ) -> Result<ReplayReport> {
        let mut report = ReplayReport::default();
        let begun = self.feed.partitions(consumer).await?;
        let mut partitions: Vec<_> = begun.into_iter().map(|begun| (begun, None)).collect();
        let mut at = 0;
        while let Some((partition, from)) = partitions.get(at).cloned() {
            at += 1;
            let after = match from {
                Some(after) => after,
                None => self.beginning(&partition).await?,
            };
            let successors = self.partition(&partition, after, &mut report, &mut progress).await?;
            for Successor { partition, from } in successors {
                if partitions.iter().all(|(known, _)| *known != partition) {
                    partitions.push((partition, Some(from)));
                }
            }
        }
        Ok(report)
    }

    async fn beginning(&self, partition: &PartitionId) -> Result<Position> {
        match &self.from {
            StartFrom::Oldest => Ok(Position::START),
            StartFrom::Now => self.feed.head(partition).await,
            StartFrom::Time(time) => self.feed.position_at(partition, *time).await,
            StartFrom::After(position) => Ok(position.clone()),
        }
    }

    /// Sends what follows a place of a partition; who takes over from there.
    async fn partition(
        &self,
        partition: &PartitionId,
        mut after: Position,
        report: &mut ReplayReport,
        progress: &mut (impl FnMut(&ReplayProgress) + Send),
    ) -> Result<Vec<Successor>> {
        loop {
            let mut page = self.feed.read(partition, &after, PAGE).await?;
            if page.entries.is_empty()
                && let Some(successors) = page.ended.take()
            {
                return Ok(successors);
            }
            if self.feed.is_head(&page, &after) {
                return Ok(Vec::new());
            }
            after = page.position;
            let mut records = Vec::new();
            let mut past_the_end = false;
            for entry in page.entries {
                let Entry::Record(record) = entry else { continue };
                if self.is_past(&record) {
                    past_the_end = true;
                    break;
                }
                report.progress.read += 1;
                report.progress.at = record.appended_at;
                if self.key.as_ref().is_none_or(|key| key == record.event.key()) {
                    report.progress.matched += 1;
                    records.push(self.prepared(record));
                }
            }
            if let Some(sink) = &self.sink {
                self.send(&**sink, partition, records, report).await;
            }
            progress(&report.progress);
            if past_the_end {
                return Ok(Vec::new());
            }
        }
    }

    fn is_past(&self, record: &Record) -> bool {
        let late = self.to_time.is_some_and(|to| record.appended_at > to);
        // Positions of a feed are ULIDs, ordered bytewise.
        let beyond =
            self.to_position.as_ref().is_some_and(|to| record.position.as_bytes() > to.as_bytes());
        late || beyond
    }

    fn prepared(&self, record: Record) -> Record {
        match &self.new_ids {
            Some(fresh) => Record { event: record.event.with_id(fresh()), ..record },
            None => record,
        }
    }

    /// Sends one page; returns when each of its events is confirmed or reported.
    async fn send(
        &self,
        sink: &dyn Sink,
        partition: &PartitionId,
        records: Vec<Record>,
        report: &mut ReplayReport,
    ) {
        let mut lanes = Lanes::default();
        for (seq, record) in records.into_iter().enumerate() {
            let (entry, origin) = (Entry::Record(record), Origin::Feed(seq as u64));
            lanes.push(NewItem { entry, origin, earlier_attempts: 0, sendable: true });
        }
        // Rounds in a row in which the sink did not take something.
        let mut troubled = 0u32;
        while lanes.any_ready(|_| true) {
            let limits = sink.capabilities();
            let mut calls = Vec::new();
            while calls.len() < limits.max_in_flight.max(1) {
                let mut records = Vec::new();
                let turn = if lanes.has_ready(Turn::First) { Turn::First } else { Turn::Again };
                let chains = lanes.take(turn, &limits, &mut records, |_| true);
                if records.is_empty() {
                    break;
                }
                calls.push((chains, records));
            }
            let sending =
                calls.iter().map(|(_, records)| sink.publish(Publish::new(partition, records)));
            let outcomes = futures_util::future::join_all(sending).await;
            let mut again: Option<(Duration, Error)> = None;
            for ((chains, _), outcomes) in calls.into_iter().zip(outcomes) {
                let wait = self.settle(&mut lanes, chains, outcomes, report);
                again = longer(again, wait);
            }
            troubled = if again.is_some() { troubled.saturating_add(1) } else { 0 };
            if let Some((pause, error)) = again {
                // A person waits for this command; without a word a sink that is down looks
                // like one that is slow.
                if troubled >= TOLD_FROM_ROUND && troubled.is_power_of_two() {
                    tracing::warn!(
                        %partition, attempt = troubled, error = %error.chain(),
                        "the sink does not take everything; trying on"
                    );
                }
                self.clock.sleep(pause).await;
            }
        }
    }

    /// Applies one call's outcomes; returns how long to wait before the next, and why.
    fn settle(
        &self,
        lanes: &mut Lanes,
        chains: crate::lanes::Chains,
        outcomes: Vec<postrider_core::Outcome>,
        report: &mut ReplayReport,
    ) -> Option<(Duration, Error)> {
        use postrider_core::Outcome;
        let mut outcomes = outcomes.into_iter();
        let mut again = None;
        for (lane, taken) in chains.taken {
            let mut left = true;
            let mut failure = None;
            let (mut done, mut given_back) = (0, false);
            for outcome in outcomes.by_ref().take(taken) {
                match outcome {
                    _ if failure.is_some() || given_back => {}
                    Outcome::Confirmed | Outcome::Duplicate => {
                        left = lanes.pop(lane).1;
                        done += 1;
                        report.progress.duplicates +=
                            u64::from(matches!(outcome, Outcome::Duplicate));
                    }
                    Outcome::Failed(error) => failure = Some(error),
                    Outcome::HeldBack if done > 0 => given_back = true,
                    Outcome::HeldBack => {
                        failure = Some(Error::transient("the sink held the event back"));
                    }
                }
            }
            report.progress.published += done;
            if let Some(error) = failure {
                let tries = lanes.tries(lane);
                tries.all = tries.all.saturating_add(1);
                match react(error.kind(), Attempt(tries.all), &self.retry, Jitter::NONE) {
                    Reaction::RetryAfter(wait) => again = longer(again, Some((wait, error))),
                    Reaction::Park | Reaction::Skip | Reaction::Halt | Reaction::StepDown => {
                        let (item, more) = lanes.pop(lane);
                        left = more;
                        report.failures += 1;
                        if report.failed.len() < MAX_REPORTED {
                            report.failed.push((item.entry.position().clone(), error.chain()));
                        }
                    }
                }
            }
            if left {
                lanes.make_ready(lane);
            }
        }
        again
    }
}

/// The longer of two waits, with its reason.
fn longer(a: Option<(Duration, Error)>, b: Option<(Duration, Error)>) -> Option<(Duration, Error)> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.0 > a.0 { b } else { a }),
        (a, b) => a.or(b),
    }
}
