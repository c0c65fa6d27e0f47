//! The wall clock that a schedule's processes see.
//!
//! What lives here: moving it, through libfaketime. What does not: when.
//! Invariant: only the wall clock moves; the clocks that count since boot, by which leases live,
//! stay the machine's, as when an operator or NTP sets the time.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// Where Debian's package libfaketime puts the library, by architecture.
const LIBRARIES: [&str; 3] = [
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
];

/// A wall clock that can be moved while processes look at it.
#[derive(Debug, Clone)]
pub struct MovedClock {
    library: &'static str,
    file: PathBuf,
}

impl MovedClock {
    /// A clock that tells the right time for now.
    ///
    /// # Errors
    /// When libfaketime is missing.
    pub fn new(folder: &Path) -> Result<Self> {
        let library = LIBRARIES.into_iter().find(|library| Path::new(library).exists());
        let library = library.context("libfaketime is missing: apt-get install libfaketime")?;
        let clock = Self { library, file: folder.join("wall-clock") };
        clock.move_by(0)?;
        Ok(clock)
    }

    /// Moves it to so many seconds off the right time.
    ///
    /// # Errors
    /// The file system's.
    pub fn move_by(&self, seconds: i64) -> Result<()> {
        // Renamed into place: a process that looks meanwhile must not find half a number.
        let fresh = self.file.with_extension("new");
        std::fs::write(&fresh, format!("{seconds:+}\n")).context("move the clock")?;
        std::fs::rename(&fresh, &self.file).context("move the clock")
    }

    /// Lets a process see this clock.
    pub fn show_to(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", self.library)
            .env("FAKETIME_TIMESTAMP_FILE", &self.file)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_sees_the_moved_clock() {
        let folder = tempfile::tempdir().expect("a folder");
        let clock = MovedClock::new(folder.path()).expect("libfaketime is installed");
        let seconds = || {
            let mut command = Command::new("date");
            command.args(["-u", "+%s"]);
            clock.show_to(&mut command);
            let output = command.output().expect("started").stdout;
            String::from_utf8_lossy(&output).trim().parse::<i64>().expect("a number")
        };
        let before = seconds();
        clock.move_by(1_000_000).expect("moved");
        let moved = seconds() - before;
        assert!((1_000_000..1_000_060).contains(&moved), "{moved}");
        clock.move_by(-1_000_000).expect("moved");
        assert!(seconds() < before);
    }
}
