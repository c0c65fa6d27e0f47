//! What comes over a connection: frames, in memory that is bounded.
//!
//! What lives here: cutting frames out of the bytes that came, and passing what nobody wants. What
//! does not: reading from the socket (`connect.rs`), what a frame says (`wire.rs`), what is in a
//! chunk (`chunk.rs`).
//! Invariant: no more than [`MAX_HELD_BYTES`] are held, whatever the server sends. A frame is held
//! whole; but of a delivery, which has a whole chunk, only its head, and then piece by piece.

use postrider_core::Result;

use super::error::{garbled, too_much};
use super::wire::{self, Frame, Input};

/// Largest frame that is held whole, in bytes: answers, of which the longest are the streams of a
/// super stream, and confirmations. Chunks come in frames of any size, whatever was agreed on.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 20;
/// What is read at a time, at least.
const READ_BYTES: usize = 64 << 10;
/// A frame's size stands before it.
pub(crate) const SIZE_BYTES: usize = 4;
/// Most bytes that a connection holds of what came.
pub(crate) const MAX_HELD_BYTES: usize = SIZE_BYTES + MAX_FRAME_BYTES + READ_BYTES;

/// What came and is still to be read.
#[derive(Default)]
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    /// Where what was told last begins in them.
    begin: usize,
    /// Where it ends.
    end: usize,
    /// Bytes of the same frame that are still to come behind it.
    rest: usize,
}

impl Incoming {
    /// Where to read into; there is room for some bytes.
    pub(crate) fn room(&mut self) -> &mut Vec<u8> {
        if self.bytes.capacity() - self.bytes.len() < READ_BYTES {
            self.bytes.drain(..self.begin);
            (self.begin, self.end) = (0, self.end - self.begin);
            if self.bytes.capacity() - self.bytes.len() < READ_BYTES {
                self.bytes.reserve_exact(READ_BYTES);
            }
        }
        debug_assert!(self.bytes.capacity() <= MAX_HELD_BYTES, "what is waited for fits");
        &mut self.bytes
    }

    /// Goes on behind what was told last. Whether there is a frame, or a delivery's head.
    ///
    /// # Errors
    /// If the frame is larger than any that is read.
    pub(crate) fn next(&mut self) -> Result<bool> {
        self.begin = self.end;
        if !self.pass(&mut { self.rest }) {
            return Ok(false);
        }
        let mut input = Input(&self.bytes[self.begin..]);
        let (Some(size), key, version) = (input.u32(), input.u16(), input.u16()) else {
            return Ok(false);
        };
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let told = match (key, version) {
            _ if size < 4 => size,
            (Some(key), Some(version)) => match wire::delivery_head(key, version) {
                Some(head) => size.min(head),
                None if size > MAX_FRAME_BYTES => return Err(too_much(size, MAX_FRAME_BYTES)),
                None => size,
            },
            _ => return Ok(false),
        };
        if self.bytes.len() - self.begin < SIZE_BYTES + told {
            return Ok(false);
        }
        self.begin += SIZE_BYTES;
        self.end = self.begin + told;
        self.rest = size - told;
        Ok(true)
    }

    /// Whether it waits for the rest of a delivery that nobody wants.
    pub(crate) fn is_passing(&self) -> bool {
        self.rest > 0
    }

    /// The frame that was told last.
    pub(crate) fn frame(&self) -> Option<Frame<'_>> {
        wire::read(self.told())
    }

    /// What was told last.
    pub(crate) fn told(&self) -> &[u8] {
        &self.bytes[self.begin..self.end]
    }

    /// The next piece of the delivery, to be [`told`](Self::told). Whether it is there already.
    ///
    /// # Errors
    /// If the frame ends before.
    pub(crate) fn piece(&mut self, bytes: usize) -> Result<bool> {
        self.begin = self.end;
        if self.rest < bytes {
            return Err(garbled());
        }
        if self.bytes.len() - self.begin < bytes {
            return Ok(false);
        }
        self.end = self.begin + bytes;
        self.rest -= bytes;
        Ok(true)
    }

    /// Passes so many bytes of the delivery, or what is there of them; what is still to be passed
    /// is left in `bytes`. Whether that is nothing.
    pub(crate) fn pass(&mut self, bytes: &mut usize) -> bool {
        let now = (*bytes).min(self.rest).min(self.bytes.len() - self.end);
        self.end += now;
        self.begin = self.end;
        self.rest -= now;
        *bytes -= now;
        *bytes == 0
    }

    /// What it takes in memory, in bytes.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.bytes.capacity()
    }
}
