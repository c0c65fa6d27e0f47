//! Hello outbox: short enough, the same in the README, and true.
//!
//! What lives here: checks of the text, and a run as a user would do it. What does not: the text.
//! Invariant: what the README shows is what is compiled and run here.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::examples::{example, exit_in_time};

const SOURCE: &str = include_str!("../../examples/hello_outbox.rs");
const README: &str = include_str!("../../../../README.md");

/// The example without its head.
fn program() -> &'static str {
    SOURCE.split_once("\n\n").unwrap().1
}

#[test]
fn the_readmes_first_block_of_rust_is_the_example() {
    let (_, rest) = README.split_once("```rust\n").expect("the README has a block of Rust");
    let (block, _) = rest.split_once("```").expect("the block ends");
    assert_eq!(block, program());
}

#[test]
fn it_takes_at_most_twelve_lines_of_user_code() {
    let frame = ["use ", "#[tokio::main]", "async fn main()"];
    let is_code = |line: &&str| {
        let line = line.trim();
        let framing = frame.iter().any(|start| line.starts_with(start));
        !(framing || line.is_empty() || line == "}" || line == "Ok(())")
    };
    let lines: Vec<&str> = program().lines().filter(is_code).collect();
    assert!(lines.len() <= 12, "{} lines:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn it_delivers_its_event_and_ctrl_c_drains_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = example("hello_outbox", &folder).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(exit_in_time(&mut child).success());

    let delivered: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(delivered["type"], "OrderPlaced");
    assert_eq!(delivered["topic"], "orders");
    assert_eq!(delivered["key"], "42");
    assert_eq!(delivered["data"], serde_json::json!({ "order": 42 }));
    let shop = postrider::sqlite::rusqlite::Connection::open(folder.path().join("shop.db"));
    let total = shop.unwrap().query_row("SELECT total FROM orders", [], |row| row.get(0));
    assert_eq!(total, Ok(1999));
}
