//! Connections: pooled, bounded in number, and every call bounded in time.
//!
//! What lives here: the pool, and one statement or one transaction on it, also under a lease. What
//! does not: any SQL but what bounds a transaction; how a connection is made (`server.rs`).
//! Invariant: where a pooler in transaction mode may stand in between, statements are unnamed and
//! keep nothing in the session; a connection whose call was cut short is used again only
//! once it has answered; no call goes on from one copy of the database into another.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{Object, Pool, PoolError, TimeoutType};
use futures_util::future::{BoxFuture, join3};
use postrider_core::{Error, HeldLease, Result};
use tokio::time::{Instant, timeout};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, IsolationLevel, Row, Transaction};

use crate::config::PostgresOptions;
use crate::error::{breaks_all_connections, breaks_connection, driver_error, failed};
use crate::server::{Connection, IDENTIFY, Servers, sighting};
use crate::world::{Sighting, World};

/// A value and its type on the wire.
pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// The server ends a statement itself; this much later nothing is expected of it any more.
const GRACE: Duration = Duration::from_secs(1);
/// How old the knowledge of how far the log is written may become while there is anything to do.
/// A copy older than that is known for one even where its timeline is the same.
const OBSERVE_EVERY: Duration = Duration::from_secs(5);

pub(crate) struct Connections {
    pool: Pool<Servers>,
    world: Arc<World>,
    timeout: Duration,
    observed: Mutex<Instant>,
}

/// How often a statement comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Seldom,
    Often,
}

/// Why a call has to be begun again on another connection.
enum Trouble {
    /// The server behind the pooler is another one; nothing was done.
    Moved,
    Failed(Error),
}

