//! Dead letters, each with its whole event, so that retention may forget the original.
//!
//! What lives here: the seam over the table `dead_letter`. What does not: the decision to park.
//! Invariant: numbers only grow, and within a key letters leave in the order of their numbers; what
//! a relay does to a letter is done by the statement that checks its lease.

use std::collections::HashSet;

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, DeadLetter, DeadLetterFilter, DeadLetterId, DeadLetterState,
    DeadLetters, Error, HeldLease, Key, NewDeadLetter, PartitionId, Position, Result,
};
use tokio_postgres::types::Type;

use crate::PostgresStore;
use crate::checkpoints::whole;
use crate::connections::Param;
use crate::leases::{LeaseKey, fence, held};
use crate::letters::{Columns, letter_columns, read_letters, state_text, storable};

/// What a person means: `$1` numbers, `$2` consumer, `$3` key, `$4` state; NULL means any.
macro_rules! matches_filter {
    () => {
        "d.outbox = {outbox_text} AND ($1::bigint[] IS NULL OR d.number = ANY ($1))
            AND ($2::text IS NULL OR d.consumer = $2) AND ($3::text IS NULL OR d.key = $3)
            AND ($4::text IS NULL OR d.state = $4)"
    };
}

/// Locks the lease's row against a take-over. Letters are numbered in the order given. From its
/// first letter on, the consumer is known and pins retention.
///
/// An event of the log has another place once it was read from the table: it is known by its id.
const PARK: &str = concat!(
    "WITH ",
    fence!(),
    ", known AS (
        INSERT INTO {schema}.checkpoint (outbox, consumer, partition)
        SELECT {outbox_text}, $5, $2 FROM fence
        ON CONFLICT (outbox, consumer, partition) DO NOTHING),
    added AS (
        INSERT INTO {schema}.dead_letter
            (outbox, consumer, partition, position, state, reason, attempts, appended_ms,
                malformed, id, key, topic, type, content_type, headers, payload)
        SELECT {outbox_text}, $5, $2, n.position, n.state, n.reason, n.attempts, n.appended_ms,
            n.malformed, n.id, n.key, n.topic, n.type, n.content_type, n.headers::json, n.payload
        FROM fence CROSS JOIN unnest($6::bytea[], $7::text[], $8::text[], $9::integer[],
                $10::bigint[], $11::text[], $12::uuid[], $13::text[], $14::text[], $15::text[],
                $16::text[], $17::text[], $18::bytea[])
            WITH ORDINALITY AS n (position, state, reason, attempts, appended_ms, malformed, id,
                key, topic, type, content_type, headers, payload, place)
        WHERE NOT ($2 = 'wal' AND EXISTS (SELECT FROM {schema}.dead_letter AS d
            WHERE d.outbox = {outbox_text} AND d.consumer = $5 AND d.partition = 'wal'
                AND d.id = n.id))
        ORDER BY n.place
        ON CONFLICT (outbox, consumer, partition, position) DO NOTHING
        RETURNING 1)
    SELECT (SELECT count(*) FROM fence), (SELECT count(*) FROM added)"
);

/// Each key costs one look into the index, however many letters wait under it: the comparison of
/// rows and the order by the whole index leave the planner no other way.
const BLOCKED: &str = "SELECT k.key FROM unnest($3::text[]) AS k (key)
    CROSS JOIN LATERAL (SELECT FROM {schema}.dead_letter AS d
        WHERE (d.outbox, d.consumer, d.partition, d.key, d.number)
                > ({outbox_text}, $1, $2, k.key, 0)
            AND (d.outbox, d.consumer, d.partition, d.key, d.number)
                <= ({outbox_text}, $1, $2, k.key, 9223372036854775807)
            AND d.state <> 'skipped'
        ORDER BY d.outbox, d.consumer, d.partition, d.key, d.number LIMIT 1) AS d";

const BLOCKING: &str = "SELECT count(*) FROM {schema}.dead_letter AS d
    WHERE d.outbox = {outbox_text} AND d.consumer = $1 AND d.partition = $2
        AND d.state <> 'skipped'";

