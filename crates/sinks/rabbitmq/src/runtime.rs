//! What the client library runs on: this process's Tokio, with a stream of our own.
//!
//! What lives here: the stream, plain or encrypted, and the kit that names it as the library's and
//! keeps what the library logs of events and logins away from the log.
//! What does not: making connections (`connect.rs`).
//! Invariant: the library never opens a socket itself, so that none is without its cutter and none
//! is unencrypted that should be encrypted.

use std::cell::OnceCell;
use std::future::{Future, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_rs::Tokio;
use async_rs::traits::{Executor, Reactor, RuntimeKit};
use async_rs::util::Task;
use futures_util::{AsyncRead as FuturesRead, AsyncWrite as FuturesWrite, Stream as FuturesStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::client::TlsStream;
use tokio_util::compat::Compat;
use tracing::Dispatch;
use tracing::dispatcher::{DefaultGuard, set_default};
use tracing::instrument::WithSubscriber;

use crate::line::Line;

/// A connection's bytes.
pub(crate) enum Stream {
    Plain(Line),
    Tls(Box<TlsStream<Line>>),
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_read(context, into),
            Self::Tls(tls) => Pin::new(tls).poll_read(context, into),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_write(context, bytes),
            Self::Tls(tls) => Pin::new(tls).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_flush(context),
            Self::Tls(tls) => Pin::new(tls).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(line) => Pin::new(line).poll_shutdown(context),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(context),
        }
    }
}

thread_local! {
    static SILENCED: OnceCell<DefaultGuard> = const { OnceCell::new() };
}

/// From now on nothing is logged from this thread. The library's own thread logs each returned
/// message with its payload, and each failure that the sink tells anyway.
pub(crate) fn silence_this_thread() {
    SILENCED.with(|silenced| {
        silenced.get_or_init(|| set_default(&Dispatch::none()));
    });
}

/// Tokio as the library wants it.
#[derive(Debug, Clone)]
pub(crate) struct Kit(Tokio);

impl Kit {
    /// On the runtime of this task.
    pub(crate) fn current() -> Self {
        Self(Tokio::current())
    }
}

impl RuntimeKit for Kit {}

impl Executor for Kit {
    type Task<T: Send + 'static> = <Tokio as Executor>::Task<T>;

    fn block_on<T, F: Future<Output = T>>(&self, future: F) -> T {
        self.0.block_on(future)
    }

    fn spawn<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        &self,
        future: F,
    ) -> Task<Self::Task<T>> {
        self.0.spawn(future.with_subscriber(Dispatch::none()))
    }

    fn spawn_blocking<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(
        &self,
        work: F,
    ) -> Task<Self::Task<T>> {
        self.0.spawn_blocking(work)
    }
}

impl Reactor for Kit {
    type TcpStream = Compat<Stream>;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: io::Read + io::Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> io::Result<impl FuturesRead + FuturesWrite + Send + Unpin + 'static> {
        Err::<Compat<Stream>, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, time: Duration) -> Self::Sleep {
        self.0.sleep(time)
    }

    fn interval(&self, time: Duration) -> impl FuturesStream<Item = Instant> + Send + 'static {
        self.0.interval(time)
    }

    fn tcp_connect_addr(
        &self,
        _address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        ready(Err(io::ErrorKind::Unsupported.into()))
    }
}
