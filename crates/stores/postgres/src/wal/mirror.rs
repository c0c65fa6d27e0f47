//! A copy of the checkpoints outside of the source's database.
//!
//! What lives here: when the copy is written, by whom and how far it is behind. What does not:
//! where it is put (`mirror/file.rs`, `mirror/database.rs`), and what follows from it at the next
//! start (`mirror/adopt.rs`).
//! Invariant: a copy says only what was durable in the source's database before; writing it holds
//! up no checkpoint and no sink, and failing at it ends neither.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider_core::{ConsumerName, Error, ErrorKind, HeldLease, Result};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::history::{self, History};
use super::ledger::Delivered;
use super::lsn::Lsn;
use super::{Books, Wal};
use crate::config::PostgresOptions;

mod adopt;
mod database;
mod file;
mod kept;
mod report;
mod sealing;

pub(super) use adopt::Beginning;
use adopt::{Consulted, Facts};
use database::MirrorDatabase;
use file::MirrorFile;
use kept::{Kept, Seal};
pub use report::{MirrorReport, MirroredConsumer};
use sealing::Sealed;

/// The copy is written at most so often.
const EVERY: Duration = Duration::from_secs(1);
/// First and longest wait after a failure.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_secs(30);
/// An unchanged trouble is told again after this time, once the wait no longer grows.
const TOLD_EVERY: Duration = Duration::from_secs(300);
/// Longest time for one writing, or one reading.
const WITHIN: Duration = Duration::from_secs(10);
/// How long the end of a relay waits for the last writing.
const LAST_WITHIN: Duration = Duration::from_secs(3);
/// Where the copy goes.
#[derive(Debug, Clone)]
pub(super) enum MirrorOption {
    /// A file, replaced as a whole.
    File(PathBuf),
    /// A table in a second database.
    Database(Box<PostgresOptions>),
}

/// Whose checkpoints they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    database: String,
    schema: String,
    outbox: String,
}

impl Owner {
    fn of(wal: &Wal, database: &str) -> Self {
        let names = &wal.store.inner.names;
        Self {
            database: database.to_owned(),
            schema: names.schema().to_owned(),
            outbox: names.outbox().to_owned(),
        }
    }
}

/// What is to be written of one consumer.
#[derive(Debug, Clone)]
pub(crate) struct Update {
    consumer: String,
    kept: Kept,
    /// The seal of a copy that counts no more, however far it is.
    over: Option<Uuid>,
}

impl Update {
    fn may_replace(&self, known: &Kept) -> Result<bool> {
        Ok(self.over == Some(known.seal) || known.gives_way_to(&self.kept)?)
    }
}

enum Target {
    File(Arc<MirrorFile>),
    Database(MirrorDatabase),
}

/// What is to be copied next.
struct Next {
    books: Arc<Books>,
    lease: Arc<HeldLease>,
    moves: u64,
    parks: u64,
}

/// What is known of one consumer's copy.
struct Due {
    books: Arc<Books>,
    /// Under which its checkpoint was written last.
    lease: Option<Arc<HeldLease>>,
    /// Since when its checkpoint is further than the copy, and how often it moved.
    since: Option<Instant>,
    moves: u64,
    /// How often the checkpoint was about to pass dead letters, how many of these the copy knows,
    /// and where the log was when it did.
    parks: u64,
    parks_known: u64,
    parked_by: Lsn,
    /// The copy has one of these seals: the first is known to be written.
    seals: Vec<Uuid>,
    over: Option<Uuid>,
}

/// The copy of an outbox's checkpoints.
pub(super) struct Mirror {
    target: Target,
    due: Mutex<HashMap<ConsumerName, Due>>,
    changed: Notify,
    /// One writing at a time; what it knows of timelines.
    writing: tokio::sync::Mutex<HashMap<u32, History>>,
}

impl Mirror {
    /// # Errors
    /// `Permanent` for an address that is none.
    pub(super) fn new(option: &MirrorOption) -> Result<Self> {
        let target = match option {
            MirrorOption::File(path) => Target::File(Arc::new(MirrorFile::new(path.clone()))),
            MirrorOption::Database(options) => Target::Database(MirrorDatabase::new(options)?),
        };
        let writing = tokio::sync::Mutex::new(HashMap::new());
        Ok(Self { target, due: Mutex::default(), changed: Notify::new(), writing })
    }

    fn due(&self) -> MutexGuard<'_, HashMap<ConsumerName, Due>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it is, without secrets.
    fn shown(&self) -> String {
        match &self.target {
            Target::File(file) => format!("the copy in {}", file.shown()),
            Target::Database(database) => format!("the copy in {}", database.shown()),
        }
    }

    /// Whether the copy can be read and written.
    ///
    /// # Errors
    /// `Permanent`, with where it is and what to do: nobody asked for a copy that is not made.
    pub(super) async fn ready(&self, wal: &Wal) -> Result<()> {
        let facts = Facts::of(wal, "").await?;
        let owner = facts.owner;
        let looked = async {
            match &self.target {
                Target::File(file) => on_disk(file, move |file| file.ready(&owner)).await,
                Target::Database(database) => database.ready(&owner, facts.system).await,
            }
        };
        in_time(looked).await.map_err(|error| {
            Error::permanent(format!(
                "{} can't be used: {}; put that right, or take the mirror out of [source]",
                self.shown(),
                error.chain()
            ))
        })
    }

