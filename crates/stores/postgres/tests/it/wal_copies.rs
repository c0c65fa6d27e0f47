//! Another copy of the database takes the place of the one that was read.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Options, Server, Shutdown, Version};
use postrider_servers::proxy::Proxy;
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use crate::support::*;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    an_older_copy_of_the_files_is_read_from_its_own_checkpoint
    an_older_copy_that_was_written_to_is_known_by_its_checkpoint
    a_lagging_standby_is_promoted
}

fn address(server: &Server) -> SocketAddr {
    ([127, 0, 0, 1], server.port()).into()
}

struct Place {
    cluster: Cluster,
    proxy: Proxy,
    taker: Taker,
}

impl Place {
    async fn new(version: Version) -> Self {
        Self::with(Options::new(version)).await
    }

    async fn with(options: Options) -> Self {
        let cluster = Cluster::with(options).await;
        let proxy = Proxy::start(address(&cluster.server)).expect("a proxy");
        let port = format!(":{}/", cluster.server.port());
        let url = cluster.database.url().replace(&port, &format!(":{}/", proxy.port()));
        Self { cluster, proxy, taker: Taker::new(url) }
    }

    async fn append(&self, numbers: std::ops::Range<u32>) {
        for number in numbers {
            let key = format!("k{}", number % 2);
            self.cluster.append(&[(&key, &number.to_string())]).await;
        }
    }

    /// A session of the same database on another server.
    async fn session_on(&self, server: &Server) -> Client {
        session(&server.url("postgres", self.cluster.database.name())).await
    }

    async fn stop(&self) {
        let server = Arc::clone(&self.cluster.server);
        let stopped = tokio::task::spawn_blocking(move || server.stop(Shutdown::Immediate));
        stopped.await.expect("no panic").expect("stop");
    }

    /// Waits until the reader is fenced, and reads again from the copy's checkpoint.
    async fn fenced(&mut self) {
        let error = self.taker.told(&["copy"], Duration::from_secs(15)).await;
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        println!("{}", error.chain());
        // What the copy lacks is gone: its numbers are given again.
        self.taker.had.clear();
        self.taker.errors.clear();
        self.taker.begin_again().await;
    }
}

async fn insert(session: &Client, payload: &str) {
    let sql = format!("SELECT postrider.append('k0', 't', 'T', '{payload}'::bytea)");
    session.execute(&sql, &[]).await.expect("append");
}

/// Nothing was refused since the copy's checkpoint was read.
fn confirmed_all(taker: &Taker) {
    let errors = taker.errors.iter().filter(|error| error.kind() != ErrorKind::Transient);
    let errors: Vec<_> = errors.map(Error::chain).collect();
    assert!(errors.is_empty() && taker.unconfirmed() == 0, "{errors:#?}");
}

