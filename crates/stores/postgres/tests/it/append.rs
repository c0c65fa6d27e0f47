//! Appending in the caller's own transaction: what stays, in which order, and which refusals.

use std::time::Duration;

use postrider_core::limits::MAX_APPEND_EVENTS;
use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{OnDuplicate, Outbox, PostgresOptions, PostgresStore};
use tokio::task::JoinSet;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::{
    World, builder, database, event, key, on_both_versions, one, p, payloads, session,
    until_one_waits,
};

on_both_versions! {
    a_batch_keeps_its_order_and_shows_with_the_commit_only
    a_given_id_is_appended_once
    an_open_append_of_the_same_id_is_waited_for
    keys_are_locked_until_the_end_and_only_those
    a_deadlock_of_keys_is_transient
    more_than_a_thousand_keys_take_one_lock
    what_the_transaction_is_in_no_state_for_is_told
    too_many_events_are_refused_before_any_io
    large_batches_go_in_parts
    sql_overloads_and_defaults
    a_refused_value_reads_as_a_sentence
}

fn given(key_text: &str, id: u128) -> NewEvent {
    builder(key_text).id(EventId::from_uuid(Uuid::from_u128(id))).build().expect("valid")
}

async fn a_batch_keeps_its_order_and_shows_with_the_commit_only(version: Version) {
    let world = World::new(version, 1).await;
    let mut client = world.session().await;
    let names: Vec<String> = (0..5_000).map(|n| format!("e{n}")).collect();
    let events: Vec<NewEvent> =
        names.iter().enumerate().map(|(n, name)| event(&format!("k{}", n % 7), name)).collect();
    let tx = client.transaction().await.expect("begin");
    world.store.append(&tx, &events[..1], OnDuplicate::Fail).await.expect("append");
    tx.rollback().await.expect("roll back");
    let tx = client.transaction().await.expect("begin");
    let ids = world.store.append(&tx, &events, OnDuplicate::Fail).await.expect("append");
    assert!(world.records(&p(0, 1)).await.is_empty());
    tx.commit().await.expect("commit");
    let records = world.records(&p(0, 1)).await;
    assert_eq!(payloads(&records), names);
    assert_eq!(records.iter().map(|r| r.event.id()).collect::<Vec<_>>(), ids);
    assert!(ids.iter().all(|id| id.as_uuid().get_version_num() == 7));
    // The claims of ids are for callers who give them.
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM postrider.outbox_given").await, 0);
}

async fn a_given_id_is_appended_once(version: Version) {
    let world = World::new(version, 1).await;
    let mut client = world.session().await;
    let outbox = Outbox::default();
    let append = async |client: &mut Client, events: &[NewEvent], on_duplicate| {
        let tx = client.transaction().await.expect("begin");
        let appended = outbox.append_with(&tx, events, on_duplicate).await;
        if appended.is_ok() {
            tx.commit().await.expect("commit");
        }
        appended
    };
    append(&mut client, &[given("a", 1)], OnDuplicate::Fail).await.expect("append");
    let fresh = || builder("b").build().expect("valid");
    for events in [
        vec![given("a", 1)],
        vec![fresh(), given("a", 1)],
        vec![fresh(), given("c", 2), given("d", 2)],
    ] {
        let error = append(&mut client, &events, OnDuplicate::Fail).await.expect_err("twice");
        assert_eq!(error.kind(), ErrorKind::Permanent);
        let id = events.last().and_then(NewEvent::id).expect("given");
        assert!(error.to_string().contains(&format!("event {id} was appended before")), "{error}");
    }
    assert_eq!(world.records(&p(0, 1)).await.len(), 1, "nothing of a failed call stays");
    let events = [given("x", 1), given("y", 2), given("z", 2), fresh()];
    let ids = append(&mut client, &events, OnDuplicate::Ignore).await.expect("append");
    assert_eq!(ids.len(), 4);
    assert_eq!(ids[1], ids[2]);
    append(&mut client, &[given("x", 1)], OnDuplicate::Ignore).await.expect("append");
    let records = world.records(&p(0, 1)).await;
    let keys: Vec<_> = records.iter().map(|r| r.event.key().as_str().to_owned()).collect();
    assert_eq!(keys, ["a", "y", "b"]);
}

