//! `completions`: what a shell needs to complete our command line.
//!
//! What lives here: printing it. What does not: the flags it is made of (`args.rs`).
//! Invariant: made from the same definition that parses the command line.

use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::output::Output;

/// Prints the completions.
///
/// # Errors
/// When standard output is closed.
pub(super) fn run(args: &CompletionsArgs, output: Output) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "postrider", &mut script);
    output.line(String::from_utf8_lossy(&script).trim_end())?;
    Ok(ExitCode::SUCCESS)
}
