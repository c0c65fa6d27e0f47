//! One private server: a data folder, a port, and at most one process.
//!
//! What lives here: making the data, starting, stopping, killing, copying. What does not: databases
//! on it (`database.rs`) and the end of the folder (`folder.rs`).
//! Invariant: port and data stay the same from launch to drop; the keeper knows of every process
//! before anything is waited for, and forgets it before it is waited away.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::database::Database;
use super::options::Options;
use super::version::Version;
use crate::address::Address;
use crate::certificate;
use crate::error::{Error, Result, While};
use crate::folder::{EndBy, Folder, Medium};
use crate::programs;

/// For a start with recovery, or a stop with a checkpoint, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a start or an end is looked for.
const POLL: Duration = Duration::from_millis(5);
/// So many ports are tried when others take them first.
const PORT_TRIES: usize = 20;
/// The last lines of the log that a failure shows.
const LOG_LINES: usize = 20;
const SUPERUSER: &str = "postgres";

/// How a server stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// Ends sessions, rolls back, writes a checkpoint.
    Fast,
    /// Ends at once; the next start recovers from the log.
    Immediate,
}

/// A private PostgreSQL server on 127.0.0.1. It ends, and its data is removed, with this value.
pub struct Server {
    options: Options,
    port: u16,
    // Dropped before the folder: fields drop in this order.
    process: Mutex<Option<Child>>,
    folder: Folder,
}

impl Server {
    pub(super) fn launch(options: Options) -> Result<Self> {
        let server = Self::without_data(options)?;
        server.initialise()?;
        if server.options.tls {
            certificate::make(&server.data(), &server.authority())?;
        }
        let mut file = OpenOptions::new()
            .append(true)
            .open(server.data().join("postgresql.conf"))
            .during(|| "open postgresql.conf".to_owned())?;
        let configuration = server.options.configuration();
        file.write_all(configuration.as_bytes()).during(|| "write postgresql.conf".to_owned())?;
        server.started_on_a_free_port()
    }

    fn without_data(options: Options) -> Result<Self> {
        let name = format!("postgres-{}", options.version.major());
        let medium = if options.durable { Medium::Disk } else { Medium::Memory };
        let folder = Folder::create(&name, medium)?;
        Ok(Self { options, port: 0, process: Mutex::new(None), folder })
    }

    fn initialise(&self) -> Result<()> {
        let mut command = self.program_as_owner("initdb")?;
        command.arg("-D").arg(self.data()).args(["-U", SUPERUSER, "-E", "UTF8", "--no-locale"]);
        command.arg("--no-sync");
        let secret = self.folder.path().join("password");
        if let Some(password) = &self.options.password {
            fs::write(&secret, password).during(|| "write the password".to_owned())?;
            programs::give_to_owner(&secret)?;
            command.args(["-A", "scram-sha-256"]).arg("--pwfile").arg(&secret);
        } else {
            command.args(["-A", "trust"]);
        }
        self.run_in_folder("initdb", &mut command)
    }

    fn started_on_a_free_port(mut self) -> Result<Self> {
        for _ in 0..PORT_TRIES {
            self.port = programs::free_port()?;
            match self.try_start() {
                Err(error) if is_taken(&error) => {}
                started => return started.map(|()| self),
            }
        }
        Err(Error::failed("starting PostgreSQL", "others took every port that was tried"))
    }

