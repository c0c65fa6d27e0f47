//! `cargo xtask …`: the one door to everything that is done to this workspace.
//!
//! What lives here: the command line. What does not: the work, which each command's module does.
//! Invariant: a command that is listed works on a fresh clone; nothing is listed before it does.

mod contacts;
mod faults;
mod fuzz;
mod process;
mod release;
mod services;
mod test;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Automation of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Checks everything: format, lints, house rules, licences, docs, tests. CI runs this.
    Test(test::Args),
    /// Runs the real relay under injected faults and judges what arrived.
    Faults(faults::Args),
    /// Feeds random bytes to the decoders of a server's bytes (needs a nightly compiler).
    Fuzz(fuzz::Args),
    /// Runs the Contacts sample on Cosmos DB, a relay and a Service Bus here, until Ctrl-C.
    Contacts(contacts::Args),
    /// Runs the real relay in seeded worlds with a fake clock.
    Sim(release::Args),
    /// Measures figures and judges them by their goals.
    Bench(release::Args),
    /// Installs the servers that tests need, or runs a command beside them.
    #[command(subcommand)]
    Services(services::Command),
    /// Checks the house rules alone (a few seconds).
    Tidy,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Test(args) => test::run(&args),
        Command::Faults(args) => faults::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Contacts(args) => contacts::run(&args),
        Command::Sim(args) => release::run("postrider-simulation", &args),
        Command::Bench(args) => release::run("postrider-bench", &args),
        Command::Services(command) => services::run(&command),
        Command::Tidy => tidy::run(),
    };
    done.unwrap_or_else(|error| {
        eprintln!("cargo xtask: {error:#}");
        ExitCode::FAILURE
    })
}
