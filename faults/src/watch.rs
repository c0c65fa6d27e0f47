//! A third connection that watches how far the slot was acknowledged.
//!
//! What lives here: looking, and the rule. What does not: what is done to the slot
//! (`cluster/slot.rs`).
//! Invariant: the slot is read first and the checkpoints after it: they only grow, so a slot that
//! was seen beyond them really was. While a fault is at the slot nothing is judged; a slot that was
//! just made, or moved by hand, may be ahead of the checkpoints, and may not move until it no
//! longer is.
//!
//! ```text
//! checkpoint of each consumer ≥ place of the slot     place of the slot ≤ what the server has sent
//! ```
//!
//! A checkpoint has everything behind it whose commit record begins below its place, so the slot is
//! then strictly below the end of the first commit with an event that is not confirmed.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use postrider_servers::postgres::Server;
use postrider_store_postgres::tokio_postgres::types::{ToSql, Type};
use postrider_store_postgres::tokio_postgres::{Client, NoTls, Row, connect};
use tokio::runtime::Runtime;

use crate::cluster::direct_url;
use crate::world::{SLOT, bound};

/// How often is looked.
const LOOK_EVERY: Duration = Duration::from_millis(4);
/// Longest wait for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// With fewer looks, nothing was watched.
const MIN_LOOKS: u64 = 50;
/// So many are told in full.
const TOLD: usize = 3;

const LOOK: &str = "SELECT (s.confirmed_flush_lsn - '0/0')::bigint, s.active_pid
    FROM pg_replication_slots AS s
    WHERE s.slot_name = 'postrider_outbox' AND s.wal_status IS DISTINCT FROM 'lost'";
const SENT: &str = "SELECT (sent_lsn - '0/0')::bigint FROM pg_stat_replication WHERE pid = $1";
const CHECKPOINTS: &str = "SELECT position FROM postrider.checkpoint
    WHERE partition = 'wal' AND position IS NOT NULL";

/// Which slot of this name it is: the folder in which the server keeps it.
type Incarnation = (u64, Option<SystemTime>);

/// One look at a slot that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Look {
    incarnation: Incarnation,
    /// Up to where it was acknowledged.
    confirmed: u64,
    /// Who reads it.
    reader: Option<i32>,
    /// Up to where that one was sent the log, where it is known.
    sent: Option<u64>,
    /// Up to where the checkpoints allow it.
    bound: u64,
}

/// What was seen so far.
#[derive(Default)]
struct Eye {
    /// Counts changes of what is watched.
    changes: u64,
    /// Faults that are at the slot.
    faults: u32,
    last: Option<Look>,
    /// Whether the slot may be ahead, and from where on.
    excused: bool,
    from: Option<u64>,
    looks: u64,
    wrong: u64,
    findings: Vec<String>,
}

impl Eye {
    /// Judges a look; `None` for a slot that is missing, lost, or being made.
    fn judge(&mut self, look: Option<Look>) {
        self.looks += 1;
        let Some(look) = look.filter(|_| self.faults == 0) else { return self.excuse() };
        if self.last.is_none_or(|last| last.incarnation != look.incarnation) {
            self.excuse();
        }
        let Look { confirmed, bound, reader, .. } = look;
        if confirmed <= bound {
            (self.excused, self.from) = (false, None);
        } else if self.excused && confirmed <= *self.from.get_or_insert(confirmed) {
            // Made or moved to there, and not acknowledged since.
        } else {
            let (confirmed, bound) = (lsn(confirmed), lsn(bound));
            self.found(format!("the slot stands at {confirmed}, the lowest checkpoint at {bound}"));
        }
        let before = self.last.filter(|last| last.reader == reader && reader.is_some());
        let moved = before.is_some_and(|before| before.confirmed < confirmed);
        if let Some(sent) = look.sent.filter(|sent| moved && *sent < confirmed) {
            let (confirmed, sent) = (lsn(confirmed), lsn(sent));
            self.found(format!("the slot stands at {confirmed}, the server has sent up to {sent}"));
        }
        self.last = Some(look);
    }

    /// From now on it may be ahead.
    fn excuse(&mut self) {
        (self.excused, self.from, self.last) = (true, None, None);
    }

