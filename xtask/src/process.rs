//! Runs a long command and shows what it is doing.
//!
//! What lives here: one child process, its collected output and a progress line. What does not:
//! what the output means.
//! Invariant: a child's output is read until it ends, so it never blocks on a full pipe; something
//! it left running can't hold this process up.

use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Where no terminal can show a moving line, one line this often proves that work goes on.
const REPORT_EVERY: Duration = Duration::from_secs(30);
/// How often the progress line moves while the child is silent.
const TICK: Duration = Duration::from_millis(500);
/// How long output is still read after the child has ended.
const GRACE: Duration = Duration::from_secs(2);

/// What a finished command left.
pub(crate) struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output and standard error, line by line as they came.
    pub output: String,
}

/// Runs `command` to its end under a progress line that begins with `name`.
pub(crate) fn run(name: &str, command: &mut Command) -> Result<Finished> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
    let (sender, receiver) = channel();
    forward(child.stdout.take(), sender.clone());
    forward(child.stderr.take(), sender);
    let mut progress = Progress::start(name);
    let mut output = String::new();
    let mut ended: Option<Instant> = None;
    loop {
        match receiver.recv_timeout(TICK) {
            Ok(line) => {
                progress.show(&line);
                output.push_str(&line);
                output.push('\n');
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                progress.tick();
                if ended.is_some_and(|at| at.elapsed() > GRACE) {
                    break;
                }
                if ended.is_none() && child.try_wait().context("wait for the child")?.is_some() {
                    ended = Some(Instant::now());
                }
            }
        }
    }
    progress.clear();
    let status = child.wait().context("wait for the child")?;
    Ok(Finished { status, output })
}

/// Sends each line of a pipe on, until it ends.
pub(crate) fn forward(pipe: Option<impl Read + Send + 'static>, sender: Sender<String>) {
    let Some(pipe) = pipe else { return };
    std::thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            if sender.send(text).is_err() {
                return;
            }
        }
    });
}

/// One moving line on a terminal; elsewhere a line every [`REPORT_EVERY`].
struct Progress {
    name: String,
    started: Instant,
    reported: Instant,
    last: String,
    terminal: bool,
}

impl Progress {
    fn start(name: &str) -> Self {
        let now = Instant::now();
        let terminal = std::io::stderr().is_terminal();
        Self { name: name.to_owned(), started: now, reported: now, last: String::new(), terminal }
    }

    fn show(&mut self, line: &str) {
        if !line.trim().is_empty() {
            line.trim().clone_into(&mut self.last);
        }
        self.tick();
    }

    fn tick(&mut self) {
        let last: String = self.last.chars().filter(|c| !c.is_control()).take(60).collect();
        let seconds = self.started.elapsed().as_secs();
        if self.terminal {
            eprint!("\r\x1b[K{}: {seconds} s  {last}", self.name);
            // A line that can't be shown is no reason to stop the work.
            let _ = std::io::stderr().flush();
        } else if self.reported.elapsed() >= REPORT_EVERY {
            self.reported = Instant::now();
            eprintln!("{}: {seconds} s  {last}", self.name);
        }
    }

    fn clear(&self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_streams_and_the_status_are_kept() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let finished = run("sample", &mut command).expect("sh runs");
        assert_eq!(finished.status.code(), Some(3));
        assert!(finished.output.contains("out\n") && finished.output.contains("err\n"));
    }

    #[test]
    fn a_child_left_behind_does_not_hold_it_up() {
        let started = Instant::now();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 8 & echo done"]);
        let finished = run("sample", &mut command).expect("sh runs");
        assert!(finished.status.success() && started.elapsed() < Duration::from_secs(8));
    }
}
