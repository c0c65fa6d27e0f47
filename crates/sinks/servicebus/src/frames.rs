//! A look at what a service sends, before the AMQP library takes it apart.
//!
//! What lives here: following the lengths of frames, and refusing a frame that can't be one. What
//! does not: what is in a frame.
//! Invariant: no frame that is shorter than its own head is read: the library would panic over it,
//! and the task of its connection would end without a reason.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A protocol header is as long as the head of a frame: size, offset, kind, channel.
const HEAD_BYTES: u32 = 8;
const SIZE_BYTES: usize = 4;
/// What a protocol header begins with, where a frame has its size.
const HEADER: [u8; SIZE_BYTES] = *b"AMQP";

/// Reads from another stream, and ends with an error where the frames do.
#[derive(Debug)]
pub(crate) struct Frames<Io> {
    stream: Io,
    /// Of the frame that comes: its size, as far as it is there.
    size: [u8; SIZE_BYTES],
    filled: usize,
    /// Bytes of the present frame that are still to come.
    left: u32,
}

impl<Io> Frames<Io> {
    pub(crate) fn new(stream: Io) -> Self {
        Self { stream, size: [0; SIZE_BYTES], filled: 0, left: 0 }
    }

    /// Follows what came; whether it can be frames.
    fn follow(&mut self, mut bytes: &[u8]) -> bool {
        while let Some((first, rest)) = bytes.split_first() {
            if self.left > 0 {
                let passed = bytes.len().min(self.left as usize);
                self.left -= u32::try_from(passed).unwrap_or(self.left);
                bytes = &bytes[passed..];
                continue;
            }
            self.size[self.filled] = *first;
            self.filled += 1;
            bytes = rest;
            if self.filled < SIZE_BYTES {
                continue;
            }
            self.filled = 0;
            let size = match self.size {
                HEADER => HEAD_BYTES,
                size => u32::from_be_bytes(size),
            };
            if size < HEAD_BYTES {
                return false;
            }
            self.left = size - SIZE_BYTES as u32;
        }
        true
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Frames<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if matches!(read, Poll::Ready(Ok(()))) && !self.follow(&into.filled()[before..]) {
            into.set_filled(before);
            let text = "the service sent a frame that is shorter than a frame can be";
            return Poll::Ready(Err(io::Error::other(text)));
        }
        read
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Frames<Io> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    /// A header, a frame of nothing, one of five bytes.
    const GOOD: &[u8] = b"AMQP\0\x01\0\0\0\0\0\x08\x02\0\0\0\0\0\0\x0d\x02\0\0\0\0S\x18\xc0\x01";

    async fn read(pieces: &[&[u8]]) -> io::Result<Vec<u8>> {
        let pieces = Pieces(pieces.iter().map(|piece| piece.to_vec()).collect());
        let mut stream = Frames::new(pieces);
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.map(|_| all)
    }

    struct Pieces(std::collections::VecDeque<Vec<u8>>);

    impl AsyncRead for Pieces {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if let Some(mut piece) = self.0.pop_front() {
                let rest = piece.split_off(piece.len().min(into.remaining()));
                into.put_slice(&piece);
                if !rest.is_empty() {
                    self.0.push_front(rest);
                }
            }
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn frames_pass_as_they_are_in_any_pieces() {
        assert_eq!(read(&[GOOD]).await.expect("frames"), GOOD);
        let bytes: Vec<&[u8]> = GOOD.chunks(1).collect();
        assert_eq!(read(&bytes).await.expect("frames"), GOOD);
        let threes: Vec<&[u8]> = GOOD.chunks(3).collect();
        assert_eq!(read(&threes).await.expect("frames"), GOOD);
    }

    /// The library's decoder takes four bytes of a frame that need not be there.
    #[tokio::test]
    async fn a_frame_shorter_than_its_head_is_an_error() {
        for size in 0..8 {
            let short = [GOOD, &[0, 0, 0, size], &[2, 0, 0, 0]].concat();
            read(&[&short]).await.expect_err("it is no frame");
            let bytes: Vec<&[u8]> = short.chunks(1).collect();
            read(&bytes).await.expect_err("it is no frame");
        }
        let shortest = [GOOD, &[0, 0, 0, 8], &[2, 0, 0, 0]].concat();
        read(&[&shortest]).await.expect("it is a frame");
    }
}
