//! init, tail, status, prune, and databases that are not ready.

use std::time::Duration;

use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};

use crate::harness::Home;

#[test]
fn init_is_idempotent_and_its_sql_can_be_reviewed() {
    let home = Home::new();
    let sql = home.postrider(&["init", "--sql", "--source", "app.db"]).expect(0).out;
    assert!(sql.to_ascii_lowercase().contains("create table"), "{sql}");
    assert!(!home.path("app.db").exists(), "a review changes nothing");
    for _ in 0..2 {
        let done = home.postrider(&["init", "--source", "app.db"]).expect(0);
        assert!(done.out.contains("is ready, with 8 partitions"), "{}", done.out);
    }
}

#[test]
fn init_says_when_an_outbox_keeps_another_number_of_partitions() {
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\npartitions = 16\n",
    );
    let done = home.postrider(&["init"]).expect(0);
    let text = "is ready, with 8 partitions\n[source] partitions = 16 changes nothing";
    assert!(done.out.contains(text), "{}", done.out);
}

#[test]
fn tail_shows_events_in_order_and_payloads_only_when_asked() {
    let home = Home::with_outbox();
    home.append(&[("a", "First"), ("b", "Other"), ("a", "Second")]);
    let base = ["tail", "--source", "app.db", "--from", "oldest", "--no-follow", "--json"];
    let done = home.postrider(&base).expect(0);
    assert_eq!(done.json_lines().len(), 3);
    assert!(!done.out.contains("payload\""), "{}", done.out);
    let positions: Vec<_> = done.json_lines().iter().map(|l| l["position"].to_string()).collect();
    assert!(positions.is_sorted(), "{positions:?}");

    let of_a = home.postrider(&[&base[..], &["--key", "a", "--payload"]].concat()).expect(0);
    let lines = of_a.json_lines();
    let types: Vec<_> = lines.iter().map(|line| line["type"].as_str().expect("a type")).collect();
    assert_eq!(types, ["First", "Second"]);
    assert_eq!(lines[0]["payload"], "{\"of\":\"First\"}");

    let one = home.postrider(&[&base[..], &["--limit", "1"]].concat()).expect(0);
    assert_eq!(one.json_lines().len(), 1);
    let none = home.postrider(&[&base[..], &["--topic", "other"]].concat()).expect(0);
    assert_eq!(none.out, "");
}

#[test]
fn tail_keeps_the_order_of_positions_where_partitions_fill_pages_unevenly() {
    let home = Home::with_outbox();
    // Several pages of one key beside a single page of another; the hash parts the two.
    let events: Vec<_> = (0..900)
        .map(|number| (if number % 6 == 0 { "rare" } else { "often" }, "Happened"))
        .collect();
    home.append(&events);
    let args = ["tail", "--source", "app.db", "--from", "oldest", "--no-follow", "--json"];
    let lines = home.postrider(&args).expect(0).json_lines();
    assert_eq!(lines.len(), 900);
    let texts =
        |name: &str| -> Vec<String> { lines.iter().map(|line| line[name].to_string()).collect() };
    assert!(texts("position").is_sorted());
    let partitions: std::collections::HashSet<_> = texts("partition").into_iter().collect();
    assert_eq!(partitions.len(), 2, "the two keys have to be in two partitions");
}

#[test]
fn tail_follows_what_is_appended_later() {
    let home = Home::with_outbox();
    let tail = home.start(&["tail", "--source", "app.db", "--from", "oldest", "--limit", "2"]);
    home.append(&[("a", "First")]);
    tail.line_with("First");
    home.append(&[("a", "Second")]);
    tail.line_with("Second");
    assert_eq!(tail.ended(), Some(0));
}

#[test]
fn a_terminal_is_never_commanded_by_a_payload() {
    let home = Home::with_outbox();
    home.append(&[("a", "\u{202e}First")]);
    let args = ["tail", "--source", "app.db", "--from", "oldest", "--no-follow", "--payload"];
    let done = home.postrider(&args).expect(0);
    assert!(done.out.contains("\\u{202e}First"), "{}", done.out);
    assert!(!done.out.contains('\u{202e}'), "{}", done.out);
}

