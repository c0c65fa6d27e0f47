//! PostgreSQL as the source: every command, and every trouble with its place and its remedy.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use postrider_servers::postgres::{Database, Options, Server, Shutdown, Version, shared};
use rustix::process::Signal;

use crate::harness::{Done, Home, Running, eventually};

const TO_FILE: &str = "\n[[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"\n\n\
                       [admin]\nlisten = \"off\"\n";

/// A configuration of this database; `keys` are further lines of the source.
fn configured(url: &str, keys: &str) -> Home {
    let home = Home::new();
    let source = format!("[source]\nkind = \"postgres-feed\"\nurl = \"{url}\"\n{keys}\n");
    home.write("postrider.toml", source + TO_FILE);
    home
}

/// An initialised outbox in a fresh database.
fn with_outbox(version: Version) -> (Database, Home) {
    let database = shared(version).expect("a server");
    let home = configured(&database.url(), "");
    home.postrider(&["init"]).expect(0);
    (database, home)
}

/// Appends one event for each `(key, type)`, in one transaction.
fn append(database: &Database, events: &[(&str, &str)]) {
    let calls: Vec<_> = events
        .iter()
        .map(|(key, event_type)| {
            format!("postrider.append('{key}', 'orders', '{event_type}', '{{\"of\": 1}}')")
        })
        .collect();
    database.psql(&format!("select {}", calls.join(", "))).expect("appended");
}

