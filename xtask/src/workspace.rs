//! Where the workspace is, and which files belong to it.
//!
//! What lives here: its root, its target folder, its files, and what `cargo metadata` says of it.
//! What does not: judging any of that.
//! Invariant: only files that are tracked or could be are listed, so build output never is.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The workspace on this machine.
pub(crate) struct Workspace {
    /// Its root folder.
    pub root: PathBuf,
    /// What its programs and tests find in their environment.
    pub environment: Vec<(&'static str, String)>,
}

impl Workspace {
    /// Finds the workspace from the current folder.
    pub(crate) fn locate() -> Result<Self> {
        let text = output(Command::new(cargo()).args([
            "locate-project",
            "--workspace",
            "--message-format",
            "plain",
        ]))?;
        let root = Path::new(text.trim()).parent().context("find the workspace's root")?;
        Ok(Self { root: root.to_owned(), environment: Vec::new() })
    }

    /// A `cargo` command that runs at the root, free of what `cargo run` left in the environment.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = Command::new(cargo());
        command.current_dir(&self.root).env("CARGO_TERM_COLOR", "never");
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let left_over = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
            if left_over.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// What `cargo metadata` says, without foreign crates.
    pub(crate) fn metadata(&self) -> Result<Value> {
        let text = output(self.cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
        serde_json::from_str(&text).context("read cargo metadata")
    }

    /// Where cargo builds to.
    pub(crate) fn target(&self) -> Result<PathBuf> {
        let metadata = self.metadata()?;
        let folder = metadata["target_directory"].as_str().context("find the target folder")?;
        Ok(folder.into())
    }

    /// Every text file, its path relative to the root, with `/`.
    pub(crate) fn files(&self) -> Result<Vec<TextFile>> {
        let list = output(Command::new("git").current_dir(&self.root).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))?;
        let mut files = Vec::new();
        for path in list.lines() {
            // A file that is deleted and not yet committed is listed too; binary ones don't read.
            if let Ok(text) = std::fs::read_to_string(self.root.join(path)) {
                files.push(TextFile { path: path.to_owned(), text });
            }
        }
        Ok(files)
    }
}

/// A text file of the workspace.
pub(crate) struct TextFile {
    /// Relative to the root, with `/`.
    pub path: String,
    /// All of it.
    pub text: String,
}

impl TextFile {
    /// Whether it is Rust.
    pub(crate) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether it lies in a `tests` folder.
    pub(crate) fn is_test(&self) -> bool {
        self.path.split('/').any(|part| part == "tests")
    }

    /// The number of lines before the test module at its end, or of all lines.
    pub(crate) fn lines_without_tests(&self) -> usize {
        let lines: Vec<&str> = self.text.lines().collect();
        let tests = lines.windows(2).position(|pair| {
            pair[0].trim_end() == "#[cfg(test)]" && pair[1].trim_start().starts_with("mod ")
        });
        tests.unwrap_or(lines.len())
    }
}

fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Runs a command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let ran = command.output().with_context(|| format!("start {command:?}"))?;
    if !ran.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&ran.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_is_told_where_the_servers_are() {
        let environment = vec![("POSTRIDER_TEST_POSTGRES_15", "postgres://a@b/c".to_owned())];
        let workspace = Workspace { root: ".".into(), environment };
        let cargo = workspace.cargo();
        let told = cargo.get_envs().find(|(name, _)| *name == "POSTRIDER_TEST_POSTGRES_15");
        assert_eq!(told.and_then(|(_, value)| value), Some("postgres://a@b/c".as_ref()));
    }
}
