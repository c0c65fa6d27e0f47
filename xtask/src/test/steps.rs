//! The steps of `cargo xtask test`, in order.
//!
//! What lives here: the table and what each step runs. What does not: the report.
//! Invariant: every step builds the whole workspace with all features, so that foreign crates are
//! built once for all of them; to add a step is to add a row.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::tally::Tally;
use super::{Outcome, blocks, contacts, excluded, tools};
use crate::workspace::Workspace;
use crate::{process, tidy};

/// One thing to check.
pub(super) struct Step {
    /// As `--only` and `--skip` take it.
    pub name: &'static str,
    /// What it does, for the reader of the output.
    pub what: &'static str,
    /// Whether `--times` repeats it.
    pub repeats: bool,
    /// Whether it needs the servers that tests share.
    pub servers: bool,
    /// Does it.
    pub run: fn(&Workspace) -> Result<Outcome>,
}

const fn check(
    name: &'static str,
    what: &'static str,
    run: fn(&Workspace) -> Result<Outcome>,
) -> Step {
    Step { name, what, repeats: false, servers: false, run }
}

const fn tests(
    name: &'static str,
    what: &'static str,
    run: fn(&Workspace) -> Result<Outcome>,
) -> Step {
    Step { name, what, repeats: true, servers: true, run }
}

/// All steps, in order.
pub(super) const STEPS: &[Step] = &[
    check("setup", "install what the tests need: servers, a browser and its driver", setup),
    check("fmt", "the code is formatted", format),
    check("clippy", "no warnings in any target with any feature", clippy),
    check("tidy", "the house rules", house_rules),
    check("emulators", "the emulator that is a workspace of its own", excluded::check),
    check("deny", "licences, banned crates, sources", deny),
    check("doc", "the documentation builds without warnings", documentation),
    tests("test", "unit and integration tests", test),
    check("sqlserver", "the store on the SQL Server that is named, if one is", sqlserver),
    tests("doctest", "the examples in the documentation", doctest),
    tests("blocks", "the shell commands and the SQL in the pages", blocks::run),
    check(
        "contacts",
        "the sample on Cosmos DB to a session of Service Bus, by its one command",
        contacts::run,
    ),
    tests(
        "faults",
        "a few schedules of faults with each sink, and brokers that are away",
        fault_smoke,
    ),
    tests("sim", "a hundred seeded worlds", sim_smoke),
    check("bench", "every benchmark runs (nothing is judged)", bench_smoke),
];

fn setup(workspace: &Workspace) -> Result<Outcome> {
    let done = tools::install()?;
    excluded::build(workspace)?;
    eprintln!("    {done}");
    Ok(Outcome::Passed(Tally::default()))
}

fn format(workspace: &Workspace) -> Result<Outcome> {
    let mut command = workspace.cargo();
    command.args(["fmt", "--all", "--check", "--", "--color", "never"]);
    component(workspace, "fmt", "rustfmt", &mut command)
}

fn clippy(workspace: &Workspace) -> Result<Outcome> {
    let mut command = workspace.cargo();
    command.args(["clippy", "--workspace", "--all-targets", "--all-features", "--locked"]);
    component(workspace, "clippy", "clippy", command.args(["--", "-D", "warnings"]))
}

fn house_rules(workspace: &Workspace) -> Result<Outcome> {
    let findings = tidy::check(workspace)?;
    if findings.is_empty() {
        return Ok(Outcome::Passed(Tally::default()));
    }
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    Ok(Outcome::Failed(Tally::default(), lines.join("\n") + "\n"))
}

fn deny(workspace: &Workspace) -> Result<Outcome> {
    if let Err(error) = tools::install_cargo_deny(workspace) {
        return Ok(Outcome::NotRun(format!("{error:#}")));
    }
    // Advisories need a database from outside: whoever releases runs them.
    let mut command = workspace.cargo();
    command.args(["deny", "--workspace", "--all-features", "check"]);
    match judged("deny", command.args(["licenses", "bans", "sources"]))? {
        Outcome::Passed(_) => judged("deny", &mut excluded::deny(workspace)),
        other => Ok(other),
    }
}

fn documentation(workspace: &Workspace) -> Result<Outcome> {
    let mut command = workspace.cargo();
    command.env("RUSTDOCFLAGS", "-D warnings");
    let arguments = ["doc", "--workspace", "--lib", "--all-features", "--no-deps", "--locked"];
    judged("doc", command.args(arguments))
}

fn test(workspace: &Workspace) -> Result<Outcome> {
    let mut command = workspace.cargo();
    if tools::has_cargo_command(workspace, "nextest") {
        command.args(["nextest", "run", "--workspace", "--all-features", "--locked"]);
        return judged("test", command.arg("--no-fail-fast"));
    }
    command.args(["test", "--workspace", "--all-features", "--locked", "--no-fail-fast"]);
    judged("test", command.args(["--lib", "--bins", "--tests", "--examples"]))
}

