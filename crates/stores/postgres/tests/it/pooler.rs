//! PgBouncer in transaction mode, which gives each transaction the next free server connection.
//!
//! What lives here: that the store opens and works through it, that its time-outs hold, and that
//! nothing of it stays in a session that the next client gets. What does not: the store's behaviour
//! as a whole.
//! Invariant: a bound on time that a pooler refuses at the start of a session is set for each
//! transaction, and ends with it.

use std::time::{Duration, Instant};

use postrider_core::{
    BatchLimit, ConsumerName, ContentType, Entry, ErrorKind, EventType, Feed, Key, NewEvent,
    Position, Result, Topic,
};
use postrider_servers::pgbouncer::PgBouncer;
use postrider_servers::postgres::{Database, Version, shared};
use postrider_store_postgres::{OnDuplicate, PostgresOptions, PostgresStore, tokio_postgres};

use crate::connections::ask;

fn behind(database: &Database) -> PgBouncer {
    PgBouncer::start(&database.url(), &[]).expect("a pooler")
}

pub(crate) async fn append(store: &PostgresStore, key: &str) -> Result<()> {
    let (topic, event_type) = (Topic::new("topic")?, EventType::new("Happened")?);
    let event = NewEvent::builder(Key::new(key)?, topic, event_type)
        .payload(ContentType::new("text/plain")?, &b"{}"[..])
        .build()?;
    let work = store.clone();
    store
        .transaction(|tx| {
            Box::pin(async move { work.append(tx, &[event], OnDuplicate::Fail).await.map(drop) })
        })
        .await
}

/// All keys of a feed, read once.
async fn keys(store: &PostgresStore) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for partition in store.partitions(&ConsumerName::new("test")?).await? {
        let limit = BatchLimit { records: 1_000, bytes: 1 << 20 };
        let mut after = Position::START;
        loop {
            let page = Feed::read(store, &partition, &after, limit).await?;
            if page.entries.is_empty() {
                break;
            }
            after = page.position;
            found.extend(page.entries.iter().map(|entry| match entry {
                Entry::Record(record) => record.event.key().as_str().to_owned(),
                Entry::Malformed(malformed) => panic!("unreadable: {malformed:?}"),
            }));
        }
    }
    found.sort();
    Ok(found)
}

async fn works_through_a_pooler(version: Version) {
    let database = shared(version).expect("a server");
    let bouncer = behind(&database);
    let url = bouncer.url(database.name());
    let options = || PostgresOptions::new(&url).partitions(4).connections(12);
    // Two at once: the second finds the tables of the first.
    let (one, two) = tokio::join!(PostgresStore::open(options()), PostgresStore::open(options()));
    let (store, _two) = (one.expect("open"), two.expect("open"));
    let wanted: Vec<String> = (0..40).map(|number| format!("key-{number:02}")).collect();
    // More clients than the pooler has servers.
    futures_util::future::try_join_all(wanted.iter().map(|key| append(&store, key)))
        .await
        .expect("append");
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut found = Vec::new();
    while found != wanted && Instant::now() < deadline {
        found = keys(&store).await.expect("read");
    }
    assert_eq!(found, wanted);
    leaves_nothing_behind(&bouncer, &database).await;
}

/// Asks every server connection of the pooler what it has kept.
async fn leaves_nothing_behind(bouncer: &PgBouncer, database: &Database) {
    let kept = "select concat_ws(' ', current_setting('statement_timeout'),
        current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'),
        (select count(*) from pg_prepared_statements),
        (select count(*) from pg_listening_channels()),
        (select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'))
        from pg_sleep(0.2)";
    let asked = (0..5).map(|_| async {
        let url = bouncer.url(database.name());
        let (client, wire) =
            tokio_postgres::connect(&url, tokio_postgres::NoTls).await.expect("connect");
        tokio::spawn(wire);
        let rows = client.query_typed(kept, &[]).await.expect("query");
        rows[0].get::<_, String>(0)
    });
    for kept in futures_util::future::join_all(asked).await {
        assert_eq!(kept, "0 0 0 0 0 0");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_works_through_a_pooler_15() {
    works_through_a_pooler(Version::V15).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_works_through_a_pooler_18() {
    works_through_a_pooler(Version::V18).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_drops_the_settings_unheard_is_noticed() {
    let database = shared(Version::V15).expect("a server");
    let ignores = ["ignore_startup_parameters = extra_float_digits,options"];
    let bouncer = PgBouncer::start(&database.url(), &ignores).expect("a pooler");
    let options = PostgresOptions::new(bouncer.url(database.name()));
    bounds_time(options).await;
    leaves_nothing_behind(&bouncer, &database).await;
}

/// What the store asks for can be what the server does anyway; only a mark of its own tells whether
/// its settings arrived. Two stores of two outboxes share few sessions: with prepared statements in
/// them, each would run the other's.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_in_front_of_a_server_with_the_same_time_outs_is_noticed() {
    let database = shared(Version::V15).expect("a server");
    let direct = crate::support::session(&database.url()).await;
    let same = format!("ALTER DATABASE {} SET statement_timeout = '30s'", database.name());
    direct.batch_execute(&same).await.expect("set");
    let ignores = ["ignore_startup_parameters = extra_float_digits,options"];
    let bouncer = PgBouncer::start(&database.url(), &ignores).expect("a pooler");
    let options = PostgresOptions::new(bouncer.url(database.name())).partitions(4);
    let one = PostgresStore::open(options.clone()).await.expect("open");
    let two = PostgresStore::open(options.outbox("two")).await.expect("open");
    for number in 0..40 {
        append(&one, &format!("one-{number:02}")).await.expect("append");
        append(&two, &format!("two-{number:02}")).await.expect("append");
    }
    for (store, name) in [(&one, "one"), (&two, "two")] {
        let wanted: Vec<String> = (0..40).map(|number| format!("{name}-{number:02}")).collect();
        let deadline = Instant::now() + Duration::from_secs(20);
        while keys(store).await.expect("read") != wanted {
            assert!(Instant::now() < deadline, "{name}");
        }
    }
    let kept = ask(&one, "select count(*)::text from pg_prepared_statements").await;
    assert_eq!(kept.expect("an answer"), "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn time_is_bounded_behind_a_pooler() {
    let database = shared(Version::V15).expect("a server");
    let bouncer = behind(&database);
    bounds_time(PostgresOptions::new(bouncer.url(database.name()))).await;
    leaves_nothing_behind(&bouncer, &database).await;
}

async fn bounds_time(options: PostgresOptions) {
    let limit = Duration::from_millis(1_500);
    let store = PostgresStore::open(options.statement_timeout(limit)).await.expect("open");
    let begun = Instant::now();
    let error = ask(&store, "select pg_sleep(30)::text").await.expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("ran into its time-out"), "{error:?}");
    assert!(begun.elapsed() < limit * 2, "{:?}", begun.elapsed());
    let pid = ask(&store, "select pg_backend_pid()::text").await;
    pid.expect("the next one works");
}
