//! A tap on the wire between the sink and its server.
//!
//! What lives here: a proxy that reads AMQP's frames, tells transfers of events from others, and
//! counts, holds or cuts at them; or that lets a connection stand still. What does not: what the
//! server does with them.
//! Invariant: bytes are passed on unchanged and in order, or their connection ends.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What every message of an event has in it, and no request for a token.
const EVENT_MARK: &[u8] = b"postrider-topic";
/// Descriptors of performatives.
const OPEN: u8 = 0x10;
const ATTACH: u8 = 0x12;
const TRANSFER: u8 = 0x14;
const DISPOSITION: u8 = 0x15;
const PUT_TOKEN: &[u8] = b"put-token";
/// What the names of containers and links begin with.
const NAME: &[u8] = b"postrider-";

/// What was seen, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The first frame of a transfer of events, with the bytes of all of its frames.
    Transfer { bytes: usize },
    /// A settlement by the server.
    Settled,
}

/// Asked before a poisoned transfer goes on, with how many went before it; goes on once it is true.
pub(crate) type Poison = Arc<dyn Fn(usize) -> bool + Send + Sync>;

#[derive(Default)]
struct State {
    log: Vec<Seen>,
    /// Texts that a transfer is told by, each with what is asked before it goes on.
    poisons: Vec<(String, Poison)>,
    connections: usize,
    live: usize,
    tokens: usize,
    /// The last token's frame.
    token: Vec<u8>,
    waiting: bool,
    /// So many transfers end their connection instead of reaching the server.
    cut: u32,
    /// The transfer that is under way has further frames.
    open: bool,
    /// Names of containers, and of links.
    containers: Vec<String>,
    links: Vec<String>,
    /// Connections up to this number pass on nothing of the server's.
    mute: usize,
    /// Connections up to this number are not even read any more.
    still: usize,
    /// What was read of such a connection once it was looked into.
    drained: Option<usize>,
}

/// The proxy; it ends with its connections when it is dropped.
pub(crate) struct Tap {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    held: watch::Sender<bool>,
    drains: watch::Sender<bool>,
    _tasks: JoinSet<()>,
}

