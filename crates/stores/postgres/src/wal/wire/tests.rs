//! Replication against real servers.
//!
//! What lives here: being let in, slots and their seams, statuses, refusals and ends, on both
//! versions. What does not: bytes made by hand (`frames.rs`, `login.rs`, `pgoutput.rs`).
//! Invariant: what a test waits for is asked of the server, never slept for.

use std::collections::BTreeSet;
use std::sync::Arc;

use postrider_core::ErrorKind;
use postrider_servers::pgbouncer::PgBouncer;
use postrider_servers::postgres::{Database, Options, Server, Shutdown, Version, shared};
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::{Client, NoTls};

use super::*;
use crate::PostgresOptions;
use crate::error::code_of;
use crate::wal::pgoutput::{Message, decode};
use crate::wal::tuple::Value;

const PATIENCE: Duration = Duration::from_secs(20);

/// Lists each of the tests, functions of a version, for both versions of the server.
macro_rules! on_both_versions {
    ($($name:ident)*) => {
        mod on_15 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(postrider_servers::postgres::Version::V15).await;
            })*
        }
        mod on_18 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(postrider_servers::postgres::Version::V18).await;
            })*
        }
    };
}

on_both_versions! {
    passwords_are_proven_by_scram_md5_and_clear_text
    a_seam_divides_what_the_snapshot_shows_from_what_the_stream_brings
    a_permanent_slots_seam_is_the_same
    a_status_moves_the_slot_and_an_end_leaves_it_there
    a_slot_in_use_names_its_reader_and_lets_others_wait
    a_refused_command_leaves_the_connection_ready
    what_is_used_up_or_not_allowed_is_told_apart
    a_standby_is_passed_over_unless_any_server_will_do
    a_server_that_stops_ends_the_stream
}

async fn database(version: Version) -> Database {
    let made = tokio::task::spawn_blocking(move || shared(version).expect("a server")).await;
    made.expect("it does not panic")
}

fn servers(url: &str) -> Servers {
    Servers::new(&PostgresOptions::new(url), Arc::default()).expect("options")
}

async fn walsender(url: &str) -> Walsender {
    Walsender::connect(&servers(url)).await.expect("let in")
}

