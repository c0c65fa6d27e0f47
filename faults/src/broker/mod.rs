//! The sink's end of every broker: a real server behind a proxy that breaks the way to it.
//!
//! What lives here: outages, what a fault leaves in doubt, and what arrived. What does not: what is
//! special to a broker (`kafka.rs`, `nats.rs` …), servers and the proxy (`servers/`).
//! Invariant: an event counts as delivered once the server holds it, whatever its sender heard. A
//! server that syncs what it confirms may be killed as well as stopped. Nothing here waits for a
//! server that starts: that has a thread of its own, so that deaths and take-overs are seen.
//!
//! ```text
//! relays ──▶ proxy (cuts, resets, delays, loses answers) ──▶ server (stops, dies, refuses)
//!                                                               ▲
//!                     this runner's own client ─────────────────┘
//! ```

mod doubt;
mod kafka;
mod nats;
mod rabbitmq;
mod rabbitmq_stream;
mod redis;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_conformance::sink::Delivered;
use postrider_servers::proxy::{Direction, Proxy};

use crate::deliveries::{Arrived, Delivery, Mark, Place};
use crate::schedule::{Outage, Schedule, SinkKind, SourceKind};
use doubt::Doubts;

/// Nobody listens there.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
/// The longest that a server may take to answer this runner itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server that has just started holds what it says twice, with so much time between.
const COUNTED_AGAIN_AFTER: Duration = Duration::from_millis(50);
/// A server has dealt by then with what its clients sent before they were sent away.
const LAST_REQUESTS: Duration = Duration::from_millis(200);

/// What a server takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// Everything.
    All,
    /// All but large events, which it refuses for good.
    Small,
    /// Nothing: it is full, or has no place for it.
    Nothing,
}

/// What the judgement and the faults have to know of a broker.
#[derive(Debug, Clone, Copy)]
struct Nature {
    /// Whether it drops repetitions, so that none may stand in it twice.
    drops_repetitions: bool,
    /// Events that relays may have under way to it, together.
    under_way: u64,
    /// What the proxy waits before each piece while the broker is slow.
    slow: Duration,
    /// Whether it may confirm, while it stops, what it does not keep: its clients are sent away
    /// first then.
    forgets_at_its_end: bool,
}

/// A server, and this runner's own way to it.
trait Server: Send {
    /// Where it listens.
    fn address(&self) -> SocketAddr;

    /// What is to be known of it.
    fn nature(&self) -> Nature;

    /// The settings of a sink that reaches it through this port of the loopback interface.
    fn settings(&self, port: u16) -> String;

    /// More of them, with which a schedule's faults show soon.
    fn hurry(&self) -> &'static str;

    /// Ends it in order.
    fn stop(&mut self) -> Result<()>;

    /// Ends it as a crash does.
    fn kill(&mut self) -> Result<()>;

    /// Starts it with what it has stored, unless it runs.
    fn start_again(&mut self) -> Result<()>;

    /// From now on it takes this.
    fn take(&mut self, what: Takes) -> Result<()>;

    /// How many events it holds.
    fn count(&mut self) -> Result<u64>;

    /// What it holds, in its order.
    fn held(&mut self) -> Result<Vec<Result<Delivered>>>;
}

/// Something that the server's own thread does.
enum Job {
    Stop,
    Kill,
    TakeNothing,
    Mend,
    Heal(Sender<()>),
}

/// A running broker.
pub struct Broker {
    shared: Arc<Shared>,
    settings: String,
    nature: Nature,
    relays: usize,
    /// How often it was ended or slowed down; the ways take turns, in each schedule from another.
    turns: [AtomicU64; 2],
    /// Ends the thread when it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    server: Mutex<Box<dyn Server>>,
    proxy: Proxy,
    usually: Mutex<Takes>,
    drops_repetitions: bool,
    forgets_at_its_end: bool,
    doubts: Mutex<Doubts>,
    /// The most events that it was seen to hold: nothing takes any away before the end, and a
    /// server that has just started may not have counted all of them.
    most: AtomicU64,
    failed: Mutex<Option<anyhow::Error>>,
}

