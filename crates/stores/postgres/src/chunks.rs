//! Stretches of the feed, read once for all partitions and kept for a moment.
//!
//! What lives here: reading a chunk, the small cache by which the partitions' readers of one
//! process share it (a tick costs one scan, not one for each partition), and reading one chunk
//! ahead of them through a backlog. What does not: the choice of a partition's own records
//! (`feed.rs`).
//! Invariant: a chunk holds every record between its two places, in feed order; what it holds never
//! changes, so that sharing it is only a matter of memory, which is bounded.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use postrider_core::{Entry, Error, Result, Timestamp, key_hash};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::Inner;
use crate::connections::Connections;
use crate::error::failed;
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
/// Readers that come back for the next chunk within this time will do so before a chunk that was
/// read ahead of them is forgotten.
const AHEAD_WITHIN: Duration = Duration::from_secs(1);

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

fn place_of(row: &Row) -> std::result::Result<Place, tokio_postgres::Error> {
    Ok(Place { stamp: row.try_get(0)?, seq: row.try_get(1)? })
}

/// Where the next chunk begins, when these rows end within a tick: there is more of it, already
/// committed.
fn goes_on(rows: &[Row]) -> Option<Place> {
    let end = place_of(rows.last()?).ok()?;
    let opens = |row: &&Row| matches!(row.try_get::<_, Option<i32>>(2), Ok(Some(_)));
    let tick = place_of(rows.iter().rfind(opens)?).ok()?;
    (end != tick).then_some(end)
}

async fn read(inner: &Inner, place: Place) -> Result<Vec<Row>> {
    let params: [crate::connections::Param<'_>; 4] = [
        (&place.stamp, Type::INT8),
        (&place.seq, Type::INT8),
        (&CHUNK_RECORDS, Type::INT4),
        (&CHUNK_BYTES, Type::INT8),
    ];
    inner.connections.query_often("read the feed", &inner.names.fill(READ), &params).await
}

/// From where a chunk is read, in which copy of the database, and how often all had been
/// forgotten before that: what was read for one is of no use for another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ReadFrom {
    place: Place,
    world: WorldNumber,
    cleared: u64,
}

/// What is known to whoever reads.
#[derive(Default)]
struct Reading {
    /// Where the last chunk ended, and when it was read.
    last: Option<(Place, Instant)>,
    /// The chunk after it, being read; the task ends with this value.
    ahead: Option<(ReadFrom, JoinSet<Result<Vec<Row>>>)>,
}

impl Reading {
    /// What was read ahead from there a moment ago. A failure is not told: whoever reads again
    /// meets it.
    ///
    /// # Cancellation
    /// A dropped call leaves what was read to the next one.
    async fn ahead(&mut self, from: ReadFrom) -> Option<Vec<Row>> {
        let fresh = self.last.is_some_and(|(_, at)| at.elapsed() < KEPT_FOR);
        let (_, task) = self.ahead.as_mut().filter(|(at, _)| fresh && *at == from)?;
        let rows = task.join_next().await;
        self.ahead = None;
        rows?.ok()?.ok()
    }

    /// Begins to read the chunk after these rows, if there is one and the readers are that fast:
    /// the server then works while they do.
    fn go_on(&mut self, inner: &Arc<Inner>, from: ReadFrom, rows: &[Row]) {
        let now = Instant::now();
        let follows = self.last.is_some_and(|(end, at)| {
            end == from.place && now.saturating_duration_since(at) < AHEAD_WITHIN
        });
        self.ahead = None;
        let next = goes_on(rows);
        self.last = next.map(|end| (end, now));
        if let Some(place) = next.filter(|_| follows) {
            let mut task = JoinSet::new();
            let inner = Arc::clone(inner);
            task.spawn(async move { read(&inner, place).await });
            self.ahead = Some((ReadFrom { place, ..from }, task));
        }
    }
}

/// The chunks that readers may share, oldest first.
pub(crate) struct Chunks {
    kept: StdMutex<VecDeque<(Instant, WorldNumber, Arc<Chunk>)>>,
    /// Held while one is read, so that readers at the same place wait for it instead of reading it
    /// as well.
    reading: Mutex<Reading>,
    /// How often all was forgotten.
    cleared: AtomicU64,
    /// The end of the last tick that was read up to its end, with the copy of the database that has
    /// it.
    end: StdMutex<Option<(WorldNumber, Place)>>,
}

impl Chunks {
    pub(crate) fn new() -> Self {
        Self {
            kept: StdMutex::default(),
            reading: Mutex::default(),
            cleared: AtomicU64::new(0),
            end: StdMutex::default(),
        }
    }

    /// The chunk in which a reader at `place` goes on; one that ends there says that the place is
    /// the head, or lies beyond it.
    ///
    /// A refusal of the place is `Permanent`, or `Fenced` when the copy of the database that
    /// answered before had given it.
    pub(crate) async fn after(&self, inner: &Arc<Inner>, place: Place) -> Result<Arc<Chunk>> {
        let world = inner.connections.world();
        if let Some(chunk) = self.find(world.number(), place) {
            return Ok(chunk);
        }
        let mut reading = self.reading.lock().await;
        let number = world.number();
        if let Some(chunk) = self.find(number, place) {
            return Ok(chunk);
        }
        let cleared = self.cleared.load(Ordering::SeqCst);
        let from = ReadFrom { place, world: number, cleared };
        let rows = match reading.ahead(from).await {
            Some(rows) => rows,
            None => {
                let judged = |error| world.judged("read the feed", place.stamp, error);
                read(inner, place).await.map_err(judged)?
            }
        };
        reading.go_on(inner, from, &rows);
        let chunk = Arc::new(Chunk::of_rows(place, &rows)?);
        world.handed_out(chunk.end.stamp);
        if chunk.ticks.last().is_none_or(|(end, _)| *end == chunk.end) {
            *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some((number, chunk.end));
        }
        if chunk.end > place {
            self.keep(from, Arc::clone(&chunk));
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

    fn keep(&self, from: ReadFrom, chunk: Arc<Chunk>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if self.cleared.load(Ordering::SeqCst) != from.cleared {
            return;
        }
        let mut bytes: usize = kept.iter().map(|(_, _, chunk)| chunk.bytes).sum();
        while bytes + chunk.bytes > KEPT_BYTES {
            let Some((_, _, oldest)) = kept.pop_front() else { break };
            bytes -= oldest.bytes;
        }
        kept.push_back((Instant::now(), from.world, chunk));
    }

    /// Forgets all: what was read lies below the horizon now, or belongs to another database.
    pub(crate) fn clear(&self) {
        // First, so that a chunk that was read before is not kept after.
        self.cleared.fetch_add(1, Ordering::SeqCst);
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clear();
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