    fn found(&mut self, text: String) {
        self.wrong += 1;
        if self.findings.len() < TOLD {
            self.findings.push(text);
        }
    }
}

fn lsn(place: u64) -> String {
    format!("{:X}/{:X}", place >> 32, place & 0xFFFF_FFFF)
}

struct Desk {
    eye: Mutex<Eye>,
    server: Mutex<Arc<Server>>,
    /// As many consumers have a checkpoint once all have begun.
    consumers: usize,
    stopping: AtomicBool,
}

impl Desk {
    fn eye(&self) -> MutexGuard<'_, Eye> {
        self.eye.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn server(&self) -> MutexGuard<'_, Arc<Server>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A watch over a server's slot, until it is dropped.
pub struct Watch {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// Who may do to the slot what no relay may.
#[derive(Clone)]
pub struct Pass {
    desk: Arc<Desk>,
}

/// While it lives, nothing is judged.
pub struct Blindfold {
    desk: Arc<Desk>,
}

impl Pass {
    /// Nothing is judged until the value is dropped; the slot may be ahead then.
    #[must_use]
    pub fn blindfold(&self) -> Blindfold {
        let mut eye = self.desk.eye();
        eye.changes += 1;
        eye.faults += 1;
        Blindfold { desk: Arc::clone(&self.desk) }
    }
}

impl Drop for Blindfold {
    fn drop(&mut self) {
        let mut eye = self.desk.eye();
        eye.changes += 1;
        eye.faults -= 1;
        eye.excuse();
    }
}

impl Watch {
    /// Begins to watch.
    ///
    /// # Errors
    /// When there is no runtime.
    pub fn start(server: Arc<Server>, consumers: usize) -> Result<Self> {
        let desk = Arc::new(Desk {
            eye: Mutex::default(),
            server: Mutex::new(server),
            consumers,
            stopping: AtomicBool::new(false),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start the runtime")?;
        let own = Arc::clone(&desk);
        let thread = std::thread::spawn(move || watch(&own, &runtime));
        Ok(Self { desk, thread: Some(thread) })
    }

    /// For those who do something to the slot.
    pub fn pass(&self) -> Pass {
        Pass { desk: Arc::clone(&self.desk) }
    }

    /// Another server stands in the place of the one that was watched.
    pub fn turn_to(&self, server: Arc<Server>) {
        *self.desk.server() = server;
        let mut eye = self.desk.eye();
        eye.changes += 1;
        eye.excuse();
    }

    /// What must not be and was seen.
    pub fn findings(&self) -> Vec<String> {
        let eye = self.desk.eye();
        let mut findings = eye.findings.clone();
        if eye.wrong > TOLD as u64 {
            findings.push(format!("{} looks at the slot found it where it must not be", eye.wrong));
        }
        if eye.looks < MIN_LOOKS {
            findings.push(format!("only {} looks at the slot", eye.looks));
        }
        findings
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.desk.stopping.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(desk: &Desk, runtime: &Runtime) {
    let mut session: Option<(u64, Client)> = None;
    while !desk.stopping.load(Ordering::SeqCst) {
        let server = Arc::clone(&desk.server());
        let changes = desk.eye().changes;
        let open = session.take().filter(|(then, client)| *then == changes && !client.is_closed());
        let client = match open {
            Some((_, client)) => Ok(client),
            None => runtime.block_on(open_session(&server)),
        };
        // While the server is away there is nothing to see.
        if let Ok(client) = client
            && let Ok(look) = runtime.block_on(within(look(&client, &server, desk.consumers)))
        {
            let mut eye = desk.eye();
            if eye.changes == changes {
                eye.judge(look);
                session = Some((changes, client));
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

async fn open_session(server: &Server) -> Result<Client> {
    let (client, connection) = connect(&direct_url(server), NoTls).await.context("connect")?;
    #[expect(clippy::disallowed_methods, reason = "it ends with its client")]
    tokio::spawn(connection);
    Ok(client)
}

async fn within<T>(attempt: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(ANSWER_WITHIN, attempt).await.context("wait for the server")?
}

fn incarnation(server: &Server) -> Option<Incarnation> {
    let folder = server.data().join("pg_replslot").join(SLOT);
    let metadata = std::fs::metadata(folder).ok()?;
    Some((metadata.ino(), metadata.created().ok()))
}

/// What is there; nothing for a slot that is not, or was made anew at this very moment.
async fn look(client: &Client, server: &Server, consumers: usize) -> Result<Option<Look>> {
    let none: [(&(dyn ToSql + Sync), Type); 0] = [];
    let before = incarnation(server);
    let rows = client.query_typed(LOOK, &none).await?;
    let slot = rows.first().and_then(|row| Some((row.get::<_, Option<i64>>(0)?, row.get(1))));
    let reader: Option<i32> = slot.and_then(|(_, reader)| reader);
    let sent = match reader {
        Some(pid) => client.query_typed(SENT, &[(&pid, Type::INT4)]).await?,
        None => Vec::new(),
    };
    let sent = sent.first().and_then(|row| row.get::<_, Option<i64>>(0));
    let checkpoints = client.query_typed(CHECKPOINTS, &none).await?;
    let bounds = checkpoints.iter().map(|row: &Row| bound(row.get(0)));
    let lowest = bounds.collect::<Result<Vec<u64>>>()?.into_iter().min();
    let lowest = lowest.filter(|_| checkpoints.len() == consumers);
    let (Some((confirmed, _)), Some(own)) = (slot, before) else { return Ok(None) };
    Ok((incarnation(server) == before).then_some(Look {
        incarnation: own,
        confirmed: confirmed.unsigned_abs(),
        reader,
        sent: sent.map(i64::unsigned_abs),
        bound: lowest.unwrap_or(0),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(confirmed: u64, bound: u64) -> Look {
        let incarnation = (1, None);
        Look { incarnation, confirmed, reader: Some(7), sent: Some(1_000), bound }
    }

    fn wrong(looks: &[Option<Look>]) -> u64 {
        let mut eye = Eye::default();
        looks.iter().for_each(|look| eye.judge(*look));
        eye.wrong
    }

    #[test]
    fn a_slot_beyond_a_checkpoint_is_found() {
        assert_eq!(wrong(&[Some(look(8, 8)), Some(look(16, 24)), Some(look(24, 24))]), 0);
        assert_eq!(wrong(&[Some(look(8, 8)), Some(look(16, 8))]), 1);
    }

    #[test]
    fn a_new_slot_may_be_ahead_until_the_checkpoints_have_reached_it_and_stays_there() {
        assert_eq!(wrong(&[Some(look(16, 8)), Some(look(16, 8)), Some(look(16, 16))]), 0);
        assert_eq!(wrong(&[Some(look(16, 8)), Some(look(24, 8))]), 1);
        assert_eq!(wrong(&[Some(look(16, 8)), Some(look(16, 16)), Some(look(24, 16))]), 1);
        let other = Look { incarnation: (2, None), ..look(32, 16) };
        assert_eq!(wrong(&[Some(look(16, 16)), Some(other), Some(other)]), 0);
        assert_eq!(wrong(&[Some(look(16, 16)), None, Some(look(32, 16))]), 0);
    }

    #[test]
    fn what_the_server_has_not_sent_is_not_acknowledged() {
        let beyond = Look { sent: Some(12), ..look(16, 64) };
        assert_eq!(wrong(&[Some(look(8, 8)), Some(beyond)]), 1);
        // A reader that has just begun was told where it begins, and nothing else.
        let fresh = Look { reader: Some(8), ..beyond };
        assert_eq!(wrong(&[Some(look(8, 8)), Some(fresh), Some(fresh)]), 0);
    }

    #[test]
    fn nothing_is_judged_while_a_fault_is_at_the_slot_and_it_may_be_ahead_after_it() {
        let mut eye = Eye::default();
        eye.judge(Some(look(8, 8)));
        eye.faults = 1;
        eye.judge(Some(look(64, 8)));
        eye.faults = 0;
        eye.judge(Some(look(64, 8)));
        assert_eq!(eye.wrong, 0);
        eye.judge(Some(look(72, 8)));
        assert_eq!(eye.wrong, 1);
    }
}
