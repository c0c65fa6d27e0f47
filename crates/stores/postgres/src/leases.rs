//! Leases, the list of live relays, and the fence that every write under a lease passes.
//!
//! What lives here: the seam over the tables `lease` and `relay`. What does not: when to renew.
//! Invariant: each acquisition raises the epoch; only the newest epoch, unreleased, may write, and
//! it is checked by the statement that writes, under a lock that a take-over has to wait for; what
//! expires is told by the database's clock alone.

use std::time::Duration;

use async_trait::async_trait;
use postrider_core::{
    Acquired, Epoch, Error, GroupName, Heartbeat, HeldLease, LeaseInfo, Leases, News, PartitionId,
    RelayId, Renewal, Result,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::connections::Param;

/// The fence of a write under a lease, as the first part of its `WITH`; its values are `$1` to `$4`
/// ([`LeaseKey::params`]). It has one row while the lease is the newest, else none, and the write
/// must take its rows from it.
///
/// FOR SHARE waits for a take-over that is under way and then looks at the row again, whatever the
/// statement's snapshot says; and a take-over has to wait until the write has committed. SHARE is
/// enough, and lets the sinks of one partition write beside each other.
macro_rules! fence {
    () => {
        "fence AS MATERIALIZED (SELECT 1 AS held FROM {schema}.lease
            WHERE outbox = {outbox_text} AND group_name = $1 AND partition = $2 AND holder = $3
                AND epoch = $4 AND NOT released
            FOR SHARE)"
    };
}
pub(crate) use fence;

/// Waits for another relay's attempt at the same row. Of two that find it free, the second finds it
/// taken once it has the row's lock, because ON CONFLICT looks at the row as it is then.
const ACQUIRE: &str = "WITH taken AS (
        INSERT INTO {schema}.lease AS l
            (outbox, group_name, partition, holder, epoch, released, expires_at)
        VALUES ({outbox_text}, $1, $2, $3, 1, false,
            clock_timestamp() + $4 * interval '1 millisecond')
        ON CONFLICT (outbox, group_name, partition) DO UPDATE SET holder = excluded.holder,
            epoch = l.epoch + 1, released = false,
            expires_at = clock_timestamp() + $4 * interval '1 millisecond'
        WHERE l.released OR l.expires_at <= clock_timestamp() OR l.holder = excluded.holder
        RETURNING epoch)
    SELECT epoch, NULL::text, NULL::bigint FROM taken
    UNION ALL
    SELECT NULL, l.holder, (extract(epoch FROM l.expires_at - clock_timestamp()) * 1000)::bigint
    FROM {schema}.lease AS l
    WHERE l.outbox = {outbox_text} AND l.group_name = $1 AND l.partition = $2
        AND NOT EXISTS (SELECT FROM taken)";

/// All leases of one relay in one statement. Locks their rows, and the relay's own, which stays
/// alive with them; a relay that has left the list is not put back on it. Each lease is compared
/// again once its row's lock is there. What else it tells is read as of its beginning.
const RENEW: &str = "WITH asked AS (
        SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[])
            WITH ORDINALITY AS a (group_name, partition, holder, epoch, place)),
    renewed AS (
        UPDATE {schema}.lease AS l
        SET expires_at = clock_timestamp() + $5 * interval '1 millisecond'
        FROM asked AS a
        WHERE l.outbox = {outbox_text} AND l.group_name = a.group_name
            AND l.partition = a.partition AND l.holder = a.holder AND l.epoch = a.epoch
            AND NOT l.released
        RETURNING l.group_name, l.partition, l.holder, l.epoch),
    alive AS (
        UPDATE {schema}.relay AS r
        SET expires_at = clock_timestamp() + $5 * interval '1 millisecond'
        FROM (SELECT DISTINCT group_name, holder FROM renewed) AS h
        WHERE r.outbox = {outbox_text} AND r.group_name = h.group_name AND r.relay = h.holder)
    SELECT ARRAY(SELECT a.place FROM asked AS a
            JOIN renewed USING (group_name, partition, holder, epoch)),
        ARRAY(SELECT r.relay FROM {schema}.relay AS r
            WHERE r.outbox = {outbox_text} AND r.group_name = $6
                AND (r.expires_at > clock_timestamp() OR r.relay IN (SELECT holder FROM renewed))
            ORDER BY r.relay),
        EXISTS (SELECT FROM {schema}.dead_letter AS d
            WHERE d.outbox = {outbox_text} AND d.state = 'requeued')";

