//! What a consumer of the log has had, in the database, and what is pending beyond it.
//!
//! What lives here: the tables `wal_base`, `wal_after` and `wal_recovery`, and the log's rows of
//! `checkpoint`. What does not: the rule by which a row counts as delivered, and what a checkpoint
//! changes (`ledger.rs`).
//! Invariant: all that a checkpoint changes is written by the one statement that checks its lease,
//! or nothing is.

use postrider_core::{
    Checkpoint, ConsumerName, ConsumerProgress, Error, HeldLease, PartitionId, Position, Result,
    Tally,
};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::checkpoints::{COUNTED, timestamp, whole};
use crate::connections::Param;
use crate::leases::{LeaseKey, fence, held};

use super::PARTITION;
use super::ledger::{Base, Delivered, Partial, Recovery, Step};
use super::lsn::Lsn;
use super::position::WalPlace;
use super::snapshot::Snapshot;
use super::xids::Xids;

/// What is delivered to consumer `k`, in the order in which [`read_delivered`] takes it. All of it
/// as of one snapshot. A base from the future of this cluster came with a dump of it, after the
/// cluster was set back: its ids are drawn a second time, and it counts as another cluster's.
macro_rules! delivered {
    () => {
        "c.position, b.snapshot::text, b.lsn::text, b.seq,
            CASE WHEN pg_snapshot_xmax(b.snapshot) > pg_snapshot_xmax(pg_current_snapshot())
                THEN 0 ELSE b.system END,
            b.timeline, b.publication, b.partial_xid::text, b.partial_seq, b.floor,
            ARRAY(SELECT a.block FROM {schema}.wal_after AS a WHERE a.outbox = {outbox_text}
                AND a.consumer = k.consumer ORDER BY a.block),
            ARRAY(SELECT a.xids FROM {schema}.wal_after AS a WHERE a.outbox = {outbox_text}
                AND a.consumer = k.consumer ORDER BY a.block),
            ARRAY(SELECT r.snapshot::text FROM {schema}.wal_recovery AS r
                WHERE r.outbox = {outbox_text} AND r.consumer = k.consumer ORDER BY r.number),
            ARRAY(SELECT r.floor FROM {schema}.wal_recovery AS r
                WHERE r.outbox = {outbox_text} AND r.consumer = k.consumer ORDER BY r.number),
            ARRAY(SELECT r.seq FROM {schema}.wal_recovery AS r
                WHERE r.outbox = {outbox_text} AND r.consumer = k.consumer ORDER BY r.number)"
    };
}
/// How many columns [`delivered!`] has.
const DELIVERED_COLUMNS: usize = 15;

macro_rules! books {
    () => {
        "LEFT JOIN {schema}.checkpoint AS c ON c.outbox = {outbox_text}
            AND c.consumer = k.consumer AND c.partition = 'wal'
        LEFT JOIN {schema}.wal_base AS b ON b.outbox = {outbox_text} AND b.consumer = k.consumer"
    };
}

const LOAD: &str =
    concat!("SELECT ", delivered!(), " FROM (SELECT $1::text AS consumer) AS k ", books!());

