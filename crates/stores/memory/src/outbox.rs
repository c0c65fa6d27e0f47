//! The rows of the outbox, by partition and generation.
//!
//! What lives here: the data and the checks of positions. What does not: locks, consumers.
//! Invariant: within a partition ULIDs only ever grow, and no row is ever written at or below a
//! position that was handed out (`promised_ms` remembers the plain times among them).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};

use ahash::AHashSet;
use postrider_core::ulid::{Ulid, UlidAllocator};
use postrider_core::{
    BatchLimit, Entry, Error, Event, EventId, FeedPage, PartitionId, Position, Record, Result,
    Successor, Timestamp,
};

pub(crate) const START: Ulid = Ulid::from_bytes([0; 16]);

/// One event at its place.
pub(crate) struct Row {
    pub(crate) ulid: Ulid,
    /// Counted once, when the row is written: a page is cut by it under the lock.
    cost_bytes: usize,
    event: Event,
}

/// Where a raised partition ends and who takes over.
pub(crate) struct End {
    at: Ulid,
    pub(crate) successors: Vec<Successor>,
}

/// One partition's feed.
pub(crate) struct Partition {
    pub(crate) id: PartitionId,
    /// The partition of the generation before, whose keys this one takes over.
    pub(crate) parent: Option<usize>,
    pub(crate) rows: VecDeque<Row>,
    pub(crate) horizon: Option<Ulid>,
    pub(crate) end: Option<End>,
    allocator: UlidAllocator,
    /// The latest time that a reader was promised to have seen whole.
    promised_ms: AtomicU64,
}

impl Partition {
    fn new(id: PartitionId, parent: Option<usize>, promised: Timestamp) -> Self {
        Self {
            id,
            parent,
            rows: VecDeque::new(),
            horizon: None,
            end: None,
            allocator: UlidAllocator::default(),
            promised_ms: AtomicU64::new(promised.as_millis()),
        }
    }

    /// The last position that was given to a row.
    fn newest(&self) -> Ulid {
        self.rows.back().map(|row| row.ulid).or(self.horizon).unwrap_or(START)
    }

    fn promised(&self) -> Timestamp {
        Timestamp::from_millis(self.promised_ms.load(Ordering::Relaxed))
    }

    /// The newest position that may be handed out now. Whoever hands it out promises its time.
    pub(crate) fn head(&self, now: Timestamp) -> Ulid {
        match &self.end {
            Some(end) => end.at,
            None => self.newest().max(Ulid::from_time(now.max(self.promised()))),
        }
    }

    /// No row will be written at or below `position` from now on. Relaxed, since every caller
    /// holds the outbox lock for reading and every writer holds it for writing.
    pub(crate) fn promise(&self, position: Ulid) {
        if position > self.newest() {
            self.promised_ms.fetch_max(position.time().as_millis(), Ordering::Relaxed);
        }
    }

    /// The index of the first row after `after`, if that is a position to read from.
    fn seek(&self, after: Ulid, now: Timestamp) -> Result<usize> {
        let first = self.rows.partition_point(|row| row.ulid <= after);
        if after == START {
            return Ok(first);
        }
        if let Some(horizon) = self.horizon.filter(|horizon| after < *horizon) {
            return Err(Error::permanent(format!(
                "position {after} of partition {} lies below the retention horizon {horizon}; \
                 read from there or from the start",
                self.id
            )));
        }
        let head = self.head(now);
        if after > head {
            return Err(Error::permanent(format!(
                "position {after} of partition {} lies beyond the head {head}",
                self.id
            )));
        }
        let names_row = first > 0 && self.rows[first - 1].ulid == after;
        let known = names_row || Some(after) == self.horizon || after == head;
        if !known && !after.is_plain_time() {
            return Err(Error::permanent(format!(
                "position {after} of partition {} names no record and no plain time",
                self.id
            )));
        }
        Ok(first)
    }

    /// The page after `after`.
    pub(crate) fn read(&self, after: Ulid, now: Timestamp, limit: BatchLimit) -> Result<FeedPage> {
        let first = self.seek(after, now)?;
        self.promise(after);
        let most = limit.records.max(1).min(self.rows.len() - first);
        let mut entries = Vec::with_capacity(most);
        let mut bytes = 0usize;
        let mut last = after;
        for row in self.rows.range(first..first + most) {
            bytes = bytes.saturating_add(row.cost_bytes);
            if bytes > limit.bytes && !entries.is_empty() {
                break;
            }
            last = row.ulid;
            entries.push(Entry::Record(row.record()));
        }
        if entries.is_empty() {
            last = self.head(now).max(after);
            self.promise(last);
        }
        let at_end = first + entries.len() == self.rows.len();
        let ended = self.end.as_ref().filter(|_| at_end).map(|end| end.successors.clone());
        Ok(FeedPage { entries, position: last.into(), ended })
    }

