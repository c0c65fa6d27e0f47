//! Checkpoints and the totals that prove that nothing was lost.
//!
//! What lives here: the seam over the table `checkpoint`, and what is pending beyond it. What does
//! not: dead letters, whose number is counted where they stand.
//! Invariant: a checkpoint never moves back, names a place that this database knows, and moves in
//! the statement that checks its lease; published + parked + dropped + pending = appended.

use async_trait::async_trait;
use postrider_core::{
    Checkpoint, Checkpoints, ConsumerName, ConsumerProgress, Error, HeldLease, PartitionId,
    Position, Result, Successor, Tally, Timestamp,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::connections::Param;
use crate::leases::{LeaseKey, fence, held};
use crate::positions::Place;

const READ: &str = "SELECT position, published,
        (extract(epoch FROM updated_at) * 1000)::bigint
    FROM {schema}.checkpoint
    WHERE outbox = {outbox_text} AND consumer = $1 AND partition = $2 AND position IS NOT NULL";

/// Locks the lease's row against a take-over, then the checkpoint's; the checkpoint is compared as
/// it is under its lock. A position whose tick is not there was read before this database was
/// replaced by an older copy: what it says was delivered may be appended here again.
const ADVANCE: &str = concat!(
    "WITH ",
    fence!(),
    ", place AS MATERIALIZED (
        SELECT $9 OR EXISTS (SELECT FROM {schema}.{outbox_tick} AS t WHERE t.stamp = $8) AS known),
    moved AS (
        INSERT INTO {schema}.checkpoint AS c
            (outbox, consumer, partition, position, published, lease_group)
        SELECT {outbox_text}, $5, $2, $6, $7, $1 FROM fence CROSS JOIN place WHERE place.known
        ON CONFLICT (outbox, consumer, partition) DO UPDATE SET position = excluded.position,
            published = c.published + CASE WHEN c.position IS NOT DISTINCT FROM excluded.position
                THEN 0 ELSE excluded.published END,
            lease_group = excluded.lease_group, updated_at = clock_timestamp()
        WHERE c.position IS NULL OR c.position <= excluded.position
        RETURNING 1)
    SELECT (SELECT count(*) FROM fence), (SELECT known FROM place), (SELECT count(*) FROM moved)"
);

/// Locks the lease's row against a take-over. Letters of a finished partition go to the successor
/// that has their key now: nobody leases the old partition any more, and the key's later events
/// must find them. A letter without a readable key goes to the first.
const FINISH: &str = concat!(
    "WITH ",
    fence!(),
    ", heir AS (
        SELECT * FROM unnest($6::text[], $7::bytea[], $8::integer[], $9::integer[])
            WITH ORDINALITY AS h (partition, position, index, count, place)),
    begun AS (
        INSERT INTO {schema}.checkpoint AS c (outbox, consumer, partition, position)
        SELECT {outbox_text}, $5, heir.partition, heir.position FROM fence CROSS JOIN heir
        ON CONFLICT (outbox, consumer, partition) DO UPDATE SET position = excluded.position
        WHERE c.position IS NULL),
    ended AS (
        INSERT INTO {schema}.checkpoint AS c (outbox, consumer, partition, ended)
        SELECT {outbox_text}, $5, $2, true FROM fence
        ON CONFLICT (outbox, consumer, partition) DO UPDATE SET ended = true,
            updated_at = clock_timestamp()
        WHERE NOT c.ended),
    handed_on AS (
        UPDATE {schema}.dead_letter AS d SET partition = heir.partition FROM fence, heir
        WHERE d.outbox = {outbox_text} AND d.consumer = $5 AND d.partition = $2
            AND CASE WHEN d.key IS NULL THEN heir.place = 1
                ELSE {schema}.partition_of(d.key, heir.count) = heir.index END)
    SELECT count(*) FROM fence"
);

