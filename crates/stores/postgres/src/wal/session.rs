//! One connection to the slot after another, for as long as anybody reads.
//!
//! What lives here: finding the slot in order or making it so, receiving, and telling the server
//! how far all is durable. What does not: who reads (`hub.rs`), what messages mean (`assembly.rs`).
//! Invariant: the server hears of us in time whatever any sink does; only what is durable at every
//! consumer is acknowledged.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use postrider_core::{Error, Result};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::Wal;
use super::adopted::Adopted;
use super::assembly::{Assembly, Wanted};
use super::checkpoints;
use super::hub::Table;
use super::lsn::Lsn;
use super::slot::{self, SlotState};
use super::vigil::{self, SILENCE};
use super::wire::{Frame, System, Walsender};
use crate::error::{code_of, failed};
use crate::server::Connection;

mod bases;
mod gathering;
mod slots;

use bases::{Seen, seen};
use gathering::Gathering;
use slots::{find_slot, passing};

/// A chunk is handed on when it has this many bytes, or nothing more is there at the moment.
const CHUNK_BYTES: usize = 256 * 1024;
/// A quiet stream's place is handed out after this much log, in bytes, or after this time if there
/// was any: acknowledging it must be made durable first, which writes log itself.
const IDLE_BYTES: u64 = 1024 * 1024;
const IDLE_AFTER: Duration = Duration::from_secs(10);
/// How often a base is taken while events come.
const BASE_EVERY: Duration = Duration::from_secs(1);
/// How often the publication is looked at while none come.
const CHECK_EVERY: Duration = Duration::from_secs(3);
/// Longest time between two reports to the server; less where its own time-out asks for it.
const STATUS_EVERY: Duration = Duration::from_secs(1);
/// First and longest wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const MAX_WAIT: Duration = Duration::from_secs(2);
/// Readers may be gone for so long before the slot is given back: one of them may begin anew.
const LINGER: Duration = Duration::from_millis(200);
/// How long the server's farewell is waited for.
const FAREWELL: Duration = Duration::from_secs(1);

/// Longest wait for a slot that another one reads: its reader may end at any moment.
const BUSY_WAIT: Duration = Duration::from_millis(250);
/// A stream that lasted so long was in order: what comes after it is a first failure.
const LASTED: Duration = Duration::from_secs(10);
/// Longest wait for an answer that the server has at hand.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// After so long without a word the server is asked for one.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// So many bases in a row may fail to come before the connection counts as broken.
const MAX_FAILED_BASES: u32 = 5;

/// What one session leaves to the next.
struct Past {
    wait: Duration,
    /// The slot can't be read although all is in order: it is older than its publication.
    remake: bool,
    /// The server's process that read the slot for this one, and may not know that it is left.
    reader: Option<i32>,
}

/// Serves readers for ever; ends with the task.
pub(super) async fn serve(wal: Arc<Wal>) {
    let mut past = Past { wait: FIRST_WAIT, remake: false, reader: None };
    loop {
        wal.hub.until_wanted().await;
        let began = Instant::now();
        match session(&wal, &mut past).await {
            Ok(()) => wal.hub.close(None),
            Err(error) => {
                wal.counts.reconnected();
                wal.hub.close(Some(&error));
                if began.elapsed() > LASTED {
                    past.wait = FIRST_WAIT;
                }
                let is_busy = code_of(&error) == Some("55006");
                sleep(if is_busy { past.wait.min(BUSY_WAIT) } else { past.wait }).await;
                past.wait = (past.wait * 2).min(MAX_WAIT);
            }
        }
    }
}

/// Waits for an answer that is at hand, or gives up all connections of this age.
async fn soon<T>(
    wal: &Wal,
    like: Option<&Connection>,
    answer: impl Future<Output = Result<T>>,
) -> Result<T> {
    timeout(ANSWER_WITHIN, answer).await.unwrap_or_else(|_| {
        if let Some(like) = like {
            wal.store.inner.connections.servers().suspect_all(like);
        }
        Err(Error::transient("no answer from the server in time; connecting again"))
    })
}