impl Tap {
    pub(crate) async fn on(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let state: Arc<Mutex<State>> = Arc::default();
        let (held, holding) = watch::channel(false);
        let (drains, draining) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let shared = state.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let Ok((client, _)) = listener.accept().await else { return };
                let (held, drains) = (holding.clone(), draining.clone());
                let number = {
                    let mut state = shared.lock().expect("not poisoned");
                    state.connections += 1;
                    state.live += 1;
                    state.connections
                };
                let passing = Passing { number, state: shared.clone(), held, drains };
                connections.spawn(async move {
                    connection(client, upstream, &passing).await;
                    passing.state().live -= 1;
                });
            }
        });
        Self { address, state, held, drains, _tasks: tasks }
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }

    /// What was seen of transfers and settlements.
    pub(crate) fn log(&self) -> Vec<Seen> {
        self.state().log.clone()
    }

    /// The bytes of each transfer of events.
    pub(crate) fn transfers(&self) -> Vec<usize> {
        let log = self.log();
        let transfers = log.iter().filter_map(|seen| match seen {
            Seen::Transfer { bytes } => Some(*bytes),
            Seen::Settled => None,
        });
        transfers.collect()
    }

    /// How often somebody connected.
    pub(crate) fn connections(&self) -> usize {
        self.state().connections
    }

    /// How many connections are open.
    pub(crate) fn live(&self) -> usize {
        self.state().live
    }

    /// How many tokens were handed over.
    pub(crate) fn tokens(&self) -> usize {
        self.state().tokens
    }

    /// Whether the last request about a token had this in it.
    #[cfg(feature = "entra")]
    pub(crate) fn token_has(&self, mark: &[u8]) -> bool {
        self.state().token.windows(mark.len()).any(|window| window == mark)
    }

    /// Names of containers and of links, in the order in which they came.
    pub(crate) fn names(&self) -> (Vec<String>, Vec<String>) {
        let state = self.state();
        (state.containers.clone(), state.links.clone())
    }

    /// The connections of now pass on nothing any more that the server says.
    pub(crate) fn mute(&self) {
        let mut state = self.state();
        state.mute = state.connections;
    }

    /// The connections of now stand still: what their client writes is not even read.
    pub(crate) fn stand_still(&self) {
        let mut state = self.state();
        state.still = state.connections;
    }

    /// Reads what the client of a connection that stood still has written meanwhile, up to its end:
    /// so many bytes.
    pub(crate) async fn drain(&self) -> usize {
        self.drains.send_replace(true);
        let draining = async {
            loop {
                if let Some(bytes) = self.state().drained {
                    return bytes;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), draining).await.expect("it ends")
    }

    /// The next transfers end their connections before they reach the server.
    pub(crate) fn cut_next(&self, transfers: u32) {
        self.state().cut = transfers;
    }

    /// Transfers with this text in them wait until they are let on.
    pub(crate) fn poison(&self, text: String, poison: Poison) {
        self.state().poisons.push((text, poison));
    }

    /// From now on transfers wait here.
    pub(crate) fn hold(&self) {
        self.state().waiting = false;
        self.held.send_replace(true);
    }

    pub(crate) fn release(&self) {
        self.held.send_replace(false);
    }

    /// Whether a transfer waits.
    pub(crate) fn is_waiting(&self) -> bool {
        self.state().waiting
    }

    pub(crate) async fn until_waiting(&self) {
        let waiting = async {
            while !self.is_waiting() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("a transfer comes");
    }
}

/// One connection's way through.
struct Passing {
    /// From 1 on.
    number: usize,
    state: Arc<Mutex<State>>,
    held: watch::Receiver<bool>,
    drains: watch::Receiver<bool>,
}

impl Passing {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }

    async fn up(&self, mut from: OwnedReadHalf, mut to: impl AsyncWrite + Unpin) -> Option<()> {
        loop {
            let frame = frame(&mut from).await?;
            if self.number <= self.state().still {
                return self.drain(from).await;
            }
            let has = |mark: &[u8]| frame.windows(mark.len()).any(|window| window == mark);
            let kind = performative(&frame);
            note_name(&mut self.state(), kind, &frame);
            let transfer = kind == Some(TRANSFER);
            if transfer && has(PUT_TOKEN) {
                let mut state = self.state();
                state.tokens += 1;
                state.token = frame.clone();
            }
            if transfer && (has(EVENT_MARK) || self.state().open) {
                self.wait_while_held(&from).await?;
                pass_poisons(&self.state, has).await;
                let mut state = self.state();
                if state.cut > 0 {
                    state.cut -= 1;
                    return None;
                }
                note(&mut state, &frame);
            }
            to.write_all(&frame).await.ok()?;
        }
    }

    /// Nothing goes on of a client that has gone meanwhile.
    async fn wait_while_held(&self, from: &OwnedReadHalf) -> Option<()> {
        let mut held = self.held.clone();
        if *held.borrow() {
            self.state().waiting = true;
            held.wait_for(|held| !held).await.ok()?;
            let gone = from.as_ref().take_error().ok()?.is_some();
            return (!gone).then_some(());
        }
        Some(())
    }

    async fn drain(&self, mut from: OwnedReadHalf) -> Option<()> {
        self.drains.clone().wait_for(|drains| *drains).await.ok()?;
        let (mut bytes, mut buffer) = (0, vec![0; 64 * 1024]);
        while let Ok(read @ 1..) = from.read(&mut buffer).await {
            bytes += read;
        }
        self.state().drained = Some(bytes);
        None
    }

    async fn down(
        &self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
    ) -> Option<()> {
        loop {
            let frame = frame(&mut from).await?;
            if self.number <= self.state().mute {
                continue;
            }
            if performative(&frame) == Some(DISPOSITION) {
                self.state().log.push(Seen::Settled);
            }
            to.write_all(&frame).await.ok()?;
        }
    }
}

