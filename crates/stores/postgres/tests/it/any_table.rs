//! Any table as a feed.
//!
//! What lives here: set-up and its refusals, what the triggers append, what is told of those that
//! no longer see every change, reading joined back, and all of it under faults. What does not: the
//! outbox itself.
//! Invariant: every change that is committed has one event, and a key's events come in order.

#![expect(clippy::disallowed_methods, reason = "sessions and writers end with their test")]

use std::collections::HashMap;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use rand::RngExt as _;
use tokio_postgres::Client;

use crate::adopted::{Follower, connect, follow};
use crate::by_sql::{column, database, refusal, session};

async fn run(session: &Client, sql: &str) {
    session.batch_execute(sql).await.expect(sql);
}

/// `type key primary_key row` of all events of a table, in order of their positions.
async fn changes(session: &Client, table: &str) -> Vec<String> {
    run(session, "SELECT postrider.tick(min_interval_ms => 0)").await;
    let sql = format!(
        "SELECT concat_ws(' ', r.type, r.key, r.primary_key, coalesce(r.row::text, 'gone'))
         FROM generate_series(0, 7) AS p
         CROSS JOIN LATERAL postrider.read_table_feed('{table}', p, NULL) AS r
         WHERE r.appended_at IS NOT NULL ORDER BY r.position"
    );
    column(session, &sql).await
}

#[tokio::test]
async fn changes_are_read_joined_back_to_the_rows_of_now() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        let table = "\"App; x\".\"Or'der\"";
        run(
            &session,
            &format!(
                "CREATE SCHEMA \"App; x\"; CREATE TABLE {table} (
                \"n o\" integer, who text, \"B\" numeric, PRIMARY KEY (\"B\", \"n o\"))"
            ),
        )
        .await;
        let source = table.replace('\'', "''");
        let setup = format!(
            "SELECT postrider.setup_feed('{source}', '{{who}}',
                events => '{{inserted,updated,deleted}}')"
        );
        run(&session, &setup).await;
        run(&session, &setup).await;
        run(&session, &format!("INSERT INTO {table} VALUES (1, 'ann', 1.50), (2, 'bob', 2)")).await;
        run(
            &session,
            &format!(
                "UPDATE {table} SET who = 'eve' WHERE \"n o\" = 1;
            UPDATE {table} SET who = 'x' WHERE false"
            ),
        )
        .await;
        run(&session, &format!("DELETE FROM {table} WHERE \"n o\" = 2")).await;
        run(&session, &format!("BEGIN; DELETE FROM {table}; ROLLBACK")).await;
        let now = "{\"B\": 1.50, \"n o\": 1, \"who\": \"eve\"}";
        let (one, two) = ("{\"B\": 1.50, \"n o\": 1}", "{\"B\": 2, \"n o\": 2}");
        assert_eq!(
            changes(&session, &source).await,
            [
                format!("inserted ann {one} {now}"),
                format!("inserted bob {two} gone"),
                format!("updated eve {one} {now}"),
                format!("deleted bob {two} gone"),
            ]
        );
        let sql = "SELECT topic || ' ' || postrider.payload_text(payload) || ' ' || content_type
            FROM postrider.read_feed('outbox', postrider.partition_of('ann', 8), NULL) LIMIT 1";
        assert_eq!(
            column(&session, sql).await,
            ["App; x.Or'der { \"B\" : 1.50, \"n o\" : 1 } application/json"]
        );
        run(&session, &format!("SELECT postrider.teardown_feed('{source}')")).await;
        run(&session, &format!("DELETE FROM {table}")).await;
        let (code, _) =
            refusal(&session, &format!("SELECT postrider.teardown_feed('{source}')")).await;
        assert_eq!(code, "42704");
    }
}

