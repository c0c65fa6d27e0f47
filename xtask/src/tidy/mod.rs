//! The house rules, so that people need not remember them.
//!
//! What lives here: the list of rules and how a finding is told. What does not: the rules, one idea
//! a file.
//! Invariant: every rule has a test on a small sample that breaks it.

mod budgets;
mod edges;
mod forbidden;
mod glossary;
mod layout;
mod names;
mod pages;
mod proofs;
mod suites;
mod syntax;

use std::fmt;
use std::process::ExitCode;

use anyhow::Result;

use crate::workspace::{TextFile, Workspace, output};

/// One broken rule at one place.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Relative to the root.
    pub path: String,
    /// From 1.
    pub line: usize,
    /// The rule's name.
    pub rule: &'static str,
    /// What to do.
    pub remedy: String,
}

impl Finding {
    fn new(path: &str, line: usize, rule: &'static str, remedy: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, rule, remedy: remedy.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line, self.rule, self.remedy)
    }
}

/// Judges one file alone.
type FileRule = fn(&TextFile) -> Vec<Finding>;
/// Judges all files together.
type TreeRule = fn(&[TextFile]) -> Vec<Finding>;

const FILE_RULES: &[FileRule] = &[
    budgets::line_length,
    budgets::file_length,
    budgets::head,
    forbidden::strings,
    forbidden::open_ends,
    names::file_name,
    syntax::functions_and_names,
];

const TREE_RULES: &[TreeRule] = &[
    glossary::every_word,
    layout::same_file_names,
    pages::pointers_lead_somewhere,
    proofs::promises_name_real_tests,
    suites::every_adapter_runs_its_suites,
];

/// Checks everything and prints what is broken.
pub(crate) fn run() -> Result<ExitCode> {
    let findings = check(&Workspace::locate()?)?;
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => println!("tidy: nothing to do"),
        count => println!("tidy: {count} to do"),
    }
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Everything that is broken, by path.
pub(crate) fn check(workspace: &Workspace) -> Result<Vec<Finding>> {
    let files = workspace.files()?;
    let mut findings: Vec<Finding> = files
        .iter()
        .flat_map(|file| FILE_RULES.iter().flat_map(move |rule| rule(file)))
        .chain(TREE_RULES.iter().flat_map(|rule| rule(&files)))
        .collect();
    findings.extend(edges::check(&files, &workspace.metadata()?));
    findings.extend(forbidden::crates(&dependency_tree(workspace)?));
    findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
    Ok(findings)
}

/// Every crate that ends up in a build for this platform, one a line.
fn dependency_tree(workspace: &Workspace) -> Result<String> {
    output(workspace.cargo().args([
        "tree",
        "--workspace",
        "--all-features",
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]))
}

/// A file for a rule's test.
#[cfg(test)]
fn sample(path: &str, text: impl Into<String>) -> TextFile {
    TextFile { path: path.to_owned(), text: text.into() }
}
