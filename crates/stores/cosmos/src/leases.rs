//! Leases, and the fence that every write under a lease passes.
//!
//! What lives here: the seam over lease documents. What does not: the list of live relays
//! (`relays.rs`), when to renew.
//! Invariant: each acquisition raises the epoch; a write under a lease replaces the lease's own
//! document in the same batch, in the version that was seen under that epoch, so that whoever
//! took the lease in between makes the batch fail whole.
//!
//! Nobody's clock is compared with another's: a lease has run out once it was not renewed for its
//! time to live, as seen by whoever wants it. The first look at a lease can't tell how old
//! it is, so a relay that comes new waits a whole time to live.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider_core::{
    Acquired, Epoch, Error, GroupName, Heartbeat, HeldLease, LeaseInfo, Leases, PartitionId,
    RelayId, Renewal, Result,
};
use serde::{Deserialize, Serialize};

use crate::CosmosStore;
use crate::control::{Control, Kept, MAX_BATCH_OPERATIONS, Write, Written, id};
use crate::relays::RELAY;

pub(crate) const LEASE: &str = "lease";
/// The part of a lease's time to live that news may take: a tenth.
const NEWS_WITHIN: u32 = 10;
/// How often a write that met another's is tried again before it is left to the caller.
pub(crate) const TRIES: u32 = 20;
/// Between two looks at others' leases. One that was renewed just after a look is seen to run out
/// twice this and its time to live later, which stays below a second with room for the requests.
const STANDBY: Duration = Duration::from_millis(300);

/// A lease; kept also when free, because its epoch must never repeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Lease {
    #[serde(rename = "leaseGroup")]
    group: String,
    partition: String,
    holder: String,
    epoch: u64,
    released: bool,
    ttl_ms: u64,
    /// Changes with each renewal, which is what makes it last.
    renewals: u64,
    /// Changes with each other write, so that the document does.
    beat: u64,
}

/// A lease in the version under which this process may write; one writer at a time.
type Slot = Arc<tokio::sync::Mutex<Option<Kept<Lease>>>>;

/// What this process saw of the documents that run out.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// By document: its version, and since when it has had it.
    since: Mutex<HashMap<String, (String, Instant)>>,
    /// By lease.
    held: Mutex<HashMap<String, Slot>>,
}

impl Seen {
    /// How long the document would still last without becoming another `version`.
    pub(crate) fn remaining(&self, id: &str, version: &str, ttl: Duration) -> Duration {
        let now = Instant::now();
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = since.entry(id.to_owned()).or_insert_with(|| (version.to_owned(), now));
        if seen.0 != version {
            *seen = (version.to_owned(), now);
        }
        ttl.saturating_sub(now.saturating_duration_since(seen.1))
    }

    pub(crate) fn forget(&self, id: &str) {
        self.since.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    fn slot(&self, id: &str) -> Slot {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(held.entry(id.to_owned()).or_default())
    }
}

pub(crate) fn lease_id(group: &str, partition: &str) -> String {
    id(LEASE, &[group.as_bytes(), partition.as_bytes()])
}

pub(crate) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Lease {
    fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    fn is_of(&self, lease: &HeldLease) -> bool {
        !self.released
            && self.holder == lease.holder().as_str()
            && self.epoch == lease.epoch().get()
    }

    /// The same with another version.
    fn beaten(&self) -> Self {
        Self { beat: self.beat.wrapping_add(1), ..self.clone() }
    }

    fn renewed(&self, ttl: Duration) -> Self {
        Self { renewals: self.renewals.wrapping_add(1), ttl_ms: ms(ttl), ..self.clone() }
    }

    /// What changes whenever the time to live begins anew, and not with other writes.
    fn age(&self) -> String {
        format!("{}/{}", self.epoch, self.renewals)
    }
}

/// Writing under a lease: read what is needed, write, and begin anew while the answer is no.
pub(crate) struct Under<'a> {
    control: &'a Control,
    lease: &'a HeldLease,
    id: String,
    slot: Slot,
    tries: u32,
}

