//! A broker that speaks Kafka's protocol: noida-db, a single node.
//!
//! What lives here: finding the program, start, stop and kill; the way to it through a proxy
//! (`way.rs`, `protocol.rs`). What does not: topics, which tests make. It keeps idempotent and
//! transactional producers apart, fences, and refuses what is too large as Kafka does; it has no
//! replicas, no TLS, no logins.
//! Invariant: it listens on 127.0.0.1 alone, and what it has confirmed survives a stop, but for
//! transactions: those that were open are aborted, and confirmed all the same if they end later
//! (`Way::fence` keeps them from that). A kill, and so the end of its keeper, loses what it has not
//! written by itself within the last seconds.

#[cfg(feature = "proxy")]
pub mod protocol;
#[cfg(feature = "proxy")]
mod way;

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::certificate;
use crate::error::{Error, Result, While};
use crate::folder::{EndBy, Folder, Medium};
use crate::programs;
#[cfg(feature = "proxy")]
pub use way::Way;

const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(5);
const PORT_TRIES: usize = 20;
/// The packages of PyPI that bring the broker, and the client with which the guide's consumer
/// reads.
pub const PYTHON_PACKAGES: &[&str] = &["noida-db==0.2.3", "confluent-kafka==2.16.1"];

/// Where the broker's program is.
///
/// # Errors
///
/// If it is not installed; the text says how to install it.
pub fn program() -> Result<PathBuf> {
    programs::python_packages(&virtual_environment())
        .map(|packages| packages.join("noida_db/noida-db"))
        .find(|program| program.is_file())
        .ok_or_else(|| Error::missing("noida-db"))
}

/// The virtual environment in which [`PYTHON_PACKAGES`] are installed.
pub fn virtual_environment() -> PathBuf {
    programs::environment("noida-db-0.2.3")
}

/// Whether the broker and the guide's client are there.
pub fn has_python_packages() -> bool {
    program().is_ok()
        && programs::python_packages(&virtual_environment())
            .any(|packages| packages.join("confluent_kafka/__init__.py").is_file())
}

/// A broker. It ends with this value.
///
/// ```no_run
/// # use postrider_servers::kafka::Kafka;
/// # fn main() -> postrider_servers::Result<()> {
/// let mut broker = Kafka::start()?;
/// let _connect_to = broker.address();
/// broker.stop()?; // … gone, as for an update …
/// broker.start_again()?;
/// # Ok(())
/// # }
/// ```
pub struct Kafka {
    port: u16,
    process: Option<Child>,
    folder: Folder,
}

impl Kafka {
    /// Starts one without topics.
    ///
    /// # Errors
    ///
    /// If the program is missing or does not start; the text has its log.
    pub fn start() -> Result<Self> {
        program()?;
        for _ in 0..PORT_TRIES {
            let folder = Folder::create("kafka", Medium::Disk)?;
            let port = programs::free_port()?;
            let mut broker = Self { port, process: None, folder };
            match broker.start_again() {
                Err(Error::Failed { output, .. }) if output.contains("already in use") => {}
                started => return started.map(|()| broker),
            }
        }
        Err(Error::failed("starting noida-db", "others took every port that was tried"))
    }

    /// Starts it on its port with what it has stored. Does nothing if it runs.
    ///
    /// # Errors
    ///
    /// If it does not start; the text has its log.
    pub fn start_again(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log = File::create(self.folder.path().join("log")).during(|| "open the log".into())?;
        let mut command = programs::as_owner(&program()?);
        command.args(["start", "--data-dir", "data", "--only", "kafka"]);
        command.args(["--kafka-port", &self.port.to_string()]);
        command.current_dir(self.folder.path()).process_group(0);
        let errors = log.try_clone().during(|| "open the log".to_owned())?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let process = command.spawn().during(|| "start noida-db".to_owned())?;
        self.folder.runs(process.id(), EndBy::Term)?;
        self.process = Some(process);
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.contains("press Ctrl-C") && TcpStream::connect(self.address()).is_ok() {
                return Ok(());
            }
            let ended = match self.process.as_mut() {
                Some(process) => process.try_wait().during(|| "look at noida-db".to_owned())?,
                None => None,
            };
            if ended.is_some() || Instant::now() >= deadline {
                return Err(Error::failed("starting noida-db", log));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Stops it cleanly: first the service, which ends its connections before it saves, and then
    /// the program. At its own end the program goes on confirming records that it no longer saves.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    pub fn stop(&mut self) -> Result<()> {
        if self.process.is_some() {
            let mut stop = programs::as_owner(&program()?);
            stop.args(["stop", "kafka", "--data-dir", "data"]).current_dir(self.folder.path());
            programs::finish("noida-db stop", &mut stop)?;
        }
        self.end(Signal::TERM)
    }

    /// Kills it; it may forget what it confirmed within the last seconds.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    pub fn kill(&mut self) -> Result<()> {
        self.end(Signal::KILL)
    }

    fn end(&mut self, signal: Signal) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        if let Some(pid) = i32::try_from(process.id()).ok().and_then(Pid::from_raw) {
            // It fails only if the process has ended.
            let _ = kill_process(pid, signal);
        }
        self.folder.rests()?;
        process.wait().during(|| "wait for noida-db".to_owned())?;
        Ok(())
    }

    /// Whether it was started and not ended since.
    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// What clients connect to.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Makes an authority, and a certificate of it for `localhost` and 127.0.0.1: `authority.crt`,
    /// `server.crt` and `server.key`, for what stands before the broker.
    ///
    /// # Errors
    ///
    /// If `openssl` is missing.
    pub fn certificates(&self) -> Result<PathBuf> {
        let folder = self.folder.path();
        certificate::make(folder, &folder.join("authority.crt"))?;
        Ok(folder.to_owned())
    }

    /// What it has logged since it was started last.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        // Its folder goes with it.
        let _ = self.kill();
    }
}
