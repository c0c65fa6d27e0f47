//! Least privilege: each part does its work, and is refused what is not its own.

use std::collections::BTreeMap;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Database, Version};
use postrider_store_postgres::{Outbox, PostgresOptions, PostgresStore, SchemaOnOpen, schema_sql};
use tokio_postgres::Client;

use crate::support::{World, database, event, on_both_versions, p, session};

on_both_versions! {
    a_writer_appends_and_does_nothing_else
    a_reader_follows_and_writes_nothing
    a_relay_does_its_work_and_alters_nothing
    a_grant_covers_what_comes_later_and_can_be_taken_back
    any_name_will_do
    others_routines_in_the_schema_keep_their_grants
}

/// A role of its own for one database; dropped with this value, before the database.
struct Role<'a> {
    database: &'a Database,
    name: String,
}

impl<'a> Role<'a> {
    fn new(database: &'a Database, suffix: &str) -> Self {
        let name = format!("{}{suffix}", database.name());
        database.psql(&format!("CREATE ROLE {} LOGIN", quoted(&name))).expect("a role");
        Self { database, name }
    }

    async fn session(&self) -> Client {
        session(&self.url()).await
    }

    fn url(&self) -> String {
        let name: String = self.name.bytes().map(|byte| format!("%{byte:02X}")).collect();
        self.database.url_as(&name, None)
    }
}

