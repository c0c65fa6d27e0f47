//! RabbitMQ servers.
//!
//! What lives here: finding the program, the configuration, start, stop, kill, alarms; the server
//! that tests share. What does not: streams (`streams.rs`); exchanges and queues, which tests make
//! under their own names.
//! Invariant: server and port mapper listen on 127.0.0.1 alone, on free ports, and keep everything
//! in folders of their own; durable queues survive a stop.

mod streams;

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::certificate;
use crate::error::{Error, Result, While};
use crate::folder::{EndBy, Folder, Medium};
use crate::programs;

/// A start takes five seconds on a quiet machine.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
const PORT_TRIES: usize = 20;
/// Where Debian's package keeps what its wrappers call; the wrappers want root and `/var/lib`.
const DEBIAN: &str = "/usr/lib/rabbitmq/bin";
/// Its name, which folders of its have too.
const NODE: &str = "postrider@localhost";
/// What is in the log once everything is up.
const STARTED: &str = "Server startup complete";
/// Which server's URL tests find in the environment.
const SHARED_VARIABLE: &str = "POSTRIDER_TEST_RABBITMQ";
/// The packages of PyPI with which the guide's consumers read, and RabbitMQ's own client of
/// streams.
pub const PYTHON_PACKAGES: &[&str] = &["pika==1.3.2", "rstream==1.1.1"];
/// Streams take events with 1 MiB of payload.
const SHARED_SETTINGS: &str = "stream.frame_max = 2097152";
/// The plugin that speaks the stream protocol.
const STREAM_PLUGIN: &str = "rabbitmq_stream";

/// A server of this process, for when the environment names none. It is never dropped: when the
/// process ends, its keepers end it.
static OWN: Mutex<Option<RabbitMq>> = Mutex::new(None);

/// Where the server's program is.
///
/// # Errors
///
/// If it is not installed; the text says how to install it.
pub fn program() -> Result<PathBuf> {
    installed("rabbitmq-server")
}

fn installed(name: &str) -> Result<PathBuf> {
    let program = Path::new(DEBIAN).join(name);
    if program.is_file() { Ok(program) } else { Err(Error::missing(name)) }
}

/// The virtual environment in which [`PYTHON_PACKAGES`] are installed.
pub fn virtual_environment() -> PathBuf {
    programs::environment("pika")
}

/// The folders in which that environment's packages are, if there is any.
pub fn client_packages() -> impl Iterator<Item = PathBuf> {
    programs::python_packages(&virtual_environment())
}

/// The URL of the server that the environment names, else of one that this process starts and
/// keeps. Tests share it: they use names that nobody else draws, and restart nothing.
///
/// # Errors
///
/// If there is no server and none can be started.
pub fn shared() -> Result<String> {
    Ok(shared_urls()?.0)
}

/// The URL of the same server for the stream protocol.
///
/// # Errors
///
/// As [`shared`]; if the environment names a server without one.
pub fn shared_stream() -> Result<String> {
    let (_, stream) = shared_urls()?;
    stream.ok_or_else(|| Error::failed(SHARED_VARIABLE, "it names no URL of the stream protocol"))
}

/// Both, of which the environment has them behind each other.
fn shared_urls() -> Result<(String, Option<String>)> {
    if let Ok(named) = std::env::var(SHARED_VARIABLE) {
        return Ok(match named.split_once(' ') {
            Some((url, stream)) => (url.to_owned(), Some(stream.to_owned())),
            None => (named, None),
        });
    }
    let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    let server = match own.as_mut() {
        Some(server) => server,
        None => own.insert(RabbitMq::start(SHARED_SETTINGS)?),
    };
    Ok((server.url(), Some(server.stream_url())))
}

/// A server for a whole test run, and what its test processes need in their environment.
pub struct Shared(Option<RabbitMq>);

impl Shared {
    /// Starts a server unless the environment names one already.
    ///
    /// # Errors
    ///
    /// If it can't be started.
    pub fn start() -> Result<Self> {
        let named = std::env::var_os(SHARED_VARIABLE).is_some();
        Ok(Self(if named { None } else { Some(RabbitMq::start(SHARED_SETTINGS)?) }))
    }

    /// The variable that names it, if it was started here.
    pub fn environment(&self) -> Option<(&'static str, String)> {
        let both = |server: &RabbitMq| format!("{} {}", server.url(), server.stream_url());
        self.0.as_ref().map(|server| (SHARED_VARIABLE, both(server)))
    }
}

/// Whether a server speaks TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tls {
    /// It does not.
    Off,
    /// It does, by a certificate for `localhost`, and asks clients for one. By their certificates
    /// clients may log in as the user `localhost` (SASL EXTERNAL). It also listens without TLS.
    Mutual,
}

