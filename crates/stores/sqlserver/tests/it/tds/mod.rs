//! A stand-in for SQL Server that speaks its wire protocol and knows no SQL.
//!
//! What lives here: a server on a port of this machine that gives the answers which a test has
//! prepared, and the faults that real servers show. What does not: the bytes (`wire.rs`), TLS
//! (`tls.rs`).
//! Invariant: what a statement means is never judged here. A test that passes says how the client
//! reads an answer, not that the server would give it.

pub(crate) mod tls;
pub(crate) mod wire;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use wire::{Login, Tokens, Type, Value};

/// What a client asks for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Request {
    /// SQL text alone.
    Batch(String),
    /// SQL text with its parameters, or a procedure.
    Call(String, Vec<Value>),
}

impl Request {
    pub(crate) fn sql(&self) -> &str {
        match self {
            Self::Batch(text) | Self::Call(text, _) => text,
        }
    }

    pub(crate) fn values(&self) -> &[Value] {
        match self {
            Self::Batch(_) => &[],
            Self::Call(_, values) => values,
        }
    }
}

/// One result set.
#[derive(Debug, Clone)]
pub(crate) struct Set {
    columns: Vec<(&'static str, Type)>,
    rows: Vec<Vec<Value>>,
}

impl Set {
    pub(crate) fn of(columns: &[(&'static str, Type)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub(crate) fn row(mut self, values: impl IntoIterator<Item = Value>) -> Self {
        self.rows.push(values.into_iter().collect());
        self
    }

    /// One row of whole numbers, as `select @held as held, @moved as moved` gives it.
    pub(crate) fn numbers(values: &[i64]) -> Self {
        let columns = vec![("", Type::Int); values.len()];
        Self { columns, rows: vec![values.iter().map(|number| Value::Int(*number)).collect()] }
    }
}

/// What the server does when it is asked.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// These result sets.
    Sets(Vec<Set>),
    /// These result sets, then an error of this number and class.
    Error(Vec<Set>, u32, u8, &'static str),
    /// These result sets up to the middle of the last packet; then the connection is gone.
    Cut(Vec<Set>),
    /// Nothing, and the connection stays open.
    Silence,
    /// Nothing, and the connection is gone.
    Close,
    /// The answer, so much later.
    After(Duration, Box<Answer>),
}

impl Answer {
    pub(crate) fn nothing() -> Self {
        Self::Sets(Vec::new())
    }

    pub(crate) fn set(set: Set) -> Self {
        Self::Sets(vec![set])
    }
}

/// What the server says to a login.
#[derive(Debug, Clone)]
pub(crate) enum Admission {
    Welcome,
    Error(u32, &'static str),
    Elsewhere(SocketAddr),
    Silence,
    Close,
}

type Respond = Box<dyn FnMut(&Request) -> Answer + Send>;
type Admit = Box<dyn FnMut(&Login) -> Admission + Send>;

struct Shared {
    respond: Mutex<Respond>,
    admit: Mutex<Admit>,
    seen: Mutex<Vec<Request>>,
    logins: Mutex<Vec<Login>>,
    tls: Option<tls::Acceptor>,
}

/// The server; dropping it ends all of its connections.
pub(crate) struct Mock {
    address: SocketAddr,
    shared: Arc<Shared>,
    _running: JoinSet<()>,
}

impl Mock {
    /// Answers each request as `respond` says; what a session starts with is answered already.
    pub(crate) async fn start(respond: impl FnMut(&Request) -> Answer + Send + 'static) -> Self {
        Self::with(respond, |_| Admission::Welcome, None).await
    }

    pub(crate) async fn with(
        respond: impl FnMut(&Request) -> Answer + Send + 'static,
        admit: impl FnMut(&Login) -> Admission + Send + 'static,
        tls: Option<tls::Acceptor>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            respond: Mutex::new(Box::new(respond)),
            admit: Mutex::new(Box::new(admit)),
            seen: Mutex::default(),
            logins: Mutex::default(),
            tls,
        });
        let mut running = JoinSet::new();
        running.spawn(accept(listener, Arc::clone(&shared)));
        Self { address, shared, _running: running }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A connection string to it, without TLS.
    pub(crate) fn connection_string(&self) -> String {
        format!(
            "Server=127.0.0.1,{};Database=shop;User ID=relay;Password='s3;cret';\
             Encrypt=DANGER_PLAINTEXT",
            self.address.port()
        )
    }

    /// All requests so far but those that set a session up.
    pub(crate) fn seen(&self) -> Vec<Request> {
        self.shared.seen.lock().expect("no test panicked in it").clone()
    }

    pub(crate) fn logins(&self) -> Vec<Login> {
        self.shared.logins.lock().expect("no test panicked in it").clone()
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut sessions = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        // A client that goes away ends its session and nothing else.
        sessions.spawn(async move {
            let _ = serve(stream, &shared).await;
        });
    }
}

/// The first message, TLS if both want it, the login, and whatever follows.
async fn serve(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (kind, message) = wire::read_message(&mut stream).await?;
    assert_eq!(kind, wire::PRELOGIN, "a client begins with a prelogin");
    // 0: the login alone, 1: all, 2: nothing, 3: required by the other side.
    let asked = wire::asked_encryption(&message).unwrap_or(2);
    let offered = match (&shared.tls, asked) {
        (None, _) => 2,
        (Some(_), 2) => 2,
        (Some(_), 0) => 0,
        (Some(_), _) => 1,
    };
    wire::write_message(&mut stream, &wire::prelogin(offered, false), false).await?;
    match (&shared.tls, offered) {
        (Some(acceptor), 1) => session(&mut acceptor.accept(stream).await?, shared).await,
        (Some(acceptor), 0) => {
            let mut sealed = acceptor.accept(stream).await?;
            let login = wire::read_message(&mut sealed).await?;
            // From here on in plain text: what TLS has read ahead there is none of.
            let mut stream = tls::plain(sealed);
            after_login(&mut stream, shared, login).await
        }
        _ => session(&mut stream, shared).await,
    }
}

async fn session<S>(stream: &mut S, shared: &Shared) -> std::io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let login = wire::read_message(stream).await?;
    after_login(stream, shared, login).await
}

async fn after_login<S>(
    stream: &mut S,
    shared: &Shared,
    (kind, message): (u8, Vec<u8>),
) -> std::io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    assert_eq!(kind, wire::LOGIN, "a client logs in");
    let login = Login::parse(&message).expect("a login is well formed");
    shared.logins.lock().expect("no test panicked in it").push(login.clone());
    let admission = (shared.admit.lock().expect("no test panicked in it"))(&login);
    let mut tokens = Tokens::default();
    match admission {
        Admission::Welcome => tokens.login_done(&login.database, login.token.is_some()),
        Admission::Error(number, text) => {
            tokens.error(number, 14, text);
            tokens.done(0xfd, 0x02, None);
            return wire::write_message(stream, &tokens.0, false).await;
        }
        Admission::Elsewhere(address) => {
            tokens.routed(&address.ip().to_string(), address.port());
            tokens.done(0xfd, 0, None);
            return wire::write_message(stream, &tokens.0, false).await;
        }
        Admission::Silence => std::future::pending().await,
        Admission::Close => return Ok(()),
    }
    wire::write_message(stream, &tokens.0, false).await?;
    while let Some(request) = next(stream, shared).await? {
        let answer = (shared.respond.lock().expect("no test panicked in it"))(&request);
        if !give(stream, &request, answer).await? {
            return Ok(());
        }
    }
    Ok(())
}

/// The next request that a test has an answer for.
async fn next<S>(stream: &mut S, shared: &Shared) -> std::io::Result<Option<Request>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let (kind, message) = wire::read_message(stream).await?;
        let mut tokens = Tokens::default();
        let request = match kind {
            wire::BATCH => {
                let text = wire::batch_text(&message);
                // What sessions start with, here and at other clients.
                let first = text.trim_start().to_ascii_lowercase();
                if first.starts_with("set ") || first.starts_with("use ") {
                    tokens.done(0xfd, 0, None);
                    wire::write_message(stream, &tokens.0, false).await?;
                    continue;
                }
                Request::Batch(text)
            }
            wire::RPC => {
                let (name, values) = wire::call(&message).expect("a call is well formed");
                match (name.as_str(), values.split_first()) {
                    ("sp_executesql", Some((Value::Text(sql), rest))) => {
                        // The types of the parameters, then the parameters.
                        Request::Call(sql.clone(), rest.get(1..).unwrap_or_default().to_vec())
                    }
                    _ => Request::Call(name, values),
                }
            }
            wire::TRANSACTION => {
                let what = wire::transaction_request(&message).expect("well formed");
                tokens.transaction(match what {
                    5 => 8,
                    7 => 9,
                    _ => 10,
                });
                tokens.done(0xfd, 0, None);
                wire::write_message(stream, &tokens.0, false).await?;
                continue;
            }
            wire::ATTENTION => {
                tokens.done(0xfd, 0x20, None);
                wire::write_message(stream, &tokens.0, false).await?;
                continue;
            }
            _ => return Ok(None),
        };
        shared.seen.lock().expect("no test panicked in it").push(request.clone());
        return Ok(Some(request));
    }
}

