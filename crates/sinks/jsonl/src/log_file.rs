//! The file that several relays may append to at the same time.
//!
//! What lives here: opening, repairing, appending, rolling back and rotating. What does not: the
//! lines themselves, and the thread that calls this.
//! Invariant: `append` returns `Ok` only if every byte stands in the file after a line break and
//! before no other writer's bytes.
//!
//! Writers hold the file's advisory lock *shared* while they append: the kernel keeps appends
//! (`O_APPEND`) apart, and a stopped relay must not stop the others. Whoever shortens or renames
//! the file takes the lock exclusively and never waits for it: without it, a torn line is ended by
//! a line break instead of being cut off, and rotation waits for a later batch.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use postrider_core::{Clock, Timestamp};

use crate::config::JsonlConfig;
use crate::rotation::{folder, rotated_name, surplus};

/// How long to wait for a writer that is cutting or renaming the file; both take microseconds.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_POLL: Duration = Duration::from_millis(1);
/// How often (a poll apart) to look whether another writer finishes the last line.
const TAIL_POLLS: u32 = 100;
/// How often the file may be renamed by others before we give up on one append.
const MAX_REOPENS: u32 = 16;
/// A last line longer than this is not cut off but ended: the largest event needs 22 MiB.
const MAX_TORN_BYTES: u64 = 64 * 1024 * 1024;
const TAIL_BLOCK_BYTES: u64 = 64 * 1024;
/// What each of our lines starts with; other text is never cut off.
const LINE_START: &[u8] = b"{\"id\":\"";

/// How bytes reach the file: the system's write, replaced in tests by one that fails.
type WriteOnce = Box<dyn FnMut(&mut File, &[u8]) -> io::Result<usize> + Send>;

/// An append-only file of lines.
pub(crate) struct LogFile {
    config: JsonlConfig,
    clock: Arc<dyn Clock>,
    file: Option<File>,
    write_once: WriteOnce,
}

/// What a failed write left behind.
struct Partial {
    cause: io::Error,
    /// First and last place of our bytes, if any were written and nobody else's lie between.
    written: Option<(u64, u64)>,
}

impl LogFile {
    /// The file of `config`; it is opened at the first use.
    pub(crate) fn new(config: JsonlConfig, clock: Arc<dyn Clock>) -> Self {
        let write_once: WriteOnce = Box::new(|file, bytes| file.write(bytes));
        Self { config, clock, file: None, write_once }
    }

    /// Opens and repairs the file without writing to it.
    pub(crate) fn check(&mut self) -> io::Result<()> {
        let mut file = self.locked()?;
        repair(&mut file)?;
        unlock(&file);
        self.file = Some(file);
        Ok(())
    }

