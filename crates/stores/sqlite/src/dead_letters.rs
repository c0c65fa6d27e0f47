//! Dead letters, each with its whole event, so that retention may forget the original.
//!
//! What lives here: the seam over `postrider_dead_letter`. What does not: the decision to park.
//! Invariant: numbers only grow, and within a key letters leave in the order of their numbers.

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, DeadLetter, DeadLetterFilter, DeadLetterId, DeadLetterState,
    DeadLetters, Entry, Error, HeldLease, Key, Malformed, NewDeadLetter, PartitionId, Position,
    Result,
};
use rusqlite::{Connection, Row, ToSql, Transaction};

use crate::SqliteStore;
use crate::checkpoints;
use crate::error::failed;
use crate::leases::{copy, fence};
use crate::positions::{ms, timestamp};
use crate::row::{Decoder, headers_text};

const COLUMNS: &str = "d.number, d.consumer, d.partition, d.position, d.state, d.reason, \
     d.attempts, d.parked_ms, d.updated_ms, d.at_ms, d.malformed, d.id, d.key, d.topic, d.type, \
     d.content_type, d.headers, d.payload";
/// Where the event's own columns begin in [`COLUMNS`].
const EVENT_AT: usize = 11;

const fn state_text(state: DeadLetterState) -> &'static str {
    match state {
        DeadLetterState::Parked => "parked",
        DeadLetterState::Waiting => "waiting",
        DeadLetterState::Requeued => "requeued",
        DeadLetterState::Skipped => "skipped",
    }
}

fn state_of(text: &str) -> Result<DeadLetterState> {
    match text {
        "parked" => Ok(DeadLetterState::Parked),
        "waiting" => Ok(DeadLetterState::Waiting),
        "requeued" => Ok(DeadLetterState::Requeued),
        "skipped" => Ok(DeadLetterState::Skipped),
        _ => Err(Error::corrupt(format!("a dead letter has the unknown state {text:?}"))),
    }
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn read_letter(row: &Row<'_>, decoder: &mut Decoder) -> Result<DeadLetter> {
    let place = "read a dead letter";
    let sql = || -> rusqlite::Result<_> {
        let number: i64 = row.get(0)?;
        let texts: [String; 4] = [row.get(1)?, row.get(2)?, row.get(4)?, row.get(5)?];
        let position: Vec<u8> = row.get(3)?;
        let times: [i64; 3] = [row.get(7)?, row.get(8)?, row.get(9)?];
        Ok((number, texts, position, row.get::<_, u32>(6)?, times))
    };
    let (number, [consumer, partition, state, reason], position, attempts, times) =
        sql().map_err(failed(place))?;
    let position = Position::from_bytes(&position)?;
    let at = timestamp(times[2]);
    let malformed: Option<String> = row.get(10).map_err(failed(place))?;
    let entry = match malformed {
        None => decoder.entry(row, EVENT_AT, position, at).map_err(failed(place))?,
        Some(why) => {
            let key: Option<String> = row.get(EVENT_AT + 1).map_err(failed(place))?;
            let raw: Vec<u8> = row.get(EVENT_AT + 6).map_err(failed(place))?;
            let key = key.map(Key::new).transpose()?;
            let raw = raw.into();
            Entry::Malformed(Malformed { position, appended_at: at, key, reason: why, raw })
        }
    };
    Ok(DeadLetter {
        id: DeadLetterId::new(number.unsigned_abs()),
        consumer: ConsumerName::new(consumer)?,
        partition: PartitionId::new(partition)?,
        entry,
        state: state_of(&state)?,
        reason,
        attempts,
        parked_at: timestamp(times[0]),
        updated_at: timestamp(times[1]),
    })
}

const PARK: &str = "INSERT INTO postrider_dead_letter
        (consumer, partition, position, state, reason, attempts, parked_ms, updated_ms, at_ms,
         malformed, id, key, topic, type, content_type, headers, payload)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)
    ON CONFLICT (consumer, partition, position) DO NOTHING";

