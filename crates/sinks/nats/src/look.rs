//! What a stream says of itself, and what follows for events.
//!
//! What lives here: finding the stream, its limit, advice about its settings. What does not:
//! making or changing streams.
//! Invariant: a stream that can't be looked at is taken as it is: nothing here keeps events back.

use std::time::Duration;

use async_nats::jetstream::stream::{
    Config, DiscardPolicy, Info, PersistenceMode, RetentionPolicy, StorageType,
};
use async_nats::jetstream::{self, Context};
use postrider_core::{Error, Result, RetryPolicy};

/// The stream of the settings, or the one that takes a constant subject; none if the subject is
/// another one for each event, and JetStream answers.
///
/// # Errors
/// Transient, with the remedy.
pub(crate) async fn stream(
    context: &Context,
    name: Option<&str>,
    subject: Option<&str>,
) -> Result<Option<Info>> {
    let name = match (name, subject) {
        (Some(name), _) => name.to_owned(),
        (None, Some(subject)) => context.stream_by_subject(subject).await.map_err(|cause| {
            Error::transient(format!("subject: no stream takes {subject}")).with_source(cause)
        })?,
        (None, None) => return answers(context).await.map(|()| None),
    };
    let stream = context.get_stream(&name).await.map_err(|cause| {
        Error::transient(format!("stream: {name} cannot be looked at; does it exist?"))
            .with_source(cause)
    })?;
    Ok(Some(stream.cached_info().clone()))
}

/// Whether JetStream answers at all.
async fn answers(context: &Context) -> Result<()> {
    // Servers of different versions tell different things; that one answers is enough.
    let answer: serde_json::Value = context.request("INFO", &()).await.map_err(|cause| {
        Error::transient("JetStream does not answer; is it turned on?").with_source(cause)
    })?;
    match answer.get("error") {
        Some(error) => Err(Error::transient(format!("JetStream refuses: {error}"))),
        None => Ok(()),
    }
}

/// The largest message of the stream that took a subject's event, in bytes, if it has a limit and
/// tells.
pub(crate) async fn max_message_bytes(
    context: &Context,
    name: Option<&str>,
    subject: &str,
) -> Option<i32> {
    let info = stream(context, name, Some(subject)).await.ok()??;
    Some(info.config.max_message_size).filter(|bytes| *bytes > 0)
}

/// Refuses a stream that confirms nothing.
///
/// # Errors
/// Transient, with the remedy.
pub(crate) fn acknowledges(config: &Config) -> Result<()> {
    match config.no_ack {
        true => Err(Error::transient(format!(
            "stream: {} has no_ack, so that no event is ever confirmed, and each is sent again and \
             again; take no_ack from it",
            config.name
        ))),
        false => Ok(()),
    }
}

/// What confirmed events may not survive in a stream, and what lets events come twice.
pub(crate) fn advice(config: &Config, consumers: usize, retries_take: Duration) -> Vec<String> {
    let mut advice = Vec::new();
    if config.retention == RetentionPolicy::Interest && consumers == 0 {
        advice.push(
            "retention is interest and there is no consumer: events are confirmed and kept for \
             nobody; make the consumers first, or set retention limits"
                .to_owned(),
        );
    }
    let limits = [
        ("max_msgs", config.max_messages),
        ("max_bytes", config.max_bytes),
        ("max_msgs_per_subject", config.max_messages_per_subject),
    ];
    let drops = |name: &str| match config.discard {
        DiscardPolicy::Old => true,
        DiscardPolicy::New => name == "max_msgs_per_subject" && !config.discard_new_per_subject,
    };
    if let Some((name, limit)) = limits.iter().find(|(name, limit)| *limit > 0 && drops(name)) {
        let remedy = match *name {
            "max_msgs_per_subject" => "set discard new and discard_new_per_subject",
            _ => "set discard new",
        };
        advice.push(format!(
            "{name} is {limit}: beyond it the stream drops events that nobody has read; {remedy}"
        ));
    }
    if config.storage == StorageType::Memory {
        advice.push(
            "storage is memory: confirmed events are lost when the server ends; use storage file"
                .to_owned(),
        );
    }
    if config.persist_mode == Some(PersistenceMode::Async) {
        advice.push(
            "persist_mode is async: events are confirmed before they are stored, and the last of \
             them are lost with the server; use the default"
                .to_owned(),
        );
    }
    let window = config.duplicate_window;
    if window < retries_take {
        advice.push(format!(
            "duplicate_window is {} s, and an event may be tried for {} s: a repetition after it \
             is stored twice; make it longer than that and the longest outage",
            window.as_secs(),
            retries_take.as_secs()
        ));
    }
    advice
}

