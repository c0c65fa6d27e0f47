//! The socket of a connection, which can be taken away from whoever writes to it.
//!
//! What lives here: reading and writing until it is cut, and cutting it. What does not: why it is
//! cut (`publish.rs`), TLS and AMQP above it.
//! Invariant: once `cut` has returned, nothing more of this connection leaves this host: no event
//! that was given up is sent behind its own successors. What the broker had received by then it may
//! still queue, as a repetition.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// What reads and writes.
pub(crate) struct Line(Arc<Shared>);

/// What cuts it, also when it is dropped: no connection goes on that nobody has.
pub(crate) struct Cutter(Arc<Shared>);

struct Shared {
    /// None once it has ended.
    stream: Mutex<Option<TcpStream>>,
    reader: AtomicWaker,
    writer: AtomicWaker,
    ended: CancellationToken,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<TcpStream>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll<T>(
        &self,
        waker: &AtomicWaker,
        context: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // Before the look, so that a cut in between is not missed.
        waker.register(context.waker());
        let polled = match self.lock().as_mut() {
            Some(stream) => poll(Pin::new(stream), context),
            None => Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
        };
        if let Poll::Ready(Err(error)) = &polled
            && error.kind() != io::ErrorKind::Interrupted
        {
            self.ended.cancel();
        }
        polled
    }
}

impl Line {
    /// A line over a socket, and what cuts it.
    pub(crate) fn new(stream: TcpStream) -> (Self, Cutter) {
        let shared = Arc::new(Shared {
            stream: Mutex::new(Some(stream)),
            reader: AtomicWaker::new(),
            writer: AtomicWaker::new(),
            ended: CancellationToken::new(),
        });
        (Self(Arc::clone(&shared)), Cutter(shared))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.lock().take();
        self.0.ended.cancel();
    }
}

impl Cutter {
    /// Ends the connection by a reset, at once, with what the kernel has not sent yet. Harmless if
    /// it has ended.
    pub(crate) fn cut(&self) {
        if let Some(stream) = self.0.lock().take() {
            // It fails only on a socket that has ended, and then nothing is left to be sent.
            let _ = stream.set_zero_linger();
        }
        self.0.ended.cancel();
        self.0.reader.wake();
        self.0.writer.wake();
    }

    /// Whether the connection has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.ended.is_cancelled()
    }

    /// Cancelled when it has.
    pub(crate) fn token(&self) -> CancellationToken {
        self.0.ended.clone()
    }

    /// Waits until it has.
    pub(crate) async fn ended(&self) {
        self.0.ended.cancelled().await;
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.cut();
    }
}

impl AsyncRead for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let shared = &self.0;
        let had = into.filled().len();
        let read =
            shared.poll(&shared.reader, context, |stream, context| stream.poll_read(context, into));
        if matches!(read, Poll::Ready(Ok(()))) && into.filled().len() == had {
            shared.ended.cancel();
        }
        read
    }
}

impl AsyncWrite for Line {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let shared = &self.0;
        shared.poll(&shared.writer, context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shared = &self.0;
        shared.poll(&shared.writer, context, |stream, context| stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shared = &self.0;
        shared.poll(&shared.writer, context, |stream, context| stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    /// A line and its other end.
    async fn pair() -> (Line, Cutter, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (line, cutter) = Line::new(ours.expect("connected"));
        (line, cutter, theirs.expect("accepted").0)
    }

    #[tokio::test]
    async fn what_was_not_sent_when_it_is_cut_is_never_sent() {
        let (mut line, cutter, mut theirs) = pair().await;
        let chunk = vec![0; 64 * 1024];
        let mut sent = 0_usize;
        // Nobody reads at the other end: a write that gets no further found both buffers full.
        while let Ok(written) = timeout(Duration::from_millis(200), line.write(&chunk)).await {
            sent += written.expect("open");
        }
        let stuck = line.write_all(&chunk);
        let (ended, ()) = tokio::join!(stuck, async { cutter.cut() });
        assert_eq!(ended.expect_err("cut").kind(), io::ErrorKind::ConnectionAborted);
        let (mut came, mut buffer) = (0_usize, vec![0; 64 * 1024]);
        let end = loop {
            match theirs.read(&mut buffer).await {
                Ok(0) => break None,
                Ok(bytes) => came += bytes,
                Err(error) => break Some(error.kind()),
            }
        };
        assert_eq!(end, Some(io::ErrorKind::ConnectionReset));
        assert!(came < sent, "{came} of {sent} bytes");
    }

    #[tokio::test]
    async fn the_end_of_the_other_side_is_noticed() {
        let (mut line, cutter, theirs) = pair().await;
        assert!(!cutter.has_ended());
        drop(theirs);
        assert_eq!(line.read(&mut [0; 1]).await.expect("no error"), 0);
        timeout(Duration::from_secs(5), cutter.ended()).await.expect("it has ended");
    }
}