impl Drop for Role<'_> {
    fn drop(&mut self) {
        let name = quoted(&self.name);
        let _ = self.database.psql(&format!("DROP OWNED BY {name}; DROP ROLE {name}"));
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn grant(database: &Database, call: &str, role: &str) {
    let role = role.replace('\'', "''");
    database.psql(&format!("SELECT postrider.{call}('{role}')")).expect("granted");
}

/// Every statement is refused for want of a privilege, and for nothing else.
async fn refused(client: &Client, statements: &[&str]) {
    for sql in statements {
        let error = client.batch_execute(sql).await.map_or_else(|e| e, |()| panic!("done: {sql}"));
        let code = error.code().map(|code| code.code().to_owned());
        assert_eq!(code.as_deref(), Some("42501"), "{sql}: {error:?}");
    }
}

const ALTERS: &[&str] = &[
    "CREATE TABLE postrider.mine (a integer)",
    "CREATE FUNCTION postrider.mine() RETURNS integer LANGUAGE sql RETURN 1",
    "ALTER TABLE postrider.outbox ADD COLUMN mine integer",
    "ALTER SEQUENCE postrider.outbox_seq CACHE 32",
    "DROP TABLE postrider.outbox",
    "TRUNCATE postrider.outbox",
    "TRUNCATE postrider.outbox_s0",
    "CREATE INDEX ON postrider.outbox (key)",
    "DROP SCHEMA postrider CASCADE",
    "SELECT setval('postrider.outbox_segment', 3)",
    "SELECT nextval('postrider.outbox_segment')",
    "SELECT setval('postrider.outbox_seq', 1)",
    "SELECT nextval('postrider.outbox_seq')",
    "SELECT postrider.grant_relay(current_user)",
    "SELECT postrider.apply_grants()",
    "INSERT INTO postrider.role_grant VALUES (current_user, 'relay', false)",
    "SELECT postrider.outbox_raise(16)",
    "DELETE FROM postrider.outbox",
    "UPDATE postrider.outbox SET topic = 't'",
    "DELETE FROM postrider.outbox_tick",
    "UPDATE postrider.feed SET payload = 'json'",
];

async fn a_writer_appends_and_does_nothing_else(version: Version) {
    let world = World::new(version, 1).await;
    let role = Role::new(&world.database, "_writer");
    let mut client = role.session().await;
    refused(&client, &["SELECT postrider.append('k', 't', 'T', 'x')"]).await;
    grant(&world.database, "grant_writer", &role.name);
    grant(&world.database, "grant_writer", &role.name);
    client.batch_execute("SELECT postrider.append('k', 't', 'T', '0')").await.expect("append");
    let bare =
        "INSERT INTO postrider.outbox (key, topic, type, payload) VALUES ('k', 't', 'T', '1')";
    client.batch_execute(bare).await.expect("a bare INSERT");
    let tx = client.transaction().await.expect("begin");
    let outbox = Outbox::default();
    let id = EventId::from_uuid(uuid::Uuid::from_u128(1));
    let given = crate::support::builder("k").id(id).build().expect("valid");
    outbox.append(&tx, &[event("k", "2")]).await.expect("append");
    outbox.append(&tx, &[given, event("l", "4")]).await.expect("append");
    let many: Vec<_> = (0..1_200).map(|n| event(&format!("k{n}"), "x")).collect();
    outbox.append(&tx, &many).await.expect("append many");
    tx.commit().await.expect("commit");
    assert_eq!(world.records(&p(0, 1)).await.len(), 1_205);
    let values = "VALUES ('k', 't', 'T', ''";
    let columns = "INSERT INTO postrider.outbox (key, topic, type, payload";
    let own = [
        format!("{columns}, xid) {values}, '1')"),
        format!("{columns}, segment) {values}, 3)"),
        format!("{columns}, seq) OVERRIDING SYSTEM VALUE {values}, 1)"),
        format!("{columns}, created_at) {values}, 'infinity')"),
        format!("{columns}) {values}) RETURNING seq"),
        format!("{} {values})", columns.replace("outbox (", "outbox_s0 (") + ")"),
    ];
    refused(&client, &own.each_ref().map(String::as_str)).await;
    refused(&client, ALTERS).await;
    refused(
        &client,
        &[
            "SELECT * FROM postrider.outbox",
            "SELECT count(*) FROM postrider.outbox_s0",
            "SELECT * FROM postrider.outbox_tick",
            "SELECT * FROM postrider.outbox_given",
            "INSERT INTO postrider.outbox_given (id) VALUES (gen_random_uuid())",
            "SELECT * FROM postrider.outbox_read(0, 0, 10, 1000)",
            "SELECT * FROM postrider.read_feed('outbox', 0, NULL, 10)",
            "SELECT * FROM postrider.outbox_tick()",
            "SELECT * FROM postrider.tick()",
            "SELECT * FROM postrider.outbox_prune(0, 1)",
            "SELECT * FROM postrider.dead_letter",
            "SELECT * FROM postrider.checkpoint",
            "SELECT * FROM postrider.document",
            "INSERT INTO postrider.inbox (consumer, id) VALUES ('c', gen_random_uuid())",
        ],
    )
    .await;
}

async fn a_reader_follows_and_writes_nothing(version: Version) {
    let world = World::new(version, 1).await;
    let role = Role::new(&world.database, "_reader");
    grant(&world.database, "grant_reader", &role.name);
    world.append(vec![event("k", "1")]).await;
    let client = role.session().await;
    for sql in [
        "SELECT * FROM postrider.tick()",
        "SELECT * FROM postrider.read_feed('outbox', 0, NULL, 10)",
        "SELECT * FROM postrider.outboxes()",
        "SELECT * FROM postrider.partitions()",
        "SELECT postrider.head()",
        "SELECT postrider.position_at('outbox', now() - interval '1 second')",
        "SELECT * FROM postrider.outbox",
    ] {
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }
    let options = PostgresOptions::new(role.url()).on_open(SchemaOnOpen::Require);
    let store = PostgresStore::open(options).await.expect("open");
    let page = Feed::read(&store, &p(0, 1), &Position::START, crate::support::LIMIT).await;
    assert_eq!(page.expect("read").entries.len(), 1);
    refused(&client, ALTERS).await;
    refused(
        &client,
        &[
            "SELECT postrider.append('k', 't', 'T', 'x')",
            "SELECT postrider.outbox_claim('{}')",
            "SELECT postrider.outbox_lock_all()",
            "INSERT INTO postrider.outbox (key, topic, type, payload) VALUES ('k', 't', 'T', '')",
            "INSERT INTO postrider.outbox_tick SELECT * FROM postrider.outbox_tick",
            "DELETE FROM postrider.checkpoint",
            "SELECT * FROM postrider.lease",
            "SELECT * FROM postrider.outbox_prune(0, 1)",
            "SELECT postrider.outbox_rotate(0)",
            "SELECT * FROM postrider.document",
        ],
    )
    .await;
}

async fn a_relay_does_its_work_and_alters_nothing(version: Version) {
    let world = World::new(version, 1).await;
    let role = Role::new(&world.database, "_relay");
    grant(&world.database, "grant_relay", &role.name);
    world.append(vec![event("k", "1"), event("k", "2")]).await;
    let options = PostgresOptions::new(role.url())
        .on_open(SchemaOnOpen::Require)
        .tick_interval(Duration::ZERO);
    let store = PostgresStore::open(options).await.expect("open");
    let relay = World { database: database(version).await, store };
    let records = relay.records(&p(0, 1)).await;
    assert_eq!(records.len(), 2);
    let lease = relay.held(&p(0, 1), "relay").await;
    let sink = crate::support::consumer("sink");
    let store = &relay.store;
    let last = records[1].position.clone();
    let letter = NewDeadLetter {
        entry: Entry::Record(records[0].clone()),
        state: DeadLetterState::Parked,
        reason: "refused".to_owned(),
        attempts: 1,
    };
    store.park(&lease, &sink, &[letter]).await.expect("park");
    store.advance(&lease, &sink, &last, Tally::default()).await.expect("advance");
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 100, dry_run: false };
    store.prune(Some(&lease), &policy).await.expect("prune");
    store.prune(None, &policy).await.expect("prune");
    store.release(&lease).await.expect("release");
    let client = role.session().await;
    refused(&client, ALTERS).await;
    refused(
        &client,
        &[
            "SELECT postrider.append('k', 't', 'T', 'x')",
            "INSERT INTO postrider.outbox (key, topic, type, payload) VALUES ('k', 't', 'T', '')",
            "INSERT INTO postrider.outbox_tick SELECT * FROM postrider.outbox_tick",
            "DELETE FROM postrider.outbox_given",
            "SELECT * FROM postrider.document",
        ],
    )
    .await;
}