async fn an_open_append_of_the_same_id_is_waited_for(version: Version) {
    let world = World::new(version, 1).await;
    let (mut first, mut second) = (world.session().await, world.session().await);
    let watch = world.session().await;
    let outbox = Outbox::default();
    for (commits, kept) in [(false, true), (true, false)] {
        let id = 10 + u128::from(commits);
        let tx = first.transaction().await.expect("begin");
        outbox.append(&tx, &[given("a", id)]).await.expect("append");
        let late = async {
            let tx = second.transaction().await.expect("begin");
            let appended = outbox.append(&tx, &[given("b", id)]).await;
            if appended.is_ok() {
                tx.commit().await.expect("commit");
            }
            appended
        };
        let end = async {
            until_one_waits(&watch).await;
            match commits {
                true => tx.commit().await.expect("commit"),
                false => tx.rollback().await.expect("roll back"),
            }
        };
        let (late, ()) = tokio::join!(late, end);
        assert_eq!(late.is_ok(), kept, "{late:?}");
    }
    assert_eq!(world.records(&p(0, 1)).await.len(), 2);
}

async fn keys_are_locked_until_the_end_and_only_those(version: Version) {
    let world = World::new(version, 1).await;
    let (mut first, mut second) = (world.session().await, world.session().await);
    let watch = world.session().await;
    let outbox = Outbox::default();
    let tx = first.transaction().await.expect("begin");
    outbox.append(&tx, &[event("same", "1")]).await.expect("append");
    let other = second.transaction().await.expect("begin");
    // Another key does not wait; the same one does, in a batch and by SQL too.
    outbox.append(&other, &[event("other", "2")]).await.expect("append");
    let waits = async {
        let batch = [event("third", "4"), event("same", "5")];
        outbox.append(&other, &batch).await.expect("append");
        other.commit().await.expect("commit");
    };
    let ends = async {
        until_one_waits(&watch).await;
        outbox.append(&tx, &[event("same", "3")]).await.expect("append");
        tx.commit().await.expect("commit");
    };
    tokio::join!(waits, ends);
    let records = world.records(&p(0, 1)).await;
    let same: Vec<_> = records.iter().filter(|r| r.event.key() == &key("same")).cloned().collect();
    assert_eq!(payloads(&same), ["1", "3", "5"]);
}

async fn a_deadlock_of_keys_is_transient(version: Version) {
    let world = World::new(version, 1).await;
    let watch = world.session().await;
    let outbox = Outbox::default();
    let (mut one_client, mut two_client) = (world.session().await, world.session().await);
    let first = one_client.transaction().await.expect("begin");
    let second = two_client.transaction().await.expect("begin");
    outbox.append(&first, &[event("a", "1")]).await.expect("append");
    outbox.append(&second, &[event("b", "2")]).await.expect("append");
    let crossing = async {
        until_one_waits(&watch).await;
        outbox.append(&second, &[event("a", "4")]).await
    };
    let event_b = [event("b", "3")];
    let (one_end, two_end) = tokio::join!(outbox.append(&first, &event_b), crossing);
    let error = match (one_end, two_end) {
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => error,
        both => panic!("the server ends exactly one: {both:?}"),
    };
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    assert!(error.to_string().contains("begin this one again from its start"), "{error}");
}