/// The server counts one that it refused until that has ended.
async fn once_let_in(url: &str) -> Walsender {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match Walsender::connect(&servers(url)).await {
            Ok(walsender) => return walsender,
            Err(error) => {
                let in_time = Instant::now() < deadline;
                assert!(in_time && code_of(&error) == Some("53300"), "{error:?}");
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
}

async fn refusal(url: &str) -> Error {
    let refused = Walsender::connect(&servers(url)).await;
    let error = refused.map(|_| ()).expect_err("not let in");
    assert!(!error.chain().contains("s3cret"), "{error:?}");
    error
}

async fn session(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect");
    #[expect(clippy::disallowed_methods, reason = "it ends with its client")]
    tokio::spawn(connection);
    client
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.expect(sql);
}

async fn one<T>(client: &Client, sql: &str) -> T
where
    T: for<'a> tokio_postgres::types::FromSql<'a>,
{
    client.query_one(sql, &[]).await.expect(sql).get(0)
}

const TABLE: &str = "CREATE TABLE things (id bigint PRIMARY KEY, text text);
    CREATE PUBLICATION pub FOR TABLE things";

fn options() -> [(&'static str, String); 2] {
    [("proto_version", "1".to_owned()), ("publication_names", "\"pub\"".to_owned())]
}

/// A name that no other database's slot has: slots belong to the cluster.
fn slot_of(database: &Database) -> String {
    format!("slot_{}", database.name().replace(|letter: char| !letter.is_ascii_alphanumeric(), "_"))
}

/// Reads until this many ids of the table have come. Also returns where the last commit ended.
async fn ids(walsender: &mut Walsender, count: usize) -> (BTreeSet<i64>, Lsn) {
    let (mut found, mut ended) = (BTreeSet::new(), Lsn(0));
    let read = async {
        while found.len() < count || ended == Lsn(0) {
            let Frame::Data { payload, .. } = walsender.next().await.expect("a frame") else {
                continue;
            };
            match decode(payload, false).expect("a message") {
                Message::Insert { new, .. } => {
                    ended = Lsn(0);
                    let Some(Value::Text(id)) = new.values().next() else { panic!("an id") };
                    let id = std::str::from_utf8(id).expect("text").parse().expect("a number");
                    assert!(found.insert(id), "{id} came twice");
                }
                Message::Commit { end, .. } => ended = end,
                _ => {}
            }
        }
    };
    timeout(PATIENCE, read).await.expect("in time");
    (found, ended)
}

async fn confirmed(client: &Client, slot: &str) -> Option<Lsn> {
    let sql = format!(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"
    );
    one::<Option<String>>(client, &sql).await.map(|text| Lsn::parse(&text).expect("a place"))
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}");
        sleep(Duration::from_millis(5)).await;
    }
}

fn private(options: Options) -> Server {
    options.launch().expect("a server")
}

/// Lets whoever comes to 127.0.0.1 prove the password in this way.
async fn hba(server: &Server, way: &str) {
    std::fs::write(server.data().join("pg_hba.conf"), format!("host all all 127.0.0.1/32 {way}\n"))
        .expect("write");
    server.restart(Shutdown::Fast).expect("restart");
}

async fn passwords_are_proven_by_scram_md5_and_clear_text(version: Version) {
    let server = private(Options::new(version).password("s3cret"));
    let port = server.port();
    let url = |login: &str| format!("postgres://{login}@127.0.0.1:{port}/postgres");
    let made = walsender(&url("postgres:s3cret")).await;
    assert_eq!(made.version() / 10_000, version.major());
    let error = refusal(&url("postgres:s3cretx")).await;
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Permanent, Some("28P01")));
    assert!(error.to_string().contains("refused the password"), "{error:?}");
    let error = refusal(&url("postgres")).await;
    assert!(error.to_string().contains("lacks what the url demands"), "{error:?}");
    let bound = format!("{}?channel_binding=require", url("postgres:s3cret"));
    assert!(refusal(&bound).await.to_string().contains("lacks what the url demands"));
    let roles = "SET password_encryption = md5; CREATE ROLE old LOGIN REPLICATION PASSWORD 'pass'";
    server.psql("postgres", roles).expect("a role");
    hba(&server, "md5").await;
    walsender(&url("old:pass")).await;
    assert_eq!(code_of(&refusal(&url("old:s3cret")).await), Some("28P01"));
    hba(&server, "password").await;
    walsender(&url("old:pass")).await;
    assert_eq!(code_of(&refusal(&url("old:s3cret")).await), Some("28P01"));
    hba(&server, "reject").await;
    let error = refusal(&url("old:pass")).await;
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Permanent, Some("28000")));
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_carries_it_and_binds_the_password_to_the_channel() {
    let server = private(Options::new(Version::V15).tls().password("s3cret"));
    let (port, file) = (server.port(), server.certificate_authority().expect("TLS"));
    let known = format!("sslrootcert={}", file.display());
    let url = format!("postgres://postgres:s3cret@127.0.0.1:{port}/postgres");
    for more in ["channel_binding=require", "channel_binding=disable", "sslmode=verify-ca"] {
        let mut made = walsender(&format!("{url}?{known}&{more}")).await;
        let sql = "SELECT ssl::text FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        assert_eq!(cell(&made.query(sql).await.expect("rows"), 0).expect("one"), "true", "{more}");
    }
    let error = refusal(&format!("{url}?sslmode=verify-full")).await;
    assert!(error.kind() == ErrorKind::Permanent && error.to_string().contains("ca_file"));
    let plain = private(Options::new(Version::V15));
    let error = refusal(&format!("{}?sslmode=require", plain.url("postgres", "postgres"))).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("offers no TLS"), "{error:?}");
}

