//! Whether a consumer begins with what a copy of its checkpoint says.
//!
//! What lives here: what the database tells of itself, the comparison, and a line for either
//! answer. What does not: how such a standing becomes durable (`ledger/adoption.rs`).
//! Invariant: a standing is taken over only where the database's history of transactions is the
//! same as the copy's up to the copy's place. Its ids mean other transactions anywhere else, and
//! events that nobody has had would count as delivered.
//!
//! What shows that it is the same:
//! - on the same timeline, the copy's seal: a random number, written to the database after the
//!   checkpoint and before the copy. An older copy of the files may go on under the number of the
//!   same timeline, but has not that seal;
//! - on a later one, the server's history of timelines: the one of the copy ended above its place,
//!   and above the last dead letter that the checkpoint had passed, which would be missed else.
//!
//! Where neither does, events come again rather than one being lost.

use postrider_core::{ConsumerName, Error, Result};
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::kept::Kept;
use super::{Mirror, Owner};
use crate::connections::Param;
use crate::wal::Wal;
use crate::wal::history::{self, Way};
use crate::wal::ledger::Delivered;
use crate::wal::lsn::Lsn;

/// What the database says of itself, of the consumer `$1`.
const FACTS: &str = "SELECT f.identity::text, current_database()::text, s.system_identifier,
        ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer,
        ARRAY(SELECT unnest(w.seals)::text FROM {schema}.wal_seal AS w
            WHERE w.outbox = {outbox_text} AND w.consumer = $1),
        (SELECT t.system FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp DESC LIMIT 1),
        coalesce((SELECT t.floor FROM {schema}.{outbox_tick} AS t
            WHERE t.system = s.system_identifier ORDER BY t.own DESC LIMIT 1), 0),
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint, pg_current_wal_insert_lsn()::text
    FROM {schema}.feed AS f, pg_control_system() AS s WHERE f.outbox = {outbox_text}";

/// What the source's database says of itself.
pub(super) struct Facts {
    pub(super) owner: Owner,
    identity: String,
    pub(super) system: u64,
    timeline: u32,
    seals: Vec<String>,
    /// Of the newest tick: rows that came with a dump of another cluster have its ids.
    ticks_of: Option<u64>,
    floor: i64,
    /// The time, in milliseconds since 1970.
    pub(super) now_ms: u64,
    /// Nothing was ever written beyond.
    logged: Lsn,
}

impl Facts {
    pub(super) async fn of(wal: &Wal, consumer: &str) -> Result<Self> {
        let params: [Param<'_>; 1] = [(&consumer, Type::TEXT)];
        let rows = wal.store.query("look at the outbox", FACTS, &params).await?;
        let row = rows.first().ok_or_else(|| Error::permanent("the outbox is gone"))?;
        Ok(Self {
            identity: row.get(0),
            owner: Owner::of(wal, row.get(1)),
            system: row.get::<_, i64>(2).cast_unsigned(),
            timeline: row.get::<_, i32>(3).cast_unsigned(),
            seals: row.get(4),
            ticks_of: row.get::<_, Option<i64>>(5).map(i64::cast_unsigned),
            floor: row.get(6),
            now_ms: row.get::<_, i64>(7).unsigned_abs(),
            logged: Lsn::parse(row.get(8))?,
        })
    }

    fn has(&self, seal: Uuid) -> bool {
        self.seals.contains(&seal.to_string())
    }
}

/// Where a consumer begins.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::wal) enum Beginning {
    /// Where the database, or else its `from`, says.
    Usual,
    /// Here; the database does not have it yet.
    Copied(Box<Delivered>),
    /// At the oldest event, whatever its `from` says: it was here before. Whether it may have
    /// missed something.
    Oldest { gap: bool },
}

/// What was found, and how the copy is to be replaced.
pub(in crate::wal) struct Consulted {
    pub(in crate::wal) beginning: Beginning,
    /// The seal of the copy, where the database has its history.
    pub(super) seal: Option<Uuid>,
    /// The seal of a copy that counts no more.
    pub(super) over: Option<Uuid>,
}

impl Consulted {
    fn usual(seal: Option<Uuid>) -> Self {
        Self { beginning: Beginning::Usual, seal, over: None }
    }
}

/// The copy of this consumer that may be meant: one of this cluster, or of this outbox in another.
fn own(list: Vec<(String, Kept)>, consumer: &ConsumerName, facts: &Facts) -> Option<Kept> {
    let of_it = list.into_iter().filter(|(name, _)| name == consumer.as_str());
    let mut found: Vec<Kept> = of_it.map(|(_, kept)| kept).collect();
    found.retain(|kept| kept.system == facts.system || kept.identity == facts.identity);
    found.sort_by_key(|kept| (kept.system == facts.system, kept.written_ms));
    found.pop()
}