/// Locks the lease's row against a take-over, then the checkpoint's, which is compared as it is
/// under its lock; nothing else is written unless that one was. A place of another cluster or
/// history, or beyond what was ever written here, was read before this database was replaced by
/// another copy.
const ADVANCE: &str = concat!(
    "WITH ",
    fence!(),
    ", place AS MATERIALIZED (
        SELECT s.system_identifier = $8 AND $10::text::pg_lsn <= pg_current_wal_insert_lsn()
            AND ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer = $9
            AS known
        FROM pg_control_system() AS s),
    moved AS (
        INSERT INTO {schema}.checkpoint AS c
            (outbox, consumer, partition, position, published, lease_group)
        SELECT {outbox_text}, $5, $2, $6, $7, $1 FROM fence CROSS JOIN place WHERE place.known
        ON CONFLICT (outbox, consumer, partition) DO UPDATE SET position = excluded.position,
            published = c.published + CASE
                WHEN substring(c.position FOR 8) = substring(excluded.position FOR 8)
                    AND substring(c.position FROM 12) = substring(excluded.position FROM 12)
                THEN 0 ELSE excluded.published END,
            lease_group = excluded.lease_group, updated_at = clock_timestamp()
        WHERE c.position IS NULL
            OR substring(c.position FOR 8) <> substring(excluded.position FOR 8)
            OR substring(c.position FROM 12) <= substring(excluded.position FROM 12)
        RETURNING 1),
    based AS (
        INSERT INTO {schema}.wal_base AS b (outbox, consumer, snapshot, lsn, seq, system, timeline,
            publication, partial_xid, partial_seq, floor)
        SELECT {outbox_text}, $5, $11::text::pg_snapshot, $12::text::pg_lsn, $13, $8, $14, $15,
            $16::text::xid8, $17, $24
        FROM moved WHERE $11::text IS NOT NULL
        ON CONFLICT (outbox, consumer) DO UPDATE SET snapshot = excluded.snapshot,
            lsn = excluded.lsn, seq = excluded.seq, system = excluded.system,
            timeline = excluded.timeline, publication = excluded.publication,
            partial_xid = excluded.partial_xid, partial_seq = excluded.partial_seq,
            floor = excluded.floor
        RETURNING 1),
    parted AS (
        UPDATE {schema}.wal_base AS b SET partial_xid = $16::text::xid8, partial_seq = $17
        FROM moved
        WHERE b.outbox = {outbox_text} AND b.consumer = $5 AND $11::text IS NULL AND $18
        RETURNING 1),
    written AS (
        INSERT INTO {schema}.wal_after AS a (outbox, consumer, block, xids)
        SELECT {outbox_text}, $5, n.block, n.xids
        FROM moved CROSS JOIN unnest($19::bigint[], $20::bytea[]) AS n (block, xids)
        ON CONFLICT (outbox, consumer, block) DO UPDATE SET xids = excluded.xids),
    gone AS (
        DELETE FROM {schema}.wal_after AS a USING moved
        WHERE a.outbox = {outbox_text} AND a.consumer = $5 AND $11::text IS NOT NULL
            AND a.block <> ALL ($19)),
    recovered AS (
        INSERT INTO {schema}.wal_recovery AS r (outbox, consumer, number, snapshot, seq, floor)
        SELECT {outbox_text}, $5, $21, $22::text::pg_snapshot, $23, $25 FROM moved
        WHERE $22::text IS NOT NULL
        ON CONFLICT (outbox, consumer, number) DO UPDATE
            SET snapshot = excluded.snapshot, seq = excluded.seq, floor = excluded.floor),
    ended AS (
        DELETE FROM {schema}.wal_recovery AS r USING moved
        WHERE r.outbox = {outbox_text} AND r.consumer = $5
            AND r.number >= $21 + ($22::text IS NOT NULL)::integer)
    SELECT (SELECT count(*) FROM fence), (SELECT known FROM place), (SELECT count(*) FROM moved),
        (SELECT count(*) FROM based) + (SELECT count(*) FROM parted)"
);

const PLACES: &str = "SELECT c.consumer, c.position FROM {schema}.checkpoint AS c
    WHERE c.outbox = {outbox_text} AND c.partition = 'wal' AND c.position IS NOT NULL
    ORDER BY c.consumer";

const STANDINGS: &str = concat!(
    "SELECT ",
    delivered!(),
    ", k.consumer, k.published, k.dropped, (extract(epoch FROM k.updated_at) * 1000)::bigint,
        (SELECT count(*) FROM {schema}.dead_letter AS d WHERE d.outbox = {outbox_text}
            AND d.consumer = k.consumer AND d.partition = k.partition),
        (SELECT s.system_identifier FROM pg_control_system() AS s)
    FROM {schema}.checkpoint AS k ",
    books!(),
    " WHERE k.outbox = {outbox_text} AND k.partition = 'wal' AND k.position IS NOT NULL
    ORDER BY k.consumer"
);

