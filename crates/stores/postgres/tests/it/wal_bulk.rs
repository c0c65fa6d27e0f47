//! Large transactions, many small ones, and ends of a process at each place.
//!
//! `POSTRIDER_WAL_ROWS` sets the rows of the large transaction: 5000000 for the proof.

use std::time::Duration;

use postrider_servers::postgres::{Options, Version};

use crate::support::*;
use crate::wal_schedules::number;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    a_large_transaction_brings_what_was_committed_of_it
    many_small_transactions_come_in_their_order
    clean_stops_and_starts_bring_nothing_twice
    an_end_at_each_confirmation_loses_nothing
    an_end_within_a_transaction_goes_on_there
    changes_of_rows_are_no_events_and_long_payloads_come_whole
    parts_of_the_table_come_and_go
}

/// Most memory that this process ever had, in KiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("a peak");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

/// The numbers of `taken` batches' events; each must be larger than the one before.
async fn drain(taker: &mut Taker, count: u64) -> Vec<u64> {
    let rider = taker.rider().await;
    let mut found = Vec::new();
    while (found.len() as u64) < count {
        let batch = rider.next().await;
        for entry in &batch.entries {
            let payload = record(entry).event.payload();
            let text = std::str::from_utf8(payload).expect("text");
            found.push(text.parse().expect("a number"));
        }
        rider.confirm(&batch.position, batch.entries.len()).await;
    }
    found
}

/// W43, W45: blocks of 100 rows, each a savepoint; every third is rolled back, and within every
/// fifth an inner one of 7 rows.
async fn a_large_transaction_brings_what_was_committed_of_it(version: Version) {
    let options = Options::new(version)
        .setting("logical_decoding_work_mem = 64kB")
        .setting("wal_sender_timeout = 5s")
        .setting("autovacuum = off");
    let cluster = Cluster::with(options).await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "0")]).await;
    taker.until("0", PATIENCE).await;
    let blocks = number("POSTRIDER_WAL_ROWS", 200_000) / 100;
    let before = peak();
    let sql = format!(
        "DO $$ BEGIN
        FOR b IN 0..{blocks} - 1 LOOP
            BEGIN
                INSERT INTO postrider.outbox (key, topic, type, payload)
                SELECT 'k' || n % 50, 't', 'T', convert_to((b * 100 + n)::text, 'UTF8')
                FROM generate_series(1, 100) AS n;
                IF b % 5 = 0 THEN
                    BEGIN
                        INSERT INTO postrider.outbox (key, topic, type, payload)
                        SELECT 'inner', 't', 'T', '-1'::bytea FROM generate_series(1, 7);
                        RAISE division_by_zero;
                    EXCEPTION WHEN division_by_zero THEN NULL;
                    END;
                END IF;
                IF b % 3 = 0 THEN RAISE division_by_zero; END IF;
            EXCEPTION WHEN division_by_zero THEN NULL;
            END;
        END LOOP;
        END $$"
    );
    let session = cluster.session().await;
    session.batch_execute(&sql).await.expect("a large transaction");
    let wanted: Vec<u64> = (0..blocks)
        .filter(|block| block % 3 != 0)
        .flat_map(|block| (1..=100).map(move |n| block * 100 + n))
        .collect();
    let began = std::time::Instant::now();
    let found = drain(&mut taker, wanted.len() as u64).await;
    println!("{} rows in {:?}; peak {before} -> {} KiB", found.len(), began.elapsed(), peak());
    assert!(found == wanted, "other rows, or another order");
    taker.rider().await.nothing_within(Duration::from_millis(300)).await;
    let counts = taker.wal().await.counts();
    assert_eq!((counts.reconnects, counts.catch_ups), (0, 1));
}

async fn many_small_transactions_come_in_their_order(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "0")]).await;
    taker.until("0", PATIENCE).await;
    let sql = "DO $$ BEGIN
        FOR n IN 1..50000 LOOP
            INSERT INTO postrider.outbox (key, topic, type, payload)
            VALUES ('k', 't', 'T', convert_to(n::text, 'UTF8'));
            COMMIT;
        END LOOP;
        END $$";
    cluster.session().await.batch_execute(sql).await.expect("transactions");
    let began = std::time::Instant::now();
    let found = drain(&mut taker, 50_000).await;
    println!("50,000 transactions in {:?}", began.elapsed());
    assert!(found.into_iter().eq(1..=50_000), "other rows, or another order");
    assert_eq!(taker.wal().await.counts().catch_ups, 1, "that of the beginning");
}

