//! What a consumer of the write-ahead log has had, read from the tables that the store keeps of it.
//!
//! What lives here: tables, triggers and functions for a source that reads the log, and the rule by
//! which an event counts as durably delivered, written once more from its description. What does
//! not: the truth (`postgres.rs`), the watch over the slot (`watch.rs`).
//! Invariant: a book is copied by a trigger, in the transaction that takes a lease, and judged when
//! all is over, with the ids of all transactions.

use std::collections::HashSet;

use anyhow::{Context, Result, ensure};
use postrider_core::EventId;
use postrider_store_postgres::tokio_postgres::Row;
use uuid::Uuid;

/// The slot and the publication, by the names that they have unless the configuration says other.
pub(crate) const SLOT: &str = "postrider_outbox";

/// `fault.standing` is what is durable of each consumer now, and `fault.book` a copy of it for each
/// take-over. The functions take the slot away from whoever reads it, however often he comes back.
pub(super) const TABLES: &str = "
    CREATE PUBLICATION postrider_outbox FOR TABLE ONLY postrider.outbox
        WITH (publish = 'insert', publish_via_partition_root = true);
    CREATE VIEW fault.standing AS
        SELECT c.consumer, b.snapshot::text AS snapshot, b.partial_xid::text AS partial_xid,
            b.partial_seq,
            ARRAY(SELECT a.block FROM postrider.wal_after AS a
                WHERE a.consumer = c.consumer ORDER BY a.block) AS blocks,
            ARRAY(SELECT a.xids FROM postrider.wal_after AS a
                WHERE a.consumer = c.consumer ORDER BY a.block) AS xids,
            ARRAY(SELECT r.snapshot::text FROM postrider.wal_recovery AS r
                WHERE r.consumer = c.consumer ORDER BY r.number) AS snapshots,
            ARRAY(SELECT r.seq FROM postrider.wal_recovery AS r
                WHERE r.consumer = c.consumer ORDER BY r.number) AS seqs,
            ARRAY(SELECT d.id FROM postrider.dead_letter AS d
                WHERE d.consumer = c.consumer AND d.id IS NOT NULL) AS letters
        FROM postrider.checkpoint AS c LEFT JOIN postrider.wal_base AS b USING (outbox, consumer)
        WHERE c.partition = 'wal';
    CREATE TABLE fault.book AS SELECT 0::bigint AS n, * FROM fault.standing LIMIT 0;
    CREATE OR REPLACE FUNCTION fault.note_takeover() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        number bigint;
    BEGIN
        INSERT INTO fault.takeover (partition, old_holder, released, letters)
        VALUES (NEW.partition, coalesce(OLD.holder, ''), coalesce(OLD.released, true), '{}')
            RETURNING n INTO number;
        INSERT INTO fault.book SELECT number, s.* FROM fault.standing AS s;
        RETURN NULL;
    END $$;
    CREATE FUNCTION fault.end_reader() RETURNS void LANGUAGE sql AS
        'SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
            WHERE slot_name = ''postrider_outbox'' AND active_pid IS NOT NULL';
    CREATE FUNCTION fault.drop_slot() RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        FOR attempt IN 1..3000 LOOP
            PERFORM fault.end_reader();
            BEGIN
                PERFORM pg_drop_replication_slot(slot_name) FROM pg_replication_slots
                    WHERE slot_name = 'postrider_outbox';
                RETURN FOUND;
            EXCEPTION
                WHEN object_in_use THEN PERFORM pg_sleep(0.001);
                WHEN undefined_object THEN RETURN false;
            END;
        END LOOP;
        RAISE EXCEPTION 'the slot is never free';
    END $$;
    CREATE FUNCTION fault.advance_slot() RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        FOR attempt IN 1..3000 LOOP
            PERFORM fault.end_reader();
            BEGIN
                PERFORM pg_replication_slot_advance(slot_name, pg_current_wal_lsn())
                    FROM pg_replication_slots WHERE slot_name = 'postrider_outbox'
                        AND confirmed_flush_lsn < pg_current_wal_lsn();
                RETURN FOUND;
            EXCEPTION
                WHEN object_in_use THEN PERFORM pg_sleep(0.001);
                WHEN undefined_object OR object_not_in_prerequisite_state THEN RETURN false;
            END;
        END LOOP;
        RAISE EXCEPTION 'the slot is never free';
    END $$;
    CREATE FUNCTION fault.await_slot() RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        FOR attempt IN 1..1500 LOOP
            PERFORM FROM pg_replication_slots WHERE slot_name = 'postrider_outbox';
            EXIT WHEN FOUND;
            PERFORM pg_sleep(0.002);
        END LOOP;
        RETURN FOUND;
    END $$;
    CREATE FUNCTION fault.publish() RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        BEGIN
            CREATE PUBLICATION postrider_outbox FOR TABLE ONLY postrider.outbox
                WITH (publish = 'insert', publish_via_partition_root = true);
        EXCEPTION WHEN duplicate_object THEN
            ALTER PUBLICATION postrider_outbox SET TABLE ONLY postrider.outbox;
        END;
    END $$;";