/// Counts what is not delivered to one consumer: the rows numbered after its base's moment, and the
/// late ones below, whose transactions the base does not see; less what was delivered beyond the
/// base. Ids are looked up as pairs (xid, seq): after a bulk load the planner believes that every
/// row is of the transaction that it looks for. All are read by an index, in order and under a
/// limit that the planner can't know: without statistics it would else read the whole table.
/// Beyond the first `$11` rows the numbers drawn stand for them.
const PENDING: &str = "WITH after AS MATERIALIZED (
        SELECT a.block, a.bits FROM unnest($3::bigint[], $4::bytea[]) AS a (block, bits)),
    recovery AS MATERIALIZED (
        SELECT r.snap::pg_snapshot AS snap, r.seq, r.floor
        FROM unnest($7::text[], $8::bigint[], $9::bigint[]) AS r (snap, seq, floor)),
    newer AS MATERIALIZED (
        SELECT o.xid, o.seq, o.created_at FROM {schema}.{outbox} AS o
        WHERE o.seq > $2 ORDER BY o.seq LIMIT (SELECT $11)),
    uncounted AS MATERIALIZED (
        SELECT (SELECT o.seq FROM {schema}.{outbox} AS o ORDER BY o.seq DESC LIMIT 1) - max(n.seq)
            AS rows, max(n.created_at) AS after
        FROM newer AS n HAVING count(*) >= $11),
    beyond AS (
        SELECT * FROM newer
        UNION ALL
        SELECT o.xid, o.seq, o.created_at
        FROM pg_snapshot_xip($1::text::pg_snapshot) AS x
        CROSS JOIN LATERAL (SELECT o.xid, o.seq, o.created_at FROM {schema}.{outbox} AS o
            WHERE (o.xid, o.seq) > (x, $10) AND (o.xid, o.seq) <= (x, $2)
            ORDER BY o.xid, o.seq LIMIT (SELECT 9223372036854775807)) AS o
        UNION ALL
        SELECT * FROM (SELECT o.xid, o.seq, o.created_at FROM {schema}.{outbox} AS o
            WHERE o.xid >= pg_snapshot_xmax($1::text::pg_snapshot) AND o.seq <= $2 AND o.seq > $10
            ORDER BY o.xid, o.seq LIMIT (SELECT 9223372036854775807)) AS late)
    SELECT count(*) + coalesce((SELECT u.rows FROM uncounted AS u), 0),
        (extract(epoch FROM coalesce(min(b.created_at), (SELECT u.after FROM uncounted AS u
            WHERE u.rows > 0))) * 1000000)::bigint / 1000
    FROM beyond AS b LEFT JOIN after AS a ON a.block = b.xid::text::bigint >> 16
    WHERE coalesce(get_bit(a.bits, (b.xid::text::bigint & 65535)::integer), 0) = 0
        AND NOT coalesce(b.xid = $5::text::xid8 AND b.seq <= $6, false)
        AND NOT EXISTS (SELECT FROM recovery AS r
            WHERE b.seq <= r.seq
                AND (b.seq <= r.floor OR pg_visible_in_snapshot(b.xid, r.snap)))";

/// A cluster's identifier is 64 bits without a sign; SQL has them with one.
fn signed(system: u64) -> i64 {
    i64::from_be_bytes(system.to_be_bytes())
}

fn unsigned(system: i64) -> u64 {
    u64::from_be_bytes(system.to_be_bytes())
}

fn number(xid: &str) -> Result<u64> {
    xid.parse().map_err(|_| Error::corrupt("a delivered transaction has no number for an id"))
}

fn read_base(row: &Row) -> Result<Option<Base>> {
    let Some(snapshot) = row.get::<_, Option<&str>>(1) else { return Ok(None) };
    Ok(Some(Base {
        snapshot: Snapshot::parse(snapshot)?,
        lsn: Lsn::parse(row.get(2))?,
        seq: row.get(3),
        system: unsigned(row.get(4)),
        timeline: row.get::<_, i32>(5).unsigned_abs(),
        publication: row.get(6),
        floor: row.get(9),
    }))
}

/// Reads the columns of [`delivered!`], which come first.
fn read_delivered(row: &Row) -> Result<Delivered> {
    let position = row.get::<_, Option<&[u8]>>(0).map(Position::from_bytes).transpose()?;
    let partial = |xid: &str| Ok(Partial { xid: number(xid)?, seq: row.get(8) });
    let mut after = Xids::default();
    for (block, bytes) in row.get::<_, Vec<i64>>(10).iter().zip(row.get::<_, Vec<&[u8]>>(11)) {
        after.take_in(block.unsigned_abs(), bytes)?;
    }
    let recovery = |((snapshot, floor), seq): ((&str, i64), i64)| {
        Ok(Recovery { snapshot: Snapshot::parse(snapshot)?, floor, seq })
    };
    let recoveries = row.get::<_, Vec<&str>>(12).into_iter().zip(row.get::<_, Vec<i64>>(13));
    let recoveries = recoveries.zip(row.get::<_, Vec<i64>>(14));
    Ok(Delivered {
        place: position.as_ref().map(WalPlace::of).transpose()?,
        base: read_base(row)?,
        after,
        partial: row.get::<_, Option<&str>>(7).map(partial).transpose()?,
        recoveries: recoveries.map(recovery).collect::<Result<_>>()?,
    })
}