fn insert(
    tx: &Connection,
    consumer: &str,
    partition: &str,
    letter: &NewDeadLetter,
    now_ms: i64,
) -> Result<usize> {
    let place = "park a dead letter";
    let position = letter.entry.position().as_bytes();
    let state = state_text(letter.state);
    let mut statement = tx.prepare_cached(PARK).map_err(failed(place))?;
    let inserted = match &letter.entry {
        Entry::Record(record) => {
            let event = &record.event;
            statement.execute(rusqlite::params![
                consumer,
                partition,
                position,
                state,
                letter.reason,
                letter.attempts,
                now_ms,
                ms(record.appended_at),
                None::<&str>,
                event.id().as_uuid().as_bytes().as_slice(),
                event.key().as_str(),
                event.topic().as_str(),
                event.event_type().as_str(),
                event.content_type().as_str(),
                headers_text(event.headers()),
                event.payload().as_ref(),
            ])
        }
        Entry::Malformed(malformed) => statement.execute(rusqlite::params![
            consumer,
            partition,
            position,
            state,
            letter.reason,
            letter.attempts,
            now_ms,
            ms(malformed.appended_at),
            malformed.reason,
            None::<&[u8]>,
            malformed.key.as_ref().map(Key::as_str),
            None::<&str>,
            None::<&str>,
            None::<&str>,
            None::<&str>,
            malformed.raw.as_ref(),
        ]),
    };
    inserted.map_err(failed(place))
}

/// The keys that have letters of a consumer in a partition; `None` stands for unreadable ones.
pub(crate) fn keys_of(
    tx: &Connection,
    consumer: &str,
    partition: &str,
) -> Result<Vec<Option<Key>>> {
    let place = "read the dead letters' keys";
    let mut statement = tx
        .prepare_cached(
            "SELECT DISTINCT key FROM postrider_dead_letter
             WHERE consumer = ?1 AND partition = ?2",
        )
        .map_err(failed(place))?;
    let rows = statement
        .query_map((consumer, partition), |row| row.get::<_, Option<String>>(0))
        .map_err(failed(place))?;
    rows.map(|row| row.map_err(failed(place))?.map(Key::new).transpose()).collect()
}

/// What a filter asks for, as SQL: a clause over `d`, and its values.
fn clause(filter: &DeadLetterFilter) -> (String, Vec<Box<dyn ToSql>>) {
    let mut text = String::from("1 = 1");
    let mut values: Vec<Box<dyn ToSql>> = Vec::new();
    if !filter.ids.is_empty() {
        // One value however many numbers: SQLite limits how many a statement may have.
        let numbers: Vec<i64> = filter.ids.iter().map(|id| whole(id.get())).collect();
        let numbers = serde_json::to_string(&numbers).expect("numbers always serialise");
        text.push_str(" AND d.number IN (SELECT value FROM json_each(?))");
        values.push(Box::new(numbers));
    }
    let mut also = |sql: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(sql);
            values.push(Box::new(value));
        }
    };
    let consumer = filter.consumer.as_ref().map(|name| name.as_str().to_owned());
    also(" AND d.consumer = ?", consumer);
    also(" AND d.key = ?", filter.key.as_ref().map(|key| key.as_str().to_owned()));
    also(" AND d.state = ?", filter.state.map(|state| state_text(state).to_owned()));
    (text, values)
}

/// Runs in an IMMEDIATE transaction: what matched cannot change before it is moved.
fn transit(
    tx: &Transaction<'_>,
    filter: &DeadLetterFilter,
    from: [DeadLetterState; 2],
    to: DeadLetterState,
    now_ms: i64,
) -> Result<u64> {
    let (clause, values) = clause(filter);
    let [first, second] = from.map(state_text);
    let sql = format!(
        "UPDATE postrider_dead_letter AS d SET state = '{}', updated_ms = {now_ms}
         WHERE d.state IN ('{first}', '{second}') AND {clause}",
        state_text(to)
    );
    let changed = tx
        .execute(&sql, rusqlite::params_from_iter(values))
        .map_err(failed("change the dead letters' state"))?;
    Ok(changed as u64)
}

fn discard(tx: &Transaction<'_>, filter: &DeadLetterFilter, now_ms: i64) -> Result<u64> {
    let place = "drop the dead letters";
    let (clause, values) = clause(filter);
    let sql = format!(
        "DELETE FROM postrider_dead_letter AS d WHERE {clause} RETURNING consumer, partition"
    );
    let mut dropped: Vec<(String, String)> = tx
        .prepare(&sql)
        .and_then(|mut statement| {
            statement
                .query_map(rusqlite::params_from_iter(values), |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })?
                .collect()
        })
        .map_err(failed(place))?;
    dropped.sort_unstable();
    for group in dropped.chunk_by(|a, b| a == b) {
        let (consumer, partition) = &group[0];
        checkpoints::count(tx, consumer, partition, 0, group.len() as u64, now_ms)?;
    }
    Ok(dropped.len() as u64)
}

