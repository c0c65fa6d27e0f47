//! Who may use whom: the table in ARCHITECTURE.md against `cargo metadata`.
//!
//! What lives here: reading the table, and judging each dependency between crates of this
//! workspace. What does not: the table itself, which is for people first.
//! Invariant: an edge that the table does not have, fails; so does a crate that it does not know.

use serde_json::Value;

use super::Finding;
use crate::workspace::TextFile;

const PAGE: &str = "ARCHITECTURE.md";
const HEAD: &str = "| crate | may use | its tests may also use |";
/// In the table: every crate of the workspace.
const EVERYTHING: &str = "everything";

/// One row of the table.
struct Row<'a> {
    name: &'a str,
    uses: Vec<&'a str>,
    tests_use: Vec<&'a str>,
}

/// Every dependency between crates stands in the table.
pub(super) fn check(files: &[TextFile], metadata: &Value) -> Vec<Finding> {
    let page = files.iter().find(|file| file.path == PAGE).map(|file| file.text.as_str());
    let rows = table(page.unwrap_or_default());
    if rows.is_empty() {
        return vec![Finding::new(PAGE, 1, "edges", format!("give it the table {HEAD}"))];
    }
    let packages = metadata["packages"].as_array().map_or(&[][..], Vec::as_slice);
    packages.iter().flat_map(|package| judge(package, metadata, &rows)).collect()
}

fn table(page: &str) -> Vec<Row<'_>> {
    let lines = page.lines().skip_while(|line| line.trim() != HEAD).skip(2);
    lines
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| {
            let mut cells = line.trim_matches('|').split('|').map(words);
            let name = cells.next()?.first().copied()?;
            let (uses, tests_use) = (cells.next()?, cells.next().unwrap_or_default());
            Some(Row { name, uses, tests_use })
        })
        .collect()
}

fn words(cell: &str) -> Vec<&str> {
    let separators = [',', ' ', '`', '–'];
    cell.split(separators).filter(|word| !word.is_empty()).collect()
}

fn judge(package: &Value, metadata: &Value, rows: &[Row<'_>]) -> Vec<Finding> {
    let manifest = text(&package["manifest_path"]);
    let root = text(&metadata["workspace_root"]);
    let path = manifest.strip_prefix(root).unwrap_or(manifest).trim_start_matches('/');
    let folder = folder_name(path.trim_end_matches("/Cargo.toml"));
    let mut findings = Vec::new();
    if text(&package["name"]) != crate_name(folder) {
        let remedy = format!("the crate in this folder is called {}", crate_name(folder));
        findings.push(Finding::new(path, 1, "crate name", remedy));
    }
    let Some(row) = rows.iter().find(|row| matches(row.name, folder)) else {
        let remedy =
            format!("{folder} has no row in the table of {PAGE}; add one, with its reason");
        findings.push(Finding::new(path, 1, "edges", remedy));
        return findings;
    };
    let dependencies = package["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
    for dependency in dependencies {
        let Some(target) = dependency["path"].as_str().and_then(|path| path.strip_prefix(root))
        else {
            continue;
        };
        let target = folder_name(target.trim_start_matches('/'));
        let in_tests = dependency["kind"].as_str() == Some("dev");
        let mut allowed =
            row.uses.iter().chain(in_tests.then_some(&row.tests_use).into_iter().flatten());
        if !allowed.any(|pattern| matches(pattern, target)) {
            let remedy = format!("{folder} may not use {target} (table in {PAGE})");
            findings.push(Finding::new(path, 1, "edges", remedy));
        }
    }
    findings
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// `crates/stores/sqlite` is `stores/sqlite` in the table.
fn folder_name(path: &str) -> &str {
    path.strip_prefix("crates/").unwrap_or(path)
}

/// The name of the crate in a folder, by which others depend on it.
fn crate_name(folder: &str) -> String {
    match folder.split_once('/') {
        // A program that people call by its name.
        Some(("emulators", name)) => format!("postrider-{name}-emulator"),
        Some((kinds, name)) => format!("postrider-{}-{name}", kinds.trim_end_matches('s')),
        None if ["postrider", "xtask"].contains(&folder) => folder.to_owned(),
        None => format!("postrider-{folder}"),
    }
}

fn matches(pattern: &str, folder: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => folder.starts_with(prefix),
        None => pattern == folder || pattern == EVERYTHING,
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    const TABLE: &str = "# Map\n\n| crate | may use | its tests may also use |\n|---|---|---|\n\
        | `core` | – | – |\n| `stores/*` | `core` | `conformance`, `stores/memory` |\n\
        | `conformance` | `core` | – |\n| `emulators/*` | – | – |\n| `cli` | everything | – |\n\n\
        Text | with | bars |\n";

    fn found(folder: &str, name: &str, dependencies: &[(&str, Option<&str>)]) -> Vec<String> {
        let dependencies: Vec<Value> = dependencies
            .iter()
            .map(|(path, kind)| serde_json::json!({ "path": format!("/w/{path}"), "kind": kind }))
            .collect();
        let metadata = serde_json::json!({
            "workspace_root": "/w",
            "packages": [{
                "name": name,
                "manifest_path": format!("/w/{folder}/Cargo.toml"),
                "dependencies": dependencies,
            }],
        });
        let findings = check(&[sample(PAGE, TABLE)], &metadata);
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_edge_outside_the_table_is_found() {
        let name = "postrider-store-sqlite";
        let folder = "crates/stores/sqlite";
        assert!(found(folder, name, &[("crates/core", None)]).is_empty());
        assert!(found(folder, name, &[("crates/conformance", Some("dev"))]).is_empty());
        assert_eq!(
            found(folder, name, &[("crates/conformance", None)]),
            ["crates/stores/sqlite/Cargo.toml:1: edges: stores/sqlite may not use conformance \
              (table in ARCHITECTURE.md)"]
        );
        assert_eq!(found(folder, name, &[("crates/sinks/jsonl", Some("dev"))]).len(), 1);
        assert_eq!(found("crates/core", "postrider-core", &[("crates/cli", None)]).len(), 1);
        let all = [("crates/core", None), ("crates/sinks/jsonl", None)];
        assert!(found("crates/cli", "postrider-cli", &all).is_empty());
    }

    #[test]
    fn an_unknown_crate_and_a_wrong_name_are_found() {
        assert_eq!(found("crates/new", "postrider-new", &[]).len(), 1);
        assert_eq!(found("crates/stores/a", "postrider-stores-a", &[]).len(), 1);
        assert!(found("crates/stores/a", "postrider-store-a", &[]).is_empty());
        assert!(found("emulators/a", "postrider-a-emulator", &[]).is_empty());
        assert_eq!(found("emulators/a", "postrider-emulator-a", &[]).len(), 1);
    }

    #[test]
    fn a_page_without_the_table_is_found() {
        let metadata = serde_json::json!({ "packages": [] });
        assert_eq!(check(&[sample(PAGE, "# Map\n")], &metadata).len(), 1);
        assert_eq!(check(&[], &metadata).len(), 1);
    }
}
