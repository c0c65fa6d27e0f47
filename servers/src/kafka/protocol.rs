//! As much of Kafka's protocol as somebody in the middle needs.
//!
//! What lives here: frames, where a broker tells its address, requests with records or of
//! transactional producers, and an answer to them. What does not: who passes them on (`way.rs`, and
//! men in the middle of tests).
//! Invariant: what is not understood is told by nothing and passed on as it is; a frame never grows
//! or shrinks.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The broker has fewer in-sync replicas than the topic asks for.
pub const NOT_ENOUGH_REPLICAS: i16 = 19;
/// The broker refuses the record by its own rules.
pub const INVALID_RECORD: i16 = 87;
/// Another producer took the place of this one, or its transaction's time was over.
pub const INVALID_PRODUCER_EPOCH: i16 = 47;

const PRODUCE: [u8; 2] = [0, 0];
const INIT_PRODUCER_ID: i16 = 22;
const ADD_PARTITIONS: i16 = 24;
const END_TRANSACTION: i16 = 26;
/// The first version of the requests of transactions with short lengths, and the first in which a
/// producer that has a number asks for it to be raised.
const FLEXIBLE_STEP: i16 = 3;
/// In a batch of records.
const PRODUCER_AT: usize = 43;
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
    /// The number of a producer with transactions.
    producer: Option<i64>,
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
        let transactional = !text(&mut rest, flexible)?.is_empty();
        let _acks_and_timeout: [u8; 6] = take(&mut rest)?;
        count(&mut rest, flexible)?;
        let topic = text(&mut rest, flexible)?.to_vec();
        count(&mut rest, flexible)?;
        let partition = i32::from_be_bytes(take(&mut rest)?);
        let producer = if transactional { producer(rest, flexible) } else { None };
        Some(Self { version, correlation, topic, partition, producer })
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

/// Of the first batch of records.
fn producer(mut rest: &[u8], flexible: bool) -> Option<i64> {
    count(&mut rest, flexible)?;
    let (_, mut rest) = rest.split_at_checked(PRODUCER_AT)?;
    Some(i64::from_be_bytes(take(&mut rest)?))
}

/// A request by which a producer goes on with its transactions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    correlation: i32,
    producer: i64,
    what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum What {
    Records(Produce),
    /// Topics and their partitions belong to the transaction from now on.
    Partitions(Vec<(Vec<u8>, Vec<i32>)>),
    End,
    /// The producer asks for its number to be raised.
    Raise,
}

impl Step {
    /// Reads a request; none if it is another one. A producer's first request, for its number, is
    /// another one.
    ///
    /// # Errors
    /// If it is of a version that is not understood, or ends too early.
    pub fn read(request: &[u8]) -> io::Result<Option<Self>> {
        let mut rest = request;
        let Some(key) = take(&mut rest).map(i16::from_be_bytes) else { return Ok(None) };
        if request.starts_with(&PRODUCE) {
            return Ok(Produce::read(request).and_then(|produce| {
                let (correlation, producer) = (produce.correlation, produce.producer?);
                Some(Self { correlation, producer, what: What::Records(produce) })
            }));
        }
        let version = take(&mut rest).map(i16::from_be_bytes);
        let (Some(version), true) =
            (version, [INIT_PRODUCER_ID, ADD_PARTITIONS, END_TRANSACTION].contains(&key))
        else {
            return Ok(None);
        };
        match (key == INIT_PRODUCER_ID, version >= FLEXIBLE_STEP) {
            (true, false) => Ok(None),
            (false, true) => Err(io::ErrorKind::Unsupported.into()),
            _ => Self::body(key, &mut rest).ok_or(io::ErrorKind::InvalidData.into()),
        }
    }

    /// None for a producer without a number.
    fn body(key: i16, rest: &mut &[u8]) -> Option<Option<Self>> {
        let correlation = i32::from_be_bytes(take(rest)?);
        text(rest, false)?;
        let raises = key == INIT_PRODUCER_ID;
        if raises {
            let [_no_tags] = take(rest)?;
        }
        text(rest, raises)?;
        if raises {
            let _timeout: [u8; 4] = take(rest)?;
        }
        let producer = i64::from_be_bytes(take(rest)?);
        let _epoch: [u8; 2] = take(rest)?;
        let what = match key {
            ADD_PARTITIONS => What::Partitions(topics(rest)?),
            END_TRANSACTION => What::End,
            _ => What::Raise,
        };
        Some((producer >= 0).then_some(Self { correlation, producer, what }))
    }

    /// The number that the broker gave its producer. A later producer has a larger one.
    pub fn producer(&self) -> i64 {
        self.producer
    }

