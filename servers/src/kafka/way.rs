//! The way to a broker that is reached at another port than its own.
//!
//! What lives here: passing on, telling clients the other port, refusing records, and fencing what
//! a restart made the broker forget. What does not: faults of the network (`proxy.rs`, which stands
//! before this one).
//! Invariant: what passes is unchanged but for the port that the broker tells. It runs on a thread
//! of its own; whichever side of a connection ends first ends the other.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicI16, AtomicI64, AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;

use super::protocol::{self, INVALID_PRODUCER_EPOCH, Produce, Step};
use crate::error::{Result, While};

const HOST: &str = "127.0.0.1";
/// The longest that a broker may take to give a producer its number.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of an answer with such a number, without its length.
const NUMBER_BYTES: usize = 20;
/// No error's code.
const NONE: i16 = 0;

/// Passes on to a broker. It ends, with its connections, when it is dropped.
///
/// ```no_run
/// # use postrider_servers::{kafka::{Kafka, Way}, proxy::Proxy};
/// # fn main() -> postrider_servers::Result<()> {
/// let broker = Kafka::start()?;
/// let way = Way::start(broker.address())?;
/// let proxy = Proxy::start(way.address())?;
/// way.tell(proxy.port()); // clients of the proxy stay behind it
/// # Ok(())
/// # }
/// ```
pub struct Way {
    port: u16,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    broker: SocketAddr,
    /// The port that clients are told.
    told: AtomicU16,
    refusal: AtomicI16,
    /// Producers with transactions and a lower number are fenced.
    fenced: AtomicI64,
}

impl Way {
    /// Listens on a free port of 127.0.0.1, and tells clients that one.
    ///
    /// # Errors
    ///
    /// If it can't listen.
    pub fn start(broker: SocketAddr) -> Result<Self> {
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
        let (told, refusal) = (AtomicU16::new(port), AtomicI16::new(NONE));
        let shared = Arc::new(Shared { broker, told, refusal, fenced: AtomicI64::new(0) });
        let (stop, stopped) = watch::channel(false);
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("way".to_owned())
            .spawn(move || runtime.block_on(accept(listener, own, stopped)))
            .during(|| "start a thread".to_owned())?;
        Ok(Self { port, shared, stop, thread: Some(thread) })
    }

    /// What clients, or a proxy, connect to.
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// From now on clients are told that the broker is at this port.
    pub fn tell(&self, port: u16) {
        self.shared.told.store(port, Ordering::SeqCst);
    }

    /// Answers requests with records by an error's code from now on, and lets none of them through.
    /// `None` ends it.
    pub fn refuse(&self, code: Option<i16>) {
        self.shared.refusal.store(code.unwrap_or(NONE), Ordering::SeqCst);
    }

    /// Fences every producer with transactions that the broker has given a number, as Kafka does
    /// when their transactions' time was over while it was away. To be called after a restart,
    /// before anybody reaches the broker by this way: noida-db keeps no transaction over a restart,
    /// nor who was fenced, but answers that such transactions were committed.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn fence(&self) -> Result<()> {
        let next = self.shared.next_producer().during(|| "ask for a producer".to_owned())?;
        self.shared.fenced.store(next, Ordering::SeqCst);
        Ok(())
    }
}

impl Shared {
    /// The number of a new producer: all that were made before have lower ones.
    fn next_producer(&self) -> io::Result<i64> {
        let mut broker = std::net::TcpStream::connect(self.broker)?;
        broker.set_read_timeout(Some(PATIENCE))?;
        let request = protocol::ask_for_producer();
        broker.write_all(&u32::try_from(request.len()).map_err(io::Error::other)?.to_be_bytes())?;
        broker.write_all(&request)?;
        let mut answer = [0; 4 + NUMBER_BYTES];
        broker.read_exact(&mut answer)?;
        protocol::new_producer(&answer[4..])
    }

    /// What is answered in the broker's place, if anything.
    fn answer(&self, request: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let fenced = self.fenced.load(Ordering::SeqCst);
        if fenced > 0
            && let Some(step) = Step::read(request)?
            && step.producer() < fenced
        {
            return Ok(Some(step.answer(INVALID_PRODUCER_EPOCH)));
        }
        Ok(match self.refusal.load(Ordering::SeqCst) {
            NONE => None,
            code => Produce::read(request).map(|produce| produce.answer(code)),
        })
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, mut stopped: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            _ = stopped.wait_for(|stopped| *stopped) => return,
            accepted = listener.accept() => {
                if let Ok((client, _)) = accepted {
                    connections.spawn(connection(client, Arc::clone(&shared)));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(client: TcpStream, shared: Arc<Shared>) {
    let Ok(broker) = TcpStream::connect(shared.broker).await else { return };
    // Else an answer waits for the acknowledgement of the one before.
    let (_, _) = (client.set_nodelay(true), broker.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_broker, to_broker) = broker.into_split();
    let to_client = Mutex::new(to_client);
    tokio::select! {
        _ = up(from_client, to_broker, &to_client, &shared) => {}
        _ = down(from_broker, &to_client, &shared) => {}
    }
}

async fn up(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    back: &Mutex<OwnedWriteHalf>,
    shared: &Shared,
) -> std::io::Result<()> {
    loop {
        let request = protocol::read(&mut from).await?;
        match shared.answer(&request)? {
            None => protocol::write(&mut to, &request).await?,
            Some(answer) => protocol::write(&mut *back.lock().await, &answer).await?,
        }
    }
}

async fn down(
    mut from: OwnedReadHalf,
    to: &Mutex<OwnedWriteHalf>,
    shared: &Shared,
) -> std::io::Result<()> {
    loop {
        let mut answer = match protocol::read(&mut from).await {
            Ok(answer) => answer,
            Err(_) => return to.lock().await.shutdown().await,
        };
        let own = (HOST, shared.told.load(Ordering::SeqCst));
        protocol::readdress(&mut answer, shared.broker.port(), own);
        protocol::write(&mut *to.lock().await, &answer).await?;
    }
}