fn doctest(workspace: &Workspace) -> Result<Outcome> {
    let mut command = workspace.cargo();
    command.args(["test", "--doc", "--workspace", "--all-features", "--locked"]);
    judged("doctest", command.arg("--no-fail-fast"))
}

/// No SQL Server can be installed here: whoever has one names it; its tests are run again alone.
fn sqlserver(workspace: &Workspace) -> Result<Outcome> {
    if std::env::var_os("POSTRIDER_TEST_SQLSERVER").is_none_or(|text| text.is_empty()) {
        let reason = "POSTRIDER_TEST_SQLSERVER names no server; nothing was tried on SQL Server";
        return Ok(Outcome::NotRun(reason.to_owned()));
    }
    let mut command = workspace.cargo();
    command.args(["test", "--workspace", "--all-features", "--locked", "--no-fail-fast"]);
    judged("sqlserver", command.args(["--test", "sql", "--test", "server"]))
}

fn fault_smoke(workspace: &Workspace) -> Result<Outcome> {
    smoke(workspace, "faults", "postrider-faults", &["--smoke"])
}

fn sim_smoke(workspace: &Workspace) -> Result<Outcome> {
    smoke(workspace, "sim", "postrider-simulation", &["--worlds", "100"])
}

fn bench_smoke(workspace: &Workspace) -> Result<Outcome> {
    for bench in ["relay", "postgres-feed", "postgres-wal", "cosmos", "sinks", "end-to-end"] {
        let ran = smoke(workspace, "bench", "postrider-bench", &[bench, "--smoke"])?;
        if !matches!(ran, Outcome::Passed(_)) {
            return Ok(ran);
        }
    }
    Ok(Outcome::Passed(Tally::default()))
}

/// Runs a program of the tests' own build.
fn smoke(workspace: &Workspace, name: &str, program: &str, flags: &[&str]) -> Result<Outcome> {
    match test_binaries(workspace)? {
        Ok(folder) => {
            let environment = workspace.environment.iter().map(|(name, value)| (name, value));
            judged(name, Command::new(folder.join(program)).args(flags).envs(environment))
        }
        Err(output) => Ok(Outcome::Failed(Tally::default(), output)),
    }
}

/// The folder with the binaries of the tests' own build, or the output that shows why not.
///
/// Steps that run a binary take it from here: a build with another profile or other features would
/// take longer than all tests.
pub(super) fn test_binaries(workspace: &Workspace) -> Result<Result<PathBuf, String>> {
    let mut build = workspace.cargo();
    // With the tests, so that features come out as in their build and nothing is built twice.
    build.args(["build", "--workspace", "--all-features", "--locked", "--bins", "--tests"]);
    let built = process::run("build", &mut build)?;
    if !built.status.success() {
        return Ok(Err(built.output));
    }
    Ok(Ok(workspace.target()?.join("debug")))
}

/// Runs a command of an optional component of the toolchain.
fn component(
    workspace: &Workspace,
    name: &str,
    component: &str,
    command: &mut Command,
) -> Result<Outcome> {
    if !tools::has_cargo_command(workspace, name) {
        let reason = format!("the toolchain lacks it: rustup component add {component}");
        return Ok(Outcome::NotRun(reason));
    }
    judged(name, command)
}

/// Runs a command; its exit status decides, and the tests that it counted are counted.
pub(super) fn judged(name: &str, command: &mut Command) -> Result<Outcome> {
    let finished = process::run(name, command)?;
    let tally = Tally::of(&finished.output);
    if finished.status.success() {
        return Ok(Outcome::Passed(tally));
    }
    let output = if tally.passed + tally.failed > 0 {
        without_passed(&finished.output)
    } else {
        finished.output
    };
    Ok(Outcome::Failed(tally, output))
}

/// The output of a test run without a line for each test that passed.
fn without_passed(output: &str) -> String {
    let kept = output.lines().filter(|line| {
        let line = line.trim();
        !(line.starts_with("PASS [") || line.starts_with("test ") && line.ends_with("... ok"))
    });
    kept.map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_status_decides_and_the_output_is_kept() {
        let run = |script: &str| judged("sample", Command::new("sh").args(["-c", script]));
        let passed = run("echo 'test result: ok. 2 passed; 0 failed;'").expect("sh runs");
        assert!(matches!(passed, Outcome::Passed(Tally { passed: 2, failed: 0, skipped: 0 })));
        let failed = run("echo 'test result: ok. 2 passed; 0 failed;'; exit 1").expect("sh runs");
        assert!(matches!(failed, Outcome::Failed(Tally { passed: 2, .. }, _)));
        let silent = run("echo why >&2; exit 1").expect("sh runs");
        assert!(matches!(silent, Outcome::Failed(_, output) if output.contains("why")));
    }

    #[test]
    fn a_failed_run_shows_its_failures_only() {
        let output = "    PASS [   0.01s] a b\n    FAIL [   0.01s] a c\ntest x ... ok\npanicked\n";
        assert_eq!(without_passed(output), "    FAIL [   0.01s] a c\npanicked\n");
    }
}
