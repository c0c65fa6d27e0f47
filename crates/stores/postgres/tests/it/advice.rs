//! What a person is told to look at.

use std::time::Duration;

use postrider_servers::postgres::{Options, Version, shared};
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use tokio_postgres::NoTls;

/// Prepared transactions belong to a whole server.
async fn what_was_left_open_is_told_with_its_remedy(version: Version) {
    let server = Options::new(version).launch().expect("a server");
    let database = server.create_database().expect("a database");
    let options = PostgresOptions::new(database.url());
    let store = PostgresStore::open(options.clone()).await.expect("open");
    let other = PostgresStore::open(options.outbox("other")).await.expect("open");
    let (mut client, connection) =
        tokio_postgres::connect(&database.url(), NoTls).await.expect("connect");
    let mut wire = tokio::task::JoinSet::new();
    wire.spawn(connection);

    // One with a row, one with nothing but a key's lock, one that has nothing to do with it.
    database
        .psql(
            "begin; select postrider.append('k', 'orders', 'Left', '{}');
             prepare transaction 'with rows'",
        )
        .expect("prepared");
    database
        .psql(
            "begin; select postrider.outbox_lock_keys(array['l']), pg_current_xact_id();
             prepare transaction 'with a key'",
        )
        .expect("prepared");
    database
        .psql("begin; create table shop (); prepare transaction 'elsewhere'")
        .expect("prepared");
    let open = client.transaction().await.expect("begin");
    open.execute("SELECT postrider.append('m', 'orders', 'Open', '{}')", &[])
        .await
        .expect("append");

    let longest = Duration::from_millis(1);
    let told = store.transactions_left_open(longest).await.expect("look");
    assert_eq!(told.len(), 3, "{told:?}");
    for part in ["\"with rows\"", "\"with a key\"", "COMMIT PREPARED", "pg_terminate_backend("] {
        assert!(told.iter().any(|text| text.contains(part)), "{part}: {told:?}");
    }
    assert_eq!(store.warnings().await.expect("look"), [""; 0], "none is that old");
    let told = other.transactions_left_open(longest).await.expect("look");
    assert_eq!(told, [""; 0], "each outbox has its own");

    open.rollback().await.expect("roll back");
    for name in ["with rows", "with a key", "elsewhere"] {
        database.psql(&format!("rollback prepared '{name}'")).expect("rolled back");
    }
    assert_eq!(store.transactions_left_open(longest).await.expect("look"), [""; 0]);
}

#[tokio::test]
async fn what_was_left_open_is_told_on_15() {
    what_was_left_open_is_told_with_its_remedy(Version::V15).await;
}

#[tokio::test]
async fn what_was_left_open_is_told_on_18() {
    what_was_left_open_is_told_with_its_remedy(Version::V18).await;
}

/// The server's settings are seen although the store's own connections ask for others.
async fn missing_bounds_are_told_until_they_are_set(version: Version) {
    let database = shared(version).expect("a server");
    let options = PostgresOptions::new(database.url());
    let store = PostgresStore::open(options).await.expect("open");
    let told = store.missing_bounds().await.expect("look");
    assert_eq!(told.len(), 1, "the owner appends: {told:?}");
    assert!(
        told[0].contains("\"postgres\"") && told[0].contains("tcp_user_timeout is 0"),
        "{told:?}"
    );
    // The remedy can be run as it stands, and names each setting's own value.
    let remedy = &told[0][told[0].find("SELECT").expect("a statement")..];
    assert_eq!(database.psql(remedy).expect("run").lines().count(), 4, "{remedy}");
    for setting in [
        "idle_in_transaction_session_timeout = '30s'",
        "tcp_user_timeout = '30s'",
        "tcp_keepalives_idle = '30s'",
        "client_connection_check_interval = '10s'",
    ] {
        let sql = format!("alter database {} set {setting}", database.name());
        database.psql(&sql).expect("set");
    }
    assert_eq!(store.missing_bounds().await.expect("look"), [""; 0]);
}

#[tokio::test]
async fn missing_bounds_are_told_on_15() {
    missing_bounds_are_told_until_they_are_set(Version::V15).await;
}

#[tokio::test]
async fn missing_bounds_are_told_on_18() {
    missing_bounds_are_told_until_they_are_set(Version::V18).await;
}