/// What is in the table beyond the copy's checkpoint must come; what was before it may not.
async fn judge(taker: &mut Taker, session: &Client, from: &[&str], last: &str) {
    taker.until(last, PATIENCE).await;
    taker.idle(Duration::from_millis(300)).await;
    let mut found: Vec<_> = taker.had.iter().map(|(_, _, payload)| payload.as_str()).collect();
    found.sort_unstable();
    let mut from = from.to_vec();
    from.sort_unstable();
    assert_eq!(found, from);
    confirmed_all(taker);
    taker.judge_order(&committed(session).await);
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// W29: the copy's log ends below what was confirmed. 0 and 1 were confirmed when it was made.
async fn an_older_copy_of_the_files_is_read_from_its_own_checkpoint(version: Version) {
    let mut place = Place::new(version).await;
    place.append(0..2).await;
    place.taker.until("1", PATIENCE).await;
    place.append(2..3).await;
    let server = Arc::clone(&place.cluster.server);
    let copy = blocking(move || server.restored_backup().expect("a copy")).await;
    place.append(3..20).await;
    place.taker.until("19", PATIENCE).await;
    place.stop().await;
    place.proxy.switch_upstream(address(&copy));
    place.fenced().await;
    let session = place.session_on(&copy).await;
    insert(&session, "new").await;
    judge(&mut place.taker, &session, &["2", "new"], "new").await;
}

/// W29: the copy was written to before it was read, so that its log ends beyond what was confirmed
/// and its transactions have the numbers of others.
async fn an_older_copy_that_was_written_to_is_known_by_its_checkpoint(version: Version) {
    let mut place = Place::new(version).await;
    place.append(0..2).await;
    place.taker.until("1", PATIENCE).await;
    let server = Arc::clone(&place.cluster.server);
    let copy = blocking(move || server.restored_backup().expect("a copy")).await;
    place.append(2..20).await;
    place.taker.until("19", PATIENCE).await;
    // Until a base that sees all of it is adopted; that takes events after it.
    let own = place.cluster.session().await;
    let deadline = Instant::now() + PATIENCE;
    let mut number = 20;
    while one::<i64>(&own, "SELECT max(seq) FROM postrider.wal_base").await < 20 {
        assert!(Instant::now() < deadline, "no base is adopted");
        place.append(number..number + 1).await;
        place.taker.until(&number.to_string(), PATIENCE).await;
        place.taker.idle(Duration::from_millis(50)).await;
        number += 1;
    }
    drop(own);
    place.stop().await;
    let session = place.session_on(&copy).await;
    let names: Vec<String> = (0..60 + number).map(|n| format!("new {n}")).collect();
    for name in &names {
        insert(&session, name).await;
    }
    session.execute("SELECT pg_switch_wal()", &[]).await.expect("switch");
    session.execute("SELECT pg_switch_wal()", &[]).await.expect("switch");
    place.proxy.switch_upstream(address(&copy));
    place.fenced().await;
    insert(&session, "last").await;
    let all: Vec<&str> = names.iter().map(String::as_str).chain(["last"]).collect();
    judge(&mut place.taker, &session, &all, "last").await;
}

/// The standby has not got 3 to 9, which were confirmed; they are lost with the primary.
async fn a_lagging_standby_is_promoted(version: Version) {
    let mut place = Place::new(version).await;
    let server = Arc::clone(&place.cluster.server);
    let standby = Arc::new(blocking(move || server.standby().expect("a standby")).await);
    place.append(0..2).await;
    place.taker.until("1", PATIENCE).await;
    place.append(2..3).await;
    let written = place.cluster.server.psql("postgres", "select pg_current_wal_insert_lsn()");
    let replayed = format!("select pg_last_wal_replay_lsn() >= '{}'", written.expect("psql"));
    let deadline = Instant::now() + PATIENCE;
    while standby.psql("postgres", &replayed).expect("psql") != "t" {
        assert!(Instant::now() < deadline, "the standby is too slow");
        sleep(Duration::from_millis(20)).await;
    }
    standby.psql("postgres", "alter system set primary_conninfo = ''").expect("psql");
    standby.psql("postgres", "select pg_reload_conf()").expect("psql");
    while standby.psql("postgres", "select count(*) from pg_stat_wal_receiver").expect("psql")
        != "0"
    {
        assert!(Instant::now() < deadline, "the standby still follows");
        sleep(Duration::from_millis(20)).await;
    }
    place.append(3..10).await;
    place.taker.until("9", PATIENCE).await;
    place.stop().await;
    let promoted = Arc::clone(&standby);
    blocking(move || promoted.promote().expect("promote")).await;
    place.proxy.switch_upstream(address(&standby));
    place.fenced().await;
    let session = place.session_on(&standby).await;
    insert(&session, "new").await;
    place.taker.until("new", PATIENCE).await;
    place.taker.idle(Duration::from_millis(300)).await;
    assert!(place.taker.has("2") || !has(&session, "2").await, "2 is in the table");
    assert!(!place.taker.has("9"), "it is lost");
    confirmed_all(&place.taker);
    place.taker.judge_order(&committed(&session).await);
}

async fn has(session: &Client, payload: &str) -> bool {
    committed(session).await.contains_key(payload)
}

/// A failover slot (17 and later): the promoted standby's copy of the slot is read on, and nothing
/// is read from the table.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_slot_carries_on() {
    let mut place = Place::with(Options::new(Version::V18)).await;
    place.append(0..2).await;
    place.taker.until("1", PATIENCE).await;
    let server = Arc::clone(&place.cluster.server);
    let physical = "select pg_create_physical_replication_slot('standby', true)";
    server.psql("postgres", physical).expect("psql");
    let standby = Arc::new(blocking(move || server.standby().expect("a standby")).await);
    let primary = format!("host=127.0.0.1 port={} user=postgres", place.cluster.server.port());
    for setting in [
        format!("primary_conninfo = '{primary} dbname=postgres'"),
        "primary_slot_name = 'standby'".to_owned(),
        "hot_standby_feedback = on".to_owned(),
        "sync_replication_slots = on".to_owned(),
    ] {
        standby.psql("postgres", &format!("alter system set {setting}")).expect("psql");
    }
    standby.psql("postgres", "select pg_reload_conf()").expect("psql");
    let synced = "select count(*) from pg_replication_slots
        where slot_name = 'postrider_outbox' and synced and not temporary";
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut number = 2;
    while standby.psql("postgres", synced).expect("psql") != "1" {
        assert!(Instant::now() < deadline, "the slot is not copied: {}", standby.log_tail());
        place.append(number..number + 1).await;
        place.taker.until(&number.to_string(), PATIENCE).await;
        number += 1;
        place.taker.idle(Duration::from_millis(300)).await;
    }
    let written = place.cluster.server.psql("postgres", "select pg_current_wal_insert_lsn()");
    let replayed = format!("select pg_last_wal_replay_lsn() >= '{}'", written.expect("psql"));
    while standby.psql("postgres", &replayed).expect("psql") != "t" {
        assert!(Instant::now() < deadline, "the standby is too slow");
        sleep(Duration::from_millis(20)).await;
    }
    place.stop().await;
    let promoted = Arc::clone(&standby);
    blocking(move || promoted.promote().expect("promote")).await;
    place.proxy.switch_upstream(address(&standby));
    let before = place.taker.wal().await.counts().catch_ups;
    place.fenced().await;
    let session = place.session_on(&standby).await;
    for name in ["new 1", "new 2"] {
        insert(&session, name).await;
    }
    judge(&mut place.taker, &session, &["new 1", "new 2"], "new 2").await;
    assert_eq!(place.taker.wal().await.counts().catch_ups, before, "read from the table");
}