async fn clean_stops_and_starts_bring_nothing_twice(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("a", "1"), ("b", "2")]).await;
    cluster.append(&[("a", "3")]).await;
    taker.until("3", PATIENCE).await;
    // Ended before that, it would rightly begin with the table again.
    taker.streams(&cluster.session().await).await;
    for _ in 0..50 {
        taker.end();
        taker.idle(Duration::from_millis(60)).await;
    }
    assert_eq!(taker.wal().await.counts().catch_ups, 0);
    cluster.append(&[("a", "4")]).await;
    taker.judge(&cluster.session().await).await;
}

/// W13, W21, W25: one-row transactions whose commits and beginnings share places, others open
/// meanwhile; the process ends behind each.
async fn an_end_at_each_confirmation_loses_nothing(version: Version) {
    let cluster = Cluster::new(version).await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.until("first", PATIENCE).await;
    let mut open = cluster.session().await;
    let early = open.transaction().await.expect("begin");
    let append = "SELECT postrider.append('other', 't', 'T', 'early'::bytea)";
    early.execute(append, &[]).await.expect("append");
    for n in 0..30 {
        cluster.append(&[("k", &n.to_string())]).await;
    }
    for n in 0..30 {
        while taker.unconfirmed() == 0 {
            taker.step(Duration::from_secs(1), 1).await;
        }
        assert_eq!(taker.had.last().expect("one").2, n.to_string());
        taker.confirm(1).await;
        taker.end();
    }
    early.commit().await.expect("commit");
    taker.until("early", PATIENCE).await;
    taker.judge(&cluster.session().await).await;
    assert_eq!(taker.had.len(), 32, "nothing was unconfirmed at any end");
}

/// W19: the process ends after each tenth of a transaction.
async fn an_end_within_a_transaction_goes_on_there(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.until("first", PATIENCE).await;
    let fill = "INSERT INTO postrider.outbox (key, topic, type, payload)
        SELECT 'k' || n % 7, 't', 'T', convert_to(n::text, 'UTF8')
        FROM generate_series(1, 10000) AS n";
    session.execute(fill, &[]).await.expect("fill");
    for round in 0..10 {
        // Half of the time with the slot, half of the time without it.
        if round % 2 == 1 {
            drop_slot(&session).await;
        }
        while taker.unconfirmed() < 1_300 && taker.step(Duration::from_secs(2), 400).await {}
        taker.confirm(1_000).await;
        taker.end();
    }
    taker.judge(&session).await;
}

/// W41: a long payload outside the row's own page, and rows that are changed and deleted.
async fn changes_of_rows_are_no_events_and_long_payloads_come_whole(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "first")]).await;
    taker.until("first", PATIENCE).await;
    let external = "ALTER TABLE postrider.outbox ALTER payload SET STORAGE EXTERNAL";
    session.batch_execute(external).await.expect("alter");
    let long: String = (0..100_000).map(|n| char::from(b'a' + (n % 23) as u8)).collect();
    cluster.append(&[("k", &long)]).await;
    session.batch_execute("UPDATE postrider.outbox SET topic = 'another'").await.expect("update");
    let delete = "DELETE FROM postrider.outbox WHERE length(payload) = 5";
    session.batch_execute(delete).await.expect("delete");
    cluster.append(&[("k", "last")]).await;
    taker.until("last", PATIENCE).await;
    let had: Vec<_> = taker.had.iter().map(|(_, _, payload)| payload.as_str()).collect();
    assert!(had == ["first", &long, "last"], "{} events", had.len());
}

/// W39: the outbox is one table to the log, whatever its parts are.
async fn parts_of_the_table_come_and_go(version: Version) {
    let cluster = Cluster::new(version).await;
    let session = cluster.session().await;
    let mut taker = Taker::new(cluster.database.url());
    cluster.append(&[("k", "0")]).await;
    taker.until("0", PATIENCE).await;
    session
        .batch_execute(
            "ALTER TABLE postrider.outbox DETACH PARTITION postrider.outbox_s15;
            DROP TABLE postrider.outbox_s15;
            CREATE TABLE postrider.outbox_new PARTITION OF postrider.outbox FOR VALUES IN (15)",
        )
        .await
        .expect("another part");
    let into = |segment: u32, payload: &str| {
        format!(
            "INSERT INTO postrider.outbox (segment, key, topic, type, payload)
            VALUES ({segment}, 'k', 't', 'T', '{payload}'::bytea)"
        )
    };
    session.batch_execute(&into(15, "1")).await.expect("insert");
    session.batch_execute(&into(14, "2")).await.expect("insert");
    taker.until("2", PATIENCE).await;
    taker.judge(&session).await;
    assert_eq!(taker.wal().await.counts().catch_ups, 1, "that of the beginning");
}