/// Gives the answer, and says whether the connection stays.
async fn give<S>(stream: &mut S, request: &Request, answer: Answer) -> std::io::Result<bool>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (sets, failure, cut) = match answer {
        Answer::Sets(sets) => (sets, None, false),
        Answer::Error(sets, number, class, text) => (sets, Some((number, class, text)), false),
        Answer::Cut(sets) => (sets, None, true),
        Answer::Silence => std::future::pending().await,
        Answer::Close => return Ok(false),
        Answer::After(wait, answer) => {
            tokio::time::sleep(wait).await;
            return Box::pin(give(stream, request, *answer)).await;
        }
    };
    let within = matches!(request, Request::Call(..));
    let (each, last) = if within { (0xff, 0xfe) } else { (0xfd, 0xfd) };
    let mut tokens = Tokens::default();
    let count = sets.len();
    for (number, set) in sets.iter().enumerate() {
        tokens.columns(&set.columns);
        set.rows.iter().for_each(|row| tokens.row(&set.columns, row));
        // The last one of a batch is the end of the answer.
        if within || failure.is_some() || number + 1 < count {
            tokens.done(each, 0x01, Some(set.rows.len() as u64));
        }
    }
    let mut status = 0;
    if let Some((number, class, text)) = failure {
        tokens.error(number, class, text);
        status = 0x02;
    }
    if within {
        tokens.return_status(0);
    }
    let rows = sets.last().filter(|_| !within && failure.is_none());
    tokens.done(last, status, rows.map(|set| set.rows.len() as u64));
    if cut {
        // All but the end of the last row and what follows it.
        tokens.0.truncate(tokens.0.len().saturating_sub(30));
    }
    wire::write_message(stream, &tokens.0, cut).await?;
    let fatal = failure.is_some_and(|(_, class, _)| class >= 20);
    Ok(!cut && !fatal)
}
