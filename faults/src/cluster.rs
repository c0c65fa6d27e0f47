//! A schedule's PostgreSQL server, and the ways to it.
//!
//! What lives here: copying a prepared server, proxies and a pooler in front of it, what is done to
//! all of them. What does not: what the database holds (`world/postgres.rs`), the replication slot
//! (`cluster/slot.rs`).
//! Invariant: relays and writers come in through a proxy of theirs, whatever stands behind it now;
//! what takes long is done by threads, which healing waits for.

mod slot;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use postrider_servers::pgbouncer::PgBouncer;
use postrider_servers::postgres::{Options, Server, Shutdown, Version};
use postrider_servers::proxy::{Direction, Proxy};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::schedule::{PostgresPlan, Schedule, ServerEnd, Side, WireFault};
use crate::watch::Watch;
use crate::world::fill;

/// The application's database.
pub const DATABASE: &str = "app";
/// The user behind everything.
const USER: &str = "postgres";
/// Names of sessions begin with it, save for the harness's own.
pub const SESSIONS: &str = "fault-";
/// Longest that SQL is tried again while a server is away.
const PATIENCE: Duration = Duration::from_secs(20);
const TRY_EVERY: Duration = Duration::from_millis(50);
/// Nobody listens there.
const NOBODY: ([u8; 4], u16) = ([127, 0, 0, 1], 1);
/// A deadlock is found soon; a client that vanished in a transaction is given up within a schedule.
const SETTINGS: [&str; 2] =
    ["deadlock_timeout = 100ms", "idle_in_transaction_session_timeout = 6s"];
/// A reader of the log that vanished is given up within a schedule.
const WAL_SETTINGS: [&str; 1] = ["wal_sender_timeout = 4s"];
/// An idle server takes about 80 MB of it.
const SMALL_DISK: &std::ffi::CStr = c"size=200m";
const FILLER: &str = "filler";
/// Room for all sessions of a schedule, and a fresh try a second after the server was away.
const POOLER_SETTINGS: [&str; 2] = ["default_pool_size = 30", "server_login_retry = 1"];

/// Servers that are copied rather than made anew for each schedule.
#[derive(Default)]
pub struct Templates {
    /// By version, durability, and whether the log is read.
    made: Mutex<HashMap<(u32, bool, bool), Arc<Server>>>,
}

impl Templates {
    /// A running server as planned, with an empty database.
    fn copy(&self, plan: PostgresPlan) -> Result<Server> {
        let template = {
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            let which = (plan.version, plan.durable, plan.wal);
            match made.get(&which) {
                Some(template) => Arc::clone(template),
                None => {
                    let template = Arc::new(template(plan)?);
                    made.insert(which, Arc::clone(&template));
                    template
                }
            }
        };
        template.copied_files().context("copy a server")
    }
}

fn template(plan: PostgresPlan) -> Result<Server> {
    let version = if plan.version == 15 { Version::V15 } else { Version::V18 };
    let mut options = Options::new(version);
    let of_log = if plan.wal { &WAL_SETTINGS[..] } else { &[] };
    for setting in SETTINGS.iter().chain(of_log) {
        options = options.setting(*setting);
    }
    if plan.durable {
        options = options.durable();
    }
    let server = options.launch().context("start a server")?;
    server.psql("postgres", &format!("create database {DATABASE}")).context("make a database")?;
    server.stop(Shutdown::Fast).context("stop a server")?;
    Ok(server)
}

/// Moves a server's data to a disk of its own that can be filled.
fn onto_small_disk(server: &Server) -> Result<()> {
    server.stop(Shutdown::Fast).context("stop a server")?;
    let data = server.data();
    let before = data.with_file_name("data-before");
    std::fs::rename(&data, &before).context("move the data")?;
    std::fs::create_dir(&data).context("make the disk's folder")?;
    mount("tmpfs", &data, "tmpfs", MountFlags::empty(), SMALL_DISK)
        .context("mount a small disk: run in a mount namespace of one's own")?;
    let moved = Command::new("cp").arg("-a").arg(before.join(".")).arg(&data).status();
    anyhow::ensure!(moved.context("start cp")?.success(), "the data could not be moved");
    std::fs::remove_dir_all(before).context("remove the data's old place")?;
    server.start().context("start the server on the small disk")
}

