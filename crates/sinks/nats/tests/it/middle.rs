//! A man in the middle who knows a little of the protocol: he counts events and spoils some.
//!
//! What lives here: passing on, holding, and the answers that a server gives only in trouble. What
//! does not: a server; the real one stands behind him.
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

/// What he is told to do.
#[derive(Default)]
pub(crate) struct Orders {
    pub(crate) next: Option<(u32, ReceiverFault)>,
    pub(crate) poisoned: HashMap<EventId, ReceiverFault>,
    pub(crate) waiting: bool,
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
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().expect("not poisoned")
    }

    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }
}

/// One message that a client publishes.
struct Sent {
    bytes: Vec<u8>,
    reply: String,
    id: EventId,
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

/// What the way up tells the way down.
enum Answer {
    /// Pass these bytes on as if the server had sent them.
    Forged(Vec<u8>),
    /// Break off instead of passing on the answer for this inbox.
    Lose(String),
}

async fn up(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    orders: &Mutex<Orders>,
    mut held: watch::Receiver<bool>,
    answers: mpsc::UnboundedSender<Answer>,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut inbox = String::new();
    loop {
        let mut line = Vec::new();
        if from.read_until(b'\n', &mut line).await? == 0 {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if let Some(rest) = text.strip_prefix("SUB ") {
            inbox = rest.rsplit(' ').next().unwrap_or_default().to_owned();
        }
        let Some(sent) = read_event(&text, line.clone(), &mut from).await? else {
            if !text.starts_with("HPUB") && !text.starts_with("PUB") {
                to.write_all(&line).await?;
            }
            continue;
        };
        let Ok(sent) = sent else {
            to.write_all(&sent.err().unwrap_or_default()).await?;
            continue;
        };
        if *held.borrow() {
            orders.lock().expect("not poisoned").waiting = true;
            held.wait_for(|held| !held).await.map_err(io::Error::other)?;
        }
        let fault = fault_of(&mut orders.lock().expect("not poisoned"), sent.id);
        match fault {
            None => {}
            Some(ReceiverFault::LosingConfirms) => {
                answers.send(Answer::Lose(sent.reply)).map_err(io::Error::other)?;
            }
            Some(ReceiverFault::Refusing) => {
                let forged = refusal(&sent.reply, &inbox);
                answers.send(Answer::Forged(forged)).map_err(io::Error::other)?;
                continue;
            }
            Some(ReceiverFault::Unreachable | ReceiverFault::Throttling { .. }) => return Ok(()),
        }
        to.write_all(&sent.bytes).await?;
    }
}

/// Reads the rest of a message; `Err` holds one that is no event, to be passed on.
async fn read_event(
    line: &str,
    mut bytes: Vec<u8>,
    from: &mut BufReader<OwnedReadHalf>,
) -> io::Result<Option<Result<Sent, Vec<u8>>>> {
    let words: Vec<&str> = line.split(' ').collect();
    let (reply, length) = match words.as_slice() {
        ["HPUB", _, reply, _, length] => (*reply, *length),
        ["HPUB" | "PUB", .., length] => ("", *length),
        _ => return Ok(None),
    };
    let length: usize = length.parse().map_err(io::Error::other)?;
    let head = bytes.len();
    bytes.resize(head + length + 2, 0);
    from.read_exact(&mut bytes[head..]).await?;
    let text = String::from_utf8_lossy(&bytes[head..]).into_owned();
    let id = text.lines().find_map(|line| line.strip_prefix("Nats-Msg-Id: "));
    let id = id.and_then(|id| id.trim().parse().ok()).map(EventId::from_uuid);
    Ok(Some(match id {
        Some(id) => Ok(Sent { bytes, reply: reply.to_owned(), id }),
        None => Err(bytes),
    }))
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

/// A stream's own refusal of an event that is larger than it takes.
fn refusal(reply: &str, inbox: &str) -> Vec<u8> {
    let error = r#"{"code":400,"err_code":10054,"description":"message size exceeds maximum"}"#;
    let body = format!(r#"{{"error":{error},"stream":"EVENTS","seq":0}}"#);
    format!("MSG {reply} {inbox} {}\r\n{body}\r\n", body.len()).into_bytes()
}

async fn down(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut inbox: mpsc::UnboundedReceiver<Answer>,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut lost = Vec::new();
    loop {
        let mut line = Vec::new();
        tokio::select! {
            biased;
            Some(answer) = inbox.recv() => match answer {
                Answer::Forged(bytes) => to.write_all(&bytes).await?,
                Answer::Lose(reply) => lost.push(reply),
            },
            read = whole_line(&mut from, &mut line) => {
                if read? == 0 {
                    return Ok(());
                }
                let text = String::from_utf8_lossy(&line).into_owned();
                if lost.iter().any(|reply| text.contains(reply.as_str())) {
                    return Ok(());
                }
                to.write_all(&line).await?;
            }
        }
    }
}

/// Reads at least a part of a line; nothing is lost when it is given up before.
async fn whole_line(from: &mut BufReader<OwnedReadHalf>, line: &mut Vec<u8>) -> io::Result<usize> {
    let buffer = from.fill_buf().await?;
    let end = buffer.iter().position(|byte| *byte == b'\n').map_or(buffer.len(), |at| at + 1);
    line.extend_from_slice(&buffer[..end]);
    from.consume(end);
    Ok(end)
}
