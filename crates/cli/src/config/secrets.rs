//! `env:NAME` and `file:PATH`: values that stay out of the file.
//!
//! What lives here: looking them up. What does not: what the value means (`value.rs`).
//! Invariant: the text found is never part of an error.

use std::path::Path;

/// Longest file that `file:` reads: secrets and URLs are short.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// Whether references are looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// They are; a missing one is a problem.
    Resolve,
    /// They are left as they are: the values are not needed here.
    Leave,
}

/// What a text in the file stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// This text.
    Text(String),
    /// A reference that was not looked up.
    Left,
}

/// Looks up a text of the file; `folder` is where relative `file:` paths begin.
///
/// # Errors
/// What is missing and what to do, for a person.
pub(crate) fn look_up(text: &str, folder: &Path, lookup: Lookup) -> Result<Found, String> {
    if let Some(name) = text.strip_prefix("env:") {
        return variable(name, lookup);
    }
    match (text.strip_prefix("file:"), lookup) {
        (None, _) => Ok(Found::Text(text.to_owned())),
        (Some(""), _) => Err("file: has no path; write \"file:PATH\"".to_owned()),
        (Some(_), Lookup::Leave) => Ok(Found::Left),
        (Some(path), Lookup::Resolve) => file(&folder.join(path)).map(Found::Text),
    }
}

fn variable(name: &str, lookup: Lookup) -> Result<Found, String> {
    // Names with these would make `std::env::var` fail in a way that reads as "not set".
    if name.is_empty() || name.contains(['=', '\0']) {
        return Err("env: has no name of a variable; write \"env:NAME\"".to_owned());
    }
    if lookup == Lookup::Leave {
        return Ok(Found::Left);
    }
    match std::env::var(name) {
        Ok(value) if value.is_empty() => {
            Err(format!("environment variable {name} is empty; give it a value"))
        }
        Ok(value) => Ok(Found::Text(value)),
        Err(std::env::VarError::NotPresent) => Err(format!(
            "environment variable {name} is not set; set it, or write the value in its place"
        )),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(format!("environment variable {name} is not UTF-8; set it to text"))
        }
    }
}

fn file(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let about = |error: std::io::Error| format!("can't read {shown}: {error}");
    let facts = std::fs::metadata(path).map_err(about)?;
    if !facts.is_file() {
        return Err(format!("{shown} is no file; name one that holds only the value"));
    }
    if facts.len() > MAX_FILE_BYTES {
        return Err(format!(
            "{shown} has {} bytes; {MAX_FILE_BYTES} are allowed: name a file that holds only the \
             value",
            facts.len()
        ));
    }
    let text = std::fs::read_to_string(path).map_err(about)?;
    let value = text.trim_end_matches(['\n', '\r']);
    if value.is_empty() {
        return Err(format!("{shown} is empty; put the value in it"));
    }
    Ok(value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_its_text_without_the_last_line_end() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("secret"), "hunter2\r\n").expect("written");
        let found = look_up("file:secret", folder.path(), Lookup::Resolve);
        assert_eq!(found, Ok(Found::Text("hunter2".to_owned())));
    }

    #[test]
    fn what_is_missing_is_named_and_what_is_found_is_not() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let missing = look_up("env:POSTRIDER_NO_SUCH_VARIABLE", folder.path(), Lookup::Resolve);
        assert!(missing.is_err_and(|text| text.contains("POSTRIDER_NO_SUCH_VARIABLE is not set")));
        assert!(look_up("file:absent", folder.path(), Lookup::Resolve).is_err());
        assert!(look_up("file:.", folder.path(), Lookup::Resolve).is_err());
        assert!(look_up("env:", folder.path(), Lookup::Resolve).is_err());
        assert_eq!(look_up("env:X", folder.path(), Lookup::Leave), Ok(Found::Left));
        assert_eq!(
            look_up("plain", folder.path(), Lookup::Resolve),
            Ok(Found::Text("plain".to_owned()))
        );
    }
}