/// Takes note of the server that answers.
async fn meet(wal: &Wal, system: &System) {
    if wal.hub.met(system) {
        tracing::warn!(
            system = system.system,
            timeline = system.timeline,
            "another copy of the database answers; reading again from its checkpoints"
        );
        if let Some(mirror) = &wal.mirror {
            mirror.met_another().await;
        }
    }
}

async fn session(wal: &Wal, past: &mut Past) -> Result<()> {
    let connections = &wal.store.inner.connections;
    let mut walsender = Walsender::connect(connections.servers()).await?;
    let system = soon(wal, None, walsender.identify()).await?;
    let control = connections.alone().await?;
    meet(wal, &system).await;
    let publication = wal.publication();
    soon(wal, Some(&control), publication.stands()).await?;
    let (start, seam) = find_slot(wal, &mut walsender, past).await?;
    soon(wal, Some(&control), expect_consumers(wal)).await?;
    let adopted = soon(wal, Some(&control), wal.adopted()).await?;
    let Seen { base, mapping } = soon(wal, None, seen(wal, &control)).await?;
    let Some(base) = base else {
        return publication.stands().await.and(Err(Error::transient("the publication changes")));
    };
    let publication = base.publication;
    let table = adopted.as_ref().map_or(Table::OWN, |adopted| Table {
        exact: adopted.columns,
        lasting: adopted.columns && adopted.keeps_rows(),
    });
    wal.hub.open(system, start, publication.clone(), table, seam);
    if !is_asked_for(wal, &control).await? {
        return Ok(());
    }
    let options = asked_of_plugin(wal, adopted.is_some());
    let started = soon(wal, None, walsender.start(&wal.options.slot, start, &options)).await;
    started.map_err(|error| passing(&wal.options.slot, error))?;
    soon(wal, Some(&control), unmoved(wal, start)).await?;
    past.reader = Some(process(&walsender));
    let mapping = adopted.as_ref().map_or(mapping, |adopted| Some(adopted.version.clone()));
    let assembly = Assembly::new(wanted(wal, adopted), system.system, system.timeline, start);
    let mut stream = Stream {
        wal,
        status_every: soon(wal, None, status_every(&control)).await?,
        control,
        pid: process(&walsender),
        heard_at: Instant::now(),
        looking: None,
        assembly,
        publication,
        mapping,
        pushed: (start, 0),
        pushed_at: Instant::now(),
        acknowledged: Lsn(0),
        events: false,
        news: false,
        asked_at: Instant::now(),
        asking: None,
        failed_bases: 0,
        gathering: Gathering::new(Instant::now()),
    };
    let outcome = stream.run(&mut walsender, &mut past.wait).await;
    let outcome = outcome.map_err(|error| passing(&wal.options.slot, error));
    if let Err(error) = &outcome {
        let is_whole = publication_exists_and(error);
        past.remake = is_whole && stream.wal.publication().check().await.is_ok();
    }
    drop(stream);
    let flushed = wal.hub.acknowledged();
    let _ = timeout(FAREWELL, walsender.finish(flushed)).await;
    outcome
}

/// Waits until somebody wants the stream, or nobody is there who could.
async fn is_asked_for(wal: &Wal, control: &Connection) -> Result<bool> {
    let mut linger = None;
    while !wal.hub.may_stream() {
        if is_deserted(wal, &mut linger) {
            return Ok(false);
        }
        let _ = timeout(STATUS_EVERY.min(LINGER), wal.hub.task.notified()).await;
        if control.client.is_closed() {
            return Err(Error::transient("the server ended the connection"));
        }
    }
    Ok(true)
}

/// Whether the server says that the publication is not there, as it does when it is younger than
/// what is read.
fn publication_exists_and(error: &Error) -> bool {
    code_of(error) == Some("42704")
}

/// The server's process on the other end.
fn process(walsender: &Walsender) -> i32 {
    i32::try_from(walsender.pid()).unwrap_or_default()
}

fn is_deserted(wal: &Wal, since: &mut Option<Instant>) -> bool {
    if wal.hub.is_wanted() {
        *since = None;
        return false;
    }
    since.get_or_insert_with(Instant::now).elapsed() >= LINGER
}

