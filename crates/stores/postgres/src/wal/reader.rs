//! A consumer's reader: from the stream where the slot has it, from the table where it has not.
//!
//! What lives here: which of the two, and the batches. What does not: either of them.
//! Invariant: a reader is in the stream only from a place that the slot has not passed; what it
//! hands out is in the consumer's books before.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_core::{
    Batch, BatchLimit, ConsumerName, Entry, Error, Position, ReadOutcome, Reader, Result,
};

use super::assembly::Chunk;
use super::catch_up::{CatchUp, Missed, Page, Wanted};
use super::hub::{Entrance, Footing, SeatView};
use super::ledger::Base;
use super::position::WalPlace;
use super::start::StartPlace;
use super::{Books, Recover, Wal};

enum Mode {
    /// Which one, is to be seen.
    Deciding,
    CatchUp {
        rows: CatchUp,
        page: std::vec::IntoIter<Missed>,
        /// Where the stream goes on, once it has begun.
        end: Option<WalPlace>,
    },
    Stream {
        /// With the number of its events that were handed out.
        chunk: Option<(Arc<Chunk>, usize)>,
    },
}

pub(super) struct WalReader {
    wal: Arc<Wal>,
    consumer: ConsumerName,
    seat: SeatView,
    books: Arc<Books>,
    /// Up to where all was handed out.
    place: WalPlace,
    /// The publication under which all before that was read.
    publication: Option<String>,
    mode: Mode,
    /// Where it begins is not handed out yet.
    begins: bool,
    /// Whether the consumer was there before.
    is_known: bool,
    /// Where it begins, if it is new there: with what is committed from then on.
    from_now: bool,
    /// Number of the last base candidate.
    candidate: u64,
    /// The last position that was handed out.
    handed: Option<WalPlace>,
    /// Whether everything below the place was handed out: not so within a catch-up.
    whole: bool,
}

impl WalReader {
    pub(super) fn new(
        wal: Arc<Wal>,
        consumer: ConsumerName,
        books: Arc<Books>,
        at: StartPlace,
    ) -> Self {
        let StartPlace { place, publication, is_known, begins, durable } = at;
        let seat = wal.hub.sit(&consumer, durable);
        let whole = books.ledger().delivered().recoveries.is_empty();
        Self {
            wal,
            consumer,
            seat,
            books,
            place,
            mode: Mode::Deciding,
            from_now: begins && !is_known && publication.is_some(),
            begins,
            publication,
            is_known,
            candidate: 0,
            handed: None,
            whole,
        }
    }

    /// Why the stream can't give what comes next, if it can't.
    fn gap(&self, footing: &Footing) -> Option<String> {
        let based = self.books.ledger().delivered().base.as_ref().map(|base| base.system);
        let elsewhere = based.is_some_and(|system| system != footing.system.system);
        if self.place.system != footing.system.system || self.handed.is_none() && elsewhere {
            return Some("the database was restored into another cluster".to_owned());
        }
        match &self.publication {
            None => return Some("it begins at the oldest event".to_owned()),
            Some(own) if *own != footing.publication => {
                return Some("the publication was changed".to_owned());
            }
            Some(_) => {}
        }
        if !self.whole {
            return Some("an earlier catch-up did not come to its end".to_owned());
        }
        (self.place.lsn < footing.start).then(|| {
            format!("the slot begins at {}, the checkpoint is at {}", footing.start, self.place.lsn)
        })
    }

    /// Whether the table may stand in for the stream only because others would wait.
    fn may_leave(&self, footing: &Footing) -> bool {
        let options = &self.wal.options;
        options.messages.is_none() && footing.table.lasting && options.recover == Recover::Auto
    }

    /// What a catch-up has to read.
    fn wanted(&self, footing: &Footing) -> Wanted {
        if self.wal.options.messages.is_some() {
            return Wanted::Nothing;
        }
        match (footing.table.exact, self.is_known, self.from_now) {
            (true, ..) => Wanted::Missing,
            // Nothing was promised yet, and which rows were there before can't be told.
            (false, false, true) => Wanted::Nothing,
            (false, ..) => Wanted::Everything,
        }
    }

