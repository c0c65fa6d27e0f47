//! What a review found: reading on after thousands of ticks without a record, looking up late
//! transactions after a bulk load, and retention after ids of a copy of the cluster.

use postrider_core::{ErrorKind, Feed, NewEvent, Position};
use postrider_servers::postgres::{Options, Version};
use postrider_store_postgres::{PostgresOptions, PostgresStore};

use crate::support::{World, event, on_both_versions, one, p, payloads, session};

const TICK: &str = "SELECT outcome FROM postrider.outbox_tick(0)";

async fn tick(client: &tokio_postgres::Client) {
    assert_eq!(one::<String>(client, TICK).await, "made");
}

async fn append(client: &tokio_postgres::Client, payload: &str) {
    let sql = format!("SELECT postrider.append('k', 't', 'T', '{payload}'::text)");
    client.batch_execute(&sql).await.expect("append");
}

/// Ticks without a record come by the thousand from a long transaction that keeps inserting, or
/// from many that roll back. Read in one call, they would take longer than a statement may, and
/// nobody would ever come past them.
async fn thousands_of_ticks_without_a_record_are_passed_in_bounded_calls(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    append(&client, "before").await;
    tick(&client).await;
    let copies = "INSERT INTO postrider.outbox_tick (stamp, seq_lo, seq_hi, floor, system, own,
            timeline, generation, anchor, snap)
        SELECT t.stamp + i, t.seq_lo, t.seq_hi, t.floor, t.system, t.own, t.timeline,
            t.generation, t.anchor, t.snap
        FROM generate_series(1, 2500) AS i,
            (SELECT * FROM postrider.outbox_tick ORDER BY stamp DESC LIMIT 1) AS t";
    client.batch_execute(copies).await.expect("ticks");
    append(&client, "after").await;
    tick(&client).await;
    let first = "SELECT count(*) FROM postrider.outbox_read(0, 0, 4096, 4194304)";
    let rows: i64 = one(&client, first).await;
    assert!(rows <= 1_010, "{rows} rows of one call");
    let records = world.records(&p(0, 1)).await;
    assert_eq!(payloads(&records), ["before", "after"]);
    let by_sql = "WITH RECURSIVE page (place, given) AS (
            SELECT NULL::text, 0::bigint
            UNION ALL
            SELECT r.place, given + r.found FROM page CROSS JOIN LATERAL (
                SELECT max(f.position) AS place, count(f.id) AS found
                FROM postrider.read_feed('outbox', 0, page.place) AS f) AS r
            WHERE r.place IS NOT NULL)
        SELECT max(given) FROM page";
    assert_eq!(one::<i64>(&client, by_sql).await, 2);
}

/// How many buffers a statement touches, as its plan tells at the top.
async fn buffers(client: &tokio_postgres::Client, sql: &str) -> u64 {
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) {sql}");
    let rows = client.query(&explain, &[]).await.expect("a plan");
    let mut lines = rows.iter().map(|row| row.get::<_, &str>(0).trim());
    let line = lines.find(|line| line.starts_with("Buffers: shared")).expect("buffers");
    let numbers = line.split([' ', '=']).filter_map(|word| word.parse::<u64>().ok());
    numbers.sum()
}

/// After a bulk load every row is of one transaction, and the planner's statistics say so: it would
/// look for any other transaction by reading all rows.
async fn a_late_transaction_costs_one_look_up_after_a_bulk_load(version: Version) {
    let world = World::new(version, 1).await;
    let (client, idle) = (world.session().await, world.session().await);
    let load = "INSERT INTO postrider.outbox (key, topic, type, payload)
        SELECT 'k' || i, 't', 'T', convert_to(repeat('x', 200), 'UTF8')
        FROM generate_series(1, 50000) AS i";
    client.batch_execute(load).await.expect("load");
    client.batch_execute("VACUUM ANALYZE postrider.outbox").await.expect("analyze");
    idle.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.expect("an id");
    append(&client, "before").await;
    tick(&client).await;
    idle.batch_execute("COMMIT").await.expect("commit");
    let looked = least(&client, TICK, 3).await;
    assert!(looked < 1_000, "looked at {looked} buffers");
    append(&client, "after").await;
    tick(&client).await;
    let last = "SELECT stamp, seq_hi FROM postrider.outbox_tick
        ORDER BY stamp DESC OFFSET 1 LIMIT 1";
    let row = client.query_one(last, &[]).await.expect("a tick");
    let (stamp, seq): (i64, i64) = (row.get(0), row.get(1));
    let read = format!("SELECT * FROM postrider.outbox_read({stamp}, {seq}, 4096, 4194304)");
    // Five times a plan of its own is made for each call, then one for all.
    for calls in [5, 2] {
        let read = least(&client, &read, calls).await;
        assert!(read < 1_000, "read {read} buffers");
    }
}

