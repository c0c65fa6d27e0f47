//! A man in the middle who knows a little of the protocol: he knows events and spoils some.
//!
//! What lives here: passing on, holding, breaking off, losing answers, refusing. What does not: a
//! broker; the real one stands behind him, and he tells clients that it is where he is; the
//! protocol (`servers/src/kafka/protocol.rs`).
//! Invariant: what he does not spoil goes through unchanged but for that. A request that he spoiled
//! is spoiled whenever the client sends it again.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use postrider_conformance::sink::ReceiverFault;
use postrider_core::EventId;
use postrider_servers::kafka::protocol::{self, Produce};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::guard::{Guard, Heard, Login, Stream};
use crate::transactions::NOTES;

const END_TXN: [u8; 2] = [0, 26];
const HOST: &str = "127.0.0.1";
/// An address of another machine, as long as the broker's.
pub(crate) const ELSEWHERE: &str = "10.1.2.34";

/// What he is told to do.
#[derive(Default)]
pub(crate) struct Orders {
    next: Option<(u32, ReceiverFault)>,
    pub(crate) poisoned: HashMap<EventId, ReceiverFault>,
    pub(crate) waiting: bool,
    /// So many requests with events pass although he holds.
    pub(crate) unheld: usize,
    /// Requests that he spoiled before.
    spoiled: HashMap<u64, ReceiverFault>,
    /// Requests with events that passed him.
    pub(crate) requests: usize,
    /// Answers every request with events so, as the broker's own code.
    pub(crate) refusal: Option<i16>,
    /// Tells clients that the broker is at [`ELSEWHERE`].
    pub(crate) elsewhere: bool,
    /// Loses every answer to the end of a transaction.
    pub(crate) loses_ends: bool,
    /// Ends the connection instead of passing on the next answer to events, once.
    pub(crate) cut_next: bool,
}

impl Orders {
    /// Spoils the next requests. One that is refused is sent once more, alone.
    pub(crate) fn spoil_next(&mut self, times: u32, fault: ReceiverFault) {
        let each = if matches!(fault, ReceiverFault::Refusing) { 2 } else { 1 };
        self.next = Some((times * each, fault));
    }

    /// The same; an event that is sent in a transaction by itself is not sent once more.
    pub(crate) fn spoil_next_transactions(&mut self, times: u32, fault: ReceiverFault) {
        self.next = Some((times, fault));
    }

    /// Whether the request is not to be held.
    fn passes(&mut self) -> bool {
        let passes = self.unheld > 0;
        self.unheld = self.unheld.saturating_sub(1);
        self.waiting |= !passes;
        passes
    }

    fn fault(&mut self, request: &[u8]) -> Option<ReceiverFault> {
        let mut hash = DefaultHasher::new();
        // All but the number that tells the client which answer is whose.
        (&request[..4], &request[8..]).hash(&mut hash);
        let hash = hash.finish();
        if let Some(fault) = self.spoiled.get(&hash) {
            return Some(*fault);
        }
        let contains = |id: &EventId| {
            let id = id.to_string();
            request.windows(id.len()).any(|part| part == id.as_bytes())
        };
        let poisoned = self.poisoned.iter().find(|(id, _)| contains(id)).map(|(_, fault)| *fault);
        let fault = poisoned.or_else(|| {
            let (times, fault) = self.next.as_mut().filter(|(times, _)| *times > 0)?;
            *times -= 1;
            Some(*fault)
        })?;
        self.spoiled.insert(hash, fault);
        Some(fault)
    }
}

pub(crate) struct Middle {
    port: u16,
    orders: Arc<Mutex<Orders>>,
    held: watch::Sender<bool>,
    _connections: JoinSet<()>,
}

impl Middle {
    pub(crate) async fn before(server: SocketAddr) -> Self {
        Self::guarding(server, Guard::default()).await
    }

    /// One who lets nobody through whom the guard does not know.
    pub(crate) async fn guarding(server: SocketAddr, guard: Guard) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let orders: Arc<Mutex<Orders>> = Arc::default();
        let (held, holding) = watch::channel(false);
        let shared = Arc::clone(&orders);
        let mut connections = JoinSet::new();
        connections.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (shared, holding) = (Arc::clone(&shared), holding.clone());
                let guard = guard.clone();
                open.spawn(async move {
                    let Some(client) = guard.admit(client).await else { return };
                    connection(client, server, port, shared, holding, guard).await;
                });
            }
        });
        Self { port, orders, held, _connections: connections }
    }

    pub(crate) fn brokers(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().expect("not poisoned")
    }

    pub(crate) fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }
}

