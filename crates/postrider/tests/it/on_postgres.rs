//! The example on PostgreSQL, run as a user would, and the same in the guide.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use postrider_servers::postgres::{Version, shared};

use crate::examples::{example, exit_in_time};

const SOURCE: &str = include_str!("../../examples/postgres_outbox.rs");
const GUIDE: &str = include_str!("../../../../docs/stores/postgres.md");

#[test]
fn the_guides_first_block_of_rust_is_the_example() {
    let program = SOURCE.split_once("\n\nuse ").map(|(_, rest)| format!("use {rest}"));
    let (_, rest) = GUIDE.split_once("```rust,no_run\n").expect("the guide has a block of Rust");
    let (block, _) = rest.split_once("```").expect("the block ends");
    assert_eq!(Some(block), program.as_deref());
}

#[test]
fn postgres_outbox_delivers_its_event_and_ctrl_c_drains_it() {
    let folder = tempfile::tempdir().unwrap();
    let database = shared(Version::V15).expect("a server");
    let mut command = example("postgres_outbox", &folder);
    command.env("DATABASE_URL", database.url());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(exit_in_time(&mut child).success());

    let delivered: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(delivered["type"], "OrderPlaced");
    assert_eq!(delivered["data"], serde_json::json!({ "order": 42 }));
    assert_eq!(database.psql("select total from shop_order").unwrap(), "1999");
}