fn lines(home: &Home) -> Vec<String> {
    let text = std::fs::read_to_string(home.path("events.jsonl")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

fn delivered(home: &Home, count: usize) {
    eventually("everything is delivered", || (lines(home).len() >= count).then_some(()));
}

fn stop(relay: Running) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

fn every_command(version: Version) {
    let (database, home) = with_outbox(version);
    let done = home.postrider(&["init"]).expect(0);
    assert!(done.out.contains("postgres-feed postrider.outbox is ready, with 8"), "{}", done.out);
    append(&database, &[("a", "First"), ("b", "Other"), ("a", "Second")]);

    let tail = ["tail", "--from", "oldest", "--no-follow", "--json", "--key", "a", "--payload"];
    let events = home.postrider(&tail).expect(0).json_lines();
    let types: Vec<_> = events.iter().map(|event| event["type"].as_str()).collect();
    assert_eq!(types, [Some("First"), Some("Second")]);
    assert_eq!(events[0]["payload"], "{\"of\": 1}");

    let relay = home.start(&["run"]);
    delivered(&home, 3);
    append(&database, &[("b", "Last")]);
    delivered(&home, 4);
    let prune = ["prune", "--keep", "0s", "--json"];
    let dry = [&prune[..], &["--dry-run"]].concat();
    // Also the partitions that had nothing to do move on.
    eventually("all was passed by all partitions", || {
        (home.postrider(&dry).expect(0).json()["events"] == 4).then_some(())
    });
    stop(relay);
    assert_eq!(lines(&home).len(), 4, "a drained relay repeats nothing");

    let status = home.postrider(&["status", "--json"]).expect(0).json();
    let sink = &status["consumers"][0];
    assert_eq!((&sink["published"], &sink["pending"]), (&4.into(), &0.into()));
    assert_eq!(status["partitions"].as_array().map(Vec::len), Some(8));
    assert_eq!(status["warnings"], serde_json::json!([]));
    let advice = status["advice"][0].as_str().unwrap_or_default();
    assert!(advice.contains("idle_in_transaction_session_timeout is 0"), "{status}");
    home.postrider(&["status", "--check"]).expect(0);

    let consumers = home.postrider(&["consumers", "list"]).expect(0).out;
    assert!(consumers.contains("jsonl"), "{consumers}");
    home.postrider(&["dead-letters", "list"]).expect(0);
    let dry_replay = ["replay", "--from", "oldest", "--dry-run"];
    assert!(home.postrider(&dry_replay).expect(0).out.contains('4'));
    home.postrider(&["replay", "--from", "oldest"]).expect(0);
    assert_eq!(lines(&home).len(), 8);

    assert_eq!(home.postrider(&prune).expect(0).json()["events"], 4);
    // Nothing more is freed, and yet people see from where on there are events.
    let again = home.postrider(&["prune", "--keep", "0s"]).expect(0).out;
    assert!(
        again.contains("0 events pruned") && again.contains("to read from is now 01"),
        "{again}"
    );
    let kept = home.postrider(&["tail", "--from", "oldest", "--no-follow", "--json"]).expect(0);
    assert_eq!(kept.out, "", "all was passed and is gone");
    home.postrider(&["consumers", "remove", "jsonl", "--yes"]).expect(0);
}

#[test]
fn every_command_works_on_postgresql_15() {
    every_command(Version::V15);
}

#[test]
fn every_command_works_on_postgresql_18() {
    every_command(Version::V18);
}

#[test]
fn the_sql_for_review_is_as_configured_and_does_what_init_does() {
    let database = shared(Version::V15).expect("a server");
    let home = configured(
        &database.url(),
        "schema = \"re\\\"lay\"\noutbox = \"or;ders\"\npartitions = 4\npayload = \"json\"",
    );
    let sql = home.postrider(&["init", "--sql"]).expect(0).out;
    assert!(sql.contains("\"re\"\"lay\".\"or;ders\""), "{sql}");
    home.postrider(&["status"]).expect(3).err_has(&["postrider init"]);
    home.write("review.sql", &sql);
    let mut psql = Command::new(database.version().program("psql").expect("installed"));
    psql.args(["--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-d"]);
    let applied = psql.arg(database.url()).arg("-f").arg(home.path("review.sql")).status();
    assert!(applied.expect("psql runs").success(), "the SQL is valid");
    let status = home.postrider(&["status", "--json"]).expect(0).json();
    assert_eq!(status["partitions"].as_array().map(Vec::len), Some(4));
    let done = home.postrider(&["init"]).expect(0);
    assert!(done.out.contains("is ready, with 4 partitions"), "{}", done.out);
    let payload = "select payload from \"re\"\"lay\".feed";
    assert_eq!(database.psql(payload).expect("read"), "json");
}

#[test]
fn init_says_what_an_outbox_that_exists_keeps_and_what_is_weaker() {
    let (database, _home) = with_outbox(Version::V15);
    let home = configured(&database.url(), "partitions = 16\npayload = \"json\"");
    let done = home.postrider(&["init"]).expect(0);
    for text in ["[source] partitions = 16 changes", "[source] payload = \"json\" changes nothing"]
    {
        assert!(done.out.contains(text), "{}", done.out);
    }
    let advice = "advice: a client of the role \"postgres\", which appends";
    assert!(done.out.contains(advice), "{}", done.out);
}

/// A URL is never shown, whatever is wrong with it.
#[test]
fn what_a_url_can_not_be_is_told_before_any_connection_and_without_its_password() {
    for (url, parts) in [
        ("mysql://u:s3cret@db/shop", &["source.url", "not a PostgreSQL URL"][..]),
        ("postgres://u:s3cret@db/shop?sslmode=maybe", &["source.url", "sslmode"]),
        ("postgres://u:s3cret@db:port/shop", &["source.url", "port"]),
        ("postgres://u:s3@cret@db/shop", &["source.url", "%40"]),
    ] {
        let done = configured(url, "").postrider(&["config", "check"]).expect(2).err_has(parts);
        assert!(done.err.contains("postrider.toml:3:"), "the place: {}", done.err);
        assert!(!done.err.contains("s3"), "{}", done.err);
    }
    let home = configured("postgres://u@db/shop", "partition = 4");
    home.postrider(&["config", "check"]).expect(2).err_has(&["did you mean \"partitions\""]);
    let home = configured("postgres://u@db/shop", "payload = \"jsonb\"");
    home.postrider(&["config", "check"]).expect(2).err_has(&["\"bytea\" or \"json\""]);
    let home = configured("postgres://u@db/shop", "schema = \"pg_mine\"");
    home.postrider(&["config", "check"]).expect(2).err_has(&["source.schema", "pg_"]);
}

fn refused(home: &Home, code: i32, parts: &[&str]) -> Done {
    let done = home.postrider(&["status"]).expect(code).err_has(parts);
    assert!(!done.err.contains("s3cret"), "no secret: {}", done.err);
    done
}

#[test]
fn a_login_or_database_that_is_refused_is_told_with_its_remedy() {
    let server = Options::new(Version::V15).password("s3cret").launch().expect("a server");
    let database = server.create_database().expect("a database");
    let wrong = database.url().replace("s3cret", "s3cretive");
    refused(&configured(&wrong, ""), 3, &["open postgres-feed postrider.outbox", "password"]);
    let absent = database.url().replace(database.name(), "absent");
    refused(&configured(&absent, ""), 3, &["there is no database of that name", "create it"]);
    let port = server.port();
    let there = configured(&database.url(), "");
    refused(&there, 3, &["run `postrider init`"]);
    there.postrider(&["init"]).expect(0);
    database
        .psql(
            "create role reader login password 's3cret';
             alter sequence postrider.outbox_seq cache 32",
        )
        .expect("altered");
    refused(&there, 3, &["CACHE 32", "would be lost", "ALTER SEQUENCE"]);
    there.postrider(&["init"]).expect(3).err_has(&["CACHE 32"]);
    there.postrider(&["run"]).expect(3).err_has(&["CACHE 32"]);
    database.psql("alter sequence postrider.outbox_seq cache 1").expect("altered");
    let role = database.url_as("reader", Some("s3cret"));
    refused(&configured(&role, ""), 3, &["privilege", "docs/stores/postgres.md"]);
    drop(database);
    drop(server);
    let place = format!("127.0.0.1:{port}");
    refused(&there, 3, &[&place]);
}

#[test]
fn a_standby_is_told_from_a_primary() {
    let server = Options::new(Version::V15).launch().expect("a server");
    let database = server.create_database().expect("a database");
    configured(&database.url(), "").postrider(&["init"]).expect(0);
    let standby = server.standby().expect("a standby");
    let port = |server: &Server| server.port().to_string();
    let url = database.url().replace(&port(&server), &port(&standby));
    let home = configured(&url, "");
    eventually("the standby is told", || {
        let done = home.postrider(&["init"]);
        (done.code == Some(3) && done.err.contains("standby")).then_some(())
    });
    // With both named, the one that takes writes is found.
    let (before, after) = url.split_once('@').expect("a user");
    let (host, rest) = after.split_once('/').expect("a database");
    let both = format!("{before}@{host},127.0.0.1:{}/{rest}", server.port());
    configured(&both, "").postrider(&["init"]).expect(0);
}

#[test]
fn a_certificate_that_nobody_vouches_for_is_refused_and_a_file_can_vouch() {
    let server = Options::new(Version::V15).tls().launch().expect("a server");
    let database = server.create_database().expect("a database");
    let url = format!("{}?sslmode=verify-full", database.url());
    let done = configured(&url, "").postrider(&["init"]).expect(3);
    let done = done.err_has(&["certificate", "ca_file"]);
    assert!(!done.err.contains("panicked"), "{}", done.err);
    let authority = server.certificate_authority().expect("made");
    let home = configured(&url, &format!("ca_file = \"{}\"", authority.display()));
    home.postrider(&["init"]).expect(0);
    let home = configured(&url, "ca_file = \"absent.pem\"");
    home.postrider(&["init"]).expect(3).err_has(&["ca_file", "absent.pem"]);
}

#[test]
fn tables_of_a_newer_version_are_refused_with_both_versions() {
    let (database, home) = with_outbox(Version::V15);
    database
        .psql("insert into postrider.migration (part, version) values ('outbox', 9999)")
        .expect("written");
    for command in [&["status"][..], &["init"], &["run", "--init"], &["tail"], &["prune"]] {
        home.postrider(command).expect(3).err_has(&["9999", "newer"]);
    }
}

#[test]
fn a_restart_of_the_server_is_told_and_delivery_goes_on_by_itself() {
    let server = Options::new(Version::V15).durable().launch().expect("a server");
    let database = server.create_database().expect("a database");
    let home = configured(&database.url(), "");
    home.postrider(&["init"]).expect(0);
    append(&database, &[("a", "First")]);
    let relay = home.start(&["run"]);
    delivered(&home, 1);
    let published = || {
        let status = home.postrider(&["status", "--json"]).expect(0).json();
        status["consumers"][0]["published"].as_u64().unwrap_or_default()
    };
    // Else it comes again after the restart, and is taken for the second.
    eventually("its checkpoint is written", || (published() == 1).then_some(()));
    server.stop(Shutdown::Fast).expect("stopped");
    relay.line_with("the database can't be used for now");
    // Of all partitions: while one is held, its renewal is what is told.
    eventually("every worker stops", || {
        let stopped = relay.seen().matches("the lease was not renewed in time").count();
        (stopped == 8).then_some(())
    });
    // Attempts come every quarter of a second and oftener; the server ends, then is away.
    let told = relay.seen().matches("leases were not renewed").count();
    assert!((1..=3).contains(&told), "{told} lines: {}", relay.seen());
    for partition in 0..8 {
        let read =
            format!("the source can't be read for now; trying again partition={partition}/8");
        let told = relay.seen().matches(&read).count();
        assert!(told <= 3, "{told} lines of {partition}: {}", relay.seen());
    }
    server.start().expect("started");
    let seen = eventually("the end is told of all that was told", || {
        let ends = ["the database can be used again", "leases can be renewed again"];
        Some(relay.seen()).filter(|seen| ends.iter().all(|end| seen.contains(end)))
    });
    // Not as soon as there was no lease left to renew.
    let renewed = seen.find("leases can be renewed again");
    assert!(seen.find("epoch=2").is_some_and(|acquired| Some(acquired) < renewed), "{seen}");
    append(&database, &[("a", "Second")]);
    delivered(&home, 2);
    stop(relay);
    assert_eq!(published(), 2);
}

#[cfg(feature = "webhook")]
#[test]
fn a_refused_event_waits_with_its_key_until_it_is_requeued() {
    let (database, home) = with_outbox(Version::V18);
    let receiver = crate::harness::Receiver::start();
    receiver.refuse_bodies_with(Some("bad"));
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"postgres-feed\"\nurl = \"{}\"\n\n[[sink]]\nkind = \"webhook\"\n\
             url = \"http://{}/\"\nallow_private = true\nunsigned = true\n\n\
             [admin]\nlisten = \"off\"\n",
            database.url(),
            receiver.address
        ),
    );
    let relay = home.start(&["run"]);
    database
        .psql(
            "select postrider.append('a', 'orders', 'T', 'bad'),
                postrider.append('a', 'orders', 'T', 'behind'),
                postrider.append('b', 'orders', 'T', 'other')",
        )
        .expect("appended");
    let letters = || home.postrider(&["dead-letters", "list", "--json"]).expect(0).json_lines();
    eventually("two letters and a delivery", || {
        (letters().len() == 2 && receiver.accepted().len() == 1).then_some(())
    });
    let states: Vec<_> = letters().iter().map(|letter| letter["state"].to_string()).collect();
    assert_eq!(states, ["\"parked\"", "\"waiting\""]);
    // Before its first checkpoint nothing tells that it is at work.
    eventually("its checkpoint is written", || {
        let status = home.postrider(&["status", "--json"]).expect(0).json();
        (status["consumers"][0]["published"].as_u64() == Some(1)).then_some(())
    });
    home.postrider(&["consumers", "remove", "webhook", "--yes"]).expect(1).err_has(&["at work"]);
    receiver.refuse_bodies_with(None);
    home.postrider(&["dead-letters", "requeue", "--key", "a"]).expect(0);
    eventually("the key goes on", || (receiver.accepted().len() == 3).then_some(()));
    let bodies: Vec<_> = receiver.accepted().into_iter().map(|got| got.body).collect();
    assert_eq!(bodies, ["other", "bad", "behind"]);
    eventually("no letter is left", || letters().is_empty().then_some(()));
    stop(relay);
}

