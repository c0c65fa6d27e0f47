//! Every store and every sink runs the shared suites.
//!
//! What lives here: which suite belongs to which folder. What does not: the suites (`conformance`).
//! Invariant: an adapter that skips its suite can't pass for one that keeps the contract.

use std::collections::BTreeSet;

use super::Finding;
use crate::workspace::TextFile;

const SUITES: &[(&str, &[&str])] =
    &[("crates/stores/", &["store_suite!", "source_suite!"]), ("crates/sinks/", &["sink_suite!"])];

/// The folders directly below `parent`, each with a trailing `/`.
pub(super) fn adapters(files: &[TextFile], parent: &str) -> BTreeSet<String> {
    let below = files.iter().filter_map(|file| file.path.strip_prefix(parent));
    below
        .filter_map(|rest| rest.split_once('/'))
        .map(|(folder, _)| format!("{parent}{folder}/"))
        .collect()
}

/// Each adapter's folder invokes its suites.
pub(super) fn every_adapter_runs_its_suites(files: &[TextFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (parent, suites) in SUITES {
        for folder in adapters(files, parent) {
            for suite in *suites {
                let runs = files.iter().any(|file| {
                    file.path.starts_with(&folder) && file.is_rust() && invokes(&file.text, suite)
                });
                if !runs {
                    let path = format!("{folder}Cargo.toml");
                    let remedy = format!("run {suite} of postrider-conformance in its tests");
                    findings.push(Finding::new(&path, 1, "suite", remedy));
                }
            }
        }
    }
    findings
}

/// What stands for a suite where not every behaviour can be had: those that can, listed by name.
const LISTED: &[(&str, &str)] = &[("store_suite!", "listed_tests! { suite, store,")];

fn invokes(text: &str, suite: &str) -> bool {
    let listed = LISTED.iter().find(|(of, _)| *of == suite).map(|(_, listed)| *listed);
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.into_iter()
        .any(|line| line.contains(suite) || listed.is_some_and(|listed| line.contains(listed)))
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn an_adapter_without_its_suite_is_found() {
        let store = |text: &str| {
            every_adapter_runs_its_suites(&[sample("crates/stores/a/tests/it/main.rs", text)]).len()
        };
        assert_eq!(store("fn main() {}"), 2);
        assert_eq!(store("postrider_conformance::store_suite!(Harness);"), 1);
        assert_eq!(store("store_suite!(Harness);\nsource_suite!(Harness);"), 0);
        assert_eq!(
            store("listed_tests! { suite, store, Harness; a: b; }\nsource_suite!(Harness);"),
            0
        );
        assert_eq!(store("// store_suite!(Harness);\n/// source_suite!(Harness);"), 2);
        let sink = [sample("crates/sinks/a/src/lib.rs", "")];
        assert_eq!(every_adapter_runs_its_suites(&sink).len(), 1);
    }
}
