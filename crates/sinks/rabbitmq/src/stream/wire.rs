//! RabbitMQ's stream protocol, version 1: the frames that a producer needs.
//!
//! What lives here: writing requests and reading frames. What does not: sockets (`connect.rs`), and
//! what stands in a message (`encode.rs`) or a chunk (`chunk.rs`).
//! Invariant: bytes from outside are read by `Input` alone, which never reads past their end and
//! takes no room for what is not there.

use bytes::{BufMut, BytesMut};

use super::chunk::HEAD_BYTES;

/// Version of every command that is sent.
const VERSION: u16 = 1;
/// A response has its request's key with this bit.
const RESPONSE: u16 = 0x8000;
const DECLARE_PUBLISHER: u16 = 0x01;
const PUBLISH: u16 = 0x02;
const PUBLISH_CONFIRM: u16 = 0x03;
const PUBLISH_ERROR: u16 = 0x04;
const QUERY_SEQUENCE: u16 = 0x05;
const SUBSCRIBE: u16 = 0x07;
const DELIVER: u16 = 0x08;
const CREDIT: u16 = 0x09;
const UNSUBSCRIBE: u16 = 0x0c;
const METADATA: u16 = 0x0f;
const METADATA_UPDATE: u16 = 0x10;
const PEER_PROPERTIES: u16 = 0x11;
const SASL_HANDSHAKE: u16 = 0x12;
const SASL_AUTHENTICATE: u16 = 0x13;
const TUNE: u16 = 0x14;
const HEARTBEAT: u16 = 0x17;
const OPEN: u16 = 0x15;
const CLOSE: u16 = 0x16;
const PARTITIONS: u16 = 0x19;

/// What a frame with one message has beside it: size, key, version, publisher, count, id, length.
pub(crate) const PUBLISH_OVERHEAD: usize = 4 + 2 + 2 + 1 + 4;
/// What each message has beside its bytes: its publishing id and its length.
pub(crate) const MESSAGE_OVERHEAD: usize = 8 + 4;

/// The server's answer to a request: [`OK`] or what is wrong.
pub(crate) type Code = u16;
pub(crate) const OK: Code = 0x01;
pub(crate) const NO_STREAM: Code = 0x02;
pub(crate) const NOT_AVAILABLE: Code = 0x06;
pub(crate) const NO_MECHANISM: Code = 0x07;
pub(crate) const LOGIN_REFUSED: Code = 0x08;
pub(crate) const LOGIN_REFUSED_LOOPBACK: Code = 0x0b;
pub(crate) const VHOST_REFUSED: Code = 0x0c;
pub(crate) const FRAME_TOO_LARGE: Code = 0x0e;
pub(crate) const ACCESS_REFUSED: Code = 0x10;
pub(crate) const NO_PUBLISHER: Code = 0x12;

