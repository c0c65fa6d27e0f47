//! Connections that break, hang or are given up in the middle.
//!
//! What lives here: the pool against a server that restarts, a network that swallows everything and
//! callers that go away. What does not: TLS, poolers and fail-over, which have files of their own.
//! Invariant: each call ends in bounded time, and the one after it works.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use postrider_core::{ErrorKind, Result};
use postrider_servers::postgres::{Database, Options, Server, Shutdown, Version, shared};
use postrider_servers::proxy::Proxy;
use postrider_store_postgres::tokio_postgres::types::Type;
use postrider_store_postgres::tokio_postgres::{NoTls, Transaction};
use postrider_store_postgres::{PostgresOptions, PostgresStore, postgres_error};

/// For what comes at once but for a busy machine.
const SOON: Duration = Duration::from_secs(20);

pub(crate) async fn open(url: &str) -> PostgresStore {
    PostgresStore::open(options(url)).await.expect("open")
}

fn options(url: &str) -> PostgresOptions {
    PostgresOptions::new(url).partitions(2)
}

/// Why a store does not open.
pub(crate) async fn refusal(options: PostgresOptions) -> postrider_core::Error {
    PostgresStore::open(options).await.map(drop).expect_err("refused")
}

/// The first column of the only row, as a text.
pub(crate) async fn ask(store: &PostgresStore, sql: &str) -> Result<String> {
    let sql = sql.to_owned();
    store.transaction(move |tx| Box::pin(value(tx, sql))).await
}

async fn value(tx: &Transaction<'_>, sql: String) -> Result<String> {
    let rows = tx.query_typed(&sql, &[]).await.map_err(|error| postgres_error("ask", error))?;
    Ok(rows.first().map_or_else(String::new, |row| row.get(0)))
}

const PID: &str = "select pg_backend_pid()::text";

/// The backends of a store, as many as asked for at once.
async fn backends(store: &PostgresStore, count: usize) -> HashSet<String> {
    let sleeper = "select pg_backend_pid()::text from pg_sleep(0.3)";
    let asked = (0..count).map(|_| ask(store, sleeper));
    let pids = futures_util::future::try_join_all(asked).await.expect("connected");
    pids.into_iter().collect()
}

