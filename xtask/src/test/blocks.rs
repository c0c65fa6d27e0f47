//! Runs the commands and checks the configurations that the pages show, so that they stay true.
//!
//! What lives here: finding the blocks and running a page's blocks as one script. What does not:
//! Rust blocks, which are doctests of the crates that include the page; SQL (`sql_pages.rs`).
//! Invariant: a page runs in an empty folder of its own, with the binary built from this tree first
//! on the search path, and has to end by itself. One that speaks of `DATABASE_URL` finds a fresh
//! database there, of each version in turn, and `psql` on the search path.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use postrider_servers::postgres::{Options, Version};

use super::tally::Tally;
use super::{Outcome, settings, sql_pages, steps};
use crate::process;
use crate::workspace::{TextFile, Workspace};

/// Commands.
const SHELL: &str = "```sh run";
/// A whole configuration file.
const CONFIG: &str = "```toml config";
const CLOSE: &str = "```";
/// The variable for pages that need a PostgreSQL database.
const DATABASE: &str = "DATABASE_URL";
/// A page's commands are quick; one that hangs must not hang the whole run.
const MOST_SECONDS: &str = "120";

/// Runs every page that has such blocks.
pub(super) fn run(workspace: &Workspace) -> Result<Outcome> {
    let target = match steps::test_binaries(workspace)? {
        Ok(folder) => folder,
        Err(output) => return Ok(Outcome::Failed(Tally::default(), output)),
    };
    let mut tally = Tally::default();
    let mut output = String::new();
    match settings::undocumented(workspace, &target.join("postrider"))? {
        None => tally.passed += 1,
        Some(shown) => {
            tally.failed += 1;
            output.push_str(&shown);
        }
    }
    let files = workspace.files()?;
    let of_sql = sql_pages::run(&files, &target, &mut output)?;
    tally.passed += of_sql.passed;
    tally.failed += of_sql.failed;
    let pages = files.iter().filter(|file| file.path.ends_with(".md"));
    let scripts = pages.filter_map(|page| Some((page.path.as_str(), script(page)?)));
    let (on_database, plain): (Vec<_>, Vec<_>) =
        scripts.partition(|(_, script)| script.contains(&format!("${DATABASE}")));
    let mut ran = Vec::new();
    for (path, script) in &plain {
        ran.push(run_page(path, script, &[&target], &workspace.environment)?);
    }
    for version in Version::ALL {
        let server = Options::new(version).launch().context("start PostgreSQL")?;
        let psql = version.programs().context("find psql")?;
        for (path, script) in &on_database {
            let database = server.create_database().context("make a database")?;
            let environment = [(DATABASE, database.url())];
            let name = format!("{path} on PostgreSQL {}", version.major());
            ran.push(run_page(&name, script, &[&target, &psql], &environment)?);
        }
    }
    for shown in ran {
        match shown {
            None => tally.passed += 1,
            Some(shown) => {
                tally.failed += 1;
                output.push_str(&shown);
            }
        }
    }
    Ok(if tally.failed == 0 { Outcome::Passed(tally) } else { Outcome::Failed(tally, output) })
}

/// A page's blocks as one script that stops at the first failure and names its line.
fn script(page: &TextFile) -> Option<String> {
    let mut script = String::from("set -euo pipefail\n");
    let mut open = None;
    let mut found = false;
    for (at, line) in page.text.lines().enumerate() {
        let line = line.trim_end();
        match open {
            None if [SHELL, CONFIG].contains(&line) => {
                open = Some(line);
                found = true;
                let place = format!("{}:{}", page.path, at + 1);
                script.push_str(&format!("trap 'echo \"{place}: a command failed\" >&2' ERR\n"));
                if line == CONFIG {
                    script.push_str("cat > page.toml <<'END OF PAGE'\n");
                }
            }
            None => {}
            Some(block) if line == CLOSE => {
                if block == CONFIG {
                    script.push_str(
                        "END OF PAGE\npostrider config check --skip-references page.toml\n",
                    );
                }
                open = None;
            }
            Some(_) => {
                script.push_str(line);
                script.push('\n');
            }
        }
    }
    found.then_some(script)
}

/// Runs a script in a folder of its own; its output, if it failed.
fn run_page(
    path: &str,
    script: &str,
    programs: &[&Path],
    environment: &[(&'static str, String)],
) -> Result<Option<String>> {
    let folder = tempfile::tempdir().context("make a temporary folder")?;
    let mut search: Vec<_> = programs.iter().map(|folder| (*folder).to_owned()).collect();
    search.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after", "5", MOST_SECONDS, "bash", "-c", script])
        .current_dir(&folder)
        .env("PATH", std::env::join_paths(search).context("put the search path together")?)
        .env("HOME", folder.path())
        .env("NO_COLOR", "1")
        .envs(environment.iter().map(|(name, value)| (name, value)));
    let finished = process::run(path, &mut command)?;
    let shown = || format!("{path}: {}\n{}", finished.status, finished.output);
    Ok((!finished.status.success()).then(shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> TextFile {
        TextFile { path: "docs/a.md".to_owned(), text: text.to_owned() }
    }

    #[test]
    fn only_marked_blocks_are_run_and_all_of_a_page_in_one_folder() {
        let text = "```sh\nfalse\n```\n```sh run\necho 1 > a\n```\n```sh run\ntest -f a\n```\n";
        let script = script(&page(text)).expect("there are two blocks");
        let none = run_page("docs/a.md", &script, &[Path::new("/")], &[]).expect("bash runs");
        assert_eq!(none, None);
        assert!(!script.contains("false"));
        assert!(super::script(&page("```sh\ntrue\n```\n")).is_none());
    }

    #[test]
    fn a_configuration_is_checked_as_it_stands() {
        let text = "```toml config\n[source]\nkind = \"$HOME\"\n```\n";
        let script = script(&page(text)).expect("there is a block");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = folder.path().join("postrider");
        std::fs::write(&program, "#!/bin/sh\ngrep -q 'kind = \"$HOME\"' \"$4\"\n").expect("writes");
        let mut executable = Command::new("chmod");
        assert!(executable.arg("+x").arg(&program).status().is_ok_and(|status| status.success()));
        let programs = [folder.path()];
        let none = run_page("docs/a.md", &script, &programs, &[]).expect("bash runs");
        assert_eq!(none, None);
        let shown = run_page("docs/a.md", &script.replace("kind", "sort"), &programs, &[]);
        assert!(shown.expect("bash runs").is_some());
    }

    #[test]
    fn a_command_that_fails_is_told_with_its_place() {
        let text = "# A\n```sh run\ntrue\n```\n\n```sh run\nls no-such-file\necho on\n```\n";
        let script = script(&page(text)).expect("there are two blocks");
        let shown = run_page("docs/a.md", &script, &[Path::new("/")], &[]).expect("bash runs");
        let shown = shown.expect("it failed");
        assert!(shown.contains("docs/a.md:6: a command failed"), "{shown}");
        assert!(!shown.contains("on\n"), "{shown}");
    }
}
