//! PostgreSQL's log as the source: every command, and every trouble with its place and its remedy.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use postrider_servers::postgres::{Database, Options, Server, Version, shared};
use rustix::process::Signal;

use crate::harness::{Home, Running, address_in, eventually, http};

/// Trouble is told within this time.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

/// A database whose log is read, with a slot of its own; the slot is dropped before the database.
struct Shop {
    database: Database,
    home: Home,
}

impl Shop {
    /// An initialised outbox in a fresh database.
    fn open(version: Version) -> Self {
        let shop = Self::bare(shared(version).expect("a server"));
        shop.home.postrider(&["init"]).expect(0);
        shop
    }

    fn on(server: &Server) -> Self {
        let shop = Self::bare(server.create_database().expect("a database"));
        shop.home.postrider(&["init"]).expect(0);
        shop
    }

    fn bare(database: Database) -> Self {
        let shop = Self { database, home: Home::new() };
        shop.configure(&shop.database.url(), "");
        shop
    }

    /// Writes the file; `keys` are further lines of the source.
    fn configure(&self, url: &str, keys: &str) {
        self.home.write("postrider.toml", config(url, self.slot(), keys));
    }

    /// Slots belong to the server: named as the database, no two tests have the same.
    fn slot(&self) -> &str {
        self.database.name()
    }

    fn append(&self, events: &[(&str, &str)]) {
        let calls: Vec<_> = events
            .iter()
            .map(|(key, event_type)| {
                format!("postrider.append('{key}', 'orders', '{event_type}', '{{\"of\": 1}}')")
            })
            .collect();
        self.database.psql(&format!("select {}", calls.join(", "))).expect("appended");
    }

    /// Key and type of what was delivered, in order.
    fn lines(&self) -> Vec<(String, String)> {
        let text = std::fs::read_to_string(self.home.path("events.jsonl")).unwrap_or_default();
        let line = |line: &str| {
            let event: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let text = |name: &str| event[name].as_str().expect("a text").to_owned();
            (text("key"), text("type"))
        };
        text.lines().map(line).collect()
    }

    /// The types of what was delivered, in order.
    fn delivered(&self) -> Vec<String> {
        self.lines().into_iter().map(|(_, event_type)| event_type).collect()
    }

    /// The same, of one key: only within it there is an order.
    fn of(&self, key: &str) -> Vec<String> {
        let own = self.lines().into_iter().filter(|(of, _)| of == key);
        own.map(|(_, event_type)| event_type).collect()
    }

    fn deliver(&self, count: usize) {
        eventually("everything is delivered", || (self.delivered().len() >= count).then_some(()));
    }

    /// Waits until the checkpoint has all of it.
    fn published(&self, count: u64) {
        eventually("the checkpoint is written", || {
            (self.status()["consumers"][0]["published"] == count).then_some(())
        });
    }

    fn status(&self) -> serde_json::Value {
        self.home.postrider(&["status", "--json"]).expect(0).json()
    }

    /// `run` ends by itself with code 3, in time, and says all of `parts`.
    #[track_caller]
    fn refused(&self, parts: &[&str]) {
        let started = Instant::now();
        let relay = self.home.start(&["run"]);
        for part in parts {
            eventually(part, || relay.seen().contains(part).then_some(()));
        }
        assert_eq!(relay.ended(), Some(3));
        assert!(started.elapsed() < TOLD_WITHIN, "in time");
    }

    fn drop_slot(&self) {
        let held = format!(
            "select pg_terminate_backend(active_pid) from pg_replication_slots
                where slot_name = '{0}' and active_pid is not null",
            self.slot()
        );
        let gone = format!(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots
                where slot_name = '{}'",
            self.slot()
        );
        eventually("the slot is dropped", || {
            self.database.psql(&held).ok()?;
            self.database.psql(&gone).ok()
        });
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        // A server that is gone has no slot.
        if self.database.psql("select 1").is_ok() && !std::thread::panicking() {
            self.drop_slot();
        }
    }
}

fn config(url: &str, slot: &str, keys: &str) -> String {
    format!(
        "[source]\nkind = \"postgres-wal\"\nurl = \"{url}\"\nslot = \"{slot}\"\n{keys}\n\n\
         [[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"\nfrom = \"oldest\"\n\n\
         [admin]\nlisten = \"127.0.0.1:0\"\n"
    )
}

