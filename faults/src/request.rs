//! One HTTP request, as the receiver reads it.
//!
//! What lives here: the head, its check against the signature, the event's content. What does not:
//! sockets (`receiver.rs`).
//! Invariant: nothing of a request is believed before its signature fits.

use std::io::{BufRead, ErrorKind, Read};

use anyhow::{Context, Result, ensure};
use postrider_conformance::sink::Delivered;
use postrider_core::{Clock, EventId};
use postrider_encoding::decode_header_value;
use postrider_relay::SystemClock;
use postrider_sink_webhook::verify::{SignedRequest, Verifier};
use uuid::Uuid;

/// The header by which each start of a relay tells which one it is.
pub const RELAY_HEADER: &str = "x-fault-relay";
/// A relay sends a dozen headers; more than these is no request of ours.
const MAX_HEADERS: usize = 64;
const MAX_HEAD_BYTES: u64 = 64 * 1024;

/// The parts of a head that the receiver looks at, as they arrived.
#[derive(Debug, Default)]
pub struct Head {
    /// Bytes of the body.
    pub length: usize,
    key: String,
    id: String,
    timestamp: String,
    signature: String,
    relay: String,
    topic: String,
    event_type: String,
    content_type: String,
    headers: Vec<(String, String)>,
}

/// Reads a head; nothing when the peer has closed the connection before one.
///
/// # Errors
/// When the connection breaks, or what comes is no request.
pub fn read_head(reader: &mut impl BufRead) -> std::io::Result<Option<Head>> {
    let mut bytes = Vec::new();
    loop {
        let mut line = Vec::new();
        let mut limited = reader.take(MAX_HEAD_BYTES);
        if limited.read_until(b'\n', &mut line)? == 0 {
            return if bytes.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
        }
        let last = line == b"\r\n";
        bytes.extend_from_slice(&line);
        if last {
            break;
        }
    }
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    request.parse(&bytes).map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error))?;
    let mut head = Head::default();
    for header in request.headers.iter() {
        let name = header.name.to_ascii_lowercase();
        head.take(&name, header.value);
    }
    Ok(Some(head))
}

impl Head {
    /// Whether no relay of any schedule sent it: on a busy machine, whoever knew the port before
    /// its present owner may still call there.
    pub fn is_of_a_stranger(&self) -> bool {
        self.relay.is_empty()
    }

    fn take(&mut self, name: &str, value: &[u8]) {
        let text = String::from_utf8_lossy(value).into_owned();
        let decoded = || decode_header_value(value).unwrap_or_default();
        match name {
            "content-length" => self.length = text.parse().unwrap_or_default(),
            "content-type" => self.content_type = text,
            "webhook-id" => self.id = text,
            "webhook-timestamp" => self.timestamp = text,
            "webhook-signature" => self.signature = text,
            "postrider-key" => self.key = decoded(),
            "postrider-topic" => self.topic = decoded(),
            "postrider-type" => self.event_type = decoded(),
            RELAY_HEADER => self.relay = text,
            _ => {
                if let Some(own) = name.strip_prefix("postrider-header-") {
                    self.headers.push((own.to_owned(), decoded()));
                }
            }
        }
    }

    /// The event's id and the relay's number, if the signature fits.
    ///
    /// # Errors
    /// Why it is not to be trusted.
    pub fn verify(&self, verifier: &Verifier, body: &[u8]) -> Result<(EventId, usize)> {
        let request = SignedRequest {
            id: &self.id,
            timestamp: &self.timestamp,
            signature: &self.signature,
            body,
        };
        verifier.verify(&request, SystemClock.now()).context("verify a request")?;
        let id: Uuid = self.id.parse().context("read the id of a request")?;
        ensure!(id.to_string() == self.id, "the id {} is not in its usual form", self.id);
        let id = EventId::from_uuid(id);
        Ok((id, self.relay.parse().context("read the relay of a request")?))
    }

    /// The event, as it arrived.
    pub fn into_message(mut self, id: EventId, payload: Vec<u8>) -> Delivered {
        self.headers.sort();
        Delivered {
            id,
            key: self.key,
            topic: self.topic,
            event_type: self.event_type,
            content_type: self.content_type,
            headers: self.headers,
            payload,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_up_to_its_end_and_no_further() {
        let text = "POST / HTTP/1.1\r\nContent-Length: 2\r\npostrider-key: a%20b\r\n\r\nhi";
        let mut reader = text.as_bytes();
        let head = read_head(&mut reader).expect("a request").expect("not closed");
        assert_eq!((head.length, head.key.as_str(), reader), (2, "a b", &b"hi"[..]));
        let relays = &b"POST / HTTP/1.1\r\nx-fault-relay: 2\r\n\r\n"[..];
        let ours = read_head(&mut &relays[..]).expect("a request").expect("not closed");
        assert!(head.is_of_a_stranger() && !ours.is_of_a_stranger());
        assert!(read_head(&mut &b""[..]).expect("closed").is_none());
        assert!(read_head(&mut &b"POST / HT"[..]).is_err());
        assert!(read_head(&mut &b"\x00\x01\r\n\r\n"[..]).is_err());
    }
}