/// Each consumer's standing in the feed, with the tick after which it reads on: the newest one
/// before its position, or the one that its position ends; the oldest where that was pruned.
/// `last_stamp` is the last tick of its generation, once there is a later one.
const STANDINGS: &str =
    "SELECT c.consumer, c.partition, c.position, c.published, c.dropped, c.ended,
        (extract(epoch FROM c.updated_at) * 1000)::bigint,
        (SELECT count(*) FROM {schema}.dead_letter AS d WHERE d.outbox = c.outbox
            AND d.consumer = c.consumer AND d.partition = c.partition),
        coalesce(b.stamp, o.stamp), coalesce(b.seq_lo, o.seq_lo),
        (SELECT t.stamp FROM {schema}.generation AS g
            JOIN {schema}.generation AS n ON n.outbox = g.outbox AND n.number = g.number + 1
            CROSS JOIN LATERAL (SELECT t.stamp FROM {schema}.{outbox_tick} AS t
                WHERE t.stamp >= n.after_stamp ORDER BY t.stamp LIMIT 1) AS t
            WHERE g.outbox = c.outbox
                AND g.partitions::text = substring(c.partition FROM '/([0-9]+)$')) AS last_stamp
    FROM {schema}.checkpoint AS c
    CROSS JOIN LATERAL (SELECT ('x' || encode(substring(c.position FOR 8), 'hex'))::bit(64)::bigint
            AS stamp, ('x' || encode(substring(c.position FROM 9), 'hex'))::bit(64)::bigint AS seq)
        AS p
    CROSS JOIN (SELECT stamp, seq_lo FROM {schema}.{outbox_tick} ORDER BY stamp LIMIT 1) AS o
    LEFT JOIN LATERAL (SELECT t.stamp, t.seq_lo FROM {schema}.{outbox_tick} AS t
        WHERE t.stamp < p.stamp OR t.stamp = p.stamp AND p.seq <> 0 AND p.seq >= t.seq_hi
        ORDER BY t.stamp DESC LIMIT 1) AS b ON true
    WHERE c.outbox = {outbox_text} AND c.position IS NOT NULL AND c.partition <> 'wal'
    ORDER BY c.consumer, c.partition";