fn lock<T: ?Sized>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Broker {
    /// Starts the schedule's broker on free ports of the loopback interface.
    ///
    /// # Errors
    /// When the server is not installed or does not start; when the sink is none.
    pub fn start(schedule: &Schedule, sink: SinkKind) -> Result<Self> {
        let usually = if schedule.moods.refused_one_in > 0 { Takes::Small } else { Takes::All };
        let mut server: Box<dyn Server> = match sink {
            SinkKind::Nats => Box::new(nats::Stream::start()?),
            SinkKind::Rabbitmq if schedule.index % 2 == 1 => {
                Box::new(rabbitmq_stream::Stream::start(usually)?)
            }
            SinkKind::Rabbitmq => Box::new(rabbitmq::Queue::start(schedule, usually)?),
            SinkKind::Redis => Box::new(redis::Stream::start(schedule.index)?),
            SinkKind::Kafka => Box::new(kafka::Topic::start(schedule)?),
            SinkKind::Webhook | SinkKind::Jsonl | SinkKind::Servicebus => {
                anyhow::bail!("{sink} is no broker of this kind")
            }
        };
        server.take(usually)?;
        let broker = Self::before(server, usually, schedule)?;
        // More than the largest event has, so that each comes through some time.
        let cut_after = 2 * schedule.largest_payload() as u64;
        broker.shared.proxy.cut_after(Some((Direction::ToServer, cut_after)));
        Ok(broker)
    }

    /// Starts one whose way is not disturbed until somebody asks for it, with the settings that
    /// users have.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn calm(sink: SinkKind) -> Result<Self> {
        let mut schedule = Schedule::derive(0, 0, SourceKind::Sqlite, sink);
        schedule.moods.refused_one_in = 0;
        let mut broker = Self::start(&schedule, sink)?;
        broker.shared.proxy.cut_after(None);
        broker.settings = lock(&broker.shared.server).settings(broker.shared.proxy.port());
        Ok(broker)
    }

    /// A proxy and a thread before a server.
    fn before(server: Box<dyn Server>, usually: Takes, schedule: &Schedule) -> Result<Self> {
        let proxy = Proxy::start(server.address()).context("start a proxy")?;
        let settings = server.settings(proxy.port()) + server.hurry();
        let nature = server.nature();
        let shared = Arc::new(Shared {
            server: Mutex::new(server),
            proxy,
            usually: Mutex::new(usually),
            drops_repetitions: nature.drops_repetitions,
            forgets_at_its_end: nature.forgets_at_its_end,
            doubts: Mutex::new(Doubts::new(nature.under_way)),
            most: AtomicU64::new(0),
            failed: Mutex::default(),
        });
        let (jobs, todo) = channel();
        let thread = std::thread::Builder::new().name("broker".to_owned());
        let own = Arc::clone(&shared);
        let thread = thread.spawn(move || own.work(&todo)).context("start a thread")?;
        let turns = [schedule.index, schedule.index].map(AtomicU64::new);
        let (jobs, thread, relays) = (Some(jobs), Some(thread), schedule.relays);
        Ok(Self { shared, settings, nature, relays, turns, jobs, thread })
    }

    /// The sink's settings.
    pub fn settings(&self) -> &str {
        &self.settings
    }

    fn post(&self, job: Job) -> Result<()> {
        let jobs = self.jobs.as_ref().context("the broker's thread runs")?;
        jobs.send(job).ok().context("give the broker's thread work")
    }

    /// Whether it is this kind's other turn.
    fn turn(&self, kind: usize) -> bool {
        self.turns[kind].fetch_add(1, Ordering::Relaxed) % 2 == 1
    }

    /// Begins or ends an outage.
    ///
    /// # Errors
    /// Never for what a server does: that is told at the healing.
    pub fn set_outage(&self, outage: Option<Outage>) -> Result<()> {
        let proxy = &self.shared.proxy;
        let mut doubts = lock(&self.shared.doubts);
        match outage {
            None => return self.post(Job::Mend),
            Some(Outage::ServerError) => {
                return self.post(if self.turn(0) { Job::Kill } else { Job::Stop });
            }
            Some(Outage::Throttled) if self.turn(1) => return self.post(Job::TakeNothing),
            Some(Outage::Throttled) => {
                doubts.last();
                proxy.delay(self.nature.slow);
            }
            Some(Outage::Silent) => {
                // An event may be on a connection of each, once the next has taken its lease over.
                (0..self.relays).for_each(|_| doubts.begin());
                proxy.lose_all(Direction::ToClient);
            }
            Some(Outage::Refused) => {
                doubts.begin();
                proxy.switch_upstream(NOWHERE);
                proxy.reset_all();
            }
        }
        Ok(())
    }

    /// Notes which events the faults since the last look left in doubt.
    pub fn look(&self) {
        if self.nature.drops_repetitions {
            return;
        }
        let mut doubts = lock(&self.shared.doubts);
        doubts.see_cuts(self.shared.proxy.cuts());
        if doubts.are_open()
            && let Some(count) = self.shared.count()
        {
            doubts.settle(count);
        }
    }

    /// This moment; none while the server can't tell, which is while it takes nothing.
    pub fn mark(&self) -> Option<Mark> {
        self.shared.count().map(Mark::Count)
    }

    /// How many events the server holds.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn held_now(&self) -> Result<u64> {
        lock(&self.shared.server).count()
    }

    /// From now on everything is taken and confirmed.
    ///
    /// # Errors
    /// When the server did not end or start at some time.
    pub fn heal(&self) -> Result<()> {
        let (tell, told) = channel();
        self.post(Job::Heal(tell))?;
        // It fails only if the thread has ended, and that has told why.
        let _ = told.recv();
        match lock(&self.shared.failed).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Everything that the server holds.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn arrived(&self) -> Result<Arrived> {
        let drops_repetitions = self.nature.drops_repetitions;
        let mut arrived = Arrived { drops_repetitions, ..Arrived::default() };
        let held = lock(&self.shared.server).held()?;
        for (at, message) in (0..).zip(held) {
            match message {
                Ok(message) => {
                    let place = Place::Stored { at };
                    arrived.deliveries.push(Delivery { message, place });
                }
                Err(error) => arrived.unreadable.push(format!("{error:#}")),
            }
        }
        arrived.withheld = lock(&self.shared.doubts).withheld(&arrived.deliveries);
        Ok(arrived)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// None while the server is away or being changed.
    fn count(&self) -> Option<u64> {
        let now = self.server.try_lock().ok()?.count().ok()?;
        Some(self.most(now))
    }

    fn most(&self, now: u64) -> u64 {
        self.most.fetch_max(now, Ordering::SeqCst).max(now)
    }

    fn work(&self, todo: &Receiver<Job>) {
        while let Ok(job) = todo.recv() {
            let done = match &job {
                Job::Stop => self.end(|server| server.stop()).context("stop the broker"),
                Job::Kill => self.end(|server| server.kill()).context("kill the broker"),
                Job::TakeNothing => self.take_nothing(),
                Job::Mend => self.mend(),
                Job::Heal(_) => self.heal(),
            };
            if let Err(error) = done {
                lock(&self.failed).get_or_insert(error);
            }
            if let Job::Heal(tell) = job {
                // Who does not wait needs no answer.
                let _ = tell.send(());
            }
        }
    }

    /// Ends it. Whatever it had confirmed to nobody is in doubt; it tells once it is there again,
    /// before anybody else reaches it: what is published then comes behind what is in doubt.
    fn end(&self, how: impl Fn(&mut dyn Server) -> Result<()>) -> Result<()> {
        let mut server = lock(&self.server);
        lock(&self.doubts).begin();
        if self.forgets_at_its_end {
            self.proxy.switch_upstream(NOWHERE);
            self.proxy.reset_all();
            std::thread::sleep(LAST_REQUESTS);
        }
        let ended = how(server.as_mut());
        self.proxy.switch_upstream(NOWHERE);
        ended
    }

    /// A server that is away takes nothing as it is.
    fn take_nothing(&self) -> Result<()> {
        let mut server = lock(&self.server);
        match server.count() {
            Ok(_) => server.take(Takes::Nothing).context("let the broker take nothing"),
            Err(_) => Ok(()),
        }
    }

    fn mend(&self) -> Result<()> {
        let address = {
            let mut server = lock(&self.server);
            server.start_again().context("start the broker again")?;
            let usually = *lock(&self.usually);
            server.take(usually).context("let the broker take events again")?;
            if !self.drops_repetitions && lock(&self.doubts).are_open() {
                let count = self.settled_count(server.as_mut())?;
                lock(&self.doubts).settle(count);
            }
            server.address()
        };
        self.proxy.delay(Duration::ZERO);
        self.proxy.switch_upstream(address);
        lock(&self.doubts).end_last();
        Ok(())
    }

    /// What it holds. One that has just started may not have counted all of it yet.
    fn settled_count(&self, server: &mut dyn Server) -> Result<u64> {
        let mut count = self.most(server.count()?);
        loop {
            std::thread::sleep(COUNTED_AGAIN_AFTER);
            let now = self.most(server.count()?);
            if now == count {
                return Ok(count);
            }
            count = now;
        }
    }

    fn heal(&self) -> Result<()> {
        let refused = std::mem::replace(&mut *lock(&self.usually), Takes::All) == Takes::Small;
        self.proxy.cut_after(None);
        self.mend()?;
        if refused {
            // A limit may be told to each connection once.
            lock(&self.doubts).begin();
            self.proxy.reset_all();
            let mut server = lock(&self.server);
            if !self.drops_repetitions {
                let count = self.most(server.count().context("count after the healing")?);
                lock(&self.doubts).settle(count);
            }
        }
        Ok(())
    }
}
