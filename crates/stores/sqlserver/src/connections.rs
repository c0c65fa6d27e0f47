//! Connections: pooled, bounded in number, and every call bounded in time.
//!
//! What lives here: making a connection, the pool, and one statement on it. What does not: any SQL
//! but what a session starts with.
//! Invariant: a connection whose call was cut short, or may have left a transaction open, is never
//! used again; the driver's own log lines, which repeat values of rows, reach nobody.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{
    Manager, Metrics, Object, Pool, PoolError, RecycleError, RecycleResult, TimeoutType,
};
use futures_util::future::BoxFuture;
use postrider_core::{Error, Result};
use socket2::{SockRef, TcpKeepalive};
use tiberius::error::{Error as DriverError, IoErrorKind};
use tiberius::{AuthMethod, Client, Config, EncryptionLevel, Row, ToSql};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tokio_util::compat::{Compat, TokioAsyncWriteCompatExt};
use tracing::Dispatch;
use tracing::instrument::WithSubscriber;

use crate::address::{Address, Encryption, place_name};
use crate::config::{AccessTokens, SqlServerOptions};
use crate::error::{breaks_connection, failed, is_deadlock, is_duplicate, sqlserver_error};

/// A value of a statement.
pub(crate) type Param<'a> = &'a dyn ToSql;
/// All result sets of a statement.
pub(crate) type Sets = Vec<Vec<Row>>;

/// The server gives a lock up by itself; this much later nothing is expected of it any more.
const GRACE: Duration = Duration::from_secs(1);
/// How often a statement that lost a deadlock is made again, before the caller hears of it.
const DEADLOCK_TRIES: u32 = 3;
/// How often a gateway may send a connection elsewhere: Azure does so once.
const MOST_HOPS: u32 = 3;
/// A dead peer is noticed after `idle + interval * retries`: half a minute, while nothing is sent.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// What the driver calls a connection.
pub(crate) type Session = Client<Compat<TcpStream>>;

/// One connection, and what is known of it.
pub(crate) struct Connection {
    session: Session,
    /// A call was given up before its answer came, or failed.
    unfinished: bool,
    /// See [`Servers::suspect_all`].
    era: u64,
}

/// The server that is asked, and how.
pub(crate) struct Servers {
    address: Address,
    tokens: Option<Arc<dyn AccessTokens>>,
    connect_timeout: Duration,
    statement_timeout: Duration,
    /// Connections of an earlier era were made before others like them died.
    era: AtomicU64,
}

impl Servers {
    fn new(options: &SqlServerOptions) -> Result<Self> {
        let address = options.address()?;
        Ok(Self {
            connect_timeout: address.connect_timeout.unwrap_or(options.connect_timeout),
            statement_timeout: address.command_timeout.unwrap_or(options.statement_timeout),
            tokens: options.tokens.clone(),
            era: AtomicU64::new(0),
            address,
        })
    }

    /// A server that went away took all of its connections with it: none is used again unseen.
    fn suspect_all(&self) {
        self.era.fetch_add(1, Ordering::Relaxed);
    }

    async fn config(&self, host: &str, port: u16) -> Result<Config> {
        let address = &self.address;
        let mut config = Config::new();
        config.host(host);
        config.port(port);
        config.application_name(&address.application);
        config.encryption(match address.encryption {
            Encryption::All => EncryptionLevel::Required,
            Encryption::Login => EncryptionLevel::Off,
            Encryption::Nothing => EncryptionLevel::NotSupported,
        });
        if address.any_certificate {
            config.trust_cert();
        }
        if let Some(file) = &address.authority {
            config.trust_cert_ca(file.to_string_lossy());
        }
        if let Some(name) = &address.name_in_certificate {
            config.hostname_in_certificate(name);
        }
        if let Some(database) = &address.database {
            config.database(database);
        }
        if let Some(name) = &address.workstation {
            config.client_name(name);
        }
        if let Some(bytes) = address.packet_bytes {
            config.packet_size(bytes);
        }
        // An event that was inserted by hand may hold half of a pair, and must stop no reader.
        config.lossy_utf16_decoding(true);
        config.handshake_timeout(Some(self.connect_timeout));
        config.command_timeout(Some(self.statement_timeout + GRACE));
        config.authentication(match &self.tokens {
            Some(tokens) => AuthMethod::aad_token(tokens.token().await?.expose()),
            None => AuthMethod::sql_server(
                address.user.as_deref().unwrap_or_default(),
                address.password.as_ref().map_or("", |password| password.expose()),
            ),
        });
        Ok(config)
    }

