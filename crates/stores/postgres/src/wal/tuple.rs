//! One row of `pgoutput`: its columns, without a copy of any.
//!
//! What lives here: where columns begin and end. What does not: what they mean.
//! Invariant: a row is measured once, when it is cut from its message; whoever walks over it
//! afterwards finds the columns that were counted, all of them inside its bytes.

use bytes::Bytes;

/// A row. Equal rows have equal bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tuple {
    count: u16,
    /// The columns, one behind the other.
    bytes: Bytes,
}

/// A column's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Null,
    /// A large value that an update left as it was; the server does not send it.
    Unchanged,
    /// As the type's output function writes it, in UTF-8.
    Text(&'a [u8]),
    /// As the type's send function writes it.
    Binary(&'a [u8]),
}

/// A tag and a length.
const VALUE_HEAD_BYTES: usize = 5;

impl Tuple {
    /// How many columns the row at the beginning of `bytes` has, and how many bytes with their
    /// count.
    ///
    /// # Errors
    /// The offset of the column that is cut short or of no known kind.
    pub(super) fn measure(bytes: &[u8]) -> Result<(u16, usize), usize> {
        let (count, mut rest) = bytes.split_first_chunk().ok_or(0usize)?;
        let count = u16::from_be_bytes(*count);
        for _ in 0..count {
            (_, rest) = cut(rest).ok_or(bytes.len() - rest.len())?;
        }
        Ok((count, bytes.len() - rest.len()))
    }

    /// The row whose bytes were measured, its count included.
    pub(super) fn new(count: u16, bytes: Bytes) -> Self {
        Self { count, bytes: bytes.slice(size_of::<u16>()..) }
    }

    /// How many columns it has.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn len(&self) -> usize {
        usize::from(self.count)
    }

    /// The columns, in the relation's order.
    pub(crate) fn values(&self) -> Values<'_> {
        Values { rest: &self.bytes }
    }

    /// A value of this row without a copy: it keeps the whole message alive.
    ///
    /// # Panics
    /// If it is none of this row's.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn share(&self, value: &[u8]) -> Bytes {
        self.bytes.slice_ref(value)
    }
}

/// Walks over a row.
#[derive(Debug, Clone)]
pub(crate) struct Values<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        let (value, rest) = cut(self.rest)?;
        self.rest = rest;
        Some(value)
    }
}

/// The first column, and what follows it.
fn cut(bytes: &[u8]) -> Option<(Value<'_>, &[u8])> {
    let (kind, rest) = bytes.split_first()?;
    match kind {
        b'n' => return Some((Value::Null, rest)),
        b'u' => return Some((Value::Unchanged, rest)),
        b't' | b'b' => {}
        _ => return None,
    }
    let (head, rest) = bytes.split_first_chunk::<VALUE_HEAD_BYTES>()?;
    let [_, length @ ..] = *head;
    let (value, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(length)).ok()?)?;
    let value = if *kind == b't' { Value::Text(value) } else { Value::Binary(value) };
    Some((value, rest))
}
