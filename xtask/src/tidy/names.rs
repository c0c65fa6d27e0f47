//! Words that say nothing and therefore name nothing here.
//!
//! What lives here: the banned words and how a name is cut into words. What does not: finding the
//! names in Rust (`syntax.rs`).
//! Invariant: only names that this project gives are judged, never a foreign crate's.

use super::Finding;
use crate::workspace::TextFile;

const BANNED: &[&str] =
    &["manager", "helper", "helpers", "util", "utils", "common", "misc", "processor"];

/// The banned word in a name, if there is one. Cosmos DB's own term is exempt.
pub(super) fn banned_word(name: &str) -> Option<&'static str> {
    let words = words(name);
    if words.join("_").contains("change_feed_processor") {
        return None;
    }
    BANNED.iter().copied().find(|banned| words.iter().any(|word| word == banned))
}

/// Cuts `snake_case`, `CamelCase` and `kebab-case` into lower-case words.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut after_lower = false;
    for c in name.chars() {
        let last = words.last_mut().expect("there is always a word under way");
        if !c.is_alphanumeric() {
            words.push(String::new());
        } else if c.is_uppercase() && after_lower {
            words.push(c.to_lowercase().collect());
        } else {
            last.extend(c.to_lowercase());
        }
        after_lower = c.is_lowercase() || c.is_numeric();
    }
    words.retain(|word| !word.is_empty());
    words
}

/// No folder or file is named by such a word.
pub(super) fn file_name(file: &TextFile) -> Vec<Finding> {
    let found = file.path.split('/').find_map(banned_word);
    found
        .map(|word| {
            let remedy = format!("{word} says nothing; name the file by what it holds");
            Finding::new(&file.path, 1, "file name", remedy)
        })
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn banned_words_are_found_in_every_spelling() {
        for name in ["LeaseManager", "lease_manager", "HELPER", "xmlUtil", "misc-things", "utils"] {
            assert!(banned_word(name).is_some(), "{name}");
        }
        for name in ["commonplace", "utility", "ChangeFeedProcessor", "HttpServer", "_", "x2y"] {
            assert_eq!(banned_word(name), None, "{name}");
        }
    }

    #[test]
    fn a_file_named_by_such_a_word_is_found() {
        assert_eq!(file_name(&sample("crates/core/src/utils.rs", "")).len(), 1);
        assert_eq!(file_name(&sample("crates/common/src/a.rs", "")).len(), 1);
        assert!(file_name(&sample("crates/core/src/limits.rs", "")).is_empty());
    }
}