fn stop(relay: Running) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

fn every_command(version: Version) {
    let shop = Shop::open(version);
    let home = &shop.home;
    let done = home.postrider(&["init"]).expect(0);
    for part in ["postgres-wal postrider.outbox is ready", "postrider_outbox", shop.slot()] {
        assert!(done.out.contains(part), "{}", done.out);
    }
    shop.append(&[("a", "First"), ("b", "Other"), ("a", "Second")]);
    let status = shop.status();
    assert_eq!(status["log"]["state"], "missing");
    assert_eq!(status["partitions"][0]["partition"], "wal");

    let relay = home.start(&["run"]);
    shop.deliver(3);
    shop.append(&[("b", "Third")]);
    shop.append(&[("b", "Last")]);
    shop.deliver(5);
    assert_eq!(shop.of("a"), ["First", "Second"]);
    assert_eq!(shop.of("b"), ["Other", "Third", "Last"]);
    shop.published(5);
    let status = shop.status();
    let log = &status["log"];
    assert_eq!((&log["slot"], &log["state"]), (&shop.slot().into(), &"active".into()), "{log}");
    assert!(log["reader"].is_i64() && log["walStatus"] == "reserved", "{log}");
    for number in ["retainedBytes", "lagBytes"] {
        assert!(log[number].as_u64().is_some_and(|bytes| bytes < 64 << 20), "{log}");
    }
    assert_eq!((&log["safeBytes"], &log["lostInSeconds"]), (&().into(), &().into()), "unbounded");
    let sink = &log["consumers"][0];
    assert_eq!((&sink["consumer"], &sink["next"]), (&"jsonl".into(), &"stream".into()), "{log}");
    assert!(sink["lagBytes"].is_u64() && sink["place"].is_string(), "{log}");
    assert!(status["partitions"][0]["lease"]["holder"].is_string(), "{status}");
    assert_eq!(status["warnings"], serde_json::json!([]));
    let advice = status["advice"].to_string();
    assert!(advice.contains("max_slot_wal_keep_size is -1"), "{advice}");
    let text = home.postrider(&["status", "--check"]).expect(0).out;
    let shown = format!("slot {}: active, read by the server's process", shop.slot());
    assert!(text.contains(&shown) && text.contains("NEXT FROM"), "{text}");
    stop(relay);
    assert_eq!(shop.status()["log"]["state"], "idle");

    // People read the table.
    let tail = ["tail", "--from", "oldest", "--no-follow", "--json", "--key", "a"];
    assert_eq!(home.postrider(&tail).expect(0).json_lines().len(), 2);
    let replay = ["replay", "--from", "oldest", "--dry-run"];
    assert!(home.postrider(&replay).expect(0).out.contains('5'));
    let consumers = home.postrider(&["consumers", "list"]).expect(0).out;
    assert!(consumers.contains("jsonl"), "{consumers}");
    home.postrider(&["dead-letters", "list"]).expect(0);
    home.postrider(&["prune", "--keep", "0s", "--json"]).expect(0);
    home.postrider(&["consumers", "remove", "jsonl", "--yes"]).expect(0);
    assert_eq!(shop.delivered().len(), 5);
}

#[test]
fn every_command_works_on_the_log_of_postgresql_15() {
    every_command(Version::V15);
}

#[test]
fn every_command_works_on_the_log_of_postgresql_18() {
    every_command(Version::V18);
}

#[test]
fn a_clean_stop_and_start_repeats_nothing() {
    let shop = Shop::open(Version::V18);
    shop.append(&[("a", "First"), ("a", "Second")]);
    for _ in 0..10 {
        let relay = shop.home.start(&["run"]);
        relay.line_with("delivering");
        shop.deliver(2);
        eventually("it reads", || (shop.status()["log"]["state"] == "active").then_some(()));
        stop(relay);
    }
    assert_eq!(shop.delivered(), ["First", "Second"]);
    assert_eq!(shop.status()["consumers"][0]["published"], 2);
}

