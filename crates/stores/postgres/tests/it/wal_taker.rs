//! A consumer that is watched: it takes, confirms a part, goes away and comes back, and in the end
//! each event must have come exactly as often as it was handed out anew.
//!
//! What lives here: the consumer, the ways to lose a slot, and the judgement by the table. What
//! does not: faults of networks and copies (the tests).
//! Invariant: an event comes once, and once more for each end of a process that had it unconfirmed;
//! within a process a key's events come in the order of their numbers.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use postrider_core::*;
use postrider_store_postgres::{PostgresOptions, PostgresStore, PostgresWal, WalOptions};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::Client;

use crate::support::*;
use crate::wal_support::{PATIENCE, Rider};

pub(crate) const SLOT: &str = "postrider_outbox";
/// A call of the store is given up after that, so that a lost connection costs no more.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3);

pub(crate) struct Taker {
    url: String,
    name: String,
    from: StartFrom,
    options: WalOptions,
    rider: Option<Rider>,
    /// How many processes there were.
    lives: usize,
    /// Key and payload of all that came, with the life in which it did.
    pub(crate) had: Vec<(usize, String, String)>,
    /// What was handed out in this life and is not confirmed, and the place behind all of it.
    unconfirmed: Vec<(Position, String)>,
    position: Option<Position>,
    /// How often each payload comes again.
    again: HashMap<String, usize>,
    /// What the reader said besides.
    pub(crate) errors: Vec<Error>,
}

