//! The inbox: an event's effect exactly once, however often it is delivered.
//!
//! What lives here: "seen before?" as a document in the handler's own batch. What does not:
//! receiving messages.
//! Invariant: the note and the handler's changes are in one transactional batch, so in one logical
//! partition; an id is forgotten, by its time to live, only when the broker can no longer deliver
//! it again.

use std::time::Duration;

use azure_data_cosmos::TransactionalBatch;
use postrider_core::{ConsumerName, Error, EventId, Result};
use serde_json::json;

use crate::CosmosStore;
use crate::error::{NOT_FOUND, cosmos_error, failed, status};

/// The document type of notes.
const NOTE: &str = "inboxNote";

/// How long ids are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InboxOptions {
    /// So long after they were handled; whole seconds count.
    pub dedup_window: Duration,
    /// The longest time after which the broker may still deliver a message again: its retention,
    /// or its time to live. The window may not be shorter.
    pub broker_horizon: Duration,
}

impl Default for InboxOptions {
    /// 14 days for both: the longest default retention of the brokers that Postrider knows.
    fn default() -> Self {
        let fortnight = Duration::from_secs(14 * 24 * 60 * 60);
        Self { dedup_window: fortnight, broker_horizon: fortnight }
    }
}

/// An inbox in the container of the handler's own documents.
#[derive(Debug, Clone)]
pub struct CosmosInbox {
    store: CosmosStore,
    window_seconds: u64,
}

impl CosmosInbox {
    /// An inbox that remembers by `options`.
    ///
    /// # Errors
    /// `Permanent` if the window is shorter than the broker's horizon: a late redelivery would be
    /// handled twice; or if it is more than 68 years.
    pub fn new(store: CosmosStore, options: InboxOptions) -> Result<Self> {
        let window_seconds = options.dedup_window.as_secs();
        if options.dedup_window < options.broker_horizon {
            return Err(Error::permanent(format!(
                "dedup_window ({window_seconds} s) is shorter than the broker's horizon ({} s); a \
                 message delivered again after it would be handled twice: raise dedup_window",
                options.broker_horizon.as_secs()
            )));
        }
        if !(1..=i32::MAX as u64).contains(&window_seconds) {
            return Err(Error::permanent(format!(
                "dedup_window is {window_seconds} s; give 1 to {} s",
                i32::MAX
            )));
        }
        Ok(Self { store, window_seconds })
    }

    /// Whether `consumer` has handled the event in this logical partition: skip the handler then.
    ///
    /// # Errors
    /// As any read of the store.
    pub async fn handled(
        &self,
        partition_key: &str,
        consumer: &ConsumerName,
        id: EventId,
    ) -> Result<bool> {
        let note = note_id(consumer, id);
        let read = self.store.container().read_item(partition_key.to_owned(), &note, None).await;
        match read {
            Ok(_) => Ok(true),
            Err(error) => match status(&error) {
                (NOT_FOUND, None | Some(0)) => Ok(false),
                _ => Err(cosmos_error("look the event up in the inbox", &error)),
            },
        }
    }

    /// Adds the note that `consumer` handles the event to the handler's own batch. If the event
    /// was handled meanwhile, the batch answers 409 and saves nothing: it counts as handled.
    ///
    /// # Errors
    /// `Permanent` if the batch can't take it.
    pub fn note(
        &self,
        batch: TransactionalBatch,
        partition_key: &str,
        consumer: &ConsumerName,
        id: EventId,
    ) -> Result<TransactionalBatch> {
        let note = json!({
            "id": note_id(consumer, id),
            "partitionKey": partition_key,
            "type": NOTE,
            "ttl": self.window_seconds,
        });
        batch.create_item(note).map_err(failed("note the event as handled"))
    }
}

/// A consumer's name may have characters that an id may not.
fn note_id(consumer: &ConsumerName, id: EventId) -> String {
    let mut name = String::new();
    for byte in consumer.as_str().bytes() {
        match byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
            true => name.push(char::from(byte)),
            false => name.push_str(&format!("%{byte:02x}")),
        }
    }
    format!("inbox-{id}-{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_of_different_consumers_never_meet() {
        let id = EventId::from_uuid(uuid::Uuid::nil());
        let of = |name| note_id(&ConsumerName::new(name).expect("a name"), id);
        assert_ne!(of("a b"), of("a_b"));
        assert_ne!(of("a%20b"), of("a b"));
        assert!(!of("a/b#c").contains(['/', '#']));
    }
}