impl Under<'_> {
    /// Writes all of it together with the lease's own document, or nothing. False: something is
    /// not as it was read; read again.
    ///
    /// # Errors
    /// `Fenced` when the lease was taken over or released; then nothing was written.
    pub(crate) async fn write(&mut self, writes: Vec<Write>) -> Result<bool> {
        Ok(self.write_and_tell(writes).await?.is_some())
    }

    /// [`write`](Self::write); the new versions, in order, or nothing.
    pub(crate) async fn write_and_tell(
        &mut self,
        mut writes: Vec<Write>,
    ) -> Result<Option<Vec<String>>> {
        self.tries += 1;
        if self.tries > TRIES {
            return Err(busy("write under a lease"));
        }
        // Held for this write alone: renewals wait for it.
        let mut known = self.slot.lock().await;
        // Taken, so that a call that is given up leaves nothing to rely on.
        let current = match known.take().filter(|found| found.body.is_of(self.lease)) {
            Some(current) => current,
            None => {
                let found = self.control.read::<Lease>(&self.id).await?;
                let found = found.filter(|found| found.body.is_of(self.lease));
                found.ok_or_else(|| fenced(self.lease))?
            }
        };
        let next = current.body.beaten();
        let document = self.control.document(LEASE, &self.id, &next)?;
        writes.insert(0, Write::Replace(document, current.etag.clone()));
        let Written::All(etags) = self.control.write(&writes).await? else { return Ok(None) };
        let mut etags = etags.into_iter();
        let etag = etags.next().unwrap_or_default();
        *known = Some(Kept { body: next, etag, written_at: current.written_at });
        Ok(Some(etags.collect()))
    }
}

fn fenced(lease: &HeldLease) -> Error {
    Error::fenced(format!(
        "lease of partition {} under epoch {} was taken over or released",
        lease.partition(),
        lease.epoch().get()
    ))
}

pub(crate) fn busy(place: &str) -> Error {
    Error::transient(format!("{place}: others kept changing the same documents; try again"))
}

impl CosmosStore {
    fn control(&self) -> &Control {
        &self.inner.control
    }

    /// How long a lease would still last, as far as this process can tell.
    pub(crate) fn lease_remaining(&self, id: &str, lease: &Kept<Lease>) -> Duration {
        if lease.body.released {
            return Duration::ZERO;
        }
        self.inner.seen.remaining(id, &lease.body.age(), lease.body.ttl())
    }

    /// Begins to write under a lease.
    pub(crate) fn under<'a>(&'a self, lease: &'a HeldLease) -> Under<'a> {
        let id = lease_id(lease.group().as_str(), lease.partition().as_str());
        let slot = self.inner.seen.slot(&id);
        Under { control: self.control(), lease, id, slot, tries: 0 }
    }

    async fn put_lease(&self, id: &str, next: &Lease, seen: Option<&str>) -> Result<bool> {
        let document = self.control().document(LEASE, id, next)?;
        let write = match seen {
            None => Write::Create(document),
            Some(etag) => Write::Replace(document, etag.to_owned()),
        };
        let Written::All(_) = self.control().write(&[write]).await? else { return Ok(false) };
        // From here on its time to live runs, for this process as for all others.
        self.inner.seen.remaining(id, &next.age(), next.ttl());
        Ok(true)
    }

    /// One lease, with the version that this process may write under.
    async fn renew_one(&self, lease: &HeldLease, ttl: Duration) -> Result<Renewal> {
        let lease_id = lease_id(lease.group().as_str(), lease.partition().as_str());
        let slot = self.inner.seen.slot(&lease_id);
        let mut known = slot.lock().await;
        for _ in 0..TRIES {
            let current = match known.take().filter(|found| found.body.is_of(lease)) {
                Some(current) => current,
                None => {
                    let found = self.control().read::<Lease>(&lease_id).await?;
                    let Some(found) = found.filter(|found| found.body.is_of(lease)) else {
                        return Ok(Renewal::Lost);
                    };
                    found
                }
            };
            let next = current.body.renewed(ttl);
            let document = self.control().document(LEASE, &lease_id, &next)?;
            let write = Write::Replace(document, current.etag.clone());
            if let Written::All(etags) = self.control().write(&[write]).await? {
                let etag = etags.into_iter().next().unwrap_or_default();
                self.inner.seen.remaining(&lease_id, &next.age(), ttl);
                *known = Some(Kept { body: next, etag, written_at: current.written_at });
                return Ok(Renewal::Renewed);
            }
        }
        Err(busy("renew a lease"))
    }

    /// All of them in one batch; nothing when something is not as this process saw it last.
    async fn renew_together(&self, leases: &[&HeldLease], ttl: Duration) -> Result<bool> {
        let mut slots = Vec::new();
        for lease in leases {
            let id = lease_id(lease.group().as_str(), lease.partition().as_str());
            slots.push((self.inner.seen.slot(&id), id));
        }
        let (mut guards, mut writes, mut nexts) = (Vec::new(), Vec::new(), Vec::new());
        for ((slot, id), lease) in slots.iter().zip(leases) {
            // One that is being written under just now is renewed by itself.
            let Ok(mut guard) = slot.try_lock() else { return Ok(false) };
            let Some(current) = guard.take().filter(|found| found.body.is_of(lease)) else {
                return Ok(false);
            };
            let next = current.body.renewed(ttl);
            let document = self.control().document(LEASE, id, &next)?;
            writes.push(Write::Replace(document, current.etag.clone()));
            nexts.push((id, next, current.written_at));
            guards.push(guard);
        }
        let Written::All(etags) = self.control().write(&writes).await? else { return Ok(false) };
        for ((mut guard, (id, body, written_at)), etag) in guards.into_iter().zip(nexts).zip(etags)
        {
            self.inner.seen.remaining(id, &body.age(), ttl);
            *guard = Some(Kept { body, etag, written_at });
        }
        Ok(true)
    }
}