    async fn list(&self, owner: &Owner) -> Result<Vec<(String, Kept)>> {
        let listed = async {
            let owner = owner.clone();
            match &self.target {
                Target::File(file) => on_disk(file, move |file| file.list(&owner)).await,
                Target::Database(database) => database.list(&owner).await,
            }
        };
        in_time(listed).await
    }

    /// Whether it had a copy of the consumer, which is gone now.
    ///
    /// # Errors
    /// When it can't be written.
    pub(super) async fn forget(&self, wal: &Wal, consumer: &ConsumerName) -> Result<bool> {
        let owner = Facts::of(wal, "").await?.owner;
        let _alone = self.writing.lock().await;
        self.due().remove(consumer);
        let name = consumer.as_str().to_owned();
        let forgotten = async {
            match &self.target {
                Target::File(file) => on_disk(file, move |file| file.forget(&owner, &name)).await,
                Target::Database(database) => database.forget(&owner, &name).await,
            }
        };
        in_time(forgotten).await
    }

    /// A reader of the consumer was opened: what was to be written of an earlier one is not.
    pub(super) fn begin(&self, consumer: &ConsumerName, books: &Arc<Books>, consulted: &Consulted) {
        let due = Due {
            books: Arc::clone(books),
            lease: None,
            since: None,
            moves: 0,
            // What was parked before is not known.
            parks: 1,
            parks_known: 0,
            parked_by: Lsn(0),
            seals: consulted.seal.into_iter().collect(),
            over: consulted.over,
        };
        self.due().insert(consumer.clone(), due);
    }

    /// The consumer's checkpoint is about to pass dead letters, which are durable.
    pub(super) fn passes_letters(&self, consumer: &ConsumerName) {
        if let Some(due) = self.due().get_mut(consumer) {
            due.parks += 1;
        }
    }

    /// Another copy of the database answers: what is due was durable in the one before.
    pub(super) async fn met_another(&self) {
        self.writing.lock().await.clear();
        self.due().values_mut().for_each(|due| due.since = None);
    }

    /// The consumer's checkpoint has moved, durably.
    pub(super) fn moved(&self, consumer: &ConsumerName, books: &Arc<Books>, lease: &HeldLease) {
        {
            let mut all = self.due();
            let Some(due) = all.get_mut(consumer).filter(|due| Arc::ptr_eq(&due.books, books))
            else {
                return;
            };
            if due.lease.as_deref() != Some(lease) {
                let (group, partition) = (lease.group().clone(), lease.partition().clone());
                let (holder, epoch) = (lease.holder().clone(), lease.epoch());
                let own = HeldLease::granted(group, partition, holder, epoch);
                due.lease = Some(Arc::new(own));
            }
            due.moves += 1;
            due.since.get_or_insert_with(Instant::now);
        }
        self.changed.notify_one();
    }

    /// How far the copy is behind each consumer that this process serves.
    pub(super) fn behind(&self) -> Vec<(ConsumerName, Duration)> {
        let all = self.due();
        let behind = |due: &Due| due.since.map_or(Duration::ZERO, |since| since.elapsed());
        all.iter().map(|(consumer, due)| (consumer.clone(), behind(due))).collect()
    }

    fn is_due(&self) -> bool {
        self.due().values().any(|due| due.since.is_some())
    }

