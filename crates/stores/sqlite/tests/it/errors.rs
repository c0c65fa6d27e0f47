//! Bad files, locks and disks: each a clear error with a remedy, and nothing lost.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlite::{
    SchemaOnOpen, SqliteOptions, SqliteStore, append, schema_sql, sqlite_error,
};

use crate::support::*;

async fn refused(options: SqliteOptions) -> Error {
    SqliteStore::open(options).await.expect_err("must be refused")
}

fn uri(world: &World, parameters: &str) -> String {
    format!("file:{}?{parameters}", world.path().display())
}

#[tokio::test]
async fn a_file_of_another_kind_is_named() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("garbage.db");
    let garbage = "this is not a database, ".repeat(200);
    std::fs::write(&path, &garbage).expect("write");
    let error = refused(SqliteOptions::new(&path)).await;
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("not a SQLite database"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).expect("read"), garbage, "it was not touched");
}

#[tokio::test]
async fn a_damaged_file_is_named() {
    let world = World::new(1).await;
    world.append((0..200).map(|i| event("k", &"x".repeat(i))).collect()).await;
    world.connection().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("checkpoint");
    let path = world.folder.path().join("damaged.db");
    let mut bytes = std::fs::read(world.path()).expect("read");
    bytes[4_096..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    std::fs::write(&path, bytes).expect("write");
    let error = refused(SqliteOptions::new(&path)).await;
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("damaged"), "{error}");
}

#[tokio::test]
async fn a_read_only_file_can_be_read_and_not_written() {
    let world = World::new(1).await;
    world.append(vec![event("k", "1")]).await;
    for parameters in ["mode=ro", "immutable=1"] {
        world.connection().execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("checkpoint");
        let store = SqliteStore::open(SqliteOptions::new(uri(&world, parameters))).await;
        let store = store.expect("reading is possible");
        let page = Feed::read(&store, &p(0, 1), &Position::START, LIMIT).await.expect("read");
        assert_eq!(payloads(&page), ["1"]);
        let error = store.transaction(|tx| append(tx, &[event("k", "2")])).await;
        let error = error.expect_err("writing is not");
        assert_eq!(error.kind(), ErrorKind::Permanent, "{parameters}");
        assert!(error.to_string().contains("read-only"), "{error}");
    }
}

#[tokio::test]
async fn a_missing_folder_is_named() {
    let error = refused(SqliteOptions::new("/nowhere/at/all/data.db")).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("cannot be opened"), "{error}");
}

#[tokio::test]
async fn a_held_lock_is_transient_and_names_the_remedy() {
    let world = World::new(1).await;
    let patient = SqliteOptions::new(world.path()).busy_timeout(Duration::from_millis(30));
    let store = SqliteStore::open(patient).await.expect("open");
    let mut holder = world.connection();
    let held = holder.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate);
    let held = held.expect("begin");
    let error = store.transaction(|tx| append(tx, &[event("k", "1")])).await.expect_err("locked");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("busy_timeout"), "{error}");
    held.rollback().expect("rollback");
    store.transaction(|tx| append(tx, &[event("k", "1")])).await.expect("the lock is free");
}

/// A full disk saves nothing of the transaction, and all works again once there is room.
#[tokio::test]
async fn a_full_disk_is_transient_and_saves_nothing() {
    let world = World::new(1).await;
    let full = SqliteOptions::new(world.path()).max_file_bytes(300 * 1024);
    let store = SqliteStore::open(full).await.expect("open");
    let big: Vec<NewEvent> = (0..2).map(|_| event("k", &"x".repeat(200_000))).collect();
    store.transaction(|tx| append(tx, &[event("k", "before")])).await.expect("there is room");
    let error = store.transaction(move |tx| append(tx, &big)).await.expect_err("full");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("full"), "{error}");
    store.transaction(|tx| append(tx, &[event("k", "after")])).await.expect("room for this");
    let page = world.page(&p(0, 1), &Position::START).await;
    assert_eq!(payloads(&page), ["before", "after"]);
}

