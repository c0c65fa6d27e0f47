//! A TCP proxy that breaks connections as networks do.
//!
//! What lives here: the rules and the two pumps of a connection. What does not: any protocol.
//! Invariant: it runs on a thread and a runtime of its own, so a test's paused clock or blocked
//! runtime does not stop it; a rule holds for open connections too, from the next bytes on. Bytes
//! are never changed or reordered, only held back, dropped or cut.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::error::{Result, While};

const BUFFER_BYTES: usize = 16 * 1024;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What the client sent.
    ToServer,
    /// What the server sent.
    ToClient,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Open,
    /// Held back, in both directions, and delivered later.
    Frozen,
    /// Swallowed, in both directions.
    BlackHole,
}

#[derive(Clone)]
struct Rules {
    upstream: SocketAddr,
    flow: Flow,
    delay: Duration,
    cut_after: Option<(Direction, u64)>,
    /// How often all connections were closed, reset, half-closed.
    closes: u64,
    resets: u64,
    half_closes: u64,
    /// How often open connections lost their way to the server, to the client.
    losses: [u64; 2],
    /// How many connections were closed by `cut_after`.
    cuts: Arc<AtomicU64>,
    /// How often something went to a client after something had gone to its server.
    round_trips: Arc<AtomicU64>,
    stopped: bool,
}

impl Rules {
    /// Whether a connection as old as `born` has lost this way.
    fn has_lost(&self, born: &Self, direction: Direction) -> bool {
        let way = direction as usize;
        self.losses[way] != born.losses[way]
    }
}

/// How a connection ends when it is told to.
enum Ending {
    Close,
    Reset,
}