async fn more_than_a_thousand_keys_take_one_lock(version: Version) {
    let world = World::new(version, 1).await;
    let (mut first, mut second) = (world.session().await, world.session().await);
    let watch = world.session().await;
    let outbox = Outbox::default();
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let many = |n: usize| (0..n).map(|n| event(&format!("k{n}"), "x")).collect::<Vec<_>>();
    let tx = first.transaction().await.expect("begin");
    outbox.append(&tx, &many(990)).await.expect("append");
    assert!(one::<i64>(&watch, locks).await > 900, "one for each key");
    tx.rollback().await.expect("roll back");
    let tx = first.transaction().await.expect("begin");
    outbox.append(&tx, &many(1_500)).await.expect("append");
    assert_eq!(one::<i64>(&watch, locks).await, 0);
    // Nobody else appends meanwhile, not even under another key; readers don't notice.
    assert!(world.records(&p(0, 1)).await.is_empty());
    let waits = async {
        let tx = second.transaction().await.expect("begin");
        outbox.append(&tx, &[event("another", "late")]).await.expect("append");
        tx.commit().await.expect("commit");
    };
    let ends = async {
        until_one_waits(&watch).await;
        tx.commit().await.expect("commit");
    };
    tokio::join!(waits, ends);
    let records = world.records(&p(0, 1)).await;
    assert_eq!(records.len(), 1_501);
    assert_eq!(payloads(&records[1_500..]), ["late"]);
}

async fn what_the_transaction_is_in_no_state_for_is_told(version: Version) {
    let world = World::new(version, 1).await;
    let mut client = world.session().await;
    let outbox = Outbox::default();
    let events = [event("a", "1"), event("b", "2")];
    let tx = client.build_transaction().read_only(true).start().await.expect("begin");
    let error = outbox.append(&tx, &events[..1]).await.expect_err("READ ONLY");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
    assert!(error.to_string().contains("begin it READ WRITE"), "{error}");
    let error = outbox.append(&tx, &events).await.expect_err("failed before");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
    assert!(error.to_string().contains("roll it back and begin again"), "{error}");
    drop(tx);
    let elsewhere = Outbox::new("nowhere", "outbox").expect("a name");
    let tx = client.transaction().await.expect("begin");
    let error = elsewhere.append(&tx, &events).await.expect_err("no schema");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
    assert!(error.to_string().contains("postrider init"), "{error}");
    drop(tx);
    assert!(Outbox::new("a\nb", "outbox").is_err());
    assert!(Outbox::new("$a$", "outbox").is_err());
    // A savepoint undoes a failed append alone.
    let mut tx = client.transaction().await.expect("begin");
    outbox.append(&tx, &[given("a", 7)]).await.expect("append");
    let part = tx.transaction().await.expect("a savepoint");
    outbox.append(&part, &[event("a", "x"), given("a", 7)]).await.expect_err("twice");
    part.rollback().await.expect("roll back");
    tx.commit().await.expect("commit");
    assert_eq!(world.records(&p(0, 1)).await.len(), 1);
}

async fn too_many_events_are_refused_before_any_io(version: Version) {
    let world = World::new(version, 1).await;
    let mut client = world.session().await;
    let many = vec![event("k", "1"); MAX_APPEND_EVENTS + 1];
    let tx = client.transaction().await.expect("begin");
    let error = Outbox::default().append(&tx, &many).await.expect_err("too many");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("100001 events"), "{error}");
    // The transaction goes on: nothing was sent.
    assert_eq!(Outbox::default().append(&tx, &[]).await.expect("nothing to do"), []);
    tx.query_one("SELECT 1", &[]).await.expect("goes on");
}

async fn large_batches_go_in_parts(version: Version) {
    let world = World::new(version, 1).await;
    let mut client = world.session().await;
    let large = |fill: u8| {
        let octets = ContentType::new("application/octet-stream").expect("valid");
        builder(&format!("k{fill}")).payload(octets, vec![fill; 15 << 20]).build().expect("valid")
    };
    let events: Vec<NewEvent> = (0..5).map(large).collect();
    let tx = client.transaction().await.expect("begin");
    let ids = Outbox::default().append(&tx, &events).await.expect("append");
    tx.commit().await.expect("commit");
    let records = world.records(&p(0, 1)).await;
    assert_eq!(records.iter().map(|r| r.event.id()).collect::<Vec<_>>(), ids);
    for (fill, record) in (0_u8..).zip(&records) {
        assert!(record.event.payload().iter().all(|byte| *byte == fill));
        assert_eq!(record.event.payload().len(), 15 << 20);
    }
}

