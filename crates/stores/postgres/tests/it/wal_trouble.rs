//! Slots and publications that are not as they should be: each is named with its remedy, and then
//! nothing is missing.

use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{Recover, WalOptions};
use tokio::time::{Instant, sleep};

use crate::support::*;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    a_slot_that_was_advanced_is_told_or_made_up_for
    a_slot_that_is_advanced_before_the_stream_begins_is_noticed
    a_slot_of_another_plugin_is_named
    a_slot_of_another_database_is_named
    a_slot_that_another_reads_is_named
    a_slot_older_than_its_publication_is_made_anew
    a_publication_emptied_while_it_is_read_is_named
    a_publication_dropped_while_it_is_read_is_made_anew
    a_filter_on_the_publication_is_named
    a_transaction_that_keeps_the_slot_from_being_made_is_named
    a_role_without_the_privilege_is_told_what_to_run
}

const SOON: Duration = Duration::from_secs(10);
const REMEDY: &str = "SELECT pg_drop_replication_slot('postrider_outbox')";

async fn append(cluster: &Cluster, numbers: std::ops::Range<u32>) {
    for number in numbers {
        cluster.append(&[("k", &number.to_string())]).await;
    }
}

/// A cluster and a consumer that has had `first` from the table and `0` from the log.
async fn begun(version: Version) -> (Cluster, Taker, tokio_postgres::Client) {
    let cluster = Cluster::new(version).await;
    let mut taker = Taker::new(cluster.database.url());
    let session = cluster.session().await;
    cluster.append(&[("k", "first")]).await;
    taker.streams(&session).await;
    append(&cluster, 0..1).await;
    taker.until("0", PATIENCE).await;
    (cluster, taker, session)
}

async fn until_free(session: &tokio_postgres::Client) {
    let deadline = Instant::now() + PATIENCE;
    let active = "SELECT count(*) FROM pg_replication_slots WHERE active";
    while one::<i64>(session, active).await > 0 {
        assert!(Instant::now() < deadline, "the slot is still read");
        sleep(Duration::from_millis(5)).await;
    }
}

async fn a_slot_that_was_advanced_is_told_or_made_up_for(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    taker.end();
    until_free(&session).await;
    append(&cluster, 1..4).await;
    // So that all of it is written.
    session.execute("SELECT pg_switch_wal()", &[]).await.expect("switch");
    let advance = "SELECT count(pg_replication_slot_advance('postrider_outbox',
        pg_current_wal_lsn()))";
    one::<i64>(&session, advance).await;
    append(&cluster, 4..6).await;
    // Who asks to be stopped is stopped, and told where.
    let halting = WalOptions::new().recover(Recover::Halt);
    let mut rider = Rider::new(cluster.wal(halting).await, "sink").await;
    let limit = BatchLimit { records: 512, bytes: 1 << 20 };
    let told = tokio::time::timeout(SOON, rider.reader.next(limit)).await.expect("in time");
    let told = told.expect_err("a gap").chain();
    for word in ["the slot begins at", "the checkpoint is at", "recover = \"auto\""] {
        assert!(told.contains(word), "{told}");
    }
    drop(rider);
    until_free(&session).await;
    taker.judge(&session).await;
    assert_eq!(taker.wal().await.counts().catch_ups, 1);
}

/// Between the look at the slot and the stream nobody holds it.
async fn a_slot_that_is_advanced_before_the_stream_begins_is_noticed(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    taker.end();
    until_free(&session).await;
    append(&cluster, 1..4).await;
    // A reader that has not asked yet: the slot was looked at, and the stream waits for it.
    taker.rider().await;
    let looked = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle'
        AND query LIKE 'SELECT pg_current_snapshot()%' AND datname = current_database()";
    let deadline = Instant::now() + PATIENCE;
    while one::<i64>(&session, looked).await == 0 {
        assert!(Instant::now() < deadline, "the slot is not looked at");
        sleep(Duration::from_millis(5)).await;
    }
    session.execute("SELECT pg_switch_wal()", &[]).await.expect("switch");
    let advance = "SELECT count(pg_replication_slot_advance('postrider_outbox',
        pg_current_wal_lsn()))";
    one::<i64>(&session, advance).await;
    append(&cluster, 4..6).await;
    taker.judge(&session).await;
    let told = taker.errors.iter().any(|error| error.chain().contains("moved by somebody else"));
    assert!(told, "{:?}", taker.errors);
}

async fn a_slot_of_another_plugin_is_named(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    taker.end();
    drop_slot(&session).await;
    // `pgoutput` is the only plugin that each server has; a physical slot is as foreign.
    let make = "SELECT count(pg_create_physical_replication_slot('postrider_outbox'))";
    one::<i64>(&session, make).await;
    append(&cluster, 1..3).await;
    taker.told(&[SLOT, "it is physical", REMEDY], SOON).await;
    session.execute(REMEDY, &[]).await.expect("the remedy works");
    let make = "SELECT count(pg_create_logical_replication_slot('postrider_outbox',
        'test_decoding'))";
    if session.execute(make, &[]).await.is_ok() {
        append(&cluster, 3..5).await;
        taker.told(&[SLOT, "its plugin is test_decoding", REMEDY], SOON).await;
        session.execute(REMEDY, &[]).await.expect("the remedy works");
    }
    taker.judge(&session).await;
}

