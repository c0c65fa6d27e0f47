//! A man in the middle who knows a little of the protocol: he knows events and spoils some.
//!
//! What lives here: passing on, holding, breaking off, and sending an event to a stream that does
//! not exist. What does not: a server; the real one stands behind him.
//! Invariant: what he does not spoil goes through unchanged.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use postrider_conformance::sink::ReceiverFault;
use postrider_core::EventId;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

/// What he is told to do.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) next: Option<(u32, ReceiverFault)>,
    pub(crate) poisoned: HashMap<EventId, ReceiverFault>,
    pub(crate) waiting: bool,
    /// Calls with events that passed him.
    pub(crate) calls: usize,
}

pub(crate) struct Middle {
    port: u16,
    orders: Arc<Mutex<Orders>>,
    held: watch::Sender<bool>,
    _connections: JoinSet<()>,
}

impl Middle {
    pub(crate) async fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let orders: Arc<Mutex<Orders>> = Arc::default();
        let (held, holding) = watch::channel(false);
        let shared = Arc::clone(&orders);
        let mut connections = JoinSet::new();
        connections.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                open.spawn(connection(client, server, Arc::clone(&shared), holding.clone()));
            }
        });
        Self { port, orders, held, _connections: connections }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().expect("not poisoned")
    }

    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }
}

async fn connection(
    client: TcpStream,
    server: SocketAddr,
    orders: Arc<Mutex<Orders>>,
    held: watch::Receiver<bool>,
) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let (losses, lost) = mpsc::unbounded_channel();
    // Whichever ends first ends the connection, on both sides.
    tokio::select! {
        _ = up(from_client, to_server, &orders, held, losses) => {}
        _ = down(from_server, to_client, lost) => {}
    }
}

/// One value of the protocol.
struct Value {
    bytes: Vec<u8>,
    /// The texts in it.
    texts: Vec<Vec<u8>>,
}

/// Reads one value with all that is in it; `None` at the end.
async fn read(from: &mut BufReader<OwnedReadHalf>) -> io::Result<Option<Value>> {
    let mut value = Value { bytes: Vec::new(), texts: Vec::new() };
    let mut pending = 1;
    while pending > 0 {
        pending -= 1;
        let begin = value.bytes.len();
        if from.read_until(b'\n', &mut value.bytes).await? == 0 {
            return Ok(None);
        }
        let line = String::from_utf8_lossy(&value.bytes[begin..]).trim_end().to_owned();
        let (kind, rest) = line.split_at(1);
        let count = || rest.parse::<i64>().map_err(io::Error::other);
        match kind {
            "*" | "~" | ">" => pending += count()?.max(0),
            "%" => pending += 2 * count()?.max(0),
            "$" | "=" => {
                if let Ok(length) = usize::try_from(count()?) {
                    let begin = value.bytes.len();
                    value.bytes.resize(begin + length + 2, 0);
                    from.read_exact(&mut value.bytes[begin..]).await?;
                    value.texts.push(value.bytes[begin..begin + length].to_vec());
                }
            }
            _ => {}
        }
    }
    Ok(Some(value))
}

/// The events of a call of the script, by the seen keys.
fn events(texts: &[Vec<u8>]) -> Vec<EventId> {
    let seen = texts.iter().filter(|text| text.starts_with(b"postrider:seen:"));
    let id = |text: &Vec<u8>| {
        let text = String::from_utf8_lossy(text);
        let id: Uuid = text.rsplit(':').next()?.parse().ok()?;
        Some(EventId::from_uuid(id))
    };
    seen.filter_map(id).collect()
}

/// The same call, with the stream of an event replaced by one that does not exist.
fn astray(mut texts: Vec<Vec<u8>>, event: usize) -> Vec<u8> {
    // After the command, the script's name and the number of keys come streams and seen keys.
    texts[3 + 2 * event] = b"nowhere".to_vec();
    let mut bytes = format!("*{}\r\n", texts.len()).into_bytes();
    for text in texts {
        bytes.extend(format!("${}\r\n", text.len()).into_bytes());
        bytes.extend(text);
        bytes.extend(b"\r\n");
    }
    bytes
}

async fn up(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    orders: &Mutex<Orders>,
    mut held: watch::Receiver<bool>,
    losses: mpsc::UnboundedSender<usize>,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut commands = 0;
    while let Some(command) = read(&mut from).await? {
        commands += 1;
        let is_call = command.texts.first().is_some_and(|word| word == b"EVALSHA");
        let events = if is_call { events(&command.texts) } else { Vec::new() };
        if events.is_empty() {
            to.write_all(&command.bytes).await?;
            continue;
        }
        if *held.borrow() {
            orders.lock().expect("not poisoned").waiting = true;
            held.wait_for(|held| !held).await.map_err(io::Error::other)?;
        }
        let fault = fault_of(&mut orders.lock().expect("not poisoned"), &events);
        match fault {
            None => to.write_all(&command.bytes).await?,
            Some((_, ReceiverFault::LosingConfirms)) => {
                losses.send(commands).map_err(io::Error::other)?;
                to.write_all(&command.bytes).await?;
            }
            Some((event, ReceiverFault::Refusing)) => {
                to.write_all(&astray(command.texts, event)).await?;
            }
            Some((_, ReceiverFault::Unreachable | ReceiverFault::Throttling { .. })) => {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Which of a call's events meets which fault.
fn fault_of(orders: &mut Orders, events: &[EventId]) -> Option<(usize, ReceiverFault)> {
    orders.calls += 1;
    let poisoned = events.iter().enumerate();
    let mut poisoned = poisoned.filter_map(|(n, id)| Some((n, *orders.poisoned.get(id)?)));
    if let Some(found) = poisoned.next() {
        return Some(found);
    }
    let (times, fault) = orders.next.take()?;
    if times > 1 {
        orders.next = Some((times - 1, fault));
    }
    Some((0, fault))
}

async fn down(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut losses: mpsc::UnboundedReceiver<usize>,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut answers = 0;
    let mut lost = Vec::new();
    while let Some(answer) = read(&mut from).await? {
        // What the server tells unasked is no answer.
        answers += usize::from(!answer.bytes.starts_with(b">"));
        while let Ok(loss) = losses.try_recv() {
            lost.push(loss);
        }
        if lost.contains(&answers) {
            return Ok(());
        }
        to.write_all(&answer.bytes).await?;
    }
    Ok(())
}