/// Of each key, the letters before its first parked one, up to the checkpoint; unreadable ones
/// never.
const RELEASED: &str = "FROM postrider_dead_letter d
    WHERE d.consumer = ?1 AND d.partition = ?2 AND d.state IN ('waiting', 'requeued')
        AND d.malformed IS NULL
        AND d.position <= (SELECT c.position FROM postrider_checkpoint c
            WHERE c.consumer = ?1 AND c.partition = ?2)
        AND NOT EXISTS (SELECT 1 FROM postrider_dead_letter p
            WHERE p.consumer = ?1 AND p.partition = ?2 AND p.key = d.key AND p.state = 'parked'
                AND p.number < d.number)
    ORDER BY d.number LIMIT ?3";

fn released(
    tx: &Connection,
    consumer: &str,
    partition: &str,
    limit: BatchLimit,
) -> Result<Vec<DeadLetter>> {
    let place = "read the released dead letters";
    let most = i64::try_from(limit.records.max(1)).unwrap_or(i64::MAX);
    let mut statement =
        tx.prepare_cached(&format!("SELECT {COLUMNS} {RELEASED}")).map_err(failed(place))?;
    let mut rows = statement.query((consumer, partition, most)).map_err(failed(place))?;
    let mut decoder = Decoder::default();
    let mut page: Vec<DeadLetter> = Vec::new();
    let mut bytes = 0usize;
    while let Some(row) = rows.next().map_err(failed(place))? {
        let letter = read_letter(row, &mut decoder)?;
        bytes = bytes.saturating_add(letter.entry.cost_bytes());
        if !page.is_empty() && bytes > limit.bytes {
            break;
        }
        page.push(letter);
    }
    Ok(page)
}

fn select(tx: &Connection, tail: &str, values: Vec<Box<dyn ToSql>>) -> Result<Vec<DeadLetter>> {
    let place = "read the dead letters";
    let sql = format!("SELECT {COLUMNS} FROM postrider_dead_letter d WHERE {tail}");
    let mut statement = tx.prepare_cached(&sql).map_err(failed(place))?;
    let mut rows = statement.query(rusqlite::params_from_iter(values)).map_err(failed(place))?;
    let mut decoder = Decoder::default();
    let mut letters = Vec::new();
    while let Some(row) = rows.next().map_err(failed(place))? {
        letters.push(read_letter(row, &mut decoder)?);
    }
    Ok(letters)
}

fn resolve(
    tx: &Transaction<'_>,
    lease: &HeldLease,
    consumer: &str,
    ids: &[DeadLetterId],
    now_ms: i64,
) -> Result<()> {
    fence(tx, lease)?;
    let place = "resolve the dead letters";
    let partition = lease.partition().as_str();
    let mut statement = tx
        .prepare_cached(
            "DELETE FROM postrider_dead_letter
             WHERE number = ?1 AND consumer = ?2 AND partition = ?3",
        )
        .map_err(failed(place))?;
    let mut published = 0;
    for id in ids {
        let gone = statement.execute((whole(id.get()), consumer, partition));
        published += gone.map_err(failed(place))? as u64;
    }
    checkpoints::count(tx, consumer, partition, published, 0, now_ms)
}

