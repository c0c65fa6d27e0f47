//! The command line of the fault runner: what it refuses, before anything is started.
//!
//! Schedules themselves need the relay's binary and run as a step of `cargo xtask test`.

use std::process::{Command, Output};

fn faults(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_postrider-faults")).args(args).output().expect("started")
}

fn refused(args: &[&str], part: &str) {
    let output = faults(args);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{args:?}");
    assert!(text.contains(part), "{args:?}: {text}");
}

#[test]
fn a_relay_that_is_not_there_is_named() {
    refused(&["--postrider", "no-such-folder/postrider"], "no-such-folder/postrider");
    refused(&["takeover", "--postrider", "no-such-folder/postrider"], "build it first");
}

#[test]
fn impossible_flags_are_refused() {
    refused(&["--jobs", "0"], "--jobs");
    refused(&["takeover", "--rounds", "0"], "--rounds");
    refused(&["--only", "3", "--from", "2"], "cannot be used with");
    refused(&["--source", "oracle"], "sqlite, postgres-feed, postgres-wal");
    refused(&["--events", "100"], "--source postgres-wal");
    refused(&["--smoke", "--source", "sqlite"], "cannot be used with");
    refused(&["--sink", "carrier-pigeon"], "webhook");
}

#[test]
fn help_tells_of_every_way_to_run_it() {
    let text = String::from_utf8_lossy(&faults(&["--help"]).stdout).into_owned();
    for part in [
        "--schedules",
        "--seed",
        "--only",
        "--smoke",
        "--json",
        "takeover",
        "outage",
        "--source",
        "--events",
    ] {
        assert!(text.contains(part), "{part}");
    }
    assert!(text.contains("--source postgres-feed --sink webhook --schedules 300"), "an example");
    for role in ["hold-lock", "postgres-writer", "postgres-holder"] {
        assert!(!text.contains(role), "{role}: roles of its own children are no commands");
    }
}
