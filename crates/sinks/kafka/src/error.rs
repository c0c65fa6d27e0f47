//! From the brokers' answers and the client's failures to error kinds.
//!
//! What lives here: the mappings. What does not: what follows, which the relay decides.
//! Invariant: what is wrong with *this event* is permanent. What is wrong with one topic or one
//! partition is throttled: others may go on, and who is only transient is given up while others go
//! on. What is wrong with all brokers is transient, since then nothing goes on. So an outage parks
//! nothing.
//!
//! | what happened | kind |
//! |---|---|
//! | larger than the topic's `max.message.bytes`, refused by the topic's rules | permanent |
//! | no such topic | throttled; permanent once it was long missing, by `unroutable` |
//! | not permitted to write to the topic | throttled |
//! | too few in-sync replicas, no leader, no confirmation while brokers answer | throttled |
//! | the client's queue is full | throttled |
//! | no broker can be reached, login refused, the producer gave up, anything else | transient |

use std::borrow::Cow;

use postrider_core::{Error, ErrorKind};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};

use crate::config::Unroutable;

const UNKNOWN: &str = "whether the topic has the event is unknown";

/// Of an event whose topic does not exist.
pub(crate) fn unroutable(how: Unroutable, topic: &str) -> Error {
    let text = format!("the topic {topic} does not exist; make it, or let create_topics = true");
    match how {
        Unroutable::Retry => throttled(text),
        Unroutable::Park => Error::permanent(text),
    }
}

/// Of an event that is to wait, however long, while others may go on.
pub(crate) fn throttled(text: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Throttled { retry_after: None }, text)
}

/// Of an event that the broker refuses for its size, with the limit if the broker tells it.
pub(crate) fn too_large(topic: &str, bytes: usize, limit: Option<&str>) -> Error {
    let limit = limit.unwrap_or("fewer, which the broker does not tell");
    Error::permanent(format!(
        "the event's record has about {bytes} bytes; the topic {topic} takes {limit} \
         (max.message.bytes)"
    ))
}

/// Whether a code may be for another record of the same request, so that the event has to be sent
/// alone before anything is made of it.
pub(crate) fn may_be_anothers(code: Code) -> bool {
    is_size(code)
        || matches!(
            code,
            Code::InvalidRecord | Code::InvalidDifferentRecord | Code::InvalidTimestamp
        )
}

/// Whether a code is about the size of a record.
pub(crate) fn is_size(code: Code) -> bool {
    matches!(
        code,
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize
    )
}

/// Whether a code says that the topic, or a partition of it, is not there.
pub(crate) fn is_missing(code: Code) -> bool {
    matches!(code, Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition)
}

/// The error of an event that was not confirmed. `trouble` tells whether no broker can be reached,
/// and the client's last complaint.
pub(crate) fn delivery_error(code: Code, topic: &str, trouble: (bool, Option<String>)) -> Error {
    let (all_down, complaint) = trouble;
    let error = match code {
        // The next look tells whether it stays missing.
        _ if is_missing(code) => return unroutable(Unroutable::Retry, topic),
        Code::InvalidTopic => Error::permanent(format!("no topic can have the name {topic}")),
        Code::TopicAuthorizationFailed => throttled(format!(
            "the login may not write to the topic {topic}; grant it Write and Describe"
        )),
        Code::InvalidRecord => {
            Error::permanent(format!("the topic {topic} refuses the record by its own rules"))
        }
        Code::InvalidTimestamp => Error::permanent(format!(
            "the topic {topic} refuses the record's time \
             (message.timestamp.before.max.ms); let record_time = \"sent\""
        )),
        Code::PolicyViolation => {
            throttled(format!("the topic {topic} refuses the record by a policy of the broker"))
        }
        Code::ClusterAuthorizationFailed => Error::transient(
            "the login may not use an idempotent producer; grant it IdempotentWrite on the \
             cluster, or upgrade the brokers to 2.8 or later",
        ),
        Code::NotEnoughReplicas | Code::NotEnoughReplicasAfterAppend | Code::ISRInsufficient => {
            throttled(format!("the topic {topic} has too few in-sync replicas now"))
        }
        Code::NotLeaderForPartition
        | Code::LeaderNotAvailable
        | Code::ReplicaNotAvailable
        | Code::KafkaStorageError => {
            throttled(format!("a partition of the topic {topic} has no leader now"))
        }
        Code::MessageTimedOut | Code::RequestTimedOut | Code::OperationTimedOut if all_down => {
            Error::transient(format!("no broker can be reached; {UNKNOWN}"))
        }
        // One partition alone may be silent.
        Code::MessageTimedOut | Code::RequestTimedOut | Code::OperationTimedOut => {
            throttled(format!(
                "the topic {topic} did not confirm the event in time: a partition may lack its \
                 leader or in-sync replicas; {UNKNOWN}"
            ))
        }
        Code::QueueFull => throttled("the client's queue is full; no place in it was free in time"),
        Code::PurgeQueue | Code::PurgeInflight => {
            Error::transient(format!("the producer was given up; {UNKNOWN}"))
        }
        _ => Error::transient(format!("the topic {topic} did not confirm the event; {UNKNOWN}"))
            .with_source(code.to_string()),
    };
    match complaint.filter(|_| !matches!(error.kind(), ErrorKind::Permanent)) {
        Some(text) => Error::new(error.kind(), error.chain()).with_source(text),
        None => error,
    }
}

