//! Budgets of a file: its length, its lines' length, and the head that says what it is for.
//!
//! What lives here: rules that count lines. What does not: functions (`syntax.rs`).
//! Invariant: the numbers are those of STYLE.md.

use super::Finding;
use crate::workspace::TextFile;

const MAX_LINE_CHARS: usize = 100;
const MAX_FILE_LINES: usize = 500;
const MIN_HEAD_LINES: usize = 3;

/// Rust and SQL lines fit a split screen.
pub(super) fn line_length(file: &TextFile) -> Vec<Finding> {
    if !file.is_rust() && !file.path.ends_with(".sql") {
        return Vec::new();
    }
    let long = file.text.lines().enumerate().filter(|(_, line)| {
        // A link can't be broken.
        line.chars().count() > MAX_LINE_CHARS && !line.contains("://")
    });
    long.map(|(at, line)| {
        let remedy = format!("{} characters; break it at {MAX_LINE_CHARS}", line.chars().count());
        Finding::new(&file.path, at + 1, "line length", remedy)
    })
    .collect()
}

/// A file holds one idea.
pub(super) fn file_length(file: &TextFile) -> Vec<Finding> {
    let lines = file.lines_without_tests();
    if !file.is_rust() || file.is_test() || lines <= MAX_FILE_LINES {
        return Vec::new();
    }
    let remedy = format!("{lines} lines without tests; split it by idea at {MAX_FILE_LINES}");
    vec![Finding::new(&file.path, MAX_FILE_LINES + 1, "file length", remedy)]
}

/// Every file says what lives in it, what does not, and what must stay true.
pub(super) fn head(file: &TextFile) -> Vec<Finding> {
    // Programs that must not compile are read beside their expected error.
    if !file.is_rust() || file.path.contains("/misuse/") {
        return Vec::new();
    }
    let head = file.text.lines().take_while(|line| line.starts_with("//!")).count();
    let least = if file.is_test() { 1 } else { MIN_HEAD_LINES };
    if head >= least {
        return Vec::new();
    }
    let remedy = format!(
        "open with //! in at least {least} lines: what lives here, what does not, the invariant"
    );
    vec![Finding::new(&file.path, 1, "file head", remedy)]
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    #[test]
    fn a_line_of_101_characters_is_too_long_and_100_fit() {
        let long = format!("{}\n{}\n", "é".repeat(100), "x".repeat(101));
        let found = line_length(&sample("crates/core/src/a.rs", long.clone()));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 2);
        assert!(line_length(&sample("README.md", long)).is_empty());
    }

    #[test]
    fn a_file_of_501_lines_is_too_long_and_its_tests_are_free() {
        let body = "//\n".repeat(501);
        assert_eq!(file_length(&sample("crates/core/src/a.rs", body.clone())).len(), 1);
        assert!(file_length(&sample("crates/core/tests/a.rs", body.clone())).is_empty());
        let tested = format!("{}#[cfg(test)]\nmod tests {{\n{body}}}\n", "//\n".repeat(500));
        assert!(file_length(&sample("crates/core/src/a.rs", tested)).is_empty());
    }

    #[test]
    fn a_file_without_a_head_is_found() {
        assert_eq!(
            head(&sample("crates/core/src/a.rs", "//! Two.\n//! Lines.\nfn a() {}")).len(),
            1
        );
        assert!(head(&sample("crates/core/src/a.rs", "//! a\n//! b\n//! c\n")).is_empty());
        assert_eq!(head(&sample("crates/core/tests/it/main.rs", "fn a() {}")).len(), 1);
        assert!(head(&sample("crates/postrider/tests/misuse/a.rs", "fn main() {}")).is_empty());
    }
}
