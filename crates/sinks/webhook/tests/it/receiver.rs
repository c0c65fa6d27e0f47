//! Two kinds of servers: a well-behaved one (axum), and one that writes bytes by hand.
//!
//! What lives here: the servers. What does not: any expectation.
//! Invariant: a server ends when its value is dropped.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri, Version};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A request as it arrived.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) method: Method,
    pub(crate) uri: String,
    pub(crate) version: Version,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Received {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("ASCII"))
    }
}

/// A server on a free port.
pub(crate) struct Receiver {
    address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
    _tasks: JoinSet<()>,
}

impl Receiver {
    /// Answers each request by `answer`.
    pub(crate) async fn start<F, R>(answer: F) -> Self
    where
        F: Fn(Received) -> R + Clone + Send + Sync + 'static,
        R: Future<Output = Response> + Send,
    {
        let received: Arc<Mutex<Vec<Received>>> = Arc::default();
        let log = received.clone();
        let handler = move |method: Method, uri: Uri, version, headers, body| {
            let uri = uri.to_string();
            let request = Received { method, uri, version, headers, body };
            log.lock().expect("not poisoned").push(request.clone());
            let answer = answer.clone();
            async move { answer(request).await }
        };
        let app = axum::Router::new()
            .fallback(any(
                move |method: Method, uri: Uri, v: Version, h: HeaderMap, body: Bytes| {
                    handler(method, uri, v, h, body)
                },
            ))
            .layer(axum::extract::DefaultBodyLimit::disable());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, app).await.expect("served") });
        Self { address, received, _tasks: tasks }
    }

    /// Answers every request with one status.
    pub(crate) async fn answering(status: u16) -> Self {
        let status = StatusCode::from_u16(status).expect("a status");
        Self::start(move |_| async move { status.into_response() }).await
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.received.lock().expect("not poisoned").clone()
    }
}

/// A server that reads one request of each connection and then does as told.
pub(crate) struct RawServer {
    pub(crate) address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl RawServer {
    pub(crate) async fn start<F, R>(act: F) -> Self
    where
        F: Fn(usize, TcpStream) -> R + Send + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            let mut count = 0;
            while let Ok((stream, _)) = listener.accept().await {
                count += 1;
                connections.spawn(act(count, stream));
            }
        });
        Self { address, _tasks: tasks }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }
}

/// Reads up to the end of the request's header, and its body of two bytes.
pub(crate) async fn read_request(stream: &mut TcpStream) -> bool {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let end = seen.windows(4).position(|four| four == b"\r\n\r\n");
        if end.is_some_and(|end| seen.len() >= end + 6) {
            return true;
        }
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return false,
            Ok(count) => seen.extend_from_slice(&buffer[..count]),
        }
    }
}

pub(crate) async fn write(stream: &mut TcpStream, text: &str) {
    // The other side may be gone already; that is its choice.
    let _ = stream.write_all(text.as_bytes()).await;
}
