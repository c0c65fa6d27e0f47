//! Checkpoints, the totals beside them, and what is known of each consumer.
//!
//! What lives here: the seam over checkpoint documents. What does not: what is pending
//! (`progress.rs`), dead letters, whose number is counted where they stand.
//! Invariant: a checkpoint moves in the batch that has checked its lease, never back; places of one
//! range are ordered by the documents that one consumer passed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use postrider_core::{
    Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, Error, HeldLease, PartitionId,
    Position, Result, Successor, Tally,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::CosmosStore;
use crate::control::{Control, Kept, MAX_BATCH_OPERATIONS, Write, Written, id};
use crate::position::Place;

const CHECKPOINT: &str = "checkpoint";
/// How often a removal that met another's write is tried again.
const TRIES: u32 = 20;

/// A consumer's standing in one partition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Standing {
    pub(crate) consumer: String,
    pub(crate) partition: String,
    /// Base64; none where it has letters only.
    position: Option<String>,
    pub(crate) published: u64,
    pub(crate) dropped: u64,
    pub(crate) ended: bool,
    /// Under whose leases it moved last.
    group: Option<String>,
    /// Who takes over, once that is decided: letters move to them before it has ended.
    #[serde(default)]
    heirs: Vec<Heir>,
}

/// A successor, as a standing names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Heir {
    partition: String,
    from: String,
}

impl Heir {
    fn of(successor: &Successor) -> Self {
        let partition = successor.partition.as_str().to_owned();
        Self { partition, from: encode(&successor.from) }
    }

    fn successor(&self) -> Result<Successor> {
        let partition = PartitionId::new(self.partition.as_str())?;
        Ok(Successor { partition, from: decode(&self.from)? })
    }
}

pub(crate) fn encode(position: &Position) -> String {
    BASE64.encode(position.as_bytes())
}

pub(crate) fn decode(text: &str) -> Result<Position> {
    let bytes = BASE64.decode(text).map_err(|error| {
        Error::corrupt("a position in the lease container is no base64").with_source(error)
    })?;
    Position::from_bytes(&bytes)
}

impl Standing {
    pub(crate) fn of(consumer: &str, partition: &str) -> Self {
        let (consumer, partition) = (consumer.to_owned(), partition.to_owned());
        Self { consumer, partition, ..Self::default() }
    }

    fn id(&self) -> String {
        id(CHECKPOINT, &[self.consumer.as_bytes(), self.partition.as_bytes()])
    }

    pub(crate) fn position(&self) -> Result<Option<Position>> {
        self.position.as_deref().map(decode).transpose()
    }
}

/// A standing to be changed: as it is kept, or new.
pub(crate) struct Change {
    pub(crate) standing: Standing,
    etag: Option<String>,
}

impl Change {
    pub(crate) async fn read(control: &Control, consumer: &str, partition: &str) -> Result<Self> {
        let new = Standing::of(consumer, partition);
        Ok(match control.read::<Standing>(&new.id()).await? {
            Some(found) => Self { standing: found.body, etag: Some(found.etag) },
            None => Self { standing: new, etag: None },
        })
    }

    /// The write that keeps it.
    pub(crate) fn write(self, control: &Control) -> Result<Write> {
        let document = control.document(CHECKPOINT, &self.standing.id(), &self.standing)?;
        Ok(match self.etag {
            Some(etag) => Write::Replace(document, etag),
            None => Write::Create(document),
        })
    }

    pub(crate) fn is_new(&self) -> bool {
        self.etag.is_none()
    }
}

/// Standings as this process wrote them last, by their documents.
#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<HashMap<String, (Standing, String)>>);

impl Known {
    /// Taken, so that a write whose answer is lost leaves nothing to rely on.
    fn take(&self, id: &str) -> Option<Change> {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        taken.map(|(standing, etag)| Change { standing, etag: Some(etag) })
    }

    fn keep(&self, id: String, standing: Standing, etag: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, (standing, etag));
    }
}

/// Every consumer's standings, by consumer and partition.
pub(crate) async fn standings(
    control: &Control,
    consumer: Option<&ConsumerName>,
) -> Result<Vec<Kept<Standing>>> {
    let mut all = match consumer {
        None => control.query::<Standing>(CHECKPOINT, "", &[], usize::MAX).await?,
        Some(consumer) => {
            let of = [("@consumer", json!(consumer.as_str()))];
            let clause = "AND c.consumer = @consumer";
            control.query::<Standing>(CHECKPOINT, clause, &of, usize::MAX).await?
        }
    };
    all.sort_by(|a, b| {
        (&a.body.consumer, &a.body.partition).cmp(&(&b.body.consumer, &b.body.partition))
    });
    Ok(all)
}

