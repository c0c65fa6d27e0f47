//! The socket of a connection, which can be taken away from whoever writes to it.
//!
//! What lives here: reading and writing until the line is cut, and cutting it. What does not: why
//! it is cut (`worker.rs`), TLS and AMQP above it (`connect.rs`).
//! Invariant: once `cut` has returned, nothing more of this connection leaves this host: neither
//! what the AMQP library still has in its queues, nor what the kernel has not sent yet.
//!
//! Without it a transfer of a connection that was given up could still arrive, behind newer ones of
//! its key: the library goes on writing, and looks at nothing else while a write does not get on.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

struct Shared {
    /// None: cut, or given back by its user.
    stream: Mutex<Option<TcpStream>>,
    reader: AtomicWaker,
    writer: AtomicWaker,
    cut: CancellationToken,
}

impl Shared {
    fn take(&self) -> Option<TcpStream> {
        // Nothing panics while it is held.
        self.stream.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn poll<T>(
        &self,
        waker: &AtomicWaker,
        context: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut TcpStream>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        // Before the look: a cut that comes in between wakes.
        waker.register(context.waker());
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        match stream.as_mut() {
            Some(stream) => poll(Pin::new(stream), context),
            None => Poll::Ready(Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                "the connection was given up",
            ))),
        }
    }
}

/// What reads and writes. Dropping it closes the socket as usual.
pub(crate) struct Line(Arc<Shared>);

/// What cuts it.
#[derive(Clone)]
pub(crate) struct Cutter(Arc<Shared>);

/// Cuts when it is dropped: a connection that is left unfinished shall not go on by itself.
pub(crate) struct CutOnDrop(pub(crate) Cutter);

impl Line {
    pub(crate) fn new(stream: TcpStream) -> (Self, CutOnDrop) {
        let shared = Arc::new(Shared {
            stream: Mutex::new(Some(stream)),
            reader: AtomicWaker::new(),
            writer: AtomicWaker::new(),
            cut: CancellationToken::new(),
        });
        (Self(Arc::clone(&shared)), CutOnDrop(Cutter(shared)))
    }
}

impl Cutter {
    /// Ends the connection by a reset, at once. Harmless if it has ended already.
    pub(crate) fn cut(&self) {
        self.0.cut.cancel();
        if let Some(stream) = self.0.take() {
            // A socket that can't be told so has ended, and then the kernel holds nothing back.
            let _ = stream.set_zero_linger();
        }
        self.0.reader.wake();
        self.0.writer.wake();
    }

    /// Waits until it is cut.
    pub(crate) async fn was_cut(&self) {
        self.0.cut.cancelled().await;
    }
}

impl Drop for CutOnDrop {
    fn drop(&mut self) {
        self.0.cut();
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Line")
    }
}

impl AsyncRead for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let shared = &self.0;
        shared.poll(&shared.reader, context, |stream, context| stream.poll_read(context, into))
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

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let shared = &self.0;
        shared.poll(&shared.writer, context, |stream, context| {
            stream.poll_write_vectored(context, bytes)
        })
    }

    fn is_write_vectored(&self) -> bool {
        true
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
    async fn pair() -> (Line, CutOnDrop, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let (ours, theirs) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (line, cut) = Line::new(ours.expect("connected"));
        (line, cut, theirs.expect("accepted").0)
    }

    #[tokio::test]
    async fn a_write_that_does_not_get_on_ends_with_the_cut_and_so_does_a_read() {
        let (mut line, cut, _theirs) = pair().await;
        let cutter = cut.0.clone();
        let mut writing = Box::pin(async move {
            let chunk = vec![0; 1024 * 1024];
            loop {
                if let Err(error) = line.write_all(&chunk).await {
                    return (line, error);
                }
            }
        });
        // Nobody reads at the other end, so that it fills up and stands still.
        let stuck = timeout(Duration::from_millis(200), &mut writing).await;
        assert!(stuck.is_err(), "nothing has ended it yet");
        let cutting = async { cutter.cut() };
        let ((mut line, error), ()) = tokio::join!(writing, cutting);
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        assert!(line.read(&mut [0; 1]).await.is_err());
        timeout(Duration::from_secs(5), cutter.was_cut()).await.expect("it was");
    }

    #[tokio::test]
    async fn what_the_kernel_has_not_sent_by_then_is_never_sent() {
        let (mut line, cut, mut theirs) = pair().await;
        let mut sent = 0_usize;
        let chunk = vec![0; 64 * 1024];
        // Nobody reads at the other end: a write that does not get on found both buffers full.
        while let Ok(written) = timeout(Duration::from_millis(200), line.write(&chunk)).await {
            sent += written.expect("open");
        }
        drop(cut);
        let mut came = 0_usize;
        let mut buffer = vec![0; 64 * 1024];
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
    async fn a_line_that_is_dropped_ends_as_usual() {
        let (mut line, cut, mut theirs) = pair().await;
        line.write_all(b"goodbye").await.expect("open");
        drop(line);
        drop(cut);
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).await.expect("no reset");
        assert_eq!(all, b"goodbye");
    }
}