type Job = JoinHandle<Result<()>>;

/// A server and the ways to it.
pub struct Cluster {
    // Dropped first: fields drop in this order.
    watch: Option<Watch>,
    server: Arc<Server>,
    bouncer: Option<PgBouncer>,
    relays: Vec<Proxy>,
    writers: Proxy,
    restart: Option<Job>,
    jobs: Vec<Job>,
    copy: Option<JoinHandle<Result<Server>>>,
    /// Where a disk is mounted that must go before the server's folder does.
    disk: Option<PathBuf>,
}

fn address(server: &Server) -> SocketAddr {
    ([127, 0, 0, 1], server.port()).into()
}

impl Cluster {
    /// Starts what the schedule needs.
    ///
    /// # Errors
    /// When a program is missing or does not start.
    pub fn start(schedule: &Schedule, templates: &Templates) -> Result<Self> {
        let plan = schedule.postgres.context("a schedule on PostgreSQL plans its server")?;
        let server = templates.copy(plan)?;
        let disk = plan.small_disk.then(|| server.data());
        if plan.small_disk {
            onto_small_disk(&server)?;
        }
        let bouncer = match plan.pooler {
            true => Some(
                PgBouncer::start(&server.url(USER, DATABASE), &POOLER_SETTINGS)
                    .context("start PgBouncer")?,
            ),
            false => None,
        };
        let port = bouncer.as_ref().map_or(server.port(), PgBouncer::port);
        let upstream: SocketAddr = ([127, 0, 0, 1], port).into();
        let proxy = || Proxy::start(upstream).context("start a proxy");
        Ok(Self {
            watch: None,
            relays: (0..schedule.relays).map(|_| proxy()).collect::<Result<_>>()?,
            writers: proxy()?,
            server: Arc::new(server),
            bouncer,
            restart: None,
            jobs: Vec::new(),
            copy: None,
            disk,
        })
    }

    /// The address that nothing stands in front of, for the harness.
    pub fn direct_url(&self) -> String {
        direct_url(&self.server)
    }

    /// The address of each relay's way.
    pub fn relay_urls(&self) -> Vec<String> {
        let slots = self.relays.iter().enumerate();
        slots.map(|(slot, proxy)| url(proxy, &relay_sessions(slot))).collect()
    }

    /// The address of the writers' way.
    pub fn writer_url(&self) -> String {
        url(&self.writers, &format!("{SESSIONS}writer"))
    }

    /// The server that is in place now.
    pub fn server(&self) -> Arc<Server> {
        Arc::clone(&self.server)
    }

    fn upstream(&self) -> SocketAddr {
        let port = self.bouncer.as_ref().map_or(self.server.port(), PgBouncer::port);
        ([127, 0, 0, 1], port).into()
    }

    fn ways(&self, whose: Side) -> Vec<&Proxy> {
        match whose {
            Side::Relay(slot) => vec![&self.relays[slot]],
            Side::Relays => self.relays.iter().collect(),
            Side::Writers => vec![&self.writers],
            Side::All => self.relays.iter().chain([&self.writers]).collect(),
        }
    }

    /// Disturbs a way.
    pub fn disturb(&self, whose: Side, how: WireFault) {
        for way in self.ways(whose) {
            match how {
                WireFault::Close => way.close_all(),
                WireFault::Reset => way.reset_all(),
                WireFault::CutAfter(bytes) => way.cut_after(Some((Direction::ToClient, bytes))),
                WireFault::BlackHole => way.black_hole(),
                WireFault::Freeze => way.freeze(),
                WireFault::Delay(milliseconds) => way.delay(Duration::from_millis(milliseconds)),
                WireFault::Refuse => {
                    way.switch_upstream(NOBODY.into());
                    way.reset_all();
                }
            }
        }
    }

