//! Telling readers that there may be something new.
//!
//! What lives here: the bell that this process rings, and the look-out for other writers' commits,
//! which one waiting reader keeps for all. What does not: polling by readers.
//! Invariant: only a hint. Whoever misses it still polls.

use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use postrider_core::Result;
use rusqlite::Connection;
use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;

use crate::config::SqliteOptions;
use crate::connections::connect;
use crate::positions;

/// The look-out's first and longest pause; each look without news doubles it.
const LOOK_BUSY: Duration = Duration::from_millis(4);
const LOOK_IDLE: Duration = Duration::from_millis(32);
/// A reader that looked just before the bell rang was not waiting yet; one that comes within this
/// time looks once more.
const ECHO: Duration = Duration::from_millis(4);

pub(crate) struct Wakeup {
    bell: Notify,
    rung_at: StdMutex<Option<Instant>>,
    look_out: Mutex<Option<LookOut>>,
    options: SqliteOptions,
}

/// A connection of its own, because `PRAGMA data_version` compares only with itself.
struct LookOut {
    connection: Connection,
    data_version: i64,
    head_seq: i64,
}

impl LookOut {
    fn open(options: &SqliteOptions) -> Result<Self> {
        let options = options.clone().busy_timeout(Duration::ZERO);
        let connection = connect(&options)?;
        let mut look_out = Self { connection, data_version: -1, head_seq: -1 };
        look_out.stirred();
        look_out.moved()?;
        Ok(look_out)
    }

    /// Whether any connection has committed since the last look. Reads shared memory and waits for
    /// nothing: microseconds, so that it needs no thread. A failed look is no news: readers poll
    /// and meet the fault themselves.
    fn stirred(&mut self) -> bool {
        let found = self
            .connection
            .prepare_cached("PRAGMA data_version")
            .and_then(|mut statement| statement.query_row([], |row| row.get::<_, i64>(0)));
        let stirred = found.as_ref().is_ok_and(|found| *found != self.data_version);
        self.data_version = found.unwrap_or(self.data_version);
        stirred
    }

    /// Whether the head moved since the last look; leases and checkpoints do not move it.
    fn moved(&mut self) -> Result<bool> {
        let head = positions::head(&self.connection)?.unwrap_or_default();
        let moved = head.seq != self.head_seq;
        self.head_seq = head.seq;
        Ok(moved)
    }
}

impl Wakeup {
    pub(crate) fn new(options: &SqliteOptions) -> Arc<Self> {
        Arc::new(Self {
            bell: Notify::new(),
            rung_at: StdMutex::default(),
            look_out: Mutex::default(),
            options: options.clone(),
        })
    }

    pub(crate) fn ring(&self) {
        *self.rung_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.bell.notify_waiters();
    }

    fn rang_just_now(&self) -> bool {
        let rung_at = *self.rung_at.lock().unwrap_or_else(PoisonError::into_inner);
        rung_at.is_some_and(|at| at.elapsed() < ECHO)
    }

    /// Ends when the bell rings or another connection has appended. Cancel-safe.
    pub(crate) async fn changed(self: &Arc<Self>) {
        let rung = self.bell.notified();
        if self.rang_just_now() {
            return tokio::time::sleep(ECHO).await;
        }
        tokio::select! {
            () = rung => {}
            () = self.keep_look_out() => {}
        }
    }

    /// Looks for as long as the caller waits; others wait for the bell that this rings.
    async fn keep_look_out(self: &Arc<Self>) {
        let mut pause = LOOK_BUSY;
        let mut held = self.look_out.lock().await;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_IDLE);
            if held.as_mut().is_some_and(|look_out| !look_out.stirred()) {
                continue;
            }
            let kept = held.take();
            let options = self.options.clone();
            let look = tokio::task::spawn_blocking(move || {
                let mut look_out = match kept {
                    Some(look_out) => look_out,
                    None => LookOut::open(&options).ok()?,
                };
                let news = look_out.moved().unwrap_or(false);
                Some((look_out, news))
            });
            let Ok(Some((look_out, news))) = look.await else { continue };
            *held = Some(look_out);
            if news {
                self.ring();
                return;
            }
        }
    }
}