/// What the way up tells the way down.
enum Word {
    /// The answer of this request is to be lost.
    Lose(i32),
    /// An answer of his own.
    Say(Vec<u8>),
}

async fn connection(
    client: Box<dyn Stream>,
    server: SocketAddr,
    port: u16,
    orders: Arc<Mutex<Orders>>,
    held: watch::Receiver<bool>,
    guard: Guard,
) {
    let Ok(behind) = TcpStream::connect(server).await else { return };
    let (from_client, to_client) = tokio::io::split(client);
    let (from_server, to_server) = behind.into_split();
    let (words, heard) = mpsc::unbounded_channel();
    // Whichever ends first ends the connection, on both sides.
    tokio::select! {
        _ = up(from_client, to_server, &orders, held, words, guard.login()) => {}
        _ = down(from_server, to_client, heard, (server.port(), port), &orders) => {}
    }
}

async fn up(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    orders: &Mutex<Orders>,
    mut held: watch::Receiver<bool>,
    words: mpsc::UnboundedSender<Word>,
    mut login: Login,
) -> io::Result<()> {
    loop {
        let request = protocol::read(&mut from).await?;
        match login.hear(&request) {
            Heard::Answer(answer) => {
                let _ = words.send(Word::Say(answer));
                continue;
            }
            Heard::Stranger => return Ok(()),
            Heard::Other => {}
        }
        let of_events = |produce: &Produce| produce.topic() != NOTES.as_bytes();
        if let Some(parsed) = Produce::read(&request).filter(of_events) {
            if !orders.lock().expect("not poisoned").passes() {
                held.wait_for(|held| !held).await.map_err(io::Error::other)?;
            }
            let (fault, refusal, cut) = {
                let mut orders = orders.lock().expect("not poisoned");
                orders.requests += 1;
                let cut = std::mem::take(&mut orders.cut_next);
                (orders.fault(&request), orders.refusal, cut)
            };
            if cut {
                let _ = words.send(Word::Lose(parsed.correlation()));
            }
            match (fault, refusal) {
                (None, Some(code)) => {
                    let _ = words.send(Word::Say(parsed.answer(code)));
                    continue;
                }
                (None, None) => {}
                (Some(ReceiverFault::Refusing), _) => {
                    let _ = words.send(Word::Say(parsed.answer(protocol::INVALID_RECORD)));
                    continue;
                }
                (Some(ReceiverFault::LosingConfirms), _) => {
                    let _ = words.send(Word::Lose(parsed.correlation()));
                }
                (Some(_), _) => return Ok(()),
            }
        }
        if request.starts_with(&END_TXN) && orders.lock().expect("not poisoned").loses_ends {
            let number = protocol::correlation(&request[4..]).expect("a request");
            let _ = words.send(Word::Lose(number));
        }
        protocol::write(&mut to, &request).await?;
    }
}

async fn down(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut heard: mpsc::UnboundedReceiver<Word>,
    (theirs, own): (u16, u16),
    orders: &Mutex<Orders>,
) -> io::Result<()> {
    let mut lost = HashSet::new();
    let (frames, mut answers) = mpsc::unbounded_channel();
    let reading = async move {
        while let Ok(answer) = protocol::read(&mut from).await {
            if frames.send(answer).is_err() {
                break;
            }
        }
    };
    let writing = async move {
        loop {
            tokio::select! {
                biased;
                Some(word) = heard.recv() => match word {
                    Word::Lose(correlation) => { lost.insert(correlation); }
                    Word::Say(answer) => protocol::write(&mut to, &answer).await?,
                },
                answer = answers.recv() => {
                    let Some(mut answer) = answer else { return Ok(()) };
                    if protocol::correlation(&answer).is_some_and(|of| lost.contains(&of)) {
                        return Ok(());
                    }
                    let elsewhere = orders.lock().expect("not poisoned").elsewhere;
                    let host = if elsewhere { ELSEWHERE } else { HOST };
                    protocol::readdress(&mut answer, theirs, (host, own));
                    protocol::write(&mut to, &answer).await?;
                }
            }
        }
    };
    tokio::select! {
        () = reading => Ok(()),
        written = writing => written,
    }
}