async fn a_grant_covers_what_comes_later_and_can_be_taken_back(version: Version) {
    let world = World::new(version, 1).await;
    let role = Role::new(&world.database, "_later");
    grant(&world.database, "grant_writer", &role.name);
    grant(&world.database, "grant_reader", &role.name);
    let options = PostgresOptions::new(world.database.url()).outbox("Orders; new");
    PostgresStore::open(options).await.expect("open");
    let client = role.session().await;
    let append = "SELECT postrider.\"Orders; new_append\"('k', 't', 'T', 'x')";
    client.batch_execute(append).await.expect("append");
    client.batch_execute("SELECT * FROM postrider.\"Orders; new\"").await.expect("read");
    // Taking one part back leaves the other.
    grant(&world.database, "revoke_writer", &role.name);
    grant(&world.database, "revoke_writer", &role.name);
    refused(&client, &[append, "SELECT postrider.append('k', 't', 'T', 'x')"]).await;
    client.batch_execute("SELECT * FROM postrider.\"Orders; new\"").await.expect("read");
    grant(&world.database, "revoke_reader", &role.name);
    refused(&client, &["SELECT * FROM postrider.outbox"]).await;
    let open = world.database.psql(
        "SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = 'postrider'::regnamespace
         AND has_function_privilege('public', p.oid, 'EXECUTE')",
    );
    assert_eq!(open.expect("a query"), "", "PUBLIC may call nothing");
    let loose = world.database.psql(
        "SELECT p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace = 'postrider'::regnamespace
         AND p.prosecdef AND NOT coalesce(
            p.proconfig::text LIKE '%search_path=pg_catalog, pg_temp%', false)",
    );
    assert_eq!(loose.expect("a query"), "", "whoever acts as the owner has a fixed search_path");
    let missing = world.database.psql("SELECT postrider.grant_writer('nobody of that name')");
    assert!(missing.map_or_else(|e| e.to_string(), |_| String::new()).contains("there is no role"));
}

