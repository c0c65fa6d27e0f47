//! PostgreSQL's write-ahead log as a source: exact, also when the slot is gone.
//!
//! What lives here: the source and what a relay keeps for it. What does not: the outbox, leases and
//! dead letters, which are the store's.
//! Invariant: a consumer reads from the slot only while the slot has not passed it; otherwise it
//! catches up from the table, under a snapshot that meets the stream without gap or overlap.

mod adopted;
mod advice;
mod assembly;
mod catch_up;
mod checkpoints;
mod counts;
mod emitted;
mod events;
mod frames;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod history;
mod hub;
mod ledger;
mod login;
mod lsn;
mod mapped;
mod mapping;
mod mirror;
mod options;
mod pgoutput;
mod position;
mod reader;
mod report;
mod session;
mod setup;
mod slot;
mod snapshot;
mod start;
mod store;
mod tuple;
mod vigil;
mod wire;
mod xids;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use postrider_core::{
    ConsumerName, Error, PartitionId, Position, Reader, Result, Source, StartFrom,
};
use tokio::sync::Notify;
use tokio::task::JoinSet;

pub use advice::WalAdvice;
pub use counts::WalCounts;
pub use mirror::{MirrorReport, MirroredConsumer};
pub use options::{MAX_SLOT_NAME_BYTES, Recover, WalOptions};
pub use report::{SlotStanding, WalConsumer, WalReport};
pub use setup::wal_schema_sql;

use crate::PostgresStore;
use hub::Hub;
use ledger::{Base, Delivered, Ledger};
use mirror::{Beginning, Mirror};
use position::WalPlace;
use reader::WalReader;

/// The log is one stream, in the order of commits.
pub(crate) const PARTITION: &str = "wal";

/// An outbox as the server's log shows it, and all that a relay keeps for it.
#[derive(Clone)]
pub struct PostgresWal {
    wal: Arc<Wal>,
    /// Ends the stream with the last of us.
    _task: Arc<JoinSet<()>>,
}

/// What readers, the stream and the checkpoints share.
struct Wal {
    store: PostgresStore,
    options: WalOptions,
    hub: Hub,
    books: Mutex<HashMap<ConsumerName, Arc<Books>>>,
    counts: counts::Counters,
    mirror: Option<Mirror>,
}

/// A consumer's ledger.
struct Books {
    ledger: Mutex<Ledger>,
    written: Notify,
}

impl Books {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the checkpoint stands at `place` or beyond. Cancel-safe.
    async fn settled(&self, place: WalPlace) {
        loop {
            let written = self.written.notified();
            tokio::pin!(written);
            written.as_mut().enable();
            let stands = self.ledger().delivered().place;
            if stands.is_some_and(|stands| stands.key() >= place.key()) {
                return;
            }
            written.await;
        }
    }
}

impl PostgresWal {
    /// Reads the outbox of `store` from the server's log. Connects when the first reader is opened.
    ///
    /// # Errors
    /// `Permanent` for impossible options.
    pub fn new(store: PostgresStore, options: WalOptions) -> Result<Self> {
        let options = options.checked(store.inner.names.outbox())?;
        let books = Mutex::default();
        let counts = counts::Counters::default();
        // A message that the slot has passed is gone: it is held until the consumer is removed.
        let hub = Hub::new(options.messages.is_none().then_some(hub::HELD_FOR));
        let mirror = options.mirror.as_ref().map(Mirror::new).transpose()?;
        let wal = Arc::new(Wal { store, options, hub, books, counts, mirror });
        let mut task = JoinSet::new();
        task.spawn(session::serve(Arc::clone(&wal)));
        task.spawn(mirror::serve(Arc::clone(&wal)));
        Ok(Self { wal, _task: Arc::new(task) })
    }

    /// The outbox's store.
    pub fn store(&self) -> &PostgresStore {
        &self.wal.store
    }
}

