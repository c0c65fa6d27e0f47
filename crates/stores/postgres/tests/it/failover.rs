//! Another copy of the database takes over.
//!
//! What lives here: a standby that is promoted behind a fixed address, also with a pooler in
//! between, and a primary that takes no more writes. What does not: the relay, which is tested
//! where relays are.
//! Invariant: a copy may lack what was acknowledged, so nothing goes on under a lease of the old
//! one.

use std::time::{Duration, Instant};

use postrider_core::{
    Acquired, BatchLimit, Checkpoints, ConsumerName, Entry, ErrorKind, Feed, FeedPage, GroupName,
    HeldLease, Leases, PartitionId, Position, RelayId, Renewal, Result, Tally,
};
use postrider_servers::pgbouncer::PgBouncer;
use postrider_servers::postgres::{Options, Server, Version};
use postrider_servers::proxy::Proxy;
use postrider_store_postgres::{PostgresOptions, PostgresStore};

use crate::connections::{ask, open};
use crate::pooler::append;

/// For what comes at once but for a busy machine.
const SOON: Duration = Duration::from_secs(30);
const PORT: &str = "select current_setting('port')";

fn address(server: &Server) -> std::net::SocketAddr {
    ([127, 0, 0, 1], server.port()).into()
}

/// Polls until the standby has all that the primary has written.
fn caught_up(primary: &Server, standby: &Server) {
    let written = primary.psql("postgres", "select pg_current_wal_insert_lsn()").expect("psql");
    let replayed = format!("select pg_last_wal_replay_lsn() >= '{written}'");
    let deadline = Instant::now() + SOON;
    while standby.psql("postgres", &replayed).expect("psql") != "t" {
        assert!(Instant::now() < deadline, "the standby is too slow");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_standby_takes_over_behind_the_same_address() {
    let primary = Options::new(Version::V18).launch().expect("a server");
    let standby = primary.standby().expect("a standby");
    let proxy = Proxy::start(address(&primary)).expect("a proxy");
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let store = open(&url).await;
    assert_eq!(ask(&store, PORT).await.expect("connected"), primary.port().to_string());
    caught_up(&primary, &standby);
    primary.kill().expect("kill");
    proxy.switch_upstream(address(&standby));
    // It takes no writes yet: whoever asks is told to come again.
    let mut refused = ask(&store, PORT).await.expect_err("a standby");
    if !refused.to_string().contains("read-only") {
        refused = ask(&store, PORT).await.expect_err("a standby");
    }
    assert_eq!(refused.kind(), ErrorKind::Transient);
    assert!(refused.to_string().contains("read-only"), "{refused:?}");
    standby.promote().expect("promote");
    assert_eq!(ask(&store, PORT).await.expect("promoted"), standby.port().to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_takes_no_more_writes_is_left() {
    let server = Options::new(Version::V15).launch().expect("a server");
    let database = server.create_database().expect("a database");
    let store = open(&database.url()).await;
    database.psql("create table t (n bigint)").expect("psql");
    let write = "with w as (insert into t values (1) returning n)
        select pg_backend_pid()::text from w";
    let before = ask(&store, write).await.expect("it takes writes");
    let set = |value| {
        let sql = format!("alter system set default_transaction_read_only = {value}");
        server.psql("postgres", &sql).expect("psql");
        server.psql("postgres", "select pg_reload_conf()").expect("psql");
    };
    set("on");
    let deadline = Instant::now() + SOON;
    let error = loop {
        match ask(&store, write).await {
            Ok(_) => assert!(Instant::now() < deadline, "the setting came into force"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("read-only"), "{error:?}");
    // Another connection is tried, and another server would be found by it.
    let error = ask(&store, write).await.expect_err("still read-only");
    assert!(error.to_string().starts_with("connect to "), "{error:?}");
    set("off");
    let after = loop {
        match ask(&store, write).await {
            Ok(pid) => break pid,
            Err(error) => assert!(Instant::now() < deadline, "{error:?}"),
        }
    };
    assert_ne!(before, after, "a connection that was refused writes was used again");
}

/// One relay's work on the only partition.
struct Work {
    store: PostgresStore,
    partition: PartitionId,
    consumer: ConsumerName,
    lease: HeldLease,
}

const TTL: Duration = Duration::from_secs(60);

impl Work {
    async fn begin(url: &str) -> Self {
        let store = PostgresStore::open(PostgresOptions::new(url).partitions(1)).await;
        let store = store.expect("open");
        let (partition, lease) = (PartitionId::numbered(0, 1), acquire(&store).await);
        Self { store, partition, consumer: ConsumerName::new("sink").expect("a name"), lease }
    }

    async fn advance(&self, to: &Position) -> Result<()> {
        self.store.advance(&self.lease, &self.consumer, to, Tally::default()).await
    }

    async fn read(&self, after: &Position) -> Result<FeedPage> {
        let limit = BatchLimit { records: 100, bytes: 1 << 20 };
        Feed::read(&self.store, &self.partition, after, limit).await
    }

    /// Appends an event and reads it; returns the position after it.
    async fn append_and_read(&self, key: &str, after: &Position) -> Position {
        append(&self.store, key).await.expect("append");
        let page = self.read(after).await.expect("read");
        assert_eq!(keys(&page), [key]);
        page.position
    }

    /// What a relay meets that goes on from memory, and what it then does.
    async fn is_fenced_once(&mut self, kept: &Position, lost: &Position, change: &str) {
        let fenced = refused(|| self.advance(lost)).await;
        assert_eq!(fenced.kind(), ErrorKind::Fenced, "{fenced:?}");
        assert!(fenced.to_string().contains(change), "{fenced:?}");
        let fenced = refused(|| self.read(lost)).await;
        assert_eq!(fenced.kind(), ErrorKind::Fenced, "{fenced:?}");
        let renewed = self.store.renew(&[&self.lease], TTL).await.expect("renew");
        assert_eq!(renewed, [Renewal::Lost]);
        // It steps down, acquires anew, and begins from the checkpoint that is there.
        self.lease = acquire(&self.store).await;
        let renewed = self.store.renew(&[&self.lease], TTL).await.expect("renew");
        assert_eq!(renewed, [Renewal::Renewed]);
        let found = self.store.checkpoint(&self.consumer, &self.partition).await.expect("read");
        assert_eq!(&found.expect("a checkpoint").position, kept);
        let after = self.append_and_read("on the copy", kept).await;
        self.advance(&after).await.expect("advance");
    }
}

fn key(entry: &Entry) -> &str {
    match entry {
        Entry::Record(record) => record.event.key().as_str(),
        Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
    }
}

fn keys(page: &FeedPage) -> Vec<&str> {
    page.entries.iter().map(key).collect()
}

async fn acquire(store: &PostgresStore) -> HeldLease {
    let (group, relay) = (GroupName::new("g").expect("a name"), RelayId::new("r").expect("a name"));
    match store.acquire(&group, &PartitionId::numbered(0, 1), &relay, TTL).await {
        Ok(Acquired::Held(lease)) => lease,
        other => panic!("not granted: {other:?}"),
    }
}

/// The first error that is no passing one.
async fn refused<T, F: Future<Output = Result<T>>>(call: impl Fn() -> F) -> postrider_core::Error {
    let deadline = Instant::now() + SOON;
    loop {
        match call().await {
            Ok(_) => panic!("it was done on another copy"),
            Err(error) if error.kind() != ErrorKind::Transient => return error,
            Err(error) => assert!(Instant::now() < deadline, "{error:?}"),
        }
    }
}

fn cut_off(standby: &Server) {
    standby.psql("postgres", "alter system set primary_conninfo = ''").expect("psql");
    standby.psql("postgres", "select pg_reload_conf()").expect("psql");
    let deadline = Instant::now() + SOON;
    let receives = "select count(*) from pg_stat_wal_receiver";
    while standby.psql("postgres", receives).expect("psql") != "0" {
        assert!(Instant::now() < deadline, "it still follows");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A standby is promoted that lacks what the primary acknowledged last.
async fn nothing_goes_on_from_memory(through_a_pooler: bool) {
    let primary = Options::new(Version::V15).launch().expect("a server");
    let standby = primary.standby().expect("a standby");
    let proxy = Proxy::start(address(&primary)).expect("a proxy");
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let bouncer = through_a_pooler.then(|| PgBouncer::start(&url, &[]).expect("a pooler"));
    let url = bouncer.as_ref().map_or(url, |bouncer| bouncer.url("postgres"));
    let mut work = Work::begin(&url).await;
    let kept = work.append_and_read("before", &Position::START).await;
    work.advance(&kept).await.expect("advance");
    caught_up(&primary, &standby);
    cut_off(&standby);
    let lost = work.append_and_read("lost", &kept).await;
    work.advance(&lost).await.expect("advance");
    primary.kill().expect("kill");
    standby.promote().expect("promote");
    proxy.switch_upstream(address(&standby));
    work.is_fenced_once(&kept, &lost, "timeline 1 → 2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_copy_fences_whoever_worked_on_the_one_before() {
    nothing_goes_on_from_memory(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_copy_is_noticed_through_a_pooler() {
    nothing_goes_on_from_memory(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_state_of_the_same_files_is_noticed() {
    let primary = Options::new(Version::V15).launch().expect("a server");
    let proxy = Proxy::start(address(&primary)).expect("a proxy");
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let mut work = Work::begin(&url).await;
    let kept = work.append_and_read("before", &Position::START).await;
    work.advance(&kept).await.expect("advance");
    let backup = primary.restored_backup().expect("a backup");
    let lost = work.append_and_read("lost", &kept).await;
    work.advance(&lost).await.expect("advance");
    // Each new connection tells how far the log is written by now.
    let many = (0..4).map(|_| ask(&work.store, "select pg_sleep(0.2)::text"));
    futures_util::future::try_join_all(many).await.expect("connected");
    primary.kill().expect("kill");
    proxy.switch_upstream(address(&backup));
    work.is_fenced_once(&kept, &lost, "an earlier state of the same timeline").await;
}