#[async_trait]
impl DeadLetters for SqliteStore {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        let (lease, consumer, letters) = (copy(lease), consumer.clone(), letters.to_vec());
        let now_ms = self.inner.clock.wall_ms();
        self.write_tx(move |tx| {
            fence(tx, &lease)?;
            let (consumer, partition) = (consumer.as_str(), lease.partition().as_str());
            // From its first letter on, the consumer is known and pins retention.
            checkpoints::count(tx, consumer, partition, 0, 0, now_ms)?;
            let mut added = 0;
            for letter in &letters {
                added += insert(tx, consumer, partition, letter, now_ms)? as u64;
            }
            Ok(added)
        })
        .await
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        let (consumer, partition, keys) = (consumer.clone(), partition.clone(), keys.to_vec());
        self.read_tx(move |tx| {
            let place = "look up the blocked keys";
            let mut any = tx
                .prepare_cached(
                    "SELECT 1 FROM postrider_dead_letter WHERE consumer = ?1 AND partition = ?2
                         AND state IN ('parked', 'waiting', 'requeued') LIMIT 1",
                )
                .map_err(failed(place))?;
            if !any.exists((consumer.as_str(), partition.as_str())).map_err(failed(place))? {
                return Ok(Vec::new());
            }
            let mut one = tx
                .prepare_cached(
                    "SELECT 1 FROM postrider_dead_letter
                     WHERE consumer = ?1 AND partition = ?2 AND key = ?3
                         AND state IN ('parked', 'waiting', 'requeued') LIMIT 1",
                )
                .map_err(failed(place))?;
            let mut blocked = Vec::new();
            for key in keys {
                let values = (consumer.as_str(), partition.as_str(), key.as_str());
                if one.exists(values).map_err(failed(place))? {
                    blocked.push(key);
                }
            }
            Ok(blocked)
        })
        .await
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        let (consumer, partition) = (consumer.clone(), partition.clone());
        self.read_tx(move |tx| {
            tx.prepare_cached(
                "SELECT count(*) FROM postrider_dead_letter
                 WHERE consumer = ?1 AND partition = ?2
                     AND state IN ('parked', 'waiting', 'requeued')",
            )
            .and_then(|mut statement| {
                statement.query_row((consumer.as_str(), partition.as_str()), |row| row.get(0))
            })
            .map(i64::unsigned_abs)
            .map_err(failed("count the blocking dead letters"))
        })
        .await
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let (consumer, partition) = (consumer.clone(), partition.clone());
        self.read_tx(move |tx| released(tx, consumer.as_str(), partition.as_str(), limit)).await
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        let (lease, consumer, ids) = (copy(lease), consumer.clone(), ids.to_vec());
        let now_ms = self.inner.clock.wall_ms();
        self.write_tx(move |tx| resolve(tx, &lease, consumer.as_str(), &ids, now_ms)).await
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
        let (lease, reason) = (copy(lease), reason.to_owned());
        let now_ms = self.inner.clock.wall_ms();
        self.write_tx(move |tx| {
            fence(tx, &lease)?;
            // A person who gave it up meanwhile has the last word.
            tx.prepare_cached(
                "UPDATE postrider_dead_letter SET
                     state = CASE state WHEN 'skipped' THEN state ELSE ?3 END,
                     reason = ?4, attempts = min(attempts + ?5, 4294967295), updated_ms = ?6
                 WHERE number = ?1 AND partition = ?2",
            )
            .and_then(|mut statement| {
                let (number, partition) = (whole(id.get()), lease.partition().as_str());
                statement.execute((number, partition, state_text(state), reason, attempts, now_ms))
            })
            .map(drop)
            .map_err(failed("park the dead letter again"))
        })
        .await
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        let filter = filter.clone();
        self.read_tx(move |tx| {
            let (clause, values) = clause(&filter);
            let after = after.map_or(0, |id| whole(id.get()));
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let tail = format!("{clause} AND d.number > {after} ORDER BY d.number LIMIT {limit}");
            select(tx, &tail, values)
        })
        .await
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Skipped];
        let (filter, now_ms) = (filter.clone(), self.inner.clock.wall_ms());
        self.transaction(move |tx| transit(tx, &filter, from, DeadLetterState::Requeued, now_ms))
            .await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Requeued];
        let (filter, now_ms) = (filter.clone(), self.inner.clock.wall_ms());
        self.transaction(move |tx| transit(tx, &filter, from, DeadLetterState::Skipped, now_ms))
            .await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let (filter, now_ms) = (filter.clone(), self.inner.clock.wall_ms());
        self.transaction(move |tx| discard(tx, &filter, now_ms)).await
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        let values: Vec<Box<dyn ToSql + Send>> = vec![
            Box::new(consumer.as_str().to_owned()),
            Box::new(partition.as_str().to_owned()),
            Box::new(position.as_bytes().to_vec()),
        ];
        self.read_tx(move |tx| {
            let values = values.into_iter().map(|value| value as Box<dyn ToSql>).collect();
            let tail = "d.consumer = ? AND d.partition = ? AND d.position = ?";
            Ok(select(tx, tail, values)?.pop())
        })
        .await
    }
}
