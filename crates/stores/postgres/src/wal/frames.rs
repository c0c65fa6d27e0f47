//! The server's messages on one connection, cut from a stream of bytes.
//!
//! What lives here: a message's tag, length and bytes, what a log's stream carries inside them, and
//! what waits to be sent. What does not: which message is expected when (`wire.rs`, `login.rs`).
//! Invariant: memory follows the bytes that really came, never an announced length; a call that is
//! dropped loses nothing of either direction; and a peer that does not read holds up nobody.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use postrider_core::{Error, Result};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};

use super::lsn::Lsn;
use crate::error::ServerError;

/// Room that is made for a read: one call of the system brings many rows.
const READ_BYTES: usize = 256 << 10;
/// With less room left than this, a read would bring too little.
const READ_BYTES_MIN: usize = 64 << 10;
/// The server's own bound for anything that it holds in one piece: 1 GiB.
pub(crate) const MAX_MESSAGE_BYTES: usize = 1 << 30;
/// A tag, and a length that counts itself.
const HEAD_BYTES: usize = 5;

pub(crate) const COPY_BOTH: u8 = b'W';
pub(crate) const COPY_DATA: u8 = b'd';
pub(crate) const COPY_DONE: u8 = b'c';
pub(crate) const COMMAND_COMPLETE: u8 = b'C';
pub(crate) const DATA_ROW: u8 = b'D';
pub(crate) const ERROR: u8 = b'E';
pub(crate) const KEY_DATA: u8 = b'K';
pub(crate) const NOTICE: u8 = b'N';
pub(crate) const NOTIFICATION: u8 = b'A';
pub(crate) const PARAMETER: u8 = b'S';
pub(crate) const READY: u8 = b'Z';

/// One message: its tag, and what follows its length.
pub(crate) type Message = (u8, Bytes);

/// What a log's stream carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// One message of the output plugin.
    Data {
        start: Lsn,
        end: Lsn,
        /// By the server's clock, in microseconds since 2000.
        sent_at: i64,
        /// Keeps the whole piece that was read alive, up to 256 KiB: copy what is kept for long.
        payload: Bytes,
    },
    Keepalive {
        /// Everything up to here was looked at and sent.
        end: Lsn,
        /// The server wants a status at once.
        reply: bool,
    },
    /// The server ended the stream.
    End,
}

/// Why no message came.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The connection failed or ended.
    Io(io::Error),
    /// What came is no message.
    Corrupt(Error),
}

impl Broken {
    /// As an error; `place` is a verb and an object.
    pub(crate) fn during(self, place: &str) -> Error {
        match self {
            Self::Io(error) => {
                let text = format!("{place}: the connection failed; try again");
                Error::transient(text).with_source(error)
            }
            Self::Corrupt(error) => error,
        }
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self::Corrupt(error)
    }
}

