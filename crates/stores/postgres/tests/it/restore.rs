//! Restored databases: the feed goes on where it was, in a cluster whose transaction ids are
//! others.
//!
//! What lives here: dump and restore into a fresh cluster, read on and pruned there. What does not:
//! copies that keep the cluster's identity (`failover.rs`).
//! Invariant: what was committed before the dump is read once by every consumer, before or after;
//! what was read keeps its place for ever; what is appended there is no more lost than elsewhere.

use std::process::Command;

use postrider_servers::postgres::{Database, Options, Server, Version};

use super::retention::{Place, START, World, connect, insert, mutate, run, unchanged};

/// Uses up transaction ids, so that those of a fresh cluster are far below.
const USE_UP: &str = "DO $$ BEGIN
    FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$";

fn launch(version: Version) -> Server {
    Options::new(version).setting("max_prepared_transactions = 10").launch().expect("a server")
}

/// Dumps a database and loads it into a fresh cluster.
async fn restored(world: &World) -> (Server, World) {
    let version = world.database.version();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("dump.sql");
    let mut dump = Command::new(version.program("pg_dump").expect("installed"));
    dump.arg("--file").arg(&file).arg(world.database.url());
    assert!(dump.status().expect("started").success());
    let server = launch(version);
    let database: Database = server.create_database().expect("a database");
    let mut load = Command::new(version.program("psql").expect("installed"));
    load.args(["--quiet", "--no-psqlrc", "--output=/dev/null", "--set=ON_ERROR_STOP=1"]);
    load.arg("--file").arg(&file).arg(database.url());
    assert!(load.status().expect("started").success());
    let session = connect(&database).await;
    (server, World { database, session })
}

/// A feed with an open transaction at its last tick, and consumers at different places.
struct Origin {
    _server: Server,
    world: World,
    /// Everything read so far, with its places.
    read: Vec<(Place, String)>,
    /// Within a tick.
    middle: Place,
    /// At the head.
    end: Place,
}

async fn origin(version: Version, change: impl Fn(String) -> String) -> Origin {
    let server = launch(version);
    let world = World::on(server.create_database().expect("a database"), change).await;
    run(&world.session, USE_UP).await;
    let (a, b) = (world.session().await, world.session().await);
    run(&a, "BEGIN").await;
    insert(&a, "late but read").await;
    for payload in ["1", "2", "3"] {
        insert(&world.session, payload).await;
    }
    world.tick().await;
    run(&b, "BEGIN").await;
    insert(&b, "late").await;
    run(&a, "COMMIT").await;
    insert(&world.session, "4").await;
    world.tick().await;
    let (read, end) = world.read(START, 100).await.expect("readable");
    let payloads: Vec<_> = read.iter().map(|(_, payload)| payload.as_str()).collect();
    assert_eq!(payloads, ["1", "2", "3", "late but read", "4"]);
    world.pass("end", end).await;
    world.pass("middle", read[1].0).await;
    // In no tick: committed after the last one, from before and after it.
    run(&b, "COMMIT").await;
    insert(&world.session, "5").await;
    let middle = read[1].0;
    Origin { _server: server, world, read, middle, end }
}

fn payloads(records: &[(Place, String)]) -> Vec<&str> {
    records.iter().map(|(_, payload)| payload.as_str()).collect()
}

#[tokio::test]
async fn a_restored_feed_goes_on_from_the_old_places() {
    for version in Version::ALL {
        let origin = origin(version, unchanged).await;
        let (_server, world) = restored(&origin.world).await;
        let (system, lower) = ("pg_control_system()", "pg_current_xact_id()::text::bigint");
        let sql = format!("SELECT system_identifier FROM {system}");
        assert_ne!(origin.world.number(&sql).await, world.number(&sql).await);
        let sql = format!("SELECT {lower}");
        assert!(world.number(&sql).await < origin.world.number(&sql).await, "ids begin anew");
        // Appended before anything is read there, one of them by a transaction that stays open.
        insert(&world.session, "6").await;
        let open = world.session().await;
        run(&open, "BEGIN").await;
        insert(&open, "7").await;
        let refused = world.session.batch_execute("SELECT postrider.outbox_tick(0)").await;
        let code = refused.expect_err("a writer is open").code().map(|code| code.code().to_owned());
        assert_eq!(code.as_deref(), Some("55P03"), "to be tried again");
        assert_eq!(world.read(origin.end, 9).await.expect("readable"), (Vec::new(), origin.end));
        run(&open, "COMMIT").await;
        world.tick().await;

        let (after_end, end) = world.read(origin.end, 100).await.expect("an old place");
        assert_eq!(payloads(&after_end), ["late", "5", "6", "7"]);
        let (after_middle, _) = world.read(origin.middle, 100).await.expect("an old place");
        assert_eq!(after_middle[..3], origin.read[2..], "read places do not change");
        assert_eq!(after_middle[3..], after_end);
        let (replay, _) = world.read(START, 100).await.expect("readable");
        assert_eq!(replay[..5], origin.read);
        assert_eq!(replay[5..], after_end);
        // By pages of one, so that each place within the joint is read on from.
        let (mut at, mut one_by_one) = (START, Vec::new());
        while let (page, next) = world.read(at, 1).await.expect("readable")
            && next != at
        {
            one_by_one.extend(page);
            at = next;
        }
        assert_eq!(one_by_one, replay);
        goes_on(&world, end).await;
    }
}

