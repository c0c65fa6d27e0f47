//! The command line itself.

use std::process::Stdio;

use crate::harness::Home;

#[test]
fn help_tells_the_exit_codes_and_examples() {
    let done = Home::new().postrider(&["--help"]).expect(0);
    for part in ["Exit codes:", "130", "Examples:", "dead-letters", "POSTRIDER_CONFIG"] {
        assert!(done.out.contains(part), "{part} is not in:\n{}", done.out);
    }
}

#[test]
fn what_can_not_be_meant_is_refused_with_code_2() {
    let home = Home::new();
    for args in [
        &["rnu"][..],
        &["tail", "--from", "yesterday"],
        &["tail", "--limit", "0"],
        &["tail", "--key", ""],
        &["prune", "--keep", "soon"],
        &["dead-letters", "show", "first"],
        &["run", "--source", "app.db"],
        &["status", "--source", ""],
        &["dead-letters", "requeue", "--source", "app.db"],
        &["dead-letters", "drop", "--source", "app.db", "--all"],
        &["consumers", "remove", "--source", "app.db", "webhook"],
    ] {
        let done = home.postrider(args).expect(2);
        assert!(!done.err.is_empty() && done.out.is_empty(), "{args:?}");
    }
    assert!(!home.path("app.db").exists(), "a refused command opens nothing");
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let home = Home::new();
    let mut child = home
        .command(&["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("ended");
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn every_shell_gets_its_completions() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = home.postrider(&["completions", shell]).expect(0);
        assert!(done.out.contains("dead-letters"), "{shell}");
    }
}

#[test]
fn colours_are_off_without_a_terminal_and_on_when_asked_for() {
    let home = Home::with_outbox();
    let plain = home.postrider(&["status", "--source", "app.db"]).expect(0);
    assert!(!plain.out.contains('\u{1b}'), "{}", plain.out);
    let painted = home.postrider(&["status", "--source", "app.db", "--color", "always"]).expect(0);
    assert!(painted.out.contains('\u{1b}'), "{}", painted.out);
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_can_not_be_written_is_an_error_that_names_it() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").expect("opened");
    let home = Home::new();
    let mut schema = home.command(&["config", "schema"]);
    let output = schema.stdout(full()).output().expect("started");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("write to standard output: No space left"), "{err}");
    // Where even the error can't be written, the code still tells.
    let mut absent = home.command(&["status", "--source", "absent.db"]);
    let status = absent.stdout(full()).stderr(full()).status().expect("started");
    assert_eq!(status.code(), Some(3));
}