/// What [`Book::of`] reads, behind nothing or a number.
pub(super) const COLUMNS: &str =
    "snapshot, partial_xid, partial_seq, blocks, xids, snapshots, seqs, letters";

/// A transaction's id, an event's number in the order of appends, and its id.
pub(super) type Written = (u64, i64, EventId);

/// A `pg_snapshot`.
struct Snapshot {
    xmax: u64,
    open: HashSet<u64>,
}

impl Snapshot {
    fn of(text: &str) -> Result<Self> {
        let mut parts = text.split(':').skip(1);
        let xmax = parts.next().context("a snapshot has an end")?.parse()?;
        let open = parts.next().context("a snapshot has a list")?.split(',');
        let open = open.filter(|id| !id.is_empty()).map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { xmax, open })
    }

    fn sees(&self, xid: u64) -> bool {
        xid < self.xmax && !self.open.contains(&xid)
    }
}

/// What is durable of one consumer.
#[derive(Default)]
pub(super) struct Book {
    base: Option<Snapshot>,
    partial: Option<(u64, i64)>,
    after: HashSet<u64>,
    recoveries: Vec<(Snapshot, i64)>,
    /// Its dead letters.
    pub(super) letters: HashSet<EventId>,
}

impl Book {
    /// Reads [`COLUMNS`] from number `at` on.
    pub(super) fn of(row: &Row, at: usize) -> Result<Self> {
        let base = row.get::<_, Option<&str>>(at).map(Snapshot::of).transpose()?;
        let partial = match row.get::<_, Option<&str>>(at + 1) {
            Some(xid) => Some((xid.parse()?, row.get(at + 2))),
            None => None,
        };
        let mut after = HashSet::new();
        let blocks = row.get::<_, Vec<i64>>(at + 3).into_iter();
        for (block, bytes) in blocks.zip(row.get::<_, Vec<&[u8]>>(at + 4)) {
            let first = block.unsigned_abs() << 16;
            after.extend(ids(bytes)?.into_iter().map(|low| first + u64::from(low)));
        }
        let seqs = row.get::<_, Vec<i64>>(at + 6);
        let recoveries = row.get::<_, Vec<&str>>(at + 5).into_iter().zip(seqs);
        let recoveries = recoveries.map(|(text, seq)| Ok((Snapshot::of(text)?, seq)));
        let letters = row.get::<_, Vec<Uuid>>(at + 7).into_iter().map(EventId::from_uuid);
        Ok(Self {
            base,
            partial,
            after,
            recoveries: recoveries.collect::<Result<_>>()?,
            letters: letters.collect(),
        })
    }

    /// Whether the event is delivered or parked for good.
    fn has(&self, xid: u64, seq: i64) -> bool {
        self.base.as_ref().is_some_and(|base| base.sees(xid))
            || self.after.contains(&xid)
            || self.partial.is_some_and(|(part, up_to)| xid == part && seq <= up_to)
            || self.recoveries.iter().any(|(snapshot, up_to)| seq <= *up_to && snapshot.sees(xid))
    }

