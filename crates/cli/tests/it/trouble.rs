//! Databases, disks and receivers in trouble: what is said, with which code, and that nothing is
//! lost.

use std::time::Duration;

use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};
use rustix::process::Signal;

use crate::harness::{Home, eventually};

const SOURCE: &str = "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n";
const TO_FILE: &str = "\n[[sink]]\nkind = \"jsonl\"\npath = \"out/events.jsonl\"\n\n\
                       [admin]\nlisten = \"off\"\n";

fn delivered(home: &Home) -> usize {
    let text = std::fs::read_to_string(home.path("out/events.jsonl")).unwrap_or_default();
    text.lines().count()
}

fn stop(relay: crate::harness::Running) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

/// An outage is one line in the log however long it lasts, and its end is another.
#[test]
fn an_outage_of_a_sink_is_told_once_with_its_reason_and_so_is_its_end() {
    let home = Home::new();
    // One partition, so that one worker meets all the keys.
    home.write("postrider.toml", format!("{SOURCE}partitions = 1\n{TO_FILE}"));
    home.postrider(&["init"]).expect(0);
    let keys: Vec<_> = (0..20).map(|n| format!("key-{n}")).collect();
    let events: Vec<_> = keys.iter().map(|key| (key.as_str(), "Happened")).collect();
    home.append(&events);
    let relay = home.start(&["run"]);
    let told = relay.line_with("an outage");
    assert!(told.contains("WARN") && told.contains("sink=jsonl"), "{told}");
    assert!(told.contains("No such file or directory"), "the reason: {told}");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(relay.seen().matches("an outage").count(), 1, "{}", relay.seen());
    let sink = &home.postrider(&["status", "--json"]).expect(0).json()["consumers"][0];
    assert_eq!((&sink["pending"], &sink["appended"]), (&20.into(), &20.into()), "nothing hidden");
    std::fs::create_dir(home.path("out")).expect("made");
    relay.line_with("the sink takes events again");
    eventually("all arrive", || (delivered(&home) == 20).then_some(()));
    assert!(!relay.seen().contains("{\"of\""), "no payload in the log: {}", relay.seen());
    stop(relay);
    let sink = &home.postrider(&["status", "--json"]).expect(0).json()["consumers"][0];
    assert_eq!((&sink["published"], &sink["parked"]), (&20.into(), &0.into()));
}

/// A replay waits for its sink as a relay does, and says so.
#[test]
fn a_replay_whose_sink_is_down_says_so_and_goes_on() {
    let home = Home::with_outbox();
    home.write("postrider.toml", format!("{SOURCE}{TO_FILE}"));
    home.append(&[("a", "First"), ("b", "Other"), ("a", "Second")]);
    let replay = home.start(&["replay", "--from", "oldest"]);
    let told = replay.line_with("the sink does not take everything");
    assert!(told.contains("No such file or directory"), "{told}");
    std::fs::create_dir(home.path("out")).expect("made");
    replay.line_with("3 of 3 matching events published to jsonl");
    assert_eq!(replay.ended(), Some(0));
    assert_eq!(delivered(&home), 3);
}

/// A single key that fails is no outage, and is not silent either.
#[test]
fn an_event_that_goes_on_failing_is_told_with_its_position() {
    let home = Home::with_outbox();
    home.write("postrider.toml", format!("{SOURCE}{TO_FILE}"));
    home.append(&[("a", "First")]);
    let relay = home.start(&["run"]);
    let told = relay.line_with("an event was not taken");
    assert!(told.contains("position=") && told.contains("attempt=4"), "{told}");
    std::fs::create_dir(home.path("out")).expect("made");
    eventually("it arrives", || (delivered(&home) == 1).then_some(()));
    stop(relay);
}

#[test]
fn a_database_that_stays_locked_is_told_once_and_delivery_goes_on_by_itself() {
    let home = Home::with_outbox();
    std::fs::create_dir(home.path("out")).expect("made");
    home.write("postrider.toml", format!("{SOURCE}busy_timeout = \"20ms\"\n{TO_FILE}"));
    home.append(&[("a", "First")]);
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    let held = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .expect("the write lock");
    let relay = home.start(&["run"]);
    let told = relay.line_with("the database can't be used for now");
    assert!(told.contains("locked by another connection"), "{told}");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(relay.seen().matches("can't be used for now").count(), 1, "{}", relay.seen());
    drop(held);
    relay.line_with("the database can be used again");
    eventually("it arrives", || (delivered(&home) == 1).then_some(()));
    stop(relay);
}