/// From an event's first attempt to the end of its last one, as long as that may take where the
/// sink is not down.
pub(crate) fn retries_take(retry: &RetryPolicy, attempt: Duration) -> Duration {
    // After so many doublings every wait is the longest one.
    const GROWING: u32 = 31;
    let waits = retry.max_attempts.saturating_sub(1);
    let growing = (0..waits.min(GROWING))
        .map(|n| retry.base_delay.saturating_mul(1 << n).min(retry.max_delay))
        .fold(Duration::ZERO, Duration::saturating_add);
    growing
        .saturating_add(retry.max_delay.saturating_mul(waits.saturating_sub(GROWING)))
        .saturating_add(attempt.saturating_mul(retry.max_attempts))
}

/// Warns of what is in [`advice`].
pub(crate) fn warn(info: &jetstream::stream::Info, retries_take: Duration) {
    for text in advice(&info.config, info.state.consumer_count, retries_take) {
        tracing::warn!("NATS: stream {}: {text}", info.config.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Config {
        Config {
            name: "EVENTS".into(),
            discard: DiscardPolicy::New,
            duplicate_window: Duration::from_secs(600),
            ..Config::default()
        }
    }

    #[test]
    fn what_may_be_lost_or_doubled_is_told() {
        let told = |config: Config, consumers| advice(&config, consumers, Duration::from_secs(170));
        assert!(told(good(), 0).is_empty());
        assert!(told(Config { max_messages: 9, max_bytes: 9, ..good() }, 0).is_empty());
        let old = Config { discard: DiscardPolicy::Old, ..good() };
        assert!(told(old.clone(), 0).is_empty(), "without a limit nothing is dropped");
        let interest = Config { retention: RetentionPolicy::Interest, ..good() };
        assert!(told(interest.clone(), 1).is_empty());
        let per_subject = Config { max_messages_per_subject: 5, ..good() };
        let refuses = Config { discard_new_per_subject: true, ..per_subject.clone() };
        assert!(told(refuses, 0).is_empty());
        let async_mode = Some(PersistenceMode::Async);
        let short = Duration::from_secs(120);
        for (config, parts) in [
            (interest, ["no consumer", "set retention limits"]),
            (Config { max_messages: 9, ..old.clone() }, ["max_msgs is 9", "set discard new"]),
            (Config { max_bytes: 9, ..old }, ["max_bytes is 9", "set discard new"]),
            (per_subject, ["max_msgs_per_subject is 5", "discard_new_per_subject"]),
            (Config { storage: StorageType::Memory, ..good() }, ["memory", "storage file"]),
            (Config { persist_mode: async_mode, ..good() }, ["async", "use the default"]),
            (Config { duplicate_window: short, ..good() }, ["120 s", "170 s"]),
        ] {
            let found = told(config, 0);
            assert!(found.len() == 1, "{parts:?}: {found:?}");
            assert!(parts.iter().all(|part| found[0].contains(part)), "{found:?}");
        }
        assert!(acknowledges(&good()).is_ok());
        let silent = acknowledges(&Config { no_ack: true, ..good() }).expect_err("refused");
        assert!(silent.chain().contains("no_ack"));
    }

    #[test]
    fn retries_take_as_long_as_their_waits_and_attempts() {
        let secs = Duration::from_secs;
        let retry = |base, max, attempts| RetryPolicy {
            base_delay: secs(base),
            max_delay: secs(max),
            max_attempts: attempts,
            ..RetryPolicy::default()
        };
        assert_eq!(retries_take(&retry(1, 5, 5), secs(2)), secs(1 + 2 + 4 + 5 + 5 * 2));
        assert_eq!(retries_take(&retry(1, 5, 1), secs(2)), secs(2));
        assert_eq!(retries_take(&retry(5, 5, 100), secs(0)), secs(99 * 5));
        retries_take(&retry(u64::MAX, u64::MAX, u32::MAX), secs(u64::MAX));
    }
}
