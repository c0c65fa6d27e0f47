//! `cargo xtask test`: everything that has to be true before a change lands.
//!
//! What lives here: the order of the steps, their report, the closing line. What does not: what a
//! step does (`steps.rs`) and what it installs (`tools.rs`).
//! Invariant: the last line of the output counts what passed, what failed and what was not run, and
//! the exit code agrees with it; a check that was not run is never silent.

mod blocks;
mod contacts;
pub(crate) mod excluded;
mod sdks;
mod settings;
mod sql_pages;
mod steps;
mod tally;
pub(crate) mod tools;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use self::steps::{STEPS, Step};
use self::tally::Tally;
use crate::services::SharedServers;
use crate::workspace::Workspace;

/// What to run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run this step only; may be given several times.
    #[arg(long, value_name = "STEP", value_parser = step_names())]
    only: Vec<String>,
    /// Leave this step out; may be given several times.
    #[arg(long, value_name = "STEP", value_parser = step_names())]
    skip: Vec<String>,
    /// Run the tests so many times in a row.
    #[arg(long, value_name = "N", default_value = "1")]
    times: std::num::NonZeroU32,
}

fn step_names() -> clap::builder::PossibleValuesParser {
    STEPS.iter().map(|step| step.name).collect::<Vec<_>>().into()
}

/// How a step ended.
enum Outcome {
    /// All was well.
    Passed(Tally),
    /// Something was not: the output that shows it.
    Failed(Tally, String),
    /// It could not be run here, and why.
    NotRun(String),
}

/// A step that has ended.
struct Report {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
}

/// Runs the steps and reports.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut workspace = Workspace::locate()?;
    // Started for the first step that needs them; they end before the summary.
    let mut servers = None;
    let chosen = |step: &&Step| {
        (args.only.is_empty() || args.only.iter().any(|name| name == step.name))
            && !args.skip.iter().any(|name| name == step.name)
    };
    let mut reports = Vec::new();
    for step in STEPS.iter().filter(chosen) {
        for _ in 0..if step.repeats { args.times.get() } else { 1 } {
            reports.push(run_step(&mut workspace, &mut servers, step));
        }
    }
    drop(servers);
    Ok(summary(&reports))
}

fn run_step(workspace: &mut Workspace, servers: &mut Option<SharedServers>, step: &Step) -> Report {
    eprintln!("==> {}: {}", step.name, step.what);
    let started = Instant::now();
    let ready = if step.servers { start(servers, workspace) } else { Ok(()) };
    let outcome = ready
        .and_then(|()| (step.run)(workspace))
        .unwrap_or_else(|error| Outcome::Failed(Tally::default(), format!("{error:#}\n")));
    let report = Report { name: step.name, outcome, took: started.elapsed() };
    match &report.outcome {
        Outcome::Passed(_) => {}
        Outcome::Failed(_, output) => eprint!("{output}"),
        Outcome::NotRun(reason) => eprintln!("NOT RUN: {reason}"),
    }
    eprintln!("    {}", report.line());
    report
}

/// Starts the servers that tests share, unless they run.
fn start(servers: &mut Option<SharedServers>, workspace: &mut Workspace) -> Result<()> {
    if servers.is_none() {
        let started = SharedServers::start(true)?;
        workspace.environment = started.environment();
        *servers = Some(started);
    }
    Ok(())
}

impl Report {
    fn line(&self) -> String {
        let (word, tally) = match &self.outcome {
            Outcome::Passed(tally) => ("passed", *tally),
            Outcome::Failed(tally, _) => ("FAILED", *tally),
            Outcome::NotRun(_) => ("NOT RUN", Tally::default()),
        };
        let mut line = format!("{:<10} {word:<8} {:>7.1} s", self.name, self.took.as_secs_f64());
        if tally != Tally::default() {
            line.push_str(&format!("  {tally}"));
        }
        line
    }

    /// A failed step counts as a failure of its own unless a test has already been counted for it.
    fn tally(&self) -> Tally {
        match &self.outcome {
            Outcome::Passed(tally) => *tally,
            Outcome::Failed(tally, _) => Tally { failed: tally.failed.max(1), ..*tally },
            Outcome::NotRun(_) => Tally { skipped: 1, ..Tally::default() },
        }
    }
}

/// Prints the table and the closing line.
fn summary(reports: &[Report]) -> ExitCode {
    println!();
    for report in reports {
        println!("{}", report.line());
    }
    for report in reports {
        if let Outcome::NotRun(reason) = &report.outcome {
            println!("{} was not run: {reason}", report.name);
        }
    }
    let total: Tally = reports.iter().map(Report::tally).sum();
    println!("\n{total}");
    if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcome: Outcome) -> Report {
        Report { name: "sample", outcome, took: Duration::ZERO }
    }

    #[test]
    fn a_failed_step_is_never_counted_as_nothing() {
        let silent = report(Outcome::Failed(Tally::default(), "rustc said no".into()));
        assert_eq!(silent.tally().failed, 1);
        let tests = Tally { passed: 5, failed: 2, skipped: 0 };
        let counted = report(Outcome::Failed(tests, String::new()));
        assert_eq!(counted.tally(), tests);
        assert_eq!(report(Outcome::NotRun("no network".into())).tally().skipped, 1);
    }

    #[test]
    fn the_exit_code_agrees_with_the_count() {
        let passed = || report(Outcome::Passed(Tally { passed: 1, failed: 0, skipped: 0 }));
        let failed = report(Outcome::Failed(Tally::default(), String::new()));
        let code = |reports: &[Report]| format!("{:?}", summary(reports));
        assert_eq!(code(&[passed()]), format!("{:?}", ExitCode::SUCCESS));
        assert_eq!(code(&[passed(), failed]), format!("{:?}", ExitCode::FAILURE));
    }
}