    /// Starts it again after [`Self::stop`] or [`Self::kill`], on the same port and data. Does
    /// nothing if it runs.
    ///
    /// # Errors
    ///
    /// If it does not come up; the text has the end of its log.
    pub fn start(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.try_start() {
                Err(error) if is_taken(&error) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                started => return started,
            }
        }
    }

    fn try_start(&self) -> Result<()> {
        let mut process = self.process();
        if let Some(child) = process.as_mut()
            && child.try_wait().during(|| "look at the server".to_owned())?.is_none()
        {
            return Ok(());
        }
        *process = None;
        let log = OpenOptions::new().create(true).append(true).open(self.log());
        let log = log.during(|| "open the log".to_owned())?;
        let errors = log.try_clone().during(|| "open the log".to_owned())?;
        let log_before = log.metadata().map_or(0, |metadata| metadata.len());
        let mut command = self.program_as_owner("postgres")?;
        command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]);
        let mut child = spawn(&mut command, log, errors)?;
        self.folder.runs(child.id(), EndBy::Quit)?;
        let deadline = Instant::now() + PATIENCE;
        while !self.answers(child.id()) {
            let ended = child.try_wait().during(|| "look at the server".to_owned())?.is_some();
            if ended || Instant::now() >= deadline {
                let _ = child.kill();
                self.folder.rests()?;
                let _ = child.wait();
                let log = fs::read_to_string(self.log()).unwrap_or_default();
                let since = usize::try_from(log_before).ok().and_then(|from| log.get(from..));
                return Err(Error::failed("starting PostgreSQL", since.unwrap_or(&log)));
            }
            std::thread::sleep(POLL);
        }
        *process = Some(child);
        Ok(())
    }

    /// Whether this very process says that it takes connections. Another server on the same port
    /// can't be taken for it, nor what a killed one left.
    fn answers(&self, pid: u32) -> bool {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let mut lines = text.lines();
        let own = lines.next().is_some_and(|line| line.trim() == pid.to_string());
        own && lines.nth(6).is_some_and(|state| ["ready", "standby"].contains(&state.trim()))
    }

    /// Stops it and keeps its data. Does nothing if it does not run.
    ///
    /// # Errors
    ///
    /// If it does not end; it is killed then.
    pub fn stop(&self, shutdown: Shutdown) -> Result<()> {
        let mut process = self.process();
        let Some(mut child) = process.take() else { return Ok(()) };
        let signal = match shutdown {
            Shutdown::Fast => Signal::INT,
            Shutdown::Immediate => Signal::QUIT,
        };
        send(child.id(), signal);
        let deadline = Instant::now() + PATIENCE;
        while child.try_wait().during(|| "look at the server".to_owned())?.is_none() {
            if Instant::now() >= deadline {
                let _ = child.kill();
                self.folder.rests()?;
                let _ = child.wait();
                return Err(Error::failed("stopping PostgreSQL", self.log_tail()));
            }
            std::thread::sleep(POLL);
        }
        self.folder.rests()
    }

    /// Stops it and starts it again.
    ///
    /// # Errors
    ///
    /// As [`Self::stop`] and [`Self::start`].
    pub fn restart(&self, shutdown: Shutdown) -> Result<()> {
        self.stop(shutdown)?;
        self.start()
    }

    /// Kills every one of its processes with no chance to react, as a power cut would. Its data
    /// stays; [`Self::start`] recovers it.
    ///
    /// # Errors
    ///
    /// If its processes can't be listed or do not end.
    pub fn kill(&self) -> Result<()> {
        let mut process = self.process();
        let Some(mut child) = process.take() else { return Ok(()) };
        // It must not start another process, nor notice that one of them died.
        send(child.id(), Signal::STOP);
        let children = children_of(child.id());
        for pid in children.iter().flatten() {
            send(*pid, Signal::KILL);
        }
        send(child.id(), Signal::KILL);
        self.folder.rests()?;
        child.wait().during(|| "wait for the server".to_owned())?;
        let deadline = Instant::now() + PATIENCE;
        for pid in children? {
            while is_alive(pid) {
                if Instant::now() >= deadline {
                    return Err(Error::failed("killing PostgreSQL", format!("{pid} goes on")));
                }
                std::thread::sleep(POLL);
            }
        }
        Ok(())
    }

    /// A new server from a base backup of this one, which must run: the same data and the same
    /// system identifier, and a life of its own.
    ///
    /// # Errors
    ///
    /// If the backup fails or the new server does not start.
    pub fn restored_backup(&self) -> Result<Self> {
        self.base_backup(&[])
    }

    /// A new server that follows this one by streaming replication, until [`Self::promote`].
    ///
    /// # Errors
    ///
    /// As [`Self::restored_backup`].
    pub fn standby(&self) -> Result<Self> {
        self.base_backup(&["--write-recovery-conf"])
    }

    fn base_backup(&self, flags: &[&str]) -> Result<Self> {
        let copy = Self::without_data(self.options.clone())?;
        let mut command = copy.program_as_owner("pg_basebackup")?;
        command.arg("-D").arg(copy.data()).arg("-d").arg(self.url(SUPERUSER, "postgres"));
        command.args(["--wal-method=stream", "--checkpoint=fast", "--no-sync"]).args(flags);
        copy.run_in_folder("pg_basebackup", &mut command)?;
        copy.copied_from(self)
    }

    /// A new server from a copy of this one's files; this one must be stopped or killed.
    ///
    /// # Errors
    ///
    /// If this one runs, or the new one does not start.
    pub fn copied_files(&self) -> Result<Self> {
        // Held, so that nobody starts it meanwhile.
        let process = self.process();
        if process.is_some() {
            return Err(Error::failed("copying the files", "the server runs; stop it first"));
        }
        let copy = Self::without_data(self.options.clone())?;
        let mut command = Command::new("cp");
        programs::finish("cp", command.arg("-a").arg(self.data()).arg(copy.data()))?;
        // What a killed server left there speaks of the original's process and shared memory.
        let left = copy.data().join("postmaster.pid");
        if left.exists() {
            fs::remove_file(&left).during(|| "remove postmaster.pid".to_owned())?;
        }
        copy.copied_from(self)
    }

    fn copied_from(self, original: &Self) -> Result<Self> {
        if self.options.tls {
            fs::copy(original.authority(), self.authority())
                .during(|| "copy the authority's certificate".to_owned())?;
        }
        self.started_on_a_free_port()
    }

    /// Makes a standby a server of its own, on a new timeline, and waits until it is.
    ///
    /// # Errors
    ///
    /// If it is no standby.
    pub fn promote(&self) -> Result<()> {
        match self.psql("postgres", "select pg_promote(true, 60)")?.as_str() {
            "t" => Ok(()),
            _ => Err(Error::failed("promoting the standby", self.log_tail())),
        }
    }

    /// Makes a database with a name of its own; it ends with the returned value.
    ///
    /// # Errors
    ///
    /// If the server does not run.
    pub fn create_database(&self) -> Result<Database> {
        Database::create(self.version(), &self.address(SUPERUSER, "postgres"))
    }

    /// Runs SQL as superuser and returns the rows, one a line, columns separated by `|`.
    ///
    /// # Errors
    ///
    /// If a statement fails.
    pub fn psql(&self, database: &str, sql: &str) -> Result<String> {
        super::database::psql(self.version(), &self.address(SUPERUSER, database), sql)
    }

    /// The address of a database for a user. It has the password if there is one: the superuser's,
    /// which a role of the test's own may share.
    pub fn url(&self, user: &str, database: &str) -> String {
        self.address(user, database).to_string()
    }

    fn address(&self, user: &str, database: &str) -> Address {
        Address {
            user: user.to_owned(),
            password: self.options.password.clone(),
            host: "127.0.0.1".to_owned(),
            port: self.port,
            database: database.to_owned(),
            query: None,
        }
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.options.version
    }

    /// Its port on 127.0.0.1, also while it is stopped.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the postmaster, while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.process().as_ref().map(Child::id)
    }

    /// Its data folder.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// The certificate that clients trust, if it was started with [`Options::tls`].
    pub fn certificate_authority(&self) -> Option<PathBuf> {
        self.options.tls.then(|| self.authority())
    }

    fn authority(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    fn program_as_owner(&self, name: &str) -> Result<Command> {
        let mut command = programs::as_owner(&self.version().program(name)?);
        // The current folder may be one that the servers' user can't enter.
        command.current_dir(self.folder.path());
        Ok(command)
    }

    /// Runs a program that fills the folder; the keeper ends it if this process dies.
    fn run_in_folder(&self, what: &str, command: &mut Command) -> Result<()> {
        let path = self.folder.path().join(format!("{what}.log"));
        let log = File::create(&path).during(|| format!("open the log of {what}"))?;
        let errors = log.try_clone().during(|| format!("open the log of {what}"))?;
        let mut child = spawn(command, log, errors)?;
        self.folder.runs(child.id(), EndBy::Waiting)?;
        let status = child.wait().during(|| format!("wait for {what}"));
        self.folder.rests()?;
        if status?.success() {
            return Ok(());
        }
        let output = fs::read_to_string(&path).unwrap_or_default();
        let hint = programs::why_closed_to_owner(self.folder.path());
        Err(Error::failed(what, format!("{}{hint}", output.trim())))
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the log of PostgreSQL on port {}:\n{}", self.port, self.log_tail());
        }
        // What it could not end, the keeper does.
        let _ = self.stop(Shutdown::Immediate);
    }
}

fn spawn(command: &mut Command, output: File, errors: File) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
    let program = Path::new(command.get_program()).to_owned();
    command.spawn().during(|| format!("start {}", program.display()))
}

fn is_taken(error: &Error) -> bool {
    matches!(error, Error::Failed { output, .. } if output.contains("Address already in use"))
}

fn pid_of(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = pid_of(pid) {
        // It fails only if the process has ended, which is what is wanted.
        let _ = kill_process(pid, signal);
    }
}

/// A process that has ended and that nobody has waited for yet is not alive.
fn is_alive(pid: u32) -> bool {
    let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    if state.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')) {
        return false;
    }
    pid_of(pid).is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

fn children_of(parent: u32) -> Result<Vec<u32>> {
    let list =
        programs::finish("ps", Command::new("ps").args(["-A", "-o", "pid=", "-o", "ppid="]))?;
    let pairs = list.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    Ok(pairs.filter(|(_, of)| *of == parent).map(|(pid, _)| pid).collect())
}
