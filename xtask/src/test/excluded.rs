//! The emulator of Azure Cosmos DB, which is a workspace of its own.
//!
//! What lives here: building it where `servers/` looks for it, and what the other steps do for
//! every other crate. What does not: starting it.
//! Invariant: it has its own lock file and its own folder under the target folder, so that nothing
//! of it is in any other build.

use std::process::Command;

use anyhow::{Result, bail};
use postrider_servers::cosmos;

use super::Outcome;
use super::steps::judged;
use crate::process;
use crate::workspace::Workspace;

const MANIFEST: &str = "emulators/cosmos/Cargo.toml";

/// A cargo command for it.
fn cargo(workspace: &Workspace, command: &str) -> Result<Command> {
    let folder = cosmos::PLACE.split('/').next().unwrap_or_default();
    let target = workspace.target()?.join(folder);
    let mut cargo = workspace.cargo();
    cargo.args([command, "--manifest-path", MANIFEST, "--locked", "--target-dir"]).arg(target);
    Ok(cargo)
}

/// Builds it, if that was not done since it changed.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    let built = process::run("build the Cosmos DB emulator", &mut cargo(workspace, "build")?)?;
    if !built.status.success() {
        bail!("{}\nthe Cosmos DB emulator could not be built", built.output);
    }
    Ok(())
}

/// Licences and sources, by the same rules.
pub(super) fn deny(workspace: &Workspace) -> Command {
    let mut command = workspace.cargo();
    command.args(["deny", "--manifest-path", MANIFEST, "--config"]);
    command.arg(workspace.root.join("deny.toml")).args(["check", "licenses", "sources"]);
    command
}

/// Formatting, warnings and tests.
pub(super) fn check(workspace: &Workspace) -> Result<Outcome> {
    let mut format = workspace.cargo();
    format.args(["fmt", "--check", "--manifest-path", MANIFEST, "--", "--color", "never"]);
    let mut clippy = cargo(workspace, "clippy")?;
    clippy.args(["--all-targets", "--", "-D", "warnings"]);
    for mut command in [format, clippy] {
        let checked = judged("emulators", &mut command)?;
        if !matches!(checked, Outcome::Passed(_)) {
            return Ok(checked);
        }
    }
    judged("emulators", &mut cargo(workspace, "test")?)
}