/// Counts what is beyond each standing, in one pass over the rows above `$1`, the lowest of their
/// ticks' `seq_lo`, and over the late ones below it: those of transactions that one of the ticks
/// did not see. A row is before a tick when the tick's snapshot sees it or an anchor has settled
/// it; of the tick that a position lies within, the rows up to the position's seq are passed, too.
/// Rows that no tick has yet belong to the newest generation.
/// Both are read by their indexes, in order and under a limit that the planner can't know, so that
/// it takes any other plan to be dearer: where statistics are missing or old it would else read the
/// whole table. Late ones are looked up by transaction, as pairs (xid, seq), which one index alone
/// has. Below a floor that reaches the tick's end all is settled and nothing is looked up.
/// A key is hashed once for each number of partitions: left to the planner, once for each standing.
///
/// Beyond the first `$8` rows the numbers drawn up to the end of a standing's generation stand for
/// them, in equal parts for all partitions: counting millions would run into the time-out just when
/// somebody has to know.
const PENDING: &str = "WITH standing AS MATERIALIZED (
        SELECT s.*, b.snap AS before_snap, b.seq_hi AS before_hi, b.floor AS before_floor,
            b.seq_lo AS before_lo, b.own AS before_own,
            w.snap AS within_snap, w.seq_hi AS within_hi, w.floor AS within_floor,
            e.snap AS last_snap, e.seq_hi AS last_hi, e.floor AS last_floor
        FROM unnest($2::integer[], $3::integer[], $4::bigint[], $5::bigint[], $6::bigint[],
                $7::bigint[]) WITH ORDINALITY
            AS s (index, count, before_stamp, stamp, seq, last_stamp, place)
        JOIN {schema}.{outbox_tick} AS b ON b.stamp = s.before_stamp
        LEFT JOIN {schema}.{outbox_tick} AS w ON w.stamp = s.stamp AND w.stamp > b.stamp
        LEFT JOIN {schema}.{outbox_tick} AS e ON e.stamp = s.last_stamp),
    newer AS MATERIALIZED (
        SELECT o.xid, o.seq, o.created_at, o.key FROM {schema}.{outbox} AS o
        WHERE o.seq > $1 ORDER BY o.seq LIMIT (SELECT $8)),
    uncounted AS MATERIALIZED (
        SELECT max(n.seq) AS after,
            (SELECT o.seq FROM {schema}.{outbox} AS o ORDER BY o.seq DESC LIMIT 1) AS up_to
        FROM newer AS n HAVING count(*) >= $8),
    beyond AS (
        SELECT * FROM newer
        UNION ALL
        SELECT late.xid, late.seq, late.created_at, late.key
        FROM (SELECT e.x, min(s.before_floor) AS floor FROM standing AS s
            CROSS JOIN LATERAL (
                SELECT pg_snapshot_xip(s.before_snap) AS x
                UNION ALL
                SELECT x::text::xid8 FROM generate_series(
                    pg_snapshot_xmax(s.before_snap)::text::bigint,
                    s.before_own::text::bigint - 1) AS x) AS e
            WHERE s.before_floor < s.before_hi GROUP BY e.x) AS open
        CROSS JOIN LATERAL (
            SELECT o.xid, o.seq, o.created_at, o.key FROM {schema}.{outbox} AS o
            WHERE (o.xid, o.seq) > (open.x, open.floor) AND (o.xid, o.seq) <= (open.x, $1)
            ORDER BY o.xid, o.seq LIMIT (SELECT 9223372036854775807)) AS late),
    hashed AS MATERIALIZED (SELECT b.xid, b.seq, b.created_at, counts.count,
            {schema}.partition_of(b.key, counts.count) AS index
        FROM beyond AS b CROSS JOIN (SELECT DISTINCT count FROM standing) AS counts)
    SELECT s.place, count(h.seq) + s.rest,
        (extract(epoch FROM coalesce(min(h.created_at), CASE WHEN s.rest > 0 THEN
            (SELECT o.created_at FROM {schema}.{outbox} AS o WHERE o.seq > s.before_lo
                ORDER BY o.seq LIMIT 1) END)) * 1000000)::bigint / 1000
    FROM (SELECT s.*, coalesce((SELECT greatest(0, least(u.up_to, s.last_hi)
                - greatest(u.after, s.before_lo)) / s.count FROM uncounted AS u), 0) AS rest
            FROM standing AS s) AS s
        LEFT JOIN hashed AS h ON s.count = h.count AND s.index = h.index
        AND NOT (h.seq <= s.before_floor
            OR h.seq <= s.before_hi AND pg_visible_in_snapshot(h.xid, s.before_snap))
        AND NOT (s.within_snap IS NOT NULL AND h.seq <= s.seq AND (h.seq <= s.within_floor
            OR h.seq <= s.within_hi AND pg_visible_in_snapshot(h.xid, s.within_snap)))
        AND (s.last_snap IS NULL OR h.seq <= s.last_floor
            OR h.seq <= s.last_hi AND pg_visible_in_snapshot(h.xid, s.last_snap))
    GROUP BY s.place, s.rest, s.before_lo";

/// How many events beyond the lowest standing are counted one by one: half a second of the server.
pub(crate) const COUNTED: i64 = 100_000;

/// Locks the rows of the leases under which the consumer advanced: none is taken or renewed before
/// the consumer is gone. A relay's later write finds no checkpoint and begins a new one, as with a
/// consumer that is new. What a consumer of the log has had goes, too.
const REMOVE: &str = "WITH advanced AS MATERIALIZED (
        SELECT l.partition, NOT l.released AND l.expires_at > clock_timestamp() AS runs
        FROM {schema}.checkpoint AS c
        JOIN {schema}.lease AS l ON l.outbox = c.outbox AND l.group_name = c.lease_group
            AND l.partition = c.partition
        WHERE c.outbox = {outbox_text} AND c.consumer = $1
        FOR UPDATE OF l),
    at_work AS MATERIALIZED (SELECT min(partition) AS partition FROM advanced WHERE runs),
    forgotten AS (
        DELETE FROM {schema}.checkpoint AS c USING at_work
        WHERE c.outbox = {outbox_text} AND c.consumer = $1 AND at_work.partition IS NULL
        RETURNING 1),
    dropped AS (
        DELETE FROM {schema}.dead_letter AS d USING at_work
        WHERE d.outbox = {outbox_text} AND d.consumer = $1 AND at_work.partition IS NULL
        RETURNING 1),
    base AS (
        DELETE FROM {schema}.wal_base AS b USING at_work
        WHERE b.outbox = {outbox_text} AND b.consumer = $1 AND at_work.partition IS NULL),
    after AS (
        DELETE FROM {schema}.wal_after AS a USING at_work
        WHERE a.outbox = {outbox_text} AND a.consumer = $1 AND at_work.partition IS NULL),
    recovery AS (
        DELETE FROM {schema}.wal_recovery AS r USING at_work
        WHERE r.outbox = {outbox_text} AND r.consumer = $1 AND at_work.partition IS NULL),
    seal AS (
        DELETE FROM {schema}.wal_seal AS s USING at_work
        WHERE s.outbox = {outbox_text} AND s.consumer = $1 AND at_work.partition IS NULL)
    SELECT at_work.partition,
        (SELECT count(*) FROM forgotten) + (SELECT count(*) FROM dropped)
    FROM at_work";

