//! The way to a broker that is reached at another port than its own.
//!
//! What lives here: passing on, telling clients the other port, refusing records. What does not:
//! faults of the network (`proxy.rs`, which stands before this one).
//! Invariant: what passes is unchanged but for the port that the broker tells. It runs on a thread
//! of its own; whichever side of a connection ends first ends the other.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicI16, AtomicU16, Ordering};
use std::thread::JoinHandle;

use tokio::io::AsyncWriteExt;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;

use super::protocol::{self, Produce};
use crate::error::{Result, While};

const HOST: &str = "127.0.0.1";
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
        let shared = Arc::new(Shared { broker, told, refusal });
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
        match (shared.refusal.load(Ordering::SeqCst), Produce::read(&request)) {
            (NONE, _) | (_, None) => protocol::write(&mut to, &request).await?,
            (code, Some(produce)) => {
                protocol::write(&mut *back.lock().await, &produce.answer(code)).await?;
            }
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
