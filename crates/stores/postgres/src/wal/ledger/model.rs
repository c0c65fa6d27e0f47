//! A small PostgreSQL, a reader of its log that fails at any moment, and a ledger between them.
//!
//! What lives here: transactions with ids, rows with numbers, the log of commits, what snapshots
//! see of them, a slot. What does not: schedules (`tests.rs`), and a server (`tests/it`).
//! Invariant: after each write the rows that count as delivered are those that were handed out up
//! to the checkpoint, each of them and no other.

use std::collections::{BTreeMap, BTreeSet};

use super::by_created_at::ByCreatedAt;
use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Its commit record is written; memory still says that it is open.
    Recorded(u64),
    Committed(u64),
    RolledBack,
}

#[derive(Debug)]
struct Transaction {
    xid: u64,
    rows: Vec<i64>,
    state: State,
}

impl Transaction {
    /// Where its commit record begins.
    fn record(&self) -> Option<u64> {
        match self.state {
            State::Recorded(lsn) | State::Committed(lsn) => Some(lsn),
            State::Open | State::RolledBack => None,
        }
    }

    fn is_running(&self) -> bool {
        matches!(self.state, State::Open | State::Recorded(_))
    }
}

/// The server. Ids, numbers and places are drawn in order.
#[derive(Debug)]
pub(super) struct Server {
    system: u64,
    /// Rows that came with a dump of another cluster, with the ids that they had there.
    dumped: Vec<(u64, i64)>,
    /// All numbers up to this one are settled: a tick that came after the dump says so.
    floor: i64,
    transactions: Vec<Transaction>,
    next_xid: u64,
    last_seq: i64,
    /// Where the next record goes.
    end: u64,
    /// Up to where the slot was acknowledged, if there is one.
    slot: Option<u64>,
}

impl Server {
    fn new() -> Self {
        Self {
            system: 7,
            dumped: Vec::new(),
            floor: 0,
            transactions: Vec::new(),
            next_xid: 100,
            last_seq: 0,
            end: 800,
            slot: None,
        }
    }

    /// Another cluster, into which a dump of this one was read. It draws the same ids again.
    fn restored(&self) -> Self {
        let seen = |one: &&Transaction| matches!(one.state, State::Committed(_));
        let mut dumped = self.dumped.clone();
        for one in self.transactions.iter().filter(seen) {
            dumped.extend(one.rows.iter().map(|seq| (one.xid, *seq)));
        }
        Self { system: self.system + 1, dumped, last_seq: self.last_seq, ..Self::new() }
    }

    /// A tick waits for all writers and tells that up to here all is settled.
    fn tick(&mut self) {
        if !self.transactions.iter().any(Transaction::is_running) {
            self.floor = self.last_seq;
        }
    }

    fn is_dumped(&self, seq: i64) -> bool {
        self.dumped.iter().any(|(_, dumped)| *dumped == seq)
    }

    fn of_state(&self, which: usize, is: impl Fn(&State) -> bool) -> Option<usize> {
        let fits = |at: &usize| is(&self.transactions[*at].state);
        let found: Vec<usize> = (0..self.transactions.len()).filter(fits).collect();
        (!found.is_empty()).then(|| found[which % found.len()])
    }

    pub(super) fn begin(&mut self) {
        let (xid, rows, state) = (self.next_xid, Vec::new(), State::Open);
        self.next_xid += 1;
        self.transactions.push(Transaction { xid, rows, state });
    }

    pub(super) fn insert(&mut self, which: usize) {
        if let Some(at) = self.of_state(which, |state| *state == State::Open) {
            self.last_seq += 1;
            self.transactions[at].rows.push(self.last_seq);
        }
    }

    pub(super) fn record(&mut self, which: usize) {
        if let Some(at) = self.of_state(which, |state| *state == State::Open) {
            self.transactions[at].state = State::Recorded(self.end);
            self.write(2);
        }
    }

    pub(super) fn end(&mut self, which: usize) {
        if let Some(at) = self.of_state(which, |state| matches!(state, State::Recorded(_))) {
            let lsn = self.transactions[at].record().expect("it is recorded");
            self.transactions[at].state = State::Committed(lsn);
        }
    }

    pub(super) fn roll_back(&mut self, which: usize) {
        if let Some(at) = self.of_state(which, |state| *state == State::Open) {
            self.transactions[at].state = State::RolledBack;
        }
    }

    pub(super) fn write(&mut self, records: u64) {
        self.end += 8 * records;
    }