    /// Those that are.
    pub(super) fn covered(&self, written: &[Written]) -> HashSet<EventId> {
        let covered = written.iter().filter(|(xid, seq, _)| self.has(*xid, *seq));
        covered.map(|(_, _, id)| *id).collect()
    }
}

/// The ids of a stored block: a list of them, pairs of first and last, or a bit for each.
fn ids(bytes: &[u8]) -> Result<Vec<u16>> {
    let (form, body) = bytes.split_first().context("a block has a form")?;
    let pair = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
    match form {
        0 => Ok(body.chunks_exact(2).map(pair).collect()),
        1 => Ok(body.chunks_exact(4).flat_map(|run| pair(run)..=pair(&run[2..])).collect()),
        2 => {
            ensure!(body.len() == 8192, "a bit for each id takes 8,192 bytes");
            let is_set = |low: &u16| body[usize::from(low / 8)] >> (low % 8) & 1 == 1;
            Ok((0..=u16::MAX).filter(is_set).collect())
        }
        other => anyhow::bail!("form {other} of a block is unknown"),
    }
}

/// How far a checkpoint lets the slot be acknowledged: the place in it, or the one where the stream
/// goes on if that is the place just below, at which a catch-up stands.
pub(crate) fn bound(position: &[u8]) -> Result<u64> {
    ensure!(position.len() == 22, "a place in the log has {} bytes", position.len());
    let lsn = position[11..18].iter().fold(0u64, |lsn, byte| lsn << 8 | u64::from(*byte));
    Ok(if lsn % 8 == 7 { lsn + 1 } else { lsn })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u128) -> EventId {
        EventId::from_uuid(Uuid::from_u128(number))
    }

    #[test]
    fn each_part_of_a_book_covers_its_own() {
        let snapshot = |text| Snapshot::of(text).expect("a snapshot");
        let book = Book {
            base: Some(snapshot("10:20:12,15")),
            partial: Some((30, 7)),
            after: [22].into(),
            recoveries: vec![(snapshot("40:50:"), 9)],
            ..Book::default()
        };
        let rows: [(u64, i64, bool); 10] = [
            (9, 1, true),
            (12, 1, false),
            (19, 99, true),
            (20, 99, false),
            (22, 99, true),
            (30, 7, true),
            (30, 99, false),
            (49, 9, true),
            (49, 10, false),
            (50, 1, false),
        ];
        let written: Vec<Written> = rows
            .iter()
            .enumerate()
            .map(|(at, (xid, seq, _))| (*xid, *seq, id(at as u128)))
            .collect();
        let covered = book.covered(&written);
        for (at, row) in rows.iter().enumerate() {
            // What the interrupted catch-up saw up to its own number counts, too.
            let seen = row.2 || row.1 <= 9 && row.0 < 50;
            assert_eq!(covered.contains(&id(at as u128)), seen, "{row:?}");
        }
    }

    #[test]
    fn blocks_are_read_in_each_form() {
        assert_eq!(ids(&[0, 0, 1, 1, 0]).expect("a list"), [1, 256]);
        assert_eq!(ids(&[1, 0, 1, 0, 3]).expect("runs"), [1, 2, 3]);
        let mut bits = vec![2; 1];
        bits.resize(8193, 0);
        (bits[1], bits[3]) = (0b10, 1);
        assert_eq!(ids(&bits).expect("bits"), [1, 16]);
        assert!(ids(&[]).is_err() && ids(&[3, 0]).is_err());
    }

    #[test]
    fn a_catch_up_stands_just_below_its_end() {
        let position = |lsn: u64| {
            let mut bytes = [0; 22];
            bytes[11..18].copy_from_slice(&lsn.to_be_bytes()[1..]);
            bytes
        };
        assert_eq!(bound(&position(0x0100_0000)).expect("a place"), 0x0100_0000);
        assert_eq!(bound(&position(0x0100_0007)).expect("a place"), 0x0100_0008);
        assert!(bound(&[0; 16]).is_err());
    }
}