/// Why what a copy says must not count here; nothing if it may.
async fn objection(wal: &Wal, kept: &Kept, facts: &Facts) -> Result<Option<String>> {
    if kept.system != facts.system {
        return Ok(Some(format!("it is of another cluster, {}", kept.system)));
    }
    let (place, past) = (kept.place()?, kept.history()?);
    let present = match history::read(wal, facts.timeline).await {
        Ok(present) => present,
        Err(error) if super::passes(&error) => return Err(error),
        Err(error) => {
            return Ok(Some(format!("the server tells no history ({})", error.chain())));
        }
    };
    match history::way(&place, &past, facts.timeline, &present) {
        Way::Astray(why) => return Ok(Some(why)),
        Way::SameTimeline if !facts.has(kept.seal) => {
            return Ok(Some(
                "this database was not written to when it was made: its files or its tables are \
                 an older copy"
                    .to_owned(),
            ));
        }
        Way::SameTimeline if place.lsn > facts.logged => {
            return Ok(Some(format!("nothing was written here beyond {}", facts.logged)));
        }
        Way::SameTimeline => {}
        Way::Shared => {
            let ended = present.iter().find(|branch| branch.timeline == place.timeline);
            let parked_by = kept.parked_by()?;
            if ended.is_none_or(|branch| parked_by > branch.end) {
                return Ok(Some(format!(
                    "dead letters that it has passed may lie beyond the end of timeline {}",
                    place.timeline
                )));
            }
        }
    }
    let base = kept.delivered()?.base;
    let has_table = wal.options.messages.is_none();
    let came = has_table && facts.ticks_of.is_some_and(|system| system != facts.system);
    let differs = base
        .is_some_and(|base| base.system != place.system || has_table && base.floor != facts.floor);
    let why = || "the outbox came with a dump of another cluster".to_owned();
    Ok((came || differs).then(why))
}

impl Mirror {
    /// Compares the copy with `known`, what the database has of the consumer.
    ///
    /// # Errors
    /// Where the database knows nothing, what keeps the copy from being read: it may have what is
    /// not to be delivered again. `Permanent` where events are lost that no table has.
    pub(in crate::wal) async fn consult(
        &self,
        wal: &Wal,
        consumer: &ConsumerName,
        known: &Delivered,
    ) -> Result<Consulted> {
        let facts = Facts::of(wal, consumer.as_str()).await?;
        let list = match self.list(&facts.owner).await {
            Ok(list) => list,
            Err(error) if known.place.is_some() => {
                tracing::warn!(
                    sink = %consumer, error = error.chain(),
                    "the copy of the checkpoint can't be read; the database's own counts"
                );
                return Ok(Consulted::usual(None));
            }
            Err(error) => return Err(error),
        };
        let Some(kept) = own(list, consumer, &facts) else { return Ok(Consulted::usual(None)) };
        let place = kept.place()?;
        if kept.system == facts.system && kept.identity != facts.identity {
            return self.made_anew(wal, consumer, known);
        }
        if let Some(stands) = known.place {
            let seal = Some(kept.seal);
            if stands.system != facts.system {
                return Ok(Consulted { over: seal, ..Consulted::usual(None) });
            }
            if stands.key() >= place.key() {
                let proven = seal.filter(|seal| facts.has(*seal));
                return Ok(Consulted { over: seal, ..Consulted::usual(proven) });
            }
        }
        if let Some(why) = objection(wal, &kept, &facts).await? {
            return self.refused(wal, consumer, known, &kept, &why);
        }
        tracing::info!(
            sink = %consumer, position = %place.lsn, timeline = place.timeline,
            age_seconds = kept.age(facts.now_ms).as_secs(),
            "{} is further than the database's own checkpoint; going on from there", self.shown()
        );
        let mut delivered = kept.delivered()?;
        if let Some(place) = &mut delivered.place {
            // What is below a promotion is the same on both sides of it.
            place.timeline = facts.timeline;
        }
        let beginning = Beginning::Copied(Box::new(delivered));
        Ok(Consulted { beginning, seal: Some(kept.seal), over: None })
    }

    /// All that is in an outbox which was made anew is new to a consumer of the one before.
    fn made_anew(
        &self,
        wal: &Wal,
        consumer: &ConsumerName,
        known: &Delivered,
    ) -> Result<Consulted> {
        if known.place.is_some() {
            return Ok(Consulted::usual(None));
        }
        if wal.options.messages.is_some() {
            return Err(lost(consumer, "the outbox was made anew"));
        }
        tracing::warn!(
            sink = %consumer,
            "the outbox was made anew since {} was written; the sink begins at its oldest event",
            self.shown()
        );
        let beginning = Beginning::Oldest { gap: false };
        Ok(Consulted { beginning, seal: None, over: None })
    }

    fn refused(
        &self,
        wal: &Wal,
        consumer: &ConsumerName,
        known: &Delivered,
        kept: &Kept,
        why: &str,
    ) -> Result<Consulted> {
        let place = kept.place()?;
        let (beginning, remedy) = match known.place {
            Some(_) => (
                Beginning::Usual,
                "the database's own checkpoint counts, and what was delivered beyond it comes \
                 again if it is still there"
                    .to_owned(),
            ),
            None if wal.options.messages.is_some() => return Err(lost(consumer, why)),
            None => (
                Beginning::Oldest { gap: true },
                format!(
                    "the database has no checkpoint, so the sink begins at the oldest event; to \
                     have it begin where its `from` says, stop and run `postrider consumers \
                     remove {consumer}` first"
                ),
            ),
        };
        tracing::warn!(
            sink = %consumer, position = %place.lsn, timeline = place.timeline, why,
            "{} is further than the database and is not taken over; {remedy}", self.shown()
        );
        Ok(Consulted { beginning, seal: None, over: Some(kept.seal) })
    }
}

/// Messages have no table to begin again from.
fn lost(consumer: &ConsumerName, why: &str) -> Error {
    Error::permanent(format!(
        "messages for {consumer} may be lost: the database has no checkpoint, and the copy can't \
         be taken over: {why}. To go on without them, run `postrider consumers remove {consumer}` \
         and start with from = \"now\""
    ))
}