/// Writes only when less than half of the relay's time is left: a relay that renews leases keeps
/// its row alive by that. Whoever writes also removes the rows that have run out.
const JOIN: &str = "WITH due AS MATERIALIZED (
        SELECT 1 AS due WHERE NOT EXISTS (SELECT FROM {schema}.relay
            WHERE outbox = {outbox_text} AND group_name = $1 AND relay = $2
                AND expires_at > clock_timestamp() + $3 / 2 * interval '1 millisecond')),
    joined AS (
        INSERT INTO {schema}.relay (outbox, group_name, relay, expires_at)
        SELECT {outbox_text}, $1, $2, clock_timestamp() + $3 * interval '1 millisecond' FROM due
        ON CONFLICT (outbox, group_name, relay) DO UPDATE SET expires_at = excluded.expires_at),
    gone AS (
        DELETE FROM {schema}.relay USING due
        WHERE outbox = {outbox_text} AND group_name = $1 AND relay <> $2
            AND expires_at <= clock_timestamp())
    SELECT relay FROM {schema}.relay
    WHERE outbox = {outbox_text} AND group_name = $1 AND expires_at > clock_timestamp()
    UNION SELECT $2 COLLATE \"C\"
    ORDER BY 1";

const LEAVE: &str = "DELETE FROM {schema}.relay
    WHERE outbox = {outbox_text} AND group_name = $1 AND relay = $2";

/// The row stays, because its epoch must never repeat.
const RELEASE: &str = "UPDATE {schema}.lease SET released = true
    WHERE outbox = {outbox_text} AND group_name = $1 AND partition = $2 AND holder = $3
        AND epoch = $4";

const LIST: &str = "SELECT partition, holder, epoch, CASE WHEN released THEN 0
        ELSE (extract(epoch FROM expires_at - clock_timestamp()) * 1000)::bigint END
    FROM {schema}.lease WHERE outbox = {outbox_text} AND group_name = $1 ORDER BY partition";

/// How often an acquisition looks again whose row came or went under its eyes.
const ACQUIRE_TRIES: usize = 3;

/// A lease as SQL compares it.
pub(crate) struct LeaseKey<'a> {
    group: &'a str,
    partition: &'a str,
    holder: &'a str,
    epoch: i64,
}

impl<'a> LeaseKey<'a> {
    pub(crate) fn of(lease: &'a HeldLease) -> Self {
        Self {
            group: lease.group().as_str(),
            partition: lease.partition().as_str(),
            holder: lease.holder().as_str(),
            epoch: i64::try_from(lease.epoch().get()).unwrap_or(i64::MAX),
        }
    }

    /// The values of [`fence!`], followed by a statement's own.
    pub(crate) fn params<'b>(&'b self, own: &[Param<'b>]) -> Vec<Param<'b>> {
        let mut params: Vec<Param<'b>> = vec![
            (&self.group, Type::TEXT),
            (&self.partition, Type::TEXT),
            (&self.holder, Type::TEXT),
            (&self.epoch, Type::INT8),
        ];
        params.extend_from_slice(own);
        params
    }
}

/// What a write is told whose fence had no row.
pub(crate) fn fenced(lease: &HeldLease) -> Error {
    Error::fenced(format!(
        "lease of partition {} under epoch {} was taken over or released",
        lease.partition(),
        lease.epoch().get()
    ))
}

/// Refuses when the first column of a fenced statement's answer, the fence's rows, is 0.
pub(crate) fn held(rows: &[Row], lease: &HeldLease) -> Result<()> {
    match rows.first().is_some_and(|row| row.get::<_, i64>(0) > 0) {
        true => Ok(()),
        false => Err(fenced(lease)),
    }
}

/// A time to live in milliseconds. Of type float8 in SQL, where it multiplies an interval.
fn ttl_ms(ttl: Duration) -> f64 {
    ttl.as_secs_f64() * 1_000.0
}

fn left(milliseconds: i64) -> Duration {
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or(0))
}

