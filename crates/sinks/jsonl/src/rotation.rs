//! Names of rotated files, and which of them to delete.
//!
//! What lives here: `events.jsonl` → `events-20230102T150405000Z.jsonl`, and the choice of the
//! oldest. What does not: when to rotate, and locking (`log_file.rs`).
//! Invariant: only a name of exactly this form is ever deleted, and no file is ever overwritten.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use postrider_core::Timestamp;
use postrider_encoding::format_rfc3339;

/// Rotations within one millisecond that still find a free name.
const MAX_SAME_TIME: u32 = 1_000;
/// `20230102T150405000Z`
const TIME_CHARS: usize = 19;

/// The folder of a file, also of one named without any.
pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A name that no file has yet, for what was written up to `now`; after all others in order.
pub(crate) fn rotated_name(path: &Path, now: Timestamp) -> io::Result<PathBuf> {
    let time: String =
        format_rfc3339(now).chars().filter(|c| !matches!(c, '-' | ':' | '.')).collect();
    // Counting on from the newest, not filling gaps: older ones may have been deleted.
    let last = with_suffix(path, &format!("{time}-999"));
    let newest = surplus(path, 0)?.into_iter().rfind(|found| *found <= last);
    for attempt in 0..MAX_SAME_TIME {
        let candidate = with_suffix(path, &format!("{time}-{attempt:03}"));
        if newest.as_ref().is_none_or(|newest| *newest < candidate) && !candidate.try_exists()? {
            return Ok(candidate);
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "no free name for the rotated file"))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push("-");
    name.push(suffix);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// The rotated files of `path` beyond the newest `keep`.
pub(crate) fn surplus(path: &Path, keep: usize) -> io::Result<Vec<PathBuf>> {
    let mut rotated = Vec::new();
    for entry in std::fs::read_dir(folder(path))? {
        let found = entry?.path();
        if is_rotated(path, &found) {
            rotated.push(found);
        }
    }
    rotated.sort();
    rotated.truncate(rotated.len().saturating_sub(keep));
    Ok(rotated)
}

fn is_rotated(path: &Path, found: &Path) -> bool {
    let stem = |path: &Path| path.file_stem().and_then(OsStr::to_str).map(str::to_owned);
    let (Some(own), Some(other)) = (stem(path), stem(found)) else { return false };
    let Some(suffix) = other.strip_prefix(&own).and_then(|rest| rest.strip_prefix('-')) else {
        return false;
    };
    let bytes = suffix.as_bytes();
    let form = bytes.len() == TIME_CHARS + 4
        && bytes.iter().enumerate().all(|(at, byte)| match at {
            8 => *byte == b'T',
            18 => *byte == b'Z',
            TIME_CHARS => *byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    form && path.extension() == found.extension()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_rotated_files_count_as_such() {
        let folder = tempfile::tempdir().expect("a folder");
        let now = Timestamp::from_millis(1_672_671_845_007);
        let name = rotated_name(&folder.path().join("events.jsonl"), now).expect("free");
        assert_eq!(name, folder.path().join("events-20230102T150405007Z-000.jsonl"));
        let path = Path::new("/x/events.jsonl");
        assert!(is_rotated(path, Path::new("/x/events-20230102T150405007Z-000.jsonl")));
        for other in [
            "/x/events.jsonl",
            "/x/events-old.jsonl",
            "/x/events-20230102T150405007Z-000.txt",
            "/x/events2-20230102T150405007Z-000.jsonl",
            "/x/events-20230102T150405007Z-0000.jsonl",
        ] {
            assert!(!is_rotated(path, Path::new(other)), "{other}");
        }
    }
}