impl Taker {
    pub(crate) fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            name: "sink".to_owned(),
            from: StartFrom::Oldest,
            options: WalOptions::new(),
            rider: None,
            lives: 0,
            had: Vec::new(),
            unconfirmed: Vec::new(),
            position: None,
            again: HashMap::new(),
            errors: Vec::new(),
        }
    }

    /// One of several consumers of a process.
    pub(crate) fn of(rider: Rider, name: &str) -> Self {
        let mut taker = Self::new("").named(name);
        taker.goes_on(rider);
        taker
    }

    pub(crate) fn goes_on(&mut self, rider: Rider) {
        self.lives += 1;
        self.rider = Some(rider);
    }

    pub(crate) fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    pub(crate) fn at(&mut self, url: impl Into<String>) {
        self.url = url.into();
    }

    /// The process, which begins now if there is none.
    pub(crate) async fn rider(&mut self) -> &mut Rider {
        if self.rider.is_none() {
            let options = PostgresOptions::new(&self.url)
                .tick_interval(Duration::ZERO)
                .statement_timeout(STATEMENT_TIMEOUT);
            let store = PostgresStore::open(options).await.expect("open");
            let wal = PostgresWal::new(store, self.options.clone()).expect("options");
            self.lives += 1;
            self.rider = Some(Rider::from(wal, &self.name, self.from.clone()).await);
        }
        self.rider.as_mut().expect("just made")
    }

    pub(crate) async fn wal(&mut self) -> PostgresWal {
        self.rider().await.wal.clone()
    }

    /// The process ends, whatever it had.
    pub(crate) fn end(&mut self) {
        self.rider = None;
        self.position = None;
        for (_, payload) in self.unconfirmed.drain(..) {
            *self.again.entry(payload).or_default() += 1;
        }
    }

    /// The reader is opened anew in the same process, as after `Fenced`: what was unconfirmed may
    /// come again or, where another copy has it confirmed, not.
    pub(crate) async fn begin_again(&mut self) {
        let wal = self.rider.take().expect("a process").wal;
        self.unconfirmed.clear();
        self.position = None;
        self.lives += 1;
        self.rider = Some(Rider::from(wal, &self.name, self.from.clone()).await);
    }

    /// Waits so long for the next batch; whether one came.
    pub(crate) async fn step(&mut self, within: Duration, records: usize) -> bool {
        self.rider().await;
        let reader = &mut self.rider.as_mut().expect("a process").reader;
        let limit = BatchLimit { records, bytes: 1 << 20 };
        match timeout(within, reader.next(limit)).await {
            Err(_) => false,
            Ok(Ok(ReadOutcome::Ended(_))) => panic!("the log never ends"),
            Ok(Ok(ReadOutcome::Batch(batch))) => {
                for entry in &batch.entries {
                    let event = &record(entry).event;
                    let payload = String::from_utf8(event.payload().to_vec()).expect("text");
                    self.had.push((self.lives, event.key().as_str().to_owned(), payload.clone()));
                    self.unconfirmed.push((entry.position().clone(), payload));
                }
                self.position = Some(batch.position);
                true
            }
            Ok(Err(error)) => {
                self.errors.push(error);
                sleep(Duration::from_millis(10)).await;
                false
            }
        }
    }

    /// Confirms the first of what is not, and all if that is all.
    pub(crate) async fn confirm(&mut self, count: usize) {
        let position = if count >= self.unconfirmed.len() {
            self.position.take()
        } else {
            count.checked_sub(1).map(|last| self.unconfirmed[last].0.clone())
        };
        let Some(position) = position else { return };
        let count = count.min(self.unconfirmed.len());
        let rider = self.rider.as_mut().expect("a process");
        let tally = Tally { published: count as u64, parked: 0 };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match rider.wal.advance(&rider.lease, &rider.consumer, &position, tally).await {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::Transient => {
                    assert!(Instant::now() < deadline, "not confirmed: {}", error.chain());
                    sleep(Duration::from_millis(20)).await;
                }
                // Another copy answers: the reader says so, too.
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    self.errors.push(error);
                    return;
                }
                Err(error) => panic!("{}", error.chain()),
            }
        }
        rider.reader.confirmed(&position);
        self.unconfirmed.drain(..count);
    }

    pub(crate) async fn confirm_all(&mut self) {
        self.confirm(usize::MAX).await;
    }

    pub(crate) fn unconfirmed(&self) -> usize {
        self.unconfirmed.len()
    }

    /// Where the events stand that are not confirmed.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Position> {
        self.unconfirmed.iter().map(|(position, _)| position)
    }

    pub(crate) fn has(&self, payload: &str) -> bool {
        self.had.iter().any(|(_, _, had)| had == payload)
    }

    /// Takes until it has had this; what may wait for lost connections is not waited for.
    pub(crate) async fn comes(&mut self, payload: &str, within: Duration) {
        let deadline = Instant::now() + within;
        while !self.has(payload) {
            let errors: Vec<_> = self.errors.iter().map(Error::chain).collect();
            assert!(Instant::now() < deadline, "{payload} has not come: {errors:#?}");
            self.step(Duration::from_millis(100), 512).await;
        }
    }

    /// Takes and confirms until it has had this.
    pub(crate) async fn until(&mut self, payload: &str, within: Duration) {
        let deadline = Instant::now() + within;
        while !self.has(payload) {
            let errors: Vec<_> = self.errors.iter().map(Error::chain).collect();
            assert!(Instant::now() < deadline, "{payload} has not come: {errors:#?}");
            self.step(Duration::from_millis(100), 512).await;
            self.confirm_all().await;
        }
    }

    /// Takes and confirms until it reads the slot, and begins with that if need be.
    pub(crate) async fn streams(&mut self, session: &Client) {
        let deadline = Instant::now() + PATIENCE;
        let reads = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
        loop {
            self.idle(Duration::from_millis(50)).await;
            if one::<i64>(session, reads).await > 0 && self.unconfirmed.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "it does not read the slot");
        }
    }

    /// Takes and confirms for a while.
    pub(crate) async fn idle(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while Instant::now() < deadline {
            self.step(Duration::from_millis(50).min(time), 512).await;
            self.confirm_all().await;
        }
    }

    /// Waits until the reader says what has all of these words in it; what comes is confirmed.
    pub(crate) async fn told(&mut self, words: &[&str], within: Duration) -> Error {
        let deadline = Instant::now() + within;
        let mut seen = self.errors.len();
        loop {
            self.step(Duration::from_millis(50), 512).await;
            self.confirm_all().await;
            while seen < self.errors.len() {
                let text = self.errors[seen].chain();
                seen += 1;
                if words.iter().all(|word| text.contains(word)) {
                    return self.errors.remove(seen - 1);
                }
            }
            let errors: Vec<_> = self.errors.iter().map(Error::chain).collect();
            assert!(Instant::now() < deadline, "{words:?} was not said in time: {errors:#?}");
        }
    }

    /// Takes the rest, and judges all of it by the table.
    pub(crate) async fn judge(&mut self, session: &Client) {
        let committed = committed(session).await;
        let wanted: usize = committed.len() + self.again.values().sum::<usize>();
        let deadline = Instant::now() + PATIENCE;
        while self.had.len() < wanted && Instant::now() < deadline {
            self.step(Duration::from_millis(100), 512).await;
            self.confirm_all().await;
        }
        self.idle(Duration::from_millis(200)).await;
        let mut times: HashMap<&str, usize> = HashMap::new();
        for (_, _, payload) in &self.had {
            *times.entry(payload).or_default() += 1;
        }
        let wrong: Vec<String> = committed
            .keys()
            .filter_map(|payload| {
                let expected = 1 + self.again.get(payload).copied().unwrap_or(0);
                let found = times.remove(payload.as_str()).unwrap_or(0);
                (found != expected).then(|| format!("{payload}: {found} times for {expected}"))
            })
            .collect();
        let errors: Vec<_> = self.errors.iter().map(Error::chain).collect();
        assert!(wrong.is_empty(), "of {}: {wrong:#?}; {errors:#?}", committed.len());
        assert!(times.is_empty(), "never committed: {times:?}");
        self.judge_order(&committed);
    }

    /// Each key's events in the order of their numbers, within each life and on the whole.
    pub(crate) fn judge_order(&self, committed: &BTreeMap<String, i64>) {
        let mut first: HashMap<&str, i64> = HashMap::new();
        let mut last: HashMap<(usize, &str), i64> = HashMap::new();
        let mut seen = std::collections::HashSet::new();
        for (life, key, payload) in &self.had {
            let Some(&seq) = committed.get(payload) else { continue };
            let before = last.insert((*life, key), seq);
            assert!(before.is_none_or(|before| before < seq), "{key} {payload} in life {life}");
            if seen.insert(payload) {
                let before = first.insert(key, seq);
                assert!(before.is_none_or(|before| before < seq), "{key} {payload} at first");
            }
        }
    }
}