    fn snapshot_of(running: &BTreeSet<u64>, xmax: u64) -> Snapshot {
        let open: Vec<u64> = running.range(..xmax).copied().collect();
        let xmin = open.first().copied().unwrap_or(xmax);
        let texts: Vec<String> = open.iter().map(u64::to_string).collect();
        Snapshot::parse(&format!("{xmin}:{xmax}:{}", texts.join(","))).expect("a snapshot")
    }

    /// As any session takes it: of what is running in memory, up to the last id that has ended.
    fn snapshot(&self) -> Snapshot {
        let ids = |running: bool| {
            let of = self.transactions.iter().filter(move |one| one.is_running() == running);
            of.map(|one| one.xid)
        };
        let running = ids(true).collect();
        Self::snapshot_of(&running, ids(false).max().map_or(100, |last| last + 1))
    }

    /// As a slot exports it at this place: what has a commit record. All else up to the last of
    /// them counts as open, also what was rolled back.
    fn seam_snapshot(&self) -> Snapshot {
        let recorded = |one: &&Transaction| one.record().is_some();
        let last = self.transactions.iter().filter(recorded).map(|one| one.xid).max();
        let lowest = self.transactions.iter().find(|one| one.state == State::Open);
        let lowest = lowest.map_or(u64::MAX, |one| one.xid);
        let others = self.transactions.iter().filter(|one| !recorded(one) && one.xid >= lowest);
        Self::snapshot_of(&others.map(|one| one.xid).collect(), last.map_or(100, |last| last + 1))
    }

    fn base(&self, snapshot: Snapshot) -> Base {
        let (lsn, seq) = (Lsn(self.end), self.last_seq);
        let publication = "p".to_owned();
        let (floor, system) = (self.floor, self.system);
        Base { snapshot, lsn, seq, floor, system, timeline: 1, publication }
    }

    /// Transactions with a commit record at or after a place, in the order of the log.
    fn log_from(&self, lsn: u64) -> BTreeMap<u64, usize> {
        let record = |at: usize| self.transactions[at].record().map(|lsn| (lsn, at));
        let all = (0..self.transactions.len()).filter_map(record);
        all.filter(|(begin, _)| *begin >= lsn).collect()
    }

    /// What an imported snapshot of this moment shows.
    fn committed_rows(&self) -> Vec<(u64, i64)> {
        let committed = self.transactions.iter().filter(|one| one.record().is_some());
        let own = committed.flat_map(|one| one.rows.iter().map(|seq| (one.xid, *seq)));
        let mut rows: Vec<(u64, i64)> = self.dumped.iter().copied().chain(own).collect();
        rows.sort_by_key(|(_, seq)| *seq);
        rows
    }
}

/// The tables, written as the statement writes them.
#[derive(Debug, Clone, Default)]
struct Tables {
    place: Option<WalPlace>,
    base: Option<Base>,
    blocks: BTreeMap<u64, Vec<u8>>,
    partial: Option<Partial>,
    recoveries: BTreeMap<usize, Recovery>,
}

impl Tables {
    fn write(&mut self, step: &Step) {
        let place = self.place.filter(|place| place.system == step.to.system);
        assert!(place.is_none_or(|place| place.key() <= step.to.key()), "the place moves back");
        self.place = Some(step.to);
        if let Some(base) = &step.base {
            self.base = Some(base.clone());
            self.blocks.clear();
        }
        self.blocks.extend(step.blocks.iter().cloned());
        if step.moves_partial {
            self.partial = step.partial;
        }
        let kept = step.recoveries_kept;
        self.recoveries.extend(step.recovery.iter().map(|own| (kept, own.clone())));
        let end = kept + usize::from(step.recovery.is_some());
        self.recoveries.retain(|number, _| *number < end);
    }

    fn load(&self) -> Delivered {
        let mut after = Xids::default();
        for (number, bytes) in &self.blocks {
            after.take_in(*number, bytes).expect("as it was written");
        }
        Delivered {
            place: self.place,
            base: self.base.clone(),
            after,
            partial: self.partial,
            recoveries: self.recoveries.values().cloned().collect(),
        }
    }
}

#[derive(Debug)]
enum Mode {
    Stream,
    /// Rows still to be handed out, the next one last; and the seam.
    CatchUp(Vec<(u64, i64)>, u64),
}

#[derive(Debug)]
struct Reader {
    ledger: Ledger,
    mode: Mode,
    /// Up to where all was handed out.
    place: WalPlace,
    /// What was handed out and is not durable, with the place behind each.
    handed: Vec<(WalPlace, i64)>,
    /// The furthest place that a write was tried for.
    tried: (Lsn, u32),
}

