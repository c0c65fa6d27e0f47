//! Stretches of the feed, read once for all partitions and kept for a moment.
//!
//! What lives here: reading a chunk, and the small cache by which the partitions' readers of one
//! process share it: a tick costs one scan, not one for each partition. What does not: the choice
//! of a partition's own records (`feed.rs`).
//! Invariant: a chunk holds every record between its two places, in feed order; what it holds never
//! changes, so that sharing it is only a matter of memory, which is bounded.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use postrider_core::{Entry, Error, Result, Timestamp, key_hash};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::connections::Connections;
use crate::error::failed;
use crate::names::Names;
use crate::positions::Place;
use crate::row::Decoder;
use crate::world::WorldNumber;

/// Most records of a chunk: the fixed cost of a query is small against reading as many.
const CHUNK_RECORDS: i32 = 4_096;
/// Most bytes of a chunk beyond its last record.
const CHUNK_BYTES: i64 = 4 << 20;
/// Most bytes of the chunks that are kept, as the relay's own budget counts them.
const KEPT_BYTES: usize = 32 << 20;
/// Readers that share a chunk come within a moment; after it the memory is worth more.
const KEPT_FOR: Duration = Duration::from_secs(2);

/// Reads on after a place, over as many ticks as fit. See the function's own comment.
const READ: &str = "SELECT stamp, seq, generation, at_ms, id, key, topic, type, content_type,
    headers, payload FROM {schema}.{outbox_read}($1, $2, $3, $4)";

/// A record and what its partition is chosen by.
pub(crate) struct Found {
    pub(crate) place: Place,
    pub(crate) generation: i32,
    /// Of its key; an entry without a readable key goes to partition 0.
    pub(crate) hash: u32,
    pub(crate) entry: Entry,
}

/// One stretch of the feed.
pub(crate) struct Chunk {
    /// Where it begins, exclusively.
    after: Place,
    /// Up to where it reads.
    pub(crate) end: Place,
    pub(crate) records: Vec<Found>,
    /// The ticks that it touches: where each ends, and whose partitions they are.
    pub(crate) ticks: Vec<(Place, i32)>,
    bytes: usize,
}

impl Chunk {
    /// Whether a reader that stands at `place` can go on in this chunk: the chunk begins there, or
    /// the place is one that a reader got from it.
    fn continues(&self, place: Place) -> bool {
        if place == self.after {
            return true;
        }
        if place < self.after || place >= self.end {
            return false;
        }
        self.records.binary_search_by_key(&place, |found| found.place).is_ok()
            || self.ticks.iter().any(|(end, _)| *end == place)
    }

    /// The records after a place.
    pub(crate) fn records_after(&self, place: Place) -> &[Found] {
        &self.records[self.records.partition_point(|found| found.place <= place)..]
    }

    fn of_rows(after: Place, rows: &[Row]) -> Result<Self> {
        let place_of = |row: &Row| -> std::result::Result<Place, tokio_postgres::Error> {
            Ok(Place { stamp: row.try_get(0)?, seq: row.try_get(1)? })
        };
        let read = failed("read the feed");
        let mut chunk =
            Self { after, end: after, records: Vec::new(), ticks: Vec::new(), bytes: 0 };
        let mut decoder = Decoder::default();
        let mut each = |row: &Row| -> std::result::Result<(), tokio_postgres::Error> {
            let place = place_of(row)?;
            let at_ms: Option<i64> = row.try_get(3)?;
            if let Some(generation) = row.try_get::<_, Option<i32>>(2)? {
                chunk.ticks.push((place, generation));
                return Ok(());
            }
            let Some(at_ms) = at_ms else {
                chunk.end = place;
                return Ok(());
            };
            let at = Timestamp::from_millis(u64::try_from(at_ms).unwrap_or(0));
            let entry = decoder.entry(row, 4, place.position(), at)?;
            let hash = match &entry {
                Entry::Record(record) => key_hash(record.event.key()),
                Entry::Malformed(malformed) => malformed.key.as_ref().map_or(0, key_hash),
            };
            chunk.bytes = chunk.bytes.saturating_add(entry.cost_bytes());
            let generation = chunk.ticks.last().map_or(0, |(_, generation)| *generation);
            chunk.records.push(Found { place, generation, hash, entry });
            Ok(())
        };
        rows.iter().try_for_each(&mut each).map_err(read)?;
        if !chunk.records.is_sorted_by_key(|found| found.place) {
            return Err(Error::corrupt("read the feed: records are out of order"));
        }
        Ok(chunk)
    }
}

