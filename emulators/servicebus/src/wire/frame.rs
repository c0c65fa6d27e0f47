//! Frames: a size, a kind, a channel, a performative and what follows it.
//!
//! What lives here: reading and writing them, and the protocol headers before them. What does not:
//! their order.
//! Invariant: a frame above [`FRAME_BYTES_MAX`] is refused by its first four bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use fe2o3_amqp_types::performatives::Performative;
use serde::Serialize;
use serde_amqp::Value;
use serde_amqp::described::Described;
use serde_amqp::primitives::{OrderedMap, Symbol};

use super::{Malformed, decode, encode, scan};

/// The largest frame in bytes that is taken and that is announced. The service announces as much.
pub(crate) const FRAME_BYTES_MAX: u32 = 65_536;
/// The smallest that a peer may announce, by the specification.
pub(crate) const FRAME_BYTES_MIN: u32 = 512;
/// Size, data offset, kind and channel.
const HEAD_BYTES: usize = 8;
/// What opens a connection with SASL.
pub(crate) const SASL_HEADER: [u8; 8] = *b"AMQP\x03\x01\x00\x00";
/// What opens a connection without it, or after it.
pub(crate) const AMQP_HEADER: [u8; 8] = *b"AMQP\x00\x01\x00\x00";

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Amqp,
    Sasl,
}

/// A frame as it came.
#[derive(Debug)]
pub(crate) struct Raw {
    pub kind: Kind,
    pub channel: u16,
    /// Empty if the frame only says that the peer lives.
    pub body: Bytes,
}

/// The next eight bytes, once they are there.
pub(crate) fn header(input: &mut BytesMut) -> Option<[u8; 8]> {
    let header = input.first_chunk::<8>().copied()?;
    input.advance(header.len());
    Some(header)
}

/// The next frame, once it is there whole.
pub(crate) fn next(input: &mut BytesMut) -> Result<Option<Raw>, Malformed> {
    let Some(head) = input.first_chunk::<HEAD_BYTES>().copied() else { return Ok(None) };
    let [s0, s1, s2, s3, offset, kind, c0, c1] = head;
    let size = u32::from_be_bytes([s0, s1, s2, s3]);
    if size > FRAME_BYTES_MAX {
        return Err(Malformed("a frame is larger than was announced"));
    }
    let size = size as usize;
    let body_at = usize::from(offset) * 4;
    if body_at < HEAD_BYTES || size < body_at {
        return Err(Malformed("a frame's data offset lies outside it"));
    }
    let kind = match kind {
        0 => Kind::Amqp,
        1 => Kind::Sasl,
        _ => return Err(Malformed("a frame is of an unknown kind")),
    };
    if input.len() < size {
        return Ok(None);
    }
    let mut frame = input.split_to(size).freeze();
    frame.advance(body_at);
    Ok(Some(Raw { kind, channel: u16::from_be_bytes([c0, c1]), body: frame }))
}

/// Takes a frame's body apart: the performative, and the payload behind it.
pub(crate) fn performative(mut body: Bytes) -> Result<(Performative, Bytes), Malformed> {
    let length = scan::value_len(&body)?;
    let bytes = body.split_to(length);
    let performative = decode(&bytes).or_else(|_| decode(&encode(&by_symbol(decode(&bytes)?))?))?;
    Ok((performative, body))
}

/// A value whose maps have symbols as keys where they had strings: the JavaScript SDK says so why a
/// message is to be dead-lettered, which the specification does not allow.
fn by_symbol(value: Value) -> Value {
    match value {
        Value::Described(described) => {
            let Described { descriptor, value } = *described;
            Value::Described(Box::new(Described { descriptor, value: by_symbol(value) }))
        }
        Value::List(elements) => Value::List(elements.into_iter().map(by_symbol).collect()),
        Value::Map(map) => {
            let pairs = map.into_inner().into_iter().map(|(key, value)| match key {
                Value::String(key) => (Value::Symbol(Symbol(key)), by_symbol(value)),
                key => (key, by_symbol(value)),
            });
            Value::Map(OrderedMap::from_iter(pairs))
        }
        other => other,
    }
}

/// A frame ready to be sent.
pub(crate) fn write<T: Serialize>(
    kind: Kind,
    channel: u16,
    performative: &T,
    payload: &[u8],
) -> Result<Bytes, Malformed> {
    Ok(assemble(kind, channel, &encode(performative)?, payload))
}

/// A frame that only says that this side lives.
pub(crate) fn heartbeat() -> Bytes {
    assemble(Kind::Amqp, 0, &[], &[])
}

fn assemble(kind: Kind, channel: u16, performative: &[u8], payload: &[u8]) -> Bytes {
    let size = HEAD_BYTES + performative.len() + payload.len();
    let mut frame = BytesMut::with_capacity(size);
    frame.put_u32(u32::try_from(size).expect("frames are cut to what the peer announced"));
    frame.put_u8(2);
    frame.put_u8(match kind {
        Kind::Amqp => 0,
        Kind::Sasl => 1,
    });
    frame.put_u16(channel);
    frame.put_slice(performative);
    frame.put_slice(payload);
    frame.freeze()
}

#[cfg(test)]
mod tests {
    use fe2o3_amqp_types::performatives::Close;

    use super::*;

    #[test]
    fn a_frame_survives_the_wire_in_any_pieces() {
        let frame =
            write(Kind::Amqp, 7, &Close { error: None }, b"rest").expect("it can be encoded");
        let mut input = BytesMut::new();
        for (at, byte) in frame.iter().enumerate() {
            assert!(next(&mut input).expect("it is well formed").is_none(), "{at} bytes");
            input.put_u8(*byte);
        }
        let raw = next(&mut input).expect("it is well formed").expect("it is whole");
        assert_eq!((raw.kind, raw.channel), (Kind::Amqp, 7));
        let (performative, payload) = performative(raw.body).expect("it is a close");
        assert_eq!(performative, Performative::Close(Close { error: None }));
        assert_eq!(payload, &b"rest"[..]);
        assert!(input.is_empty());
    }

    #[test]
    fn a_frame_that_is_too_large_is_refused_before_it_has_come() {
        let mut input = BytesMut::from(&[0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0][..]);
        assert!(next(&mut input).is_err());
        let mut input = BytesMut::from(&[0, 0, 0, 4, 2, 0, 0, 0][..]);
        assert!(next(&mut input).is_err());
    }

    #[test]
    fn a_heartbeat_has_no_body() {
        let raw = next(&mut BytesMut::from(&heartbeat()[..])).expect("it is well formed");
        assert!(raw.expect("it is whole").body.is_empty());
    }
}
