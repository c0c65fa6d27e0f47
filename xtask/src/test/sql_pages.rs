//! Runs the SQL that the pages on PostgreSQL show, on every version that tests run against.
//!
//! What lives here: a page's blocks as one script for `psql`, and the output that the page shows
//! for them. What does not: shell blocks (`blocks.rs`).
//! Invariant: a page runs in a fresh database of a server of its own, initialised by the binary,
//! and every line of output is one that the page shows.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use postrider_servers::postgres::{Options, Server, Version};

use super::tally::Tally;
use crate::process;
use crate::workspace::TextFile;

const PAGES: &[&str] = &["docs/stores/postgres", WAL];
/// Pages on the write-ahead log, whose outbox is initialised for it.
const WAL: &str = "docs/postgres-wal";
/// What stands before a statement that has to fail, before its SQLSTATE.
const FAILS: &str = "-- fails: ";

/// A page's SQL, and what it prints.
#[derive(Debug, PartialEq)]
struct WalkThrough {
    script: String,
    output: String,
}

/// Runs every page with SQL for PostgreSQL; what failed is added to `shown`.
pub(super) fn run(pages: &[TextFile], programs: &Path, shown: &mut String) -> Result<Tally> {
    let mut tally = Tally::default();
    let pages: Vec<_> = pages
        .iter()
        .filter(|page| page.path.ends_with(".md"))
        .filter(|page| PAGES.iter().any(|pages| page.path.starts_with(pages)))
        .filter_map(|page| Some((page.path.as_str(), walk_through(&page.text)?)))
        .collect();
    for version in Version::ALL {
        let server = Options::new(version).launch().context("start PostgreSQL")?;
        for (path, page) in &pages {
            match run_page(&server, path, page, programs)? {
                None => tally.passed += 1,
                Some(failure) => {
                    tally.failed += 1;
                    shown.push_str(&failure);
                }
            }
        }
    }
    Ok(tally)
}

/// The page's blocks of SQL, each in the line in which it stands there, and those of text behind.
fn walk_through(page: &str) -> Option<WalkThrough> {
    let mut found = WalkThrough { script: String::new(), output: String::new() };
    let mut lines = 0;
    let mut open: Option<&str> = None;
    let mut before = "";
    let mut expected: Option<&str> = None;
    for (at, line) in page.lines().enumerate() {
        match (open, line.trim_end().strip_prefix("```")) {
            (None, Some(tag)) => open = Some(tag),
            (None, None) => {}
            (Some(tag), Some("")) => (before, open) = (tag, None),
            (Some("sql"), _) => {
                let padding = at.saturating_sub(lines);
                let code = match line.strip_prefix(FAILS) {
                    Some(code) => {
                        expected = Some(code.trim());
                        "\\set ON_ERROR_STOP 0\n".to_owned()
                    }
                    None if line.ends_with(';') && expected.is_some() => {
                        let code = expected.take().unwrap_or_default();
                        format!(
                            "{line}\n\\set ON_ERROR_STOP 1\nSELECT 1 / (:'SQLSTATE' = '{code}')\
                             ::integer \\g /dev/null\n"
                        )
                    }
                    None => format!("{line}\n"),
                };
                found.script.push_str(&"\n".repeat(padding));
                lines += padding + code.lines().count();
                found.script.push_str(&code);
            }
            (Some("text"), _) if before == "sql" => {
                found.output.push_str(line);
                found.output.push('\n');
            }
            (Some(_), _) => {}
        }
    }
    (!found.script.is_empty()).then_some(found)
}

/// Runs a page; what was wrong, if anything was.
fn run_page(
    server: &Server,
    path: &str,
    page: &WalkThrough,
    programs: &Path,
) -> Result<Option<String>> {
    let database = server.create_database().context("make a database")?;
    let folder = tempfile::tempdir().context("make a temporary folder")?;
    let file = |name: &str, text: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, text).with_context(|| format!("write {name}"))?;
        anyhow::Ok(file)
    };
    let kind = if path.starts_with(WAL) { "postgres-wal" } else { "postgres-feed" };
    let source = format!("[source]\nkind = \"{kind}\"\nurl = \"{}\"\n", database.url());
    let mut init = Command::new(programs.join("postrider"));
    let config = file("postrider.toml", &source)?;
    let initialised = process::run(path, init.arg("--config").arg(config).arg("init"))?;
    if !initialised.status.success() {
        return Ok(Some(format!("{path}: postrider init\n{}", initialised.output)));
    }
    let version = server.version();
    let script = file("page.sql", &page.script)?;
    let printed = folder.path().join("printed");
    let mut psql = Command::new(version.program("psql").context("find psql")?);
    psql.args(["--no-psqlrc", "--quiet", "--no-align", "--pset=footer=off"])
        .args(["-v", "ON_ERROR_STOP=1", "-d", &database.url(), "-f"])
        .arg(script)
        .arg("-o")
        .arg(&printed);
    let ran = process::run(path, &mut psql)?;
    let printed = std::fs::read_to_string(printed).unwrap_or_default();
    if ran.status.success() && printed == page.output {
        return Ok(None);
    }
    Ok(Some(format!(
        "{path} on PostgreSQL {}: {}\n{}\nit printed:\n{printed}\nthe page shows:\n{}\n",
        version.major(),
        ran.status,
        ran.output,
        page.output
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# A\n```sql\nSELECT 1;\n```\n\n```text\n?column?\n1\n```\n\
        ```text\nno\n```\n\
        ```sh\nfalse\n```\n\n```sql\n-- fails: 22012\nSELECT 1\n / 0;\nSELECT 2;\n```\n";

    #[test]
    fn sql_keeps_its_lines_and_only_the_text_right_behind_it_is_its_output() {
        let found = walk_through(PAGE).expect("there is SQL");
        let lines: Vec<_> = found.script.lines().collect();
        assert_eq!(lines[2], "SELECT 1;");
        assert_eq!(lines[17], "\\set ON_ERROR_STOP 0");
        assert_eq!(lines[19], " / 0;");
        assert!(lines[21].contains("'22012'"), "{lines:?}");
        assert_eq!(found.output, "?column?\n1\n");
        assert_eq!(walk_through("# B\n```sh\ntrue\n```\n"), None);
    }

    #[test]
    fn a_page_whose_output_or_error_is_another_one_fails() {
        let server = Options::new(Version::V15).launch().expect("a server");
        let programs = tempfile::tempdir().expect("a folder");
        let postrider = programs.path().join("postrider");
        std::os::unix::fs::symlink("/bin/true", &postrider).expect("a program");
        let run = |text: &str| {
            let page = walk_through(text).expect("there is SQL");
            run_page(&server, "docs/a.md", &page, programs.path()).expect("psql runs")
        };
        let good = PAGE.replace("SELECT 2;", "SELECT 2 AS b \\gset");
        assert_eq!(run(&good), None);
        assert!(run(PAGE).is_some_and(|shown| shown.contains("it printed")), "2 is not shown");
        assert!(run(&good.replace("22012", "22013")).is_some(), "another error");
        assert!(run(&good.replace(" / 0", " / 1")).is_some(), "no error");
        assert!(run(&good.replace("\n1\n", "\n3\n")).is_some(), "another output");
    }
}
