//! A man in the middle who knows a little of the protocol: he counts events and spoils some.
//!
//! What lives here: passing on, holding, and the answers that a server gives only in trouble. What
//! does not: a server; the real one stands behind him.
//! Invariant: what he does not spoil goes through unchanged.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use postrider_conformance::sink::ReceiverFault;
use postrider_core::EventId;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Kinds of frames.
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
/// Class and method of the frames that he knows.
const PUBLISH: [u8; 4] = [0, 60, 0, 40];
const ACK: [u8; 4] = [0, 60, 0, 80];
const CONNECTION_CLOSE: [u8; 4] = [0, 10, 0, 50];
const CHANNEL_CLOSE: [u8; 4] = [0, 20, 0, 40];
const CHANNEL_CLOSE_OK: [u8; 4] = [0, 20, 0, 41];
const PRECONDITION_FAILED: u16 = 406;
const TOO_LARGE: &str = "PRECONDITION_FAILED - message size 5 is larger than configured max size 4";

/// What he is told to do.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) next: Option<(u32, ReceiverFault)>,
    pub(crate) poisoned: HashMap<EventId, ReceiverFault>,
    pub(crate) waiting: bool,
    /// He ends the connection at the next event, with a word that is otherwise for one event.
    pub(crate) ends_connection: bool,
    /// Channels that the client closed.
    pub(crate) closed: usize,
    pub(crate) connections: usize,
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
                shared.lock().expect("not poisoned").connections += 1;
                open.spawn(connection(client, server, Arc::clone(&shared), holding.clone()));
            }
        });
        Self { port, orders, held, _connections: connections }
    }

    pub(crate) fn url(&self) -> String {
        format!("amqp://127.0.0.1:{}", self.port)
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
    let (answers, inbox) = mpsc::unbounded_channel();
    // Whichever ends first ends the connection, on both sides.
    tokio::select! {
        _ = up(from_client, to_server, &orders, held, answers) => {}
        _ = down(from_server, to_client, inbox) => {}
    }
}

/// A frame, whole.
struct Frame {
    bytes: Vec<u8>,
}

impl Frame {
    fn kind(&self) -> u8 {
        self.bytes[0]
    }
    fn channel(&self) -> u16 {
        u16::from_be_bytes([self.bytes[1], self.bytes[2]])
    }
    fn payload(&self) -> &[u8] {
        &self.bytes[7..self.bytes.len() - 1]
    }
    fn is_method(&self, which: [u8; 4]) -> bool {
        self.kind() == METHOD && self.payload().starts_with(&which)
    }
}

/// Takes frames out of a stream; nothing is lost when a call is given up.
struct Frames {
    from: OwnedReadHalf,
    buffer: Vec<u8>,
}

