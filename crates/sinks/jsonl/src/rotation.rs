//! Names of rotated files, and which of them to delete.
//!
//! What lives here: `events.jsonl` → `events-20230102T150405000Z.jsonl`, and the choice of the
//! oldest. What does not: when to rotate, and locking (`log_file.rs`).
//! Invariant: only a name of exactly this form is ever deleted, and no file is ever overwritten.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use postrider_core::Timestamp;
use postrider_encoding::{format_rfc3339, parse_rfc3339};

/// Rotations within one millisecond that still find a free name.
const MAX_SAME_TIME: u32 = 1_000;
/// `20230102T150405000Z`
const TIME_CHARS: usize = 19;
/// `-000`
const COUNT_CHARS: usize = 4;
/// Milliseconds looked at beyond the newest name's: each has a thousand names.
const MAX_STEPS: u32 = 100;

/// The folder of a file, also of one named without any.
pub(crate) fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A name that no file has yet, for what was written up to `now`; after all others in order, also
/// when the clock was set back since.
pub(crate) fn rotated_name(path: &Path, now: Timestamp) -> io::Result<PathBuf> {
    // Counting on from the newest, not filling gaps: older ones may have been deleted.
    let newest = surplus(path, 0)?.pop();
    let mut time = newest.as_deref().and_then(time_of).map_or(now, |newest| newest.max(now));
    for _ in 0..MAX_STEPS {
        for attempt in 0..MAX_SAME_TIME {
            let candidate = with_suffix(path, &format!("{}-{attempt:03}", digits(time)));
            if newest.as_ref().is_none_or(|newest| *newest < candidate)
                && !candidate.try_exists()?
            {
                return Ok(candidate);
            }
        }
        time = time.plus(Duration::from_millis(1));
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "no free name for the rotated file"))
}

/// The time as it stands in a name.
fn digits(time: Timestamp) -> String {
    format_rfc3339(time).chars().filter(|c| !matches!(c, '-' | ':' | '.')).collect()
}

/// The time in a rotated file's name.
fn time_of(rotated: &Path) -> Option<Timestamp> {
    let stem = rotated.file_stem()?.to_str()?;
    let start = stem.len().checked_sub(TIME_CHARS + COUNT_CHARS)?;
    let at = |from: usize, to: usize| stem.get(start + from..start + to);
    let (date, time) = ((at(0, 4)?, at(4, 6)?, at(6, 8)?), (at(9, 11)?, at(11, 13)?, at(13, 15)?));
    let (year, month, day) = date;
    let (hour, minute, second) = time;
    let text = format!("{year}-{month}-{day}T{hour}:{minute}:{second}.{}Z", at(15, 18)?);
    parse_rfc3339(&text).ok()
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
    let form = bytes.len() == TIME_CHARS + COUNT_CHARS
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
    fn a_clock_set_back_puts_no_file_before_an_older_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let late = Timestamp::from_millis(1_672_671_845_007);
        let early = Timestamp::from_millis(1_672_000_000_000);
        let mut names = Vec::new();
        for now in [early, late, early, early] {
            let name = rotated_name(&path, now).expect("free");
            std::fs::write(&name, "").expect("written");
            names.push(name);
        }
        assert!(names.is_sorted(), "{names:?}");
        // A thousand names in one millisecond are taken: the next one's are used.
        let last = folder.path().join("events-20230102T150405007Z-999.jsonl");
        std::fs::write(last, "").expect("written");
        let name = rotated_name(&path, early).expect("free");
        assert_eq!(name, folder.path().join("events-20230102T150405008Z-000.jsonl"));
    }

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