    async fn decide(&mut self) -> Result<()> {
        let footing = self.wal.hub.footing(&mut self.seat).await?;
        let gap = match self.gap(&footing) {
            Some(gap) => gap,
            None => match self.wal.hub.enter(&self.seat, &self.place, self.may_leave(&footing)) {
                Entrance::Stream => {
                    // From here on it has something to lose.
                    self.is_known = true;
                    // What is below a promotion is the same on both sides of it.
                    self.place.timeline = footing.system.timeline;
                    self.mode = Mode::Stream { chunk: None };
                    return Ok(());
                }
                Entrance::Again => {
                    return self.wal.hub.next_session(&mut self.seat, &footing).await;
                }
                Entrance::Behind => "it was left behind".to_owned(),
            },
        };
        if self.is_known && self.wal.options.messages.is_some() {
            return Err(Error::permanent(format!(
                "messages for {0} were lost: {gap}, and no table has them; everything up to {1} \
                 was delivered, and what was emitted between the two was not. To go on without it, \
                 run `postrider consumers remove {0}` and start with from = \"now\"",
                self.consumer, self.place.lsn
            )));
        }
        if self.is_known && self.wal.options.recover == Recover::Halt {
            return Err(Error::permanent(format!(
                "the stream can't go on for {}: {gap}; what it has not had is still in the outbox, \
                 and recover = \"halt\" was asked for: set recover = \"auto\" in [source] and \
                 start again, to read that from the table",
                self.consumer
            )));
        }
        let wanted = self.wanted(&footing);
        if self.is_known {
            let what = match wanted {
                Wanted::Missing | Wanted::Nothing => "what the slot can't give",
                Wanted::Everything => "all rows again, because they have no transaction ids",
            };
            tracing::warn!(
                sink = %self.consumer, position = %self.place.lsn, gap,
                "reading from the table {what}"
            );
        }
        // What is under way would be read again otherwise.
        if let Some(place) = self.handed {
            self.books.settled(place).await;
        }
        let delivered = self.books.ledger().delivered().clone();
        let wal = Arc::clone(&self.wal);
        let rows = CatchUp::begin(wal, delivered, footing.system.system, wanted);
        self.mode = Mode::CatchUp { rows, page: Vec::new().into_iter(), end: None };
        Ok(())
    }

    /// A batch of the events that `more` gives, in the consumer's books.
    fn batch(&mut self, events: Vec<(WalPlace, Option<u64>, i64, Entry)>) -> Result<ReadOutcome> {
        let mut entries = Vec::with_capacity(events.len());
        {
            let mut ledger = self.books.ledger();
            for (place, xid, seq, entry) in events {
                ledger.handed_out(place, xid, seq);
                entries.push(entry);
                self.place = place;
            }
        }
        Ok(ReadOutcome::Batch(Batch { entries, position: self.place.position()? }))
    }

    /// What the catch-up has next; nothing when it is over.
    async fn catch_up(&mut self, limit: BatchLimit) -> Result<Option<ReadOutcome>> {
        let Mode::CatchUp { rows, page, end } = &mut self.mode else { return Ok(None) };
        if page.len() == 0 {
            match rows.next().await {
                Err(error) => {
                    self.mode = Mode::Deciding;
                    return Err(error);
                }
                Ok(Page::Begun(base, place)) => {
                    let Base { system, timeline, lsn, .. } = base;
                    *end = Some(WalPlace { system, timeline, lsn, ordinal: 0 });
                    self.place = place;
                    self.publication = Some(base.publication.clone());
                    self.whole = false;
                    self.books.ledger().begin_catch_up(base);
                    // Its beginning becomes durable before anything else, and only then may the
                    // slot move to where the stream goes on.
                    return self.batch(Vec::new()).map(Some);
                }
                Ok(Page::Rows(more)) => *page = more.into_iter(),
                Ok(Page::End) => {
                    let end = *end;
                    return self.caught_up(end).map(Some);
                }
            }
        }
        let mut taken = Taken::new(limit);
        while let Some(row) = page.as_slice().first() {
            if !taken.fits(&row.entry) {
                break;
            }
            if let Some(row) = page.next() {
                taken.events.push((row.place, row.xid, row.seq, row.entry));
            }
        }
        self.batch(taken.events).map(Some)
    }