/// All that is durable of a consumer; nothing of an unknown one.
pub(crate) async fn load(store: &PostgresStore, consumer: &ConsumerName) -> Result<Delivered> {
    let params: [Param<'_>; 1] = [(&consumer.as_str(), Type::TEXT)];
    let rows = store.query("read what was delivered", LOAD, &params).await?;
    rows.first().map_or_else(|| Ok(Delivered::default()), read_delivered)
}

/// A step's own values, as [`ADVANCE`] takes them.
struct Values<'a> {
    system: i64,
    timeline: i32,
    lsn: String,
    snapshot: Option<String>,
    base_lsn: Option<String>,
    base_seq: Option<i64>,
    base_timeline: Option<i32>,
    publication: Option<&'a str>,
    partial_xid: Option<String>,
    partial_seq: Option<i64>,
    moves_partial: bool,
    numbers: Vec<i64>,
    blocks: Vec<&'a [u8]>,
    kept: i32,
    recovered: Option<String>,
    recovered_seq: Option<i64>,
    floor: Option<i64>,
    recovered_floor: Option<i64>,
}

impl<'a> Values<'a> {
    fn of(step: &'a Step) -> Self {
        let timeline = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
        let (base, recovery) = (step.base.as_ref(), step.recovery.as_ref());
        let block = |(number, bytes): &'a (u64, Vec<u8>)| (whole(*number), bytes.as_slice());
        let (numbers, blocks) = step.blocks.iter().map(block).unzip();
        Self {
            system: signed(step.to.system),
            timeline: timeline(step.to.timeline),
            lsn: step.to.lsn.to_string(),
            snapshot: base.map(|base| base.snapshot.to_string()),
            base_lsn: base.map(|base| base.lsn.to_string()),
            base_seq: base.map(|base| base.seq),
            base_timeline: base.map(|base| timeline(base.timeline)),
            publication: base.map(|base| base.publication.as_str()),
            partial_xid: step.partial.map(|part| part.xid.to_string()),
            partial_seq: step.partial.map(|part| part.seq),
            moves_partial: step.moves_partial,
            numbers,
            blocks,
            kept: i32::try_from(step.recoveries_kept).unwrap_or(i32::MAX),
            recovered: recovery.map(|one| one.snapshot.to_string()),
            recovered_seq: recovery.map(|one| one.seq),
            floor: base.map(|base| base.floor),
            recovered_floor: recovery.map(|one| one.floor),
        }
    }

    fn params(&self) -> [Param<'_>; 18] {
        [
            (&self.system, Type::INT8),
            (&self.timeline, Type::INT4),
            (&self.lsn, Type::TEXT),
            (&self.snapshot, Type::TEXT),
            (&self.base_lsn, Type::TEXT),
            (&self.base_seq, Type::INT8),
            (&self.base_timeline, Type::INT4),
            (&self.publication, Type::TEXT),
            (&self.partial_xid, Type::TEXT),
            (&self.partial_seq, Type::INT8),
            (&self.moves_partial, Type::BOOL),
            (&self.numbers, Type::INT8_ARRAY),
            (&self.blocks, Type::BYTEA_ARRAY),
            (&self.kept, Type::INT4),
            (&self.recovered, Type::TEXT),
            (&self.recovered_seq, Type::INT8),
            (&self.floor, Type::INT8),
            (&self.recovered_floor, Type::INT8),
        ]
    }
}

/// Writes a step, whole or not at all, and adds the tally, unless the checkpoint stood there
/// already.
///
/// # Errors
/// `Fenced` when the lease was taken over, or the place is of another copy of this database;
/// `Permanent` when the checkpoint is beyond it.
///
/// # Cancellation
/// A dropped call may or may not have been done. It can be made again, with the same step or one
/// planned since.
pub(crate) async fn advance(
    store: &PostgresStore,
    lease: &HeldLease,
    consumer: &ConsumerName,
    step: &Step,
    tally: Tally,
) -> Result<()> {
    let position = step.to.position()?;
    let (key, name, bytes) = (LeaseKey::of(lease), consumer.as_str(), position.as_bytes());
    let (published, values) = (whole(tally.published), Values::of(step));
    let mut params =
        key.params(&[(&name, Type::TEXT), (&bytes, Type::BYTEA), (&published, Type::INT8)]);
    params.extend(values.params());
    let rows = store.query_under("move the checkpoint", lease, ADVANCE, &params).await?;
    held(&rows, lease)?;
    let row = &rows[0];
    if !row.get::<_, bool>(1) {
        return Err(Error::fenced(format!(
            "position {position} is unknown to this database: it was replaced by another copy; \
             reading begins again at its own checkpoint"
        )));
    }
    if row.get::<_, i64>(2) == 0 {
        return Err(Error::permanent(format!(
            "checkpoint of {consumer} in the log would move back to {position}"
        )));
    }
    if step.moves_partial && row.get::<_, i64>(3) == 0 {
        return Err(Error::corrupt(format!("what consumer {consumer} has had is not there")));
    }
    Ok(())
}

