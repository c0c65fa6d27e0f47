//! Leases, the list of live relays, and the fence that every write under a lease passes.
//!
//! What lives here: the seam over `postrider_lease` and `postrider_relay`. What does not: when to
//! renew. Invariant: each acquisition raises the epoch; only the newest epoch, unreleased, may
//! write; what expires is told by `LeaseTime` alone, never by the wall clock.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, Epoch, Error, GroupName, HeldLease, LeaseInfo, Leases, PartitionId, RelayId, Renewal,
    Result,
};
use rusqlite::{Connection, OptionalExtension, Transaction};

use crate::SqliteStore;
use crate::clock::{LeaseTime, to_ms};
use crate::error::failed;

/// Refuses a write under a lease that is not the newest. Called inside the IMMEDIATE transaction
/// of that write, so that nobody can take the lease over in between.
pub(crate) fn fence(tx: &Connection, lease: &HeldLease) -> Result<()> {
    let place = "check the lease";
    let newest = tx
        .prepare_cached(
            "SELECT 1 FROM postrider_lease
             WHERE group_name = ?1 AND partition = ?2 AND holder = ?3 AND epoch = ?4
                 AND released = 0",
        )
        .and_then(|mut statement| statement.exists(parts(lease)))
        .map_err(failed(place))?;
    if newest {
        return Ok(());
    }
    Err(Error::fenced(format!(
        "lease of partition {} under epoch {} was taken over or released",
        lease.partition(),
        lease.epoch().get()
    )))
}

fn parts(lease: &HeldLease) -> (&str, &str, &str, i64) {
    let epoch = i64::try_from(lease.epoch().get()).unwrap_or(i64::MAX);
    (lease.group().as_str(), lease.partition().as_str(), lease.holder().as_str(), epoch)
}

/// A lease as it is kept; kept also when free, because its epoch must never repeat.
struct Row {
    partition: String,
    holder: String,
    epoch: u64,
    released: bool,
    expires_ms: i64,
    boot_id: String,
}

const COLUMNS: &str = "partition, holder, epoch, released, expires_ms, boot_id";

impl Row {
    fn read(row: &rusqlite::Row<'_>) -> rusqlite::Result<Self> {
        let epoch: i64 = row.get(2)?;
        Ok(Self {
            partition: row.get(0)?,
            holder: row.get(1)?,
            epoch: epoch.unsigned_abs(),
            released: row.get(3)?,
            expires_ms: row.get(4)?,
            boot_id: row.get(5)?,
        })
    }

    fn remaining(&self, time: &LeaseTime) -> Duration {
        if self.released || *self.boot_id != *time.boot_id {
            return Duration::ZERO;
        }
        let left_ms = self.expires_ms.saturating_sub(time.now_ms);
        Duration::from_millis(u64::try_from(left_ms).unwrap_or(0))
    }
}

fn find(tx: &Connection, group: &str, partition: &str) -> Result<Option<Row>> {
    tx.prepare_cached(&format!(
        "SELECT {COLUMNS} FROM postrider_lease WHERE group_name = ?1 AND partition = ?2"
    ))
    .and_then(|mut statement| statement.query_row((group, partition), Row::read).optional())
    .map_err(failed("read the lease"))
}

/// Whether the lease still runs.
pub(crate) fn runs(
    tx: &Connection,
    group: &str,
    partition: &str,
    time: &LeaseTime,
) -> Result<bool> {
    Ok(find(tx, group, partition)?.is_some_and(|row| !row.remaining(time).is_zero()))
}

fn grant(
    tx: &Transaction<'_>,
    group: &GroupName,
    partition: &PartitionId,
    relay: &RelayId,
    ttl: Duration,
    time: &LeaseTime,
) -> Result<Acquired> {
    let found = find(tx, group.as_str(), partition.as_str())?;
    let mut epoch = 1;
    if let Some(row) = found {
        let remaining = row.remaining(time);
        if !remaining.is_zero() && row.holder != relay.as_str() {
            let holder = RelayId::new(row.holder)?;
            return Ok(Acquired::Busy { holder, remaining });
        }
        // A new holder must outrank every write that the old one still has in flight.
        epoch = row.epoch + 1;
    }
    tx.prepare_cached(
        "INSERT INTO postrider_lease
             (group_name, partition, holder, epoch, released, expires_ms, boot_id)
         VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6)
         ON CONFLICT (group_name, partition) DO UPDATE SET holder = excluded.holder,
             epoch = excluded.epoch, released = 0, expires_ms = excluded.expires_ms,
             boot_id = excluded.boot_id",
    )
    .and_then(|mut statement| {
        statement.execute((
            group.as_str(),
            partition.as_str(),
            relay.as_str(),
            i64::try_from(epoch).unwrap_or(i64::MAX),
            time.now_ms.saturating_add(to_ms(ttl)),
            &*time.boot_id,
        ))
    })
    .map_err(failed("take the lease"))?;
    let epoch = Epoch::new(epoch);
    Ok(Acquired::Held(HeldLease::granted(group.clone(), partition.clone(), relay.clone(), epoch)))
}