    /// Rows after `after` and the time of the first of them.
    pub(crate) fn pending(&self, after: Ulid) -> (u64, Option<Timestamp>) {
        let first = self.rows.partition_point(|row| row.ulid <= after);
        let oldest = self.rows.get(first).map(|row| row.ulid.time());
        ((self.rows.len() - first) as u64, oldest)
    }

    /// Where records appended at or after `time` begin.
    pub(crate) fn position_at(&self, time: Timestamp, now: Timestamp) -> Result<Position> {
        let plain = Ulid::from_time(time);
        if let Some(horizon) = self.horizon.filter(|horizon| plain < *horizon) {
            return Err(Error::permanent(format!(
                "time {time:?} lies below the retention horizon {horizon} of partition {}",
                self.id
            )));
        }
        let head = self.head(now);
        let position = plain.min(head);
        self.promise(position);
        Ok(position.into())
    }

    fn push(&mut self, event: Event, now: Timestamp, random: [u8; 10]) {
        let hint = now.max(self.promised());
        let ulid = self.allocator.allocate(hint, 1, random);
        debug_assert!(ulid > self.newest(), "positions only grow within a partition");
        self.rows.push_back(Row { ulid, cost_bytes: event.cost_bytes(), event });
    }
}

impl Row {
    fn record(&self) -> Record {
        Record {
            position: self.ulid.into(),
            appended_at: self.ulid.time(),
            event: self.event.clone(),
        }
    }

    pub(crate) fn event_id(&self) -> EventId {
        self.event.id()
    }
}

/// Every partition of every generation, and the ids that are kept.
pub(crate) struct Outbox {
    /// Oldest generation first.
    pub(crate) partitions: Vec<Partition>,
    by_id: HashMap<PartitionId, usize>,
    /// Where the newest generation begins in `partitions`.
    newest_from: usize,
    /// Ids of all rows that are kept.
    pub(crate) ids: AHashSet<EventId>,
}

impl Outbox {
    pub(crate) fn new(count: u32) -> Self {
        let mut outbox = Self {
            partitions: Vec::new(),
            by_id: HashMap::new(),
            newest_from: 0,
            ids: AHashSet::new(),
        };
        for index in 0..count {
            outbox.add(PartitionId::numbered(index, count), None, Timestamp::default());
        }
        outbox
    }

    fn add(&mut self, id: PartitionId, parent: Option<usize>, promised: Timestamp) {
        self.by_id.insert(id.clone(), self.partitions.len());
        self.partitions.push(Partition::new(id, parent, promised));
    }

    /// The number of partitions of the newest generation.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.partitions.len() - self.newest_from)
            .expect("a generation has at most MAX_PARTITIONS partitions")
    }

    pub(crate) fn partition(&self, id: &PartitionId) -> Result<&Partition> {
        let index = self.by_id.get(id).ok_or_else(|| {
            Error::permanent(format!("there is no partition {id}; this store lists its own"))
        })?;
        Ok(&self.partitions[*index])
    }

    /// Writes one event to its key's partition.
    pub(crate) fn push(&mut self, event: Event, hash: u32, now: Timestamp, random: [u8; 10]) {
        let index = self.newest_from + (hash % self.count()) as usize;
        self.ids.insert(event.id());
        self.partitions[index].push(event, now, random);
    }

    /// Ends the newest generation and begins one of `count` partitions, a multiple of the old.
    pub(crate) fn raise(&mut self, count: u32, now: Timestamp) {
        let (old_from, old_count) = (self.newest_from, self.count() as usize);
        self.newest_from = self.partitions.len();
        for index in 0..count {
            let parent = old_from + index as usize % old_count;
            // A key's positions grow across generations too: the parent's time is promised.
            let promised = self.partitions[parent].head(now).time();
            self.add(PartitionId::numbered(index, count), Some(parent), promised);
        }
        for old in 0..old_count {
            let successors = self.partitions[self.newest_from..]
                .iter()
                .filter(|partition| partition.parent == Some(old_from + old))
                .map(|partition| Successor {
                    partition: partition.id.clone(),
                    from: Position::START,
                })
                .collect();
            let at = self.partitions[old_from + old].head(now);
            self.partitions[old_from + old].end = Some(End { at, successors });
        }
    }
}