/// Where each consumer of the log stands.
pub(crate) async fn places(store: &PostgresStore) -> Result<Vec<(ConsumerName, WalPlace)>> {
    let rows = store.query("read the consumers' places", PLACES, &[]).await?;
    let place = |row: &Row| {
        let position = Position::from_bytes(row.get(1))?;
        Ok((ConsumerName::new(row.get::<_, &str>(0))?, WalPlace::of(&position)?))
    };
    rows.iter().map(place).collect()
}

/// Counts what is pending for one consumer of this cluster.
async fn count(store: &PostgresStore, delivered: &Delivered, system: u64) -> Result<Row> {
    let base = delivered.base.as_ref();
    let here = base.is_some_and(|base| base.system == system);
    let snapshot = base.map(|base| base.snapshot.to_string());
    let (seq, floor) = base.map_or((i64::MIN, i64::MIN), |base| (base.seq, base.floor));
    let numbers = if here { delivered.after.numbers() } else { Vec::new() };
    let bitmaps: Vec<Option<Vec<u8>>> =
        numbers.iter().map(|number| delivered.after.bitmap(*number)).collect();
    let numbers: Vec<i64> = numbers.into_iter().map(whole).collect();
    let partial = delivered.partial.filter(|_| here);
    let (partial_xid, partial_seq) =
        (partial.map(|part| part.xid.to_string()), partial.map(|part| part.seq));
    let recoveries = delivered.recoveries.iter();
    let (snapshots, (seqs, floors)): (Vec<String>, (Vec<i64>, Vec<i64>)) =
        recoveries.map(|one| (one.snapshot.to_string(), (one.seq, one.floor))).unzip();
    let params: [Param<'_>; 11] = [
        (&snapshot, Type::TEXT),
        (&seq, Type::INT8),
        (&numbers, Type::INT8_ARRAY),
        (&bitmaps, Type::BYTEA_ARRAY),
        (&partial_xid, Type::TEXT),
        (&partial_seq, Type::INT8),
        (&snapshots, Type::TEXT_ARRAY),
        (&seqs, Type::INT8_ARRAY),
        (&floors, Type::INT8_ARRAY),
        (&floor, Type::INT8),
        (&COUNTED, Type::INT8),
    ];
    let rows = store.query("count what is pending", PENDING, &params).await?;
    rows.into_iter().next().ok_or_else(|| Error::corrupt("a count has no row"))
}

/// Every consumer of the log, with what is pending beyond what it has had.
pub(crate) async fn progress(store: &PostgresStore) -> Result<Vec<ConsumerProgress>> {
    let mut standings = Vec::new();
    for row in store.query("read the consumers' progress", STANDINGS, &[]).await? {
        let own = |at: usize| DELIVERED_COLUMNS + at;
        let pending = count(store, &read_delivered(&row)?, unsigned(row.get(own(5)))).await?;
        standings.push(ConsumerProgress {
            consumer: ConsumerName::new(row.get::<_, &str>(own(0)))?,
            partition: PartitionId::new(PARTITION)?,
            checkpoint: Checkpoint {
                position: Position::from_bytes(row.get(0))?,
                published: row.get::<_, i64>(own(1)).unsigned_abs(),
                updated_at: timestamp(row.get(own(3))),
            },
            pending: pending.get::<_, i64>(0).unsigned_abs(),
            oldest_pending_at: pending.get::<_, Option<i64>>(1).map(timestamp),
            parked: row.get::<_, i64>(own(4)).unsigned_abs(),
            dropped: row.get::<_, i64>(own(2)).unsigned_abs(),
            ended: false,
        });
    }
    Ok(standings)
}