/// How the write of a checkpoint ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Outcome {
    Done,
    /// Done, but nobody was told.
    Unknown,
    Failed,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) server: Server,
    tables: Tables,
    /// As they were at an earlier moment.
    earlier: Tables,
    reader: Option<Reader>,
    /// A base whose place is not read yet.
    snapshot: Option<Snapshot>,
    /// Rows that were handed out up to a checkpoint that was written.
    durable: BTreeSet<i64>,
    by_created_at: ByCreatedAt,
}

impl World {
    pub(super) fn new() -> Self {
        Self {
            server: Server::new(),
            tables: Tables::default(),
            earlier: Tables::default(),
            reader: None,
            snapshot: None,
            durable: BTreeSet::new(),
            by_created_at: ByCreatedAt::default(),
        }
    }

    fn place(system: u64, lsn: u64, ordinal: u32) -> WalPlace {
        WalPlace { system, timeline: 1, lsn: Lsn(lsn), ordinal }
    }

    /// A reader, in the stream where the slot has not passed it, else in a catch-up.
    fn open(&mut self, force_catch_up: bool) {
        if self.reader.is_some() {
            return;
        }
        let delivered = self.tables.load();
        let place = delivered.place.unwrap_or_else(|| Self::place(self.server.system, 0, 0));
        let whole = !force_catch_up && delivered.recoveries.is_empty();
        let here = whole
            && place.system == self.server.system
            && self.server.slot.is_some_and(|slot| slot <= place.lsn.0);
        let (ledger, mode, handed) = (Ledger::new(delivered), Mode::Stream, Vec::new());
        self.reader = Some(Reader { ledger, mode, place, handed, tried: (Lsn(0), 0) });
        if !here {
            self.begin_catch_up();
        }
    }

    fn begin_catch_up(&mut self) {
        let Some(reader) = &mut self.reader else { return };
        // Making a slot writes to the log; but one snapshot may be read twice.
        let stands = reader.ledger.delivered().place.map(|place| place.lsn.0);
        if stands != Some(self.server.end - 1) {
            self.server.write(1);
        }
        let seam = self.server.end;
        // A slot that is there lends another one's snapshot.
        self.server.slot.get_or_insert(seam);
        let base = self.server.base(self.server.seam_snapshot());
        let mut rows = self.server.committed_rows();
        self.by_created_at.recover(&rows);
        let delivered = reader.ledger.delivered();
        rows.retain(|(xid, seq)| !delivered.has(base.system, Some(*xid), *seq));
        rows.reverse();
        let start = Self::place(base.system, seam - 1, 0);
        let stands = delivered.place.filter(|place| place.lsn == start.lsn);
        let stands = stands.filter(|place| place.system == start.system);
        reader.place = stands.unwrap_or(start);
        reader.tried = reader.place.key();
        reader.ledger.begin_catch_up(base);
        reader.mode = Mode::CatchUp(rows, seam);
    }

    /// The stream goes on without the reader: it catches up once all that it was handed is durable.
    pub(super) fn fall_behind(&mut self) {
        let settled = |reader: &Reader| {
            let stands = reader.ledger.delivered().place.map(|place| place.key());
            reader.handed.is_empty() && stands >= Some(reader.tried)
        };
        if self.reader.as_ref().is_some_and(settled) {
            self.begin_catch_up();
        }
    }

    /// A dump is read into another cluster, and the reader finds that one.
    pub(super) fn restore(&mut self) {
        self.lose_slot();
        self.snapshot = None;
        self.server = self.server.restored();
    }

    pub(super) fn tick(&mut self) {
        self.server.tick();
    }

    pub(super) fn read(&mut self, most: usize, force_catch_up: bool) {
        self.open(force_catch_up);
        for _ in 0..most {
            let Some((xid, seq)) = self.next() else { return };
            // In another cluster the ids of what came with the dump may say too little.
            let again = self.durable.contains(&seq) && !self.server.is_dumped(seq);
            assert!(!again, "row {seq} comes again");
            let reader = self.reader.as_mut().expect("it is open");
            reader.ledger.handed_out(reader.place, Some(xid), seq);
            reader.handed.push((reader.place, seq));
        }
    }