    /// Everything that the snapshot shows was handed out: on with the stream.
    fn caught_up(&mut self, end: Option<WalPlace>) -> Result<ReadOutcome> {
        self.mode = Mode::Deciding;
        let end = end.ok_or_else(|| Error::corrupt("a catch-up ended that had not begun"))?;
        self.place = end;
        self.whole = true;
        self.is_known = true;
        tracing::info!(sink = %self.consumer, position = %end.lsn, "caught up; on with the log");
        Ok(ReadOutcome::Batch(Batch { entries: Vec::new(), position: end.position()? }))
    }

    /// What the stream has next; nothing when there was nothing in a chunk for this reader.
    async fn stream(&mut self, limit: BatchLimit) -> Result<Option<ReadOutcome>> {
        let Mode::Stream { chunk } = &mut self.mode else { return Ok(None) };
        let (chunk, from) = match chunk {
            Some((chunk, from)) => (Arc::clone(chunk), *from),
            None => {
                let Some(next) = self.wal.hub.chunk(&mut self.seat).await? else {
                    self.mode = Mode::Deciding;
                    return Ok(None);
                };
                self.offer_base();
                let own = self.place.key();
                let from = next.events.partition_point(|event| (event.lsn, event.ordinal) <= own);
                self.mode = Mode::Stream { chunk: Some((Arc::clone(&next), from)) };
                (next, from)
            }
        };
        let mut taken = Taken::new(limit);
        let WalPlace { system, timeline, .. } = self.place;
        for event in &chunk.events[from..] {
            if !taken.fits(&event.entry) {
                break;
            }
            let place = WalPlace { system, timeline, lsn: event.lsn, ordinal: event.ordinal };
            taken.events.push((place, event.xid, event.seq, event.entry.clone()));
        }
        let next = from + taken.events.len();
        let before = self.place;
        let mut outcome = self.batch(taken.events)?;
        if next < chunk.events.len() {
            self.mode = Mode::Stream { chunk: Some((chunk, next)) };
            return Ok(Some(outcome));
        }
        self.mode = Mode::Stream { chunk: None };
        self.wal.hub.consumed(&self.seat);
        if chunk.end > self.place.key() {
            self.place.lsn = chunk.end.0;
            self.place.ordinal = chunk.end.1;
            if let ReadOutcome::Batch(batch) = &mut outcome {
                batch.position = self.place.position()?;
            }
        }
        Ok((self.place != before).then_some(outcome))
    }

    fn offer_base(&mut self) {
        if let Some((number, base)) = self.wal.hub.candidate(self.candidate) {
            self.candidate = number;
            self.books.ledger().candidate(Arc::unwrap_or_clone(base));
        }
    }
}

/// Events up to a limit; the first one always fits.
struct Taken {
    events: Vec<(WalPlace, Option<u64>, i64, Entry)>,
    bytes: usize,
    limit: BatchLimit,
}

impl Taken {
    fn new(limit: BatchLimit) -> Self {
        Self { events: Vec::new(), bytes: 0, limit }
    }

    fn fits(&mut self, entry: &Entry) -> bool {
        let cost = entry.cost_bytes();
        let full = self.events.len() >= self.limit.records.max(1)
            || self.bytes.saturating_add(cost) > self.limit.bytes;
        if full && !self.events.is_empty() {
            return false;
        }
        self.bytes = self.bytes.saturating_add(cost);
        true
    }
}

#[async_trait]
impl Reader for WalReader {
    async fn next(&mut self, limit: BatchLimit) -> Result<ReadOutcome> {
        if std::mem::take(&mut self.begins) {
            self.handed = Some(self.place);
            let position = self.place.position()?;
            return Ok(ReadOutcome::Batch(Batch { entries: Vec::new(), position }));
        }
        loop {
            let found = match &self.mode {
                Mode::Deciding => {
                    self.decide().await?;
                    None
                }
                Mode::CatchUp { .. } => self.catch_up(limit).await?,
                Mode::Stream { .. } => self.stream(limit).await?,
            };
            if let Some(outcome) = found {
                self.handed = Some(self.place);
                return Ok(outcome);
            }
        }
    }

    fn confirmed(&mut self, position: &Position) {
        if let Ok(place) = WalPlace::of(position) {
            self.wal.hub.acknowledge(&self.seat, place);
        }
    }
}

impl Drop for WalReader {
    fn drop(&mut self) {
        self.wal.hub.leave(&self.seat);
    }
}