/// The fewest of some calls: a session's first one looks all segments up in the catalog, which
/// takes as many buffers as the table has, and so does one after many tables changed elsewhere.
async fn least(client: &tokio_postgres::Client, sql: &str, calls: u32) -> u64 {
    let mut fewest = u64::MAX;
    for _ in 0..calls {
        fewest = fewest.min(buffers(client, sql).await);
    }
    fewest
}

/// A dump of a copy of this cluster has its system identifier, and ticks whose ids are ahead of the
/// ids here. Such a tick's snapshot takes every new row for seen.
async fn a_row_is_kept_whose_id_the_horizon_takes_for_seen(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    append(&client, "old").await;
    tick(&client).await;
    let ahead = "UPDATE postrider.outbox_tick
            SET own = '4000000000', snap = '4000000000:4000000000:';
        INSERT INTO postrider.checkpoint (outbox, consumer, partition, position)
        SELECT 'outbox', 'sink', '0/1', int8send(stamp) || int8send(seq_hi)
        FROM postrider.outbox_tick ORDER BY stamp DESC LIMIT 1";
    client.batch_execute(ahead).await.expect("ids of a copy");
    append(&client, "new").await;
    for anchored in [false, true] {
        if anchored {
            tick(&client).await;
        }
        client.batch_execute("SELECT postrider.outbox_prune(0, 100)").await.expect("prune");
        let emptied = "SELECT coalesce(postrider.outbox_empty(0), 0)";
        assert_eq!(one::<i64>(&client, emptied).await, 0, "anchored: {anchored}");
    }
    let records = world.page(&p(0, 1), &position(&client).await).await.entries;
    assert_eq!(records.len(), 1);
}

async fn position(client: &tokio_postgres::Client) -> Position {
    let bytes: Vec<u8> = one(client, "SELECT position FROM postrider.checkpoint").await;
    Position::from_bytes(&bytes).expect("16 bytes")
}

/// Numbers below the newest tick's would be looked for by no later tick.
async fn numbers_that_were_set_back_are_told_and_not_passed_over(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    append(&client, "one").await;
    append(&client, "two").await;
    tick(&client).await;
    client.batch_execute("TRUNCATE postrider.outbox RESTART IDENTITY").await.expect("truncate");
    append(&client, "unseen").await;
    let error = Feed::head(&world.store, &p(0, 1)).await.expect_err("set back");
    assert!(error.kind() == ErrorKind::Permanent, "{error:?}");
    assert!(error.to_string().contains("were set back from 2"), "{error}");
    client.batch_execute("SELECT setval('postrider.outbox_seq', 2)").await.expect("set");
    append(&client, "again").await;
    tick(&client).await;
}

/// Whoever owns a table or its types may not run code as the owner of the feed.
async fn a_cast_of_another_role_is_not_run_by_the_trigger(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    let role = format!("{}_caster", world.database.name());
    let made = format!(
        "CREATE ROLE \"{role}\"; CREATE SCHEMA app AUTHORIZATION \"{role}\";
         SET ROLE \"{role}\";
         CREATE TYPE app.colour AS ENUM ('red');
         CREATE DOMAIN app.colours AS app.colour[];
         CREATE TABLE app.plain (id integer PRIMARY KEY, n numeric);
         CREATE TABLE app.painted (id integer PRIMARY KEY, colours app.colours);
         CREATE FUNCTION app.spy(app.colour) RETURNS json LANGUAGE plpgsql AS
             $$BEGIN RAISE EXCEPTION 'runs as %', current_user; END$$;
         CREATE CAST (app.colour AS json) WITH FUNCTION app.spy(app.colour);
         RESET ROLE;
         SELECT postrider.setup_feed('app.plain'), postrider.setup_feed('app.painted');"
    );
    client.batch_execute(&made).await.expect("tables");
    client.batch_execute("INSERT INTO app.plain VALUES (1, 2)").await.expect("no such type");
    let painted = "INSERT INTO app.painted VALUES (1, ARRAY['red']::app.colour[])";
    let error = client.batch_execute(painted).await.expect_err("refused");
    let gone =
        format!("DROP SCHEMA app CASCADE; DROP OWNED BY \"{role}\" CASCADE; DROP ROLE \"{role}\"");
    client.batch_execute(&gone).await.expect("drop");
    let refusal = error.as_db_error().expect("of the server");
    assert_eq!(refusal.code().code(), "42501", "{refusal}");
    assert!(refusal.message().contains("app.colour has a cast"), "{refusal}");
}

