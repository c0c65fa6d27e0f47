//! The namespace: all entities, and what passes between them.
//!
//! What lives here: finding an entity by its address, taking messages in, copies for subscriptions,
//! dead letters, and waking whoever waits. What does not: what happens within one queue
//! (`queue.rs`), and the wire.
//! Invariant: whatever changes an entity first does what has become due, and afterwards moves what
//! leaves it, in the same critical section; where there is a file, what was changed is saved before
//! anybody is told of it.

mod durable;
pub(crate) mod message;
pub(crate) mod queue;
mod retrieval;
mod seen;
pub(crate) mod sessions;
mod states;
mod timers;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::clock::Clock;
use crate::config::{Config, Entity};
use crate::error;
use crate::refusal::{Refusal, condition};
use crate::store::Store;
use message::Message;
use queue::{Kind, Leaving, Queue};

/// Names a link for as long as the emulator runs.
pub(crate) type LinkId = u64;

/// The last part of a dead-letter queue's address.
const DEAD_LETTERS: &str = "$deadletterqueue";

/// Why and from where a message became a dead letter.
#[derive(Debug, Clone)]
pub(crate) struct Letter {
    pub source: String,
    pub reason: Option<String>,
    pub description: Option<String>,
}

/// What became of a transfer's messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Submitted {
    /// The numbers of those that were stored.
    pub sequence_numbers: Vec<i64>,
    /// How many were dropped as repetitions.
    pub duplicates: u64,
}

/// All entities, by their lower-case path.
#[derive(Debug)]
pub(crate) struct Broker {
    entities: Mutex<Entities>,
    changed: watch::Sender<u64>,
    pub clock: Clock,
}

#[derive(Debug)]
struct Entities {
    queues: HashMap<String, Queue>,
    /// By topic.
    subscriptions: HashMap<String, Vec<String>>,
    store: Option<Store>,
}

impl Broker {
    pub(crate) fn new(config: &Config) -> Self {
        let mut entities =
            Entities { queues: HashMap::new(), subscriptions: HashMap::new(), store: None };
        for (name, settings) in &config.queues {
            entities.add(name.clone(), Kind::Queue, settings.clone());
        }
        for (name, topic) in &config.topics {
            let key = entities.add(name.clone(), Kind::Topic, topic.entity());
            let mut keys = Vec::new();
            for (subscription, settings) in &topic.subscriptions {
                let path = format!("{name}/Subscriptions/{subscription}");
                let settings = Entity { duplicate_detection_window: None, ..settings.clone() };
                keys.push(entities.add(path, Kind::Subscription, settings));
            }
            entities.subscriptions.insert(key, keys);
        }
        let (changed, _) = watch::channel(0);
        Self { entities: Mutex::new(entities), changed, clock: Clock::start() }
    }

    /// With all that a file has of these entities, and everything that changes saved there.
    pub(crate) fn open(config: &Config, path: &Path) -> error::Result<Self> {
        let broker = Self::new(config);
        let store = Store::open(path)?;
        let mut entities = broker.lock();
        let keys: Vec<String> = entities.queues.keys().cloned().collect();
        entities.queues.values_mut().for_each(Queue::make_durable);
        store.load(&mut entities.queues, path)?;
        entities.store = Some(store);
        // What has no place any more becomes a dead letter at once.
        let now_ms = broker.clock.now_ms();
        for key in &keys {
            entities.move_leaving(key, now_ms);
        }
        drop(entities);
        Ok(broker)
    }

