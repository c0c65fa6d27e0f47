//! TLS as TDS has it: the handshake inside prelogin packets, everything after it bare.
//!
//! What lives here: the server's side of it. What does not: when it is asked for (`mod.rs`).
//! Invariant: a handshake's bytes are wrapped in both directions and no others are.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;

const HEADER: usize = 8;
const PRELOGIN: u8 = 0x12;

/// A server's certificate at work.
pub(crate) struct Acceptor(TlsAcceptor);

impl Acceptor {
    pub(crate) fn new(config: ServerConfig) -> Self {
        Self(TlsAcceptor::from(Arc::new(config)))
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<Wrapped>> {
        let mut sealed = self.0.accept(Wrapped::new(stream)).await?;
        sealed.get_mut().0.handshake = false;
        Ok(sealed)
    }
}

/// The connection without its TLS.
pub(crate) fn plain(sealed: TlsStream<Wrapped>) -> TcpStream {
    sealed.into_inner().0.stream
}

/// A stream whose bytes are in prelogin packets until the handshake is over.
pub(crate) struct Wrapped {
    stream: TcpStream,
    handshake: bool,
    head: [u8; HEADER],
    head_read: usize,
    /// Of the packet that is being read.
    left: usize,
    /// A packet that is being written, and how much of it is.
    out: Vec<u8>,
    written: usize,
    /// Bytes of the caller's in it.
    taken: usize,
}

impl Wrapped {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            handshake: true,
            head: [0; HEADER],
            head_read: 0,
            left: 0,
            out: Vec::new(),
            written: 0,
            taken: 0,
        }
    }

    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            let more = Pin::new(&mut self.stream).poll_write(cx, &self.out[self.written..]);
            self.written += ready!(more)?;
        }
        self.out.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Wrapped {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // A packet that began in the handshake is read to its end as one.
        if !this.handshake && this.left == 0 && this.head_read == 0 {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        while this.left == 0 {
            let mut head = ReadBuf::new(&mut this.head[this.head_read..]);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut head))?;
            let read = head.filled().len();
            if read == 0 {
                return Poll::Ready(Ok(()));
            }
            this.head_read += read;
            if this.head_read == HEADER {
                this.left = usize::from(u16::from_be_bytes([this.head[2], this.head[3]])) - HEADER;
                this.head_read = 0;
            }
        }
        let mut part = buf.take(this.left);
        ready!(Pin::new(&mut this.stream).poll_read(cx, &mut part))?;
        let read = part.filled().len();
        // `part` has filled the front of what is free in `buf`.
        // Safe way round: copy what it has.
        let bytes = part.filled().to_vec();
        buf.put_slice(&bytes);
        this.left -= read;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wrapped {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if !this.handshake {
            ready!(this.poll_out(cx))?;
            return Pin::new(&mut this.stream).poll_write(cx, bytes);
        }
        if this.out.is_empty() {
            let part = &bytes[..bytes.len().min(4_000)];
            this.taken = part.len();
            this.out.extend([PRELOGIN, 1]);
            let length = u16::try_from(part.len() + HEADER).expect("a packet is small");
            this.out.extend(length.to_be_bytes());
            this.out.extend([0; 4]);
            this.out.extend(part);
        }
        ready!(this.poll_out(cx))?;
        Poll::Ready(Ok(std::mem::take(&mut this.taken)))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_out(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
