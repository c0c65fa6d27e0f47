//! The page of guarantees names tests that exist.
//!
//! What lives here: finding a test's name in docs/guarantees.md and its function in the code. What
//! does not: whether the test proves the promise, which is for people to judge.
//! Invariant: a test that is renamed or removed takes the page with it, or the check fails.

use super::Finding;
use crate::workspace::TextFile;

const PAGE: &str = "docs/guarantees.md";

/// Every name of a test on the page is a function of this repository.
pub(super) fn promises_name_real_tests(files: &[TextFile]) -> Vec<Finding> {
    let Some(page) = files.iter().find(|file| file.path == PAGE) else {
        return vec![Finding::new(PAGE, 1, "proof", "say what is promised, and what proves it")];
    };
    let mut findings = Vec::new();
    for (at, line) in page.text.lines().enumerate() {
        for name in test_names(line) {
            let function = [format!("fn {name}("), format!("fn {name}<")];
            let exists = files.iter().any(|file| {
                file.is_rust() && function.iter().any(|function| file.text.contains(function))
            });
            if !exists {
                let remedy = format!("{name} is no test; name the one that proves it now");
                findings.push(Finding::new(PAGE, at + 1, "proof", remedy));
            }
        }
    }
    findings
}

/// Sentences in `snake_case`: three words or more.
fn test_names(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter(|text| {
        text.matches('_').count() >= 2
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn a_test_that_does_not_exist_is_found() {
        let code = || sample("crates/core/src/a.rs", "fn it_is_kept() {}\nfn also_for_all<H>() {}");
        let found = |text: &str| promises_name_real_tests(&[sample(PAGE, text), code()]).len();
        assert_eq!(found("| kept | `it_is_kept`, `also_for_all` with `lease_ttl` |"), 0);
        assert_eq!(found("| kept | `it_was_kept_once` |"), 1);
        assert_eq!(promises_name_real_tests(&[code()]).len(), 1);
    }
}
