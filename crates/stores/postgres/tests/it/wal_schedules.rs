//! Many writers, and a slot that is dropped or given up at any moment: nothing is missing, nothing
//! comes twice that was confirmed, and each key's order holds.
//!
//! What lives here: schedules by seed; `POSTRIDER_WAL_SCHEDULES` sets how many, and
//! `POSTRIDER_WAL_SEED` the first. What does not: the judgement (`wal_taker.rs`).
//! Invariant: the table says in the end what had to come.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Options, Server, Version};
use postrider_store_postgres::PostgresStore;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_postgres::Client;

use crate::support::*;
use crate::wal_support::*;
use crate::wal_taker::*;

on_both_versions! {
    a_slot_may_be_lost_at_any_moment
}

const WRITERS: u64 = 8;
const KEYS: u64 = 6;
const TRANSACTIONS: u64 = 25;
const STEPS: usize = 12;

pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// W13, W21, W27, W31: transactions open and end in any order, the process ends at any place.
async fn a_slot_may_be_lost_at_any_moment(version: Version) {
    let options = Options::new(version)
        .setting("max_slot_wal_keep_size = 1MB")
        .setting("wal_keep_size = 0")
        .setting("autovacuum = off");
    let launched = tokio::task::spawn_blocking(move || options.launch().expect("a server"));
    let server = Arc::new(launched.await.expect("it does not panic"));
    let first = number("POSTRIDER_WAL_SEED", 1);
    for seed in first..first + number("POSTRIDER_WAL_SCHEDULES", 20) {
        println!("seed {seed}");
        schedule(Arc::clone(&server), seed).await;
    }
}

async fn schedule(server: Arc<Server>, seed: u64) {
    let cluster = Cluster::on(server).await;
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        writers.spawn(write(cluster.store.clone(), seed, writer));
    }
    let mut dice = StdRng::seed_from_u64(seed);
    let mut taker = Taker::new(cluster.database.url());
    let session = cluster.session().await;
    let mut steps = Vec::new();
    while steps.len() < STEPS || !writers.is_empty() {
        work(&mut taker, &mut dice).await;
        steps.push(fault(&mut taker, &mut dice, &session).await);
        while writers.try_join_next().is_some() {}
    }
    println!("  {steps:?}");
    taker.judge(&session).await;
    let catch_ups = taker.wal().await.counts().catch_ups;
    println!("  {} came; {catch_ups} catch-ups in the last life", taker.had.len());
    taker.end();
    drop_slot(&session).await;
}

async fn write(store: PostgresStore, seed: u64, writer: u64) {
    let mut dice = StdRng::seed_from_u64(seed * 1_000 + writer);
    for n in 0..TRANSACTIONS {
        let count = dice.random_range(1..=4);
        let events: Vec<_> = (0..count)
            .map(|i| {
                let key = format!("key {}", dice.random_range(0..KEYS));
                event(&key, &format!("{writer}-{n}-{i}"))
            })
            .collect();
        let hold = Duration::from_millis(dice.random_range(0..2) * dice.random_range(0..60));
        let is_kept = dice.random_range(0..5) != 0;
        let outbox = store.outbox();
        let done: Result<()> = store
            .transaction(move |tx| {
                Box::pin(async move {
                    outbox.append(tx, &events).await?;
                    sleep(hold).await;
                    if is_kept { Ok(()) } else { Err(Error::permanent("rolled back")) }
                })
            })
            .await;
        if let Err(error) = done {
            assert!(!is_kept || error.kind() == ErrorKind::Transient, "{}", error.chain());
        }
        sleep(Duration::from_millis(dice.random_range(0..40))).await;
    }
}

/// A few batches, of which any part is confirmed; many waits are given up early.
async fn work(taker: &mut Taker, dice: &mut StdRng) {
    for _ in 0..dice.random_range(1..16) {
        let within = Duration::from_millis([1, 5, 40, 200][dice.random_range(0..4)]);
        let came = taker.step(within, dice.random_range(1..30)).await;
        match dice.random_range(0..4) {
            0 => {
                let count = dice.random_range(0..=taker.unconfirmed());
                taker.confirm(count).await;
            }
            1 => taker.confirm_all().await,
            // A reader may have to wait for what is under way.
            _ if !came && dice.random_range(0..2) == 0 => taker.confirm_all().await,
            _ => {}
        }
    }
}

/// Ends the connections that read the table under a snapshot.
const END_CATCH_UPS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE query LIKE 'SELECT l.xid, %'";
const END_STREAM: &str = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
    WHERE active_pid IS NOT NULL";

async fn fault(taker: &mut Taker, dice: &mut StdRng, session: &Client) -> &'static str {
    match dice.random_range(0..9) {
        0 => {
            taker.end();
            "end"
        }
        1 => {
            taker.end();
            drop_slot(session).await;
            "end, drop"
        }
        2 => {
            taker.end();
            invalidate_slot(session).await;
            "end, give up"
        }
        3 => {
            drop_slot(session).await;
            "drop"
        }
        4 => {
            invalidate_slot(session).await;
            "give up"
        }
        5 => {
            for _ in 0..dice.random_range(1..4) {
                taker.end();
                drop_slot(session).await;
                in_catch_up(taker, dice).await;
            }
            "end in catch-up, drop, again"
        }
        6 => {
            drop_slot(session).await;
            in_catch_up(taker, dice).await;
            if dice.random_range(0..2) == 0 {
                drop_slot(session).await;
            }
            session.execute(END_CATCH_UPS, &[]).await.expect("terminate");
            "end of the catch-up's connection"
        }
        7 => {
            session.execute(END_STREAM, &[]).await.expect("terminate");
            "end of the stream's connection"
        }
        _ => {
            taker.end();
            drop_slot(session).await;
            in_catch_up(taker, dice).await;
            taker.end();
            "end in catch-up"
        }
    }
}

/// Takes little, and confirms a part of it.
async fn in_catch_up(taker: &mut Taker, dice: &mut StdRng) {
    for _ in 0..dice.random_range(1..5) {
        if !taker.step(Duration::from_millis(300), dice.random_range(1..9)).await {
            taker.confirm_all().await;
        }
        if dice.random_range(0..2) == 0 {
            let count = dice.random_range(0..=taker.unconfirmed());
            taker.confirm(count).await;
        }
    }
}