/// Every routine of schema public, with its rights as the catalogue has them.
fn routines(database: &Database) -> BTreeMap<String, String> {
    let sql = "SELECT p.oid::regprocedure || E'\\t' || coalesce(p.proacl::text, 'default') || ' '
            || has_function_privilege('public', p.oid, 'EXECUTE')
        FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace";
    let rows = database.psql(sql).expect("a query");
    rows.lines().filter_map(|row| row.split_once('\t')).map(|(a, b)| (a.into(), b.into())).collect()
}

/// The application keeps its routines in the same schema, of the same names even.
async fn others_routines_in_the_schema_keep_their_grants(version: Version) {
    let database = database(version).await;
    let (app, other) = (Role::new(&database, "_app"), Role::new(&database, "_other"));
    let (app_name, other_name) = (quoted(&app.name), quoted(&other.name));
    let made = format!(
        "GRANT CREATE ON SCHEMA public TO {other_name}; GRANT USAGE ON SCHEMA public TO {app_name};
         CREATE FUNCTION digest(text) RETURNS text LANGUAGE sql AS 'SELECT $1';
         CREATE FUNCTION head(integer) RETURNS integer LANGUAGE sql AS 'SELECT $1';
         REVOKE ALL ON FUNCTION head(integer) FROM PUBLIC;
         GRANT EXECUTE ON FUNCTION head(integer) TO {app_name};
         CREATE FUNCTION append(integer) RETURNS integer LANGUAGE sql AS 'SELECT $1';
         CREATE FUNCTION box_read(text) RETURNS text LANGUAGE sql AS 'SELECT $1';
         CREATE PROCEDURE tick(integer) LANGUAGE sql AS 'SELECT $1';
         CREATE AGGREGATE partitions(integer) (SFUNC = int4pl, STYPE = integer);
         CREATE TABLE item (id integer PRIMARY KEY);
         CREATE TABLE outboxevent (id uuid, aggregatetype text, aggregateid text, type text,
             payload text);
         SET ROLE {other_name};
         CREATE FUNCTION uuid7(integer) RETURNS integer LANGUAGE sql AS 'SELECT $1';
         REVOKE ALL ON FUNCTION uuid7(integer) FROM PUBLIC"
    );
    database.psql(&made).expect("the application's own");
    let foreign = routines(&database);
    assert_eq!(foreign.len(), 7);
    let options = |outbox: &str| {
        PostgresOptions::new(database.url()).schema("public").outbox(outbox).partitions(1)
    };
    let name = app.name.replace('\'', "''");
    let all = |call: &str| {
        let parts = ["writer", "reader", "relay", "documents", "inbox"];
        parts.map(|part| format!("SELECT {call}_{part}('{name}')")).join(";")
    };
    let steps = [
        None,
        Some("SELECT adopt_table('outboxevent', add_columns => true, outbox => 'box')".to_owned()),
        Some("SELECT setup_feed('item')".to_owned()),
        Some(all("grant")),
        Some(
            "SELECT adopt_table('outboxevent', add_columns => true, outbox => 'box',
            mapping => '{\"topic\": {\"value\": \"t\"}}')"
                .to_owned(),
        ),
        Some(all("revoke")),
        Some("SELECT release_table('box')".to_owned()),
    ];
    let mut most = 0;
    for step in steps {
        match &step {
            None => {
                PostgresStore::open(options("outbox")).await.expect("init");
                PostgresStore::open(options("orders")).await.expect("another outbox");
            }
            Some(sql) => drop(database.psql(sql).expect(sql)),
        }
        let now = routines(&database);
        for (routine, rights) in &foreign {
            assert_eq!(now.get(routine), Some(rights), "{routine} after {step:?}");
        }
        let own: Vec<_> = now.iter().filter(|(name, _)| !foreign.contains_key(*name)).collect();
        for (routine, rights) in &own {
            assert!(rights.ends_with(" false"), "PUBLIC may call {routine} after {step:?}");
        }
        most = most.max(own.len());
        let known = database.psql("SELECT count(*) FROM routine").expect("a query");
        assert_eq!(known.trim(), own.len().to_string(), "all of ours are known as ours");
    }
    assert!(most > 100, "init makes {most}");
    let usage = "SELECT count(*) FROM pg_namespace AS n, aclexplode(n.nspacl) AS a
        WHERE n.nspname = 'public' AND a.grantee::regrole::text";
    let let_in = |name: &str| {
        let sql = format!("{usage} = quote_ident('{}')", name.replace('\'', "''"));
        database.psql(&sql).expect("a query").trim() == "1"
    };
    assert!(let_in(&app.name), "whom the application let in stays in");
    let own = Role::new(&database, "_own");
    for (call, stays) in [
        ("grant_writer", true),
        ("grant_inbox", true),
        ("revoke_writer", true),
        ("revoke_inbox", false),
    ] {
        database.psql(&format!("SELECT {call}('{}')", own.name)).expect(call);
        assert_eq!(let_in(&own.name), stays, "whom Postrider let in, after {call}");
    }
    // The table's own name is taken here, by the table.
    let taken = database.psql("SELECT adopt_table('outboxevent', add_columns => true)");
    let text = taken.map_or_else(|error| error.to_string(), |_| String::new());
    assert!(text.contains("outbox => 'another_name'"), "{text}");
}