/// Written through the parent, directly, and in a partition that was attached later.
#[tokio::test]
async fn partitioned_tables_and_rows_as_payload() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        run(
            &session,
            "CREATE TABLE reading (sensor integer, at integer, PRIMARY KEY (sensor, at))
                PARTITION BY RANGE (at);
            CREATE TABLE reading_1 PARTITION OF reading FOR VALUES FROM (0) TO (10);
            SELECT postrider.setup_feed('reading', payload => 'row', topic => 'readings');
            CREATE TABLE reading_2 PARTITION OF reading FOR VALUES FROM (10) TO (20);
            INSERT INTO reading VALUES (7, 1), (7, 11); INSERT INTO reading_1 VALUES (7, 2);
            INSERT INTO reading_2 VALUES (7, 12)",
        )
        .await;
        let found = changes(&session, "reading").await;
        let mut rows: Vec<_> =
            found.iter().map(|row| row.split_once('{').expect("a key").1).collect();
        rows.sort_unstable();
        let row =
            |at: i32| format!("\"at\": {at}, \"sensor\": 7}} {{\"at\": {at}, \"sensor\": 7}}");
        assert_eq!(rows, [row(1), row(11), row(12), row(2)]);
        assert!(found[0].starts_with("inserted [\"7\", \"1\"]"), "{found:?}");
    }
}

#[tokio::test]
async fn what_can_be_no_feed_is_refused_with_the_remedy() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE bare (id integer); CREATE TABLE item (id integer PRIMARY KEY, owner text);
        CREATE VIEW seen AS SELECT * FROM item; CREATE TABLE other (id integer PRIMARY KEY);
        SELECT postrider.setup_feed('item', '{owner}')",
    )
    .await;
    for (sql, code, text) in [
        ("SELECT postrider.setup_feed('bare')", "PR007", "primary key"),
        ("SELECT postrider.setup_feed('seen')", "42809", "no table"),
        ("SELECT postrider.setup_feed('item', '{nope}')", "42703", "nope"),
        ("SELECT postrider.setup_feed('item', outbox => 'none')", "42704", "none"),
        ("SELECT postrider.setup_feed('item', events => '{truncated}')", "22023", "inserted"),
        ("SELECT postrider.setup_feed('item', payload => 'both')", "22023", "key or row"),
        ("SELECT postrider.read_table_feed('other', 0, NULL)", "42704", "setup_feed"),
        ("INSERT INTO item VALUES (1, NULL)", "23502", "key"),
        (
            "DELETE FROM postrider.table_feed; INSERT INTO item VALUES (1, 'a')",
            "PR007",
            "teardown_feed",
        ),
    ] {
        let (found, message) = refusal(&session, sql).await;
        assert!(found == code && message.contains(text), "{sql}: {found} {message}");
    }
}

/// `topic type key` of all events, as they were appended.
async fn appended(session: &Client) -> Vec<String> {
    let sql = "SELECT concat_ws(' ', topic, type, key) FROM postrider.outbox ORDER BY seq";
    column(session, sql).await
}