/// What a client asks for. The server's response repeats its number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Request<'a> {
    PeerProperties { name: &'a str },
    SaslHandshake,
    SaslAuthenticate { mechanism: &'a str, data: &'a [u8] },
    Open { vhost: &'a str },
    Metadata { stream: &'a str },
    Partitions { super_stream: &'a str },
    DeclarePublisher { publisher: u8, reference: &'a str, stream: &'a str },
    QuerySequence { reference: &'a str, stream: &'a str },
    Subscribe { subscription: u8, stream: &'a str, from: From, credit: u16 },
    Unsubscribe { subscription: u8 },
    Close,
}

/// Where a subscription begins.
#[derive(Debug, Clone, Copy)]
pub(crate) enum From {
    /// At the last chunk.
    Last,
    /// At the chunk with this offset, or the first that is left behind it.
    Offset(u64),
}

impl Request<'_> {
    /// Writes the frame.
    pub(crate) fn write(self, number: u32, into: &mut BytesMut) {
        let begin = begin(into, self.key());
        into.put_u32(number);
        match self {
            Self::PeerProperties { name } => {
                let properties = [("product", "Postrider"), ("connection_name", name)];
                into.put_u32(2);
                for (name, value) in properties {
                    text(into, name);
                    text(into, value);
                }
            }
            Self::SaslHandshake => {}
            Self::SaslAuthenticate { mechanism, data } => {
                text(into, mechanism);
                into.put_u32(length(data.len()));
                into.put_slice(data);
            }
            Self::Open { vhost } => text(into, vhost),
            Self::Metadata { stream } => {
                into.put_u32(1);
                text(into, stream);
            }
            Self::Partitions { super_stream } => text(into, super_stream),
            Self::DeclarePublisher { publisher, reference, stream } => {
                into.put_u8(publisher);
                text(into, reference);
                text(into, stream);
            }
            Self::QuerySequence { reference, stream } => {
                text(into, reference);
                text(into, stream);
            }
            Self::Subscribe { subscription, stream, from, credit } => {
                into.put_u8(subscription);
                text(into, stream);
                match from {
                    From::Last => into.put_u16(2),
                    From::Offset(offset) => {
                        into.put_u16(4);
                        into.put_u64(offset);
                    }
                }
                into.put_u16(credit);
            }
            Self::Unsubscribe { subscription } => into.put_u8(subscription),
            Self::Close => {
                into.put_u16(OK);
                text(into, "OK");
            }
        }
        end(into, begin);
    }

    fn key(self) -> u16 {
        match self {
            Self::PeerProperties { .. } => PEER_PROPERTIES,
            Self::SaslHandshake => SASL_HANDSHAKE,
            Self::SaslAuthenticate { .. } => SASL_AUTHENTICATE,
            Self::Open { .. } => OPEN,
            Self::Metadata { .. } => METADATA,
            Self::Partitions { .. } => PARTITIONS,
            Self::DeclarePublisher { .. } => DECLARE_PUBLISHER,
            Self::QuerySequence { .. } => QUERY_SEQUENCE,
            Self::Subscribe { .. } => SUBSCRIBE,
            Self::Unsubscribe { .. } => UNSUBSCRIBE,
            Self::Close => CLOSE,
        }
    }
}

/// Writes a frame with messages under their publishing ids.
pub(crate) fn publish<'a>(
    into: &mut BytesMut,
    publisher: u8,
    messages: impl ExactSizeIterator<Item = (u64, &'a [u8])>,
) {
    let begin = begin(into, PUBLISH);
    into.put_u8(publisher);
    into.put_u32(length(messages.len()));
    for (id, message) in messages {
        into.put_u64(id);
        into.put_u32(length(message.len()));
        into.put_slice(message);
    }
    end(into, begin);
}

/// Asks for so many more chunks.
pub(crate) fn credit(into: &mut BytesMut, subscription: u8, credit: u16) {
    let begin = begin(into, CREDIT);
    into.put_u8(subscription);
    into.put_u16(credit);
    end(into, begin);
}

/// Gives a sign of life.
pub(crate) fn heartbeat(into: &mut BytesMut) {
    let begin = begin(into, HEARTBEAT);
    end(into, begin);
}

/// Answers what the server proposed for the connection.
pub(crate) fn tune(into: &mut BytesMut, frame_max: u32, heartbeat_s: u32) {
    let begin = begin(into, TUNE);
    into.put_u32(frame_max);
    into.put_u32(heartbeat_s);
    end(into, begin);
}

fn begin(into: &mut BytesMut, key: u16) -> usize {
    let begin = into.len();
    into.put_u32(0);
    into.put_u16(key);
    into.put_u16(VERSION);
    begin
}

fn end(into: &mut BytesMut, begin: usize) {
    let size = length(into.len() - begin - 4).to_be_bytes();
    into[begin..begin + 4].copy_from_slice(&size);
}

/// What is sent stays far below: it is bounded by the size of a frame.
fn length(of: usize) -> u32 {
    u32::try_from(of).expect("a frame is smaller than 4 GiB")
}

/// Names are checked when they are made: none has more than 255 bytes.
fn text(into: &mut BytesMut, text: &str) {
    into.put_u16(u16::try_from(text.len()).expect("a text has at most 32,767 bytes"));
    into.put_slice(text.as_bytes());
}

/// What the server sends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// To the request of that number; what follows the code is left to be read.
    Response {
        number: u32,
        code: Code,
        rest: Input<'a>,
    },
    Tune {
        frame_max: u32,
        heartbeat_s: u32,
    },
    Confirmed(Vec<u64>),
    Refused(Vec<(u64, Code)>),
    /// A chunk, of which the rest follows its head.
    Delivered {
        subscription: u8,
        head: &'a [u8],
    },
    /// A stream is not to be had any more as it was.
    StreamChanged,
    Close {
        reason: String,
    },
    /// Something that is no concern of a producer.
    Other,
}

/// Bytes up to the end of a chunk's head, if this is the beginning of a delivery.
pub(crate) fn delivery_head(key: u16, version: u16) -> Option<usize> {
    let before = if version > 1 { 2 + 2 + 1 + 8 } else { 2 + 2 + 1 };
    (key == DELIVER).then_some(before + HEAD_BYTES)
}

/// The frame of these bytes, which don't have its size any more; None if it is malformed.
pub(crate) fn read(frame: &[u8]) -> Option<Frame<'_>> {
    let mut input = Input(frame);
    let (key, version) = (input.u16()?, input.u16()?);
    Some(match key {
        TUNE => Frame::Tune { frame_max: input.u32()?, heartbeat_s: input.u32()? },
        PUBLISH_CONFIRM => {
            let (_, count) = (input.u8()?, input.u32()?);
            Frame::Confirmed((0..count).map(|_| input.u64()).collect::<Option<_>>()?)
        }
        PUBLISH_ERROR => {
            let (_, count) = (input.u8()?, input.u32()?);
            let refused = (0..count).map(|_| Some((input.u64()?, input.u16()?)));
            Frame::Refused(refused.collect::<Option<_>>()?)
        }
        DELIVER => {
            let subscription = input.u8()?;
            // The second version says first which chunk is committed.
            if version > 1 {
                input.u64()?;
            }
            Frame::Delivered { subscription, head: input.0 }
        }
        METADATA_UPDATE => Frame::StreamChanged,
        CLOSE => {
            let (_, _) = (input.u32()?, input.u16()?);
            Frame::Close { reason: input.text()?.to_owned() }
        }
        key if key == RESPONSE | CREDIT => Frame::Other,
        // It has a code for each stream instead.
        key if key == RESPONSE | METADATA => {
            Frame::Response { number: input.u32()?, code: OK, rest: input }
        }
        // Version 3.10 answers this one without the bit of a response.
        key if key == PARTITIONS || key & RESPONSE != 0 => {
            Frame::Response { number: input.u32()?, code: input.u16()?, rest: input }
        }
        _ => Frame::Other,
    })
}

/// A node of a cluster, by the host and port that it tells clients.
pub(crate) type Node = (String, u32);

/// Which node has answered, of what it says of itself when a connection is open.
pub(crate) fn node(input: &mut Input<'_>) -> Option<Node> {
    let (mut host, mut port) = (None, None);
    for _ in 0..input.u32()? {
        match (input.text()?, input.text()?) {
            ("advertised_host", text) => host = Some(text.to_owned()),
            ("advertised_port", text) => port = text.parse().ok(),
            _ => {}
        }
    }
    Some((host?, port?))
}

/// The node that leads a stream, of the answer for that stream alone; or what is wrong with it.
pub(crate) fn leader(input: &mut Input<'_>) -> Option<Result<Node, Code>> {
    let nodes = (0..input.u32()?).map(|_| {
        let number = input.u16()?;
        Some((number, (input.text()?.to_owned(), input.u32()?)))
    });
    let nodes: Vec<(u16, Node)> = nodes.collect::<Option<_>>()?;
    if input.u32()? == 0 {
        return Some(Err(NO_STREAM));
    }
    let (_name, code, leader) = (input.text()?, input.u16()?, input.u16()?);
    if code != OK {
        return Some(Err(code));
    }
    let leader = nodes.into_iter().find(|(number, _)| *number == leader);
    Some(leader.map(|(_, node)| node).ok_or(NOT_AVAILABLE))
}

/// Bytes from outside that are still to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| byte)
    }
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let length = self.u16()?;
        std::str::from_utf8(self.take(usize::from(length))?).ok()
    }
    /// Several texts, with their number before them.
    pub(crate) fn texts(&mut self) -> Option<Vec<&'a str>> {
        let count = self.u32()?;
        (0..count).map(|_| self.text()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_its_size_key_version_and_number() {
        let mut bytes = BytesMut::new();
        Request::QuerySequence { reference: "ab", stream: "c" }.write(7, &mut bytes);
        let expected = b"\0\0\0\x0f\0\x05\0\x01\0\0\0\x07\0\x02ab\0\x01c";
        assert_eq!(&bytes[..], expected);
        bytes.clear();
        let messages = [(258, &b"xy"[..])];
        publish(&mut bytes, 1, messages.into_iter());
        assert_eq!(bytes.len(), PUBLISH_OVERHEAD + MESSAGE_OVERHEAD + 2);
        let expected = b"\0\0\0\x17\0\x02\0\x01\x01\0\0\0\x01\0\0\0\0\0\0\x01\x02\0\0\0\x02xy";
        assert_eq!(&bytes[..], expected);
    }

    #[test]
    fn the_leader_of_a_stream_is_told_by_its_number() {
        let nodes = b"\0\0\0\x02\0\x03\0\x01a\0\0\x15\xb0\0\x07\0\x01b\0\0\x15\xb1";
        let answer = |rest: &[u8]| leader(&mut Input(&[&nodes[..], rest].concat()));
        let led = b"\0\0\0\x01\0\x01s\0\x01\0\x07\0\0\0\0";
        assert_eq!(answer(led), Some(Ok(("b".to_owned(), 5_553))));
        let none = b"\0\0\0\x01\0\x01s\0\x01\xff\xff\0\0\0\0";
        assert_eq!(answer(none), Some(Err(NOT_AVAILABLE)));
        let missing = b"\0\0\0\x01\0\x01s\0\x02\xff\xff\0\0\0\0";
        assert_eq!(answer(missing), Some(Err(NO_STREAM)));
        assert_eq!(answer(b"\0\0\0\x01\0\x01s\0"), None);
        let said = b"\0\0\0\x02\0\x0fadvertised_port\0\x045552\0\x0fadvertised_host\0\x01a";
        assert_eq!(node(&mut Input(said)), Some(("a".to_owned(), 5_552)));
        assert_eq!(node(&mut Input(b"\0\0\0\0")), None);
    }

    #[test]
    fn frames_that_end_early_are_none() {
        let confirm = b"\0\x03\0\x01\x01\0\0\0\x02\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\x06";
        assert_eq!(read(confirm), Some(Frame::Confirmed(vec![5, 6])));
        let refused = b"\0\x04\0\x01\x01\0\0\0\x01\0\0\0\0\0\0\0\x05\0\x12";
        assert_eq!(read(refused), Some(Frame::Refused(vec![(5, NO_PUBLISHER)])));
        for frame in [&confirm[..], &refused[..]] {
            for end in 0..frame.len() {
                assert_eq!(read(&frame[..end]), None, "{end}");
            }
        }
        // One that claims to have more than there can be takes no room for it.
        assert_eq!(read(b"\0\x03\0\x01\x01\xff\xff\xff\xff"), None);
        assert_eq!(read(b"\0\x17\0\x01"), Some(Frame::Other), "a heartbeat");
        assert_eq!(read(b"\x7f\0\0\x01"), Some(Frame::Other));
    }
}