const V7: (usize, uuid::Variant) = (7, uuid::Variant::RFC4122);

async fn sql_overloads_and_defaults(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    let id = "0192d7a5-8e3b-7000-8000-000000000001";
    for call in [
        "append('k', 'orders', 'OrderPlaced', '{\"a\": 1}')".to_owned(),
        "append('k', 'orders', 'OrderPlaced', '{\"a\": 1}', 'application/json')".to_owned(),
        "append('k', 'orders', 'OrderPlaced', '{\"a\" : 1 }'::json)".to_owned(),
        "append('k', 'orders', 'OrderPlaced', '{\"a\" : 1 }'::jsonb)".to_owned(),
        "append('k', 'orders', 'OrderPlaced', '\\x00ff'::bytea)".to_owned(),
        "append('k', 'orders', 'OrderPlaced', 'x'::varchar)".to_owned(),
        format!(
            "append(key => 'k', topic => 'orders', type => 'OrderPlaced', payload => '', \
             headers => '{{\"a\":\"b\"}}', id => '{id}')"
        ),
        format!("append('k', 'orders', 'OrderPlaced', '', id => '{id}', on_duplicate => 'ignore')"),
        "outbox_append('k', 'orders', 'OrderPlaced', 'last')".to_owned(),
    ] {
        let answer = client.query_one(&format!("SELECT postrider.{call}"), &[]).await;
        answer.unwrap_or_else(|error| panic!("{call}: {error:?}"));
    }
    let records = world.records(&p(0, 1)).await;
    let seen: Vec<(&str, &[u8])> = records
        .iter()
        .map(|r| (r.event.content_type().as_str(), r.event.payload().as_ref()))
        .collect();
    let (text, json) = ("text/plain; charset=utf-8", "application/json");
    assert_eq!(
        seen,
        [
            (text, &b"{\"a\": 1}"[..]),
            (json, b"{\"a\": 1}"),
            (json, b"{\"a\" : 1 }"),
            (json, b"{\"a\": 1}"),
            ("application/octet-stream", b"\x00\xff"),
            (text, b"x"),
            (text, b""),
            (text, b"last"),
        ]
    );
    assert_eq!(records[6].event.id().to_string(), id);
    let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_millis();
    for record in records.iter().filter(|record| record.event.id().to_string() != id) {
        let made = record.event.id();
        assert_eq!((made.as_uuid().get_version_num(), made.as_uuid().get_variant()), V7);
        let ms = made.as_uuid().as_u128() >> 80;
        assert!(now.abs_diff(ms) < 60_000, "{made} does not begin with the time");
    }
    assert_eq!(records[6].event.headers().get("a"), Some("b"));
    // Another outbox has its functions under its own name only.
    let options = PostgresOptions::new(world.database.url()).outbox("orders").partitions(1);
    let orders = PostgresStore::open(options).await.expect("open");
    let sql = "SELECT postrider.orders_append('k', 'orders', 'OrderPlaced', 'x')";
    client.query_one(sql, &[]).await.expect("append");
    let page = Feed::read(&orders, &p(0, 1), &Position::START, crate::support::LIMIT).await;
    assert_eq!(page.expect("read").entries.len(), 1);
}

