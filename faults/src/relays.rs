//! Relay processes: the real binary, started, stopped, killed and started again.
//!
//! What lives here: their configuration files, their starts and signals. What does not: when.
//! Invariant: every start has a number of its own, which the receiver hears and the log carries;
//! no relay outlives the thread that started it.

use std::fmt::Write as _;
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::bus::QUEUE;
use crate::clock::MovedClock;
use crate::request::RELAY_HEADER;
use crate::schedule::SourceKind;

/// Where relays deliver to.
#[derive(Debug, Clone)]
pub enum Target {
    /// The receiver.
    Webhook {
        /// Where it listens.
        address: SocketAddr,
        /// What it verifies with, and relays sign with.
        signing_key: String,
    },
    /// A file.
    Jsonl {
        /// The file.
        path: PathBuf,
        /// When it rotates.
        rotate_bytes: Option<u64>,
    },
    /// The emulator.
    Servicebus {
        /// What opens it.
        connection_string: String,
    },
    /// A broker.
    Broker {
        /// What its sink is told.
        settings: String,
    },
}

/// Where relays read from.
#[derive(Debug, Clone)]
pub enum RelaySource {
    /// A file.
    Sqlite(PathBuf),
    /// A server, by the kind of source and the address of each relay's way to it.
    Postgres {
        /// The kind.
        kind: SourceKind,
        /// The addresses.
        urls: Vec<String>,
    },
    /// An account of Azure Cosmos DB, by its connection string.
    Cosmos(String),
}

impl RelaySource {
    /// The section of the configuration for the relay in `slot`.
    fn section(&self, slot: usize) -> String {
        match self {
            Self::Sqlite(path) => format!("[source]\nkind = \"sqlite\"\nurl = {path:?}\n"),
            // A statement must not outlast a lease by much.
            Self::Postgres { kind, urls } => format!(
                "[source]\nkind = \"{kind}\"\nurl = {:?}\nconnections = 4\n\
                 statement_timeout = \"1s\"\n",
                urls[slot]
            ),
            Self::Cosmos(url) => format!(
                "[source]\nkind = \"cosmos\"\nurl = {url:?}\ndatabase = \"shop\"\n\
                 container = \"orders\"\npoll_interval = \"100ms\"\n"
            ),
        }
    }

    /// What each sink has to say of where it begins.
    fn from(&self) -> &'static str {
        match self {
            Self::Postgres { kind: SourceKind::PostgresWal, .. } => "from = \"oldest\"\n",
            Self::Postgres { .. } | Self::Sqlite(_) | Self::Cosmos(_) => "",
        }
    }
}

/// What all relays of a schedule share.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The binary.
    pub binary: PathBuf,
    /// Where configurations and logs go.
    pub folder: PathBuf,
    /// The outbox.
    pub source: RelaySource,
    /// Where to, each under the sink's name.
    pub targets: Vec<(&'static str, Target)>,
    /// Time to live of a lease.
    pub lease_ttl: Duration,
    /// Retention, if any.
    pub retention: Option<Duration>,
    /// The wall clock that they see, if it can be moved.
    pub clock: Option<MovedClock>,
    /// What each sink is told of retries.
    pub retries: &'static str,
}

/// Retries that fit into a schedule.
pub const QUICK_RETRIES: &str = "base_delay = \"20ms\"\nmax_delay = \"300ms\"\n";

/// A named place and the passage at which to die there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failpoint {
    /// The place.
    pub name: &'static str,
    /// The passage.
    pub count: u32,
}

/// What a relay logs once everything is set up.
const DELIVERING: &[u8] = b"delivering";

/// A relay's process.
pub struct Relay {
    /// Its start's number.
    pub number: usize,
    child: Child,
    log: PathBuf,
    /// Whether it may die at a failpoint that it has not passed yet.
    armed: bool,
}

impl Setup {
    /// The configuration of start `number`, in `slot`.
    fn configuration(&self, number: usize, slot: usize) -> String {
        let mut text = self.source.section(slot);
        for (name, target) in &self.targets {
            text.push_str(&self.sink(number, name, target));
        }
        let retention = self.retention.map_or("\"off\"".to_owned(), |keep| {
            format!("\"{}ms\"\nprune_every = \"150ms\"", keep.as_millis())
        });
        write!(
            text,
            "\n[relay]\nlease_ttl = \"{}ms\"\nretention = {retention}\n\
             \n[admin]\nlisten = \"off\"\n\n[log]\nlevel = \"info\"\n",
            self.lease_ttl.as_millis()
        )
        .expect("writing to memory does not fail");
        text
    }