    /// Puts a way right again.
    pub fn restore(&self, whose: Side, how: WireFault) {
        for way in self.ways(whose) {
            way.thaw();
            way.delay(Duration::ZERO);
            way.cut_after(None);
            way.switch_upstream(self.upstream());
            if how == WireFault::BlackHole {
                // The ends of connections were swallowed, too.
                way.close_all();
            }
        }
    }

    /// Ends the server and starts it again; says whether it does, for it may be at that already.
    pub fn restart(&mut self, how: ServerEnd, down: Duration) -> bool {
        if self.restart.as_ref().is_some_and(|job| !job.is_finished()) {
            return false;
        }
        let server = self.server();
        self.jobs.extend(self.restart.take());
        self.restart = Some(std::thread::spawn(move || {
            match how {
                ServerEnd::Fast => server.stop(Shutdown::Fast),
                ServerEnd::Immediate => server.stop(Shutdown::Immediate),
                ServerEnd::Kill => server.kill(),
            }
            .context("end the server")?;
            std::thread::sleep(down);
            server.start().context("start the server again")
        }));
        true
    }

    /// Runs SQL, again and again while the server can't.
    fn insist(&mut self, sql: Vec<(String, Duration)>) {
        let server = self.server();
        self.jobs.push(std::thread::spawn(move || {
            for (sql, pause) in sql {
                insisted(&server, &sql)?;
                std::thread::sleep(pause);
            }
            Ok(())
        }));
    }

    /// Ends sessions.
    pub fn terminate(&mut self, whose: Side) {
        let name = match whose {
            Side::Relay(slot) => relay_sessions(slot),
            Side::Relays => format!("{SESSIONS}relay-%"),
            Side::Writers => format!("{SESSIONS}writer"),
            Side::All => format!("{SESSIONS}%"),
        };
        self.insist(vec![(terminate_sql(&name), Duration::ZERO)]);
    }

    /// Lets the server take no writes for a while.
    pub fn read_only(&mut self, length: Duration) {
        let set = |value: &str| format!("alter system set default_transaction_read_only = {value}");
        let reload = || "select pg_reload_conf()".to_owned();
        let steps = [(set("on"), Duration::ZERO), (reload(), length)];
        let back = [(set("off"), Duration::ZERO), (reload(), Duration::ZERO)];
        self.insist(steps.into_iter().chain(back).collect());
    }

    /// Fills the server's disk to the last byte.
    ///
    /// # Errors
    /// When it has none of its own.
    pub fn fill_disk(&self) -> Result<()> {
        let disk = self.disk.as_ref().context("this schedule's server has no small disk")?;
        fill(&disk.join(FILLER))
    }

    /// Makes room again, and lets whoever minds servers look after this one.
    ///
    /// # Errors
    /// When the disk was not filled.
    pub fn free_disk(&mut self) -> Result<()> {
        let disk = self.disk.as_ref().context("this schedule's server has no small disk")?;
        std::fs::remove_file(disk.join(FILLER)).context("free the disk")?;
        let server = self.server();
        self.jobs.push(std::thread::spawn(move || {
            let until = Instant::now() + PATIENCE;
            loop {
                // It may still be about to end, or to recover.
                let answers = server.start().and_then(|()| server.psql(DATABASE, "select 1"));
                match answers {
                    Ok(_) => return Ok(()),
                    Err(error) if Instant::now() > until => {
                        return Err(error).context("start the server that had no room");
                    }
                    Err(_) => std::thread::sleep(TRY_EVERY),
                }
            }
        }));
        Ok(())
    }

