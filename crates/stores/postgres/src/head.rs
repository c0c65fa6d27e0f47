//! The feed's head: making ticks when something may have come, and telling readers of it.
//!
//! What lives here: the look at the head that all readers of a process share, and the watch that
//! one waiting reader keeps for all of them. What does not: reading records.
//! Invariant: a reader told "nothing new" was told so by a look that began after it asked; ticks
//! are committed before anybody hears of them.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex as StdMutex, PoisonError};
use std::time::Duration;

use postrider_core::{Error, Result};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::Instant;
use tokio_postgres::types::Type;

use crate::connections::Connections;
use crate::names::Names;
use crate::world::WorldNumber;

/// The watch's first and longest pause; each look without news doubles it.
const LOOK_BUSY: Duration = Duration::from_millis(5);
const LOOK_IDLE: Duration = Duration::from_secs(1);
/// Another session makes the tick at this moment: it commits within about this time.
const TICK_UNDER_WAY: Duration = Duration::from_millis(3);
/// Looks that find another session's tick under way, before that is an error of its own: 10 s.
const MAX_BUSY_LOOKS: u32 = 3_000;

const TICK: &str = "SELECT newest, outcome, wait_ms FROM {schema}.{outbox_tick}($1)";

pub(crate) struct Head {
    interval: Duration,
    interval_ms: i32,
    /// When this process was told of the last tick that it made.
    made: StdMutex<Option<Instant>>,
    /// The newest tick that this process knows to be committed, and the copy of the database that
    /// has it.
    newest: watch::Sender<(WorldNumber, i64)>,
    /// Looks begun so far, and the number of the last one that ended well.
    begun: AtomicU64,
    ended: AtomicU64,
    /// The result of that last look.
    found: AtomicI64,
    looking: Mutex<()>,
    /// The watch's present pause; held by the reader that keeps the watch.
    watching: Mutex<Duration>,
    /// Rung by this process's own commits.
    bell: Notify,
}

impl Head {
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            interval,
            made: StdMutex::default(),
            interval_ms: i32::try_from(interval.as_millis()).unwrap_or(i32::MAX),
            newest: watch::Sender::new((WorldNumber::default(), 0)),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            found: AtomicI64::new(0),
            looking: Mutex::new(()),
            watching: Mutex::new(LOOK_BUSY),
            bell: Notify::new(),
        }
    }

    /// Makes a tick if anything may have come, and returns the newest one. Calls that come while
    /// one looks share the next look.
    pub(crate) async fn look(&self, connections: &Connections, names: &Names) -> Result<i64> {
        let asked = self.begun.load(Ordering::SeqCst);
        let _looking = self.looking.lock().await;
        if self.ended.load(Ordering::SeqCst) > asked {
            return Ok(self.found.load(Ordering::SeqCst));
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let newest = self.tick(connections, names).await?;
        self.found.store(newest, Ordering::SeqCst);
        self.ended.store(number, Ordering::SeqCst);
        let world = connections.world().number();
        self.newest.send_if_modified(|known| {
            // Another copy of the database may have less than the one before.
            let moved = world > known.0 || newest > known.1;
            if moved {
                *known = (world, newest);
            }
            moved
        });
        Ok(newest)
    }

    /// As [`Self::look`], for a reader that has read up to the end of tick `stamp`. It also hears
    /// of a newer tick from a look that was under way when it asked: whatever came after that,
    /// there is something to read. Waiting for the next look instead would cost another interval.
    pub(crate) async fn look_beyond(
        &self,
        stamp: i64,
        connections: &Connections,
        names: &Names,
    ) -> Result<i64> {
        let mut newest = self.newest.subscribe();
        let here = |known: &(WorldNumber, i64)| {
            // Another copy of the database may have less than the one before.
            known.0 == connections.world().number() && known.1 > stamp
        };
        tokio::select! {
            biased;
            Ok(known) = newest.wait_for(here) => Ok(known.1),
            // Dropped only while another look is under way: this one would be what it waits for.
            found = self.look(connections, names) => found,
        }
    }

    async fn tick(&self, connections: &Connections, names: &Names) -> Result<i64> {
        let sql = names.fill(TICK);
        // Before that the server would only answer that it is too early.
        let made = *self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(due) = made.and_then(|made| made.checked_add(self.interval)) {
            tokio::time::sleep_until(due).await;
        }
        for _ in 0..MAX_BUSY_LOOKS {
            let params: [crate::connections::Param<'_>; 1] = [(&self.interval_ms, Type::INT4)];
            let rows = connections.query_often("make a tick", &sql, &params).await?;
            let Some(row) = rows.first() else { break };
            let (newest, outcome, wait_ms): (i64, &str, i32) = (row.get(0), row.get(1), row.get(2));
            match outcome {
                "made" => {
                    *self.made.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(Instant::now());
                    return Ok(newest);
                }
                "quiet" => return Ok(newest),
                "early" => {
                    let wait_ms = u64::try_from(wait_ms).unwrap_or(1);
                    tokio::time::sleep(Duration::from_millis(wait_ms)).await;
                }
                _ => tokio::time::sleep(TICK_UNDER_WAY).await,
            }
        }
        Err(Error::transient(
            "make a tick: another session holds the lock of the outbox's ticks; look for it in \
             pg_locks",
        ))
    }

    /// Waits until there is a tick after `stamp`. One of all waiting readers looks for it, more and
    /// more seldom while nothing comes. Returns early when a look fails: the reader meets the fault
    /// itself.
    pub(crate) async fn wait_beyond(&self, stamp: i64, connections: &Connections, names: &Names) {
        let mut newest = self.newest.subscribe();
        let mut pause = tokio::select! {
            biased;
            _ = newest.wait_for(|(_, newest)| *newest > stamp) => return,
            pause = self.watching.lock() => pause,
        };
        loop {
            tokio::select! {
                biased;
                // Another reader looked.
                _ = newest.wait_for(|(_, newest)| *newest > stamp) => break,
                () = self.bell.notified() => *pause = LOOK_BUSY,
                () = tokio::time::sleep(*pause) => {}
            }
            let found = self.look(connections, names).await;
            if found.as_ref().is_ok_and(|found| *found > stamp) {
                break;
            }
            *pause = (*pause * 2).min(LOOK_IDLE);
            if found.is_err() {
                return;
            }
        }
        *pause = LOOK_BUSY;
    }

    /// Lets the watch look at once.
    pub(crate) fn ring(&self) {
        self.bell.notify_one();
    }
}
