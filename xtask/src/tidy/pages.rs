//! Pages that point at something that exists: links to files, and paths of Rust files in the text.
//!
//! What lives here: finding such pointers in Markdown. What does not: links to other sites.
//! Invariant: a file that is moved or renamed takes every page with it, or the check fails.

use super::Finding;
use crate::workspace::TextFile;

/// Every relative link and every path of a Rust file in a page leads somewhere.
pub(super) fn pointers_lead_somewhere(files: &[TextFile]) -> Vec<Finding> {
    let paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
    let short: Vec<String> = paths.iter().map(|path| shortened(path)).collect();
    let mut findings = Vec::new();
    for page in files.iter().filter(|file| file.path.ends_with(".md")) {
        for (at, line) in page.text.lines().enumerate() {
            for link in links(line).filter(|link| !leads_to(page, link, &paths)) {
                let remedy = format!("{link} is no file of this repository");
                findings.push(Finding::new(&page.path, at + 1, "link", remedy));
            }
            for code in code_paths(line).filter(|code| !short.iter().any(|p| same(code, p))) {
                let remedy = format!("{code} is no file; name the one that holds it now");
                findings.push(Finding::new(&page.path, at + 1, "path", remedy));
            }
        }
    }
    findings
}

/// The relative targets of `[text](target)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split([')', '#', ' ']).next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

fn leads_to(page: &TextFile, link: &str, paths: &[&str]) -> bool {
    let mut folder: Vec<&str> = page.path.split('/').collect();
    folder.pop();
    for part in link.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(folder.pop()),
            name => folder.push(name),
        }
    }
    let target = folder.join("/");
    let below = format!("{target}/");
    paths.iter().any(|path| *path == target || path.starts_with(&below))
}

/// Texts such as `relay/lanes.rs` in backticks.
fn code_paths(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.filter(|text| {
        text.ends_with(".rs") && text.contains('/') && !text.contains([' ', '<', '{', '…'])
    })
}

/// As pages write it: without `crates/` and `src/`.
fn shortened(path: &str) -> String {
    path.strip_prefix("crates/").unwrap_or(path).replace("/src/", "/")
}

/// Whether a page's path is this one; `*` stands for one folder.
fn same(code: &str, short: &str) -> bool {
    let code = shortened(code);
    let mut parts = short.split('/');
    code.split('/').all(|part| parts.next().is_some_and(|other| part == "*" || part == other))
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let files = [
            sample("docs/a.md", text),
            sample("README.md", ""),
            sample("crates/relay/src/lanes.rs", ""),
            sample("crates/stores/sqlite/src/feed.rs", ""),
        ];
        pointers_lead_somewhere(&files).into_iter().map(|finding| finding.remedy).collect()
    }

    #[test]
    fn a_link_to_no_file_is_found() {
        assert!(
            found("[a](../README.md#top) [b](a.md) [c](https://example.org/x) [d](#x)").is_empty()
        );
        assert!(found("[e](../crates/relay)").is_empty());
        assert_eq!(found("[f](README.md) and [g](../docs/b.md)").len(), 2);
    }

    #[test]
    fn a_path_of_a_file_that_was_renamed_is_found() {
        assert!(
            found("`relay/lanes.rs`, `crates/relay/src/lanes.rs`, `stores/*/feed.rs`").is_empty()
        );
        assert!(found("`lanes.rs`, relay/no.rs, `stores/<name>/feed.rs`").is_empty());
        assert_eq!(found("`relay/lane.rs` and `sinks/*/feed.rs`").len(), 2);
    }
}