    /// Doubles the partitions.
    pub fn raise_partitions(&mut self) {
        // A read-only server refuses it unless told otherwise by the session itself.
        let sql = "set default_transaction_read_only = off; select postrider.outbox_raise(
            (select 2 * max(partitions) from postrider.generation))";
        self.insist(vec![(sql.to_owned(), Duration::ZERO)]);
    }

    /// Begins to make a copy that is promoted once it stands.
    pub fn begin_copy(&mut self) {
        let server = self.server();
        self.copy = Some(std::thread::spawn(move || {
            let copy = server.standby().context("copy the server")?;
            copy.promote().context("promote the copy")?;
            Ok(copy)
        }));
    }

    /// Whether the copy is promoted.
    pub fn copy_stands(&self) -> bool {
        self.copy.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// The promoted copy.
    ///
    /// # Errors
    /// When it could not be made.
    pub fn take_copy(&mut self) -> Result<Server> {
        joined(self.copy.take().context("a copy was begun")?)
    }

    /// Puts another server in place, and returns the one that stood there, which nobody reaches any
    /// more.
    ///
    /// # Errors
    /// When its sessions do not end.
    pub fn replace(&mut self, copy: Server) -> Result<Arc<Server>> {
        let old = std::mem::replace(&mut self.server, Arc::new(copy));
        if let Some(watch) = &self.watch {
            watch.turn_to(self.server());
        }
        for way in self.ways(Side::All) {
            way.switch_upstream(address(&self.server));
            way.close_all();
        }
        let sessions = format!("{SESSIONS}%");
        let until = Instant::now() + PATIENCE;
        while old.psql(DATABASE, &terminate_sql(&sessions)).context("end the sessions")? != "0" {
            anyhow::ensure!(Instant::now() < until, "sessions of the replaced server go on");
            std::thread::sleep(TRY_EVERY);
        }
        Ok(old)
    }

    /// Waits for what was begun, and puts every way right.
    ///
    /// # Errors
    /// What a thread met.
    pub fn heal(&mut self) -> Result<()> {
        for job in self.restart.take().into_iter().chain(self.jobs.drain(..)) {
            joined(job)?;
        }
        self.restore(Side::All, WireFault::Close);
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.watch = None;
        for job in self.restart.take().into_iter().chain(self.jobs.drain(..)) {
            // What it met would have been told by healing.
            let _ = joined(job);
        }
        let _ = self.copy.take().map(joined);
        if let Some(disk) = &self.disk {
            let _ = self.server.stop(Shutdown::Immediate);
            // What can't be unmounted goes with this process's mount namespace.
            let _ = unmount(disk, UnmountFlags::DETACH);
        }
    }
}

/// Runs SQL, again and again while the server can't, and returns the rows.
fn insisted(server: &Server, sql: &str) -> Result<String> {
    let until = Instant::now() + PATIENCE;
    loop {
        match server.psql(DATABASE, sql) {
            Ok(rows) => return Ok(rows),
            Err(error) if Instant::now() > until => {
                return Err(error).context(format!("run {sql:?}"));
            }
            Err(_) => std::thread::sleep(TRY_EVERY),
        }
    }
}

fn joined<T>(job: JoinHandle<Result<T>>) -> Result<T> {
    job.join().map_err(|_| anyhow::anyhow!("a thread that disturbs the server panicked"))?
}

/// Ends sessions by their name and says how many there were.
fn terminate_sql(name: &str) -> String {
    format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity \
         where application_name like '{name}'"
    )
}

fn relay_sessions(slot: usize) -> String {
    format!("{SESSIONS}relay-{slot}")
}

fn url(way: &Proxy, name: &str) -> String {
    let port = way.port();
    format!(
        "postgres://{USER}@127.0.0.1:{port}/{DATABASE}?application_name={name}&connect_timeout=2"
    )
}

/// The harness's own way to a server, on which it may write at any time.
pub fn direct_url(server: &Server) -> String {
    let options = "options=-c%20default_transaction_read_only%3Doff&connect_timeout=2";
    format!("{}?application_name=harness&{options}", server.url(USER, DATABASE))
}