/// Rows are written before, during and after the slot is made; each is in the snapshot or in the
/// stream, and none in both.
async fn divided_by(version: Version, kind: SlotKind) {
    let database = database(version).await;
    let (url, slot) = (database.url(), slot_of(&database));
    let (client, late) = (session(&url).await, session(&url).await);
    run(&client, TABLE).await;
    run(&client, "INSERT INTO things SELECT generate_series(1, 100), 'early'").await;
    // Began before the slot and commits after it.
    let mut made = walsender(&url).await;
    let seam = made.create_slot(&slot, kind).await.expect("a slot");
    run(&late, "INSERT INTO things SELECT generate_series(101, 150), 'late'").await;
    let snapshot = session(&url).await;
    run(&snapshot, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    run(&snapshot, &format!("SET TRANSACTION SNAPSHOT '{}'", seam.snapshot)).await;
    assert_eq!(one::<i64>(&snapshot, "SELECT count(*) FROM things").await, 100);
    run(&client, "INSERT INTO things SELECT generate_series(151, 200), NULL").await;
    made.start(&slot, seam.consistent, &options()).await.expect("a stream");
    let (found, _) = ids(&mut made, 100).await;
    assert_eq!(found, (101..=200).collect());
    let seen = "SELECT count(*) FROM things WHERE id <= 100";
    assert_eq!(one::<i64>(&snapshot, seen).await, 100, "an imported snapshot stays");
    assert_eq!(one::<i64>(&snapshot, "SELECT count(*) FROM things").await, 100);
    made.finish(seam.consistent).await.expect("an end");
    let left = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'");
    let permanent = i64::from(kind != SlotKind::Temporary);
    until("the slot's fate", async || one::<i64>(&client, &left).await == permanent).await;
    if let SlotKind::Permanent { failover: true } = kind
        && version == Version::V18
    {
        let sql = format!("SELECT failover FROM pg_replication_slots WHERE slot_name = '{slot}'");
        assert!(one::<bool>(&client, &sql).await);
    }
    if permanent == 1 {
        run(&client, &format!("SELECT pg_drop_replication_slot('{slot}')")).await;
    }
}

async fn a_seam_divides_what_the_snapshot_shows_from_what_the_stream_brings(version: Version) {
    divided_by(version, SlotKind::Temporary).await;
}

async fn a_permanent_slots_seam_is_the_same(version: Version) {
    divided_by(version, SlotKind::Permanent { failover: true }).await;
}

async fn a_status_moves_the_slot_and_an_end_leaves_it_there(version: Version) {
    let database = database(version).await;
    let (url, slot) = (database.url(), slot_of(&database));
    let client = session(&url).await;
    run(&client, TABLE).await;
    let mut made = walsender(&url).await;
    let seam =
        made.create_slot(&slot, SlotKind::Permanent { failover: false }).await.expect("made");
    run(&client, "INSERT INTO things VALUES (1, 'one')").await;
    made.start(&slot, seam.consistent, &options()).await.expect("a stream");
    let (_, first) = ids(&mut made, 1).await;
    assert!(first > seam.consistent);
    assert_eq!(confirmed(&client, &slot).await, Some(seam.consistent), "nothing was told");
    made.status(first, false).await.expect("sent");
    until("the slot moves", async || confirmed(&client, &slot).await == Some(first)).await;
    run(&client, "INSERT INTO things VALUES (2, 'two')").await;
    let (found, second) = ids(&mut made, 1).await;
    assert_eq!(found, BTreeSet::from([2]));
    made.finish(second).await.expect("an end");
    assert_eq!(confirmed(&client, &slot).await, Some(second));
    let mut again = walsender(&url).await;
    again.start(&slot, Lsn(0), &options()).await.expect("the slot is free");
    run(&client, "INSERT INTO things VALUES (3, 'three')").await;
    assert_eq!(ids(&mut again, 1).await.0, BTreeSet::from([3]), "the others were confirmed");
    again.finish(Lsn(0)).await.expect("an end");
    assert_eq!(confirmed(&client, &slot).await, Some(second), "it never moves back");
    run(&client, &format!("SELECT pg_drop_replication_slot('{slot}')")).await;
}

async fn a_slot_in_use_names_its_reader_and_lets_others_wait(version: Version) {
    let database = database(version).await;
    let (url, slot) = (database.url(), slot_of(&database));
    let client = session(&url).await;
    run(&client, TABLE).await;
    let mut first = walsender(&url).await;
    let kind = SlotKind::Permanent { failover: false };
    let seam = first.create_slot(&slot, kind).await.expect("made");
    first.start(&slot, seam.consistent, &options()).await.expect("a stream");
    let mut second = walsender(&url).await;
    let error = second.start(&slot, Lsn(0), &options()).await.expect_err("in use");
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Transient, Some("55006")));
    assert!(error.chain().contains(&format!("PID {}", first.pid())), "{error:?}");
    first.finish(Lsn(0)).await.expect("an end");
    let begins = async || second.start(&slot, Lsn(0), &options()).await.is_ok();
    until("it is free", begins).await;
    drop(second);
    let dropped = format!("SELECT pg_drop_replication_slot('{slot}')");
    until("it is free", async || client.batch_execute(&dropped).await.is_ok()).await;
}

async fn a_refused_command_leaves_the_connection_ready(version: Version) {
    let database = database(version).await;
    let mut made = walsender(&database.url()).await;
    let error = made.start("nobody_s", Lsn(0), &options()).await.expect_err("no slot");
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Permanent, Some("42704")));
    let error = made.start("a\"b", Lsn(0), &options()).await.expect_err("no name");
    assert!(error.kind() == ErrorKind::Permanent && code_of(&error).is_some(), "{error:?}");
    let error = made.query("SELECT 1/0").await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    let error = made.query("SELECT generate_series(1, 1001)").await.expect_err("too many");
    assert!(error.to_string().contains("too many rows"), "{error:?}");
    let rows = made.query("SELECT 'it''s', NULL, 7").await.expect("rows");
    assert_eq!(rows, [[Some("it's".to_owned()), None, Some("7".to_owned())]]);
    let settings = "SELECT current_setting('idle_in_transaction_session_timeout'),
        current_setting('statement_timeout'), current_setting('client_encoding'),
        current_setting('datestyle'), current_setting('application_name')";
    let rows = made.query(settings).await.expect("rows");
    let found: Vec<_> = rows[0].iter().map(|value| value.as_deref().expect("set")).collect();
    assert_eq!(found, ["0", "0", "UTF8", "ISO, MDY", "postrider"]);
    let system = made.identify().await.expect("itself");
    assert!(system.system > 0 && system.timeline == 1 && system.flushed > Lsn(0));
    // A command that was given up is not taken for the answer to the next.
    let given_up = timeout(Duration::from_millis(20), made.query("SELECT pg_sleep(60)")).await;
    assert!(given_up.is_err());
    let error = made.query("SELECT 1").await.expect_err("in the middle");
    assert!(error.to_string().contains("in the middle"), "{error:?}");
}