/// Payloads and numbers of all that is in the outbox.
pub(crate) async fn committed(session: &Client) -> BTreeMap<String, i64> {
    let sql = "SELECT payload, seq FROM postrider.outbox ORDER BY seq";
    let rows = session.query(sql, &[]).await.expect("read the outbox");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    rows.iter().map(|row| (text(row.get(0)), row.get(1))).collect()
}

/// Drops the slot, also from under its reader.
pub(crate) async fn drop_slot(session: &Client) {
    let end = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
        WHERE slot_name = 'postrider_outbox' AND active_pid IS NOT NULL";
    let drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
        WHERE slot_name = 'postrider_outbox'";
    let deadline = Instant::now() + PATIENCE;
    loop {
        session.execute(end, &[]).await.expect("terminate");
        if session.execute(drop, &[]).await.is_ok() {
            return;
        }
        assert!(Instant::now() < deadline, "the slot can't be dropped");
        sleep(Duration::from_millis(2)).await;
    }
}

/// Has the server give the slot up, by more log than it keeps; needs `max_slot_wal_keep_size = 1MB`
/// and `wal_keep_size = 0`.
pub(crate) async fn invalidate_slot(session: &Client) {
    for _ in 0..3 {
        let switch = "SELECT pg_switch_wal() FROM pg_logical_emit_message(false, '', '')";
        session.execute(switch, &[]).await.expect("switch");
    }
    session.batch_execute("CHECKPOINT").await.expect("checkpoint");
}
