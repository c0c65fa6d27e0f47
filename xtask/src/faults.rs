//! `cargo xtask faults …`: the real relay under injected faults.
//!
//! What lives here: building the relay with failpoints and handing the flags on. What does not: the
//! flags and the faults, which `faults/` has.
//! Invariant: what runs is what users run: the release profile, with failpoints added.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;

/// Handed on as they are; `--help` lists them.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Flags of the fault runner.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    flags: Vec<OsString>,
}

/// Builds and runs.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let workspace = Workspace::locate()?;
    // A folder of its own: failpoints must not find their way into a build for users.
    let target = workspace.target()?.join("faults");
    let mut build = workspace.cargo();
    build.args(["build", "--release", "--locked", "-p", "postrider-cli", "-p", "postrider-faults"]);
    let features = "postrider-cli/failpoints,postrider-cli/cosmos,postrider-cli/kafka";
    build.args(["--features", features]);
    build.arg("--target-dir").arg(&target);
    let built = build.status().context("start cargo build")?;
    if !built.success() {
        bail!("the relay with failpoints could not be built");
    }
    let runner = target.join("release").join("postrider-faults");
    let status = Command::new(runner).args(&args.flags).status();
    let status = status.context("start the fault runner")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