/// A proxy in front of one server. It ends, with its connections, when it is dropped.
///
/// ```no_run
/// # use postrider_servers::proxy::Proxy;
/// # fn main() -> postrider_servers::Result<()> {
/// let proxy = Proxy::start(([127, 0, 0, 1], 5432).into())?;
/// let _connect_to = proxy.port();
/// proxy.freeze(); // … nothing answers …
/// proxy.thaw();
/// proxy.reset_all();
/// # Ok(())
/// # }
/// ```
pub struct Proxy {
    port: u16,
    rules: watch::Sender<Rules>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and passes everything on to `upstream`.
    ///
    /// # Errors
    ///
    /// If it can't listen.
    pub fn start(upstream: SocketAddr) -> Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = listener.during(|| "listen".to_owned())?;
        let port = listener.local_addr().during(|| "listen".to_owned())?.port();
        listener.set_nonblocking(true).during(|| "listen".to_owned())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.during(|| "start a runtime".to_owned())?;
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener).during(|| "listen".to_owned())?
        };
        let (rules, watched) = watch::channel(Rules {
            upstream,
            flow: Flow::Open,
            delay: Duration::ZERO,
            cut_after: None,
            closes: 0,
            resets: 0,
            half_closes: 0,
            losses: [0; 2],
            cuts: Arc::default(),
            round_trips: Arc::default(),
            stopped: false,
        });
        let thread = std::thread::Builder::new()
            .name("proxy".to_owned())
            .spawn(move || runtime.block_on(accept(listener, watched)))
            .during(|| "start a thread".to_owned())?;
        Ok(Self { port, rules, thread: Some(thread) })
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Holds everything back; connections stay open and new ones are accepted, but wait.
    pub fn freeze(&self) {
        self.rules.send_modify(|rules| rules.flow = Flow::Frozen);
    }

    /// Swallows everything, also the end of a connection; nobody is told.
    pub fn black_hole(&self) {
        self.rules.send_modify(|rules| rules.flow = Flow::BlackHole);
    }

    /// Ends [`Self::freeze`], which delivers what was held back, and [`Self::black_hole`].
    pub fn thaw(&self) {
        self.rules.send_modify(|rules| rules.flow = Flow::Open);
    }

    /// Waits so long before it passes on each piece, in each direction.
    pub fn delay(&self, each: Duration) {
        self.rules.send_modify(|rules| rules.delay = each);
    }

    /// Closes every connection on which so many bytes went that way since it was opened; they are
    /// passed on, the next one is not. `None` ends the rule.
    pub fn cut_after(&self, rule: Option<(Direction, u64)>) {
        self.rules.send_modify(|rules| rules.cut_after = rule);
    }

    /// How many connections [`Self::cut_after`] has closed so far.
    pub fn cuts(&self) -> u64 {
        self.rules.borrow().cuts.load(Ordering::SeqCst)
    }

    /// How often something was passed on to a client after something had been to its server, over
    /// all connections so far: requests that are sent together and answered together are one.
    pub fn round_trips(&self) -> u64 {
        self.rules.borrow().round_trips.load(Ordering::SeqCst)
    }

    /// Closes every open connection now, on both sides.
    pub fn close_all(&self) {
        self.rules.send_modify(|rules| rules.closes += 1);
    }

    /// Resets every open connection now, on both sides (RST).
    pub fn reset_all(&self) {
        self.rules.send_modify(|rules| rules.resets += 1);
    }

    /// Ends the way to the client of every open connection; the way to the server stays open.
    pub fn half_close_all(&self) {
        self.rules.send_modify(|rules| rules.half_closes += 1);
    }

    /// Swallows from now on all that goes that way on the connections that are open, also their
    /// end, as a firewall does that forgot them; new ones pass.
    pub fn lose_all(&self, direction: Direction) {
        self.rules.send_modify(|rules| rules.losses[direction as usize] += 1);
    }

    /// Passes new connections on to another server; open ones stay where they are.
    pub fn switch_upstream(&self, upstream: SocketAddr) {
        self.rules.send_modify(|rules| rules.upstream = upstream);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.rules.send_modify(|rules| rules.stopped = true);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, mut rules: watch::Receiver<Rules>) {
    let mut connections = JoinSet::new();
    loop {
        let others = rules.clone();
        tokio::select! {
            _ = rules.wait_for(|rules| rules.stopped) => return,
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    connections.spawn(connection(client, others));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(mut client: TcpStream, mut rules: watch::Receiver<Rules>) {
    let born = rules.borrow().clone();
    let opened = tokio::select! {
        opened = open(rules.clone()) => opened,
        _ = told_to_end(&mut rules, &born) => return,
    };
    let Ok(mut server) = opened else {
        // As if nobody listened.
        let _ = client.set_zero_linger();
        return;
    };
    let ending = {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let asked = AtomicBool::new(false);
        let up = pump(from_client, to_server, Direction::ToServer, rules.clone(), &born, &asked);
        let down = pump(from_server, to_client, Direction::ToClient, rules.clone(), &born, &asked);
        tokio::select! {
            _ = async { tokio::try_join!(up, down) } => Ending::Close,
            ending = told_to_end(&mut rules, &born) => ending,
        }
    };
    match ending {
        Ending::Close => {}
        Ending::Reset => {
            let _ = client.set_zero_linger();
            let _ = server.set_zero_linger();
        }
    }
}

async fn open(mut rules: watch::Receiver<Rules>) -> io::Result<TcpStream> {
    let upstream = flowing(&mut rules, |flow| flow == Flow::Open).await?.upstream;
    TcpStream::connect(upstream).await
}

/// Waits for a flow that is wanted and returns the rules of that moment.
async fn flowing(
    rules: &mut watch::Receiver<Rules>,
    wanted: impl Fn(Flow) -> bool,
) -> io::Result<Rules> {
    let rules = rules.wait_for(|rules| wanted(rules.flow)).await;
    Ok(rules.map_err(io::Error::other)?.clone())
}

async fn told_to_end(rules: &mut watch::Receiver<Rules>, born: &Rules) -> Ending {
    let changed = |rules: &Rules| rules.closes != born.closes || rules.resets != born.resets;
    match rules.wait_for(changed).await {
        Ok(now) if now.resets != born.resets => Ending::Reset,
        Ok(_) | Err(_) => Ending::Close,
    }
}

/// Passes bytes on one way until they end; an error ends the whole connection.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    direction: Direction,
    mut rules: watch::Receiver<Rules>,
    born: &Rules,
    asked: &AtomicBool,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut passed = 0_u64;
    let mut half = rules.clone();
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => Some(read?),
            _ = half.wait_for(|now| now.half_closes != born.half_closes),
                if direction == Direction::ToClient => None,
        };
        let Some(read) = read else { return to.shutdown().await };
        let delay = rules.borrow().delay;
        tokio::time::sleep(delay).await;
        let now = flowing(&mut rules, |flow| flow != Flow::Frozen).await?;
        if now.flow == Flow::BlackHole || now.has_lost(born, direction) {
            if read == 0 {
                return std::future::pending().await;
            }
            continue;
        }
        if read == 0 {
            return to.shutdown().await;
        }
        let left = match now.cut_after {
            Some((way, bytes)) if way == direction => Some(bytes.saturating_sub(passed)),
            Some(_) | None => None,
        };
        let fits = left.map_or(read, |left| usize::try_from(left).unwrap_or(read).min(read));
        if let Err(error) = to.write_all(&buffer[..fits]).await {
            let other = match direction {
                Direction::ToServer => Direction::ToClient,
                Direction::ToClient => Direction::ToServer,
            };
            // The refusal would have gone the way that is lost.
            if rules.borrow().has_lost(born, other) {
                return std::future::pending().await;
            }
            return Err(error);
        }
        if fits < read {
            now.cuts.fetch_add(1, Ordering::SeqCst);
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        match direction {
            Direction::ToServer => asked.store(true, Ordering::SeqCst),
            Direction::ToClient if asked.swap(false, Ordering::SeqCst) => {
                now.round_trips.fetch_add(1, Ordering::SeqCst);
            }
            Direction::ToClient => {}
        }
        passed += u64::try_from(read).expect("a buffer's length fits into 64 bits");
    }
}
