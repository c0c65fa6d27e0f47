//! `cargo xtask sim`: many seeded worlds, one after the other.
//!
//! What lives here: the command line and the sum. What does not: a world's life.
//! Invariant: the exit code is 1 when any world broke a promise, and its seed is printed.

use clap::Parser;
use postrider_conformance::oracle::{Run, Verdict};
use postrider_simulation::live;

/// Runs the real relay in seeded worlds with a fake clock and injected faults.
///
/// Examples:
///   cargo xtask sim --worlds 1000            seeds 1 to 1000
///   cargo xtask sim --seed 4711 --worlds 1   one world again
#[derive(Parser)]
#[command(name = "cargo xtask sim", verbatim_doc_comment)]
struct Cli {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many worlds, with one seed after the other.
    #[arg(long, default_value_t = 200)]
    worlds: u64,
    /// End with one line of JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    let mut total = Verdict::default();
    let mut broken = 0u64;
    let mut allowed = 0u64;
    for seed in cli.seed..cli.seed.saturating_add(cli.worlds) {
        let outcome = live(seed);
        total = total.plus(outcome.verdict);
        allowed += outcome.duplicates_allowed;
        if let Some(reason) = outcome.broken {
            broken += 1;
            eprintln!("seed {seed}: {reason}\n  replay: cargo xtask sim --seed {seed} --worlds 1");
        }
    }
    let run = Run {
        source: "memory".into(),
        sink: "memory".into(),
        seed: cli.seed,
        schedules: cli.worlds,
        duplicates_allowed: allowed,
    };
    if cli.json {
        println!("{}", total.to_json_line(&run));
    } else {
        println!(
            "{} worlds, {} events appended, {} delivered, {} duplicates, {broken} worlds broken",
            cli.worlds, total.appended, total.delivered, total.duplicates
        );
    }
    if broken == 0 { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