#[async_trait]
impl Leases for PostgresStore {
    async fn join(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Vec<RelayId>> {
        let params: [Param<'_>; 3] = [
            (&group.as_str(), Type::TEXT),
            (&relay.as_str(), Type::TEXT),
            (&ttl_ms(ttl), Type::FLOAT8),
        ];
        let rows = self.query("join the group", JOIN, &params).await?;
        rows.iter().map(|row| RelayId::new(row.get::<_, &str>(0))).collect()
    }

    async fn leave(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        let params: [Param<'_>; 2] = [(&group.as_str(), Type::TEXT), (&relay.as_str(), Type::TEXT)];
        self.query("leave the group", LEAVE, &params).await.map(drop)
    }

    async fn acquire(
        &self,
        group: &GroupName,
        partition: &PartitionId,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<Acquired> {
        let place = "take the lease";
        let params: [Param<'_>; 4] = [
            (&group.as_str(), Type::TEXT),
            (&partition.as_str(), Type::TEXT),
            (&relay.as_str(), Type::TEXT),
            (&ttl_ms(ttl), Type::FLOAT8),
        ];
        for _ in 0..ACQUIRE_TRIES {
            let world = self.inner.connections.world();
            let since = world.number();
            let rows = self.query(place, ACQUIRE, &params).await?;
            let Some(row) = rows.first() else {
                // Another relay made the row after this statement's snapshot.
                continue;
            };
            if let Some(epoch) = row.get::<_, Option<i64>>(0) {
                let lease = HeldLease::granted(
                    group.clone(),
                    partition.clone(),
                    relay.clone(),
                    Epoch::new(epoch.unsigned_abs()),
                );
                world.acquired(&lease, since);
                return Ok(Acquired::Held(lease));
            }
            let holder = RelayId::new(row.get::<_, &str>(1))?;
            return Ok(Acquired::Busy { holder, remaining: left(row.get(2)) });
        }
        Err(Error::transient(format!("{place}: other relays are taking it; try again")))
    }

    async fn renew(&self, leases: &[&HeldLease], ttl: Duration) -> Result<Vec<Renewal>> {
        let Some(first) = leases.first() else { return Ok(Vec::new()) };
        Ok(self.heartbeat(first.group(), leases, ttl).await?.renewals)
    }

    async fn heartbeat(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<Heartbeat> {
        let keys: Vec<LeaseKey<'_>> = leases.iter().map(|lease| LeaseKey::of(lease)).collect();
        let groups: Vec<&str> = keys.iter().map(|key| key.group).collect();
        let partitions: Vec<&str> = keys.iter().map(|key| key.partition).collect();
        let holders: Vec<&str> = keys.iter().map(|key| key.holder).collect();
        let epochs: Vec<i64> = keys.iter().map(|key| key.epoch).collect();
        let params: [Param<'_>; 6] = [
            (&groups, Type::TEXT_ARRAY),
            (&partitions, Type::TEXT_ARRAY),
            (&holders, Type::TEXT_ARRAY),
            (&epochs, Type::INT8_ARRAY),
            (&ttl_ms(ttl), Type::FLOAT8),
            (&group.as_str(), Type::TEXT),
        ];
        let rows = self.query("renew the leases", RENEW, &params).await?;
        let row = &rows[0];
        let renewed: Vec<i64> = row.get(0);
        // One that another copy of the database granted is not to be relied on.
        let world = self.inner.connections.world();
        let answer = |(place, lease): (i64, &&HeldLease)| match renewed.contains(&place)
            && !world.is_stale(lease)
        {
            true => Renewal::Renewed,
            false => Renewal::Lost,
        };
        let renewals = (1..).zip(leases).map(answer).collect();
        let relays = row.get::<_, Vec<&str>>(1).into_iter().map(RelayId::new);
        let news = News { relays: relays.collect::<Result<_>>()?, requeued: row.get(2) };
        Ok(Heartbeat { renewals, news: Some(news) })
    }

    async fn release(&self, lease: &HeldLease) -> Result<()> {
        let key = LeaseKey::of(lease);
        self.query("release the lease", RELEASE, &key.params(&[])).await.map(drop)
    }

    async fn leases(&self, group: &GroupName) -> Result<Vec<LeaseInfo>> {
        let params: [Param<'_>; 1] = [(&group.as_str(), Type::TEXT)];
        let rows = self.query("list the leases", LIST, &params).await?;
        let info = |row: &Row| {
            Ok(LeaseInfo {
                partition: PartitionId::new(row.get::<_, &str>(0))?,
                holder: RelayId::new(row.get::<_, &str>(1))?,
                epoch: Epoch::new(row.get::<_, i64>(2).unsigned_abs()),
                remaining: left(row.get(3)),
            })
        };
        rows.iter().map(info).collect()
    }
}