#[test]
fn status_of_an_outbox_that_nobody_reads_says_so() {
    let home = Home::with_outbox();
    home.append(&[("a", "First")]);
    let done = home.postrider(&["status", "--source", "app.db", "--json"]).expect(0);
    let status = done.json();
    assert_eq!(status["partitions"].as_array().map(Vec::len), Some(8));
    assert_eq!(status["consumers"].as_array().map(Vec::len), Some(0));
    assert!(status["warnings"][0].as_str().is_some_and(|text| text.contains("no relay")));
    home.postrider(&["status", "--source", "app.db", "--check"]).expect(1);
}

#[test]
fn nothing_is_pruned_while_nobody_has_read_it() {
    let home = Home::with_outbox();
    home.append(&[("a", "First")]);
    let done = home.postrider(&["prune", "--source", "app.db", "--keep", "0s", "--json"]).expect(0);
    assert_eq!(done.json()["events"], 0);
    let tail = ["tail", "--source", "app.db", "--from", "oldest", "--no-follow", "--json"];
    assert_eq!(home.postrider(&tail).expect(0).json_lines().len(), 1);
}

#[test]
fn a_database_that_is_missing_is_not_created_by_looking() {
    let home = Home::new();
    for command in [&["status"][..], &["tail"], &["prune"], &["dead-letters", "list"]] {
        let args = [command, &["--source", "absent.db"]].concat();
        home.postrider(&args).expect(3).err_has(&["absent.db", "run postrider init"]);
    }
    assert!(!home.path("absent.db").exists());
}

#[test]
fn a_database_without_tables_asks_for_init() {
    let home = Home::new();
    drop(Connection::open(home.path("app.db")).expect("opened").execute("CREATE TABLE t (a)", []));
    home.postrider(&["status", "--source", "app.db"])
        .expect(3)
        .err_has(&["open sqlite app.db", "postrider init"]);
}

#[test]
fn a_file_that_is_no_database_is_left_alone() {
    let home = Home::new();
    let garbage = "this is no database, and it is long enough to be read as one ".repeat(40);
    home.write("app.db", &garbage);
    for command in ["status", "init"] {
        home.postrider(&[command, "--source", "app.db"]).expect(3).err_has(&["open sqlite app.db"]);
    }
    assert_eq!(std::fs::read_to_string(home.path("app.db")).expect("read"), garbage);
}

#[test]
fn tables_of_a_newer_version_are_refused_with_both_versions() {
    let home = Home::with_outbox();
    let connection = Connection::open(home.path("app.db")).expect("opened");
    connection
        .execute("INSERT INTO postrider_migration (version, applied_ms) VALUES (9999, 0)", [])
        .expect("written");
    drop(connection);
    home.write(
        "postrider.toml",
        "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n\
         [[sink]]\nkind = \"jsonl\"\npath = \"-\"\n",
    );
    for command in [
        &["status"][..],
        &["init"],
        &["run", "--init"],
        &["replay", "--from", "oldest"],
        &["tail"],
        &["prune"],
        &["dead-letters", "list"],
    ] {
        home.postrider(command).expect(3).err_has(&["9999", "newer"]);
    }
}

#[test]
fn a_locked_database_is_told_from_a_broken_one() {
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\nbusy_timeout = \"50ms\"\n",
    );
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let held = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .expect("the write lock");
    // Reading goes on beside a writer; only what writes has to say that it can't.
    home.postrider(&["status"]).expect(0);
    for command in [
        &["prune", "--keep", "0s"][..],
        &["dead-letters", "requeue", "--all"],
        &["consumers", "remove", "webhook", "--yes"],
    ] {
        let parts = ["the database is locked by another connection", "raise busy_timeout"];
        home.postrider(command).expect(3).err_has(&parts);
    }
    drop(held);
    home.postrider(&["prune", "--keep", "0s"]).expect(0);
}

#[test]
fn a_database_that_can_only_be_read_says_so_when_written() {
    let home = Home::with_outbox();
    home.append(&[("a", "First")]);
    let source = format!("sqlite:file:{}?mode=ro", home.path("app.db").display());
    home.postrider(&["prune", "--source", &source, "--keep", "0s"])
        .expect(1)
        .err_has(&["the database is read-only", "check the rights"]);
}