    /// Appends whole lines, and syncs them if configured. On an error none of them counts.
    pub(crate) fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut file = self.locked()?;
        if self.wants_rotation(&file, lines.len())? && self.rotate(&mut file)? {
            drop(file);
            file = self.locked()?;
        }
        repair(&mut file)?;
        match self.write_whole(&mut file, lines) {
            // A failed sync leaves the state of the disk unknown: nothing counts, and the handle
            // is dropped, since a second sync would report success.
            Ok(()) if self.config.fsync => file.sync_data()?,
            Ok(()) => {}
            Err(partial) => {
                roll_back(&file, partial.written);
                return Err(partial.cause);
            }
        }
        unlock(&file);
        self.file = Some(file);
        Ok(())
    }

    /// The file at the path, opened and locked shared. An error drops the handle, and with it the
    /// lock.
    fn locked(&mut self) -> io::Result<File> {
        for _ in 0..MAX_REOPENS {
            let file = match self.file.take() {
                Some(file) => file,
                None => self.open()?,
            };
            lock_shared(&file)?;
            // Renamed or deleted since it was opened: what we wrote there might be deleted as old.
            if is_at(&file, &self.config.path)? {
                return Ok(file);
            }
        }
        Err(io::Error::other("the file is replaced again and again by another process"))
    }

    fn open(&self) -> io::Result<File> {
        let path = &self.config.path;
        let known = path.try_exists()?;
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        if !file.metadata()?.is_file() {
            let text = "the path leads to no regular file; use \"-\" for standard output";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        if self.config.fsync && !known {
            sync_folder(path)?;
        }
        Ok(file)
    }

    fn write_whole(&mut self, file: &mut File, lines: &[u8]) -> Result<(), Partial> {
        let mut rest = lines;
        let mut written: Option<(u64, u64)> = None;
        while !rest.is_empty() {
            let fail = |cause| Partial { cause, written };
            let count = match (self.write_once)(file, rest) {
                Ok(0) => return Err(fail(io::ErrorKind::WriteZero.into())),
                Ok(count) => count,
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => continue,
                Err(cause) => return Err(fail(cause)),
            };
            let end = file.stream_position().map_err(fail)?;
            let start = end.saturating_sub(count as u64);
            written = match written {
                Some((first, last)) if last == start => Some((first, end)),
                None => Some((start, end)),
                Some(_) => {
                    let cause = io::Error::other("another process wrote into the middle of a line");
                    return Err(Partial { cause, written: None });
                }
            };
            rest = &rest[count..];
        }
        let (start, _) = written.unwrap_or_default();
        match follows_line_break(file, start) {
            Ok(true) => Ok(()),
            // Another writer died between our look at the tail and our write: our first line is
            // merged with its torn one. Written again after a line break, it will be whole.
            Ok(false) => {
                let cause = io::Error::other("another process left a torn line before ours");
                Err(Partial { cause, written: None })
            }
            Err(cause) => Err(Partial { cause, written }),
        }
    }

    fn wants_rotation(&self, file: &File, more: usize) -> io::Result<bool> {
        let metadata = file.metadata()?;
        if metadata.len() == 0 {
            return Ok(false);
        }
        let full = |limit: u64| metadata.len().saturating_add(more as u64) > limit;
        let old = |limit: u64| {
            self.clock.now().since(started_at(&metadata)) >= Duration::from_secs(limit)
        };
        Ok(self.config.rotate_bytes.is_some_and(full)
            || self.config.rotate_seconds.is_some_and(old))
    }

    /// Renames the file if no other writer is in the middle of an append.
    fn rotate(&self, file: &mut File) -> io::Result<bool> {
        if !lock_exclusive(file) {
            lock_shared(file)?;
            return Ok(false);
        }
        let path = &self.config.path;
        // Losing the lock on the way from shared to exclusive may have let another relay rotate.
        if is_at(file, path)? {
            fs::rename(path, rotated_name(path, self.clock.now())?)?;
            if self.config.fsync {
                sync_folder(path)?;
            }
            self.delete_surplus();
        }
        Ok(true)
    }

    fn delete_surplus(&self) {
        let Some(keep) = self.config.keep else { return };
        let deleted = surplus(&self.config.path, keep)
            .and_then(|surplus| surplus.iter().try_for_each(fs::remove_file));
        if let Err(cause) = deleted {
            tracing::warn!(%cause, "an old rotated file could not be deleted");
        }
    }
}

/// Makes the file end with a line break: cuts a torn line off, or ends it.
fn repair(file: &mut File) -> io::Result<()> {
    for _ in 0..TAIL_POLLS {
        if follows_line_break(file, file.metadata()?.len())? {
            return Ok(());
        }
        if lock_exclusive(file) {
            let length = file.metadata()?.len();
            let cut = torn_line_start(file, length)?;
            if let Some(start) = cut {
                file.set_len(start)?;
                tracing::warn!(bytes = length - start, "cut off a line that was never finished");
            }
            lock_shared(file)?;
            if cut.is_some() {
                continue;
            }
            break;
        }
        // Another writer is in the middle of an append: its line may be finished in a moment.
        lock_shared(file)?;
        thread::sleep(LOCK_POLL);
    }
    if !follows_line_break(file, file.metadata()?.len())? {
        file.write_all(b"\n")?;
        tracing::warn!("ended a line that was never finished; readers should skip it");
    }
    Ok(())
}