async fn a_refused_value_reads_as_a_sentence(version: Version) {
    let world = World::new(version, 1).await;
    let client = world.session().await;
    let insert = |columns: &str, values: &str| {
        format!("INSERT INTO postrider.outbox ({columns}) VALUES ({values})")
    };
    let plain = "key, topic, type, payload";
    let key = "key must have 1 to 1024 bytes and no control character";
    for (sql, says) in [
        (insert(plain, "'', 't', 'T', ''"), key),
        (insert(plain, "NULL, 't', 'T', 'secret'"), "event_key does not allow null values"),
        (insert("topic, type, payload", "'t', 'T', 'secret'"), "event_key does not allow null"),
        (insert(plain, "'k', NULL, 'T', 'secret'"), "event_topic does not allow null values"),
        (insert(plain, "'k', 't', NULL, 'secret'"), "event_type does not allow null values"),
        (insert(plain, "'k', 't', 'T', NULL"), "event_bytea does not allow null values"),
        (
            "SELECT postrider.append('k', 't', 'T', 'secret', content_type => NULL)".to_owned(),
            "event_content_type does not allow null values",
        ),
        (insert(plain, "repeat('é', 513), 't', 'T', ''"), key),
        ("SELECT postrider.append(repeat('é', 513), 't', 'T', 'secret')".to_owned(), key),
        (
            insert(plain, "'k', E't\\u0085', 'T', ''"),
            "topic must have 1 to 255 bytes and no control character",
        ),
        (insert(plain, "E'k\\n', 't', 'T', ''"), key),
        (
            insert(plain, "'k', 't', repeat('T', 256), ''"),
            "type must have 1 to 255 bytes and no control character",
        ),
        (
            insert(&format!("{plain}, content_type"), "'k', 't', 'T', '', ''"),
            "content type must have 1 to 255 bytes",
        ),
        (
            insert(&format!("{plain}, headers"), "'k', 't', 'T', '', '{\"a b\":\"c\"}'"),
            "headers must be a JSON object of at most 64 texts",
        ),
        (
            insert(&format!("{plain}, headers"), "'k', 't', 'T', '', '{\"a\":\"b\",\"A\":\"c\"}'"),
            "headers must be",
        ),
        (
            insert(plain, "'k', 't', 'T', convert_to(repeat('x', 16777217), 'UTF8')"),
            "payload has more than 16777216 bytes: send a reference instead",
        ),
    ] {
        let error = client.batch_execute(&sql).await.expect_err("refused");
        // The server's log repeats what it says, and that must not be the row.
        assert_eq!(error.as_db_error().and_then(|cause| cause.detail()), None, "{sql}");
        let error = postrider_store_postgres::postgres_error("insert", error);
        assert_eq!(error.kind(), ErrorKind::Permanent);
        assert!(error.chain().contains(says), "{error:?}");
        assert!(!error.chain().contains("Failing row"), "{error:?}");
    }
    for (column, value) in [("xid", "'1'"), ("seq", "1")] {
        let sql = insert(&format!("{plain}, {column}"), &format!("'k', 't', 'T', '', {value}"));
        let refused = client.batch_execute(&sql).await;
        // The owner may give an xid; a seq nobody, without saying so. Roles: `roles.rs`.
        assert_eq!(refused.is_err(), column == "seq");
    }
}

/// Writers of many keys in any order: no deadlock within one call, whatever the order given.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_lock_many_keys_never_wait_in_a_circle() {
    let database = database(Version::V15).await;
    let options = PostgresOptions::new(database.url());
    PostgresStore::open(options).await.expect("open");
    let mut writers = JoinSet::new();
    for writer in 0..4_usize {
        let url = database.url();
        writers.spawn(async move {
            let mut client = session(&url).await;
            for round in 0..25 {
                let tx = client.transaction().await.expect("begin");
                let mut events: Vec<_> = (0..40).map(|n| event(&format!("k{n}"), "x")).collect();
                events.rotate_left((writer * 11 + round * 7) % 40);
                if writer % 2 == 1 {
                    events.reverse();
                }
                Outbox::default().append(&tx, &events).await.expect("no deadlock");
                tx.commit().await.expect("commit");
            }
        });
    }
    let all = async { while writers.join_next().await.transpose().expect("succeeds").is_some() {} };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("in time");
}

