//! What a person should know of a container before it costs an event.
//!
//! What lives here: the forecast of unsent events that will expire, and the database's own time.
//! What does not: events that have expired (`expired.rs`).
//! Invariant: ages are judged in the database's time, which is what it writes into a document of
//! ours.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use postrider_core::{Checkpoints, ConsumerProgress, Result, Timestamp};
use serde_json::json;

use crate::CosmosStore;
use crate::control::{Write, Written, id};

const CLOCK: &str = "clock";
/// How often the clock's document is tried again when others write it, too.
const TRIES: u32 = 20;
/// For so long the database's time is reckoned from what it said last.
const RECKONED: Duration = Duration::from_secs(60);
/// An event's time to live should be this many times the longest it has waited: below that a
/// person is told.
const TTL_TO_LAG: u32 = 4;

/// What the database said of its time last.
#[derive(Debug, Default)]
pub(crate) struct ClockSeen(Mutex<Option<(Instant, Timestamp)>>);

impl CosmosStore {
    /// The database's time, to the second.
    pub(crate) async fn now(&self) -> Result<Timestamp> {
        let seen = *self.inner.clock.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, time)) = seen
            && at.elapsed() < RECKONED
        {
            return Ok(time.plus(at.elapsed()));
        }
        let (control, id) = (&self.inner.control, id(CLOCK, &[]));
        for _ in 0..TRIES {
            let found = control.read::<serde_json::Value>(&id).await?;
            let beats = found.as_ref().and_then(|found| found.body["beat"].as_u64());
            let next = json!({ "beat": beats.unwrap_or(0).wrapping_add(1) });
            let document = control.document(CLOCK, &id, &next)?;
            let write = match found {
                Some(found) => Write::Replace(document, found.etag),
                None => Write::Create(document),
            };
            if let Written::All(_) = control.write(&[write]).await? {
                break;
            }
        }
        // Whoever wrote it last, just now: its time is the database's.
        let time = control.read::<serde_json::Value>(&id).await?;
        let time = time.map_or_else(Timestamp::default, |found| found.written_at);
        *self.inner.clock.0.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((Instant::now(), time));
        Ok(time)
    }

    /// How long until the oldest unsent event of a standing expires; none where none is unsent.
    fn expires_in(&self, progress: &ConsumerProgress, now: Timestamp) -> Option<Duration> {
        let oldest = progress.oldest_pending_at?;
        let ttl = Duration::from_secs(self.inner.event_ttl_seconds.unsigned_abs());
        Some(ttl.saturating_sub(now.since(oldest)))
    }

    /// Shows as a metric how long the unsent events still have.
    pub(crate) fn tell_expiry(&self, all: &[ConsumerProgress], now: Timestamp) {
        let left = all.iter().filter_map(|progress| self.expires_in(progress, now)).min();
        // With nothing unsent an event that came now would have its whole time to live.
        let ttl = Duration::from_secs(self.inner.event_ttl_seconds.unsigned_abs());
        let left = left.unwrap_or(ttl);
        metrics::gauge!("postrider_seconds_until_unsent_event_expires").set(left.as_secs_f64());
    }

    /// What a person should look at now, a sentence each, with the remedy.
    ///
    /// # Errors
    /// When the containers can't be read.
    pub async fn advice(&self) -> Result<Vec<String>> {
        let ttl = Duration::from_secs(self.inner.event_ttl_seconds.unsigned_abs());
        let now = self.now().await?;
        let mut told = Vec::new();
        for progress in self.progress().await? {
            let Some(left) = self.expires_in(&progress, now) else { continue };
            let lag = ttl.saturating_sub(left);
            if lag.saturating_mul(TTL_TO_LAG) < ttl {
                continue;
            }
            let (consumer, partition) = (&progress.consumer, &progress.partition);
            told.push(match left.is_zero() {
                false => format!(
                    "consumer {consumer} has events in range {partition} that expire unsent in {} \
                     s: let it catch up, or raise the documents' ttl (event_ttl is {} s)",
                    left.as_secs(),
                    ttl.as_secs()
                ),
                true => format!(
                    "consumer {consumer} has events in range {partition} that are past their time \
                     to live of {} s, and unsent: the database deletes them at any moment",
                    ttl.as_secs()
                ),
            });
        }
        let expired = self.inner.expired.count();
        if expired > 0 {
            told.push(format!(
                "{expired} events were deleted before this process could read them; compare with \
                 the entities' lastSeq, and raise event_ttl above the longest outage"
            ));
        }
        Ok(told)
    }
}