#[test]
fn the_sql_for_review_makes_the_tables_and_the_publication() {
    let shop = Shop::bare(shared(Version::V15).expect("a server"));
    let names = "schema = \"re\\\"lay\"\noutbox = \"or;ders\"\npublication = \"pub ;\\\"x\"";
    shop.configure(&shop.database.url(), names);
    let sql = shop.home.postrider(&["init", "--sql"]).expect(0).out;
    assert!(sql.contains("CREATE PUBLICATION \"pub ;\"\"x\""), "{sql}");
    shop.home.write("review.sql", &sql);
    let mut psql = Command::new(shop.database.version().program("psql").expect("installed"));
    psql.args(["--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-d"]);
    let applied = psql.arg(shop.database.url()).arg("-f").arg(shop.home.path("review.sql"));
    assert!(applied.status().expect("psql runs").success(), "the SQL is valid");
    let relay = shop.home.start(&["run"]);
    let call = "select \"re\"\"lay\".\"or;ders_append\"('k', 't', 'Reviewed', '1')";
    shop.database.psql(call).expect("appended");
    shop.deliver(1);
    stop(relay);
    let done = shop.home.postrider(&["init"]).expect(0);
    assert!(done.out.contains("is ready"), "{}", done.out);
}

/// Nothing is connected to.
#[test]
fn a_sink_must_say_where_in_the_log_it_begins() {
    let home = Home::new();
    let check = |from: &str, keys: &str| {
        let text = config("postgres://u@db/shop", "slot", keys);
        home.write("postrider.toml", text.replace("from = \"oldest\"\n", from));
        home.postrider(&["config", "check"])
    };
    for from in ["from = \"oldest\"\n", "from = \"now\"\n"] {
        check(from, "").expect(0);
    }
    let missing = check("", "").expect(2);
    missing.err_has(&["postrider.toml:7:1", "sink[0].from", "is missing", "\"now\"", "\"oldest\""]);
    let time = check("from = \"2026-11-27T22:00:00Z\"\n", "").expect(2);
    time.err_has(&["postrider.toml:10:8", "is a time", "\"now\""]);
    let place = check("from = \"01GNSG5PM8ZZZVZZZZZZZZZZZZ\"\n", "").expect(2);
    place.err_has(&["sink[0].from", "is a position"]);
    // A command that needs no sink does not ask for it.
    home.postrider(&["init", "--sql"]).expect(0);

    let from = "from = \"now\"\n";
    let name = "slot = \"slot\"\n";
    let text = config("postgres://u@db/shop", "slot", "").replace(name, "slot = \"Orders\"\n");
    home.write("postrider.toml", text);
    home.postrider(&["config", "check"]).expect(2).err_has(&["source.slot", "small letters"]);
    check(from, "recover = \"never\"").expect(2).err_has(&["source.recover", "\"halt\""]);
    check(from, "partitions = 4").expect(2).err_has(&["source.partitions", "unknown key"]);
    let long = format!("publication = \"{}\"", "p".repeat(64));
    check(from, &long).expect(2).err_has(&["source.publication", "63"]);
}

#[test]
fn a_server_without_a_logical_log_is_told_with_the_remedy() {
    for version in Version::ALL {
        let server = Options::new(version).setting("wal_level = replica").launch();
        let server = server.expect("a server");
        let shop = Shop::bare(server.create_database().expect("a database"));
        let remedy = ["wal_level is replica", "ALTER SYSTEM SET wal_level = logical"];
        shop.home.postrider(&["init"]).expect(3).err_has(&remedy);
        shop.refused(&remedy);
        // What people read is there all the same.
        shop.append(&[("a", "First")]);
        shop.home.postrider(&["tail", "--from", "oldest", "--no-follow"]).expect(0);
        drop(shop);
    }
}

