//! A man in the middle who knows a little of the protocol: he knows events and spoils some.
//!
//! What lives here: passing on, holding, breaking off, losing answers, refusing. What does not: a
//! broker; the real one stands behind him, and he tells clients that it is where he is.
//! Invariant: what he does not spoil goes through unchanged but for that. A request that he spoiled
//! is spoiled whenever the client sends it again.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use postrider_conformance::sink::ReceiverFault;
use postrider_core::EventId;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::guard::{Guard, Heard, Login, Stream};

const PRODUCE: i16 = 0;
/// The first version in which lengths are short and fields may follow unknown.
const FLEXIBLE: i16 = 9;
/// The broker refuses the record by its own rules.
const INVALID_RECORD: i16 = 87;
const HOST: &[u8] = b"127.0.0.1";
/// An address of another machine, as long as the broker's.
pub(crate) const ELSEWHERE: &str = "10.1.2.34";

/// What he is told to do.
#[derive(Default)]
pub(crate) struct Orders {
    next: Option<(u32, ReceiverFault)>,
    pub(crate) poisoned: HashMap<EventId, ReceiverFault>,
    pub(crate) waiting: bool,
    /// Requests that he spoiled before.
    spoiled: HashMap<u64, ReceiverFault>,
    /// Requests with events that passed him.
    pub(crate) requests: usize,
    /// Answers every request with events so, as the broker's own code.
    pub(crate) refusal: Option<i16>,
    /// Tells clients that the broker is at [`ELSEWHERE`].
    pub(crate) elsewhere: bool,
    /// Ends the connection instead of passing on the next answer to events, once.
    pub(crate) cut_next: bool,
}

impl Orders {
    /// Spoils the next requests. One that is refused is sent once more, alone.
    pub(crate) fn spoil_next(&mut self, times: u32, fault: ReceiverFault) {
        let each = if matches!(fault, ReceiverFault::Refusing) { 2 } else { 1 };
        self.next = Some((times * each, fault));
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

async fn frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let length = usize::try_from(from.read_i32().await?).map_err(io::Error::other)?;
    let mut frame = vec![0; length];
    from.read_exact(&mut frame).await?;
    Ok(frame)
}

async fn pass(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> io::Result<()> {
    to.write_i32(i32::try_from(frame.len()).map_err(io::Error::other)?).await?;
    to.write_all(frame).await?;
    to.flush().await
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
        let request = frame(&mut from).await?;
        match login.hear(&request) {
            Heard::Answer(answer) => {
                let _ = words.send(Word::Say(answer));
                continue;
            }
            Heard::Stranger => return Ok(()),
            Heard::Other => {}
        }
        if i16::from_be_bytes([request[0], request[1]]) == PRODUCE {
            orders.lock().expect("not poisoned").waiting = true;
            held.wait_for(|held| !held).await.map_err(io::Error::other)?;
            let (fault, refusal, cut) = {
                let mut orders = orders.lock().expect("not poisoned");
                orders.requests += 1;
                let cut = std::mem::take(&mut orders.cut_next);
                (orders.fault(&request), orders.refusal, cut)
            };
            let parsed = Produce::parse(&request);
            if cut {
                let _ = words.send(Word::Lose(parsed.correlation));
            }
            match (fault, refusal) {
                (None, Some(code)) => {
                    let _ = words.send(Word::Say(parsed.answer(code)));
                    continue;
                }
                (None, None) => {}
                (Some(ReceiverFault::Refusing), _) => {
                    let _ = words.send(Word::Say(parsed.answer(INVALID_RECORD)));
                    continue;
                }
                (Some(ReceiverFault::LosingConfirms), _) => {
                    let _ = words.send(Word::Lose(parsed.correlation));
                }
                (Some(_), _) => return Ok(()),
            }
        }
        pass(&mut to, &request).await?;
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
        while let Ok(answer) = frame(&mut from).await {
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
                    Word::Say(answer) => pass(&mut to, &answer).await?,
                },
                answer = answers.recv() => {
                    let Some(mut answer) = answer else { return Ok(()) };
                    let number = [answer[0], answer[1], answer[2], answer[3]];
                    if lost.contains(&i32::from_be_bytes(number)) {
                        return Ok(());
                    }
                    let elsewhere = orders.lock().expect("not poisoned").elsewhere;
                    readdress(&mut answer, theirs, own, elsewhere);
                    pass(&mut to, &answer).await?;
                }
            }
        }
    };
    tokio::select! {
        () = reading => Ok(()),
        written = writing => written,
    }
}