impl Frames {
    async fn next(&mut self) -> io::Result<Option<Frame>> {
        loop {
            if let Some(head) = self.buffer.first_chunk::<7>() {
                let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
                if self.buffer.len() >= size + 8 {
                    let rest = self.buffer.split_off(size + 8);
                    let bytes = std::mem::replace(&mut self.buffer, rest);
                    return Ok(Some(Frame { bytes }));
                }
            }
            if self.from.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }
}

/// What the way up tells the way down.
enum Answer {
    /// Pass these bytes on as if the server had sent them, instead of its next word of the channel.
    Forged(u16, Vec<u8>),
    /// Break off instead of passing on the confirmation of this channel.
    Lose(u16),
}

/// A message that is not whole yet.
#[derive(Default)]
struct Message {
    bytes: Vec<u8>,
    id: Option<EventId>,
    missing: u64,
}

async fn up(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    orders: &Mutex<Orders>,
    mut held: watch::Receiver<bool>,
    answers: mpsc::UnboundedSender<Answer>,
) -> io::Result<()> {
    let mut greeting = [0; 8];
    from.read_exact(&mut greeting).await?;
    to.write_all(&greeting).await?;
    let mut frames = Frames { from, buffer: Vec::new() };
    let mut messages: HashMap<u16, Message> = HashMap::new();
    let mut refused = HashSet::new();
    while let Some(frame) = frames.next().await? {
        let channel = frame.channel();
        // The server has not said that it closes the channel.
        if frame.is_method(CHANNEL_CLOSE_OK) && refused.remove(&channel) {
            continue;
        }
        if frame.is_method(CHANNEL_CLOSE) {
            orders.lock().expect("not poisoned").closed += 1;
        }
        if frame.is_method(PUBLISH) {
            messages.insert(channel, Message { bytes: frame.bytes, ..Message::default() });
            continue;
        }
        let Some(message) = messages.get_mut(&channel).filter(|_| frame.kind() != METHOD) else {
            to.write_all(&frame.bytes).await?;
            continue;
        };
        match frame.kind() {
            HEADER => {
                let size = frame.payload()[4..12].try_into().expect("eight bytes");
                message.missing = u64::from_be_bytes(size);
                message.id = id_in(frame.payload());
            }
            BODY => message.missing -= frame.payload().len() as u64,
            other => return Err(io::Error::other(format!("frame {other}"))),
        }
        message.bytes.extend(frame.bytes);
        if message.missing > 0 {
            continue;
        }
        let message = messages.remove(&channel).expect("it was there");
        if *held.borrow() {
            orders.lock().expect("not poisoned").waiting = true;
            held.wait_for(|held| !held).await.map_err(io::Error::other)?;
        }
        if std::mem::take(&mut orders.lock().expect("not poisoned").ends_connection) {
            let end = close(0, PRECONDITION_FAILED, TOO_LARGE);
            answers.send(Answer::Forged(0, end)).map_err(io::Error::other)?;
            // The server hears no more of it, and the client ends it.
            while frames.next().await?.is_some() {}
            return Ok(());
        }
        let id = message.id.ok_or_else(|| io::Error::other("a message without an id"))?;
        let fault = fault_of(&mut orders.lock().expect("not poisoned"), id);
        match fault {
            None => {}
            Some(ReceiverFault::LosingConfirms) => {
                answers.send(Answer::Lose(channel)).map_err(io::Error::other)?;
            }
            Some(ReceiverFault::Refusing) => {
                let refusal = close(channel, PRECONDITION_FAILED, TOO_LARGE);
                answers.send(Answer::Forged(channel, refusal)).map_err(io::Error::other)?;
                refused.insert(channel);
                to.write_all(&close(channel, 200, "OK")).await?;
                continue;
            }
            Some(ReceiverFault::Unreachable | ReceiverFault::Throttling { .. }) => return Ok(()),
        }
        to.write_all(&message.bytes).await?;
    }
    Ok(())
}

/// The message id among a message's properties: the one UUID of theirs.
fn id_in(properties: &[u8]) -> Option<EventId> {
    let text = |window: &[u8]| std::str::from_utf8(&window[1..]).ok()?.parse::<Uuid>().ok();
    let short = |window: &&[u8]| window[0] == 36;
    properties.windows(37).filter(short).find_map(text).map(EventId::from_uuid)
}

fn fault_of(orders: &mut Orders, id: EventId) -> Option<ReceiverFault> {
    if let Some(fault) = orders.poisoned.get(&id) {
        return Some(*fault);
    }
    let (times, fault) = orders.next.take()?;
    if times > 1 {
        orders.next = Some((times - 1, fault));
    }
    Some(fault)
}

/// The end of a channel, or with 0 of the connection, as the server says it for an event that is
/// larger than it takes.
fn close(channel: u16, code: u16, text: &str) -> Vec<u8> {
    let mut payload = if channel == 0 { CONNECTION_CLOSE } else { CHANNEL_CLOSE }.to_vec();
    payload.extend(code.to_be_bytes());
    payload.push(u8::try_from(text.len()).expect("a short text"));
    payload.extend(text.as_bytes());
    payload.extend(PUBLISH);
    let mut frame = vec![METHOD];
    frame.extend(channel.to_be_bytes());
    frame.extend(u32::try_from(payload.len()).expect("a short frame").to_be_bytes());
    frame.extend(payload);
    frame.push(0xCE);
    frame
}

async fn down(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut inbox: mpsc::UnboundedReceiver<Answer>,
) -> io::Result<()> {
    let mut frames = Frames { from, buffer: Vec::new() };
    let (mut lost, mut refused) = (HashSet::new(), HashSet::new());
    loop {
        tokio::select! {
            biased;
            Some(answer) = inbox.recv() => match answer {
                Answer::Forged(channel, bytes) => {
                    refused.insert(channel);
                    to.write_all(&bytes).await?;
                }
                Answer::Lose(channel) => {
                    lost.insert(channel);
                }
            },
            frame = frames.next() => {
                let Some(frame) = frame? else { return Ok(()) };
                if frame.is_method(CHANNEL_CLOSE_OK) && refused.remove(&frame.channel()) {
                    continue;
                }
                if frame.is_method(ACK) && lost.contains(&frame.channel()) {
                    return Ok(());
                }
                to.write_all(&frame.bytes).await?;
            }
        }
    }
}