#[test]
fn a_missing_publication_or_one_that_passes_events_over_is_told_with_the_remedy() {
    let shop = Shop::open(Version::V15);
    let sql = |sql: &str| shop.database.psql(sql).expect("done");
    sql("drop publication postrider_outbox");
    shop.refused(&["no publication", "postrider init", "CREATE PUBLICATION"]);
    sql("create publication postrider_outbox");
    shop.refused(&["without the outbox", "ALTER PUBLICATION", "ADD TABLE"]);
    sql("drop publication postrider_outbox");
    shop.home.postrider(&["init"]).expect(0);
    sql("alter publication postrider_outbox set (publish = 'update')");
    shop.refused(&["passes inserts over", "publish = 'insert'"]);
    sql("alter publication postrider_outbox set (publish = 'insert')");
    sql("alter publication postrider_outbox set (publish_via_partition_root = false)");
    shop.refused(&["publish_via_partition_root = true"]);
    sql("alter publication postrider_outbox set (publish_via_partition_root = true)");
    let leaf = sql("select relid::regclass from pg_partition_tree('postrider.outbox')
        where isleaf order by 1 limit 1");
    sql(&format!("alter table {leaf} set unlogged"));
    shop.refused(&["UNLOGGED", &leaf, "SET LOGGED"]);
    let warnings = shop.status()["warnings"].to_string();
    assert!(warnings.contains("UNLOGGED") && warnings.contains(&leaf), "{warnings}");
    shop.home.postrider(&["status", "--check"]).expect(1);
    sql(&format!("alter table {leaf} set logged"));
    let relay = shop.home.start(&["run"]);
    relay.line_with("delivering");
    stop(relay);
}

/// The part of a relay and REPLICATION are all that a relay's role needs.
#[test]
fn a_role_without_replication_is_told_and_with_it_delivers() {
    for version in Version::ALL {
        let server = Options::new(version).launch().expect("a server");
        let shop = Shop::on(&server);
        let role = "create role courier login; select postrider.grant_relay('courier')";
        shop.database.psql(role).expect("granted");
        shop.configure(&shop.database.url_as("courier", None), "");
        shop.refused(&["REPLICATION", "SQLSTATE 42501"]);
        shop.database.psql("alter role courier replication").expect("granted");
        let less = "revoke update on postrider.checkpoint from courier";
        shop.database.psql(less).expect("revoked");
        shop.refused(&["may not read and write checkpoint", "grant_relay('courier')"]);
        shop.database.psql("select postrider.grant_relay('courier')").expect("granted");
        shop.append(&[("a", "First")]);
        let relay = shop.home.start(&["run"]);
        shop.deliver(1);
        shop.append(&[("a", "Second")]);
        shop.deliver(2);
        stop(relay);
        eventually("the server lets go of the slot", || {
            (shop.status()["log"]["state"] == "idle").then_some(())
        });
        drop(shop);
    }
}

#[test]
fn a_slot_of_somebody_else_is_told_with_the_remedy() {
    let shop = Shop::open(Version::V18);
    let slot = shop.slot().to_owned();
    let sql = |sql: &str| shop.database.psql(sql).expect("done");
    let remedy = format!("pg_drop_replication_slot('{slot}')");
    sql(&format!("select pg_create_logical_replication_slot('{slot}', 'test_decoding')"));
    shop.refused(&["plugin is test_decoding", "`slot`", &remedy]);
    let status = shop.status();
    assert_eq!(status["log"]["state"], "foreign");
    assert!(status["warnings"].to_string().contains("test_decoding"), "{status}");
    shop.drop_slot();
    sql(&format!("select pg_create_physical_replication_slot('{slot}')"));
    shop.refused(&["it is physical", &remedy]);
    shop.drop_slot();
    let other = Shop::open(Version::V18);
    let there = format!("select pg_create_logical_replication_slot('{slot}', 'pgoutput')");
    other.database.psql(&there).expect("made");
    shop.refused(&["belongs to database", other.database.name()]);
    shop.drop_slot_of(&other);
}

impl Shop {
    /// Drops this shop's slot, which was made in another database.
    fn drop_slot_of(&self, other: &Shop) {
        let gone = format!("select pg_drop_replication_slot('{}')", self.slot());
        other.database.psql(&gone).expect("dropped");
    }
}

/// A process that reads a slot, as a relay does; killed when dropped.
struct Recvlogical(Child);

impl Recvlogical {
    fn start(shop: &Shop) -> Self {
        let mut program =
            Command::new(shop.database.version().program("pg_recvlogical").expect("installed"));
        program.arg("-d").arg(shop.database.url()).args(["--slot", shop.slot(), "--start"]);
        program.args(["-o", "proto_version=1", "-o", "publication_names=postrider_outbox"]);
        program.args(["-f", "-", "--no-loop"]).stdin(Stdio::null()).stdout(Stdio::null());
        Self(program.spawn().expect("started"))
    }
}

impl Drop for Recvlogical {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_slot_that_another_process_reads_is_told_with_its_pid_and_taken_once_it_is_free() {
    let shop = Shop::open(Version::V15);
    let made = format!("select pg_create_logical_replication_slot('{}', 'pgoutput')", shop.slot());
    shop.database.psql(&made).expect("made");
    let other = Recvlogical::start(&shop);
    let pid = eventually("the other one reads", || shop.status()["log"]["reader"].as_i64());
    shop.append(&[("a", "First")]);
    let started = Instant::now();
    let relay = shop.home.start(&["run"]);
    let told = relay.line_with("is read by another process");
    assert!(started.elapsed() < TOLD_WITHIN, "in time");
    assert!(told.contains(&format!("PID {pid}")), "{told}");
    drop(other);
    shop.append(&[("a", "Second")]);
    shop.deliver(2);
    stop(relay);
    assert_eq!(shop.delivered(), ["First", "Second"]);
}

#[test]
fn a_server_without_room_for_a_slot_or_a_walsender_is_told() {
    let server = Options::new(Version::V15)
        .setting("max_replication_slots = 1")
        .setting("max_wal_senders = 1")
        .launch()
        .expect("a server");
    let shop = Shop::on(&server);
    shop.database.psql("select pg_create_physical_replication_slot('standby')").expect("made");
    shop.refused(&["all replication slots", "max_replication_slots"]);
    shop.database.psql("select pg_drop_replication_slot('standby')").expect("dropped");
    let made = format!("select pg_create_logical_replication_slot('{}', 'pgoutput')", shop.slot());
    shop.database.psql(&made).expect("made");
    let other = Recvlogical::start(&shop);
    eventually("the other one reads", || shop.status()["log"]["reader"].as_i64());
    shop.refused(&["max_wal_senders"]);
    drop(other);
}

/// The halted sink waits for a person; the table has what the slot had not.
#[test]
fn without_its_slot_a_sink_halts_with_the_gap_or_catches_up_as_asked() {
    for version in Version::ALL {
        let shop = Shop::open(version);
        shop.configure(&shop.database.url(), "recover = \"halt\"");
        shop.append(&[("a", "First")]);
        let relay = shop.home.start(&["run"]);
        shop.deliver(1);
        shop.published(1);
        stop(relay);
        let place = shop.status()["log"]["consumers"][0]["place"].as_str().map(str::to_owned);
        let place = place.expect("a checkpoint");
        shop.append(&[("a", "Second"), ("a", "Third")]);
        shop.drop_slot();
        let warnings = shop.status()["warnings"].to_string();
        assert!(warnings.contains("is gone") && warnings.contains("halt"), "{warnings}");

        let started = Instant::now();
        let relay = shop.home.start(&["run"]);
        let told = relay.line_with("the sink is halted");
        assert!(started.elapsed() < TOLD_WITHIN, "in time");
        let gap = format!("the checkpoint is at {place}");
        for part in [gap.as_str(), "the slot begins at", "set recover = \"auto\""] {
            assert!(told.contains(part), "{part}: {told}");
        }
        stop(relay);
        assert_eq!(shop.delivered(), ["First"]);
        let sink = &shop.status()["log"]["consumers"][0];
        assert_eq!((&sink["next"], &sink["place"]), (&"table".into(), &place.as_str().into()));
        assert_eq!(shop.status()["consumers"][0]["pending"], 2);

        shop.configure(&shop.database.url(), "recover = \"auto\"");
        let relay = shop.home.start(&["run"]);
        relay.line_with("reading from the table what the slot can't give");
        shop.deliver(3);
        shop.append(&[("a", "Last")]);
        shop.deliver(4);
        shop.published(4);
        stop(relay);
        assert_eq!(shop.delivered(), ["First", "Second", "Third", "Last"]);
        assert_eq!(shop.status()["log"]["consumers"][0]["next"], "stream");
    }
}

/// The server gives the slot up at a checkpoint that finds it holding more than it may.
#[test]
fn a_slot_that_runs_out_of_room_is_forecast_and_its_loss_costs_no_event() {
    for version in Version::ALL {
        let server = Options::new(version)
            .setting("max_slot_wal_keep_size = 64MB")
            .setting("wal_keep_size = 0")
            .setting("max_wal_size = 64MB")
            .setting("min_wal_size = 32MB")
            .launch()
            .expect("a server");
        let shop = Shop::on(&server);
        shop.append(&[("a", "First")]);
        let relay = shop.home.start(&["run"]);
        shop.deliver(1);
        shop.published(1);
        stop(relay);
        shop.append(&[("a", "Second")]);
        let write = "select pg_logical_emit_message(false, 'filler', repeat('x', 100000))
            from generate_series(1, 50)";
        let status = eventually("the end is forecast", || {
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| shop.database.psql(write).expect("written"));
                let status = shop.status();
                writer.join().expect("written");
                let log = &status["log"];
                assert_ne!(log["state"], "lost", "not yet: {status}");
                (log["lostInSeconds"].is_u64() && log["safeBytes"].is_u64()).then_some(status)
            })
        });
        let warnings = status["warnings"].to_string();
        assert!(warnings.contains("will be lost in about"), "{warnings}");
        eventually("it is lost", || {
            shop.database.psql("select pg_switch_wal()").expect("switched");
            shop.database.psql("checkpoint").expect("done");
            (shop.status()["log"]["state"] == "lost").then_some(())
        });
        let status = shop.home.postrider(&["status", "--check"]).expect(1).out;
        assert!(status.contains("is lost (") && status.contains("makes it anew"), "{status}");
        let relay = shop.home.start(&["run"]);
        relay.line_with("making it anew");
        shop.deliver(2);
        shop.append(&[("a", "Third")]);
        shop.deliver(3);
        stop(relay);
        assert_eq!(shop.delivered(), ["First", "Second", "Third"]);
        drop(shop);
    }
}

