//! The same file names in every store and in every sink: learn one, know all.
//!
//! What lives here: the file names that each adapter has. What does not: what is in them.
//! Invariant: whoever knows one adapter finds their way in the next.

use super::Finding;
use super::suites::adapters;
use crate::workspace::TextFile;

struct Folder {
    parent: &'static str,
    /// Every adapter, the ones in memory included.
    all: &'static [&'static str],
    /// Every adapter that reaches something outside its process.
    outside: &'static [&'static str],
}

const FOLDERS: &[Folder] = &[
    Folder {
        parent: "crates/stores/",
        all: &[
            "append.rs",
            "checkpoints.rs",
            "dead_letters.rs",
            "documents.rs",
            "feed.rs",
            "leases.rs",
            "lib.rs",
            "retention.rs",
        ],
        outside: &["config.rs", "error.rs", "inbox.rs", "migrate.rs"],
    },
    Folder {
        parent: "crates/sinks/",
        all: &["lib.rs"],
        outside: &["config.rs", "encode.rs", "error.rs", "publish.rs"],
    },
];

/// Each adapter has the files that its kind has.
pub(super) fn same_file_names(files: &[TextFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for folder in FOLDERS {
        for adapter in adapters(files, folder.parent) {
            let outside = if adapter.ends_with("/memory/") { &[] } else { folder.outside };
            for name in folder.all.iter().chain(outside) {
                let path = format!("{adapter}src/{name}");
                if !files.iter().any(|file| file.path == path) {
                    let remedy = "every adapter of its kind has this file; move its idea here";
                    findings.push(Finding::new(&path, 1, "layout", remedy));
                }
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn an_adapter_that_lacks_a_file_is_found() {
        let names = ["lib.rs", "publish.rs", "config.rs", "encode.rs", "error.rs"];
        let mut files: Vec<_> =
            names.iter().map(|name| sample(&format!("crates/sinks/a/src/{name}"), "")).collect();
        assert!(same_file_names(&files).is_empty());
        files.pop();
        assert_eq!(same_file_names(&files)[0].path, "crates/sinks/a/src/error.rs");
    }

    #[test]
    fn an_adapter_in_memory_needs_no_configuration() {
        let files = [sample("crates/sinks/memory/src/lib.rs", "")];
        assert!(same_file_names(&files).is_empty());
    }
}