#[tokio::test]
async fn tables_of_a_newer_version_are_never_touched() {
    let world = World::new(1).await;
    let connection = world.connection();
    let known: i64 = connection
        .query_row("SELECT max(version) FROM postrider_migration", [], |row| row.get(0))
        .expect("version");
    connection
        .execute("INSERT INTO postrider_migration VALUES (99, 0)", [])
        .expect("a future version");
    for schema in [SchemaOnOpen::Migrate, SchemaOnOpen::Require] {
        let error = refused(SqliteOptions::new(world.path()).schema(schema)).await;
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let text = error.to_string();
        assert!(text.contains("version 99") && text.contains(&format!("knows {known}")), "{text}");
        assert!(text.contains("install the newer program"), "{text}");
    }
}

#[tokio::test]
async fn missing_tables_are_told_with_the_remedy() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("empty.db");
    let options = SqliteOptions::new(&path).schema(SchemaOnOpen::Require);
    let error = refused(options).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("postrider init"), "{error}");
    let mut connection = rusqlite::Connection::open(&path).expect("open");
    let tx = connection.transaction().expect("begin");
    let error = append(&tx, &[event("k", "1")]).expect_err("no tables");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("postrider init"), "{error}");
}

#[tokio::test]
async fn impossible_options_are_refused_before_a_file_is_made() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("never.db");
    for options in [
        SqliteOptions::new(&path).partitions(0),
        SqliteOptions::new(&path).partitions(1_025),
        SqliteOptions::new(&path).readers(0),
    ] {
        assert_eq!(refused(options).await.kind(), ErrorKind::Permanent);
    }
    assert!(!path.exists());
}

#[tokio::test]
async fn refused_values_and_statements_are_permanent() {
    let world = World::new(1).await;
    let connection = world.connection();
    for (sql, says) in [
        ("INSERT INTO postrider_append (key, topic, type) VALUES ('', 't', 'E')", "constraint"),
        ("SELECT no_such_column FROM postrider_outbox", "SQLite refused the statement"),
    ] {
        let cause = connection.execute_batch(sql).expect_err("refused");
        let error = sqlite_error("try", cause);
        assert_eq!(error.kind(), ErrorKind::Permanent);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[tokio::test]
async fn an_interrupted_statement_may_be_tried_again() {
    let world = World::new(1).await;
    let connection = world.connection();
    let handle = connection.get_interrupt_handle();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let interrupter = std::thread::spawn(move || {
        let pause = Duration::from_millis(5);
        while stopped.recv_timeout(pause) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            handle.interrupt();
        }
    });
    let endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
        SELECT count(*) FROM n";
    let cause = connection.query_row(endless, [], |_| Ok(())).expect_err("interrupted");
    drop(stop);
    interrupter.join().expect("ended");
    assert_eq!(sqlite_error("count", cause).kind(), ErrorKind::Transient);
}

/// Several processes that create one file together agree on its identity and partitions.
#[tokio::test]
async fn many_openers_of_a_new_file_agree() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("data.db");
    let opened: Vec<_> = (1..=8)
        .map(|partitions| {
            let options = SqliteOptions::new(&path).partitions(partitions);
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build();
                let runtime = runtime.expect("runtime");
                let store = runtime.block_on(SqliteStore::open(options)).expect("open");
                let found = runtime.block_on(store.partitions(&consumer("c")));
                (store.identity(), found.expect("partitions").len())
            })
        })
        .collect();
    let mut found: Vec<_> = opened.into_iter().map(|one| one.join().expect("opener")).collect();
    found.dedup();
    assert_eq!(found.len(), 1, "{found:?}");
}

#[test]
fn the_schema_for_review_runs_by_itself() {
    let connection = rusqlite::Connection::open_in_memory().expect("open");
    connection.execute_batch(&schema_sql()).expect("valid SQL");
}