async fn what_is_used_up_or_not_allowed_is_told_apart(version: Version) {
    let few = ["max_wal_senders = 2", "max_replication_slots = 1"];
    let server = private(few.into_iter().fold(Options::new(version), Options::setting));
    server.psql("postgres", "CREATE ROLE plain LOGIN").expect("a role");
    let error = refusal(&server.url("plain", "postgres")).await;
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Permanent, Some("42501")));
    assert!(error.to_string().contains("REPLICATION"), "{error:?}");
    let error = refusal(&server.url("postgres", "nowhere")).await;
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Permanent, Some("3D000")));
    let url = server.url("postgres", "postgres");
    let mut first = once_let_in(&url).await;
    first.create_slot("one", SlotKind::Temporary).await.expect("a slot");
    let mut second = once_let_in(&url).await;
    let error = refusal(&url).await;
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Transient, Some("53300")));
    assert!(error.to_string().contains("max_wal_senders"), "{error:?}");
    let error = second.create_slot("two", SlotKind::Temporary).await.expect_err("used up");
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Transient, Some("53400")));
    assert!(error.to_string().contains("max_replication_slots"), "{error:?}");
    let error = second.create_slot("one", SlotKind::Temporary).await.expect_err("taken");
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Permanent, Some("42710")));
    let low = private(Options::new(version).setting("wal_level = replica"));
    let mut made = walsender(&low.url("postgres", "postgres")).await;
    let error = made.create_slot("one", SlotKind::Temporary).await.expect_err("too low");
    assert_eq!((error.kind(), code_of(&error)), (ErrorKind::Transient, Some("55000")));
    assert!(error.to_string().contains("wal_level"), "{error:?}");
}

async fn a_standby_is_passed_over_unless_any_server_will_do(version: Version) {
    let primary = private(Options::new(version));
    let standby = primary.standby().expect("a standby");
    let (first, second) = (standby.port(), primary.port());
    let url = format!("postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres");
    let mut made = walsender(&url).await;
    let port = made.query("SHOW port").await.expect("rows");
    assert_eq!(cell(&port, 0).expect("one"), second.to_string());
    let error = refusal(&standby.url("postgres", "postgres")).await;
    assert!(error.kind() == ErrorKind::Transient && error.to_string().contains("read-only"));
    walsender(&format!("{}?target_session_attrs=any", standby.url("postgres", "postgres"))).await;
}

async fn a_server_that_stops_ends_the_stream(version: Version) {
    let server = private(Options::new(version));
    let url = server.url("postgres", "postgres");
    server.psql("postgres", TABLE).expect("a table");
    let mut made = walsender(&url).await;
    let seam =
        made.create_slot("slot", SlotKind::Permanent { failover: false }).await.expect("made");
    made.start("slot", seam.consistent, &options()).await.expect("a stream");
    let stopped = tokio::task::spawn_blocking(move || {
        server.stop(Shutdown::Fast).expect("it stops");
        server
    });
    let answered = async {
        loop {
            match made.next().await.expect("no error") {
                Frame::End => break,
                // The server waits until all it wrote is confirmed.
                Frame::Keepalive { end, .. } => made.status(end, false).await.expect("sent"),
                Frame::Data { .. } => {}
            }
        }
    };
    timeout(PATIENCE, answered).await.expect("in time");
    assert_eq!(made.next().await.expect("no error"), Frame::End, "an end is the last");
    let server = stopped.await.expect("it does not panic");
    let error = refusal(&url).await;
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_in_between_is_named() {
    let database = database(Version::V15).await;
    // The second one swallows the words, and hands the commands on as statements.
    for settings in [&[][..], &["ignore_startup_parameters = replication,options"]] {
        let bouncer = PgBouncer::start(&database.url(), settings).expect("a pooler");
        let url = bouncer.url(database.name());
        let error = refusal(&url).await;
        assert_eq!(error.kind(), ErrorKind::Permanent, "{settings:?}: {error:?}");
        assert!(error.to_string().contains("does not pass through"), "{error:?}");
    }
}