/// The chunks that readers may share, oldest first.
pub(crate) struct Chunks {
    kept: StdMutex<VecDeque<(Instant, WorldNumber, Arc<Chunk>)>>,
    /// Held while one is read, so that readers at the same place wait for it instead of reading it
    /// as well.
    reading: Mutex<()>,
    /// The end of the last tick that was read up to its end, with the copy of the database that has
    /// it.
    end: StdMutex<Option<(WorldNumber, Place)>>,
}

impl Chunks {
    pub(crate) fn new() -> Self {
        Self { kept: StdMutex::default(), reading: Mutex::new(()), end: StdMutex::default() }
    }

    /// The chunk in which a reader at `place` goes on; one that ends there says that the place is
    /// the head, or lies beyond it.
    ///
    /// A refusal of the place is `Permanent`, or `Fenced` when the copy of the database that
    /// answered before had given it.
    pub(crate) async fn after(
        &self,
        connections: &Connections,
        names: &Names,
        place: Place,
    ) -> Result<Arc<Chunk>> {
        let world = connections.world();
        if let Some(chunk) = self.find(world.number(), place) {
            return Ok(chunk);
        }
        let _reading = self.reading.lock().await;
        let number = world.number();
        if let Some(chunk) = self.find(number, place) {
            return Ok(chunk);
        }
        let params: [crate::connections::Param<'_>; 4] = [
            (&place.stamp, Type::INT8),
            (&place.seq, Type::INT8),
            (&CHUNK_RECORDS, Type::INT4),
            (&CHUNK_BYTES, Type::INT8),
        ];
        let what = "read the feed";
        let rows = connections.query(what, &names.fill(READ), &params).await;
        let rows = rows.map_err(|error| world.judged(what, place.stamp, error))?;
        let chunk = Arc::new(Chunk::of_rows(place, &rows)?);
        world.handed_out(chunk.end.stamp);
        if chunk.ticks.last().is_none_or(|(end, _)| *end == chunk.end) {
            *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some((number, chunk.end));
        }
        if chunk.end > place {
            self.keep(number, Arc::clone(&chunk));
        }
        Ok(chunk)
    }

    /// Whether a tick ends at `place`, and nothing after it was there when it was read last.
    pub(crate) fn end_at(&self, connections: &Connections, place: Place) -> bool {
        let end = *self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end == Some((connections.world().number(), place))
    }

    fn find(&self, world: WorldNumber, place: Place) -> Option<Arc<Chunk>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        while kept.front().is_some_and(|(read_at, ..)| read_at.elapsed() > KEPT_FOR) {
            kept.pop_front();
        }
        // The newest first: most readers are close to it.
        let mut newest_first = kept.iter().rev();
        let found = newest_first.find(|(_, of, chunk)| *of == world && chunk.continues(place));
        found.map(|(_, _, chunk)| Arc::clone(chunk))
    }

    fn keep(&self, world: WorldNumber, chunk: Arc<Chunk>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes: usize = kept.iter().map(|(_, _, chunk)| chunk.bytes).sum();
        while bytes + chunk.bytes > KEPT_BYTES {
            let Some((_, _, oldest)) = kept.pop_front() else { break };
            bytes -= oldest.bytes;
        }
        kept.push_back((Instant::now(), world, chunk));
    }

    /// Forgets all: what was read lies below the horizon now, or belongs to another database.
    pub(crate) fn clear(&self) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