/// More keys than the server has room for lock the whole outbox; whoever waits for that must not
/// hold up the others, who would queue behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_that_waits_for_an_open_transaction_holds_up_nobody_else() {
    let world = World::new(Version::V15, 4).await;
    let open = world.session().await;
    let append = "SELECT postrider.append('open', 't', 'T', 'x'::text)";
    open.batch_execute(&format!("BEGIN; {append}")).await.expect("appended");
    let (store, outbox) = (world.store.clone(), world.store.outbox());
    let bulk: Vec<_> = (0..1_500).map(|n| event(&format!("k{n}"), "x")).collect();
    let bulk = tokio::spawn(async move {
        store.transaction(move |tx| Box::pin(async move { outbox.append(tx, &bulk).await })).await
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND state = 'active' AND wait_event IN ('relation', 'PgSleep')";
    let other = world.session().await;
    let in_time = Duration::from_secs(20);
    tokio::time::timeout(in_time, async { while one::<i64>(&other, waits).await == 0 {} })
        .await
        .expect("the bulk waits");
    for _ in 0..20 {
        let append = "SELECT postrider.append('other', 't', 'T', 'x'::text)";
        let appended = tokio::time::timeout(in_time, other.batch_execute(append)).await;
        appended.expect("it does not queue").expect("appended");
    }
    assert!(!bulk.is_finished(), "the bulk waits for the open transaction");
    open.batch_execute("COMMIT").await.expect("committed");
    let ids = tokio::time::timeout(in_time, bulk).await.expect("in time").expect("no panic");
    assert_eq!(ids.expect("appended").len(), 1_500);
}

#[cfg(feature = "sqlx")]
mod with_sqlx {
    use sqlx::{Connection as _, PgConnection};

    use super::*;

    on_both_versions! {
        a_transaction_of_sqlx_appends_alike
    }

    async fn a_transaction_of_sqlx_appends_alike(version: Version) {
        let world = World::new(version, 1).await;
        let mut connection = PgConnection::connect(&world.database.url()).await.expect("connect");
        let outbox = Outbox::default();
        let mut tx = connection.begin().await.expect("begin");
        outbox.append_sqlx(&mut tx, &[event("a", "0")]).await.expect("append");
        tx.rollback().await.expect("roll back");
        let mut tx = connection.begin().await.expect("begin");
        let events = [event("a", "1"), event("b", "2")];
        let mut ids = outbox.append_sqlx(&mut tx, &events).await.expect("append");
        ids.extend(outbox.append_sqlx(&mut tx, &[given("c", 3)]).await.expect("append"));
        tx.commit().await.expect("commit");
        // A connection will do, too.
        ids.extend(outbox.append_sqlx(&mut connection, &[event("d", "4")]).await.expect("append"));
        let records = world.records(&p(0, 1)).await;
        assert_eq!(records.iter().map(|r| r.event.id()).collect::<Vec<_>>(), ids);
        let mut tx = connection.begin().await.expect("begin");
        let error = outbox.append_sqlx(&mut tx, &[given("c", 3)]).await.expect_err("twice");
        assert_eq!(error.kind(), ErrorKind::Permanent);
        assert!(error.to_string().contains("was appended before"), "{error}");
        let error = outbox.append_sqlx(&mut tx, &[given("c", 4)]).await.expect_err("failed");
        assert!(error.to_string().contains("roll it back"), "{error}");
        drop(tx);
        let mut tx = connection.begin().await.expect("begin");
        let twice = [given("c", 3), given("e", 5)];
        outbox.append_sqlx_with(&mut tx, &twice, OnDuplicate::Ignore).await.expect("append");
        tx.commit().await.expect("commit");
        // More than one statement, outside a transaction: all or nothing.
        let octets = ContentType::new("application/octet-stream").expect("valid");
        let large = |n: u128| {
            let id = EventId::from_uuid(Uuid::from_u128(n));
            let payload = vec![1_u8; 15 << 20];
            builder("k").id(id).payload(octets.clone(), payload).build().expect("valid")
        };
        let batch = [large(20), large(21), large(22), large(3)];
        outbox.append_sqlx(&mut connection, &batch).await.expect_err("the last one is known");
        assert_eq!(world.records(&p(0, 1)).await.len(), 5);
        outbox.append_sqlx(&mut connection, &batch[..3]).await.expect("append");
        assert_eq!(world.records(&p(0, 1)).await.len(), 8);
    }
}