    /// The next row, with the reader's place behind it.
    fn next(&mut self) -> Option<(u64, i64)> {
        let reader = self.reader.as_mut()?;
        if let Mode::CatchUp(rows, seam) = &mut reader.mode {
            if let Some(row) = rows.pop() {
                reader.place.ordinal += 1;
                return Some(row);
            }
            reader.place = Self::place(reader.place.system, *seam, 0);
            reader.mode = Mode::Stream;
        }
        for (begin, at) in self.server.log_from(reader.place.lsn.0) {
            let one = &self.server.transactions[at];
            if reader.place.lsn.0 < begin {
                reader.place = Self::place(reader.place.system, begin, 0);
            }
            if let Some(seq) = one.rows.get(reader.place.ordinal as usize) {
                reader.place.ordinal += 1;
                self.by_created_at.send(*seq);
                return Some((one.xid, *seq));
            }
            reader.place = Self::place(reader.place.system, begin + 16, 0);
        }
        None
    }

    /// Writes a checkpoint at one of the places behind what was handed out, or where the reader
    /// stands.
    pub(super) fn checkpoint(&mut self, which: usize, outcome: Outcome) {
        let Some(reader) = &mut self.reader else { return };
        let places = reader.handed.iter().map(|(place, _)| *place).chain([reader.place]);
        let places: Vec<WalPlace> = places.filter(|place| place.key() >= reader.tried).collect();
        if places.is_empty() {
            return;
        }
        let to = places[which % places.len()];
        reader.tried = to.key();
        let step = reader.ledger.plan(to).expect("planned");
        if matches!(outcome, Outcome::Failed) {
            return;
        }
        self.tables.write(&step);
        let behind = reader.handed.partition_point(|(place, _)| place.key() <= to.key());
        self.durable.extend(reader.handed[..behind].iter().map(|(_, seq)| *seq));
        if matches!(outcome, Outcome::Done) {
            reader.ledger.done(step);
            assert!(reader.ledger.handed.len() == reader.handed.len() - behind);
            reader.handed.drain(..behind);
        }
        self.check();
    }

    /// What counts as delivered is what was.
    fn check(&self) {
        let delivered = self.tables.load();
        let system = self.server.system;
        for (xid, seq) in &self.server.dumped {
            let counts = delivered.has(system, Some(*xid), *seq);
            assert!(!counts || self.durable.contains(seq), "row {seq} of the dump");
            // Once all is caught up, the tick tells of all.
            let here = delivered.base.as_ref().filter(|base| base.system == system);
            let told = here.is_some_and(|base| *seq <= base.floor);
            assert!(counts || !told, "row {seq} of the dump would come again");
        }
        for one in &self.server.transactions {
            for seq in one.rows.iter().filter(|_| one.state != State::RolledBack) {
                let counts = delivered.has(system, Some(one.xid), *seq);
                assert_eq!(counts, self.durable.contains(seq), "row {seq} of {one:?}");
            }
        }
    }

    pub(super) fn take_snapshot(&mut self) {
        self.snapshot = Some(self.server.snapshot());
    }

    pub(super) fn offer_base(&mut self) {
        if let (Some(snapshot), Some(reader)) = (self.snapshot.take(), &mut self.reader) {
            reader.ledger.candidate(self.server.base(snapshot));
        }
    }

    /// The server may forget what is durable.
    pub(super) fn acknowledge(&mut self) {
        if let (Some(slot), Some(place)) = (&mut self.server.slot, self.tables.place)
            && self.tables.recoveries.is_empty()
            && place.system == self.server.system
        {
            *slot = (*slot).max(place.lsn.0);
        }
    }

    pub(super) fn crash(&mut self) {
        self.reader = None;
    }

    pub(super) fn lose_slot(&mut self) {
        self.reader = None;
        self.server.slot = None;
    }

    /// Ends all transactions and reads to the end. Returns how many rows were never sent: by us,
    /// and by the scheme that goes by `created_at`.
    pub(super) fn finish(&mut self) -> (usize, usize) {
        while self.server.of_state(0, |state| *state == State::Open).is_some() {
            self.server.record(0);
        }
        while self.server.of_state(0, |state| matches!(state, State::Recorded(_))).is_some() {
            self.server.end(0);
        }
        self.read(usize::MAX, false);
        self.checkpoint(usize::MAX, Outcome::Done);
        self.take_snapshot();
        self.offer_base();
        // Beyond the base's place.
        self.server.begin();
        self.server.record(0);
        self.server.end(0);
        self.read(usize::MAX, false);
        let last = self.reader.as_ref().map_or(0, |reader| reader.handed.len());
        self.checkpoint(last, Outcome::Done);
        let rows: Vec<i64> = self.server.committed_rows().iter().map(|(_, seq)| *seq).collect();
        let missing = |sent: &BTreeSet<i64>| rows.iter().filter(|seq| !sent.contains(seq)).count();
        (missing(&self.durable), missing(&self.by_created_at.sent))
    }
}

mod copied;
