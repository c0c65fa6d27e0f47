//! An application's own table, read from PostgreSQL's log by the binary.
//!
//! What lives here: a table as Debezium's event router has it, from `init` to a lost slot. What
//! does not: its values and its faults, which are the store's tests.
//! Invariant: a row that is deleted in the transaction that made it is delivered.

use postrider_servers::postgres::{Database, Options, Version};
use rustix::process::Signal;

use crate::harness::{Home, Running, eventually};

/// Adopted by the database's owner, and read by a role that may do no more than a relay.
const TABLE: &str = "create schema app;
    create table app.outboxevent (id uuid primary key default gen_random_uuid(),
        aggregatetype text not null, aggregateid text not null, type text not null, payload jsonb);
    select postrider.adopt_table('app.outboxevent', add_columns => true);
    create role courier login replication;
    grant usage on schema app to courier;
    select postrider.grant_relay('courier')";

const SLOT: &str = "postrider_outboxevent";

fn configure(home: &Home, url: &str, outbox: &str) {
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"postgres-wal\"\nurl = \"{url}\"\n{outbox}\n\n\
             [[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"\nfrom = \"oldest\"\n\n\
             [admin]\nlisten = \"127.0.0.1:0\"\n"
        ),
    );
}

/// As Debezium's users write it: nothing stays in the table.
fn pass(database: &Database, event_type: &str) {
    let sql = format!(
        "begin; insert into app.outboxevent (aggregatetype, aggregateid, type, payload)
            values ('order', '42', '{event_type}', '{{\"order\": 42}}');
         delete from app.outboxevent; commit"
    );
    database.psql(&sql).expect("written");
}

fn delivered(home: &Home) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(home.path("events.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn types(home: &Home) -> Vec<String> {
    let own = |event: &serde_json::Value| event["type"].as_str().expect("a text").to_owned();
    delivered(home).iter().map(own).collect()
}

fn until(home: &Home, expected: &[&str]) {
    eventually("all is delivered", || (types(home).len() >= expected.len()).then_some(()));
    assert_eq!(types(home), expected);
}

fn status(home: &Home) -> serde_json::Value {
    home.postrider(&["status", "--json"]).expect(0).json()
}

fn stop(relay: Running) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn debeziums_table_is_read_and_what_is_deleted_at_once_is_delivered() {
    for version in Version::ALL {
        let server = Options::new(version).launch().expect("a server");
        let database = server.create_database().expect("a database");
        let home = Home::new();
        configure(&home, &database.url(), "");
        home.postrider(&["init"]).expect(0);
        database.psql(TABLE).expect("adopted");
        configure(&home, &database.url(), "outbox = \"outboxevent\"");
        home.postrider(&["init"]).expect(0);
        configure(&home, &database.url_as("courier", None), "outbox = \"outboxevent\"");
        let relay = home.start(&["run"]);
        eventually("the slot is read", || {
            (status(&home)["log"]["state"] == "active").then_some(())
        });
        pass(&database, "First");
        pass(&database, "Second");
        until(&home, &["First", "Second"]);
        let first = &delivered(&home)[0];
        assert_eq!((&first["key"], &first["topic"]), (&"42".into(), &"order".into()));
        assert_eq!(first["data"].to_string(), "{\"order\":42}");
        let advice = status(&home)["advice"].to_string();
        assert!(advice.contains("deleted by then are lost"), "{advice}");
        assert!(!advice.contains("Postrider's append"), "that is the feed's: {advice}");
        stop(relay);
        // What the slot took along is read from the table, which has it still.
        let kept = "insert into app.outboxevent (aggregatetype, aggregateid, type, payload)
            values ('order', '42', 'Third', '{}')";
        database.psql(kept).expect("written");
        let drop = format!("select pg_drop_replication_slot('{SLOT}')");
        eventually("the slot is dropped", || database.psql(&drop).ok());
        let relay = home.start(&["run"]);
        until(&home, &["First", "Second", "Third"]);
        stop(relay);
        eventually("the slot is dropped", || database.psql(&drop).ok());
    }
}

#[test]
fn a_table_whose_columns_changed_is_refused_with_the_remedy() {
    let server = Options::new(Version::V18).launch().expect("a server");
    let database = server.create_database().expect("a database");
    let home = Home::new();
    configure(&home, &database.url(), "");
    home.postrider(&["init"]).expect(0);
    database.psql(TABLE).expect("adopted");
    configure(&home, &database.url(), "outbox = \"outboxevent\"");
    home.postrider(&["init"]).expect(0);
    database.psql("alter table app.outboxevent rename payload to body").expect("renamed");
    let remedy =
        "adopt_table('app.outboxevent', '{\"payload\":\"a_column\"}', true, 'outboxevent')";
    home.postrider(&["run"]).expect(3).err_has(&["without a column", "payload", remedy]);
}