/// Polls until the SQL answers this.
fn until(database: &Database, sql: &str, wanted: &str) {
    let deadline = Instant::now() + SOON;
    loop {
        let found = database.psql(sql).expect("psql");
        if found == wanted {
            return;
        }
        assert!(Instant::now() < deadline, "{sql}: {found}, not {wanted}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn proxied(port: u16, database: &str) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/{database}")
}

fn upstream(url: &str) -> SocketAddr {
    let place = url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("a host");
    place.parse().expect("an address")
}

fn launch() -> Server {
    Options::new(Version::V15).launch().expect("a server")
}

async fn recovers_from(server: &Server, shutdown: Shutdown) {
    let database = server.create_database().expect("a database");
    let store = open(&database.url()).await;
    backends(&store, 4).await;
    server.restart(shutdown).expect("restart");
    // The driver may not yet have heard of the end of its connection.
    let first = ask(&store, PID).await;
    if let Err(error) = first {
        assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
        ask(&store, PID).await.expect("the second one is on a new connection");
    }
    for _ in 0..8 {
        ask(&store, PID).await.expect("connected");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_server_costs_one_transient_error_at_most() {
    let server = launch();
    recovers_from(&server, Shutdown::Fast).await;
    recovers_from(&server, Shutdown::Immediate).await;
    let database = server.create_database().expect("a database");
    let store = open(&database.url()).await;
    server.stop(Shutdown::Fast).expect("stop");
    let error = ask(&store, PID).await.expect_err("nobody listens");
    let error = match error.to_string().contains("nobody listens") {
        true => error,
        false => ask(&store, PID).await.expect_err("nobody listens"),
    };
    assert_eq!(error.kind(), ErrorKind::Transient);
    let place = format!("connect to 127.0.0.1:{}: nobody listens there", server.port());
    assert!(error.to_string().starts_with(&place), "{error:?}");
    server.start().expect("start");
    ask(&store, PID).await.expect("connected");
}

#[tokio::test(flavor = "multi_thread")]
async fn terminated_backends_cost_one_transient_error_each_at_most() {
    let database = shared(Version::V18).expect("a server");
    let store = open(&database.url()).await;
    let pids = backends(&store, 3).await;
    let terminate = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and application_name = 'postrider'";
    database.psql(terminate).expect("psql");
    // They were told to end: until they have, some serve a statement yet, and others die in one.
    let pids: Vec<String> = pids.into_iter().collect();
    let alive = format!("select count(*) from pg_stat_activity where pid in ({})", pids.join(", "));
    until(&database, &alive, "0");
    let mut failures = 0;
    for _ in 0..8 {
        if let Err(error) = ask(&store, PID).await {
            assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
            failures += 1;
        }
    }
    assert!(failures <= 1, "{failures} of 8");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_swallows_everything_is_noticed_once() {
    let database = shared(Version::V15).expect("a server");
    let proxy = Proxy::start(upstream(&database.url())).expect("a proxy");
    let url = proxied(proxy.port(), database.name());
    let limit = Duration::from_millis(700);
    let options = options(&url).statement_timeout(limit).connect_timeout(limit);
    let store = PostgresStore::open(options).await.expect("open");
    let before = backends(&store, 4).await;
    assert_eq!(before.len(), 4);
    proxy.black_hole();
    let begun = Instant::now();
    let error = ask(&store, PID).await.expect_err("swallowed");
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    // The other three are of no more use either, and are not tried one by one.
    let begun = Instant::now();
    let error = ask(&store, PID).await.expect_err("swallowed");
    assert!(error.to_string().contains("connect to 127.0.0.1"), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    proxy.thaw();
    let begun = Instant::now();
    for _ in 0..6 {
        let pid = ask(&store, PID).await.expect("a new connection");
        assert!(!before.contains(&pid), "a dead connection was used again");
    }
    assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_or_half_closed_connection_is_not_used_twice() {
    let database = shared(Version::V15).expect("a server");
    let proxy = Proxy::start(upstream(&database.url())).expect("a proxy");
    let store = open(&proxied(proxy.port(), database.name())).await;
    for breaking in [Proxy::reset_all, Proxy::close_all, Proxy::half_close_all] {
        backends(&store, 3).await;
        breaking(&proxy);
        let mut failures = 0;
        for _ in 0..6 {
            if let Err(error) = ask(&store, PID).await {
                assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
                failures += 1;
            }
        }
        assert!(failures <= 1, "{failures} of 6");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_leaves_nothing_open_and_the_next_one_works() {
    let database = shared(Version::V15).expect("a server");
    database.psql("create table t (n bigint)").expect("psql");
    let store = PostgresStore::open(options(&database.url()).connections(2)).await.expect("open");
    for millis in [0, 1, 2, 5, 20, 60, 150] {
        let sql = "with w as (insert into t values (1) returning n)
            select pg_advisory_xact_lock(42)::text from w, pg_sleep(0.1)";
        let call = store.transaction(move |tx| {
            Box::pin(async move {
                value(tx, sql.to_owned()).await?;
                std::future::pending::<Result<()>>().await
            })
        });
        let dropped = tokio::time::timeout(Duration::from_millis(millis), call).await;
        assert!(dropped.is_err(), "it can't end");
        let begun = Instant::now();
        ask(&store, PID).await.expect("the next one works");
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    }
    let open = "select count(*) from pg_stat_activity where datname = current_database()
        and application_name = 'postrider' and state <> 'idle'";
    until(&database, open, "0");
    assert_eq!(database.psql("select count(*) from t").expect("psql"), "0");
    let free = "select count(*) from pg_locks l join pg_database d on d.oid = l.database
        where d.datname = current_database() and l.locktype = 'advisory'";
    until(&database, free, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_waits_for_long_ends_soon_after_its_caller_has_gone() {
    let database = shared(Version::V18).expect("a server");
    let store = PostgresStore::open(options(&database.url()).connections(1)).await.expect("open");
    let call = ask(&store, "select pg_sleep(25)::text");
    assert!(tokio::time::timeout(Duration::from_millis(100), call).await.is_err());
    let begun = Instant::now();
    ask(&store, PID).await.expect("a new connection");
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    let running = "select count(*) from pg_stat_activity where datname = current_database()
        and query like 'select pg_sleep(25)%' and state = 'active'";
    until(&database, running, "0");
    assert!(begun.elapsed() < Duration::from_secs(20), "the server noticed by itself");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_dropped_cost_no_new_connections() {
    let database = shared(Version::V15).expect("a server");
    let store = PostgresStore::open(options(&database.url()).connections(2)).await.expect("open");
    let before = backends(&store, 2).await;
    for _ in 0..50 {
        let sleeper = ask(&store, "select pg_sleep(0.01)::text");
        let _ = tokio::time::timeout(Duration::from_millis(3), sleeper).await;
    }
    let after = backends(&store, 2).await;
    assert_eq!(before, after, "the same connections");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_ends_what_takes_too_long_and_the_connection_stays() {
    let database = shared(Version::V18).expect("a server");
    let options = options(&database.url()).connections(1);
    let limit = Duration::from_millis(800);
    let store = PostgresStore::open(options.statement_timeout(limit)).await.expect("open");
    let pid = ask(&store, PID).await.expect("connected");
    let begun = Instant::now();
    let error = ask(&store, "select pg_sleep(30)::text").await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("time-out"), "{error:?}");
    assert!(begun.elapsed() < limit * 2, "{:?}", begun.elapsed());
    assert_eq!(ask(&store, PID).await.expect("connected"), pid);
    let settings = "select string_agg(current_setting(s), ' ') from unnest(array[
        'lock_timeout', 'idle_in_transaction_session_timeout', 'client_connection_check_interval',
        'tcp_user_timeout', 'tcp_keepalives_idle', 'default_transaction_isolation']) as s";
    let found = ask(&store, settings).await.expect("connected");
    assert_eq!(found, "800ms 800ms 1s 20000 10 read committed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_busy_says_so() {
    let database = shared(Version::V15).expect("a server");
    let limit = Duration::from_millis(800);
    let options = options(&database.url()).connections(1).statement_timeout(limit);
    let store = PostgresStore::open(options).await.expect("open");
    let held = store.transaction(|_| {
        Box::pin(async {
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            Result::<()>::Ok(())
        })
    });
    let (held, refused) = tokio::join!(held, ask(&store, PID));
    let error = refused.expect_err("busy");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("all 1 connections were busy"), "{error:?}");
    // The one that held it was idle in its transaction for longer than it may be.
    assert_eq!(held.expect_err("idle for too long").kind(), ErrorKind::Transient);
    ask(&store, PID).await.expect("connected");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_that_is_refused_says_what_to_do_and_shows_no_password() {
    let server = Options::new(Version::V15).password("s3cret").launch().expect("a server");
    let database = server.create_database().expect("a database");
    let limited = format!("{}_one", database.name());
    let role = format!("create role {limited} login password 's3cret' connection limit 0");
    database.psql(&role).expect("psql");
    let port = server.port();
    let url = |login: &str, name: &str| format!("postgres://{login}@127.0.0.1:{port}/{name}");
    let name = database.name();
    for (url, kind, says) in [
        (url("postgres:wr0ng", name), ErrorKind::Permanent, "refused the password"),
        (url("nobody:wr0ng", name), ErrorKind::Permanent, "refused the password"),
        (url("postgres", name), ErrorKind::Permanent, "wants a password"),
        (url("postgres:s3cret", "nowhere"), ErrorKind::Permanent, "no database of that name"),
        (url(&format!("{limited}:s3cret"), name), ErrorKind::Transient, "no connection left"),
        (
            format!("postgres://postgres:s3cret@127.0.0.1:1/{name}"),
            ErrorKind::Transient,
            "connect to 127.0.0.1:1: nobody listens",
        ),
        (
            format!("postgres://postgres:s3cret@no-such-host.invalid/{name}?sslmode=disable"),
            ErrorKind::Transient,
            "connect to no-such-host.invalid:5432: ",
        ),
        (
            format!("postgres://postgres:s3cret@x/{name}?host=/no/such/folder"),
            ErrorKind::Transient,
            "x:5432",
        ),
    ] {
        let error = refusal(options(&url)).await;
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(error.to_string().contains(says), "{error:?}");
        assert!(!error.chain().contains("s3cret") && !error.chain().contains("wr0ng"), "{error:?}");
    }
    let words = format!("host=127.0.0.1 port={port} user=postgres password=s3cret dbname={name}");
    open(&words).await;
    database.psql(&format!("drop role {limited}")).expect("psql");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_hosts_the_one_that_takes_writes_is_used() {
    let primary = launch();
    let standby = primary.standby().expect("a standby");
    let database = primary.create_database().expect("a database");
    let there = "select count(*) from pg_database where datname = '";
    let deadline = Instant::now() + SOON;
    let there = format!("{there}{}'", database.name());
    while standby.psql("postgres", &there).expect("psql") != "1" {
        assert!(Instant::now() < deadline, "replicated");
        std::thread::sleep(Duration::from_millis(20));
    }
    let hosts = |last: u16| {
        let (name, standby) = (database.name(), standby.port());
        format!("postgres://postgres@127.0.0.1:1,127.0.0.1:{standby},127.0.0.1:{last}/{name}")
    };
    let store = open(&hosts(primary.port())).await;
    let port = ask(&store, "select current_setting('port')").await.expect("connected");
    assert_eq!(port, primary.port().to_string());
    let error = refusal(options(&hosts(2))).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    let text = error.to_string();
    for says in ["127.0.0.1:1: nobody", "the server is read-only", "127.0.0.1:2: nobody"] {
        assert!(text.contains(says), "{text}");
    }
}

/// What the driver needs a name for, it asks the server by statements with names, which a pooler
/// mixes up.
#[tokio::test(flavor = "multi_thread")]
async fn no_statement_of_the_store_stays_in_the_session() {
    let database = shared(Version::V18).expect("a server");
    let store = PostgresStore::open(options(&database.url()).connections(1)).await.expect("open");
    let prepared = "select count(*)::text from pg_prepared_statements";
    assert_eq!(ask(&store, prepared).await.expect("connected"), "0");
    let (client, wire) = tokio_postgres::connect(&database.url(), NoTls).await.expect("connect");
    tokio::spawn(wire);
    client.query_typed("select $1", &[(&1_i64, Type::INT8)]).await.expect("query");
    let rows = client.query_typed(prepared, &[]).await.expect("query");
    assert_eq!(rows[0].get::<_, &str>(0), "0", "a typed query has no name");
}
