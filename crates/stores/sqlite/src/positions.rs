//! Places in the feed and the positions that name them.
//!
//! What lives here: a place (time and sequence number), its ULID, the head, the horizon, the
//! search by time, and the check of a position from outside. What does not: reading records.
//! Invariant: `seq` and `at_ms` both only grow along the outbox, so that a time is found by
//! halving and a position is computed, never stored.

use postrider_core::ulid::Ulid;
use postrider_core::{Error, Position, Result, Timestamp};
use rusqlite::{Connection, OptionalExtension};

use crate::error::failed;
use crate::partitions::Partition;

/// Where an event stands; `Default` is the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Place {
    pub(crate) at_ms: i64,
    pub(crate) seq: i64,
}

impl Place {
    pub(crate) fn position(self) -> Position {
        Ulid::from_parts(timestamp(self.at_ms), 0, self.seq.unsigned_abs()).into()
    }
}

/// A stored time; the table's CHECK keeps it in range.
pub(crate) fn timestamp(at_ms: i64) -> Timestamp {
    Timestamp::from_millis(u64::try_from(at_ms).unwrap_or(0))
}

fn place(row: &rusqlite::Row<'_>) -> rusqlite::Result<Place> {
    Ok(Place { at_ms: row.get(0)?, seq: row.get(1)? })
}

/// The newest event, which retention never deletes.
pub(crate) fn head(tx: &Connection) -> Result<Option<Place>> {
    tx.prepare_cached("SELECT at_ms, seq FROM postrider_outbox ORDER BY seq DESC LIMIT 1")
        .and_then(|mut statement| statement.query_row([], place).optional())
        .map_err(failed("read the head"))
}

/// The oldest event that is kept.
pub(crate) fn oldest(tx: &Connection) -> Result<Option<Place>> {
    first_from(tx, i64::MIN)
}

/// The largest `seq` that retention has deleted in any partition; 0 if there is none.
fn pruned_seq(tx: &Connection) -> Result<i64> {
    tx.prepare_cached("SELECT ifnull(max(horizon_seq), 0) FROM postrider_partition")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .map_err(failed("read the horizon"))
}

/// The first event at or after `seq`.
fn first_from(tx: &Connection, seq: i64) -> Result<Option<Place>> {
    tx.prepare_cached(
        "SELECT at_ms, seq FROM postrider_outbox WHERE seq >= ?1 ORDER BY seq LIMIT 1",
    )
    .and_then(|mut statement| statement.query_row([seq], place).optional())
    .map_err(failed("look up an event"))
}

/// The largest `seq` whose event is older than `at_ms`; 0 if there is none.
pub(crate) fn last_before(tx: &Connection, at_ms: i64) -> Result<i64> {
    let (Some(oldest), Some(newest)) = (oldest(tx)?, head(tx)?) else { return Ok(0) };
    // Invariant: every event at or below `low` is older, every one above `high` is not.
    let (mut low, mut high) = (oldest.seq - 1, newest.seq);
    while low < high {
        let middle = low + (high - low + 1) / 2;
        match first_from(tx, middle)? {
            Some(found) if found.at_ms < at_ms => low = found.seq,
            Some(_) | None => high = middle - 1,
        }
    }
    Ok(low.max(0))
}

/// The `seq` after which a stored checkpoint reads on. Unchecked: it was checked when read.
pub(crate) fn stored_seq(tx: &Connection, position: &[u8]) -> Result<i64> {
    let bytes: [u8; 16] = position.try_into().map_err(|_| {
        Error::corrupt("a stored checkpoint has not 16 bytes; look at postrider_checkpoint")
    })?;
    let ulid = Ulid::from_bytes(bytes);
    if ulid.is_plain_time() {
        return last_before(tx, ms(ulid.time()));
    }
    Ok(i64::try_from(ulid.low()).unwrap_or(i64::MAX))
}

pub(crate) fn ms(time: Timestamp) -> i64 {
    i64::try_from(time.as_millis()).expect("48 bits fit 63")
}

/// Checks a position of `partition` from outside and returns the `seq` after which it reads on.
///
/// A refusal is `Permanent`: beyond the head, below the horizon, or naming nothing that exists.
pub(crate) fn resolve(
    tx: &Connection,
    partition: &Partition,
    position: &Position,
    now_ms: i64,
) -> Result<i64> {
    if *position == Position::START {
        return Ok(0);
    }
    let ulid = position.to_ulid()?;
    if ulid < partition.horizon.position().to_ulid()? {
        return Err(below_horizon(&format!("position {position}"), partition.horizon));
    }
    let head = head(tx)?.unwrap_or_default();
    if ulid.is_plain_time() {
        if ms(ulid.time()) > now_ms.max(head.at_ms) {
            return Err(Error::permanent(format!(
                "position {position} is a time that has not come yet; the head is {}",
                head.position()
            )));
        }
        return last_before(tx, ms(ulid.time()));
    }
    if ulid > head.position().to_ulid()? {
        return Err(Error::permanent(format!(
            "position {position} is beyond the head, {}; it comes from another database, or this \
             one was restored to an earlier state",
            head.position()
        )));
    }
    let seq = i64::try_from(ulid.low()).unwrap_or(i64::MAX);
    let named = Place { at_ms: ms(ulid.time()), seq };
    if ulid.middle() != 0 || !named_an_event(tx, named)? {
        return Err(Error::permanent(format!(
            "position {position} names no event of this outbox; give one that was read from it, \
             or a time"
        )));
    }
    Ok(seq)
}

/// Whether an event stands at that place, or stood there: a quiet partition's position is another
/// partition's event, which retention may have deleted since. Its neighbours in time then vouch
/// for it.
fn named_an_event(tx: &Connection, named: Place) -> Result<bool> {
    let next = first_from(tx, named.seq)?;
    if next.is_some_and(|next| next.seq == named.seq) {
        return Ok(next == Some(named));
    }
    if named.seq > pruned_seq(tx)? {
        return Ok(false);
    }
    let before = tx
        .prepare_cached(
            "SELECT at_ms, seq FROM postrider_outbox WHERE seq < ?1 ORDER BY seq DESC LIMIT 1",
        )
        .and_then(|mut statement| statement.query_row([named.seq], place).optional())
        .map_err(failed("look up an event"))?;
    Ok(before.is_none_or(|before| before.at_ms <= named.at_ms)
        && next.is_none_or(|next| next.at_ms >= named.at_ms))
}

/// Why something is too old to be read.
pub(crate) fn below_horizon(what: &str, horizon: Place) -> Error {
    Error::permanent(format!(
        "{what} lies below the retention horizon {}: events there were deleted; start at the \
         oldest instead",
        horizon.position()
    ))
}
