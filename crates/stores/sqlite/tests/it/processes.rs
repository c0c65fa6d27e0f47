//! Several processes on one file, some of them killed: nothing lost, nothing reordered.
//!
//! The children are this test binary itself, started with a variable that tells what to do.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use postrider_store_sqlite::append;

use crate::support::*;

const DATABASE: &str = "POSTRIDER_TEST_DATABASE";
const WRITER: &str = "POSTRIDER_TEST_WRITER";

/// What a child does: appends under its own keys and says each number once it is committed.
#[test]
fn child_that_appends_until_it_is_killed() {
    let (Ok(path), Ok(writer)) = (std::env::var(DATABASE), std::env::var(WRITER)) else { return };
    let mut connection = rusqlite::Connection::open(path).expect("open");
    connection.busy_timeout(std::time::Duration::from_secs(20)).expect("set");
    connection.pragma_update(None, "synchronous", "FULL").expect("set");
    for number in 0u32.. {
        let tx = connection.transaction().expect("begin");
        let own = format!("{writer}-{}", number % 3);
        append(&tx, &[event(&own, &number.to_string()), event(&own, "twin")]).expect("append");
        tx.commit().expect("commit");
        println!("committed {number}");
    }
}

fn start(world: &World, writer: &str) -> Child {
    Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "processes::child_that_appends_until_it_is_killed", "--nocapture"])
        .env(DATABASE, world.path())
        .env(WRITER, writer)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("start a child")
}

/// Kills the child once it has committed a few, and returns the last number that it said.
fn kill_after(mut child: Child, commits: usize) -> u32 {
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut said = Vec::new();
    let mut hear = |line: String| {
        if let Some((_, number)) = line.split_once("committed ") {
            said.push(number.trim().parse::<u32>().expect("a number"));
        }
        said.len()
    };
    while hear(lines.next().expect("the child speaks").expect("text")) < commits {}
    child.kill().expect("SIGKILL");
    child.wait().expect("reaped");
    // What it said before it died still stands in the pipe; the last line may be cut short.
    for line in lines.map_while(std::result::Result::ok) {
        if line.chars().last().is_some_and(|last| last.is_ascii_digit()) {
            hear(line);
        }
    }
    *said.last().expect("it has committed")
}

#[tokio::test(flavor = "multi_thread")]
async fn o43_killed_writers_lose_nothing_and_reorder_nothing() {
    let world = World::new(4).await;
    let mut heard = HashMap::new();
    for round in 0..2 {
        let children: Vec<_> = (0..3)
            .map(|number| {
                let writer = format!("r{round}w{number}");
                let child = start(&world, &writer);
                let commits = 20 + 15 * number;
                (writer, std::thread::spawn(move || kill_after(child, commits)))
            })
            .collect();
        for (writer, child) in children {
            heard.insert(writer, child.join().expect("killed"));
        }
    }
    let mut numbers: HashMap<String, Vec<u32>> = HashMap::new();
    let mut twins = 0;
    for record in world.drain().await {
        let text = std::str::from_utf8(record.event.payload()).expect("text").to_owned();
        match text.parse() {
            Ok(number) => {
                let own = record.event.key().to_string();
                numbers.entry(own).or_default().push(number);
            }
            Err(_) => twins += 1,
        }
    }
    assert!(numbers.values().all(|numbers| numbers.is_sorted()), "order per key");
    let mut total = 0;
    for (writer, last) in &heard {
        let mut all: Vec<u32> = numbers
            .iter()
            .filter(|(key, _)| key.starts_with(&format!("{writer}-")))
            .flat_map(|(_, numbers)| numbers.iter().copied())
            .collect();
        all.sort_unstable();
        let expected: Vec<u32> = (0..u32::try_from(all.len()).expect("few")).collect();
        assert_eq!(all, expected, "{writer}: no gap");
        assert!(all.len() > *last as usize, "{writer}: everything it said is there");
        total += all.len();
    }
    assert_eq!(twins, total, "a transaction's events share their fate");
    let check: String = world
        .connection()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .expect("check");
    assert_eq!(check, "ok");
}