    /// Connects, following a gateway that sends the connection elsewhere, and sets the session up.
    async fn connect(&self) -> Result<Session> {
        let deadline = Instant::now() + self.connect_timeout;
        let (mut host, mut port) = (self.address.host.clone(), self.address.port);
        for _ in 0..MOST_HOPS {
            let place = format!("connect to {}", place_name(&host, port));
            let late = || {
                let message = "the time to connect is over".to_owned();
                sqlserver_error(&place, DriverError::Io { kind: IoErrorKind::TimedOut, message })
            };
            let config = timeout_at(deadline, self.config(&host, port)).await;
            let config = config.map_err(|_| late())??;
            let stream = timeout_at(deadline, reach(&host, port)).await.map_err(|_| late())?;
            let stream = stream.map_err(|error| sqlserver_error(&place, error.into()))?;
            // Boxed, for it is large: a caller's thread may have little stack left.
            let login = Box::pin(Client::connect(config, stream.compat_write()));
            match timeout_at(deadline, login).await.map_err(|_| late())? {
                Err(DriverError::Routing { host: to, port: at }) => (host, port) = (to, at),
                Err(error) => return Err(sqlserver_error(&place, error)),
                Ok(mut session) => {
                    let setup = set_up(&mut session, self.statement_timeout);
                    let done = timeout_at(deadline, setup).await.map_err(|_| late())?;
                    done.map_err(|error| sqlserver_error(&place, error))?;
                    return Ok(session);
                }
            }
        }
        Err(Error::transient(format!(
            "connect to {}: it was sent elsewhere {MOST_HOPS} times; try again",
            self.address.name()
        )))
    }
}

/// Tries each address of the host's name in turn.
async fn reach(host: &str, port: u16) -> std::io::Result<TcpStream> {
    let mut last = None;
    for address in tokio::net::lookup_host((host, port)).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                let keepalive =
                    TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
                SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
                return Ok(stream);
            }
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| std::io::ErrorKind::NotFound.into()))
}

/// What every session starts with: an error rolls its transaction back whole, no lock is waited for
/// longer than a statement may take, and no counts of rows are sent.
async fn set_up(session: &mut Session, lock_timeout: Duration) -> tiberius::Result<()> {
    let sql = crate::sql::SESSION.replace("30000", &lock_timeout.as_millis().to_string());
    say(session, &sql).await
}

impl Manager for Servers {
    type Type = Connection;
    type Error = Error;

    async fn create(&self) -> Result<Connection> {
        let era = self.era.load(Ordering::Relaxed);
        let session = self.connect().with_subscriber(Dispatch::none()).await?;
        Ok(Connection { session, unfinished: false, era })
    }

    async fn recycle(&self, connection: &mut Connection, _: &Metrics) -> RecycleResult<Error> {
        if connection.unfinished || connection.era != self.era.load(Ordering::Relaxed) {
            return Err(RecycleError::message("it is not whole, or its like have died"));
        }
        Ok(())
    }
}

/// The pool of one store.
pub(crate) struct Connections {
    pool: Pool<Servers>,
    timeout: Duration,
}