/// An open transaction of the new cluster is late like any other.
async fn goes_on(world: &World, mut after: Place) {
    let a = world.session().await;
    run(&a, "BEGIN").await;
    insert(&a, "late here").await;
    insert(&world.session, "early here").await;
    assert_eq!(world.read_all(&mut after).await, ["early here"]);
    run(&a, "COMMIT").await;
    assert_eq!(world.read_all(&mut after).await, ["late here"]);
    assert_eq!(world.read_all(&mut after).await, [""; 0]);
}

#[tokio::test]
async fn a_feed_is_restored_a_second_time() {
    let origin = origin(Version::V15, unchanged).await;
    // Once read in between, once not.
    for ticked in [true, false] {
        let (_second, world) = restored(&origin.world).await;
        insert(&world.session, "6").await;
        let (mut read, mut end) = (Vec::new(), origin.end);
        let open = world.session().await;
        run(&open, "BEGIN").await;
        if ticked {
            world.tick().await;
            insert(&open, "late").await;
            insert(&world.session, "7").await;
            world.tick().await;
            (read, end) = world.read(origin.end, 100).await.expect("readable");
            assert_eq!(payloads(&read), ["late", "5", "6", "7"]);
        }
        run(&open, "COMMIT").await;
        run(&world.session, USE_UP).await;
        insert(&world.session, "8").await;
        let (_third, world) = restored(&world).await;
        insert(&world.session, "9").await;
        world.tick().await;
        let (new, last) = world.read(end, 100).await.expect("an old place");
        let (whole, _) = world.read(origin.end, 100).await.expect("an older place");
        match ticked {
            true => assert_eq!(payloads(&new), ["late", "8", "9"]),
            false => assert_eq!(payloads(&new), ["late", "5", "6", "8", "9"]),
        }
        assert_eq!(whole[..read.len()], read);
        assert_eq!(whole[read.len()..], new);
        goes_on(&world, last).await;
    }
}

/// Pruned before anything is read: the ids of rows that are new there say nothing to old ticks.
async fn pruned_too_soon(change: impl Fn(String) -> String) -> Vec<String> {
    let origin = origin(Version::V15, change).await;
    let (_server, world) = restored(&origin.world).await;
    world.pass("middle", origin.end).await;
    // A segment with rows of the new cluster alone.
    assert_eq!(world.prune_all().await, 0);
    insert(&world.session, "6").await;
    world.prune_all().await;
    let mut after = origin.end;
    let mut seen = world.read_all(&mut after).await;
    for consumer in ["middle", "end"] {
        world.pass(consumer, after).await;
    }
    insert(&world.session, "7").await;
    world.prune_all().await;
    world.prune_all().await;
    seen.extend(world.read_all(&mut after).await);
    for consumer in ["middle", "end"] {
        world.pass(consumer, after).await;
    }
    world.prune_all().await;
    world.prune_all().await;
    assert_eq!(world.rows().await, 0, "all of it goes in the end");
    seen
}

#[tokio::test]
async fn retention_waits_for_the_first_tick_in_the_new_cluster() {
    assert_eq!(pruned_too_soon(unchanged).await, ["late", "5", "6", "7"]);
    let unaware = |sql: String| mutate(&sql, "highest > t.seq_hi", "false");
    let seen = pruned_too_soon(unaware).await;
    assert!(!seen.contains(&"6".to_owned()), "the schedule does not meet the hole: {seen:?}");
}