/// One transaction, thousands of keys, one call each: the server runs out of places for locks.
async fn too_many_keys_are_told_with_what_to_do(version: Version) {
    let server = Options::new(version).setting("max_locks_per_transaction = 10");
    let server =
        tokio::task::spawn_blocking(move || server.setting("max_connections = 10").launch());
    let server = server.await.expect("it does not panic").expect("a server");
    let database = server.create_database().expect("a database");
    let store = PostgresStore::open(PostgresOptions::new(database.url()).partitions(1)).await;
    let outbox = store.expect("open").outbox();
    let mut client = session(&database.url()).await;
    let tx = client.transaction().await.expect("begin");
    let mut error = None;
    for n in 0..20_000 {
        if let Err(full) = outbox.append(&tx, &[event(&format!("k{n}"), "{}")]).await {
            error = Some(full);
            break;
        }
    }
    let error = error.expect("no server holds as many");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("in one call"), "{error}");
    tx.rollback().await.expect("rollback");
    let tx = client.transaction().await.expect("begin");
    let events: Vec<NewEvent> = (0..20_000).map(|n| event(&format!("k{n}"), "{}")).collect();
    outbox.append(&tx, &events).await.expect("one lock for all");
}

/// A dump in another cluster, and so each upgrade by pg_upgrade, has an anchor, which every reader
/// comes past: what it takes in is found without reading all that was kept.
async fn an_anchor_is_read_without_reading_what_was_settled(version: Version) {
    let world = World::new(version, 1).await;
    let (client, slow) = (world.session().await, world.session().await);
    slow.batch_execute("BEGIN").await.expect("begin");
    append(&slow, "late").await;
    let load = "INSERT INTO postrider.outbox (key, topic, type, payload)
        SELECT 'k' || i, 't', 'T', convert_to(repeat('x', 200), 'UTF8')
        FROM generate_series(1, 50000) AS i";
    client.batch_execute(load).await.expect("load");
    client.batch_execute("VACUUM ANALYZE postrider.outbox").await.expect("analyze");
    tick(&client).await;
    slow.batch_execute("COMMIT").await.expect("commit");
    let other = "UPDATE postrider.outbox_tick SET system = system + 1";
    client.batch_execute(other).await.expect("another cluster");
    let last = "SELECT stamp, seq_hi FROM postrider.outbox_tick ORDER BY stamp DESC LIMIT 1";
    let row = client.query_one(last, &[]).await.expect("a tick");
    let (stamp, seq): (i64, i64) = (row.get(0), row.get(1));
    append(&client, "new").await;
    tick(&client).await;
    let read = format!("FROM postrider.outbox_read({stamp}, {seq}, 4096, 4194304)");
    for calls in [5, 2] {
        let touched = least(&client, &format!("SELECT * {read}"), calls).await;
        assert!(touched < 500, "{touched} buffers");
    }
    let texts = format!("SELECT string_agg(convert_from(payload, 'UTF8'), ' ') {read}");
    assert_eq!(one::<String>(&client, &texts).await, "late new");
}

on_both_versions! {
    an_anchor_is_read_without_reading_what_was_settled
    too_many_keys_are_told_with_what_to_do
    numbers_that_were_set_back_are_told_and_not_passed_over
    a_cast_of_another_role_is_not_run_by_the_trigger
    thousands_of_ticks_without_a_record_are_passed_in_bounded_calls
    a_late_transaction_costs_one_look_up_after_a_bulk_load
    a_row_is_kept_whose_id_the_horizon_takes_for_seen
}
