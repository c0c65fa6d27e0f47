//! Batches: many messages of one session in one transfer.
//!
//! What lives here: the link's limits, and filling a batch up to them, byte by byte. What does not:
//! sending (`worker.rs`), or what follows a refusal (`publish.rs`).
//! Invariant: what is filled encodes to exactly the bytes that were counted, and fits.
//!
//! The format is Service Bus's own: an envelope with the first message's id, session and partition
//! key, then one data section for each message, holding that message whole and encoded.

use fe2o3_amqp::Sendable;
use fe2o3_amqp::types::messaging::message::__private::Serializable;
use fe2o3_amqp::types::messaging::{Batch, Data, Message, SerializableBody};
use postrider_core::{Error, Record, Result};

use crate::encode::MessageEncoder;

/// Message format of a batch.
const BATCH_FORMAT: u32 = 0x8001_3700;
/// Most messages in one batch, by the service's own limit.
pub(crate) const MAX_BATCH_MESSAGES: usize = 4_500;
/// Most bytes of a batch where messages may be larger than this and the link names no limit of its
/// own for batches: large messages exist on the premium tier alone, and never in batches.
const LARGE_ENTITY_BATCH_BYTES: usize = 1024 * 1024;
/// Bytes of a message that are kept for what is not its payload: the id, the names, the framing.
/// So much less than a message may have is what a payload may, for the relay and for the sink
/// alike; where more than this stands beside it, the message's exact size decides.
const ROOM_BYTES: usize = 512;

/// What the link takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most bytes of one message, as encoded.
    pub(crate) message_bytes: usize,
    /// Most bytes of one batch, with its envelope.
    pub(crate) batch_bytes: usize,
}

impl Limits {
    /// From the link's `max-message-size` and its property for batches, where it has one.
    pub(crate) fn new(message: Option<u64>, batch: Option<u64>) -> Self {
        let bytes = |limit: u64| usize::try_from(limit).unwrap_or(usize::MAX);
        let message_bytes = message.filter(|limit| *limit > 0).map_or(usize::MAX, bytes);
        let batch_bytes = batch.filter(|limit| *limit > 0).map_or(LARGE_ENTITY_BATCH_BYTES, bytes);
        Self { message_bytes, batch_bytes: batch_bytes.min(message_bytes) }
    }

    /// The largest payload.
    pub(crate) fn payload_bytes(&self) -> Option<usize> {
        (self.message_bytes < usize::MAX).then(|| self.message_bytes.saturating_sub(ROOM_BYTES))
    }
}

/// What goes over the link at once.
pub(crate) enum Transfer {
    /// One message as it is.
    One(Message<Data>),
    /// A batch.
    Many(Message<Batch<Data>>),
}

impl Transfer {
    /// For the link's sender.
    pub(crate) fn many(message: Message<Batch<Data>>) -> Sendable<Batch<Data>> {
        Sendable::builder().message(message).message_format(BATCH_FORMAT).build()
    }
}

/// The beginning of a key's events, ready to be sent.
pub(crate) struct Filled {
    /// How many events are in it.
    pub(crate) count: usize,
    /// Them.
    pub(crate) transfer: Transfer,
}

/// Takes events of one key, the first and as many more as fit, `most` at most.
///
/// # Errors
/// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent), about the first of them alone:
/// it is larger than the link takes, or can't be encoded. A later one that is so ends the batch.
pub(crate) fn fill(
    encoder: &MessageEncoder,
    records: &[&Record],
    limits: Limits,
    most: usize,
) -> Result<Filled> {
    let first = records.first().expect("a batch is filled with something");
    let (message, encoded) = encode(encoder, first, limits)?;
    let empty = encoder.envelope(first, Batch::<Data>::new(Vec::new()))?;
    let mut bytes = to_bytes(&empty)?.len() + section_bytes(encoded.len());
    let mut sections = vec![encoded];
    for record in records.iter().skip(1).take(most.clamp(1, MAX_BATCH_MESSAGES) - 1) {
        let Ok((_, encoded)) = encode(encoder, record, limits) else { break };
        bytes += section_bytes(encoded.len());
        if bytes > limits.batch_bytes {
            break;
        }
        sections.push(encoded);
    }
    let count = sections.len();
    let transfer = match count {
        1 => Transfer::One(message),
        _ => {
            let body: Vec<Data> = sections.into_iter().map(Data::from).collect();
            Transfer::Many(encoder.envelope(first, Batch::new(body))?)
        }
    };
    Ok(Filled { count, transfer })
}

