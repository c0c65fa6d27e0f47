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

/// Each line read is the process that runs now, or 0. `$1` is the folder, `$2` the signal that ends
/// the process at once. A killed PostgreSQL leaves the shared memory that line 7 of its
/// `postmaster.pid` names.
const KEEPER: &str = r#"
trap '' HUP INT TERM
folder=$1 signal=$2 pid=0 tries=0
while read -r line; do pid=$line; done
ended() {
    case "$(cat "/proc/$pid/stat" 2>/dev/null)" in *") Z "*) return 0 ;; esac
    ! kill -0 "$pid" 2>/dev/null
}
if [ "$pid" -gt 1 ]; then
    kill -s "$signal" "$pid" 2>/dev/null
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

/// How the process in a folder is ended at once.
#[derive(Clone, Copy)]
pub(crate) enum EndBy {
    /// PostgreSQL's immediate shutdown.
    Quit,
    /// PgBouncer's.
    Term,
}

/// A folder that is removed with whatever runs in it.
pub(crate) struct Folder {
    path: PathBuf,
    keeper: Child,
    pipe: Mutex<Option<ChildStdin>>,
}

impl Folder {
    /// Makes a folder that the servers' user owns.
    pub(crate) fn create(name: &str, end_by: EndBy) -> Result<Self> {
        let path = std::env::temp_dir();
        let path = path.join(format!("postrider-{name}-{:016x}", programs::random()));
        let signal = match end_by {
            EndBy::Quit => "QUIT",
            EndBy::Term => "TERM",
        };
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "postrider-keeper"])
            .arg(&path)
            .arg(signal)
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

    /// Tells the keeper which process runs now; 0 is none.
    pub(crate) fn runs(&self, pid: u32) -> Result<()> {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pipe) = pipe.as_mut() else { return Ok(()) };
        writeln!(pipe, "{pid}").during(|| "tell the keeper".to_owned())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        *self.pipe.lock().unwrap_or_else(PoisonError::into_inner) = None;
        // It ends within seconds, and by then the folder is gone.
        let _ = self.keeper.wait();
    }
}