/// Puts his own port where the broker tells its.
fn readdress(answer: &mut [u8], theirs: u16, own: u16, elsewhere: bool) {
    let address = [HOST, &u32::from(theirs).to_be_bytes()].concat();
    let places: Vec<usize> = (0..answer.len().saturating_sub(address.len() - 1))
        .filter(|at| answer[*at..].starts_with(&address))
        .collect();
    for at in places {
        let port = at + HOST.len();
        if elsewhere {
            answer[at..port].copy_from_slice(ELSEWHERE.as_bytes());
        }
        answer[port..port + 4].copy_from_slice(&u32::from(own).to_be_bytes());
    }
}

/// A request with events, as far as its answer needs it.
struct Produce {
    version: i16,
    correlation: i32,
    topic: Vec<u8>,
    partition: i32,
}

impl Produce {
    fn parse(request: &[u8]) -> Self {
        let mut rest = &request[2..];
        let version = i16::from_be_bytes(take(&mut rest));
        let correlation = i32::from_be_bytes(take(&mut rest));
        let flexible = version >= FLEXIBLE;
        skip_text(&mut rest, false);
        if flexible {
            let [_no_tags] = take(&mut rest);
        }
        skip_text(&mut rest, flexible);
        let _acks_and_timeout: [u8; 6] = take(&mut rest);
        skip_count(&mut rest, flexible);
        let length = text_length(&mut rest, flexible);
        let topic = rest[..length].to_vec();
        rest = &rest[length..];
        skip_count(&mut rest, flexible);
        Self { version, correlation, topic, partition: i32::from_be_bytes(take(&mut rest)) }
    }

    /// The broker's answer with a code.
    fn answer(&self, code: i16) -> Vec<u8> {
        let flexible = self.version >= FLEXIBLE;
        let mut answer = self.correlation.to_be_bytes().to_vec();
        let one: &[u8] = if flexible { &[2] } else { &[0, 0, 0, 1] };
        if flexible {
            answer.push(0);
        }
        answer.extend(one);
        match flexible {
            true => answer.push(u8::try_from(self.topic.len() + 1).expect("a short name")),
            false => answer.extend(u16::try_from(self.topic.len()).expect("short").to_be_bytes()),
        }
        answer.extend(&self.topic);
        answer.extend(one);
        answer.extend(self.partition.to_be_bytes());
        answer.extend(code.to_be_bytes());
        // Offset, time and the log's start: none.
        answer.extend([0xff; 24]);
        if flexible {
            // No errors of records, no text, no unknown fields of the partition and the topic.
            answer.extend([1, 0, 0, 0]);
        } else if self.version >= 8 {
            answer.extend([0, 0, 0, 0, 0xff, 0xff]);
        }
        answer.extend([0; 4]);
        if flexible {
            answer.push(0);
        }
        answer
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (taken, after) = rest.split_at(N);
    *rest = after;
    taken.try_into().expect("N bytes")
}

/// Short counts are one more than they say; those here fit a byte or two.
fn short(rest: &mut &[u8]) -> usize {
    let (mut value, mut shift) = (0, 0);
    loop {
        let [byte] = take(rest);
        value |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return value.saturating_sub(1);
        }
    }
}

fn text_length(rest: &mut &[u8], flexible: bool) -> usize {
    match flexible {
        true => short(rest),
        false => usize::try_from(i16::from_be_bytes(take(rest))).unwrap_or(0),
    }
}

fn skip_text(rest: &mut &[u8], flexible: bool) {
    let length = text_length(rest, flexible);
    *rest = &rest[length..];
}

fn skip_count(rest: &mut &[u8], flexible: bool) {
    match flexible {
        true => {
            short(rest);
        }
        false => {
            let _count: [u8; 4] = take(rest);
        }
    }
}