impl Wal {
    fn publication(&self) -> slot::Publication<'_> {
        slot::Publication {
            connections: &self.store.inner.connections,
            names: &self.store.inner.names,
            name: &self.options.publication,
            of_messages: self.options.messages.is_some(),
        }
    }

    /// The application's own table, if the outbox is one and its rows are read.
    async fn adopted(&self) -> Result<Option<adopted::Adopted>> {
        if self.options.messages.is_some() {
            return Ok(None);
        }
        adopted::load(&self.store.inner.connections, &self.store.inner.names).await
    }

    /// The statement that takes a base; `$1` is the publication.
    fn base_sql(&self) -> String {
        slot::base_sql(&self.store.inner.names, self.options.messages.is_some())
    }

    fn books(&self) -> MutexGuard<'_, HashMap<ConsumerName, Arc<Books>>> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the database stands now, unless the publication passes rows over.
    async fn base(&self) -> Result<Base> {
        let publication = self.publication();
        publication.stands().await?;
        let sql = self.base_sql();
        let params = [(&self.options.publication.as_str() as _, tokio_postgres::types::Type::TEXT)];
        let rows = self.store.inner.connections.query("take a base", &sql, &params).await?;
        let base = rows.first().map(slot::base).transpose()?.flatten();
        base.ok_or_else(|| Error::transient("the publication changes at this moment"))
    }
}

#[async_trait]
impl Source for PostgresWal {
    fn identity(&self) -> String {
        format!("{}-wal", self.wal.store.inner.identity)
    }

    async fn partitions(&self, _consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        Ok(vec![PartitionId::new(PARTITION)?])
    }

    async fn open(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        from: StartFrom,
    ) -> Result<Box<dyn Reader>> {
        if partition.as_str() != PARTITION {
            return Err(Error::permanent(format!(
                "partition {partition} is none of the log's, which has {PARTITION:?} alone"
            )));
        }
        let delivered = checkpoints::load(&self.wal.store, consumer).await?;
        let asked = match &from {
            StartFrom::After(position) => Some(self::asked(consumer, position, &delivered)?),
            StartFrom::Time(_) => {
                return Err(Error::permanent(
                    "the log can't be read from a time on; give from = \"now\" or \"oldest\"",
                ));
            }
            StartFrom::Now | StartFrom::Oldest => None,
        };
        // A copy counts only for one that goes on, or of which the database knows nothing.
        let may_go_on = asked.is_some() || delivered.place.is_none();
        let consulted = match self.wal.mirror.as_ref().filter(|_| may_go_on) {
            Some(mirror) => Some(mirror.consult(&self.wal, consumer, &delivered).await?),
            None => None,
        };
        let beginning = consulted.as_ref().map_or(&Beginning::Usual, |found| &found.beginning);
        let start = self.wal.start(from, delivered, beginning).await?;
        let ledger = Mutex::new(start.ledger);
        let books = Arc::new(Books { ledger, written: Notify::new() });
        self.wal.books().insert(consumer.clone(), Arc::clone(&books));
        if let (Some(mirror), Some(consulted)) = (&self.wal.mirror, &consulted) {
            mirror.begin(consumer, &books, consulted);
        }
        let wal = Arc::clone(&self.wal);
        Ok(Box::new(WalReader::new(wal, consumer.clone(), books, start.at)))
    }
}

/// The place that is asked for, which must be the checkpoint's.
fn asked(consumer: &ConsumerName, position: &Position, known: &Delivered) -> Result<WalPlace> {
    let Some(place) = known.place else {
        return Err(Error::permanent(format!(
            "position {position}: {consumer} has no checkpoint in the log; give from = \"now\" or \
             \"oldest\""
        )));
    };
    match WalPlace::of(position)?.key() == place.key() {
        true => Ok(place),
        false => Err(Error::fenced(format!(
            "position {position} is not where the checkpoint of {consumer} stands; reading begins \
             again at that"
        ))),
    }
}