impl Connections {
    pub(crate) fn new(options: &PostgresOptions) -> Result<Self> {
        let world = Arc::new(World::default());
        let servers = Servers::new(options, Arc::clone(&world))?;
        let pool = Pool::builder(servers)
            .max_size(options.connections)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(options.statement_timeout))
            .build()
            .map_err(|error| Error::permanent("connections").with_source(error))?;
        let timeout = options.statement_timeout;
        Ok(Self { pool, world, timeout, observed: Mutex::new(Instant::now()) })
    }

    /// Which copy of the database answers, and what that means for leases and positions.
    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    /// A connection to the present world, marked as unfinished until [`Self::finished`]: a call
    /// that is dropped leaves the mark.
    async fn take(
        &self,
        place: &'static str,
        lease: Option<&HeldLease>,
    ) -> Result<Object<Servers>> {
        let mut connection = loop {
            let mut connection = self.pool.get().await.map_err(|error| self.none(place, error))?;
            let servers = self.pool.manager();
            // Not in the pool's own check: a caller that goes away there costs the connection.
            let whole = !connection.unfinished || servers.clears(&mut connection).await;
            if whole && connection.world == self.world.number() {
                break connection;
            }
            drop(Object::take(connection));
        };
        if let Some(lease) = lease {
            self.world.check(place, lease)?;
        }
        connection.unfinished = true;
        Ok(connection)
    }

    /// A connection of its own, outside the pool and its time-outs' care: for what lasts long.
    pub(crate) async fn alone(&self) -> Result<Connection> {
        deadpool::managed::Manager::create(self.pool.manager()).await
    }

    /// The servers that are asked.
    pub(crate) fn servers(&self) -> &Servers {
        self.pool.manager()
    }

    fn none(&self, place: &'static str, error: PoolError<Error>) -> Error {
        let text = match error {
            PoolError::Backend(error) => return error,
            PoolError::Timeout(TimeoutType::Wait) => format!(
                "{place}: all {} connections were busy; raise the option `connections`",
                self.pool.status().max_size
            ),
            PoolError::Timeout(TimeoutType::Create | TimeoutType::Recycle)
            | PoolError::Closed
            | PoolError::NoRuntimeSpecified
            | PoolError::PostCreateHook(_) => format!("{place}: no connection"),
        };
        Error::transient(text)
    }

    /// Ends a call: gives a whole connection back, and drops a broken one.
    fn finished<T>(
        &self,
        place: &'static str,
        mut connection: Object<Servers>,
        answer: Result<Result<T, Trouble>, tokio::time::error::Elapsed>,
    ) -> Result<T, Trouble> {
        let Ok(answer) = answer else {
            self.pool.manager().suspect_all(&connection);
            drop(Object::take(connection));
            let text = format!("{place}: no answer in time; connecting again");
            return Err(Trouble::Failed(Error::transient(text)));
        };
        match &answer {
            Ok(_) => connection.unfinished = false,
            Err(Trouble::Moved) => drop(Object::take(connection)),
            // Without the driver's error the work may hide one: it is asked again before its use.
            Err(Trouble::Failed(error)) => {
                if let Some(cause) = driver_error(error) {
                    connection.unfinished = false;
                    if breaks_all_connections(cause) {
                        self.pool.manager().suspect_all(&connection);
                    }
                    if breaks_connection(cause) {
                        drop(Object::take(connection));
                    }
                }
            }
        }
        answer
    }

    /// One statement in a transaction of its own: one round trip.
    ///
    /// # Cancellation
    /// A dropped call may or may not have been done.
    pub(crate) async fn query(
        &self,
        place: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        self.ask(place, None, sql, params, Repeat::Seldom).await
    }

    /// [`Self::query`] for one that comes many times a second: the session keeps it prepared.
    pub(crate) async fn query_often(
        &self,
        place: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        self.ask(place, None, sql, params, Repeat::Often).await
    }

    /// One statement on a connection of its own, by [`Servers::ask_plainly`].
    pub(crate) async fn query_plainly(&self, place: &'static str, sql: &str) -> Result<Vec<Row>> {
        self.pool.manager().ask_plainly(place, sql).await
    }

    /// [`Self::query`] under a lease that this process acquired.
    ///
    /// # Errors
    /// `Fenced` when another copy of the database answers than the one that granted the lease.
    pub(crate) async fn query_under(
        &self,
        place: &'static str,
        lease: &HeldLease,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        self.ask(place, Some(lease), sql, params, Repeat::Seldom).await
    }

    /// [`Self::query_under`] for one that comes many times a second.
    pub(crate) async fn query_often_under(
        &self,
        place: &'static str,
        lease: &HeldLease,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        self.ask(place, Some(lease), sql, params, Repeat::Often).await
    }

    async fn ask(
        &self,
        place: &'static str,
        lease: Option<&HeldLease>,
        sql: &str,
        params: &[Param<'_>],
        repeat: Repeat,
    ) -> Result<Vec<Row>> {
        let mut moved = false;
        loop {
            let connection = self.take(place, lease).await?;
            let within = self.timeout + GRACE;
            let answer =
                timeout(within, self.statement(place, &connection, sql, params, repeat)).await;
            match self.finished(place, connection, answer) {
                Ok(rows) => return Ok(rows),
                Err(Trouble::Moved) if !moved => moved = true,
                Err(Trouble::Moved) => return Err(self.moving(place)),
                Err(Trouble::Failed(error)) => return Err(error),
            }
        }
    }

    fn moving(&self, place: &'static str) -> Error {
        Error::transient(format!("{place}: the server behind the pooler changes; trying again"))
    }

    async fn statement(
        &self,
        place: &'static str,
        connection: &Connection,
        sql: &str,
        params: &[Param<'_>],
        repeat: Repeat,
    ) -> Result<Vec<Row>, Trouble> {
        let client = &connection.client;
        let rows = if connection.pooled {
            let statement = client.query_typed(sql, params);
            let begin = self.bounds("BEGIN ISOLATION LEVEL READ COMMITTED;", connection);
            // All are sent at once, in this order; after a failed one the others do nothing.
            let (begun, rows, committed) =
                join3(client.batch_execute(&begin), statement, client.batch_execute("COMMIT"))
                    .await;
            begun.map_err(|error| trouble(place, error))?;
            match (rows, committed) {
                (Ok(rows), Ok(())) => Ok(rows),
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            }
        } else if repeat == Repeat::Often {
            connection.prepared(sql, params).await
        } else {
            client.query_typed(sql, params).await
        };
        let rows = rows.map_err(|error| Trouble::Failed(failed(place)(error)))?;
        self.observe(client).await;
        Ok(rows)
    }

    /// Looks now and then how far the log is written. It needs no answer: the next look will do.
    async fn observe(&self, client: &Client) {
        {
            let Ok(mut last) = self.observed.try_lock() else { return };
            if last.elapsed() < OBSERVE_EVERY {
                return;
            }
            *last = Instant::now();
        }
        let before = self.world.before();
        if let Ok(rows) = client.query_typed(IDENTIFY, &[]).await
            && let Some(Ok(now)) = rows.first().map(sighting)
        {
            self.world.met(before, now);
        }
    }

    /// What a transaction through a pooler begins with: its bounds, which end with it, and a cast
    /// that fails when the server is not the one that the connection was made to.
    fn bounds(&self, begin: &str, connection: &Connection) -> String {
        let ms = self.timeout.as_millis();
        let Sighting { system, timeline, .. } = connection.sighting;
        format!(
            "{begin} SET LOCAL statement_timeout = {ms}; SET LOCAL lock_timeout = {ms}; \
             SET LOCAL idle_in_transaction_session_timeout = {ms}; SET LOCAL jit = off; \
             SELECT CASE WHEN w.system = {system} AND w.timeline = {timeline} THEN 0 \
             ELSE ('another server, timeline ' || w.timeline)::integer END FROM (SELECT \
             s.system_identifier AS system, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))\
             ::bit(32)::integer AS timeline FROM pg_control_system() AS s) AS w"
        )
    }

    /// Runs `work` in one READ COMMITTED transaction and commits it when `work` succeeds.
    ///
    /// # Cancellation
    /// A call that is dropped rolls back, unless it was committing: then it is unknown.
    pub(crate) async fn transaction<T: Send>(
        &self,
        place: &'static str,
        work: impl for<'a> FnOnce(&'a Transaction<'_>) -> BoxFuture<'a, Result<T>> + Send,
    ) -> Result<T> {
        let mut work = Some(work);
        let mut moved = false;
        loop {
            let mut connection = self.take(place, None).await?;
            let bounds = connection.pooled.then(|| self.bounds("", &connection));
            let whole = async {
                let level = IsolationLevel::ReadCommitted;
                let begin = connection.client.build_transaction().isolation_level(level);
                let tx = begin.start().await.map_err(|error| trouble(place, error))?;
                if let Some(bounds) = bounds {
                    tx.batch_execute(&bounds).await.map_err(|error| trouble(place, error))?;
                }
                let work = work.take().expect("work begins once, and after that nothing moves");
                let value = work(&tx).await.map_err(Trouble::Failed)?;
                tx.commit().await.map_err(|error| Trouble::Failed(failed(place)(error)))?;
                Ok(value)
            };
            let answer = timeout(self.timeout + GRACE, whole).await;
            match self.finished(place, connection, answer) {
                Ok(value) => return Ok(value),
                Err(Trouble::Moved) if !moved => moved = true,
                Err(Trouble::Moved) => return Err(self.moving(place)),
                Err(Trouble::Failed(error)) => return Err(error),
            }
        }
    }
}

/// What it means that a transaction could not begin.
fn trouble(place: &'static str, error: tokio_postgres::Error) -> Trouble {
    match error.code() {
        // Nothing else in `bounds` is cast from a text.
        Some(code) if *code == SqlState::INVALID_TEXT_REPRESENTATION => Trouble::Moved,
        _ => Trouble::Failed(failed(place)(error)),
    }
}