#[test]
fn dead_consumers_need_attention() {
    let (database, home) = with_outbox(Version::V15);
    append(&database, &[("a", "First")]);
    let relay = home.start(&["run"]);
    delivered(&home, 1);
    stop(relay);
    append(&database, &[("a", "Second")]);
    database
        .psql(
            "update postrider.checkpoint set updated_at = updated_at - interval '2 days';
             insert into postrider.checkpoint (outbox, consumer, partition, position)
             select outbox, 'gone', partition, position from postrider.checkpoint",
        )
        .expect("written");
    let status = home.postrider(&["status"]).expect(0).out;
    let dead = "if nobody reads as it any more, postrider consumers remove \"jsonl\"";
    assert!(status.contains(dead), "{status}");
    let stray = "consumer \"gone\" is no sink of postrider.toml";
    assert!(status.contains(stray), "{status}");
    let relay = home.start(&["run"]);
    relay.line_with("consumer \"gone\" is no sink");
    delivered(&home, 2);
    stop(relay);
    home.postrider(&["consumers", "remove", "gone", "--yes"]).expect(0);
    let status = home.postrider(&["status"]).expect(0).out;
    assert!(!status.contains("gone"), "{status}");
}

/// A role with no more than a relay's part delivers, and sees nothing of another role's session:
/// the age is taken from the ticks.
#[test]
fn a_transaction_that_was_left_open_needs_attention() {
    let server = Options::new(Version::V15).launch().expect("a server");
    let database = server.create_database().expect("a database");
    configured(&database.url(), "").postrider(&["init"]).expect(0);
    let part = "create role courier login; select postrider.grant_relay('courier')";
    database.psql(part).expect("granted");
    let home = configured(&database.url_as("courier", None), "");
    home.postrider(&["init"]).expect(0);
    let mut psql = Command::new(database.version().program("psql").expect("installed"));
    psql.args(["--no-psqlrc", "--quiet", "-At", "-d"]).arg(database.url());
    let mut left = psql.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("psql runs");
    let begin = "begin; select postrider.append('k', 'orders', 'Left', '{}');\n";
    left.stdin.as_mut().expect("piped").write_all(begin.as_bytes()).expect("sent");
    let mut id = String::new();
    BufReader::new(left.stdout.take().expect("piped")).read_line(&mut id).expect("appended");

    let tick = "select outcome from postrider.tick('outbox', min_interval_ms => 0)";
    assert_eq!(database.psql(tick).expect("cut"), "made");
    let status = home.postrider(&["status"]).expect(0).out;
    assert!(!status.contains("has been open"), "not yet: {status}");
    let back = "update postrider.outbox_tick set stamp = stamp - (600000::bigint << 16)";
    database.psql(back).expect("ten minutes pass");
    let text = "has been open for 5 min or more";
    let status = home.postrider(&["status"]).expect(0).out;
    assert!(status.contains(text) && status.contains("pg_terminate_backend("), "{status}");
    let relay = home.start(&["run"]);
    relay.line_with(text);
    stop(relay);
    drop(left.stdin.take());
    left.wait().expect("psql ends");
    // Where it can't be asked for, all else is still shown.
    let unasked = "revoke execute on function postrider.check_settings from courier";
    database.psql(unasked).expect("revoked");
    let status = home.postrider(&["status"]).expect(0).out;
    assert!(status.contains("can't say what is in trouble: check the settings"), "{status}");
}
