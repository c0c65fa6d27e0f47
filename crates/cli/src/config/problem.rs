//! What is wrong with a configuration, and where.
//!
//! What lives here: places in a file, problems, and the list of them that a person sees. What does
//! not: finding them (`parse.rs`).
//! Invariant: every problem names file, line and column where there is one, the key, and a remedy.

use std::fmt;
use std::path::{Path, PathBuf};

/// A place in the file: both numbers count from 1; columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    /// The line.
    pub(crate) line: usize,
    /// The character within the line.
    pub(crate) column: usize,
}

impl Place {
    /// The place of a byte offset; one beyond the text or within a character is held before it.
    pub(crate) fn of(text: &str, offset: usize) -> Self {
        let mut end = offset.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &text[..end];
        let line = before.matches('\n').count() + 1;
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        Self { line, column: before[start..].chars().count() + 1 }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Where; none when the file itself could not be read.
    pub(crate) place: Option<Place>,
    /// The key's full name, empty when none is concerned.
    pub(crate) key: String,
    /// What is wrong and what to do.
    pub(crate) text: String,
}

/// All that is wrong with one file.
#[derive(Debug)]
pub(crate) struct Problems {
    file: PathBuf,
    list: Vec<Problem>,
}

impl Problems {
    /// Everything found in `file`, in the file's order.
    pub(crate) fn new(file: &Path, mut list: Vec<Problem>) -> Self {
        list.sort_by_key(|problem| problem.place);
        Self { file: file.to_owned(), list }
    }

    /// The problems, in the file's order.
    pub(crate) fn list(&self) -> &[Problem] {
        &self.list
    }

    /// The file they were found in.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.list.len();
        let noun = if count == 1 { "problem" } else { "problems" };
        write!(f, "configuration is not usable ({count} {noun}); nothing was started")?;
        for problem in &self.list {
            write!(f, "\n  {}", self.file.display())?;
            if let Some(Place { line, column }) = problem.place {
                write!(f, ":{line}:{column}")?;
            }
            f.write_str(": ")?;
            if !problem.key.is_empty() {
                write!(f, "{}: ", problem.key)?;
            }
            f.write_str(&problem.text)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// The valid name nearest to `given`, if one is near enough to be meant.
pub(crate) fn nearest<'a>(
    given: &str,
    valid: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    valid
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(given, name), name))
        .filter(|(distance, name)| *distance <= 2.max(name.len() / 3))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_lines_and_characters_from_one() {
        let text = "a = 1\nü = \"x\"\n";
        assert_eq!(Place::of(text, 0), Place { line: 1, column: 1 });
        assert_eq!(Place::of(text, 6), Place { line: 2, column: 1 });
        assert_eq!(Place::of(text, 8), Place { line: 2, column: 2 });
        // Within the two bytes of ü, and beyond the end.
        assert_eq!(Place::of(text, 7), Place { line: 2, column: 1 });
        assert_eq!(Place::of(text, 999), Place { line: 3, column: 1 });
    }

    #[test]
    fn the_nearest_name_must_be_near() {
        let names = ["topic", "url", "on_failure"];
        assert_eq!(nearest("tpoic", names), Some("topic"));
        assert_eq!(nearest("on_fail", names), Some("on_failure"));
        assert_eq!(nearest("zzzzzz", names), None);
    }
}