    /// The section of a sink, for start `number` of a relay.
    fn sink(&self, number: usize, name: &str, target: &Target) -> String {
        let more = match target {
            Target::Webhook { address, signing_key } => format!(
                "kind = \"webhook\"\nurl = \"http://{address}/\"\nallow_private = true\n\
                 signing_keys = [\"{signing_key}\"]\n\
                 headers = {{ {RELAY_HEADER} = \"{number}\" }}\n\
                 timeout_ms = 1500\nconcurrency = 8\n"
            ),
            Target::Jsonl { path, rotate_bytes } => {
                let rotation = rotate_bytes.map(|bytes| format!("rotate_bytes = {bytes}\n"));
                format!("kind = \"jsonl\"\npath = {path:?}\n{}", rotation.unwrap_or_default())
            }
            // As patient as with the receiver of a webhook.
            Target::Servicebus { connection_string } => format!(
                "kind = \"servicebus\"\nconnection_string = {connection_string:?}\n\
                 entity = \"{QUEUE}\"\ndedup_window = \"1h\"\ntimeout_ms = 1500\n\
                 connect_timeout_ms = 1500\n"
            ),
            Target::Broker { settings } => settings.clone(),
        };
        let (from, retries) = (self.source.from(), self.retries);
        format!("\n[[sink]]\nname = \"{name}\"\n{from}{more}{retries}")
    }

    /// Starts a relay in `slot`.
    ///
    /// # Errors
    /// When the system starts no process.
    pub fn start(&self, number: usize, slot: usize, failpoint: Option<Failpoint>) -> Result<Relay> {
        let file = self.folder.join(format!("relay-{number}.toml"));
        std::fs::write(&file, self.configuration(number, slot)).context("write a configuration")?;
        let log = self.folder.join(format!("relay-{number}.log"));
        let stderr = File::create(&log).context("make a relay's log")?;
        let mut command = bound_to_us(&self.binary);
        command.arg("--config").arg(&file).arg("run");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("POSTRIDER_") {
                command.env_remove(name);
            }
        }
        if let Some(Failpoint { name, count }) = failpoint {
            command.env("POSTRIDER_FAILPOINT", format!("{name}:{count}"));
        }
        if let Some(clock) = &self.clock {
            clock.show_to(&mut command);
        }
        let child = command.spawn().context("start a relay")?;
        Ok(Relay { number, child, log, armed: failpoint.is_some() })
    }
}

/// A command whose process is killed when the thread that starts it ends, whatever ends it.
pub fn bound_to_us(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Sends a signal to a process of ours.
///
/// # Errors
/// When it is gone.
pub fn signal(child: &Child, signal: Signal) -> Result<()> {
    let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    kill_process(id.context("a process has an id")?, signal).context("send a signal")
}

impl Relay {
    /// Its process id, which is part of the name under which it holds leases.
    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// How many lines it has logged.
    ///
    /// # Errors
    /// When its log can't be read.
    pub fn log_lines(&self) -> Result<usize> {
        let log = std::fs::read(&self.log).context("read a relay's log")?;
        Ok(log.iter().filter(|byte| **byte == b'\n').count())
    }

    /// Its peak resident memory so far, in KiB, as Linux counts it.
    ///
    /// # Errors
    /// When it is gone.
    pub fn peak_memory_kib(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.process_id());
        let status = std::fs::read_to_string(path).context("read a relay's status")?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak.context("the system does not tell the peak memory")?;
        kib.trim().trim_end_matches(" kB").parse().context("read a relay's peak memory")
    }

    /// Whether it has come so far that a signal to stop is heard.
    ///
    /// # Errors
    /// When its log can't be read.
    pub fn listens(&self) -> Result<bool> {
        let log = std::fs::read(&self.log).context("read a relay's log")?;
        Ok(log.windows(DELIVERING.len()).any(|window| window == DELIVERING))
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, wanted: Signal) -> Result<()> {
        signal(&self.child, wanted)
    }

    /// Whether it may die at a failpoint.
    pub fn is_armed(&self) -> bool {
        self.armed
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The system's.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("look after a relay")
    }

    /// Kills it and waits for its end.
    ///
    /// # Errors
    /// The system's.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("kill a relay")?;
        self.child.wait().context("wait for a killed relay").map(drop)
    }

    /// Waits until it has ended in order.
    ///
    /// # Errors
    /// When it ends otherwise or not in time.
    pub fn finish(&mut self, within: Duration) -> Result<()> {
        let until = std::time::Instant::now() + within;
        loop {
            if let Some(status) = self.ended()? {
                let died = self.armed && status.signal() == Some(Signal::KILL.as_raw());
                if status.success() || died {
                    return Ok(());
                }
                bail!("relay {} ended with {status} after SIGTERM", self.number);
            }
            if std::time::Instant::now() > until {
                bail!("relay {} did not end within {within:?} after SIGTERM", self.number);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