    /// Writes what is durable now, of all consumers whose copy is behind.
    ///
    /// # Cancellation
    /// What was not done is done by the next call.
    async fn write(&self, wal: &Wal) -> Result<()> {
        let mut histories = self.writing.lock().await;
        let (mut entries, mut written, mut owner) = (Vec::new(), Vec::new(), None);
        for consumer in self.all_due() {
            let Some(Next { books, lease, moves, parks }) = self.next_of(&consumer) else {
                continue;
            };
            let delivered = books.ledger().delivered().clone();
            let Some(place) = delivered.place else { continue };
            let history = match histories.entry(place.timeline) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(free) => free.insert(history::read(wal, place.timeline).await?),
            };
            let began = Instant::now();
            match self.seal(wal, &consumer, &books, &lease, &place).await {
                Ok(sealed) => {
                    let Sealed { seal, identity, database, written_ms, logged } = sealed;
                    let parked_by = self.parked_by(&consumer, &books, parks, logged);
                    let seal = Seal { identity, seal, written_ms, history, parked_by };
                    entries.extend(self.entry(&consumer, &delivered, seal));
                    owner = Some(Owner::of(wal, &database));
                    written.push((consumer, books, moves, began));
                }
                // Another relay's checkpoints are that one's to copy.
                Err(error) if error.kind() == ErrorKind::Fenced => self.given_up(&consumer, &books),
                Err(error) => return Err(error),
            }
        }
        let Some(owner) = owner else { return Ok(()) };
        let left = self.put(owner, entries.clone()).await?;
        for (at, (consumer, books, moves, began)) in written.into_iter().enumerate() {
            if let (false, Some(entry)) = (left.contains(&at), entries.get(at)) {
                self.done(&consumer, &books, entry.kept.seal, moves, began);
            }
        }
        match left.first().and_then(|at| entries.get(*at)) {
            None => Ok(()),
            Some(entry) => Err(Error::permanent(format!(
                "what is there of {} is further than its checkpoint: another relay has written it",
                entry.consumer
            ))),
        }
    }

    fn all_due(&self) -> Vec<ConsumerName> {
        let all = self.due();
        let behind = all.iter().filter(|(_, due)| due.since.is_some());
        behind.map(|(consumer, _)| consumer.clone()).collect()
    }

    fn next_of(&self, consumer: &ConsumerName) -> Option<Next> {
        let all = self.due();
        let due = all.get(consumer)?;
        let (books, lease) = (Arc::clone(&due.books), Arc::clone(due.lease.as_ref()?));
        Some(Next { books, lease, moves: due.moves, parks: due.parks })
    }

    fn entry(
        &self,
        consumer: &ConsumerName,
        delivered: &Delivered,
        seal: Seal<'_>,
    ) -> Option<Update> {
        let over = self.due().get(consumer).and_then(|due| due.over);
        let kept = Kept::of(delivered, seal)?;
        Some(Update { consumer: consumer.as_str().to_owned(), kept, over })
    }

    async fn put(&self, owner: Owner, entries: Vec<Update>) -> Result<Vec<usize>> {
        match &self.target {
            Target::File(file) => on_disk(file, move |file| file.write(&owner, &entries)).await,
            Target::Database(database) => database.write(&owner, &entries).await,
        }
    }

    fn given_up(&self, consumer: &ConsumerName, books: &Arc<Books>) {
        let mut all = self.due();
        if let Some(due) = all.get_mut(consumer).filter(|due| Arc::ptr_eq(&due.books, books)) {
            due.since = None;
        }
    }

    fn done(
        &self,
        consumer: &ConsumerName,
        books: &Arc<Books>,
        seal: Uuid,
        moves: u64,
        began: Instant,
    ) {
        let mut all = self.due();
        if let Some(due) = all.get_mut(consumer).filter(|due| Arc::ptr_eq(&due.books, books)) {
            due.since = (due.moves != moves).then_some(began);
            due.seals = vec![seal];
            due.over = None;
        }
    }

    /// Writes the last of it, within a while: the relay is about to leave.
    pub(super) async fn finish(&self, wal: &Wal) {
        if !self.is_due() {
            return;
        }
        let late = || Err(Error::transient("it was not written in time"));
        let written = timeout(LAST_WITHIN, self.write(wal)).await.unwrap_or_else(|_| late());
        if let Err(error) = written {
            tracing::warn!(
                error = error.chain(),
                "{} is behind the checkpoints at the end",
                self.shown()
            );
        }
    }
}

/// Keeps the copy for ever; ends with the task.
pub(super) async fn serve(wal: Arc<Wal>) {
    let Some(mirror) = &wal.mirror else { return };
    let mut wait = FIRST_WAIT;
    let mut told: Option<Instant> = None;
    loop {
        while !mirror.is_due() {
            mirror.changed.notified().await;
        }
        let began = Instant::now();
        match in_time(mirror.write(&wal)).await {
            Ok(()) => {
                if told.take().is_some() {
                    tracing::info!("{} is up to date again", mirror.shown());
                }
                wait = FIRST_WAIT;
                sleep_until(began + EVERY).await;
            }
            Err(error) => {
                if wait < MAX_WAIT || told.is_none_or(|told| told.elapsed() >= TOLD_EVERY) {
                    told = Some(Instant::now());
                    tracing::warn!(
                        error = error.chain(),
                        next_try_seconds = wait.as_secs(),
                        "{} can't be written; delivery goes on without it",
                        mirror.shown()
                    );
                }
                sleep(wait).await;
                wait = (wait * 2).min(MAX_WAIT);
            }
        }
    }
}

/// Whether it may pass.
fn passes(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Transient | ErrorKind::Throttled { .. })
}

async fn in_time<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || Error::transient("no answer in time");
    timeout(WITHIN, work).await.unwrap_or_else(|_| Err(late()))
}

/// Runs on a thread that may wait for a disk.
async fn on_disk<T: Send + 'static>(
    file: &Arc<MirrorFile>,
    work: impl FnOnce(&MirrorFile) -> Result<T> + Send + 'static,
) -> Result<T> {
    let file = Arc::clone(file);
    let done = tokio::task::spawn_blocking(move || {
        // A disk that does not come back is not asked a second time, nor may it write late.
        let Ok(_alone) = file.alone.try_lock() else {
            return Err(Error::transient("the disk has not answered yet"));
        };
        work(&file)
    });
    done.await.unwrap_or_else(|error| Err(Error::transient("the disk").with_source(error)))
}
