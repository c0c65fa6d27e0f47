//! Leases and the list of live relays.
//!
//! What lives here: the seam over the ledger, and the one fence that every write passes. What does
//! not: when to renew.
//! Invariant: each acquisition raises the epoch; only the newest epoch, unreleased, may write.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, Epoch, Error, GroupName, HeldLease, LeaseInfo, Leases, PartitionId, RelayId, Renewal,
    Result,
};

use crate::MemoryStore;
use crate::checkpoints::Ledger;

/// One lease, kept also when free: its epoch must never repeat.
pub(crate) struct LeaseRow {
    holder: RelayId,
    epoch: Epoch,
    /// When it expires, on the monotonic clock; none once released.
    until: Option<Duration>,
}

impl LeaseRow {
    fn remaining(&self, now: Duration) -> Duration {
        self.until.unwrap_or_default().saturating_sub(now)
    }

    fn is(&self, lease: &HeldLease) -> bool {
        self.until.is_some() && self.epoch == lease.epoch() && self.holder == *lease.holder()
    }
}

impl Ledger {
    fn lease_of(&self, lease: &HeldLease) -> Option<&LeaseRow> {
        let row = self.leases.get(lease.group())?.get(lease.partition())?;
        row.is(lease).then_some(row)
    }

    fn lease_of_mut(&mut self, lease: &HeldLease) -> Option<&mut LeaseRow> {
        let row = self.leases.get_mut(lease.group())?.get_mut(lease.partition())?;
        row.is(lease).then_some(row)
    }

    /// Refuses a write under a lease that is no longer the newest.
    pub(crate) fn fence(&self, lease: &HeldLease) -> Result<()> {
        match self.lease_of(lease) {
            Some(_) => Ok(()),
            None => Err(Error::fenced(format!(
                "lease of partition {} under epoch {} was taken over or released",
                lease.partition(),
                lease.epoch().get()
            ))),
        }
    }

    /// Whether the lease of this epoch still runs.
    pub(crate) fn runs(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        epoch: Epoch,
        now: Duration,
    ) -> bool {
        let row = self.leases.get(group).and_then(|leases| leases.get(partition));
        row.is_some_and(|row| row.epoch == epoch && !row.remaining(now).is_zero())
    }
}

#[async_trait]
impl Leases for MemoryStore {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        let now = self.inner.clock.elapsed();
        let mut ledger = self.inner.ledger();
        let members = ledger.members.entry(group.clone()).or_default();
        members.retain(|_, until| *until > now);
        members.insert(relay.clone(), now + ttl);
        Ok(members.keys().cloned().collect())
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        if let Some(members) = self.inner.ledger().members.get_mut(group) {
            members.remove(relay);
        }
        Ok(())
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        let now = self.inner.clock.elapsed();
        let mut ledger = self.inner.ledger();
        let leases = ledger.leases.entry(group.clone()).or_default();
        let mut epoch = Epoch::new(1);
        if let Some(row) = leases.get(partition) {
            let remaining = row.remaining(now);
            if !remaining.is_zero() && row.holder != *relay {
                return Ok(Acquired::Busy { holder: row.holder.clone(), remaining });
            }
            // A new holder must outrank every write that the old one still has in flight.
            epoch = Epoch::new(row.epoch.get() + 1);
        }
        let row = LeaseRow { holder: relay.clone(), epoch, until: Some(now + ttl) };
        leases.insert(partition.clone(), row);
        Ok(Acquired::Held(HeldLease::granted(
            group.clone(),
            partition.clone(),
            relay.clone(),
            epoch,
        )))
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        let now = self.inner.clock.elapsed();
        let mut ledger = self.inner.ledger();
        let renewed = leases.iter().map(|lease| match ledger.lease_of_mut(lease) {
            Some(row) => {
                row.until = Some(now + ttl);
                Renewal::Renewed
            }
            None => Renewal::Lost,
        });
        Ok(renewed.collect())
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        if let Some(row) = self.inner.ledger().lease_of_mut(lease) {
            row.until = None;
        }
        Ok(())
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        let now = self.inner.clock.elapsed();
        let ledger = self.inner.ledger();
        let rows = ledger.leases.get(group).into_iter().flatten();
        let infos = rows.map(|(partition, row)| LeaseInfo {
            partition: partition.clone(),
            holder: row.holder.clone(),
            epoch: row.epoch,
            remaining: row.remaining(now),
        });
        Ok(infos.collect())
    }
}