#[test]
fn what_the_server_could_do_better_is_advised() {
    let server = Options::new(Version::V18)
        .setting("wal_sender_timeout = 0")
        .setting("idle_replication_slot_timeout = '2h'")
        .setting("logical_decoding_work_mem = '64kB'")
        .launch()
        .expect("a server");
    let shop = Shop::on(&server);
    let advice = || shop.status()["advice"].to_string();
    let without = advice();
    for absent in ["failover", "synchronized_standby_slots", "logical_decoding_work_mem"] {
        assert!(!without.contains(absent), "{absent}: {without}");
    }
    let slots = format!(
        "select pg_create_physical_replication_slot('standby');
         select pg_create_logical_replication_slot('{}', 'pgoutput')",
        shop.slot()
    );
    shop.database.psql(&slots).expect("made");
    let by_hand = advice();
    for part in [
        "wal_sender_timeout is 0",
        "idle_replication_slot_timeout is 2h",
        "was made without failover",
    ] {
        assert!(by_hand.contains(part), "{part}: {by_hand}");
    }
    shop.drop_slot();
    let relay = shop.home.start(&["run"]);
    eventually("it reads", || (shop.status()["log"]["state"] == "active").then_some(()));
    let many = "select count(postrider.append('k', 'orders', 'Many', repeat('x', 500)))
        from generate_series(1, 1000)";
    shop.database.psql(many).expect("appended");
    shop.deliver(1000);
    eventually("the server tells what it put on disk", || {
        advice().contains("logical_decoding_work_mem (64kB)").then_some(())
    });
    // The relay's own slot is one that standbys may copy.
    let own = advice();
    assert!(own.contains("synchronized_standby_slots is empty"), "{own}");
    assert!(!own.contains("without failover"), "{own}");
    stop(relay);
}