#[test]
fn a_database_locked_before_it_was_ever_ours_is_not_ready() {
    let home = Home::new();
    home.write("postrider.toml", format!("{SOURCE}busy_timeout = \"20ms\"\n"));
    let connection = Connection::open(home.path("app.db")).expect("opened");
    connection.execute_batch("CREATE TABLE t (a); BEGIN EXCLUSIVE").expect("locked");
    home.postrider(&["init"]).expect(3).err_has(&["locked", "busy_timeout"]);
    connection.execute_batch("COMMIT").expect("unlocked");
    home.postrider(&["init"]).expect(0);
}

#[test]
fn damage_within_the_outbox_is_told_with_what_to_do() {
    let home = Home::with_outbox();
    home.append(&[("a", "First"), ("b", "Second")]);
    let connection = Connection::open(home.path("app.db")).expect("opened");
    connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("moved to the file");
    let sql = "SELECT (SELECT rootpage FROM sqlite_schema WHERE name = 'postrider_outbox'),
               (SELECT page_size FROM pragma_page_size)";
    let (page, size): (i64, i64) =
        connection.query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?))).expect("read");
    drop(connection);
    let (page, size) =
        (usize::try_from(page).expect("small"), usize::try_from(size).expect("small"));
    let mut bytes = std::fs::read(home.path("app.db")).expect("read");
    bytes[(page - 1) * size..page * size].fill(0xaa);
    home.write("app.db", &bytes);
    let tail = ["tail", "--source", "app.db", "--from", "oldest", "--no-follow"];
    home.postrider(&tail).expect(3).err_has(&["error: read partition", "damaged", "integrity"]);
    home.postrider(&["prune", "--source", "app.db", "--dry-run", "--keep", "0s"])
        .expect(3)
        .err_has(&["damaged", "restore a backup"]);
}

#[test]
fn run_ends_at_a_database_that_it_may_not_write() {
    let home = Home::with_outbox();
    let url = format!("sqlite:file:{}?mode=ro", home.path("app.db").display());
    let config = format!("{SOURCE}{TO_FILE}").replace("app.db", &url);
    home.write("postrider.toml", config);
    home.append(&[("a", "First")]);
    home.postrider(&["run"]).expect(1).err_has(&["the database is read-only", "check the rights"]);
}

/// Runs a script with `disk` being a file system of its own, of one MiB. None where the system
/// lets nobody make one.
#[cfg(target_os = "linux")]
fn on_a_small_disk(home: &Home, script: &str) -> Option<String> {
    std::fs::create_dir(home.path("disk")).expect("made");
    let script =
        format!("mount -t tmpfs -o size=1m postrider disk || exit 77\n{script}\necho finished");
    for flags in [&["--mount"][..], &["--mount", "--map-root-user"]] {
        let mut command = std::process::Command::new("unshare");
        command.args(flags).args(["sh", "-c", &script]).current_dir(home.path("."));
        command.env("POSTRIDER", env!("CARGO_BIN_EXE_postrider"));
        let Ok(output) = command.output() else { continue };
        let out = String::from_utf8(output.stdout).expect("UTF-8");
        let err = String::from_utf8_lossy(&output.stderr);
        if out.ends_with("finished\n") {
            return Some(out);
        }
        let refused = output.status.code() == Some(77) || err.contains("unshare");
        assert!(refused, "out: {out}\nerr: {err}");
    }
    eprintln!("skipped: no small file system can be made here (it takes unshare and mount)");
    None
}

/// With the source's disk full the commands say so, and all is delivered once there is space.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told_and_nothing_is_lost() {
    let home = Home::with_outbox();
    std::fs::create_dir(home.path("out")).expect("made");
    home.write("postrider.toml", format!("{SOURCE}{TO_FILE}").replace("app.db", "disk/app.db"));
    home.append(&[("a", "First"), ("b", "Other"), ("a", "Second")]);
    let moved = Connection::open(home.path("app.db")).expect("opened");
    moved.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("moved to the file");
    drop(moved);
    let script = r#"
        cp app.db disk/app.db
        cat /dev/zero > disk/fill 2>/dev/null
        "$POSTRIDER" init --source disk/new.db 2>&1; echo "init ended with $?"
        "$POSTRIDER" prune --keep 0s 2>&1; echo "prune ended with $?"
        rm disk/fill
        "$POSTRIDER" run 2> log & relay=$!
        until [ "$(cat out/events.jsonl 2>/dev/null | wc -l)" = 3 ]; do sleep 0.05; done
        kill -TERM $relay; wait $relay; echo "run ended with $?"
    "#;
    let Some(out) = on_a_small_disk(&home, script) else { return };
    assert!(out.contains("init ended with 3"), "{out}");
    assert!(out.contains("prune ended with 3"), "{out}");
    assert_eq!(out.matches("is full; free space: nothing was saved").count(), 2, "{out}");
    assert!(out.contains("run ended with 0"), "{out}");
    assert_eq!(delivered(&home), 3, "nothing was lost");
}