#[async_trait]
impl Leases for CosmosStore {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        self.say_alive(group, relay, ttl).await?;
        self.live_relays(group, Some(relay)).await
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        self.say_gone(group, relay).await
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        let lease_id = lease_id(group.as_str(), partition.as_str());
        for _ in 0..TRIES {
            let found = self.control().read::<Lease>(&lease_id).await?;
            let mut next = Lease {
                group: group.as_str().to_owned(),
                partition: partition.as_str().to_owned(),
                holder: relay.as_str().to_owned(),
                epoch: 1,
                released: false,
                ttl_ms: ms(ttl),
                renewals: 0,
                beat: 0,
            };
            if let Some(found) = &found {
                let remaining = self.lease_remaining(&lease_id, found);
                if !remaining.is_zero() && found.body.holder != relay.as_str() {
                    let holder = RelayId::new(found.body.holder.clone())?;
                    return Ok(Acquired::Busy { holder, remaining });
                }
                // A new holder must outrank every write that the old one still has in flight.
                next.epoch = found.body.epoch + 1;
                next.beat = found.body.beat.wrapping_add(1);
            }
            let seen = found.as_ref().map(|found| found.etag.as_str());
            if self.put_lease(&lease_id, &next, seen).await? {
                let (group, partition) = (group.clone(), partition.clone());
                let epoch = Epoch::new(next.epoch);
                let lease = HeldLease::granted(group, partition, relay.clone(), epoch);
                return Ok(Acquired::Held(lease));
            }
        }
        Err(busy("take a lease"))
    }

    /// Renewals and news are apart: what could be renewed is, whatever becomes of the rest.
    async fn heartbeat(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        let renewals = self.renew(leases, ttl).await?;
        // Until there is an answer nobody knows of the renewals: they must not wait for the rest.
        let within = ttl / NEWS_WITHIN;
        let news = match tokio::time::timeout(within, self.news(group, leases, ttl)).await {
            Ok(Ok(news)) => Some(news),
            // Whoever wants to know asks then, and hears of the trouble.
            Ok(Err(error)) => {
                tracing::debug!(error = %error.chain(), "a heartbeat brought no news");
                None
            }
            Err(_) => None,
        };
        Ok(Heartbeat { renewals, news })
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        let mut answers = Vec::with_capacity(leases.len());
        for together in leases.chunks(MAX_BATCH_OPERATIONS) {
            if together.len() > 1 && self.renew_together(together, ttl).await? {
                answers.extend(together.iter().map(|_| Renewal::Renewed));
                continue;
            }
            for lease in together {
                answers.push(self.renew_one(lease, ttl).await?);
            }
        }
        Ok(answers)
    }

    /// Each look is a query, and costs some request units.
    fn standby(&self) -> Duration {
        STANDBY
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        let lease_id = lease_id(lease.group().as_str(), lease.partition().as_str());
        let slot = self.inner.seen.slot(&lease_id);
        let mut known = slot.lock().await;
        *known = None;
        for _ in 0..TRIES {
            let found = self.control().read::<Lease>(&lease_id).await?;
            let Some(found) = found.filter(|found| found.body.is_of(lease)) else { return Ok(()) };
            let next = Lease { released: true, ..found.body.beaten() };
            if self.put_lease(&lease_id, &next, Some(&found.etag)).await? {
                return Ok(());
            }
        }
        Err(busy("release a lease"))
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        let mut leases = Vec::new();
        // The relays beside them: one that is gone is missed as soon as its leases are.
        for found in self.look_at(group, &[LEASE, RELAY]).await?.leases {
            let id = lease_id(&found.body.group, &found.body.partition);
            leases.push(LeaseInfo {
                partition: PartitionId::new(found.body.partition.clone())?,
                holder: RelayId::new(found.body.holder.clone())?,
                epoch: Epoch::new(found.body.epoch),
                remaining: self.lease_remaining(&id, &found),
            });
        }
        leases.sort_unstable_by(|a, b| a.partition.cmp(&b.partition));
        Ok(leases)
    }
}
