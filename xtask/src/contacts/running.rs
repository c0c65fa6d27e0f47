//! Programs that run until a signal, and the folder they use.
//!
//! What lives here: starting each, waiting for its first line, looking whether all still run, and
//! ending them in the opposite order. What does not: which programs they are.
//! Invariant: Ctrl-C reaches this process alone, so that the relay drains while what it needs still
//! runs; programs and folder are gone when this value is, and also when this process is killed.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::process;
use crate::services::terminate;

/// How often signals and the programs' ends are looked for.
const POLL: Duration = Duration::from_millis(20);
/// The longest that a program may need until it says where it is.
const START: Duration = Duration::from_secs(60);
/// The longest that a program may need to end; a relay drains for 10 s.
const END: Duration = Duration::from_secs(15);
/// Outlives a process that is killed: ends the programs that it was told, removes the folder `$1`.
const KEEPER: &str = r#"
trap '' HUP INT TERM
programs=
while read -r program; do
    [ "$program" = ended ] && exit
    programs="$programs $program"
done
for signal in TERM KILL; do
    [ -n "$programs" ] && kill -s $signal $programs 2>/dev/null && sleep 2
done
rm -rf -- "$1"
"#;

/// One program.
struct Program {
    name: &'static str,
    process: Child,
    /// What else it prints: read, so that it never writes to a closed pipe.
    output: Receiver<String>,
}

/// The programs that run. They end with this value.
pub(super) struct Running {
    programs: Vec<Program>,
    folder: Option<TempDir>,
    keeper: Child,
    kept: Option<ChildStdin>,
    signals: Signals,
}

impl Running {
    /// Makes the folder, and watches for signals from now on.
    pub(super) fn prepare() -> Result<Self> {
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("watch for signals")?;
        let folder = tempfile::Builder::new().prefix("postrider-contacts-").tempdir();
        let folder = folder.context("make a temporary folder")?;
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER, "postrider-keeper"])
            .arg(folder.path())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start sh")?;
        let kept = keeper.stdin.take();
        Ok(Self { programs: Vec::new(), folder: Some(folder), keeper, kept, signals })
    }

    /// Where the programs keep what they need.
    pub(super) fn folder(&self) -> &Path {
        self.folder.as_ref().map_or(Path::new(""), TempDir::path)
    }

    /// Starts a program and waits for the first line of its output; `None` if a signal came first.
    pub(super) fn start(
        &mut self,
        name: &'static str,
        command: &mut Command,
    ) -> Result<Option<String>> {
        eprintln!("starting {name}");
        self.spawn(name, command)?;
        let started = Instant::now();
        loop {
            if self.asked_to_stop() {
                return Ok(None);
            }
            let Some(program) = self.programs.last_mut() else { bail!("{name} is not there") };
            match program.output.recv_timeout(POLL) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Disconnected) => bail!("{name} ended before it was ready"),
                Err(RecvTimeoutError::Timeout) if started.elapsed() > START => {
                    bail!("{name} was not ready within {} s", START.as_secs());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Starts a program that prints nothing when it is ready.
    pub(super) fn start_silent(&mut self, name: &'static str, command: &mut Command) -> Result<()> {
        eprintln!("starting {name}");
        self.spawn(name, command)
    }

    fn spawn(&mut self, name: &'static str, command: &mut Command) -> Result<()> {
        // A program that ends with its standard input does so: it is never written to.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let path = command.get_program().to_owned();
        let process = command.spawn().with_context(|| format!("start {}", path.display()));
        let mut process = process?;
        let (sender, output) = channel();
        process::forward(process.stdout.take(), sender);
        let id = process.id();
        self.programs.push(Program { name, process, output });
        self.tell_keeper(&id.to_string())
    }

    fn tell_keeper(&mut self, text: &str) -> Result<()> {
        let Some(pipe) = self.kept.as_mut() else { return Ok(()) };
        writeln!(pipe, "{text}").context("tell the keeper")
    }

    fn asked_to_stop(&mut self) -> bool {
        self.signals.pending().next().is_some()
    }

    /// Waits for a signal; a program that ends by itself is an error.
    pub(super) fn until_stopped(&mut self) -> Result<()> {
        while !self.asked_to_stop() {
            for program in &mut self.programs {
                if let Some(status) = program.process.try_wait().context("look for an end")? {
                    bail!("{} ended by itself: {status}", program.name);
                }
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Ends all of it, the last one first; says what could not be ended in order.
    pub(super) fn end(mut self) -> Result<()> {
        self.end_programs()?;
        let folder = self.folder.take();
        folder.map_or(Ok(()), TempDir::close).context("remove the temporary folder")
    }

    fn end_programs(&mut self) -> Result<()> {
        let mut killed = Vec::new();
        while let Some(mut program) = self.programs.pop() {
            // One of them ends with its standard input only.
            drop(program.process.stdin.take());
            terminate(&program.process);
            let started = Instant::now();
            while program.process.try_wait().context("wait for an end")?.is_none() {
                // A second Ctrl-C is impatience.
                if started.elapsed() > END || self.asked_to_stop() {
                    // It fails only if the program has ended.
                    let _ = program.process.kill();
                    program.process.wait().context("wait for an end")?;
                    killed.push(program.name);
                    break;
                }
                std::thread::sleep(POLL);
            }
        }
        if killed.is_empty() {
            return Ok(());
        }
        bail!("did not end in time and had to be killed: {}", killed.join(", "))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.end_programs() {
            eprintln!("cargo xtask: {error:#}");
        }
        self.folder = None;
        // Should that fail, the keeper looks for programs that are gone.
        let _ = self.tell_keeper("ended");
        self.kept = None;
        let _ = self.keeper.wait();
    }
}
