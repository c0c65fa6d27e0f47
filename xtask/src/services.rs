//! `cargo xtask services …`: the real servers that tests need.
//!
//! What lives here: installing them, and running them beside a command or in the foreground. What
//! does not: how a server is started (`servers/`) or what is installed (`test/tools.rs`).
//! Invariant: the servers end with the command, at Ctrl-C, at SIGTERM, and also when this process
//! is killed.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_servers::{postgres, rabbitmq};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::test::{excluded, tools};
use crate::workspace::Workspace;

/// How often the command's end and signals are looked for.
const POLL: Duration = Duration::from_millis(20);

/// What to do with the servers.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Installs what is missing; asks for nothing.
    Install,
    /// Starts them with their addresses in the environment, runs the command, ends them; without a
    /// command prints the environment and runs until Ctrl-C.
    Run {
        /// Start RabbitMQ as well, which takes five seconds.
        #[arg(long)]
        rabbitmq: bool,
        /// The command and its arguments, after `--`.
        #[arg(last = true)]
        command: Vec<OsString>,
    },
}

/// The servers that tests share. They end with this value.
pub(crate) struct SharedServers {
    postgres: postgres::SharedServers,
    rabbitmq: Option<rabbitmq::Shared>,
}

impl SharedServers {
    /// Starts those that the environment does not name already.
    pub(crate) fn start(with_rabbitmq: bool) -> Result<Self> {
        let starting = with_rabbitmq.then(|| std::thread::spawn(rabbitmq::Shared::start));
        let postgres = postgres::SharedServers::start()?;
        let started = starting
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok(Self { postgres, rabbitmq: started.transpose()? })
    }

    /// What a test process needs in its environment to find them.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let rabbitmq = self.rabbitmq.as_ref().and_then(rabbitmq::Shared::environment);
        self.postgres.environment().into_iter().chain(rabbitmq).collect()
    }
}

/// Installs or runs.
pub(crate) fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Install => {
            println!("{}", tools::install()?);
            excluded::build(&Workspace::locate()?)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Run { rabbitmq, command } => {
            // Before the servers start: from then on nothing but their end ends this process.
            let mut signals = Signals::new([SIGINT, SIGTERM]).context("watch for signals")?;
            let servers = SharedServers::start(*rabbitmq)?;
            match command.split_first() {
                Some((program, arguments)) => beside(&servers, &mut signals, program, arguments),
                None => foreground(&servers, &mut signals),
            }
        }
    }
}

fn foreground(servers: &SharedServers, signals: &mut Signals) -> Result<ExitCode> {
    let mut output = std::io::stdout().lock();
    for (name, url) in servers.environment() {
        writeln!(output, "export {name}='{url}'").context("print the environment")?;
    }
    output.flush().context("print the environment")?;
    eprintln!("the servers run until Ctrl-C");
    signals.forever().next();
    Ok(ExitCode::SUCCESS)
}

fn beside(
    servers: &SharedServers,
    signals: &mut Signals,
    program: &OsString,
    arguments: &[OsString],
) -> Result<ExitCode> {
    let mut command = std::process::Command::new(program);
    let mut child = command
        .args(arguments)
        .envs(servers.environment())
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    loop {
        if let Some(status) = child.try_wait().context("wait for the command")? {
            return Ok(exit_code(status));
        }
        // Ctrl-C reaches the command by itself; both wait for it.
        if signals.pending().any(|signal| signal == SIGTERM) {
            terminate(&child);
        }
        std::thread::sleep(POLL);
    }
}

/// Asks it to end.
pub(crate) fn terminate(child: &Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It fails only if the command has ended.
        let _ = kill_process(pid, Signal::TERM);
    }
}

/// As a shell would say it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let number = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    number.and_then(|number| u8::try_from(number).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_code_is_what_a_shell_says() {
        let code = |script: &str| {
            let status = std::process::Command::new("sh").args(["-c", script]).status();
            format!("{:?}", exit_code(status.expect("sh runs")))
        };
        assert_eq!(code("exit 7"), format!("{:?}", ExitCode::from(7)));
        assert_eq!(code("kill -9 $$"), format!("{:?}", ExitCode::from(137)));
        assert_eq!(code("true"), format!("{:?}", ExitCode::SUCCESS));
    }
}