/// A statement that names another table fires no trigger for statements where its rows land.
#[tokio::test]
async fn what_is_written_through_a_parent_is_in_the_feed() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        let all = "events => '{inserted,updated,deleted}'";
        run(
            &session,
            &format!(
                "CREATE TABLE reading (at integer PRIMARY KEY, n integer) PARTITION BY RANGE (at);
                CREATE TABLE reading_1 PARTITION OF reading FOR VALUES FROM (0) TO (10);
                CREATE TABLE reading_2 PARTITION OF reading FOR VALUES FROM (10) TO (20);
                SELECT postrider.setup_feed('reading_1', {all}, topic => 'r');
                CREATE TABLE base (id integer PRIMARY KEY, n integer);
                CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (base);
                CREATE TABLE grandheir (PRIMARY KEY (id)) INHERITS (heir);
                SELECT postrider.setup_feed('grandheir', {all}, topic => 'g');
                SELECT postrider.setup_feed('heir', {all}, topic => 'h');
                SELECT postrider.setup_feed('base', {all}, topic => 'b')"
            ),
        )
        .await;
        run(
            &session,
            "INSERT INTO reading VALUES (1, 0), (2, 0), (11, 0);
            INSERT INTO reading_1 VALUES (3, 0);
            UPDATE reading SET n = 1 WHERE at IN (1, 11); UPDATE reading SET at = 12 WHERE at = 2;
            COPY reading FROM PROGRAM 'echo 4,0' CSV; DELETE FROM reading WHERE at IN (1, 11)",
        )
        .await;
        let wanted = [
            "r inserted 1",
            "r inserted 2",
            "r inserted 3",
            "r updated 1",
            "r deleted 2",
            "r inserted 4",
            "r deleted 1",
        ];
        assert_eq!(appended(&session).await, wanted);
        run(
            &session,
            "TRUNCATE postrider.outbox; INSERT INTO base VALUES (1, 0);
            INSERT INTO heir VALUES (2, 0); INSERT INTO grandheir VALUES (3, 0);
            UPDATE base SET n = 1; UPDATE heir SET n = 2; DELETE FROM base",
        )
        .await;
        let mut found = appended(&session).await;
        found.sort();
        let mut wanted = [
            ["b inserted 1", "h inserted 2", "g inserted 3"],
            ["b updated 1", "h updated 2", "g updated 3"],
            ["h updated 2", "g updated 3", "b deleted 1"],
            ["h deleted 2", "g deleted 3", ""],
        ]
        .concat();
        wanted.retain(|event| !event.is_empty());
        wanted.sort_unstable();
        assert_eq!(found, wanted, "each change once");
        assert_eq!(column(&session, LOST).await, [""; 0]);
    }
}

const LOST: &str = "SELECT postrider.table_feed_warnings('outbox')";

#[tokio::test]
async fn no_change_is_in_two_feeds_or_in_none() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE part (at integer PRIMARY KEY) PARTITION BY RANGE (at);
        CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (10);
        CREATE TABLE base (id integer PRIMARY KEY);
        CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (base);
        SELECT postrider.setup_feed('part_1')",
    )
    .await;
    for (sql, text) in [
        ("SELECT postrider.setup_feed('part')", "teardown_feed('part_1')"),
        ("SELECT postrider.setup_feed('base')", "setup_feed('heir')"),
        (
            "SELECT postrider.teardown_feed('part_1'); SELECT postrider.setup_feed('part');
            SELECT postrider.setup_feed('part_1')",
            "teardown_feed('part')",
        ),
    ] {
        let (code, message) = refusal(&session, sql).await;
        assert!(code == "22023" && message.contains(text), "{sql}: {code} {message}");
    }
    // Without triggers the application says what happened, wherever.
    run(&session, "SELECT postrider.setup_feed('base', events => '{}')").await;
}

