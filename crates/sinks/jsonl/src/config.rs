//! The settings of `kind = "jsonl"` in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and the check of their values. What does not: reading
//! the file they stand in.
//! Invariant: whatever `check` passes can be opened, save for what only the file system knows.

use std::path::PathBuf;

use postrider_core::{Error, Result};
use serde::Deserialize;

/// Settings of a [`JsonLines`](crate::JsonLines) sink.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {
    /// The file, or `-` for standard output. Its folder must exist.
    pub path: PathBuf,
    /// Whether a confirmation waits until the disk has the lines (default). Without it, a power
    /// cut may lose confirmed events; a crash of the process alone never does.
    #[serde(default = "yes")]
    pub fsync: bool,
    /// Start a new file before this one would pass so many bytes.
    pub rotate_bytes: Option<u64>,
    /// Start a new file once this one is so many seconds old.
    pub rotate_seconds: Option<u64>,
    /// How many rotated files to keep; all of them without it.
    pub keep: Option<usize>,
}

impl JsonlConfig {
    /// The defaults for a file: synced, never rotated.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            fsync: true,
            rotate_bytes: None,
            rotate_seconds: None,
            keep: None,
        }
    }

    /// Whether the lines go to standard output.
    pub fn is_standard_output(&self) -> bool {
        self.path.as_os_str() == "-"
    }

    /// Refuses impossible values, naming the key and the remedy.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent).
    pub fn check(&self) -> Result<()> {
        let refuse = |text| Err(Error::permanent(text));
        let rotates = self.rotate_bytes.is_some() || self.rotate_seconds.is_some();
        if self.is_standard_output() {
            return match rotates || self.keep.is_some() {
                true => refuse("path = \"-\" is standard output, which cannot be rotated"),
                false => Ok(()),
            };
        }
        if self.path.file_name().is_none() {
            return refuse("path names no file; give one such as \"events.jsonl\"");
        }
        if self.rotate_bytes == Some(0) {
            return refuse("rotate_bytes is 0; give at least 1, or leave it out");
        }
        if self.rotate_seconds == Some(0) {
            return refuse("rotate_seconds is 0; give at least 1, or leave it out");
        }
        if self.keep.is_some() && !rotates {
            return refuse("keep has no effect without rotate_bytes or rotate_seconds");
        }
        Ok(())
    }
}

fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_safe_and_unknown_keys_refused() {
        let config: JsonlConfig = toml::from_str("path = 'events.jsonl'").expect("valid");
        assert_eq!(config, JsonlConfig::file("events.jsonl"));
        assert!(toml::from_str::<JsonlConfig>("path = 'a'\nfsnyc = true").is_err());
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        for (text, key) in [
            ("path = '-'\nkeep = 1", "rotated"),
            ("path = '-'\nrotate_bytes = 1", "rotated"),
            ("path = '/'", "path"),
            ("path = ''", "path"),
            ("path = 'a'\nrotate_bytes = 0", "rotate_bytes"),
            ("path = 'a'\nrotate_seconds = 0", "rotate_seconds"),
            ("path = 'a'\nkeep = 3", "keep"),
        ] {
            let config: JsonlConfig = toml::from_str(text).expect("well-formed");
            let error = config.check().expect_err(text).to_string();
            assert!(error.contains(key), "{text}: {error}");
        }
    }
}