/// Where the unfinished last line starts, if it is one of ours.
fn torn_line_start(file: &File, length: u64) -> io::Result<Option<u64>> {
    let lowest = length.saturating_sub(MAX_TORN_BYTES);
    let mut end = length;
    let mut start = (lowest == 0).then_some(0);
    while end > lowest {
        let from = end.saturating_sub(TAIL_BLOCK_BYTES).max(lowest);
        let block = read_at(file, from, end)?;
        if let Some(at) = block.iter().rposition(|byte| *byte == b'\n') {
            start = Some(from + at as u64 + 1);
            break;
        }
        end = from;
    }
    let Some(start) = start.filter(|start| *start < length) else { return Ok(None) };
    let head = read_at(file, start, length.min(start + LINE_START.len() as u64))?;
    Ok(LINE_START.starts_with(&head).then_some(start))
}

/// Takes what a failed write left out of the file again, if nobody wrote behind it.
fn roll_back(file: &File, written: Option<(u64, u64)>) {
    let Some((start, end)) = written else { return };
    // Without the exclusive lock the torn line stays, unconfirmed; the next append ends it.
    if lock_exclusive(file)
        && file.metadata().is_ok_and(|metadata| metadata.len() == end)
        && let Err(cause) = file.set_len(start)
    {
        tracing::warn!(%cause, "a half-written batch could not be cut off");
    }
}

fn lock_shared(file: &File) -> io::Result<()> {
    let attempts = LOCK_WAIT.as_millis() / LOCK_POLL.as_millis();
    for _ in 0..attempts {
        match file.try_lock_shared() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_POLL),
            // A file system without locks: appends still stay apart, and nothing is cut off.
            Err(TryLockError::Error(_)) => return Ok(()),
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, "another process keeps the file locked"))
}

/// Turns the shared lock into an exclusive one; on `false` no lock is held.
fn lock_exclusive(file: &File) -> bool {
    file.try_lock().is_ok()
}

fn unlock(file: &File) {
    // Failing means that there are no locks here, or that the handle is closed: none is held.
    let _ = file.unlock();
}

fn follows_line_break(file: &File, place: u64) -> io::Result<bool> {
    match place.checked_sub(1) {
        None => Ok(true),
        Some(before) => Ok(read_at(file, before, place)? == b"\n"),
    }
}

fn read_at(file: &File, from: u64, to: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(to - from).map_err(io::Error::other)?;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, from)?;
    Ok(bytes)
}

/// Whether the path still leads to this open file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok(own.dev() == there.dev() && own.ino() == there.ino()),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(cause) => Err(cause),
    }
}

