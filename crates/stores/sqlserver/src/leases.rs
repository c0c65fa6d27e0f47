//! Leases and the list of live relays, in the database's time.
//!
//! What lives here: the seam over `[lease]` and `[relay]`. What does not: granting and the fence,
//! which are procedures (`migrations/0002_relay.sql`); when to renew.
//! Invariant: each acquisition raises the epoch; only the newest epoch, unreleased, may write.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, Epoch, Error, GroupName, Heartbeat, HeldLease, LeaseInfo, Leases, News, PartitionId,
    RelayId, Renewal, Result,
};
use serde::Serialize;
use tiberius::Row;

use crate::SqlServerStore;
use crate::connections::Param;
use crate::names::exact;
use crate::row::{maybe_number, maybe_text, number, text, whole};
use crate::sql;

/// Longest name of a partition that fits its column.
const MAX_PARTITION_CHARS: usize = 32;

/// A time to live as SQL adds it to a time: up to 24 days.
fn ttl_ms(ttl: Duration) -> i32 {
    i32::try_from(ttl.as_millis()).unwrap_or(i32::MAX)
}

fn duration(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

/// The four values that every write under a lease begins with.
pub(crate) struct Fence<'a> {
    pub(crate) group: &'a str,
    pub(crate) partition: &'a str,
    pub(crate) holder: &'a str,
    pub(crate) epoch: i64,
}

impl<'a> Fence<'a> {
    pub(crate) fn of(lease: &'a HeldLease) -> Self {
        Self {
            group: lease.group().as_str(),
            partition: lease.partition().as_str(),
            holder: lease.holder().as_str(),
            epoch: whole(lease.epoch().get()),
        }
    }
}

fn check(group: &GroupName, partition: &PartitionId, relay: &RelayId) -> Result<()> {
    exact("group", group.as_str())?;
    exact("relay id", relay.as_str())?;
    exact("partition", partition.as_str())?;
    if partition.as_str().encode_utf16().count() > MAX_PARTITION_CHARS {
        return Err(Error::permanent(format!(
            "partition {partition} has a longer name than {MAX_PARTITION_CHARS} characters; it \
             belongs to another kind of source"
        )));
    }
    Ok(())
}

/// A lease as `lease_heartbeat.sql` reads it.
#[derive(Serialize)]
struct Held<'a> {
    n: usize,
    g: &'a str,
    p: &'a str,
    h: &'a str,
    e: i64,
}

fn relays(rows: &[Row]) -> Result<Vec<RelayId>> {
    rows.iter().map(|row| RelayId::new(text(row, 0, "relay")?)).collect()
}

impl SqlServerStore {
    async fn renew_all(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Heartbeat> {
        let held = leases.iter().enumerate().map(|(n, lease)| {
            let Fence { group, partition, holder, epoch } = Fence::of(lease);
            Held { n, g: group, p: partition, h: holder, e: epoch }
        });
        let held = serde_json::to_string(&held.collect::<Vec<_>>()).expect("texts serialise");
        let group = leases.first().map_or("", |lease| lease.group().as_str());
        let ttl = ttl_ms(ttl);
        let params: [Param<'_>; 3] = [&held, &ttl, &group];
        let place = "renew the leases";
        let sets = self.run(place, sql::LEASE_HEARTBEAT, &params).await?;
        let [renewed, live, requeued] = &sets[..] else { return Err(short_answer(place)) };
        let mut renewals = vec![Renewal::Lost; leases.len()];
        for row in renewed {
            let n = usize::try_from(number(row, 0, "n")?).ok();
            let renewal = n.and_then(|n| renewals.get_mut(n)).ok_or_else(|| short_answer(place))?;
            *renewal = Renewal::Renewed;
        }
        let requeued = requeued.first().ok_or_else(|| short_answer(place))?;
        let requeued = number(requeued, 0, "requeued")? != 0;
        Ok(Heartbeat { renewals, news: Some(News { relays: relays(live)?, requeued }) })
    }
}

/// An answer that has not the result sets which its statement gives.
pub(crate) fn short_answer(place: &str) -> Error {
    Error::corrupt(format!("{place}: the server's answer has not what was asked for"))
}

#[async_trait]
impl Leases for SqlServerStore {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        exact("group", group.as_str())?;
        exact("relay id", relay.as_str())?;
        let ttl = ttl_ms(ttl);
        let params: [Param<'_>; 3] = [&group.as_str(), &relay.as_str(), &ttl];
        let sets = self.run("join the group", sql::LEASE_JOIN, &params).await?;
        relays(sets.first().map_or(&[], Vec::as_slice))
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        let params: [Param<'_>; 2] = [&group.as_str(), &relay.as_str()];
        self.run("leave the group", sql::LEASE_LEAVE, &params).await.map(drop)
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        check(group, partition, relay)?;
        let place = "take the lease";
        let ttl = i64::from(ttl_ms(ttl));
        let params: [Param<'_>; 4] = [&group.as_str(), &partition.as_str(), &relay.as_str(), &ttl];
        let sets = self.run(place, sql::LEASE_ACQUIRE, &params).await?;
        let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
        if let Some(epoch) = maybe_number(row, 0, "epoch")? {
            let epoch = Epoch::new(epoch.unsigned_abs());
            let (group, partition, relay) = (group.clone(), partition.clone(), relay.clone());
            return Ok(Acquired::Held(HeldLease::granted(group, partition, relay, epoch)));
        }
        let holder = maybe_text(row, 1, "holder")?.ok_or_else(|| short_answer(place))?;
        let remaining = duration(maybe_number(row, 2, "remaining_ms")?.unwrap_or(0));
        Ok(Acquired::Busy { holder: RelayId::new(holder)?, remaining })
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        if leases.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.renew_all(leases, ttl).await?.renewals)
    }

    async fn heartbeat(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        if leases.first().is_none_or(|lease| lease.group() != group) {
            return Ok(Heartbeat { renewals: self.renew(leases, ttl).await?, news: None });
        }
        self.renew_all(leases, ttl).await
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        let Fence { group, partition, holder, epoch } = Fence::of(lease);
        let params: [Param<'_>; 4] = [&group, &partition, &holder, &epoch];
        self.run("release the lease", sql::LEASE_RELEASE, &params).await.map(drop)
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        let params: [Param<'_>; 1] = [&group.as_str()];
        let sets = self.run("list the leases", sql::LEASE_LIST, &params).await?;
        let rows = sets.first().map_or(&[][..], Vec::as_slice);
        rows.iter()
            .map(|row| {
                Ok(LeaseInfo {
                    partition: PartitionId::new(text(row, 0, "partition")?)?,
                    holder: RelayId::new(text(row, 1, "holder")?)?,
                    epoch: Epoch::new(number(row, 2, "epoch")?.unsigned_abs()),
                    remaining: duration(number(row, 3, "remaining_ms")?),
                })
            })
            .collect()
    }
}