pub(crate) fn timestamp(milliseconds: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(milliseconds).unwrap_or(0))
}

pub(crate) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// What [`STANDINGS`] tells of the place where a consumer reads on.
struct ReadsOn {
    before_stamp: i64,
    before_lo: i64,
    last_stamp: Option<i64>,
}

fn standing(row: &Row) -> Result<(ConsumerProgress, ReadsOn)> {
    let progress = ConsumerProgress {
        consumer: ConsumerName::new(row.get::<_, &str>(0))?,
        partition: PartitionId::new(row.get::<_, &str>(1))?,
        checkpoint: Checkpoint {
            position: Position::from_bytes(row.get(2))?,
            published: row.get::<_, i64>(3).unsigned_abs(),
            updated_at: timestamp(row.get(6)),
        },
        pending: 0,
        oldest_pending_at: None,
        parked: row.get::<_, i64>(7).unsigned_abs(),
        dropped: row.get::<_, i64>(4).unsigned_abs(),
        ended: row.get(5),
    };
    let reads_on =
        ReadsOn { before_stamp: row.get(8), before_lo: row.get(9), last_stamp: row.get(10) };
    Ok((progress, reads_on))
}

/// The parameters of [`PENDING`], a column each.
#[derive(Default)]
struct Columns {
    /// Which standing each row is.
    at: Vec<usize>,
    lowest: Option<i64>,
    indexes: Vec<i32>,
    counts: Vec<i32>,
    before: Vec<i64>,
    stamps: Vec<i64>,
    seqs: Vec<i64>,
    lasts: Vec<Option<i64>>,
}

impl Columns {
    fn of(standings: &[(ConsumerProgress, ReadsOn)]) -> Result<Self> {
        let mut columns = Self::default();
        for (at, (progress, reads_on)) in standings.iter().enumerate() {
            let numbers = progress.partition.to_numbers();
            let Some((index, count)) = numbers.filter(|_| !progress.ended) else { continue };
            let place = Place::of(&progress.checkpoint.position)?;
            columns.at.push(at);
            let lowest = columns.lowest.unwrap_or(i64::MAX);
            columns.lowest = Some(lowest.min(reads_on.before_lo));
            columns.indexes.push(i32::try_from(index).unwrap_or(i32::MAX));
            columns.counts.push(i32::try_from(count).unwrap_or(i32::MAX));
            columns.before.push(reads_on.before_stamp);
            columns.stamps.push(place.stamp);
            columns.seqs.push(place.seq);
            columns.lasts.push(reads_on.last_stamp);
        }
        Ok(columns)
    }
}

#[async_trait]
impl Checkpoints for PostgresStore {
    async fn checkpoint(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
    ) -> Result<Option<Checkpoint>> {
        let params: [Param<'_>; 2] =
            [(&consumer.as_str(), Type::TEXT), (&partition.as_str(), Type::TEXT)];
        let rows = self.query("read the checkpoint", READ, &params).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(Checkpoint {
            position: Position::from_bytes(row.get(0))?,
            published: row.get::<_, i64>(1).unsigned_abs(),
            updated_at: timestamp(row.get(2)),
        }))
    }

