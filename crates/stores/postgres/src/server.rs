//! One connection to a server: made, known, and looked at before it is used again.
//!
//! What lives here: trying the hosts in turn, what a session starts with, and which server
//! answered. What does not: the pool and statements (`connections.rs`).
//! Invariant: a connection is used again only while it is whole: not cut short, not of a server
//! that has been replaced, and not older than the last sign that its like are dead.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool::managed::{Metrics, RecycleResult};
use futures_util::future::BoxFuture;
use postrider_core::{Error, ErrorKind, Result};
use rustls::ClientConfig;
use tokio::task::JoinSet;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{Client, Row, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;
use uuid::Uuid;

use crate::address::{Address, Place};
use crate::config::PostgresOptions;
use crate::connections::Param;
use crate::error::{connect_error, failed};
use crate::tls::{self, TlsFiles, TlsMode};
use crate::world::{Sighting, World, WorldNumber};

/// Which copy of which cluster answers, how far its log is written, whether it takes writes, and
/// which connection the session's settings are of: behind a pooler none, or another one. Reads the
/// control file; takes no locks.
pub(crate) const IDENTIFY: &str = "SELECT s.system_identifier,
    CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
        ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer END,
    (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END
        - '0/0'::pg_lsn)::bigint,
    NOT pg_is_in_recovery() AND NOT current_setting('transaction_read_only')::boolean,
    current_setting('postrider.session', true)
FROM pg_control_system() AS s";

/// Asked of a connection whose last call failed or was given up. Takes no locks.
const TAKES_WRITES: &str = "SELECT NOT current_setting('transaction_read_only')::boolean";

/// How long an answer to a statement that was given up is waited for, before the connection is
/// given up, too. Most come within a round trip.
const CLEAR_WITHIN: Duration = Duration::from_millis(250);

/// The driver's half of one connection, and what is known of it.
pub(crate) struct Connection {
    pub(crate) client: Client,
    /// Moves the bytes; ends with this value.
    _wire: JoinSet<()>,
    pub(crate) world: WorldNumber,
    pub(crate) sighting: Sighting,
    /// See [`Servers::suspect_all`].
    pub(crate) era: u64,
    /// The session may be another's before and after each transaction.
    pub(crate) pooled: bool,
    /// A call was given up before its answer came.
    pub(crate) unfinished: bool,
    /// What the session keeps prepared, by its text: a handful of statements.
    kept: Mutex<HashMap<String, Statement>>,
}

impl Connection {
    /// One statement that the session keeps prepared from its first time on, which costs a round
    /// trip more. For sessions of this process alone.
    pub(crate) async fn prepared(
        &self,
        sql: &str,
        params: &[Param<'_>],
    ) -> std::result::Result<Vec<Row>, tokio_postgres::Error> {
        let known = self.kept().get(sql).cloned();
        let statement = match known {
            Some(statement) => statement,
            None => {
                let types: Vec<Type> = params.iter().map(|(_, of)| of.clone()).collect();
                let statement = self.client.prepare_typed(sql, &types).await?;
                self.kept().insert(sql.to_owned(), statement.clone());
                statement
            }
        };
        let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(value, _)| *value).collect();
        match self.client.query(&statement, &values).await {
            // Somebody removed it from the session, or changed what it returns. Nothing was done.
            Err(error) if error.code().is_some_and(|code| LOST.contains(code)) => {
                self.kept().remove(sql);
                self.client.query_typed(sql, params).await
            }
            answer => answer,
        }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<String, Statement>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a server says to a prepared statement that is not what it was.
const LOST: [SqlState; 2] = [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::FEATURE_NOT_SUPPORTED];

/// One server that may be asked.
pub(crate) struct Host {
    pub(crate) place: Place,
    pub(crate) tls: Arc<ClientConfig>,
    /// The same TLS for the driver.
    driver: MakeRustlsConnect,
}

impl Host {
    fn new(place: Place, files: &TlsFiles) -> Result<Self> {
        let tls = tls::settings(place.tls, files)?;
        let driver = MakeRustlsConnect::new(tls.clone());
        Ok(Self { place, tls: Arc::new(tls), driver })
    }
}

/// The servers that may be asked, and how.
pub(crate) struct Servers {
    hosts: Vec<Host>,
    writable: bool,
    connect_timeout: Duration,
    /// For the start of a session; the last setting wins.
    settings: String,
    /// Something in between takes no settings at the start of a session.
    settings_refused: AtomicBool,
    era: AtomicU64,
    world: Arc<World>,
}

impl Servers {
    pub(crate) fn new(options: &PostgresOptions, world: Arc<World>) -> Result<Self> {
        let Address { places, writable, connect_timeout, files } = options.address()?;
        let with_tls = |place: Place| Host::new(place, &files);
        let milliseconds = options.statement_timeout.as_millis();
        // The server ends what a client that vanished has left: an idle transaction by its
        // time-out, a waiting statement within a second, a dead connection by TCP's own means.
        // Compiling a plan for all segments takes longer than any of the statements.
        let settings = format!(
            "-c statement_timeout={milliseconds} -c lock_timeout={milliseconds} \
             -c idle_in_transaction_session_timeout={milliseconds} \
             -c client_connection_check_interval=1000 -c tcp_keepalives_idle=10 \
             -c tcp_keepalives_interval=5 -c tcp_keepalives_count=4 -c tcp_user_timeout=20000 \
             -c default_transaction_isolation=read\\ committed -c jit=off"
        );
        Ok(Self {
            hosts: places.into_iter().map(with_tls).collect::<Result<_>>()?,
            writable,
            connect_timeout: connect_timeout.unwrap_or(options.connect_timeout),
            settings,
            settings_refused: AtomicBool::new(false),
            era: AtomicU64::new(0),
            world,
        })
    }

    /// Has every connection that is as old as this one dropped before its next use: a silent
    /// network or a fail-over rarely strikes one alone, and each would cost a whole time-out.
    pub(crate) fn suspect_all(&self, like: &Connection) {
        let (old, new) = (like.era, like.era + 1);
        // Whoever came first has done it; the connections made since are not to blame.
        let _ = self.era.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Makes a connection whose last call failed or was given up ready again, unless it is of no
    /// more use.
    ///
    /// # Cancellation
    /// Safe: it stays unfinished.
    pub(crate) async fn clears(&self, connection: &mut Connection) -> bool {
        let clear = connection.client.query_typed(TAKES_WRITES, &[]);
        let Ok(Ok(rows)) = tokio::time::timeout(CLEAR_WITHIN, clear).await else { return false };
        let writable = rows.first().is_some_and(|row| row.try_get(0).unwrap_or(false));
        connection.unfinished = self.writable && !writable;
        !connection.unfinished
    }

    async fn connect(&self, place: &Place, tls: &MakeRustlsConnect) -> Result<Connection> {
        let era = self.era.load(Ordering::Acquire);
        let mut refused = self.settings_refused.load(Ordering::Acquire);
        // Any of the other settings could be the server's own, too.
        let session = Uuid::new_v4().to_string();
        let (client, wire) = loop {
            let mut config = place.config.clone();
            if !refused {
                let own = config.get_options().unwrap_or_default();
                let settings = &self.settings;
                config.options(format!("{own} {settings} -c postrider.session={session}"));
            }
            match config.connect(tls.clone()).await {
                Ok(both) => break both,
                Err(error) if !refused && refuses_settings(&error) => {
                    self.settings_refused.store(true, Ordering::Release);
                    refused = true;
                }
                Err(error) => return Err(connect_error(&place.name, error)),
            }
        };
        let mut task = JoinSet::new();
        task.spawn(async move {
            // Calls that wait for an answer hear of it, and nobody else needs to.
            let _ = wire.await;
        });
        let before = self.world.before();
        let rows = client.query_typed(IDENTIFY, &[]).await.map_err(failed("look at the server"))?;
        let row =
            rows.first().ok_or_else(|| Error::corrupt("the server says nothing of itself"))?;
        let sighting = sighting(row)?;
        if self.writable && !column::<bool>(row, 3)? {
            return Err(read_only(place));
        }
        let settings_of: Option<&str> = column(row, 4)?;
        let pooled = refused || settings_of != Some(session.as_str());
        let world = self.world.met(before, sighting);
        let (unfinished, kept) = (false, Mutex::default());
        Ok(Connection { client, _wire: task, world, sighting, era, pooled, unfinished, kept })
    }

    async fn connect_in_time(&self, place: &Place, tls: &MakeRustlsConnect) -> Result<Connection> {
        let connect = self.connect(place, tls);
        let connected = tokio::time::timeout(self.connect_timeout, connect).await;
        connected.unwrap_or_else(|_| Err(no_answer(place)))
    }
}

fn no_answer(place: &Place) -> Error {
    let tls = match place.tls {
        TlsMode::Disable => "",
        TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => " and TLS",
    };
    Error::transient(format!(
        "connect to {}: no answer in time; look at the server{tls}, and at a firewall in between",
        place.name
    ))
}

fn read_only(place: &Place) -> Error {
    Error::transient(format!(
        "connect to {}: the server is read-only (a standby); wait for the fail-over, or name the \
         primary",
        place.name
    ))
}

impl Servers {
    /// What `connect` makes of the first host that lets it, each within the time for connecting.
    /// `connect` also says whether the server takes writes; one that does not is passed over unless
    /// the address allows it.
    pub(crate) async fn first<'a, T>(
        &'a self,
        connect: impl Fn(&'a Host) -> BoxFuture<'a, Result<(T, bool)>>,
    ) -> Result<T> {
        let mut errors: Vec<Error> = Vec::new();
        for host in &self.hosts {
            match tokio::time::timeout(self.connect_timeout, connect(host)).await {
                Ok(Ok((_, false))) if self.writable => errors.push(read_only(&host.place)),
                Ok(Ok((made, _))) => return Ok(made),
                Ok(Err(error)) => errors.push(error),
                Err(_) => errors.push(no_answer(&host.place)),
            }
        }
        Err(of_all(errors))
    }

    /// The rows of one statement on a connection of its own that asks for no settings, so that the
    /// server's own can be seen.
    pub(crate) async fn ask_plainly(&self, what: &'static str, sql: &str) -> Result<Vec<Row>> {
        let mut errors: Vec<Error> = Vec::new();
        for Host { place, driver: tls, .. } in &self.hosts {
            let ask = async {
                let connected = place.config.connect(tls.clone()).await;
                let (client, wire) = connected.map_err(|e| connect_error(&place.name, e))?;
                let mut task = JoinSet::new();
                task.spawn(async move {
                    // The call that waits for an answer hears of it.
                    let _ = wire.await;
                });
                client.query_typed(sql, &[]).await.map_err(failed(what))
            };
            match tokio::time::timeout(self.connect_timeout, ask).await {
                Ok(Ok(rows)) => return Ok(rows),
                Ok(Err(error)) => errors.push(error),
                Err(_) => errors.push(Error::transient(format!("{what}: no answer in time"))),
            }
        }
        Err(of_all(errors))
    }
}

impl deadpool::managed::Manager for Servers {
    type Type = Connection;
    type Error = Error;

    async fn create(&self) -> Result<Connection> {
        let mut errors: Vec<Error> = Vec::new();
        for Host { place, driver: tls, .. } in &self.hosts {
            match self.connect_in_time(place, tls).await {
                Ok(connection) => return Ok(connection),
                Err(error) => errors.push(error),
            }
        }
        Err(of_all(errors))
    }

    async fn recycle(&self, connection: &mut Connection, _: &Metrics) -> RecycleResult<Error> {
        let old = connection.era != self.era.load(Ordering::Acquire)
            || connection.world != self.world.number();
        if connection.client.is_closed() || old {
            return Err(Error::transient("the connection is of no more use").into());
        }
        Ok(())
    }
}

/// One error for all hosts: worth another try if one of them is.
fn of_all(mut errors: Vec<Error>) -> Error {
    let passing = errors.iter().position(|error| error.kind() == ErrorKind::Transient);
    let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
    match (errors.len(), passing) {
        (0, _) => Error::permanent("url: name the host"),
        (1, _) => errors.remove(0),
        (_, Some(one)) => Error::transient(texts.join("; ")).with_source(errors.remove(one)),
        (_, None) => Error::new(errors[0].kind(), texts.join("; ")).with_source(errors.remove(0)),
    }
}

/// What PgBouncer says to `options` (08P01), and a server to a setting that it does not have.
fn refuses_settings(error: &tokio_postgres::Error) -> bool {
    let refusals = [
        SqlState::PROTOCOL_VIOLATION,
        SqlState::INVALID_PARAMETER_VALUE,
        SqlState::UNDEFINED_OBJECT,
        SqlState::FEATURE_NOT_SUPPORTED,
    ];
    error.code().is_some_and(|code| refusals.contains(code))
}

pub(crate) fn sighting(row: &Row) -> Result<Sighting> {
    Ok(Sighting { system: column(row, 0)?, timeline: column(row, 1)?, written: column(row, 2)? })
}

fn column<'a, T: FromSql<'a>>(row: &'a Row, number: usize) -> Result<T> {
    row.try_get(number).map_err(failed("look at the server"))
}