    /// Tells of every change that a receiver may wait for.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Wakes whoever waits.
    pub(crate) fn wake(&self) {
        self.changed.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// Whether there is such an entity, and what it is.
    pub(crate) fn find(&self, path: &str) -> Option<(Kind, Entity)> {
        let entities = self.lock();
        let queue = entities.queues.get(&key(path))?;
        Some((queue.kind, queue.settings.clone()))
    }

    /// Takes the messages of one transfer in: all of them or none.
    pub(crate) fn submit(&self, path: &str, messages: Vec<Message>) -> Result<Submitted, Refusal> {
        let now_ms = self.clock.now_ms();
        let key = key(path);
        let mut entities = self.lock();
        entities.check_submission(&key, &messages)?;
        let mut submitted = Submitted::default();
        if let Some(queue) = entities.queues.get_mut(&key) {
            queue.advance(now_ms);
            for mut message in messages {
                message.give_id();
                if queue.is_new(&message, now_ms) {
                    submitted.sequence_numbers.push(queue.put(Arc::new(message), now_ms));
                } else {
                    submitted.duplicates += 1;
                }
            }
        }
        entities.move_leaving(&key, now_ms);
        let saved = entities.save(now_ms);
        drop(entities);
        self.wake();
        saved.map(|()| submitted)
    }

    /// Does something with one entity, as of now.
    pub(crate) fn with<T>(
        &self,
        path: &str,
        act: impl FnOnce(&mut Queue, i64) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let now_ms = self.clock.now_ms();
        let key = key(path);
        let mut entities = self.lock();
        let queue = entities.queues.get_mut(&key).ok_or_else(|| not_found(path))?;
        let mut moved = queue.advance(now_ms);
        let result = act(queue, now_ms);
        moved |= !queue.leaving.is_empty();
        entities.move_leaving(&key, now_ms);
        let saved = entities.save(now_ms);
        drop(entities);
        if moved {
            self.wake();
        }
        result.and_then(|done| saved.map(|()| done))
    }

    /// Looks at one entity, as it is.
    pub(crate) fn look<T>(&self, path: &str, see: impl FnOnce(&Queue) -> T) -> Option<T> {
        self.lock().queues.get(&key(path)).map(see)
    }

    /// Does what is due everywhere, and returns when to do so next.
    pub(crate) fn advance(&self) -> Option<i64> {
        let now_ms = self.clock.now_ms();
        let mut entities = self.lock();
        let due = |queue: &Queue| queue.next_timer_ms().is_some_and(|at| at <= now_ms);
        let keys: Vec<String> = entities
            .queues
            .iter()
            .filter(|(_, queue)| due(queue))
            .map(|(key, _)| key.clone())
            .collect();
        for key in &keys {
            if let Some(queue) = entities.queues.get_mut(key) {
                queue.advance(now_ms);
            }
            entities.move_leaving(key, now_ms);
        }
        let next = entities.queues.values().filter_map(Queue::next_timer_ms).min();
        // It is tried again with the next change.
        let _ = entities.save(now_ms);
        drop(entities);
        if !keys.is_empty() {
            self.wake();
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, Entities> {
        self.entities.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entities {
    fn add(&mut self, path: String, kind: Kind, settings: Entity) -> String {
        let key = key(&path);
        if kind != Kind::Topic {
            let letters = Entity {
                lock_duration: settings.lock_duration,
                max_message_bytes: settings.max_message_bytes,
                ..Entity::default()
            };
            let path = format!("{path}/$DeadLetterQueue");
            let queue = Queue::new(path, Kind::DeadLetters, letters);
            self.queues.insert(format!("{key}/{DEAD_LETTERS}"), queue);
        }
        self.queues.insert(key.clone(), Queue::new(path, kind, settings));
        key
    }

    /// Saves what has changed, if there is where. What could not be saved is tried again with the
    /// next change; until then whoever made it is told that it failed.
    fn save(&mut self, now_ms: i64) -> Result<(), Refusal> {
        let Some(store) = &mut self.store else { return Ok(()) };
        let changed = |(_, queue): &(&String, &Queue)| queue.unsaved().is_some();
        if !self.queues.iter().any(|entry| changed(&entry)) {
            return Ok(());
        }
        store.save(self.queues.iter().filter(changed), now_ms).map_err(|error| {
            tracing::error!(%error, "the file of the entities can't be written");
            let text = "The emulator can't write its file.";
            Refusal::new(condition::INTERNAL_ERROR, text)
        })?;
        self.queues.values_mut().for_each(Queue::saved);
        Ok(())
    }

    fn check_submission(&self, key: &str, messages: &[Message]) -> Result<(), Refusal> {
        let queue = self.queues.get(key).ok_or_else(|| not_found(key))?;
        if !matches!(queue.kind, Kind::Queue | Kind::Topic) {
            let text = format!("Messages can't be sent to {}.", queue.path);
            return Err(Refusal::new(condition::NOT_ALLOWED, text));
        }
        for message in messages {
            message.check(queue.settings.requires_session)?;
        }
        let bytes = messages.iter().map(|message| message.size as u64).sum();
        let subscriptions = self.subscriptions.get(key).into_iter().flatten();
        for key in subscriptions.map(String::as_str).chain([key]) {
            if let Some(queue) = self.queues.get(key) {
                queue.has_room_for(bytes, messages.len())?;
            }
        }
        Ok(())
    }

    /// Brings what leaves an entity to where it belongs.
    fn move_leaving(&mut self, key: &str, now_ms: i64) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        for leaving in std::mem::take(&mut queue.leaving) {
            match leaving {
                Leaving::DeadLetter(stored) => {
                    if let Some(letters) = self.queues.get_mut(&format!("{key}/{DEAD_LETTERS}")) {
                        letters.put_letter(*stored);
                    }
                }
                Leaving::Publish(message) => self.publish(key, &message, now_ms),
            }
        }
    }

    fn publish(&mut self, topic: &str, message: &Arc<Message>, now_ms: i64) {
        for key in self.subscriptions.get(topic).cloned().unwrap_or_default() {
            if let Some(subscription) = self.queues.get_mut(&key) {
                subscription.put(Arc::clone(message), now_ms);
            }
            // Without a session it may have become a dead letter at once.
            self.move_leaving(&key, now_ms);
        }
    }
}

/// How entities are found: by their path in lower case.
pub(crate) fn key(path: &str) -> String {
    path.trim_matches('/').to_lowercase()
}

pub(crate) fn not_found(path: &str) -> Refusal {
    let text = format!("The messaging entity '{path}' could not be found.");
    Refusal::new(condition::NOT_FOUND, text)
}