/// When the file was made, or last written where the file system does not tell.
fn started_at(metadata: &Metadata) -> Timestamp {
    let time = metadata.created().or_else(|_| metadata.modified()).unwrap_or(UNIX_EPOCH);
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::default().plus(since)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(folder(path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(u64);

    #[async_trait::async_trait]
    impl Clock for Fixed {
        fn now(&self) -> Timestamp {
            Timestamp::from_millis(self.0)
        }
        fn elapsed(&self) -> Duration {
            Duration::ZERO
        }
        async fn sleep(&self, _: Duration) {}
    }

    const LINE: &[u8] = b"{\"id\":\"1\"}\n";

    fn log_file(path: &Path) -> LogFile {
        LogFile::new(JsonlConfig::file(path), Arc::new(Fixed(0)))
    }

    /// Writes `first` bytes of the first call, then fails as a full disk does.
    fn full_after(first: usize) -> WriteOnce {
        let mut left = first;
        Box::new(move |file, bytes| {
            if left == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let count = left.min(bytes.len());
            left -= count;
            file.write(&bytes[..count])
        })
    }

    #[test]
    fn a_full_disk_leaves_no_half_line_and_writing_goes_on_afterwards() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let mut log = log_file(&path);
        log.append(LINE).expect("written");
        for first in [0, 1, LINE.len() + 3] {
            log.write_once = full_after(first);
            let error = log.append(&LINE.repeat(3)).expect_err("full");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            assert_eq!(fs::read(&path).expect("readable"), LINE, "after {first} bytes");
        }
        log.write_once = Box::new(|file, bytes| file.write(&bytes[..bytes.len().min(4)]));
        log.append(LINE).expect("short writes are continued");
        assert_eq!(fs::read(&path).expect("readable"), LINE.repeat(2));
    }

    #[test]
    fn a_half_line_is_kept_apart_when_another_writer_is_in_the_middle_of_an_append() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let other = OpenOptions::new().append(true).create(true).open(&path).expect("opened");
        other.lock_shared().expect("locked");
        let mut log = log_file(&path);
        log.write_once = full_after(4);
        log.append(LINE).expect_err("full");
        let mut log = log_file(&path);
        log.append(LINE).expect("written");
        let text = fs::read(&path).expect("readable");
        assert_eq!(text, [&LINE[..4], b"\n", LINE].concat());
    }

    #[test]
    fn bytes_that_got_between_are_noticed_and_nothing_is_confirmed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let mut log = log_file(&path);
        // A writer that dies in the middle of a line just before ours.
        log.write_once = Box::new(|file, bytes| {
            file.write_all(b"{\"id\":\"to")?;
            file.write(bytes)
        });
        let error = log.append(LINE).expect_err("merged").to_string();
        assert!(error.contains("torn line before ours"), "{error}");
        // A writer whose bytes land between two parts of ours.
        let mut calls = 0;
        log.write_once = Box::new(move |file, bytes| {
            calls += 1;
            if calls == 2 {
                file.write_all(b"x\n")?;
            }
            file.write(&bytes[..bytes.len().min(4)])
        });
        let error = log.append(LINE).expect_err("interleaved").to_string();
        assert!(error.contains("middle of a line"), "{error}");
        let mut log = log_file(&path);
        log.append(LINE).expect("written");
        assert!(fs::read(&path).expect("readable").ends_with(&[b"\n", LINE].concat()));
    }

    #[test]
    fn a_torn_last_line_is_cut_off_and_foreign_text_is_not() {
        for (found, kept) in [
            ("", ""),
            ("{\"id\":\"1\"}\n", "{\"id\":\"1\"}\n"),
            ("{\"id\":\"1\"}\n{\"id\":\"2\",\"posi", "{\"id\":\"1\"}\n"),
            ("{\"i", ""),
            ("{", ""),
            ("a\nsomebody's notes", "a\nsomebody's notes\n"),
            ("somebody's notes", "somebody's notes\n"),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("events.jsonl");
            fs::write(&path, found).expect("written");
            log_file(&path).check().expect("repaired");
            assert_eq!(fs::read_to_string(&path).expect("readable"), kept, "{found:?}");
        }
    }

    #[test]
    fn a_torn_line_longer_than_a_block_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let long = [LINE, b"{\"id\":\"", "x".repeat(200_000).as_bytes()].concat();
        fs::write(&path, long).expect("written");
        log_file(&path).append(LINE).expect("written");
        assert_eq!(fs::read(&path).expect("readable"), LINE.repeat(2));
    }

    #[test]
    fn a_file_rotates_by_age_and_a_stopped_writer_postpones_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let config = JsonlConfig { rotate_seconds: Some(60), ..JsonlConfig::file(&path) };
        let far = Arc::new(Fixed(10_000_000_000_000));
        let mut log = LogFile::new(config, far);
        log.append(LINE).expect("an empty file is not rotated");
        let stopped = File::open(&path).expect("opened");
        stopped.lock_shared().expect("locked");
        log.append(LINE).expect("written without rotating");
        assert_eq!(fs::read(&path).expect("readable"), LINE.repeat(2));
        drop(stopped);
        log.append(LINE).expect("rotated");
        assert_eq!(fs::read(&path).expect("readable"), LINE);
        assert_eq!(surplus(&path, 0).expect("listed").len(), 1);
    }

    #[test]
    fn a_folder_or_device_is_refused_with_a_remedy() {
        let error = log_file(Path::new("/dev/null")).append(LINE).expect_err("no regular file");
        assert!(error.to_string().contains("use \"-\""), "{error}");
        let folder = tempfile::tempdir().expect("a folder");
        assert!(log_file(folder.path()).check().is_err());
    }
}
