//! A server's folder, and the small shell process that outlives the test to clean up.
//!
//! What lives here: making the folder, telling the keeper which process runs in it. What does not:
//! starting that process.
//! Invariant: the keeper holds the reading end of a pipe whose only writer is this process. However
//! this process ends, the pipe ends too; the keeper then ends the server and removes the folder. It
//! is in a process group of its own, so no signal that is meant for the tests reaches it.

use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::error::{Result, While};
use crate::programs;

/// Each line read is the process that runs now and the signal that ends it. `$1` is the folder. A
/// killed PostgreSQL leaves the shared memory that line 7 of its `postmaster.pid` names.
const KEEPER: &str = r#"
trap '' HUP INT TERM
folder=$1 pid=0 signal=0 tries=0
while read -r now by; do pid=$now signal=$by; done
ended() {
    case "$(cat "/proc/$pid/stat" 2>/dev/null)" in *") Z "*) return 0 ;; esac
    ! kill -0 "$pid" 2>/dev/null
}
if [ "$pid" -gt 1 ]; then
    kill "-$signal" "$pid" 2>/dev/null
    until ended || [ "$tries" -ge 200 ]; do sleep 0.025; tries=$((tries + 1)); done
    kill -s KILL "$pid" 2>/dev/null
fi
segment=$(sed -n '7s/.* //p' "$folder/data/postmaster.pid" 2>/dev/null)
[ -n "$segment" ] && ipcrm -m "$segment" 2>/dev/null
tries=0
until rm -rf -- "$folder" 2>/dev/null || [ "$tries" -ge 200 ]; do
    sleep 0.025
    tries=$((tries + 1))
done
"#;

/// How the process in a folder is ended when the test is.
#[derive(Clone, Copy)]
pub(crate) enum EndBy {
    /// PostgreSQL's immediate shutdown.
    Quit,
    /// PgBouncer's.
    Term,
    /// It ends by itself within seconds. Half of an initialisation would leave shared memory.
    Waiting,
}

/// Where a folder is to be.
#[derive(Clone, Copy)]
pub(crate) enum Medium {
    /// Where data is kept as on any machine.
    Disk,
    /// In memory if there is enough: a fresh database has 300 files, which a disk may take a
    /// quarter of a second to make.
    Memory,
}

/// Where Linux keeps files in memory, open to everybody.
const IN_MEMORY: &str = "/dev/shm";
/// For some servers at once, of up to 100 MB each while they do little.
const MIN_FREE_BYTES: u64 = 4 << 30;

impl Medium {
    /// What `TMPDIR` says comes first.
    fn place(self) -> PathBuf {
        match self {
            Self::Memory if std::env::var_os("TMPDIR").is_none() && has_room(IN_MEMORY) => {
                IN_MEMORY.into()
            }
            Self::Memory | Self::Disk => std::env::temp_dir(),
        }
    }
}

fn has_room(place: &str) -> bool {
    rustix::fs::statvfs(place).is_ok_and(|free| free.f_bavail * free.f_frsize >= MIN_FREE_BYTES)
}

/// A folder that is removed with whatever runs in it.
pub(crate) struct Folder {
    path: PathBuf,
    keeper: Child,
    pipe: Mutex<Option<ChildStdin>>,
}

impl Folder {
    /// Makes a folder that the servers' user owns.
    pub(crate) fn create(name: &str, medium: Medium) -> Result<Self> {
        let path = medium.place().join(format!("postrider-{name}-{:016x}", programs::random()));
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "postrider-keeper"])
            .arg(&path)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .during(|| "start sh".to_owned())?;
        let pipe = keeper.stdin.take();
        let folder = Self { path, keeper, pipe: Mutex::new(pipe) };
        // Only now: from its first moment on there is somebody to remove it.
        let made = DirBuilder::new().mode(0o700).create(folder.path());
        made.during(|| "make a temporary folder".to_owned())?;
        programs::give_to_owner(folder.path())?;
        Ok(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Tells the keeper which process runs now.
    pub(crate) fn runs(&self, pid: u32, end_by: EndBy) -> Result<()> {
        let signal = match end_by {
            EndBy::Quit => "QUIT",
            EndBy::Term => "TERM",
            EndBy::Waiting => "0",
        };
        self.tell(&format!("{pid} {signal}\n"))
    }

    /// Tells the keeper that nothing runs now.
    pub(crate) fn rests(&self) -> Result<()> {
        self.tell("0 0\n")
    }

    fn tell(&self, line: &str) -> Result<()> {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pipe) = pipe.as_mut() else { return Ok(()) };
        pipe.write_all(line.as_bytes()).during(|| "tell the keeper".to_owned())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        *self.pipe.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // It ends within seconds, and by then the folder is gone.
        let _ = self.keeper.wait();
    }
}