/// The error of events that could not be sent since the producer gave up for good.
pub(crate) fn fatal_error(why: String) -> Error {
    Error::transient(format!("the producer gave up, another is made; {UNKNOWN}")).with_source(why)
}

/// The error of a question to the brokers that was not answered.
pub(crate) fn question_error(error: &KafkaError, trouble: (bool, Option<String>)) -> Error {
    let code = error.rdkafka_error_code().map_or_else(String::new, |code| code.to_string());
    let asked = Error::transient("connect to Kafka: no broker answers in time");
    asked.with_source(trouble.1.unwrap_or(code))
}

/// The error of a client that could not be made. The library's text names files and settings; it
/// repeats no value.
pub(crate) fn create_error(error: &KafkaError) -> Error {
    let text = match error {
        KafkaError::ClientCreation(text) => text.clone(),
        KafkaError::ClientConfig(_, text, name, _) => format!("{name}: {text}"),
        other => other.to_string(),
    };
    Error::transient("connect to Kafka: the settings or certificates can't be used")
        .with_source(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THROTTLED: ErrorKind = ErrorKind::Throttled { retry_after: None };

    #[test]
    fn each_code_has_its_kind() {
        let of = |code, down| delivery_error(code, "orders", (down, None));
        for (code, kind, part) in [
            (Code::UnknownTopicOrPartition, THROTTLED, "orders does not exist"),
            (Code::UnknownTopic, THROTTLED, "create_topics"),
            (Code::UnknownPartition, THROTTLED, "does not exist"),
            (Code::InvalidTopic, ErrorKind::Permanent, "orders"),
            (Code::TopicAuthorizationFailed, THROTTLED, "grant it Write"),
            (Code::InvalidRecord, ErrorKind::Permanent, "its own rules"),
            (Code::InvalidTimestamp, ErrorKind::Permanent, "record_time"),
            (Code::PolicyViolation, THROTTLED, "policy"),
            (Code::ClusterAuthorizationFailed, ErrorKind::Transient, "IdempotentWrite"),
            (Code::NotEnoughReplicas, THROTTLED, "in-sync"),
            (Code::NotEnoughReplicasAfterAppend, THROTTLED, "in-sync"),
            (Code::NotLeaderForPartition, THROTTLED, "no leader"),
            (Code::LeaderNotAvailable, THROTTLED, "no leader"),
            (Code::KafkaStorageError, THROTTLED, "no leader"),
            (Code::MessageTimedOut, THROTTLED, "in time"),
            (Code::RequestTimedOut, THROTTLED, "in time"),
            (Code::QueueFull, THROTTLED, "queue"),
            (Code::PurgeQueue, ErrorKind::Transient, "given up"),
            (Code::PurgeInflight, ErrorKind::Transient, "unknown"),
            (Code::OutOfOrderSequenceNumber, ErrorKind::Transient, "unknown"),
            (Code::InvalidProducerEpoch, ErrorKind::Transient, "unknown"),
        ] {
            let error = of(code, false);
            assert_eq!(error.kind(), kind, "{code:?}: {}", error.chain());
            assert!(error.chain().contains(part), "{code:?}: {}", error.chain());
        }
        let outage = of(Code::MessageTimedOut, true);
        assert_eq!(outage.kind(), ErrorKind::Transient);
        assert!(outage.chain().contains("no broker"), "{}", outage.chain());
        assert_eq!(unroutable(Unroutable::Park, "orders").kind(), ErrorKind::Permanent);
    }

    #[test]
    fn the_clients_complaint_is_told_of_what_may_pass() {
        let trouble = || (true, Some("sasl: wrong password".to_owned()));
        let of = |code| delivery_error(code, "orders", trouble()).chain();
        assert!(of(Code::MessageTimedOut).ends_with(": sasl: wrong password"));
        assert!(!of(Code::InvalidRecord).contains("sasl"));
    }

    #[test]
    fn a_size_is_told_with_the_limit() {
        let told = too_large("orders", 3_000, Some("2000"));
        assert_eq!(told.kind(), ErrorKind::Permanent);
        assert!(told.chain().contains("3000") && told.chain().contains("2000"), "{}", told.chain());
        for code in [Code::MessageSizeTooLarge, Code::MessageBatchTooLarge] {
            assert!(is_size(code) && may_be_anothers(code));
        }
        assert!(may_be_anothers(Code::InvalidDifferentRecord) && !is_size(Code::InvalidRecord));
    }
}