/// What of the stream is events.
fn wanted(wal: &Wal, adopted: Option<Adopted>) -> Wanted {
    let names = &wal.store.inner.names;
    match (&wal.options.messages, adopted) {
        (Some(prefix), _) => Wanted::Messages(prefix.clone()),
        (None, Some(adopted)) => Wanted::Adopted(Box::new(adopted)),
        (None, None) => {
            let (schema, outbox) = (names.schema().to_owned(), names.outbox().to_owned());
            Wanted::Own { schema, outbox }
        }
    }
}

/// The options of `pgoutput`.
fn asked_of_plugin(wal: &Wal, is_adopted: bool) -> Vec<(&'static str, String)> {
    let mut options = vec![
        ("proto_version", "1".to_owned()),
        ("publication_names", crate::names::identifier(&wal.options.publication)),
    ];
    if !is_adopted {
        // Of an application's types only the text is known.
        options.push(("binary", "true".to_owned()));
    }
    if wal.options.messages.is_some() {
        options.push(("messages", "true".to_owned()));
    }
    options
}

/// Makes sure that the slot stands where readers were told that it does. Until the stream began,
/// nobody held it: the server takes an earlier place than its own, and begins at its own.
async fn unmoved(wal: &Wal, start: Lsn) -> Result<()> {
    let slot = &wal.options.slot;
    match slot::look(&wal.store.inner.connections, slot).await? {
        SlotState::Ready { confirmed, .. } if confirmed <= start => Ok(()),
        _ => Err(Error::transient(format!(
            "replication slot {slot} was moved by somebody else; looking again where it stands"
        ))),
    }
}

/// Holds the slot for those that were here before and may come back.
async fn expect_consumers(wal: &Wal) -> Result<()> {
    let heard = wal.hub.durable();
    let known = checkpoints::places(&wal.store).await?;
    if wal.hub.compare(&heard, &known) {
        tracing::warn!(
            "the database has older checkpoints than this process wrote: another copy answers; \
             reading again from them"
        );
    }
    for (consumer, place) in known {
        wal.hub.expect(consumer, place.lsn);
    }
    Ok(())
}

/// How often the server wants to hear of us: three times within its own patience.
async fn status_every(control: &Connection) -> Result<Duration> {
    let sql = "SELECT (extract(epoch FROM current_setting('wal_sender_timeout')::interval) * 1000)
        ::bigint";
    let rows = control.client.query_typed(sql, &[]).await.map_err(failed("read a setting"))?;
    let patience = rows.first().map_or(0, |row| row.get::<_, i64>(0));
    Ok(match u64::try_from(patience) {
        Ok(1..) => (Duration::from_millis(patience.unsigned_abs()) / 3).min(STATUS_EVERY),
        _ => STATUS_EVERY,
    })
}

/// A stream under way.
struct Stream<'a> {
    wal: &'a Wal,
    control: Connection,
    assembly: Assembly,
    publication: String,
    /// By which an adopted table's rows are read.
    mapping: Option<String>,
    status_every: Duration,
    pushed: (Lsn, u32),
    pushed_at: Instant,
    acknowledged: Lsn,
    /// Whether any came since the last base was asked for, and whether there were any before that.
    events: bool,
    news: bool,
    asked_at: Instant,
    asking: Option<BoxFuture<'a, Result<Seen>>>,
    failed_bases: u32,
    /// The server's process on the other end, when it was last heard of, and a look at it.
    pid: i32,
    heard_at: Instant,
    looking: Option<BoxFuture<'a, Result<()>>>,
    gathering: Gathering,
}

impl<'a> Stream<'a> {
    /// Receives until nobody reads any more.
    async fn run(&mut self, walsender: &mut Walsender, wait: &mut Duration) -> Result<()> {
        let mut status = interval(self.status_every);
        status.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut linger = None;
        loop {
            let room = self.wal.hub.has_room();
            if !room {
                // Nobody listens, so nothing is heard.
                self.heard_at = Instant::now();
            }
            if room && self.drain(walsender).await? {
                *wait = FIRST_WAIT;
            }
            let rests = self.gathering.rests();
            tokio::select! {
                biased;
                _ = status.tick() => {
                    self.look_after(walsender).await?;
                    if is_deserted(self.wal, &mut linger) {
                        return Ok(());
                    }
                }
                () = self.wal.hub.task.notified() => {
                    if self.wal.hub.is_rewound() || is_deserted(self.wal, &mut linger) {
                        return Ok(());
                    }
                    self.acknowledge(walsender, false).await?;
                }
                seen = async { self.asking.as_mut().expect("guarded").await },
                    if self.asking.is_some() =>
                {
                    self.asking = None;
                    self.judge(seen)?;
                }
                looked = async { self.looking.as_mut().expect("guarded").await },
                    if self.looking.is_some() =>
                {
                    self.looking = None;
                    self.looked(looked)?;
                }
                () = self.gathering.rested(), if rests => {}
                frame = walsender.next(), if room && !rests => {
                    self.take(walsender, frame?).await?;
                }
            }
        }
    }