/// A table becomes another's after its feed was made: told, with a statement that mends it.
#[tokio::test]
async fn triggers_that_no_longer_see_all_changes_are_told_with_the_remedy() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        let options = PostgresOptions::new(database.url()).tick_interval(Duration::ZERO);
        let store = PostgresStore::open(options.clone()).await.expect("open");
        run(
            &session,
            "CREATE SCHEMA \"App; x\"; CREATE TABLE \"App; x\".\"Le'af\" (id integer PRIMARY KEY);
            CREATE TABLE base (id integer PRIMARY KEY);
            CREATE TABLE orphan (id integer PRIMARY KEY);
            SELECT postrider.setup_feed('\"App; x\".\"Le''af\"', topic => 't', payload => 'row'),
                postrider.setup_feed('base'), postrider.setup_feed('orphan')",
        )
        .await;
        assert_eq!(store.warnings().await.expect("look"), [""; 0]);
        run(
            &session,
            "CREATE TABLE root (id integer PRIMARY KEY) PARTITION BY RANGE (id);
            ALTER TABLE root ATTACH PARTITION \"App; x\".\"Le'af\" FOR VALUES FROM (0) TO (9);
            CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (base);
            ALTER TABLE orphan DISABLE TRIGGER postrider_inserted;
            INSERT INTO root VALUES (1); INSERT INTO heir VALUES (1);
            INSERT INTO orphan VALUES (1)",
        )
        .await;
        assert_eq!(appended(&session).await, [""; 0], "this is what is told");
        let other = PostgresStore::open(options.outbox("other")).await.expect("open");
        assert_eq!(other.warnings().await.expect("look"), [""; 0], "each outbox has its own");
        let told = store.warnings().await.expect("look");
        assert_eq!(told.len(), 4, "{told:?}");
        for part in ["become a partition", "part of an inheritance", "in no feed", "disabled"] {
            assert!(told.iter().any(|text| text.contains(part)), "{part}: {told:?}");
        }
        // Those that inherit come first: the order in which they are told is not that of need.
        let mut remedies: Vec<_> =
            told.iter().map(|text| &text[text.find("SELECT").expect("a statement")..]).collect();
        remedies.sort_by_key(|remedy| !remedy.contains("heir"));
        for remedy in remedies {
            run(&session, remedy).await;
        }
        assert_eq!(store.warnings().await.expect("look"), [""; 0]);
        run(
            &session,
            "INSERT INTO root VALUES (2); INSERT INTO heir VALUES (2);
            INSERT INTO orphan VALUES (2)",
        )
        .await;
        let wanted = ["t inserted 2", "public.heir inserted 2", "public.orphan inserted 2"];
        assert_eq!(appended(&session).await, wanted);
    }
}

/// What follows its table: a feed is the table's, whatever that is called.
#[tokio::test]
async fn a_renamed_table_keeps_its_feed_and_its_old_name_is_free() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        run(
            &session,
            "CREATE TABLE item (id integer PRIMARY KEY); SELECT postrider.setup_feed('item');
            ALTER TABLE item RENAME TO item_old;
            CREATE TABLE item (owner text, name text PRIMARY KEY);
            SELECT postrider.setup_feed('item', '{owner}', topic => 'new');
            INSERT INTO item_old VALUES (7); INSERT INTO item VALUES ('ann', 'x')",
        )
        .await;
        assert_eq!(appended(&session).await, ["public.item inserted 7", "new inserted ann"]);
        let key = |key: &str| format!("inserted {key}");
        let old = changes(&session, "item_old").await;
        assert_eq!(old, [format!("{} {{\"id\": 7}} {{\"id\": 7}}", key("7"))]);
        // What was dropped is forgotten when the next one is set up or ended.
        run(&session, "DROP TABLE item; SELECT postrider.teardown_feed('item_old')").await;
        let left = "SELECT source::text FROM postrider.table_feed";
        assert_eq!(column(&session, left).await, [""; 0]);
    }
}

/// A dump names the table, whose number is another one afterwards.
#[tokio::test]
async fn a_dump_keeps_the_feeds_of_tables() {
    let database = database(Version::V15);
    let old = session(&database.url()).await;
    run(
        &old,
        "CREATE SCHEMA app; CREATE TABLE app.item (id integer PRIMARY KEY);
        CREATE TABLE reading (at integer PRIMARY KEY) PARTITION BY RANGE (at);
        CREATE TABLE reading_1 PARTITION OF reading FOR VALUES FROM (0) TO (10);
        SELECT postrider.setup_feed('app.item', topic => 'i'),
            postrider.setup_feed('reading', topic => 'r');
        INSERT INTO app.item VALUES (1)",
    )
    .await;
    let dump = tempfile::NamedTempFile::new().expect("a file");
    let mut pg_dump = Command::new(Version::V18.program("pg_dump").expect("pg_dump"));
    pg_dump.arg("-f").arg(dump.path()).arg("-d").arg(database.url());
    assert!(pg_dump.status().expect("pg_dump runs").success());
    let target = postrider_servers::postgres::shared(Version::V18).expect("a server");
    let mut psql = Command::new(Version::V18.program("psql").expect("psql"));
    psql.args(["-q", "-v", "ON_ERROR_STOP=1", "-d"]).arg(target.url());
    let restored = psql.arg("-f").arg(dump.path()).output().expect("psql runs");
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let new = session(&target.url()).await;
    run(&new, "INSERT INTO app.item VALUES (2); INSERT INTO reading VALUES (3)").await;
    let wanted = ["i inserted 1", "i inserted 2", "r inserted 3"];
    assert_eq!(appended(&new).await, wanted);
    assert_eq!(column(&new, LOST).await, [""; 0]);
}