/// A message and its bytes, if the link takes them.
fn encode(
    encoder: &MessageEncoder,
    record: &Record,
    limits: Limits,
) -> Result<(Message<Data>, Vec<u8>)> {
    let payload = record.event.payload().len();
    if limits.payload_bytes().is_some_and(|most| payload > most) {
        return Err(too_large("payload", payload, limits.message_bytes));
    }
    let message = encoder.message(record)?;
    let encoded = to_bytes(&message)?;
    match encoded.len() > limits.message_bytes {
        true => Err(too_large("message", encoded.len(), limits.message_bytes)),
        false => Ok((message, encoded)),
    }
}

fn too_large(what: &str, bytes: usize, limit: usize) -> Error {
    Error::permanent(format!(
        "the {what} has {bytes} bytes; the entity takes messages of {limit}, and {ROOM_BYTES} of \
         these are not for the payload: store the content elsewhere and send a reference, or use \
         an entity for large messages"
    ))
}

/// A data section: its descriptor, the constructor with the length in one byte or four, the bytes.
fn section_bytes(encoded: usize) -> usize {
    encoded + if encoded <= usize::from(u8::MAX) { 5 } else { 8 }
}

fn to_bytes<B: SerializableBody>(message: &Message<B>) -> Result<Vec<u8>> {
    serde_amqp::to_vec(&Serializable(message))
        .map_err(|error| Error::permanent("the event can't be encoded as AMQP").with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LongKeys;
    use crate::encode::tests::{encoder, record};
    use postrider_encoding::Encoding;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits { message_bytes: 262_144, batch_bytes: 262_144 };

    fn filled(records: &[Record], limits: Limits, most: usize) -> Result<Filled> {
        let records: Vec<&Record> = records.iter().collect();
        fill(&encoder(Encoding::Plain, LongKeys::Refuse), &records, limits, most)
    }

    fn size(transfer: &Transfer) -> usize {
        match transfer {
            Transfer::One(message) => to_bytes(message).expect("encodes").len(),
            Transfer::Many(message) => to_bytes(message).expect("encodes").len(),
        }
    }

    fn of_size(bytes: usize) -> Vec<u8> {
        vec![b'x'; bytes]
    }

    #[test]
    fn limits_are_the_links_own() {
        let limits = |message, batch| {
            let limits = Limits::new(message, batch);
            (limits.message_bytes, limits.batch_bytes, limits.payload_bytes())
        };
        let standard = 262_144;
        assert_eq!(limits(Some(standard), None), (262_144, 262_144, Some(261_632)));
        assert_eq!(limits(Some(1_048_576), None), (1_048_576, 1_048_576, Some(1_048_064)));
        let large = 104_857_600;
        assert_eq!(limits(Some(large), None), (104_857_600, 1_048_576, Some(104_857_088)));
        assert_eq!(limits(Some(large), Some(4_194_304)).1, 4_194_304);
        assert_eq!(limits(Some(standard), Some(4_194_304)).1, 262_144);
        assert_eq!(limits(Some(0), Some(0)), (usize::MAX, 1_048_576, None));
        assert_eq!(limits(None, None), (usize::MAX, 1_048_576, None));
    }

    #[test]
    fn one_event_is_a_message_and_several_are_a_batch() {
        let records: Vec<Record> = (1..=3).map(|n| record(n, "k", of_size(10))).collect();
        let one = filled(&records[..1], LIMITS, 100).expect("fits");
        assert!(matches!((&one.transfer, one.count), (Transfer::One(_), 1)));
        let alone = filled(&records, LIMITS, 1).expect("fits");
        assert!(matches!((&alone.transfer, alone.count), (Transfer::One(_), 1)));
        let many = filled(&records, LIMITS, 100).expect("fits");
        let Transfer::Many(message) = &many.transfer else { panic!("a batch") };
        assert_eq!((many.count, message.body.len()), (3, 3));
        let expected = encoder(Encoding::Plain, LongKeys::Refuse);
        for (section, record) in message.body.iter().zip(&records) {
            let whole = to_bytes(&expected.message(record).expect("encoded")).expect("encodes");
            assert_eq!(&section.0[..], &whole[..]);
        }
        let properties = message.properties.clone().expect("set");
        assert_eq!(properties.group_id.as_deref(), Some("k"));
        assert_eq!((properties.subject, properties.content_type), (None, None));
        assert!(message.application_properties.is_none());
    }

    #[test]
    fn a_batch_ends_before_the_byte_that_would_be_too_many() {
        let records: Vec<Record> = (1..=3).map(|n| record(n, "k", of_size(1_000))).collect();
        let whole = size(&filled(&records, LIMITS, 100).expect("fits").transfer);
        let at = |batch_bytes| {
            filled(&records, Limits { batch_bytes, ..LIMITS }, 100).expect("fits").count
        };
        assert_eq!((at(whole), at(whole - 1)), (3, 2));
        // Even a limit below a batch of one does not keep a message back that may go alone.
        assert_eq!(at(1), 1);
    }

    #[test]
    fn an_oversize_event_is_refused_by_itself_with_the_limit() {
        let small = record(1, "k", of_size(10));
        let large = record(2, "k", of_size(300 * 1024));
        let error = filled(std::slice::from_ref(&large), LIMITS, 100).err().expect("too large");
        assert_eq!(error.kind(), postrider_core::ErrorKind::Permanent);
        assert!(error.to_string().contains("262144"), "{error}");
        let before = filled(&[small, large], LIMITS, 100).expect("fits");
        assert_eq!(before.count, 1);
        let room = 262_144 - ROOM_BYTES;
        assert!(filled(&[record(2, "k", of_size(room))], LIMITS, 1).is_ok());
        assert!(filled(&[record(2, "k", of_size(room + 1))], LIMITS, 1).is_err());
        // Beside a key of this length, a message has more than is kept for it.
        let wordy = [record(3, &"x".repeat(128), of_size(5_000))];
        let exact = size(&filled(&wordy, LIMITS, 1).expect("fits").transfer);
        assert!(exact > 5_000 + ROOM_BYTES, "{exact}");
        let at = |message_bytes| Limits { message_bytes, batch_bytes: message_bytes };
        assert!(filled(&wordy, at(exact), 1).is_ok());
        let error = filled(&wordy, at(exact - 1), 1).err().expect("too large");
        assert!(error.to_string().contains(&format!("message has {exact} bytes")), "{error}");
    }

    #[test]
    fn a_batch_has_4500_messages_at_most() {
        let records: Vec<Record> = (1..=4_600).map(|n| record(n, "k", Vec::new())).collect();
        let limits = Limits { message_bytes: usize::MAX, batch_bytes: usize::MAX };
        assert_eq!(filled(&records, limits, usize::MAX).expect("fits").count, 4_500);
        assert_eq!(filled(&records, limits, 7).expect("fits").count, 7);
    }

    proptest! {
        #[test]
        fn what_is_counted_is_what_is_encoded(
            payloads in prop::collection::vec(0usize..400, 1..20),
            key in "[a-zé]{1,60}",
            batch_bytes in 300usize..6_000,
        ) {
            let records: Vec<Record> = payloads
                .iter()
                .zip(1..)
                .map(|(bytes, n)| record(n, &key, of_size(*bytes)))
                .collect();
            let limits = Limits { batch_bytes, ..LIMITS };
            let got = filled(&records, limits, usize::MAX).expect("each fits");
            if got.count > 1 {
                prop_assert!(size(&got.transfer) <= batch_bytes);
            }
            if got.count < records.len() {
                // One more would have been too many.
                let limits = Limits { batch_bytes: usize::MAX, ..LIMITS };
                let more = filled(&records[..got.count + 1], limits, usize::MAX).expect("fits");
                prop_assert!(size(&more.transfer) > batch_bytes);
            }
        }
    }
}
