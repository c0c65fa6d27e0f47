//! A seal: what shows that a copy and the source's database have one history.
//!
//! What lives here: writing it, and what the database then tells. What does not: what a seal proves
//! at the next start (`adopt.rs`).
//! Invariant: a database that has not the checkpoint which is copied gets no seal, so that a seal
//! never vouches for a copy of another history.

use std::sync::Arc;

use postrider_core::{ConsumerName, Error, HeldLease, Result};
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::Mirror;
use crate::leases::{LeaseKey, fence, held};
use crate::wal::lsn::Lsn;
use crate::wal::position::WalPlace;
use crate::wal::{Books, Wal};

/// So many seals in a row may be of copies of which it is not known whether they were written.
const MAX_SEALS: usize = 8;

/// Also checks the lease, and that the checkpoint which is copied stands here or further on: an
/// older copy of the files may have the same lease, and has not that checkpoint. Tells whose
/// checkpoint it is, and up to where the log then is.
const SEAL: &str = concat!(
    "WITH ",
    fence!(),
    ", stands AS MATERIALIZED (
        SELECT FROM {schema}.checkpoint AS c
        WHERE c.outbox = {outbox_text} AND c.consumer = $5 AND c.partition = 'wal'
            AND substring(c.position FOR 11) = substring($7::bytea FOR 11)
            AND substring(c.position FROM 12) >= substring($7::bytea FROM 12)),
    sealed AS (
        INSERT INTO {schema}.wal_seal AS w (outbox, consumer, seals)
        SELECT {outbox_text}, $5, $6::text[]::uuid[] FROM fence CROSS JOIN stands
        ON CONFLICT (outbox, consumer) DO UPDATE SET seals = excluded.seals)
    SELECT (SELECT count(*) FROM fence), current_database()::text,
        (SELECT f.identity::text FROM {schema}.feed AS f WHERE f.outbox = {outbox_text}),
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
        (SELECT count(*) FROM stands), pg_current_wal_insert_lsn()::text"
);

/// What the source's database says to a seal.
pub(super) struct Sealed {
    pub(super) seal: Uuid,
    pub(super) identity: String,
    pub(super) database: String,
    pub(super) written_ms: u64,
    /// All that was written before the seal lies below.
    pub(super) logged: Lsn,
}

impl Mirror {
    /// Up to where the log has all dead letters that the checkpoint has passed, of which there
    /// were `parks` before it was looked at.
    pub(super) fn parked_by(
        &self,
        consumer: &ConsumerName,
        books: &Arc<Books>,
        parks: u64,
        logged: Lsn,
    ) -> Lsn {
        let mut all = self.due();
        match all.get_mut(consumer).filter(|due| Arc::ptr_eq(&due.books, books)) {
            None => logged,
            // One more since then may be of the checkpoint that was read.
            Some(due) if due.parks != parks => logged,
            Some(due) => {
                if due.parks_known != parks {
                    (due.parks_known, due.parked_by) = (parks, logged);
                }
                due.parked_by
            }
        }
    }

    /// Writes a new seal to the source's database, beside those that the copy may have.
    pub(super) async fn seal(
        &self,
        wal: &Wal,
        consumer: &ConsumerName,
        books: &Arc<Books>,
        lease: &HeldLease,
        place: &WalPlace,
    ) -> Result<Sealed> {
        let seal = Uuid::new_v4();
        let mut seals = vec![seal.to_string()];
        if let Some(due) = self.due().get_mut(consumer).filter(|due| Arc::ptr_eq(&due.books, books))
        {
            seals.extend(due.seals.iter().map(Uuid::to_string));
            if due.seals.len() == MAX_SEALS {
                // Never the first.
                due.seals.remove(1);
            }
            due.seals.push(seal);
        }
        let position = place.position()?;
        let (key, name, bytes) = (LeaseKey::of(lease), consumer.as_str(), position.as_bytes());
        let params =
            key.params(&[(&name, Type::TEXT), (&seals, Type::TEXT_ARRAY), (&bytes, Type::BYTEA)]);
        let rows = wal.store.query_under("seal a copy", lease, SEAL, &params).await?;
        held(&rows, lease)?;
        if rows[0].get::<_, i64>(4) == 0 {
            return Err(Error::fenced("this database has not the checkpoint that is copied"));
        }
        let identity: Option<String> = rows[0].get(2);
        Ok(Sealed {
            seal,
            identity: identity.ok_or_else(|| Error::permanent("the outbox is gone"))?,
            database: rows[0].get(1),
            written_ms: rows[0].get::<_, i64>(3).unsigned_abs(),
            logged: Lsn::parse(rows[0].get(5))?,
        })
    }
}
