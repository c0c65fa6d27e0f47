//! Draining a backlog: the relay against what a table can give, and against other ways.
//!
//! What lives here: the rounds, each with every way in turn. What does not: the ways of others
//! (`tables.rs`).
//! Invariant: the relay is the real one, with leases and checkpoints in the database; only its sink
//! does nothing but count.

use std::sync::Arc;

use anyhow::Result;
use postrider_servers::postgres::Database;
use postrider_sink_memory::MemorySink;
use postrider_store_postgres::PostgresStore;

use super::server::{Measured, Session, store};
use super::{Setting, tables};
use crate::figure::{Goal, Report};
use crate::world::{clock, drain, per_second, relay_named};

/// The slower ways get a fifth of the rows: their rates do not depend on how many there are.
const OTHERS_SHARE: u64 = 5;

/// What the relay is compared with.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// `COPY (SELECT … ORDER BY seq) TO STDOUT`.
    Copy,
    /// Delete a page, insert it into a feed table, read it; by psql.
    Moving,
    /// Claim a page by SKIP LOCKED, read and delete it; by psql.
    Claiming,
    /// The same by a Rust client with a prepared statement.
    ClaimingClient,
}

/// Each with its figure and its goal.
const WAYS: [(Way, &str, f64); 4] = [
    (Way::Copy, "drain against COPY", 0.35),
    (Way::Moving, "drain against moving to a feed table", 3.0),
    (Way::Claiming, "drain against SKIP LOCKED", 2.5),
    (Way::ClaimingClient, "drain against SKIP LOCKED, prepared", 1.0),
];

pub(crate) async fn measure(
    report: &mut Report,
    measured: &Measured,
    setting: &Setting,
) -> Result<()> {
    let events = setting.scaled(1_000_000);
    let database = measured.database()?;
    let store = store(&database).await?;
    let session = Session::open(&database).await?;
    tables::fill(&session, events, 1_000).await?;
    session.run("VACUUM ANALYZE postrider.outbox").await?;
    session.run(&(tables::plain("plain_outbox") + &tables::plain("plain_feed"))).await?;
    let field = Field { database, store, session, events };
    let mut pairs = vec![Vec::new(); WAYS.len()];
    // The first round warms up.
    for number in usize::from(setting.smoke)..=setting.runs {
        let rates = field.round(number).await?;
        if number > 0 {
            for (pairs, other) in pairs.iter_mut().zip(rates.others) {
                pairs.push((rates.relay, other));
            }
        }
    }
    for ((_, figure, goal), pairs) in WAYS.iter().zip(&pairs) {
        report.ratio(figure, pairs, "events/s", Goal::AtLeast(*goal));
    }
    Ok(())
}

/// Where the ways compete.
struct Field {
    database: Database,
    store: PostgresStore,
    session: Session,
    events: u64,
}

/// One round's, in events a second.
struct Rates {
    relay: f64,
    others: Vec<f64>,
}

impl Field {
    /// Every way once, the relay first or last in turn, so that a drift of the machine favours
    /// none.
    async fn round(&self, number: usize) -> Result<Rates> {
        let mut others = Vec::new();
        let relay_first = number.is_multiple_of(2);
        let mut relay = 0.0;
        if relay_first {
            relay = self.relayed(number).await?;
        }
        for (way, _, _) in WAYS {
            others.push(self.by(way).await?);
        }
        if !relay_first {
            relay = self.relayed(number).await?;
        }
        Ok(Rates { relay, others })
    }

    async fn relayed(&self, number: usize) -> Result<f64> {
        let sink = Arc::new(MemorySink::counting(clock()));
        let relay = relay_named(&format!("drain-{number}"), Arc::new(self.store.clone()), sink)?;
        Ok(per_second(self.events, drain(relay, self.events).await?))
    }

    async fn by(&self, way: Way) -> Result<f64> {
        let (session, others) = (&self.session, self.events / OTHERS_SHARE);
        if let Way::Copy = way {
            return Ok(per_second(self.events, tables::copied(session, self.events).await?));
        }
        tables::refill_plain(session, others).await?;
        let psql = |sql| tables::drained_by_psql(&self.database, sql, others);
        let took = match way {
            Way::Copy | Way::Moving => psql(&tables::moving()).await?,
            Way::Claiming => psql(&tables::claiming()).await?,
            Way::ClaimingClient => {
                tables::drained_by_client(session, &tables::claiming(), others).await?
            }
        };
        let left = session.number("SELECT count(*) FROM plain_outbox").await?;
        anyhow::ensure!(left == 0, "{left} rows were not drained by {way:?}");
        Ok(per_second(others, took))
    }
}
