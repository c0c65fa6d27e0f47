//! PgBouncer in transaction mode in front of a PostgreSQL server.
//!
//! What lives here: its configuration, start and end. What does not: the server behind it.
//! Invariant: whoever comes in is let in and becomes the superuser behind it; it listens on
//! 127.0.0.1 alone.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::error::{Error, Result, While};
use crate::folder::{EndBy, Folder, Medium};
use crate::programs;

const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(5);
const PORT_TRIES: usize = 20;

/// A running PgBouncer. It ends with this value.
///
/// ```no_run
/// # use postrider_servers::{pgbouncer::PgBouncer, postgres};
/// # fn main() -> postrider_servers::Result<()> {
/// let database = postgres::shared(postgres::Version::V15)?;
/// let bouncer = PgBouncer::start(&database.url(), &[])?;
/// let _connect_to = bouncer.url(database.name());
/// # Ok(())
/// # }
/// ```
pub struct PgBouncer {
    port: u16,
    process: Child,
    folder: Folder,
}

impl PgBouncer {
    /// Starts one in front of the server of `upstream`, a superuser's URL. `settings` are more
    /// lines for the section `[pgbouncer]`.
    ///
    /// # Errors
    ///
    /// If the program is missing or does not start; the text has its log.
    pub fn start(upstream: &str, settings: &[&str]) -> Result<Self> {
        let program = program()?;
        let upstream = Address::parse(upstream)?;
        for _ in 0..PORT_TRIES {
            let port = programs::free_port()?;
            let folder = Folder::create("pgbouncer", Medium::Memory)?;
            let file = folder.path().join("pgbouncer.ini");
            fs::write(&file, configuration(&upstream, port, settings))
                .during(|| "write pgbouncer.ini".to_owned())?;
            programs::give_to_owner(&file)?;
            let log = File::create(folder.path().join("log")).during(|| "open the log".into())?;
            let mut command = programs::as_owner(&program);
            command.arg(&file).current_dir(folder.path()).process_group(0);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            let process = command.spawn().during(|| "start pgbouncer".to_owned())?;
            folder.runs(process.id(), EndBy::Term)?;
            let mut bouncer = Self { port, process, folder };
            match bouncer.wait_until_it_listens() {
                Err(Error::Failed { output, .. }) if output.contains("in use") => {}
                listens => return listens.map(|()| bouncer),
            }
        }
        Err(Error::failed("starting pgbouncer", "others took every port that was tried"))
    }

    fn wait_until_it_listens(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let own = format!("listening on 127.0.0.1:{}", self.port);
        loop {
            let log = self.log();
            if log.contains(&own) && TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok() {
                return Ok(());
            }
            let ended = self.process.try_wait().during(|| "look at pgbouncer".to_owned())?;
            if ended.is_some() || Instant::now() >= deadline || log.contains("in use") {
                return Err(Error::failed("starting pgbouncer", self.log()));
            }
            std::thread::sleep(POLL);
        }
    }

    /// The address of a database through it.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        // A kill is enough: it has no state. Then nothing is left for the keeper but the folder.
        let _ = self.process.kill();
        let _ = self.folder.rests();
        let _ = self.process.wait();
    }
}

/// Where the program is.
///
/// # Errors
///
/// If it is not installed; the text says how to install it.
pub fn program() -> Result<PathBuf> {
    programs::find("pgbouncer")
}

fn configuration(upstream: &Address, port: u16, settings: &[&str]) -> String {
    let Address { user, host, port: behind, .. } = upstream;
    let password =
        upstream.password.as_ref().map(|word| format!(" password={word}")).unwrap_or_default();
    // The one start-up parameter that drivers send and that it refuses unless told otherwise.
    format!(
        "[databases]\n* = host={host} port={behind} user={user}{password}\n[pgbouncer]\n\
         listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
         pool_mode = transaction\ndefault_pool_size = 5\nmax_client_conn = 200\n\
         ignore_startup_parameters = extra_float_digits\n{}\n",
        settings.join("\n")
    )
}