    async fn advance(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        to: &Position,
        tally: Tally,
    ) -> Result<()> {
        let place = Place::of(to)?;
        let key = LeaseKey::of(lease);
        let (consumer_name, bytes) = (consumer.as_str(), to.as_bytes());
        let (published, is_time) = (whole(tally.published), to.to_ulid()?.is_plain_time());
        let params = key.params(&[
            (&consumer_name, Type::TEXT),
            (&bytes, Type::BYTEA),
            (&published, Type::INT8),
            (&place.stamp, Type::INT8),
            (&is_time, Type::BOOL),
        ]);
        let rows = self.query_often_under("move the checkpoint", lease, ADVANCE, &params).await?;
        held(&rows, lease)?;
        if !rows[0].get::<_, bool>(1) {
            return Err(Error::fenced(format!(
                "position {to} is unknown to this database: it was replaced by an older copy of \
                 itself; reading begins again at its own checkpoint"
            )));
        }
        if rows[0].get::<_, i64>(2) == 0 {
            return Err(Error::permanent(format!(
                "checkpoint of {consumer} in partition {} would move back to {to}",
                lease.partition()
            )));
        }
        Ok(())
    }

    async fn finish(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        let (mut names, mut froms) = (Vec::new(), Vec::new());
        let (mut indexes, mut counts) = (Vec::<Option<i32>>::new(), Vec::<Option<i32>>::new());
        for successor in successors {
            successor.from.to_ulid()?;
            names.push(successor.partition.as_str());
            froms.push(successor.from.as_bytes());
            let numbers = successor.partition.to_numbers();
            indexes.push(numbers.and_then(|(index, _)| i32::try_from(index).ok()));
            counts.push(numbers.and_then(|(_, count)| i32::try_from(count).ok()));
        }
        let (key, consumer) = (LeaseKey::of(lease), consumer.as_str());
        let params = key.params(&[
            (&consumer, Type::TEXT),
            (&names, Type::TEXT_ARRAY),
            (&froms, Type::BYTEA_ARRAY),
            (&indexes, Type::INT4_ARRAY),
            (&counts, Type::INT4_ARRAY),
        ]);
        held(&self.query_under("finish the partition", lease, FINISH, &params).await?, lease)
    }

    async fn progress(&self) -> Result<Vec<ConsumerProgress>> {
        let rows = self.query("read the consumers' progress", STANDINGS, &[]).await?;
        let mut standings = rows.iter().map(standing).collect::<Result<Vec<_>>>()?;
        let columns = Columns::of(&standings)?;
        if let Some(lowest) = columns.lowest {
            // Of a statement of its own: only with its value known is its plan the right one.
            let params: [Param<'_>; 8] = [
                (&lowest, Type::INT8),
                (&columns.indexes, Type::INT4_ARRAY),
                (&columns.counts, Type::INT4_ARRAY),
                (&columns.before, Type::INT8_ARRAY),
                (&columns.stamps, Type::INT8_ARRAY),
                (&columns.seqs, Type::INT8_ARRAY),
                (&columns.lasts, Type::INT8_ARRAY),
                (&COUNTED, Type::INT8),
            ];
            for row in self.query("count what is pending", PENDING, &params).await? {
                let place = usize::try_from(row.get::<_, i64>(0)).unwrap_or(0);
                let Some(at) = columns.at.get(place.wrapping_sub(1)) else { continue };
                standings[*at].0.pending = row.get::<_, i64>(1).unsigned_abs();
                standings[*at].0.oldest_pending_at = row.get::<_, Option<i64>>(2).map(timestamp);
            }
        }
        Ok(standings.into_iter().map(|(progress, _)| progress).collect())
    }

    async fn remove_consumer(&self, consumer: &ConsumerName) -> Result<bool> {
        let params: [Param<'_>; 1] = [(&consumer.as_str(), Type::TEXT)];
        let rows = self.query("remove the consumer", REMOVE, &params).await?;
        if let Some(partition) = rows[0].get::<_, Option<&str>>(0) {
            return Err(Error::transient(format!(
                "consumer {consumer} is at work in partition {partition}; stop its relays"
            )));
        }
        Ok(rows[0].get::<_, i64>(1) > 0)
    }
}