async fn any_name_will_do(version: Version) {
    let database = database(version).await;
    for (n, (schema, outbox, suffix)) in [
        ("post\"rider; drop", "out'box\\", "; drop role \"x\" --"),
        ("Großes Schema", "Bestellungen €", " 'Ünï' $1"),
        ("a.b", "%I%s {schema}", "{}%s"),
        ("select", "table", "A b"),
        ("pos$t", "o u t b o x", "."),
    ]
    .into_iter()
    .enumerate()
    {
        let role = Role::new(&database, suffix);
        let options = |url: String| PostgresOptions::new(url).schema(schema).outbox(outbox);
        let own = options(database.url()).partitions(1);
        match n % 2 {
            0 => drop(PostgresStore::open(own.clone()).await.expect("open")),
            _ => drop(database.psql(&schema_sql(&own)).expect("the SQL is valid")),
        }
        let owner = session(&database.url()).await;
        for part in ["writer", "relay"] {
            let call = format!("SELECT {}.grant_{part}($1)", quoted(schema));
            owner.query(&call, &[&role.name]).await.expect("granted");
        }
        let mut client = role.session().await;
        let tx = client.transaction().await.expect("begin");
        let handle = Outbox::new(schema, outbox).expect("a legal name");
        handle.append(&tx, &[event("k", "1"), event("k", "2")]).await.expect("append");
        tx.commit().await.expect("commit");
        let sql = "('k', 'orders', 'OrderPlaced', '3')";
        let append = format!("{}.{}", quoted(schema), quoted(&format!("{outbox}_append")));
        client.batch_execute(&format!("SELECT {append}{sql}")).await.expect("append by SQL");
        let store = PostgresStore::open(options(role.url()).on_open(SchemaOnOpen::Require)).await;
        let store = store.expect("open as the role");
        let page = Feed::read(&store, &p(0, 1), &Position::START, crate::support::LIMIT).await;
        assert_eq!(page.expect("read").entries.len(), 3, "{schema} {outbox}");
        let forbidden = format!("DROP TABLE {}.{}", quoted(schema), quoted(outbox));
        refused(&client, &[&forbidden]).await;
    }
}
