//! How far consumers have come, and what an unsent event's time to live leaves them.
//!
//! What lives here: what is pending behind a checkpoint, whether a lease is alive. What does not:
//! checkpoints themselves (`checkpoints.rs`), what a person is told of it (`advice.rs`).
//! Invariant: at the head nothing is pending; a backlog is counted exactly up to a page, and by the
//! time at which its events were written beyond it.

use std::time::Duration;

use azure_data_cosmos::Query;
use azure_data_cosmos::feed::FeedScope;
use futures_util::TryStreamExt;
use postrider_core::{
    BatchLimit, Checkpoint, ConsumerName, ConsumerProgress, Entry, PartitionId, Position, Result,
    Timestamp,
};
use serde_json::json;

use crate::CosmosStore;
use crate::checkpoints::Standing;
use crate::control::Kept;
use crate::error::{cosmos_error, failed};
use crate::event_document::EVENT_TYPE;
use crate::feed::Looks;
use crate::leases::Lease;
use crate::position::Place;
use crate::ranges;

/// Events that are read to be counted; beyond them the database counts.
const COUNTED: BatchLimit = BatchLimit { records: 100, bytes: 16 * 1024 * 1024 };
/// A backlog is counted up to here: each event that is counted costs the container's throughput.
const MOST_COUNTED: u64 = 10_000;
/// The longest time to live that a look at a lease is worth waiting for.
const LONGEST_LOOK: Duration = Duration::from_secs(45);
/// More than a renewal needs to arrive.
const A_MOMENT: Duration = Duration::from_millis(100);

impl CosmosStore {
    /// A consumer's standing, with what is pending behind it.
    pub(crate) async fn standing_progress(
        &self,
        found: Kept<Standing>,
        position: Position,
    ) -> Result<ConsumerProgress> {
        let Kept { body, written_at, .. } = found;
        let partition = PartitionId::new(body.partition.as_str())?;
        let (pending, oldest_pending_at) = match body.ended {
            true => (0, None),
            false => self.pending(&partition, &position).await?,
        };
        Ok(ConsumerProgress {
            consumer: ConsumerName::new(body.consumer.as_str())?,
            partition,
            checkpoint: Checkpoint { position, published: body.published, updated_at: written_at },
            pending,
            oldest_pending_at,
            parked: self.letters_of(&body.consumer, &body.partition).await?,
            dropped: body.dropped,
            ended: body.ended,
        })
    }

    /// How many events lie behind a position, and when the first of them was written.
    async fn pending(
        &self,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<(u64, Option<Timestamp>)> {
        let (mut count, mut oldest, mut after) = (0, None, position.clone());
        // A page may have other documents alone: some looks find the first event, or the head.
        loop {
            let page = self.read_on(partition, &after, COUNTED, Looks::No).await?;
            let moved = page.position != after;
            count += page.entries.len() as u64;
            let first = page.entries.first().map(|entry| match entry {
                Entry::Record(record) => record.appended_at,
                Entry::Malformed(malformed) => malformed.appended_at,
            });
            oldest = oldest.or(first);
            after = page.position;
            if !moved || page.ended.is_some() {
                return Ok((count, oldest));
            }
            if count >= COUNTED.records as u64 {
                let seconds = Place::read(&after)?.seconds();
                return Ok((count + self.written_since(partition, seconds).await?, oldest));
            }
        }
    }

    /// How many events of a range were written after a second.
    async fn written_since(&self, partition: &PartitionId, seconds: u64) -> Result<u64> {
        let place = "count what is pending";
        // One for each: the library adds up nothing over a range.
        let query = Query::from("SELECT VALUE 1 FROM c WHERE c.type = @type AND c._ts > @seconds")
            .with_parameter("@type", json!(EVENT_TYPE))
            .and_then(|query| query.with_parameter("@seconds", json!(seconds)))
            .map_err(failed(place))?;
        let scope = FeedScope::range(ranges::parse(partition)?);
        let mut found = self.container().query_items::<u64>(query, scope, None).await;
        let found = found.as_mut().map_err(|error| cosmos_error(place, error))?;
        let mut count = 0;
        while count < MOST_COUNTED && found.try_next().await.map_err(failed(place))?.is_some() {
            count += 1;
        }
        Ok(count)
    }

    /// Whether a lease is renewed still. A process that never saw it before has to look for its
    /// whole time to live.
    pub(crate) async fn lease_is_alive(&self, group: &str, partition: &str) -> Result<bool> {
        let id = crate::leases::lease_id(group, partition);
        let control = &self.inner.control;
        let Some(first) = control.read::<Lease>(&id).await? else { return Ok(false) };
        let remaining = self.lease_remaining(&id, &first);
        if remaining.is_zero() {
            return Ok(false);
        }
        if remaining > LONGEST_LOOK {
            return Ok(true);
        }
        tokio::time::sleep(remaining + A_MOMENT).await;
        let Some(second) = control.read::<Lease>(&id).await? else { return Ok(false) };
        Ok(!self.lease_remaining(&id, &second).is_zero())
    }
}
