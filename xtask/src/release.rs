//! `cargo xtask sim …` and `cargo xtask bench …`: programs of this workspace, built for release.
//!
//! What lives here: building one and handing the flags on. What does not: what they do.
//! Invariant: figures come from the release profile, as users build it.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// Handed on as they are; `--help` lists them.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Flags of the program.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<OsString>,
}

/// Builds the package's one program and runs it.
pub(crate) fn run(package: &str, args: &Args) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    let mut command = workspace.cargo();
    command.args(["run", "--release", "--locked", "-p", package, "--"]).args(&args.flags);
    let status = command.status().with_context(|| format!("start {package}"))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