    /// Takes what has arrived already and hands it on; whether there was any event.
    async fn drain(&mut self, walsender: &mut Walsender) -> Result<bool> {
        while self.assembly.bytes() < CHUNK_BYTES {
            let Some(frame) = walsender.buffered()? else { break };
            self.take(walsender, frame).await?;
        }
        if self.assembly.is_empty() {
            return Ok(false);
        }
        self.push();
        self.events = true;
        Ok(true)
    }

    fn push(&mut self) {
        let chunk = self.assembly.take();
        self.pushed = chunk.end;
        self.pushed_at = Instant::now();
        let was_full = chunk.bytes >= CHUNK_BYTES;
        self.gathering.read(chunk.events.len(), was_full, self.pushed_at);
        self.wal.hub.push(chunk);
    }

    async fn take(&mut self, walsender: &mut Walsender, frame: Frame) -> Result<()> {
        self.heard_at = Instant::now();
        match frame {
            Frame::Data { payload, .. } => {
                self.assembly.message(payload)?;
                if std::mem::take(&mut self.assembly.described) {
                    // The rows that follow may come after some that were passed over.
                    let seen = soon(self.wal, None, seen(self.wal, &self.control)).await?;
                    self.unchanged(seen)?;
                }
                Ok(())
            }
            Frame::Keepalive { end, reply } => {
                self.assembly.idle_at(end);
                self.wal.hub.received(end);
                match reply {
                    true => self.acknowledge(walsender, true).await,
                    false => Ok(()),
                }
            }
            Frame::End => Err(Error::transient("the server ended the stream")),
        }
    }

    async fn acknowledge(&mut self, walsender: &mut Walsender, always: bool) -> Result<()> {
        let durable = self.wal.hub.acknowledged();
        if always || durable > self.acknowledged {
            self.acknowledged = durable;
            let ask = self.heard_at.elapsed() >= ASK_AFTER;
            walsender.status(durable, ask).await?;
        }
        Ok(())
    }

    /// Judges what was seen of the server's process while nothing came from it.
    fn looked(&mut self, outcome: Result<()>) -> Result<()> {
        if outcome.is_err() && self.heard_at.elapsed() >= SILENCE {
            // What is silent here is silent for the others, too.
            self.wal.store.inner.connections.servers().suspect_all(&self.control);
            return outcome;
        }
        self.heard_at = Instant::now();
        Ok(())
    }

    /// What is due now and then: a report, the place of a quiet stream, a base.
    async fn look_after(&mut self, walsender: &mut Walsender) -> Result<()> {
        if self.control.client.is_closed() {
            // A server that stops waits for its readers: leave at once.
            return Err(Error::transient("the server ended the connection"));
        }
        self.acknowledge(walsender, true).await?;
        self.wal.counts.unknown(self.assembly.unknown);
        if self.looking.is_none() && self.heard_at.elapsed() >= SILENCE {
            self.looking = Some(vigil::look(self.wal, self.pid).boxed());
        }
        let end = self.assembly.end();
        let quiet = end.0.0.saturating_sub(self.pushed.0.0);
        if quiet >= IDLE_BYTES || quiet > 0 && self.pushed_at.elapsed() >= IDLE_AFTER {
            self.push();
        }
        let due = if self.events { BASE_EVERY } else { CHECK_EVERY };
        if self.asking.is_none() && self.asked_at.elapsed() >= due {
            self.asked_at = Instant::now();
            self.news |= std::mem::take(&mut self.events);
            self.asking = Some(bases::ask(self.wal));
        }
        Ok(())
    }
}
