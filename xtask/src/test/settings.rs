//! The page of settings names every key that the binary knows, and no other.
//!
//! What lives here: comparing `postrider config schema` with docs/configuration.md. What does not:
//! the keys, which the binary has in one table.
//! Invariant: a key that is added, renamed or removed takes the page with it, or the check fails.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::workspace::{Workspace, output};

const PAGE: &str = "docs/configuration.md";

/// What the page lacks or has too much, or nothing.
pub(super) fn undocumented(workspace: &Workspace, binary: &Path) -> Result<Option<String>> {
    let schema = output(Command::new(binary).args(["config", "schema"]))?;
    let schema: Value = serde_json::from_str(&schema).context("read the configuration's schema")?;
    let page = std::fs::read_to_string(workspace.root.join(PAGE)).context("read the page")?;
    let problems = compare(&keys_of_schema(&schema), &keys_of_page(&page));
    let lines = problems.iter().map(|problem| format!("{PAGE}: {problem}\n"));
    Ok((!problems.is_empty()).then(|| lines.collect()))
}

fn compare(schema: &BTreeSet<String>, page: &BTreeSet<String>) -> Vec<String> {
    let lacking = schema.difference(page).map(|key| format!("`{key}` is missing"));
    let surplus = page.difference(schema).map(|key| format!("`{key}` is no setting any more"));
    lacking.chain(surplus).collect()
}

/// Every property's name, sections included, wherever it stands.
fn keys_of_schema(schema: &Value) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    let mut open = vec![schema];
    while let Some(value) = open.pop() {
        match value {
            Value::Object(fields) => {
                if let Some(Value::Object(properties)) = fields.get("properties") {
                    keys.extend(properties.keys().cloned());
                }
                open.extend(fields.values());
            }
            Value::Array(values) => open.extend(values),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
    keys
}

/// The first cell of every table row, and the section in every heading such as ``## `[relay]` ``.
fn keys_of_page(page: &str) -> BTreeSet<String> {
    let quoted = |text: &str| {
        let name = text.split('`').nth(1)?;
        Some(name.trim_matches(['[', ']']).to_owned())
    };
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|row| row.split_once('`').map(|(name, _)| name.to_owned()));
    let headings = page.lines().filter(|line| line.starts_with('#')).filter_map(quoted);
    rows.chain(headings).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_missing_or_gone_are_found() {
        let schema = serde_json::json!({ "properties": {
            "relay": { "properties": { "group": { "default": "x" }, "lease_ttl": {} } },
            "sink": { "items": { "oneOf": [{ "properties": { "kind": {}, "url": {} } }] } },
        }});
        let page = "# Configuration\n## `[relay]`\n| key | default |\n| `group` | x |\n\
            ## `[[sink]]`\n| `kind` | |\n| `url` | `x` |\n| `gone` | |\n";
        let problems = compare(&keys_of_schema(&schema), &keys_of_page(page));
        assert_eq!(problems, ["`lease_ttl` is missing", "`gone` is no setting any more"]);
    }
}