/// An outbox is shared: with other tables' events, and with whatever the application appends.
#[tokio::test]
async fn what_else_is_in_the_outbox_only_moves_the_position() {
    for version in Version::ALL {
        let database = database(version);
        let session = session(&database.url()).await;
        run(
            &session,
            "CREATE DOMAIN small AS integer CHECK (VALUE < 100);
            CREATE TABLE item (id small PRIMARY KEY);
            SELECT postrider.setup_feed('item', topic => 't'); INSERT INTO item VALUES (1)",
        )
        .await;
        for (topic, payload) in [
            ("elsewhere", "'\\xff00'::bytea"),
            ("elsewhere", "'no JSON'::text"),
            ("t", "'\\xff00'::bytea"),
            ("t", "'no JSON'::text"),
            ("t", "'\"\\u0000\"'::json"),
            ("t", "'[1]'::json"),
            ("t", "convert_to(repeat('[', 100000), 'UTF8')"),
        ] {
            let sql = format!(
                "SELECT postrider.append('1', '{topic}', 'alien', {payload},
                    content_type => 'application/json')"
            );
            run(&session, &sql).await;
        }
        // An object is an event of the table, also where its key is like no row's.
        run(
            &session,
            "SELECT postrider.append('1', 't', 'odd', '{\"id\": \"one\"}'::json);
            SELECT postrider.append('1', 't', 'large', '{\"id\": 100}'::json);
            SELECT postrider.append('1', 't', 'like', '{\"id\": 1}'::json)",
        )
        .await;
        assert_eq!(
            changes(&session, "item").await,
            [
                "inserted 1 {\"id\": 1} {\"id\": 1}",
                "odd 1 {\"id\": \"one\"} gone",
                "large 1 {\"id\": 100} gone",
                "like 1 {\"id\": 1} {\"id\": 1}",
            ]
        );
        let sql = "SELECT count(*)::text FROM postrider.read_table_feed('item',
            postrider.partition_of('1', 8), NULL) AS r WHERE r.appended_at IS NULL
                AND num_nulls(r.type, r.key, r.primary_key, r.row) = 4";
        assert_eq!(column(&session, sql).await, ["7"]);
    }
}

/// The application inserts into such a table itself; a trigger can't.
#[tokio::test]
async fn an_adopted_table_takes_no_other_tables_changes() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE item (id integer PRIMARY KEY);
        CREATE TABLE box (id uuid, aggregatetype text, aggregateid text, type text, payload text);
        SELECT postrider.adopt_table('box', add_columns => true)",
    )
    .await;
    let (code, text) =
        refusal(&session, "SELECT postrider.setup_feed('item', outbox => 'box')").await;
    assert!(code == "22023" && text.contains("adopted") && text.contains("'outbox'"), "{text}");
    run(&session, "INSERT INTO item VALUES (1)").await;
}

