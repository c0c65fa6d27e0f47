//! Redis servers.
//!
//! What lives here: finding the program, the configuration, start, stop and kill. What does not:
//! streams and users, which tests make.
//! Invariant: it listens on 127.0.0.1 alone, and what it has answered survives a stop and, as each
//! write is synced, a kill.

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
/// The packages of PyPI with which the guide's consumer reads.
pub const PYTHON_PACKAGES: &[&str] = &["redis==8.1.0"];

/// Where the server's program is.
///
/// # Errors
///
/// If it is not installed; the text says how to install it.
pub fn program() -> Result<PathBuf> {
    programs::find("redis-server")
}

/// The virtual environment in which [`PYTHON_PACKAGES`] are installed.
pub fn virtual_environment() -> PathBuf {
    programs::environment("redis-py-8.1.0")
}

/// Whether the guide's client is there.
pub fn has_python_packages() -> bool {
    programs::python_packages(&virtual_environment())
        .any(|packages| packages.join("redis/__init__.py").is_file())
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

/// A Redis server. It ends with this value.
///
/// ```no_run
/// # use postrider_servers::redis::Redis;
/// # fn main() -> postrider_servers::Result<()> {
/// let mut server = Redis::start("user app on >p4ss ~orders +@all")?;
/// let _connect_to = server.url();
/// server.kill()?; // … gone, as by a crash …
/// server.start_again()?;
/// # Ok(())
/// # }
/// ```
pub struct Redis {
    port: u16,
    process: Option<Child>,
    folder: Folder,
    tls: Tls,
}

impl Redis {
    /// Starts one that syncs each write. `settings` are more lines of its configuration.
    ///
    /// # Errors
    ///
    /// If the program is missing or does not start; the text has its log.
    pub fn start(settings: &str) -> Result<Self> {
        Self::start_with(settings, Tls::Off)
    }

    /// [`Self::start`] with TLS.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn start_with(settings: &str, tls: Tls) -> Result<Self> {
        program()?;
        for _ in 0..PORT_TRIES {
            let folder = Folder::create("redis", Medium::Disk)?;
            let port = programs::free_port()?;
            let mut server = Self { port, process: None, folder, tls };
            if tls != Tls::Off {
                certificate::make(server.folder.path(), &server.authority())?;
            }
            server.configure(settings)?;
            match server.start_again() {
                Err(Error::Failed { output, .. }) if output.contains("already in use") => {}
                started => return started.map(|()| server),
            }
        }
        Err(Error::failed("starting redis-server", "others took every port that was tried"))
    }

    fn configure(&self, settings: &str) -> Result<()> {
        let folder = self.folder.path();
        let port = self.port;
        let files = "tls-cert-file server.crt\ntls-key-file server.key\n\
                     tls-ca-cert-file authority.crt";
        let listening = match self.tls {
            Tls::Off => format!("port {port}"),
            Tls::On => format!("port 0\ntls-port {port}\n{files}\ntls-auth-clients no"),
            Tls::Mutual => format!("port 0\ntls-port {port}\n{files}\ntls-auth-clients yes"),
        };
        let text = format!(
            "bind 127.0.0.1\n{listening}\ndaemonize no\nsave \"\"\nappendonly yes\n\
             appendfsync always\n{settings}\n"
        );
        let file = folder.join("redis.conf");
        fs::write(&file, text).during(|| "write redis.conf".to_owned())?;
        programs::give_to_owner(&file)
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
        command.arg("redis.conf").current_dir(self.folder.path()).process_group(0);
        command.stdin(Stdio::null()).stdout(log).stderr(Stdio::null());
        let process = command.spawn().during(|| "start redis-server".to_owned())?;
        self.folder.runs(process.id(), EndBy::Term)?;
        self.process = Some(process);
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.contains("Ready to accept connections")
                && TcpStream::connect(self.address()).is_ok()
            {
                return Ok(());
            }
            let ended = match self.process.as_mut() {
                Some(process) => process.try_wait().during(|| "look at redis-server".to_owned())?,
                None => None,
            };
            if ended.is_some() || Instant::now() >= deadline {
                return Err(Error::failed("starting redis-server", log));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Stops it cleanly.
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
        process.wait().during(|| "wait for redis-server".to_owned())?;
        Ok(())
    }

    /// What clients connect to.
    pub fn url(&self) -> String {
        match self.tls {
            Tls::Off => format!("redis://127.0.0.1:{}", self.port),
            Tls::On | Tls::Mutual => format!("rediss://localhost:{}", self.port),
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

impl Drop for Redis {
    fn drop(&mut self) {
        // Its folder goes with it.
        let _ = self.kill();
    }
}