    /// A broker's answer with an error's code.
    pub fn answer(&self, code: i16) -> Vec<u8> {
        let mut answer = self.correlation.to_be_bytes().to_vec();
        let no_delay = [0; 4];
        match &self.what {
            What::Records(produce) => return produce.answer(code),
            What::End => {
                answer.extend(no_delay);
                answer.extend(code.to_be_bytes());
            }
            What::Raise => {
                answer.push(0);
                answer.extend(no_delay);
                answer.extend(code.to_be_bytes());
                // No number and no epoch.
                answer.extend([0xff; 10]);
                answer.push(0);
            }
            What::Partitions(topics) => {
                answer.extend(no_delay);
                answer.extend(length(topics.len()));
                for (topic, partitions) in topics {
                    answer.extend(&length(topic.len())[2..]);
                    answer.extend(topic);
                    answer.extend(length(partitions.len()));
                    for partition in partitions {
                        answer.extend(partition.to_be_bytes());
                        answer.extend(code.to_be_bytes());
                    }
                }
            }
        }
        answer
    }
}

/// Of what has a frame's size at most.
fn length(of: usize) -> [u8; 4] {
    i32::try_from(of).unwrap_or(i32::MAX).to_be_bytes()
}

fn topics(rest: &mut &[u8]) -> Option<Vec<(Vec<u8>, Vec<i32>)>> {
    let topics = count(rest, false)?;
    (0..topics)
        .map(|_| {
            let topic = text(rest, false)?.to_vec();
            let partitions = count(rest, false)?;
            let each = (0..partitions).map(|_| Some(i32::from_be_bytes(take(rest)?)));
            Some((topic, each.collect::<Option<_>>()?))
        })
        .collect()
}

/// A request for the number of a new producer without transactions.
pub fn ask_for_producer() -> [u8; 16] {
    let [high, low] = INIT_PRODUCER_ID.to_be_bytes();
    // Version 0, correlation 0, no client, no transactions, no timeout.
    [high, low, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]
}

/// The number in the answer to that.
///
/// # Errors
/// If it has none.
pub fn new_producer(answer: &[u8]) -> io::Result<i64> {
    let mut rest = answer;
    let mut read = || {
        let _correlation_and_delay: [u8; 8] = take(&mut rest)?;
        let code = i16::from_be_bytes(take(&mut rest)?);
        let producer = i64::from_be_bytes(take(&mut rest)?);
        (code == 0 && producer >= 0).then_some(producer)
    };
    read().ok_or_else(|| io::Error::other("the broker gave a producer no number"))
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

    /// The end of a transaction by producer 5, in a version that clients use.
    fn end() -> Vec<u8> {
        let mut request = vec![0, 26, 0, 1, 0, 0, 1, 2, 0, 1, b'c', 0, 1, b't'];
        request.extend([0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 1]);
        request
    }

    #[test]
    fn a_transactional_producer_is_told_by_each_of_its_requests() {
        let step = Step::read(&end()).expect("understood").expect("a step");
        assert_eq!(step.producer(), 5);
        assert_eq!(step.answer(47), [0, 0, 1, 2, 0, 0, 0, 0, 0, 47]);
        let mut adds = end();
        (adds[1], adds[3]) = (24, 0);
        adds.truncate(adds.len() - 1);
        let topic = [0, 0, 0, 1, 0, 1, b'x', 0, 0, 0, 1, 0, 0, 0, 9];
        adds.extend(topic);
        let step = Step::read(&adds).expect("understood").expect("a step");
        assert_eq!(step.answer(47), [&[0, 0, 1, 2, 0, 0, 0, 0], &topic[..], &[0, 47]].concat());
        let mut raises = vec![0, 22, 0, 4, 0, 0, 1, 2, 0, 1, b'c', 0, 2, b't', 0, 0, 0, 0];
        raises.extend([0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0]);
        assert_eq!(Step::read(&raises).expect("understood").expect("a step").producer(), 5);
        raises[18..26].fill(0xff);
        assert_eq!(Step::read(&raises).expect("understood"), None);
        let mut records = vec![0, 0, 0, 7, 0, 0, 1, 2, 0, 1, b'c', 0, 1, b't', 0xff, 0xff];
        records.extend([0, 0, 3, 232, 0, 0, 0, 1, 0, 2, b'a', b'b', 0, 0, 0, 1, 0, 0, 0, 3]);
        records.extend([0, 0, 0, 61]);
        records.extend([1; PRODUCER_AT]);
        records.extend([0, 0, 0, 0, 0, 0, 0, 5, 0, 0]);
        let step = Step::read(&records).expect("understood").expect("a step");
        assert_eq!((step.producer(), step.correlation), (5, 258));
        // Without transactions.
        assert_eq!(Step::read(&old()).expect("understood"), None);
    }

    #[test]
    fn a_step_that_is_not_understood_is_no_other_request() {
        let mut newer = end();
        newer[3] = 3;
        Step::read(&newer).expect_err("lengths are short");
        for length in 4..end().len() - 1 {
            Step::read(&end()[..length]).expect_err("it ends too early");
        }
        let mut other = end();
        other[1] = 3;
        assert_eq!(Step::read(&other).expect("another request"), None);
    }

    #[test]
    fn a_new_producer_has_the_number_that_it_was_given() {
        let answer = [&[0; 8][..], &[0, 0], &1_007_i64.to_be_bytes(), &[0, 0]].concat();
        assert_eq!(new_producer(&answer).expect("a number"), 1_007);
        let refused = [&[0; 8][..], &[0, 15], &[0xff; 10]].concat();
        new_producer(&refused).expect_err("no number");
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