/// A RabbitMQ server. It ends with this value.
///
/// ```no_run
/// # use postrider_servers::rabbitmq::RabbitMq;
/// # fn main() -> postrider_servers::Result<()> {
/// let mut server = RabbitMq::start("max_message_size = 65536")?;
/// let _connect_to = server.url();
/// server.stop()?; // … gone, as for an update …
/// server.start_again()?;
/// # Ok(())
/// # }
/// ```
pub struct RabbitMq {
    ports: Ports,
    tls: Tls,
    process: Option<Child>,
    folder: Folder,
    // Behind the server, which is gone before it.
    _mapper: Mapper,
}

#[derive(Clone, Copy)]
struct Ports {
    amqp: u16,
    amqps: u16,
    /// For the stream protocol.
    stream: u16,
    streams: u16,
    /// Between nodes, and for `rabbitmqctl`.
    nodes: u16,
    /// The port mapper's.
    mapper: u16,
}

impl RabbitMq {
    /// Starts one. `settings` are more lines of its configuration.
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
            let free = programs::free_port;
            let ports = Ports {
                amqp: free()?,
                amqps: free()?,
                stream: free()?,
                streams: free()?,
                nodes: free()?,
                mapper: free()?,
            };
            let Some(mapper) = Mapper::start(ports.mapper)? else { continue };
            let folder = Folder::create("rabbitmq", Medium::Disk)?;
            let mut server = Self { ports, tls, process: None, folder, _mapper: mapper };
            if tls != Tls::Off {
                certificate::make(server.folder.path(), &server.authority())?;
            }
            server.configure(settings)?;
            match server.start_again() {
                Err(Error::Failed { output, .. }) if output.contains("eaddrinuse") => {}
                started => return started.map(|()| server),
            }
        }
        Err(Error::failed("starting rabbitmq-server", "others took every port that was tried"))
    }

    /// Starts from now on with these lines of its configuration instead.
    ///
    /// # Errors
    ///
    /// If they can't be written.
    pub fn configure(&self, settings: &str) -> Result<()> {
        let folder = self.folder.path();
        let tls = match self.tls {
            Tls::Off => String::new(),
            Tls::Mutual => format!(
                "listeners.ssl.1 = 127.0.0.1:{}\nssl_options.cacertfile = {1}/authority.crt\n\
                 ssl_options.certfile = {1}/server.crt\nssl_options.keyfile = {1}/server.key\n\
                 ssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true\n\
                 ssl_cert_login_from = common_name\nauth_mechanisms.1 = PLAIN\n\
                 auth_mechanisms.2 = EXTERNAL\ndefault_user = localhost\ndefault_pass = p4ss\n\
                 stream.listeners.ssl.1 = 127.0.0.1:{2}\n",
                self.ports.amqps,
                folder.display(),
                self.ports.streams
            ),
        };
        let text = format!(
            "listeners.tcp.1 = 127.0.0.1:{}\nlog.console = true\nlog.file = false\n\
             stream.listeners.tcp.1 = 127.0.0.1:{}\n{tls}{settings}\n",
            self.ports.amqp, self.ports.stream
        );
        let plugins = match self.tls {
            Tls::Off => format!("[{STREAM_PLUGIN}]."),
            Tls::Mutual => format!("[rabbitmq_auth_mechanism_ssl,{STREAM_PLUGIN}]."),
        };
        for (name, text) in [("rabbitmq.conf", &text), ("plugins", &plugins)] {
            let file = folder.join(name);
            fs::write(&file, text).during(|| format!("write {name}"))?;
            programs::give_to_owner(&file)?;
        }
        Ok(())
    }

    /// One of RabbitMQ's programs, told to look at this server alone.
    fn command(&self, name: &str) -> Result<Command> {
        let folder = self.folder.path();
        let mut command = programs::as_owner(&installed(name)?);
        let inherited = std::env::vars_os().map(|(name, _)| name);
        for name in inherited.filter(|name| name.to_string_lossy().starts_with("RABBITMQ_")) {
            command.env_remove(name);
        }
        for (name, path) in [
            ("HOME", folder.to_owned()),
            ("RABBITMQ_BASE", folder.to_owned()),
            ("RABBITMQ_MNESIA_BASE", folder.join("mnesia")),
            ("RABBITMQ_LOG_BASE", folder.join("logs")),
            ("RABBITMQ_CONFIG_FILE", folder.join("rabbitmq")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", folder.join("plugins")),
            ("RABBITMQ_CONF_ENV_FILE", "/dev/null".into()),
        ] {
            command.env(name, path);
        }
        command.env("RABBITMQ_NODENAME", NODE);
        command.env("RABBITMQ_DIST_PORT", self.ports.nodes.to_string());
        command.env("ERL_EPMD_PORT", self.ports.mapper.to_string());
        // A scheduler that has nothing to do must not keep a processor from its neighbours.
        command.env(
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
            "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none +sbwtdcpu none \
             +sbwtdio none",
        );
        command.current_dir(folder).process_group(0).stdin(Stdio::null());
        Ok(command)
    }

    /// Starts it on its ports with what it has stored. Does nothing if it runs.
    ///
    /// # Errors
    ///
    /// If it does not start; the text has its log.
    pub fn start_again(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log = File::create(self.log_file()).during(|| "open the log".into())?;
        let errors = log.try_clone().during(|| "open the log".into())?;
        let mut command = self.command("rabbitmq-server")?;
        // So the script becomes the server instead of waiting for it.
        command.env("RABBITMQ_ALLOW_INPUT", "1").arg("-noinput");
        let process = command.stdout(log).stderr(errors).spawn();
        let process = process.during(|| "start rabbitmq-server".to_owned())?;
        self.folder.runs(process.id(), EndBy::Term)?;
        self.process = Some(process);
        self.wait_until_ready()
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if log.contains(STARTED) && TcpStream::connect(self.address()).is_ok() {
                return Ok(());
            }
            let ended = match self.process.as_mut() {
                Some(process) => process.try_wait().during(|| "look at the server".to_owned())?,
                None => None,
            };
            if ended.is_some() || Instant::now() >= deadline {
                self.kill()?;
                return Err(Error::failed("starting rabbitmq-server", log));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Stops it cleanly; what it has confirmed in durable queues is stored.
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
        process.wait().during(|| "wait for rabbitmq-server".to_owned())?;
        self.folder.rests()
    }

    /// Lets it be short of memory, whatever it has; then it takes no messages.
    ///
    /// # Errors
    ///
    /// If it does not do as it is told.
    pub fn is_short_of_memory(&self, short: bool) -> Result<()> {
        let share = if short { "0.0000001" } else { "0.4" };
        self.control(&["set_vm_memory_high_watermark", share])
    }

    /// Lets it be short of disk, whatever it has; then it takes no messages, of streams either.
    ///
    /// # Errors
    ///
    /// If it does not do as it is told.
    pub fn is_short_of_disk(&self, short: bool) -> Result<()> {
        let free = if short { "1000000GB" } else { "1MB" };
        self.control(&["set_disk_free_limit", free])
    }

    /// Runs `rabbitmqctl`, which takes a second.
    ///
    /// # Errors
    ///
    /// If it fails; the text has its output.
    pub fn control(&self, arguments: &[&str]) -> Result<()> {
        let mut command = self.command("rabbitmqctl")?;
        command.arg("--quiet").args(arguments);
        programs::finish("rabbitmqctl", &mut command).map(drop)
    }

    /// What clients connect to, with the login of the user that every server has.
    pub fn url(&self) -> String {
        let user = match self.tls {
            Tls::Off => "guest:guest",
            Tls::Mutual => "localhost:p4ss",
        };
        format!("amqp://{user}@127.0.0.1:{}", self.ports.amqp)
    }

    /// What clients connect to by TLS, without a login.
    pub fn tls_url(&self) -> String {
        format!("amqps://localhost:{}", self.ports.amqps)
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

    /// Its address without TLS, for a proxy before it.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.amqp).into()
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// What it has logged since it was started last.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }
}

impl Drop for RabbitMq {
    fn drop(&mut self) {
        // Its folder goes with it.
        let _ = self.kill();
    }
}

/// Erlang's port mapper, which the server would else start by itself and leave behind.
struct Mapper {
    process: Child,
    folder: Folder,
}

impl Mapper {
    /// None if others took the port.
    fn start(port: u16) -> Result<Option<Self>> {
        let folder = Folder::create("epmd", Medium::Disk)?;
        let mut command = programs::as_owner(&programs::find("epmd")?);
        command.args(["-port", &port.to_string(), "-address", "127.0.0.1"]);
        command.current_dir(folder.path()).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().during(|| "start epmd".to_owned())?;
        folder.runs(process.id(), EndBy::Term)?;
        let mut mapper = Self { process, folder };
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                // Somebody else's would have kept ours from listening.
                let ours = mapper.process.try_wait().during(|| "look at epmd".to_owned())?;
                return Ok(ours.is_none().then_some(mapper));
            }
            if mapper.process.try_wait().during(|| "look at epmd".to_owned())?.is_some() {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
        Err(Error::failed("starting epmd", "it does not listen"))
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = self.folder.rests();
    }
}