async fn a_slot_of_another_database_is_named(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    taker.end();
    drop_slot(&session).await;
    let elsewhere = Cluster::on(std::sync::Arc::clone(&cluster.server)).await;
    let there = elsewhere.session().await;
    let make = "SELECT count(pg_create_logical_replication_slot('postrider_outbox', 'pgoutput'))";
    one::<i64>(&there, make).await;
    append(&cluster, 1..3).await;
    let name = elsewhere.database.name();
    taker.told(&[SLOT, "it belongs to database", name, REMEDY], SOON).await;
    session.execute(REMEDY, &[]).await.expect("the remedy works from anywhere");
    taker.judge(&session).await;
}

/// W33: the holder is named, and takes nothing away.
async fn a_slot_that_another_reads_is_named(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    taker.end();
    until_free(&session).await;
    let mut holder = Taker::new(cluster.database.url()).named("other");
    holder.until("0", PATIENCE).await;
    append(&cluster, 1..3).await;
    holder.until("2", PATIENCE).await;
    let pid: i32 = one(&session, "SELECT active_pid FROM pg_replication_slots").await;
    taker.told(&[SLOT, "another process", &pid.to_string()], SOON).await;
    holder.end();
    append(&cluster, 3..5).await;
    taker.judge(&session).await;
    taker.end();
    holder.judge(&session).await;
}

/// W37: before version 18 such a slot can't be read at all; from 18 on it passes over in silence
/// what was written before.
async fn a_slot_older_than_its_publication_is_made_anew(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let make = "SELECT count(pg_create_logical_replication_slot('postrider_outbox', 'pgoutput'))";
    one::<i64>(&session, make).await;
    append(&cluster, 0..3).await;
    let mut taker = Taker::new(cluster.database.url());
    taker.until("2", PATIENCE).await;
    append(&cluster, 3..5).await;
    taker.judge(&session).await;
    // And once more, with a consumer that is known.
    taker.end();
    drop_slot(&session).await;
    session.batch_execute("DROP PUBLICATION postrider_outbox").await.expect("drop");
    one::<i64>(&session, make).await;
    append(&cluster, 5..8).await;
    taker.until("7", PATIENCE).await;
    append(&cluster, 8..9).await;
    taker.judge(&session).await;
}

async fn a_publication_emptied_while_it_is_read_is_named(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    for round in 0..2 {
        let drop = "ALTER PUBLICATION postrider_outbox DROP TABLE postrider.outbox";
        session.batch_execute(drop).await.expect("drop");
        append(&cluster, 1 + round * 10..6 + round * 10).await;
        let remedy = "ALTER PUBLICATION \"postrider_outbox\" ADD TABLE";
        if round == 0 {
            taker.told(&["without the outbox", remedy], SOON).await;
        }
        // The second time before anybody has noticed.
        let add = "ALTER PUBLICATION postrider_outbox ADD TABLE ONLY postrider.outbox";
        session.batch_execute(add).await.expect("add");
        append(&cluster, 6 + round * 10..8 + round * 10).await;
        taker.judge(&session).await;
    }
}

async fn a_publication_dropped_while_it_is_read_is_made_anew(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    session.batch_execute("DROP PUBLICATION postrider_outbox").await.expect("drop");
    append(&cluster, 1..6).await;
    taker.told(&["publication"], SOON).await;
    append(&cluster, 6..8).await;
    taker.judge(&session).await;
    let made: i64 = one(&session, "SELECT count(*) FROM pg_publication").await;
    assert_eq!(made, 1);
}

async fn a_filter_on_the_publication_is_named(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    let filter =
        "ALTER PUBLICATION postrider_outbox SET TABLE ONLY postrider.outbox WHERE (seq < 0)";
    session.batch_execute(filter).await.expect("filter");
    append(&cluster, 1..6).await;
    taker.told(&["WHERE", "DROP TABLE"], SOON).await;
    let remedy = "ALTER PUBLICATION postrider_outbox DROP TABLE postrider.outbox;
        ALTER PUBLICATION postrider_outbox ADD TABLE ONLY postrider.outbox";
    session.batch_execute(remedy).await.expect("the remedy works");
    append(&cluster, 6..8).await;
    taker.judge(&session).await;
}

/// W51: making a slot waits for every transaction that writes, and is not silent about it.
async fn a_transaction_that_keeps_the_slot_from_being_made_is_named(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut session = cluster.session().await;
    let pid: i32 = one(&session, "SELECT pg_backend_pid()").await;
    let open = session.transaction().await.expect("begin");
    open.execute("SELECT postrider.append('k', 't', 'T', '0'::bytea)", &[]).await.expect("append");
    let mut taker = Taker::new(cluster.database.url());
    taker.told(&[SLOT, "is being made", &pid.to_string()], SOON).await;
    open.commit().await.expect("commit");
    taker.judge(&session).await;
}

async fn a_role_without_the_privilege_is_told_what_to_run(version: Version) {
    let (cluster, mut taker, session) = begun(version).await;
    taker.end();
    let role = "CREATE ROLE plain LOGIN; SELECT postrider.grant_relay('plain')";
    session.batch_execute(role).await.expect("a role");
    taker.at(cluster.database.url_as("plain", None));
    append(&cluster, 1..3).await;
    taker.told(&["ALTER ROLE", "REPLICATION"], SOON).await;
    session.batch_execute("ALTER ROLE plain REPLICATION").await.expect("the remedy");
    session.batch_execute("DROP PUBLICATION postrider_outbox").await.expect("drop");
    taker.told(&["there is no publication", "CREATE PUBLICATION"], SOON).await;
    let remedy = "CREATE PUBLICATION postrider_outbox FOR TABLE ONLY postrider.outbox
        WITH (publish = 'insert', publish_via_partition_root = true)";
    session.batch_execute(remedy).await.expect("the remedy");
    taker.judge(&session).await;
}
