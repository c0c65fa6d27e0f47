//! The binary `postrider`.
//!
//! What lives here: parse, dispatch, end with the right code. What does not: any command.
//! Invariant: every way out goes through `exit.rs`, and a closed pipe ends quietly.

mod admin;
mod args;
mod commands;
mod compose;
mod config;
mod exit;
mod failpoints;
mod logging;
#[cfg(feature = "otlp")]
mod otlp;
mod output;
mod signals;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use crate::output::{Output, escape};

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    // Two providers may be linked in some builds; then rustls must be told which to take. An
    // error means that one is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let output = Output::new(&cli.global);
    match commands::run(cli, output) {
        Ok(code) => code,
        Err(error) if exit::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            exit::code_of(&error)
        }
    }
}

/// Prints the error and its causes, one layer a line.
fn report(error: &anyhow::Error) {
    let mut layers: Vec<String> = error.chain().map(ToString::to_string).collect();
    // Drivers like to say the same twice, the second time with a number.
    for index in (1..layers.len()).rev() {
        if layers[index].contains(layers[index - 1].as_str()) && index > 1 {
            layers.remove(index - 1);
        }
    }
    for (depth, text) in layers.iter().enumerate() {
        let label = if depth == 0 { "error" } else { "  because" };
        // Line breaks are our own (a list of problems); everything else may be anybody's text.
        let lines: Vec<_> = text.lines().map(escape).collect();
        // Nobody may be there to read it: that changes nothing about the exit code.
        let _ = writeln!(std::io::stderr(), "{label}: {}", lines.join("\n"));
    }
}