/// Of each key, the letters before its first parked one, up to the checkpoint (positions compare
/// bytewise); unreadable ones never. At most `$3` of them, and no more than their payloads reach
/// `$4` bytes before the last one: sizes are known without reading the payloads.
///
/// A catch-up stands in the log where it will end, beyond letters of the stream whose events it has
/// still to read; its own ones come behind those. So none is released before it has ended. Letters
/// of another cluster (the first 8 bytes) came with a dump, and are released after the catch-up
/// behind it.
const RELEASED: &str = concat!(
    "SELECT ",
    letter_columns!(),
    " FROM (SELECT f.number, sum(f.bytes) OVER (ORDER BY f.number) - f.bytes AS bytes_before
        FROM (SELECT d.number, octet_length(d.payload)::bigint AS bytes
            FROM {schema}.dead_letter AS d
            WHERE d.outbox = {outbox_text} AND d.consumer = $1 AND d.partition = $2
                AND d.state IN ('waiting', 'requeued') AND d.malformed IS NULL
                AND EXISTS (SELECT FROM {schema}.checkpoint AS c
                    WHERE c.outbox = {outbox_text} AND c.consumer = $1 AND c.partition = $2
                        AND (d.position <= c.position OR $2 = 'wal'
                            AND substr(d.position, 1, 8) <> substr(c.position, 1, 8))
                        AND NOT ($2 = 'wal' AND EXISTS (SELECT FROM {schema}.wal_recovery AS r
                            WHERE r.outbox = {outbox_text} AND r.consumer = $1)))
                AND NOT EXISTS (SELECT FROM {schema}.dead_letter AS p
                    WHERE p.outbox = {outbox_text} AND p.consumer = $1 AND p.partition = $2
                        AND p.key = d.key AND p.state = 'parked' AND p.number < d.number)
            ORDER BY d.number LIMIT $3) AS f) AS page
    JOIN {schema}.dead_letter AS d ON d.number = page.number
    WHERE page.bytes_before < $4
    ORDER BY d.number"
);

/// Locks the lease's row against a take-over. Counts only what it deleted, so that a repetition
/// counts nothing twice.
const RESOLVE: &str = concat!(
    "WITH ",
    fence!(),
    ", gone AS (
        DELETE FROM {schema}.dead_letter AS d USING fence
        WHERE d.number = ANY ($6) AND d.outbox = {outbox_text} AND d.consumer = $5
            AND d.partition = $2
        RETURNING 1),
    counted AS (
        INSERT INTO {schema}.checkpoint AS c (outbox, consumer, partition, published)
        SELECT {outbox_text}, $5, $2, (SELECT count(*) FROM gone) FROM fence
        ON CONFLICT (outbox, consumer, partition) DO UPDATE
            SET published = c.published + excluded.published)
    SELECT count(*) FROM fence"
);

/// Locks the lease's row against a take-over. A person who gave the letter up meanwhile has the
/// last word.
const REFUSE: &str = concat!(
    "WITH ",
    fence!(),
    ", refused AS (
        UPDATE {schema}.dead_letter AS d
        SET state = CASE d.state WHEN 'skipped' THEN d.state ELSE $6 END, reason = $7,
            attempts = least(d.attempts + $8::bigint, 2147483647)::integer,
            updated_at = clock_timestamp()
        FROM fence
        WHERE d.number = $5 AND d.outbox = {outbox_text} AND d.partition = $2)
    SELECT count(*) FROM fence"
);

const LIST: &str = concat!(
    "SELECT ",
    letter_columns!(),
    " FROM {schema}.dead_letter AS d WHERE ",
    matches_filter!(),
    " AND d.number > $5 ORDER BY d.number LIMIT $6"
);

/// Each row is compared again under its lock: what a relay or another person did to it meanwhile
/// counts.
const TRANSIT: &str = concat!(
    "WITH changed AS (
        UPDATE {schema}.dead_letter AS d SET state = $6, updated_at = clock_timestamp()
        WHERE d.state = ANY ($5) AND ",
    matches_filter!(),
    " RETURNING 1)
    SELECT count(*) FROM changed"
);

/// Of two at once each letter is deleted, and counted, by one. The totals are locked in one order.
const DISCARD: &str = concat!(
    "WITH gone AS (
        DELETE FROM {schema}.dead_letter AS d WHERE ",
    matches_filter!(),
    " RETURNING d.consumer, d.partition),
    counted AS (
        INSERT INTO {schema}.checkpoint AS c (outbox, consumer, partition, dropped)
        SELECT {outbox_text}, consumer, partition, count(*) FROM gone GROUP BY 2, 3 ORDER BY 2, 3
        ON CONFLICT (outbox, consumer, partition) DO UPDATE
            SET dropped = c.dropped + excluded.dropped)
    SELECT count(*) FROM gone"
);

const AT: &str = concat!(
    "SELECT ",
    letter_columns!(),
    " FROM {schema}.dead_letter AS d
    WHERE d.outbox = {outbox_text} AND d.consumer = $1 AND d.partition = $2 AND d.position = $3"
);

/// The values of [`matches_filter!`].
struct Filter<'a> {
    numbers: Option<Vec<i64>>,
    consumer: Option<&'a str>,
    key: Option<&'a str>,
    state: Option<&'static str>,
}

impl<'a> Filter<'a> {
    fn of(filter: &'a DeadLetterFilter) -> Self {
        let numbers = filter.ids.iter().map(|id| whole(id.get())).collect();
        Self {
            numbers: (!filter.ids.is_empty()).then_some(numbers),
            consumer: filter.consumer.as_ref().map(ConsumerName::as_str),
            key: filter.key.as_ref().map(Key::as_str),
            state: filter.state.map(state_text),
        }
    }