#[test]
fn the_log_is_in_the_metrics() {
    let shop = Shop::open(Version::V18);
    shop.append(&[("a", "First")]);
    let relay = shop.home.start(&["run"]);
    let address = address_in(&relay.line_with("/metrics"));
    shop.deliver(1);
    let value = |name: &str| {
        let text = http(address, "GET /metrics", "").1;
        let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
        line.rsplit(' ').next()?.parse::<f64>().ok()
    };
    eventually("the slot is read", || (value("postrider_wal_slot_state")? == 0.0).then_some(()));
    let retained = value("postrider_wal_retained_bytes").expect("a value");
    assert!(retained > 0.0 && retained < 64e6, "{retained}");
    assert!(value("postrider_wal_safe_bytes").expect("a value").is_nan(), "unbounded");
    eventually("the sink's place is known", || {
        value("postrider_wal_lag_bytes{sink=\"jsonl\"}").filter(|bytes| *bytes < 64e6)
    });
    // It begins at the oldest event, which the slot never had.
    assert_eq!(value("postrider_wal_catch_ups_total"), Some(1.0));
    assert_eq!(value("postrider_wal_reconnects_total"), Some(0.0));
    assert_eq!(value("postrider_wal_unknown_messages_total"), Some(0.0));
    let cut = format!(
        "select pg_terminate_backend(active_pid) from pg_replication_slots
            where slot_name = '{}'",
        shop.slot()
    );
    assert_eq!(shop.database.psql(&cut).expect("cut"), "t");
    eventually("the cut is counted", || {
        (value("postrider_wal_reconnects_total")? >= 1.0).then_some(())
    });
    shop.append(&[("a", "Second")]);
    shop.deliver(2);
    stop(relay);
    assert_eq!(shop.delivered(), ["First", "Second"]);
}