/// A lease's own copy, to be taken onto a blocking thread.
pub(crate) fn copy(lease: &HeldLease) -> HeldLease {
    HeldLease::granted(
        lease.group().clone(),
        lease.partition().clone(),
        lease.holder().clone(),
        lease.epoch(),
    )
}

#[async_trait]
impl Leases for SqliteStore {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        let (group, relay, clock) = (group.clone(), relay.clone(), self.inner.clock.clone());
        self.write_tx(move |tx| {
            let place = "join the group";
            // Read under the write lock: the wait for it must not eat into the time to live.
            let time = clock.lease_time();
            tx.prepare_cached(
                "DELETE FROM postrider_relay
                 WHERE group_name = ?1 AND (expires_ms <= ?2 OR boot_id <> ?3)",
            )
            .and_then(|mut old| old.execute((group.as_str(), time.now_ms, &*time.boot_id)))
            .map_err(failed(place))?;
            let expires_ms = time.now_ms.saturating_add(to_ms(ttl));
            tx.prepare_cached(
                "INSERT INTO postrider_relay (group_name, relay, expires_ms, boot_id)
                 VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (group_name, relay) DO UPDATE
                     SET expires_ms = excluded.expires_ms, boot_id = excluded.boot_id",
            )
            .and_then(|mut new| {
                new.execute((group.as_str(), relay.as_str(), expires_ms, &*time.boot_id))
            })
            .map_err(failed(place))?;
            let mut statement = tx
                .prepare_cached(
                    "SELECT relay FROM postrider_relay WHERE group_name = ?1 ORDER BY relay",
                )
                .map_err(failed(place))?;
            let rows = statement
                .query_map([group.as_str()], |row| row.get::<_, String>(0))
                .map_err(failed(place))?;
            rows.map(|row| RelayId::new(row.map_err(failed(place))?)).collect()
        })
        .await
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        let (group, relay) = (group.clone(), relay.clone());
        self.write_tx(move |tx| {
            tx.execute(
                "DELETE FROM postrider_relay WHERE group_name = ?1 AND relay = ?2",
                (group.as_str(), relay.as_str()),
            )
            .map(drop)
            .map_err(failed("leave the group"))
        })
        .await
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        let (group, partition, relay) = (group.clone(), partition.clone(), relay.clone());
        let clock = self.inner.clock.clone();
        self.write_tx(move |tx| grant(tx, &group, &partition, &relay, ttl, &clock.lease_time()))
            .await
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        let leases: Vec<HeldLease> = leases.iter().map(|lease| copy(lease)).collect();
        let clock = self.inner.clock.clone();
        self.write_tx(move |tx| {
            let place = "renew the lease";
            let time = clock.lease_time();
            let expires_ms = time.now_ms.saturating_add(to_ms(ttl));
            let mut statement = tx
                .prepare_cached(
                    "UPDATE postrider_lease SET expires_ms = ?5, boot_id = ?6
                     WHERE group_name = ?1 AND partition = ?2 AND holder = ?3 AND epoch = ?4
                         AND released = 0",
                )
                .map_err(failed(place))?;
            let renewed = leases.iter().map(|lease| {
                let (group, partition, holder, epoch) = parts(lease);
                let values = (group, partition, holder, epoch, expires_ms, &*time.boot_id);
                Ok(match statement.execute(values).map_err(failed(place))? {
                    0 => Renewal::Lost,
                    _ => Renewal::Renewed,
                })
            });
            renewed.collect()
        })
        .await
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        let lease = copy(lease);
        self.write_tx(move |tx| {
            tx.execute(
                "UPDATE postrider_lease SET released = 1
                 WHERE group_name = ?1 AND partition = ?2 AND holder = ?3 AND epoch = ?4",
                parts(&lease),
            )
            .map(drop)
            .map_err(failed("release the lease"))
        })
        .await
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        let (group, time) = (group.clone(), self.inner.clock.lease_time());
        self.read_tx(move |tx| {
            let place = "list the leases";
            let mut statement = tx
                .prepare_cached(&format!(
                    "SELECT {COLUMNS} FROM postrider_lease WHERE group_name = ?1 ORDER BY partition"
                ))
                .map_err(failed(place))?;
            let rows = statement.query_map([group.as_str()], Row::read).map_err(failed(place))?;
            rows.map(|row| {
                let row = row.map_err(failed(place))?;
                Ok(LeaseInfo {
                    remaining: row.remaining(&time),
                    partition: PartitionId::new(row.partition)?,
                    holder: RelayId::new(row.holder)?,
                    epoch: Epoch::new(row.epoch),
                })
            })
            .collect()
        })
        .await
    }
}