/// Both directions of a connection.
pub(crate) struct Frames<S> {
    stream: S,
    input: BytesMut,
    output: BytesMut,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Frames<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, input: BytesMut::new(), output: BytesMut::new() }
    }

    /// What is sent next; [`Self::flush`] or any wait for a message sends it.
    pub(crate) fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// The next message, as soon as it is whole.
    ///
    /// # Errors
    /// The stream's own; `UnexpectedEof` when it ends.
    ///
    /// # Cancellation
    /// Safe: what came stays, and what was to be sent is sent by a later call.
    pub(crate) async fn message(&mut self) -> Result<Message, Broken> {
        loop {
            if let Some(message) = self.buffered()? {
                return Ok(message);
            }
            poll_fn(|context| self.poll_exchange(context)).await?;
        }
    }

    /// The next message if it is here already.
    pub(crate) fn buffered(&mut self) -> Result<Option<Message>> {
        split(&mut self.input)
    }

    /// Sends all that is to be sent.
    ///
    /// # Cancellation
    /// Safe: a later call sends the rest.
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        poll_fn(|context| self.poll_flush(context)).await
    }

    /// Sends what the peer takes without a wait.
    pub(crate) async fn try_flush(&mut self) -> io::Result<()> {
        poll_fn(|context| match self.poll_flush(context) {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => Poll::Ready(Ok(())),
        })
        .await
    }

    fn poll_flush(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, &self.output) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => self.output.advance(written),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Sends what the peer takes, and reads once.
    fn poll_exchange(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(Err(error)) = self.poll_flush(context) {
            // The peer may have said why before it hung up.
            return match self.poll_read(context) {
                Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
                Poll::Ready(Err(_)) | Poll::Pending => Poll::Ready(Err(error)),
            };
        }
        self.poll_read(context)
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.input.capacity() - self.input.len() < READ_BYTES_MIN {
            self.input.reserve(READ_BYTES);
        }
        let read = pin!(self.stream.read_buf(&mut self.input));
        match ready!(read.poll(context))? {
            0 => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// Cuts off the first message if it is whole.
pub(super) fn split(input: &mut BytesMut) -> Result<Option<Message>> {
    let Some(head) = input.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
    let [tag, length @ ..] = *head;
    // Longer than any bound on a machine whose addresses are shorter.
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if !(HEAD_BYTES - 1..=MAX_MESSAGE_BYTES).contains(&length) {
        return Err(Error::corrupt(format!(
            "read the log: a message of tag {tag:#04x} has the impossible length {length}"
        )));
    }
    if input.len() <= length {
        return Ok(None);
    }
    let mut body = input.split_to(length + 1).freeze();
    body.advance(HEAD_BYTES);
    Ok(Some((tag, body)))
}

/// What a message of copied data has inside.
pub(crate) fn frame(mut body: Bytes) -> Result<Frame> {
    let kind = body.first().copied();
    let frame = match kind {
        Some(b'w') if body.len() >= 25 => {
            body.advance(1);
            let (start, end) = (Lsn(body.get_u64()), Lsn(body.get_u64()));
            Frame::Data { start, end, sent_at: body.get_i64(), payload: body }
        }
        Some(b'k') if body.len() == 18 => {
            body.advance(1);
            let end = Lsn(body.get_u64());
            body.advance(8);
            Frame::Keepalive { end, reply: body.get_u8() != 0 }
        }
        _ => {
            return Err(Error::corrupt(format!(
                "read the log: {} bytes of copied data are of no known kind ({kind:?})",
                body.len()
            )));
        }
    };
    Ok(frame)
}

/// A standby's status: everything up to here is written, flushed and applied. With `ask` the server
/// is to answer at once.
pub(crate) fn put_status(output: &mut BytesMut, flushed: Lsn, at: i64, ask: bool) {
    output.put_u8(COPY_DATA);
    output.put_u32(4 + 34);
    output.put_u8(b'r');
    for _ in 0..3 {
        output.put_u64(flushed.0);
    }
    output.put_i64(at);
    output.put_u8(u8::from(ask));
}

/// What the server says in an error or a notice.
///
/// # Errors
/// `Corrupt` if a field has no end.
pub(crate) fn server_error(mut body: &[u8]) -> Result<ServerError> {
    let mut error =
        ServerError { code: String::new(), message: String::new(), detail: None, hint: None };
    while let Some((&field, rest)) = body.split_first() {
        if field == 0 {
            break;
        }
        let (text, rest) = text(rest)?;
        match field {
            b'C' => error.code = text,
            b'M' => error.message = text,
            b'D' => error.detail = Some(text),
            b'H' => error.hint = Some(text),
            _ => {}
        }
        body = rest;
    }
    Ok(error)
}

/// The text up to a zero byte, and what follows it. Bytes that are no UTF-8 come before the
/// encoding is settled, in errors alone.
pub(crate) fn text(bytes: &[u8]) -> Result<(String, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0);
    let end = end.ok_or_else(|| Error::corrupt("read the log: a text has no end"))?;
    Ok((String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 1..]))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use postrider_core::ErrorKind;
    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("short");
        [&[tag][..], &length.to_be_bytes(), body].concat()
    }

    fn read(frames: &mut Frames<DuplexStream>) -> Option<Result<Message, Broken>> {
        frames.message().now_or_never()
    }

    /// Each read that is begun before the message is whole is dropped.
    #[tokio::test]
    async fn messages_come_whole_byte_by_byte_and_dropped_calls_lose_nothing() {
        let (near, mut far) = duplex(64);
        let mut frames = Frames::new(near);
        for (tag, body) in [(b'd', &b"payload"[..]), (b'Z', b""), (b'c', b"x")] {
            let bytes = message(tag, body);
            let (last, before) = bytes.split_last().expect("a tag");
            for byte in before {
                far.write_u8(*byte).await.expect("room");
                assert!(read(&mut frames).is_none(), "not whole yet");
            }
            far.write_u8(*last).await.expect("room");
            let (found, rest) = read(&mut frames).expect("whole").expect("a message");
            assert_eq!((found, &rest[..]), (tag, body));
        }
        drop(far);
        let ended = read(&mut frames).expect("an end");
        assert!(matches!(ended, Err(Broken::Io(error))
            if error.kind() == io::ErrorKind::UnexpectedEof));
    }

    #[tokio::test]
    async fn one_read_brings_many_messages_in_their_order() {
        let (near, mut far) = duplex(1 << 20);
        let bytes: Vec<u8> = (0..=u8::MAX).flat_map(|n| message(b'd', &[n; 100])).collect();
        far.write_all(&bytes).await.expect("room");
        let mut frames = Frames::new(near);
        assert!(frames.buffered().expect("nothing").is_none(), "nothing was read yet");
        for n in 0..=u8::MAX {
            let found = match n {
                0 => read(&mut frames).expect("here").expect("a message"),
                _ => frames.buffered().expect("well-formed").expect("read with the first"),
            };
            assert_eq!((found.0, &found.1[..]), (b'd', &[n; 100][..]));
        }
        assert!(frames.buffered().expect("nothing").is_none());
    }

    #[tokio::test]
    async fn an_announced_length_makes_no_room() {
        let (near, mut far) = duplex(1 << 20);
        let mut frames = Frames::new(near);
        far.write_all(&[b'd', 0x3f, 0xff, 0xff, 0xff, 1, 2, 3]).await.expect("room");
        assert!(read(&mut frames).is_none());
        assert!(frames.input.capacity() <= 2 * READ_BYTES, "{}", frames.input.capacity());
        for _ in 0..8 {
            far.write_all(&[7; 100_000]).await.expect("room");
            assert!(read(&mut frames).is_none());
        }
        assert!(frames.input.capacity() <= 2 * 800_000 + READ_BYTES);
    }

    #[tokio::test]
    async fn impossible_lengths_are_corrupt() {
        for length in [[0, 0, 0, 0], [0, 0, 0, 3], [0x40, 0, 0, 1], [0x80, 0, 0, 0], [0xff; 4]] {
            let (near, mut far) = duplex(64);
            far.write_all(b"d").await.expect("room");
            far.write_all(&length).await.expect("room");
            match read(&mut Frames::new(near)) {
                Some(Err(Broken::Corrupt(error))) => assert_eq!(error.kind(), ErrorKind::Corrupt),
                other => panic!("{length:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn copied_data_is_rows_or_a_keepalive() {
        let data = [&b"w"[..], &[0, 0, 0, 0, 0, 0, 0, 1], &[0, 0, 0, 0, 0, 0, 0, 2], &[0xff; 8]];
        let data = Bytes::from([&data.concat()[..], b"row"].concat());
        let (start, end, payload) = (Lsn(1), Lsn(2), Bytes::from_static(b"row"));
        let found = frame(data.clone()).expect("data");
        assert_eq!(found, Frame::Data { start, end, sent_at: -1, payload });
        let alive = Bytes::from_static(b"k\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0\0\x01");
        let found = frame(alive.clone()).expect("a keepalive");
        assert_eq!(found, Frame::Keepalive { end: Lsn(1 << 32 | 2), reply: true });
        let long = Bytes::from([&alive[..], &[0]].concat());
        for wrong in [data.slice(..24), alive.slice(..17), long, Bytes::new(), data.slice(1..)] {
            assert_eq!(frame(wrong).expect_err("neither").kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_servers_error_has_its_parts() {
        let body = b"SERROR\0VERROR\0C55006\0Mslot is active\0Dfor 7\0Hwait\0Fslot.c\0\0";
        let error = server_error(body).expect("an error");
        assert_eq!(error.to_string(), "slot is active (SQLSTATE 55006); DETAIL: for 7; HINT: wait");
        assert!(server_error(b"C55006").is_err(), "a text without its end");
        assert_eq!(server_error(b"").expect("nothing").code, "");
    }
}