/// All that the database knows of its consumers.
fn lose_checkpoints(shop: &Shop) {
    for table in ["checkpoint", "wal_base", "wal_after", "wal_recovery"] {
        shop.database.psql(&format!("delete from postrider.{table}")).expect("deleted");
    }
}

#[test]
fn a_copy_of_the_checkpoints_stands_in_for_lost_ones() {
    for version in Version::ALL {
        let shop = Shop::open(version);
        shop.configure(&shop.database.url(), "mirror_file = \"checkpoints.json\"");
        shop.append(&[("a", "First")]);
        let relay = shop.home.start(&["run"]);
        let address = address_in(&relay.line_with("/metrics"));
        shop.deliver(1);
        shop.published(1);
        eventually("it is in the metrics", || {
            let text = http(address, "GET /metrics", "").1;
            let name = "postrider_wal_mirror_behind_seconds{sink=\"jsonl\"} 0";
            text.contains(name).then_some(())
        });
        stop(relay);
        let log = shop.status()["log"].clone();
        let copy = &log["mirror"]["consumers"][0];
        assert_eq!(copy["consumer"], "jsonl");
        assert_eq!(copy["place"], log["consumers"][0]["place"], "whole at a clean end");
        let shown = shop.home.postrider(&["status"]).expect(0).out;
        let file = shop.home.path("checkpoints.json");
        for part in ["the copy in file checkpoints.json: jsonl at ", "written "] {
            assert!(shown.contains(part), "{part}: {shown}");
        }

        lose_checkpoints(&shop);
        shop.append(&[("a", "Second")]);
        let relay = shop.home.start(&["run"]);
        relay.line_with("is further than the database's own checkpoint");
        shop.deliver(2);
        shop.append(&[("a", "Third")]);
        shop.deliver(3);
        stop(relay);
        assert_eq!(shop.delivered(), ["First", "Second", "Third"]);

        let good = std::fs::read(&file).expect("read");
        std::fs::write(&file, &good[..good.len() / 2]).expect("cut off");
        shop.refused(&["checkpoints.json is no copy", "move it away", "take the mirror out"]);
        let warned = shop.home.postrider(&["status", "--check"]).expect(1).out;
        assert!(warned.contains("can't be read"), "{warned}");
        std::fs::remove_file(&file).expect("removed");
        let silent = "mirror_url = \"postgres://someone:hidden@127.0.0.1:1/shop\"";
        shop.configure(&shop.database.url(), silent);
        shop.refused(&["the database at 127.0.0.1:1", "can't be used"]);
        shop.configure(&shop.database.url(), &format!("mirror_file = \"x\"\n{silent}"));
        let told = shop.home.postrider(&["config", "check"]).expect(2).err;
        assert!(told.contains("source.mirror_url") && !told.contains("hidden"), "{told}");
    }
}

