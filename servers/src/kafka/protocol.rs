//! As much of Kafka's protocol as somebody in the middle needs.
//!
//! What lives here: frames, where a broker tells its address, requests with records and an answer
//! to them. What does not: who passes them on (`way.rs`, and men in the middle of tests).
//! Invariant: what is not understood is told by nothing and passed on as it is; a frame never grows
//! or shrinks.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The broker has fewer in-sync replicas than the topic asks for.
pub const NOT_ENOUGH_REPLICAS: i16 = 19;
/// The broker refuses the record by its own rules.
pub const INVALID_RECORD: i16 = 87;

const PRODUCE: [u8; 2] = [0, 0];
/// The first version in which lengths are short and fields may follow unknown.
const FLEXIBLE: i16 = 9;
const HOST: &str = "127.0.0.1";
/// No request or answer of a test is larger, in bytes.
const MAX_FRAME_BYTES: i32 = 256 << 20;

/// Reads a request or an answer, without its length.
///
/// # Errors
/// When the connection ends, or what comes is no frame.
/// # Cancellation
/// What was read of a frame is lost.
pub async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let length = from.read_i32().await?;
    if !(4..=MAX_FRAME_BYTES).contains(&length) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut frame = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    from.read_exact(&mut frame).await?;
    Ok(frame)
}

/// Writes a request or an answer, with its length before it.
///
/// # Errors
/// When the connection ends.
/// # Cancellation
/// Part of it may be written.
pub async fn write(to: &mut (impl AsyncWrite + Unpin), frame: &[u8]) -> io::Result<()> {
    to.write_i32(i32::try_from(frame.len()).map_err(io::Error::other)?).await?;
    to.write_all(frame).await?;
    to.flush().await
}

/// The number by which an answer belongs to its request.
pub fn correlation(answer: &[u8]) -> Option<i32> {
    Some(i32::from_be_bytes(*answer.first_chunk()?))
}

/// Puts another address wherever the broker tells that it is on 127.0.0.1 at its port. A host that
/// is not as long as that one is not put there.
pub fn readdress(answer: &mut [u8], port: u16, (own_host, own_port): (&str, u16)) {
    let address = [HOST.as_bytes(), &u32::from(port).to_be_bytes()].concat();
    let places: Vec<usize> = answer
        .windows(address.len())
        .enumerate()
        .filter_map(|(at, part)| (part == address).then_some(at))
        .collect();
    for at in places {
        let port = at + HOST.len();
        if own_host.len() == HOST.len() {
            answer[at..port].copy_from_slice(own_host.as_bytes());
        }
        answer[port..port + 4].copy_from_slice(&u32::from(own_port).to_be_bytes());
    }
}

/// A request with records, as far as its answer needs it: of one topic and one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Produce {
    version: i16,
    correlation: i32,
    topic: Vec<u8>,
    partition: i32,
}

impl Produce {
    /// Reads a request; none if it is another one, or not to be read.
    pub fn read(request: &[u8]) -> Option<Self> {
        let mut rest = request.strip_prefix(&PRODUCE)?;
        let version = i16::from_be_bytes(take(&mut rest)?);
        let correlation = i32::from_be_bytes(take(&mut rest)?);
        let flexible = version >= FLEXIBLE;
        text(&mut rest, false)?;
        if flexible {
            let [_no_tags] = take(&mut rest)?;
        }
        text(&mut rest, flexible)?;
        let _acks_and_timeout: [u8; 6] = take(&mut rest)?;
        count(&mut rest, flexible)?;
        let topic = text(&mut rest, flexible)?.to_vec();
        count(&mut rest, flexible)?;
        let partition = i32::from_be_bytes(take(&mut rest)?);
        Some(Self { version, correlation, topic, partition })
    }

    /// The number by which its answer belongs to it.
    pub fn correlation(&self) -> i32 {
        self.correlation
    }

    /// The topic that the records are for.
    pub fn topic(&self) -> &[u8] {
        &self.topic
    }