    /// The filter's values, followed by a statement's own.
    fn params<'b>(&'b self, own: &[Param<'b>]) -> Vec<Param<'b>> {
        let mut params: Vec<Param<'b>> = vec![
            (&self.numbers, Type::INT8_ARRAY),
            (&self.consumer, Type::TEXT),
            (&self.key, Type::TEXT),
            (&self.state, Type::TEXT),
        ];
        params.extend_from_slice(own);
        params
    }
}

impl PostgresStore {
    async fn transit(
        &self,
        filter: &DeadLetterFilter,
        from: [DeadLetterState; 2],
        to: DeadLetterState,
    ) -> Result<u64> {
        let (from, to) = (from.map(state_text), state_text(to));
        let from = from.as_slice();
        let filter = Filter::of(filter);
        let params = filter.params(&[(&from, Type::TEXT_ARRAY), (&to, Type::TEXT)]);
        let rows = self.query("change the dead letters' state", TRANSIT, &params).await?;
        Ok(rows[0].get::<_, i64>(0).unsigned_abs())
    }
}

#[async_trait]
impl DeadLetters for PostgresStore {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        let (key, consumer, columns) =
            (LeaseKey::of(lease), consumer.as_str(), Columns::of(letters));
        let mut params = key.params(&[(&consumer, Type::TEXT)]);
        params.extend(columns.params());
        let rows = self.query_under("park dead letters", lease, PARK, &params).await?;
        held(&rows, lease)?;
        Ok(rows[0].get::<_, i64>(1).unsigned_abs())
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        let texts: Vec<&str> = keys.iter().map(Key::as_str).collect();
        let params: [Param<'_>; 3] = [
            (&consumer.as_str(), Type::TEXT),
            (&partition.as_str(), Type::TEXT),
            (&texts, Type::TEXT_ARRAY),
        ];
        let rows = self.query("look up the blocked keys", BLOCKED, &params).await?;
        let blocked: HashSet<&str> = rows.iter().map(|row| row.get(0)).collect();
        Ok(keys.iter().filter(|key| blocked.contains(key.as_str())).cloned().collect())
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        let params: [Param<'_>; 2] =
            [(&consumer.as_str(), Type::TEXT), (&partition.as_str(), Type::TEXT)];
        let rows = self.query("count the blocking dead letters", BLOCKING, &params).await?;
        Ok(rows[0].get::<_, i64>(0).unsigned_abs())
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let params: [Param<'_>; 4] = [
            (&consumer.as_str(), Type::TEXT),
            (&partition.as_str(), Type::TEXT),
            (&whole(limit.records.max(1) as u64), Type::INT8),
            (&whole(limit.bytes.max(1) as u64), Type::INT8),
        ];
        let rows = self.query("read the released dead letters", RELEASED, &params).await?;
        let mut letters = read_letters(&rows)?;
        let mut bytes = 0usize;
        let fits = |(at, letter): &(usize, &DeadLetter)| {
            bytes = bytes.saturating_add(letter.entry.cost_bytes());
            *at == 0 || bytes <= limit.bytes
        };
        let fitting = letters.iter().enumerate().take_while(fits).count();
        letters.truncate(fitting);
        Ok(letters)
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        let (key, consumer) = (LeaseKey::of(lease), consumer.as_str());
        let numbers: Vec<i64> = ids.iter().map(|id| whole(id.get())).collect();
        let params = key.params(&[(&consumer, Type::TEXT), (&numbers, Type::INT8_ARRAY)]);
        held(&self.query_under("resolve the dead letters", lease, RESOLVE, &params).await?, lease)
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        if !matches!(state, DeadLetterState::Parked | DeadLetterState::Skipped) {
            return Err(Error::permanent("a refused dead letter is parked again or skipped"));
        }
        let (key, number, state) = (LeaseKey::of(lease), whole(id.get()), state_text(state));
        let (reason, attempts) = (storable(reason), i64::from(attempts));
        let params = key.params(&[
            (&number, Type::INT8),
            (&state, Type::TEXT),
            (&reason, Type::TEXT),
            (&attempts, Type::INT8),
        ]);
        held(&self.query_under("park the dead letter again", lease, REFUSE, &params).await?, lease)
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        let after = after.map_or(0, |id| whole(id.get()));
        let (filter, limit) = (Filter::of(filter), whole(limit as u64));
        let params = filter.params(&[(&after, Type::INT8), (&limit, Type::INT8)]);
        read_letters(&self.query("read the dead letters", LIST, &params).await?)
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Skipped];
        self.transit(filter, from, DeadLetterState::Requeued).await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Requeued];
        self.transit(filter, from, DeadLetterState::Skipped).await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let filter = Filter::of(filter);
        let rows = self.query("drop the dead letters", DISCARD, &filter.params(&[])).await?;
        Ok(rows[0].get::<_, i64>(0).unsigned_abs())
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        let params: [Param<'_>; 3] = [
            (&consumer.as_str(), Type::TEXT),
            (&partition.as_str(), Type::TEXT),
            (&position.as_bytes(), Type::BYTEA),
        ];
        Ok(read_letters(&self.query("read a dead letter", AT, &params).await?)?.pop())
    }
}