/// The checkpoint's table is not to be had for a while: told, counted, and no more is delivered
/// than may come again.
#[test]
fn a_checkpoint_that_can_not_be_written_is_told_and_bounded() {
    const EVENTS: usize = 80_000;
    const WINDOW: usize = 65_536;
    // A server of its own: who makes a slot would wait for whoever holds the table.
    let server = Options::new(Version::V18).launch().expect("a server");
    let shop = Shop::on(&server);
    shop.configure(&shop.database.url(), "statement_timeout = \"1s\"");
    shop.append(&[("a", "First")]);
    let relay = shop.home.start(&["run"]);
    let address = address_in(&relay.line_with("/metrics"));
    let failing = || {
        let text = http(address, "GET /metrics", "").1;
        let name = "postrider_checkpoint_failing_seconds{sink=\"jsonl\"} ";
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.parse::<f64>().ok()
    };
    shop.deliver(1);
    shop.published(1);
    assert_eq!(failing(), Some(0.0));
    let held = "set application_name = 'holder'; begin;
        lock table postrider.checkpoint in access exclusive mode; select pg_sleep(300)";
    let free = "select pg_terminate_backend(pid) from pg_stat_activity
        where application_name = 'holder' and datname = current_database()";
    let lines = || {
        let text = std::fs::read_to_string(shop.home.path("events.jsonl")).unwrap_or_default();
        text.lines().count()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| shop.database.psql(held));
        eventually("the table is locked", || {
            let locked = "select count(*) from pg_locks where granted
                and mode = 'AccessExclusiveLock' and relation = 'postrider.checkpoint'::regclass";
            (shop.database.psql(locked).ok()? == "1").then_some(())
        });
        let many = format!(
            "select count(postrider.append('k' || i % 100, 'orders', 'Many', 'x'))
                from generate_series(1, {EVENTS}) as i"
        );
        shop.database.psql(&many).expect("appended");
        let told = relay.line_with("the database refused a write for now");
        assert!(told.contains("move the checkpoint"), "{told}");
        eventually("it is in the metrics", || failing().filter(|seconds| *seconds > 0.5));
        eventually("the window is full", || (lines() >= WINDOW - 1_000).then_some(()));
        // Nothing more comes, for longer than all of it has taken.
        let (seen, started) = (lines(), Instant::now());
        while started.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(lines() < seen + 4_096 && lines() < WINDOW + 4_096, "{} of {seen}", lines());
        shop.database.psql(free).expect("ended");
    });
    eventually("all arrive", || (lines() > EVENTS).then_some(()));
    eventually("it is over", || (failing()? == 0.0).then_some(()));
    stop(relay);
    let text = std::fs::read_to_string(shop.home.path("events.jsonl")).expect("read");
    let ids: std::collections::BTreeSet<String> = text
        .lines()
        .map(|line| {
            let event: serde_json::Value = serde_json::from_str(line).expect("JSON");
            event["id"].as_str().expect("a text").to_owned()
        })
        .collect();
    assert_eq!((ids.len(), lines()), (EVENTS + 1, EVENTS + 1), "each once");
    drop(shop);
}

/// Making the slot for a snapshot waits for whoever writes at that moment, without an end.
#[test]
fn a_catch_up_that_waits_for_a_writer_says_so() {
    let server = Options::new(Version::V18).launch().expect("a server");
    let shop = Shop::on(&server);
    shop.append(&[("a", "First")]);
    let relay = shop.home.start(&["run"]);
    shop.deliver(1);
    shop.published(1);
    stop(relay);
    let more = "\n[[sink]]\nkind = \"jsonl\"\nname = \"second\"\npath = \"second.jsonl\"\n\
                from = \"oldest\"\n";
    let url = shop.database.url();
    shop.home.write("postrider.toml", config(&url, shop.slot(), "") + more);
    let writes = "set application_name = 'writer'; begin;
        select pg_current_xact_id(); select pg_sleep(300)";
    std::thread::scope(|scope| {
        scope.spawn(|| shop.database.psql(writes));
        let open = "select count(*) from pg_stat_activity
            where application_name = 'writer' and backend_xid is not null";
        eventually("it writes", || (shop.database.psql(open).ok()? == "1").then_some(()));
        let relay = shop.home.start(&["run"]);
        let told = relay.line_with("a catch-up waits for the transactions that were writing");
        assert!(told.contains("the oldest is that of process"), "{told}");
        let end = "select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = 'writer'";
        shop.database.psql(end).expect("ended");
        eventually("the second sink has it", || {
            let text = std::fs::read_to_string(shop.home.path("second.jsonl")).ok()?;
            (text.lines().count() == 1).then_some(())
        });
        stop(relay);
    });
    drop(shop);
}