/// One statement over more rows than there are locks; and a table without triggers.
#[tokio::test]
async fn bulk_loads_and_explicit_events() {
    let database = database(Version::V15);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE item (id integer PRIMARY KEY); SELECT postrider.setup_feed('item');
        INSERT INTO item SELECT generate_series(1, 25000)",
    )
    .await;
    let sql = "SELECT count(*) || ' ' || count(DISTINCT key) || ' ' || bool_and(key::integer = seq)
        FROM postrider.outbox";
    assert_eq!(column(&session, sql).await, ["25000 25000 true"]);
    run(
        &session,
        "SELECT postrider.setup_feed('item', events => '{}'); INSERT INTO item VALUES (0);
        SELECT postrider.append_change('item', 'archived', '{\"id\": 0}')",
    )
    .await;
    let sql = "SELECT type || ' ' || key FROM postrider.outbox WHERE key = '0'";
    assert_eq!(column(&session, sql).await, ["archived 0"]);
}

/// Inserts, and raises versions of rows that others raise, too; over lost connections.
async fn write(url: String, stop: Arc<AtomicBool>) {
    let mut session = None;
    while !stop.load(Ordering::SeqCst) {
        let Some(present) = &session else {
            session = connect(&url).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (hold, keep, insert, row) = {
            let mut random = rand::rng();
            (
                random.random_range(0..30),
                random.random_bool(0.9),
                random.random_bool(0.3),
                random.random_range(1..12),
            )
        };
        let change = match insert {
            true => "INSERT INTO item (version) SELECT 0 FROM generate_series(1, 3)".to_owned(),
            false => format!("UPDATE item SET version = version + 1 WHERE id = {row}"),
        };
        let whole = async {
            present.batch_execute(&format!("BEGIN; {change}")).await?;
            tokio::time::sleep(Duration::from_millis(hold)).await;
            present.batch_execute(if keep { "COMMIT" } else { "ROLLBACK" }).await
        };
        if whole.await.is_err() {
            session = None;
        }
    }
}

async fn under_faults(version: Version) {
    let database = database(version);
    let session = session(&database.url()).await;
    run(
        &session,
        "CREATE TABLE item (id bigserial PRIMARY KEY, version integer NOT NULL);
        SELECT postrider.setup_feed('item', events => '{inserted,updated}', payload => 'row');
        INSERT INTO item (version) SELECT 0 FROM generate_series(1, 12)",
    )
    .await;
    let options = PostgresOptions::new(database.url()).tick_interval(Duration::ZERO);
    let store = PostgresStore::open(options).await.expect("open");
    let (stop, read_on) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let writers: Vec<_> =
        (0..6).map(|_| tokio::spawn(write(database.url(), Arc::clone(&stop)))).collect();
    let reader = tokio::spawn(follow(store.clone(), Arc::clone(&read_on)));
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        run(
            &session,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE pid <> pg_backend_pid() AND datname = current_database()",
        )
        .await;
    }
    stop.store(true, Ordering::SeqCst);
    for writer in writers {
        writer.await.expect("a writer");
    }
    read_on.store(true, Ordering::SeqCst);
    let seen = reader.await.expect("a reader");
    let mut versions: HashMap<i64, i32> = HashMap::new();
    for entry in &seen {
        let Entry::Record(record) = entry else { panic!("unreadable: {entry:?}") };
        let row: serde_json::Value = serde_json::from_slice(record.event.payload()).expect("JSON");
        let (id, version) =
            (row["id"].as_i64().expect("an id"), row["version"].as_i64().expect("a version"));
        assert_eq!(record.event.key().as_str(), id.to_string());
        let next = versions.entry(id).or_insert(0);
        assert_eq!(version, i64::from(*next), "row {id}: each version once, in order");
        *next += 1;
    }
    let rows = session.query("SELECT id, version FROM item", &[]).await.expect("read");
    assert!(seen.len() > 100, "the writers were at work: {}", seen.len());
    assert_eq!(rows.len(), versions.len());
    for row in rows {
        let (id, version): (i64, i32) = (row.get(0), row.get(1));
        assert_eq!(versions[&id], version + 1, "row {id}: none is missing");
    }
    let replay = Follower::new(store).entries().await.expect("read");
    assert_eq!(replay.len(), seen.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_lose_and_reorder_no_change_of_a_table() {
    for version in Version::ALL {
        under_faults(version).await;
    }
}
