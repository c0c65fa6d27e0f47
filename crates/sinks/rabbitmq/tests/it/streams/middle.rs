//! A man in the middle who knows a little of the stream protocol: he holds, loses and breaks off.
//!
//! What lives here: passing frames on. What does not: a server; the real one stands behind him.
//! Invariant: what he does not spoil goes through unchanged, and what he holds back goes to the
//! server once he lets it go, also when whoever sent it is gone.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use postrider_conformance::sink::ReceiverFault;
use postrider_core::EventId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Keys of the frames that he knows.
const PUBLISH: [u8; 2] = [0, 2];
const CONFIRM: [u8; 2] = [0, 3];
const DELIVER: [u8; 2] = [0, 8];
const TUNE: [u8; 2] = [0, 0x14];
const HEARTBEAT: [u8; 2] = [0, 0x17];
const QUERY_SEQUENCE: [u8; 2] = [0x80, 5];

/// What he is told to do.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) next: Option<(u32, ReceiverFault)>,
    pub(crate) waiting: bool,
    /// Publishing ids that passed by, each time.
    pub(crate) ids: Vec<u64>,
    /// Events that passed by in a frame of messages: each frame's.
    pub(crate) frames: Vec<usize>,
    pub(crate) poisoned: HashSet<EventId>,
    /// He breaks off instead of telling the last id, so often.
    pub(crate) forgetful: u32,
    pub(crate) connections: usize,
    /// Of them, those that are open, the most that ever were, and those that have ended.
    pub(crate) open: usize,
    pub(crate) most_open: usize,
    pub(crate) ended: usize,
    /// What the server seems to propose, in seconds.
    pub(crate) heartbeat_s: Option<u32>,
    /// The sink's signs of life.
    pub(crate) heartbeats: usize,
    /// The first so many connections fell silent: they stay open, and nothing passes any more.
    pub(crate) silenced: usize,
    /// Bytes of the largest frame with a chunk.
    pub(crate) largest_chunk: usize,
}

pub(crate) struct Middle {
    port: u16,
    orders: Arc<Mutex<Orders>>,
    held: watch::Sender<bool>,
    _connections: JoinSet<()>,
}

impl Middle {
    /// Before a server, at this address.
    pub(crate) async fn before(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let orders: Arc<Mutex<Orders>> = Arc::default();
        let (held, holding) = watch::channel(false);
        let (shared, server) = (Arc::clone(&orders), server.to_owned());
        let mut connections = JoinSet::new();
        connections.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let number = {
                    let mut orders = shared.lock().expect("not poisoned");
                    orders.connections += 1;
                    orders.open += 1;
                    orders.most_open = orders.most_open.max(orders.open);
                    orders.connections
                };
                let (orders, held) = (Arc::clone(&shared), holding.clone());
                let server = server.clone();
                open.spawn(async move {
                    connection(client, server, number, &orders, held).await;
                    let mut orders = orders.lock().expect("not poisoned");
                    orders.open -= 1;
                    orders.ended += 1;
                });
            }
        });
        Self { port, orders, held, _connections: connections }
    }

    pub(crate) fn url(&self) -> String {
        format!("rabbitmq-stream://127.0.0.1:{}", self.port)
    }

    pub(crate) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().expect("not poisoned")
    }

    /// From now on frames with messages wait, until they are let go.
    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Waits until so many passed by.
    pub(crate) async fn until_passed(&self, frames: usize) {
        while self.orders().frames.len() < frames {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// Waits until one does.
    pub(crate) async fn until_waiting(&self) {
        while !self.orders().waiting {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
}

async fn connection(
    client: TcpStream,
    server: String,
    number: usize,
    orders: &Mutex<Orders>,
    held: watch::Receiver<bool>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let loses = AtomicBool::new(false);
    // Whichever ends first ends the connection, on both sides.
    tokio::select! {
        _ = up(from_client, to_server, number, orders, held, &loses) => {}
        _ = down(from_server, to_client, number, orders, &loses) => {}
    }
}

/// A whole frame, with its size before it.
async fn frame(from: &mut OwnedReadHalf) -> io::Result<Vec<u8>> {
    let size = from.read_u32().await?;
    let mut frame = size.to_be_bytes().to_vec();
    frame.resize(4 + size as usize, 0);
    from.read_exact(&mut frame[4..]).await?;
    Ok(frame)
}

async fn up(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    number: usize,
    orders: &Mutex<Orders>,
    mut held: watch::Receiver<bool>,
    loses: &AtomicBool,
) -> io::Result<()> {
    loop {
        let frame = frame(&mut from).await?;
        if orders.lock().expect("not poisoned").silenced >= number {
            continue;
        }
        if frame[4..6] == HEARTBEAT {
            orders.lock().expect("not poisoned").heartbeats += 1;
        }
        if frame[4..6] == PUBLISH {
            if *held.borrow() {
                orders.lock().expect("not poisoned").waiting = true;
                held.wait_for(|held| !held).await.map_err(io::Error::other)?;
            }
            match look(&frame, &mut orders.lock().expect("not poisoned")) {
                None => {}
                Some(ReceiverFault::LosingConfirms) => loses.store(true, Ordering::SeqCst),
                Some(_) => return Ok(()),
            }
        }
        to.write_all(&frame).await?;
    }
}

/// Notes what a frame with messages has, and says what is to become of it.
fn look(frame: &[u8], orders: &mut Orders) -> Option<ReceiverFault> {
    let number = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().expect("four bytes"));
    let (count, mut at) = (number(9), 13);
    orders.frames.push(count as usize);
    let mut poisoned = false;
    for _ in 0..count {
        let id = frame[at..at + 8].try_into().expect("eight bytes");
        orders.ids.push(u64::from_be_bytes(id));
        let message = &frame[at + 12..at + 12 + number(at + 8) as usize];
        let text = |id: &EventId| id.to_string().into_bytes();
        poisoned |= orders.poisoned.iter().any(|id| message.windows(36).any(|w| w == text(id)));
        at += 12 + message.len();
    }
    if poisoned {
        return Some(ReceiverFault::Unreachable);
    }
    let (times, fault) = orders.next.take()?;
    if times > 1 {
        orders.next = Some((times - 1, fault));
    }
    Some(fault)
}

async fn down(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    number: usize,
    orders: &Mutex<Orders>,
    loses: &AtomicBool,
) -> io::Result<()> {
    loop {
        let frame = frame(&mut from).await;
        if orders.lock().expect("not poisoned").silenced >= number {
            match frame {
                Ok(_) => continue,
                // The server has noticed, which the client must not hear of.
                Err(_) => return std::future::pending().await,
            }
        }
        let mut frame = frame?;
        if frame[4..6] == TUNE
            && let Some(seconds) = orders.lock().expect("not poisoned").heartbeat_s
        {
            frame[12..16].copy_from_slice(&seconds.to_be_bytes());
        }
        if frame[4..6] == CONFIRM && loses.load(Ordering::SeqCst) {
            return Ok(());
        }
        if frame[4..6] == DELIVER {
            let mut orders = orders.lock().expect("not poisoned");
            orders.largest_chunk = orders.largest_chunk.max(frame.len());
        }
        if frame[4..6] == QUERY_SEQUENCE {
            let mut orders = orders.lock().expect("not poisoned");
            if orders.forgetful > 0 {
                orders.forgetful -= 1;
                return Ok(());
            }
        }
        // Whoever is gone hears nothing, but what he sent before is still passed on.
        if to.write_all(&frame).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