impl CosmosStore {
    /// The successors of a consumer's partition, which are written down before anything is done
    /// for them. Those that were decided before hold, also if the service has split another time
    /// since: letters may be with them already, and each of them ends in turn.
    async fn decided(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<Vec<Successor>> {
        let partition = lease.partition().as_str();
        let control = &self.inner.control;
        let mut under = self.under(lease);
        loop {
            let mut change = Change::read(control, consumer.as_str(), partition).await?;
            if !change.standing.heirs.is_empty() {
                return change.standing.heirs.iter().map(Heir::successor).collect();
            }
            change.standing.heirs = successors.iter().map(Heir::of).collect();
            if under.write(vec![change.write(control)?]).await? {
                return Ok(successors.to_vec());
            }
        }
    }
}

#[async_trait]
impl Checkpoints for CosmosStore {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        let id = Standing::of(consumer.as_str(), partition.as_str()).id();
        let Some(found) = self.inner.control.read::<Standing>(&id).await? else {
            return Ok(None);
        };
        let Some(position) = found.body.position()? else { return Ok(None) };
        let (published, updated_at) = (found.body.published, found.written_at);
        Ok(Some(Checkpoint { position, published, updated_at }))
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        let ahead = Place::read(to)?.ordinal();
        let partition = lease.partition().as_str();
        let control = &self.inner.control;
        let id = Standing::of(consumer.as_str(), partition).id();
        let mut under = self.under(lease);
        loop {
            let mut change = match self.inner.known.take(&id) {
                Some(known) => known,
                None => Change::read(control, consumer.as_str(), partition).await?,
            };
            let standing = &mut change.standing;
            match standing.position()? {
                // A repetition of a write whose answer was lost.
                Some(there) if there == *to => {}
                Some(there) if Place::read(&there)?.ordinal() > ahead => {
                    return Err(Error::permanent(format!(
                        "checkpoint of {consumer} in partition {partition} would move back"
                    )));
                }
                _ => standing.published = standing.published.saturating_add(tally.published),
            }
            standing.position = Some(encode(to));
            // A range that was merged again before it had ended is read on.
            standing.heirs.iter_mut().for_each(|heir| heir.from = encode(to));
            standing.group = Some(lease.group().as_str().to_owned());
            let next = standing.clone();
            let written = under.write_and_tell(vec![change.write(control)?]).await?;
            if let Some(etag) = written.and_then(|etags| etags.into_iter().next()) {
                self.inner.known.keep(id, next, etag);
                return Ok(());
            }
        }
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        for successor in successors {
            Place::read(&successor.from)?;
        }
        let successors = &self.decided(lease, consumer, successors).await?;
        self.hand_letters_on(lease, consumer, successors).await?;
        let partition = lease.partition().as_str();
        let control = &self.inner.control;
        let mut under = self.under(lease);
        loop {
            let mut writes = Vec::new();
            for successor in successors {
                let next = successor.partition.as_str();
                let mut change = Change::read(control, consumer.as_str(), next).await?;
                if change.standing.position.is_none() {
                    change.standing.position = Some(encode(&successor.from));
                    writes.push(change.write(control)?);
                }
            }
            let mut change = Change::read(control, consumer.as_str(), partition).await?;
            change.standing.ended = true;
            writes.push(change.write(control)?);
            if under.write(writes).await? {
                return Ok(());
            }
        }
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        let mut all = Vec::new();
        for found in standings(&self.inner.control, None).await? {
            let Some(position) = found.body.position()? else { continue };
            all.push(self.standing_progress(found, position).await?);
        }
        self.tell_expiry(&all, self.now().await?);
        Ok(all)
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        let control = &self.inner.control;
        let found = standings(control, Some(consumer)).await?;
        for standing in &found {
            let Some(group) = &standing.body.group else { continue };
            if self.lease_is_alive(group, &standing.body.partition).await? {
                return Err(Error::transient(format!(
                    "consumer {consumer} is at work in partition {}; stop its relays",
                    standing.body.partition
                )));
            }
        }
        let letters = self.discard_letters(consumer).await?;
        for _ in 0..TRIES {
            // Finished ones last: without them a consumer of the same name would begin with their
            // ranges again, and with them alone it would never read those of their successors.
            let mut left = standings(control, Some(consumer)).await?;
            left.sort_by_key(|standing| standing.body.ended);
            if left.is_empty() {
                return Ok(letters > 0 || !found.is_empty());
            }
            for some in left.chunks(MAX_BATCH_OPERATIONS) {
                let gone = some.iter().map(|one| Write::Delete(one.body.id(), one.etag.clone()));
                if let Written::Stale = control.write(&gone.collect::<Vec<_>>()).await? {
                    break;
                }
            }
        }
        Err(Error::transient(format!(
            "consumer {consumer} is written to by others while it is removed; stop its relays"
        )))
    }
}