async fn connection(client: TcpStream, upstream: SocketAddr, passing: &Passing) {
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).expect("set");
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // The end of either way ends both, so that a cut is one for both sides.
    tokio::select! {
        _ = passing.up(from_client, to_server) => {}
        _ = passing.down(from_server, to_client) => {}
    }
}

async fn pass_poisons(state: &Mutex<State>, has: impl Fn(&[u8]) -> bool) {
    let (before, poisons) = {
        let state = state.lock().expect("not poisoned");
        let transfers = state.log.iter().filter(|seen| matches!(seen, Seen::Transfer { .. }));
        (transfers.count(), state.poisons.clone())
    };
    for (text, poison) in poisons {
        while has(text.as_bytes()) && !poison(before) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Notes the name of a container or a link, which stands first in its frame.
fn note_name(state: &mut State, kind: Option<u8>, frame: &[u8]) {
    let names = match kind {
        Some(OPEN) => &mut state.containers,
        Some(ATTACH) => &mut state.links,
        _ => return,
    };
    let at = frame.windows(NAME.len()).position(|window| window == NAME).expect("a name of ours");
    let in_name = |byte: &&u8| byte.is_ascii_alphanumeric() || **byte == b'-';
    let name = frame[at..].iter().take_while(in_name).map(|byte| char::from(*byte));
    names.push(name.collect());
}

/// Notes the frame of a transfer. The first frame has a delivery tag, and later ones have none.
fn note(state: &mut State, frame: &[u8]) {
    let fields = fields(frame);
    let first = fields.tag;
    let bytes = frame.len() - fields.payload_at;
    match state.log.last_mut().filter(|_| !first) {
        Some(Seen::Transfer { bytes: before }) => *before += bytes,
        _ => state.log.push(Seen::Transfer { bytes }),
    }
    state.open = fields.more;
}

/// A frame, or a protocol header.
async fn frame(from: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut frame = vec![0; 8];
    from.read_exact(&mut frame).await.ok()?;
    if frame.starts_with(b"AMQP") {
        return Some(frame);
    }
    let size = u32::from_be_bytes(*frame.first_chunk()?) as usize;
    frame.resize(size.max(8), 0);
    from.read_exact(&mut frame[8..]).await.ok()?;
    Some(frame)
}

/// The descriptor's code, if the frame has a performative of AMQP.
fn performative(frame: &[u8]) -> Option<u8> {
    let body = frame.get(usize::from(*frame.get(4)?) * 4..)?;
    match body {
        [0x00, 0x53, code, ..] => Some(*code),
        _ => None,
    }
}

struct TransferFields {
    tag: bool,
    more: bool,
    payload_at: usize,
}

/// Of a transfer: whether it has a delivery tag, whether more frames follow, where the payload is.
fn fields(frame: &[u8]) -> TransferFields {
    let start = usize::from(frame[4]) * 4 + 3;
    let (count, mut at, end) = match frame[start] {
        0xc0 => (frame[start + 2], start + 3, start + 2 + usize::from(frame[start + 1])),
        0xd0 => {
            let size = u32::from_be_bytes(*frame[start + 1..].first_chunk().expect("a list32"));
            (frame[start + 8], start + 9, start + 5 + size as usize)
        }
        other => panic!("a transfer is a list, not {other:#x}"),
    };
    let (mut tag, mut more) = (false, false);
    for field in 0..count {
        let (length, yes) = match frame[at] {
            0x40 | 0x42 | 0x43 | 0x45 => (1, false),
            0x41 => (1, true),
            0x52 | 0x56 => (2, frame[at + 1] == 1),
            0x70 => (5, false),
            0xa0 => (2 + usize::from(frame[at + 1]), true),
            // Fields after these are of no interest.
            _ => break,
        };
        match field {
            2 => tag = yes,
            5 => more = yes,
            _ => {}
        }
        at += length;
    }
    TransferFields { tag, more, payload_at: end }
}