    /// A broker's answer with an error's code.
    pub fn answer(&self, code: i16) -> Vec<u8> {
        let flexible = self.version >= FLEXIBLE;
        let mut answer = self.correlation.to_be_bytes().to_vec();
        let one: &[u8] = if flexible { &[2] } else { &[0, 0, 0, 1] };
        // Names have 249 bytes at most.
        let [high, low] = u16::try_from(self.topic.len()).unwrap_or(u16::MAX).to_be_bytes();
        if flexible {
            answer.push(0);
        }
        answer.extend(one);
        match flexible {
            // Two bytes of seven bits, of the length and one.
            true if low >= 0x7f => answer.extend([low.saturating_add(1), 1]),
            true => answer.push(low + 1),
            false => answer.extend([high, low]),
        }
        answer.extend(&self.topic);
        answer.extend(one);
        answer.extend(self.partition.to_be_bytes());
        answer.extend(code.to_be_bytes());
        // Offset, time and the log's start: none.
        answer.extend([0xff; 24]);
        if flexible {
            // No errors of records, no text, no unknown fields of the partition and the topic.
            answer.extend([1, 0, 0, 0]);
        } else if self.version >= 8 {
            answer.extend([0, 0, 0, 0, 0xff, 0xff]);
        }
        answer.extend([0; 4]);
        if flexible {
            answer.push(0);
        }
        answer
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*taken)
}

/// Short counts are one more than they say.
fn short(rest: &mut &[u8]) -> Option<usize> {
    let (mut value, mut shift) = (0_usize, 0);
    loop {
        let [byte] = take(rest)?;
        value |= usize::from(byte & 0x7f).checked_shl(shift)?;
        shift += 7;
        if byte & 0x80 == 0 {
            return Some(value.saturating_sub(1));
        }
    }
}

/// A text; one that is none has no bytes.
fn text<'a>(rest: &mut &'a [u8], flexible: bool) -> Option<&'a [u8]> {
    let length = match flexible {
        true => short(rest)?,
        false => usize::try_from(i16::from_be_bytes(take(rest)?)).unwrap_or(0),
    };
    let (text, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(text)
}

fn count(rest: &mut &[u8], flexible: bool) -> Option<usize> {
    match flexible {
        true => short(rest),
        false => usize::try_from(i32::from_be_bytes(take(rest)?)).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Version 7 to the topic `ab`, partition 3, with nothing behind it.
    fn old() -> Vec<u8> {
        let mut request = vec![0, 0, 0, 7, 0, 0, 1, 2, 0, 1, b'c', 0xff, 0xff, 0xff, 0xff];
        request.extend([0, 0, 3, 232, 0, 0, 0, 1, 0, 2, b'a', b'b', 0, 0, 0, 1, 0, 0, 0, 3]);
        request
    }

    #[test]
    fn a_request_is_read_whatever_its_version_and_never_beyond_its_end() {
        let read = Produce::read(&old()).expect("a request");
        assert_eq!(read.correlation(), 258);
        assert_eq!((read.topic(), read.partition), (&b"ab"[..], 3));
        for length in 0..old().len() {
            assert_eq!(Produce::read(&old()[..length]), None);
        }
        let mut new = vec![0, 0, 0, 9, 0, 0, 1, 2, 0, 1, b'c', 0, 0, 0xff, 0xff];
        new.extend([0, 0, 3, 232, 2, 3, b'a', b'b', 2, 0, 0, 0, 3]);
        assert_eq!(Produce::read(&new), Some(Produce { version: 9, ..read }));
        let mut other = old();
        other[1] = 1;
        assert_eq!(Produce::read(&other), None);
    }

    #[test]
    fn an_address_is_replaced_wherever_it_stands_and_no_other() {
        let at = |port: u16| [HOST.as_bytes(), &u32::from(port).to_be_bytes()].concat();
        let mut answer = [at(9_092), at(9_093), at(9_092)].concat();
        readdress(&mut answer, 9_092, (HOST, 80));
        assert_eq!(answer, [at(80), at(9_093), at(80)].concat());
        readdress(&mut answer, 80, ("10.1.2.34", 80));
        assert!(answer.starts_with(b"10.1.2.34"));
    }
}