impl Connections {
    pub(crate) fn new(options: &SqlServerOptions) -> Result<Self> {
        let servers = Servers::new(options)?;
        let timeout = servers.statement_timeout;
        let pool = Pool::builder(servers)
            .max_size(options.connections)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(timeout))
            .build()
            .map_err(|error| Error::permanent("connections").with_source(error))?;
        Ok(Self { pool, timeout })
    }

    /// The server, for texts.
    pub(crate) fn name(&self) -> String {
        self.pool.manager().address.name()
    }

    async fn take(&self, place: &'static str) -> Result<Object<Servers>> {
        let mut connection = self.pool.get().await.map_err(|error| self.none(place, error))?;
        // Until the answer has come whole: a call that is dropped leaves the mark.
        connection.unfinished = true;
        Ok(connection)
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

    /// Runs one batch, which begins and ends its transaction itself if it needs one, and returns
    /// its result sets. One that lost a deadlock, or that met a row which another has just made, is
    /// run again: the server has rolled it back whole.
    ///
    /// # Errors
    /// As [`sqlserver_error`] maps them.
    ///
    /// # Cancellation
    /// A dropped call may still be carried out by the server, whole or not at all.
    pub(crate) async fn run(
        &self,
        place: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Sets> {
        self.run_or(place, sql, params, failed(place)).await
    }

    /// [`Self::run`], with another mapping of the driver's error.
    pub(crate) async fn run_or<E: From<Error>>(
        &self,
        place: &'static str,
        sql: &str,
        params: &[Param<'_>],
        map: impl FnOnce(DriverError) -> E,
    ) -> Result<Sets, E> {
        let mut tries = 0;
        loop {
            tries += 1;
            let mut connection = self.take(place).await?;
            let asked = ask(&mut connection.session, sql, params);
            let answer = asked_within(asked, self.timeout).await;
            match self.answered(connection, answer) {
                Ok(sets) => return Ok(sets),
                Err(error) if is_deadlock(&error) && tries < DEADLOCK_TRIES => {}
                Err(error) if is_duplicate(&error) && tries < DEADLOCK_TRIES => {}
                Err(error) => return Err(map(error)),
            }
        }
    }

    fn answered(
        &self,
        mut connection: Object<Servers>,
        answer: tiberius::Result<Sets>,
    ) -> tiberius::Result<Sets> {
        match &answer {
            Ok(_) => connection.unfinished = false,
            Err(error) => {
                // It may have a transaction open, which goes with it.
                drop(Object::take(connection));
                if breaks_connection(error) {
                    self.pool.manager().suspect_all();
                }
            }
        }
        answer
    }

    /// Runs `work` on one connection that is closed behind it, and with it whatever lock of the
    /// session's `work` took. Not in a transaction.
    pub(crate) async fn once<T>(
        &self,
        place: &'static str,
        work: impl for<'c> FnOnce(&'c mut Once<'c>) -> BoxFuture<'c, Result<T>>,
    ) -> Result<T> {
        let mut connection = self.take(place).await?;
        let mut once = Once { session: &mut connection.session, place, timeout: self.timeout };
        let done = work(&mut once).await;
        drop(Object::take(connection));
        done
    }

    /// A connection outside the pool, for a caller who keeps it.
    pub(crate) async fn alone(&self) -> Result<Session> {
        Ok(self.pool.manager().create().await?.session)
    }

    /// Runs `work` in a transaction, and commits it when `work` succeeds.
    pub(crate) async fn transaction<T, E: From<Error>>(
        &self,
        work: impl for<'c> FnOnce(&'c mut Session) -> BoxFuture<'c, Result<T, E>> + Send,
    ) -> Result<T, E> {
        let mut connection = self.take("begin a transaction").await?;
        let session = &mut connection.session;
        let begun = asked_within(say(session, crate::sql::BEGIN), self.timeout).await;
        begun.map_err(failed("begin a transaction"))?;
        // The driver's log stays away in here, too.
        match work(session).with_subscriber(Dispatch::none()).await {
            Ok(value) => {
                let done = asked_within(say(session, crate::sql::COMMIT), self.timeout).await;
                done.map_err(failed("commit"))?;
                connection.unfinished = false;
                Ok(value)
            }
            Err(error) => {
                let undone = asked_within(say(session, crate::sql::ROLLBACK), self.timeout).await;
                // One that does not answer is closed, and that rolls back.
                connection.unfinished = undone.is_err();
                Err(error)
            }
        }
    }
}

/// A connection for one piece of work.
pub(crate) struct Once<'c> {
    session: &'c mut Session,
    place: &'static str,
    timeout: Duration,
}

impl Once<'_> {
    /// Runs a batch, and drops its answer.
    pub(crate) async fn say(&mut self, batch: &str) -> Result<()> {
        let asked = asked_within(say(self.session, batch), self.timeout).await;
        asked.map_err(failed(self.place))
    }

    /// Runs a statement without values.
    pub(crate) async fn ask(&mut self, sql: &str) -> Result<Sets> {
        let asked = asked_within(ask(self.session, sql, &[]), self.timeout).await;
        asked.map_err(failed(self.place))
    }
}

/// A batch without parameters, whose transaction outlasts it.
async fn say(session: &mut Session, sql: &str) -> tiberius::Result<()> {
    Box::pin(async { session.simple_query(sql).await?.into_results().await }).await.map(drop)
}

async fn ask(session: &mut Session, sql: &str, params: &[Param<'_>]) -> tiberius::Result<Sets> {
    Box::pin(async { session.query(sql, params).await?.into_results().await }).await
}

/// The driver bounds each part of an answer; this bounds the whole, and keeps its log away.
async fn asked_within<T>(
    asked: impl Future<Output = tiberius::Result<T>>,
    within: Duration,
) -> tiberius::Result<T> {
    let asked = asked.with_subscriber(Dispatch::none());
    tokio::time::timeout(within + GRACE, asked).await.unwrap_or_else(|_| {
        let message = "the statement's time is over".to_owned();
        Err(DriverError::Io { kind: IoErrorKind::TimedOut, message })
    })
}
