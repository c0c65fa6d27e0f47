//! What the emulator has: queues, topics, subscriptions, and their settings.
//!
//! What lives here: the settings, their defaults, and reading them from TOML. What does not: what
//! they do (`broker/`).
//! Invariant: a configuration that was checked names no entity twice, and none that can't be
//! addressed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::error::{Error, Result};

/// The largest message of the standard tier, in bytes.
pub const MESSAGE_BYTES_STANDARD: u64 = 256 * 1024;
/// The largest message of the premium tier unless its entity allows more, in bytes.
pub const MESSAGE_BYTES_PREMIUM: u64 = 1024 * 1024;
/// The largest message that an entity may allow, in bytes.
pub const MESSAGE_BYTES_MAX: u64 = 100 * 1024 * 1024;
/// What one entity holds unless it is told otherwise, in bytes of messages.
pub const ENTITY_BYTES_DEFAULT: u64 = 256 * 1024 * 1024;
/// The longest name of an entity.
pub const NAME_CHARS_MAX: usize = 260;

/// One namespace and the address at which it listens.
#[derive(Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The name of the key that opens the whole namespace.
    pub shared_access_key_name: String,
    /// The key itself.
    pub shared_access_key: String,
    /// The SQLite file in which entities outlive the emulator; without it all is in memory. It is
    /// made if it is not there, and one emulator at a time has it.
    pub data: Option<PathBuf>,
    /// By name.
    pub queues: BTreeMap<String, Entity>,
    /// By name.
    pub topics: BTreeMap<String, Topic>,
}

impl Default for Config {
    /// A free port of this machine alone, a key that everybody knows, and no entities.
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            shared_access_key_name: "RootManageSharedAccessKey".to_owned(),
            shared_access_key: "SAS_KEY_VALUE".to_owned(),
            data: None,
            queues: BTreeMap::new(),
            topics: BTreeMap::new(),
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("listen", &self.listen)
            .field("data", &self.data)
            .field("queues", &self.queues)
            .field("topics", &self.topics)
            .finish_non_exhaustive()
    }
}

/// Settings of a queue or of a subscription.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Entity {
    /// Whether every message needs a session, and every receiver locks one.
    pub requires_session: bool,
    /// How long a message-id is remembered; without it, repeated ids are messages like others.
    #[serde(deserialize_with = "optional_duration")]
    pub duplicate_detection_window: Option<Duration>,
    /// The largest message, in bytes.
    pub max_message_bytes: u64,
    /// How long a message or a session is locked for its receiver.
    #[serde(deserialize_with = "duration")]
    pub lock_duration: Duration,
    /// After so many deliveries without success a message goes to the dead-letter queue.
    pub max_delivery_count: u32,
    /// How long messages live that don't say so themselves, and the longest that any lives.
    #[serde(deserialize_with = "optional_duration")]
    pub default_time_to_live: Option<Duration>,
    /// Whether a message that outlived its time goes to the dead-letter queue, or nowhere.
    pub dead_letter_on_expiration: bool,
    /// How much it holds in bytes of messages, its dead letters not counted.
    pub max_entity_bytes: u64,
}

impl Default for Entity {
    /// As the service makes a queue that nothing is said of, with a lock of 60 s.
    fn default() -> Self {
        Self {
            requires_session: false,
            duplicate_detection_window: None,
            max_message_bytes: MESSAGE_BYTES_STANDARD,
            lock_duration: Duration::from_secs(60),
            max_delivery_count: 10,
            default_time_to_live: None,
            dead_letter_on_expiration: false,
            max_entity_bytes: ENTITY_BYTES_DEFAULT,
        }
    }
}

/// Settings of a topic.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Topic {
    /// How long a message-id is remembered; without it, repeated ids are messages like others.
    #[serde(deserialize_with = "optional_duration")]
    pub duplicate_detection_window: Option<Duration>,
    /// The largest message, in bytes.
    pub max_message_bytes: u64,
    /// How long messages live that don't say so themselves, and the longest that any lives.
    #[serde(deserialize_with = "optional_duration")]
    pub default_time_to_live: Option<Duration>,
    /// By name. Each gets a copy of every message; there are no filters.
    pub subscriptions: BTreeMap<String, Entity>,
}

impl Default for Topic {
    fn default() -> Self {
        Self {
            duplicate_detection_window: None,
            max_message_bytes: MESSAGE_BYTES_STANDARD,
            default_time_to_live: None,
            subscriptions: BTreeMap::new(),
        }
    }
}

impl Topic {
    /// With one more subscription.
    #[must_use]
    pub fn with_subscription(mut self, name: impl Into<String>, settings: Entity) -> Self {
        self.subscriptions.insert(name.into(), settings);
        self
    }

    /// The settings of the entity that takes messages in.
    pub(crate) fn entity(&self) -> Entity {
        Entity {
            duplicate_detection_window: self.duplicate_detection_window,
            max_message_bytes: self.max_message_bytes,
            default_time_to_live: self.default_time_to_live,
            ..Entity::default()
        }
    }
}

impl Config {
    /// With entities that outlive the emulator in this file.
    #[must_use]
    pub fn with_data(mut self, path: impl Into<PathBuf>) -> Self {
        self.data = Some(path.into());
        self
    }

    /// With one more queue.
    #[must_use]
    pub fn with_queue(mut self, name: impl Into<String>, settings: Entity) -> Self {
        self.queues.insert(name.into(), settings);
        self
    }

    /// With one more topic.
    #[must_use]
    pub fn with_topic(mut self, name: impl Into<String>, topic: Topic) -> Self {
        self.topics.insert(name.into(), topic);
        self
    }

    /// Reads it from TOML and checks it.
    ///
    /// # Errors
    /// When a setting is unknown, has the wrong type or a value that can't be.
    pub fn from_toml(text: &str) -> Result<Self> {
        let config: Self = toml::from_str(text).map_err(|error| Error::Syntax(Box::new(error)))?;
        config.check()?;
        Ok(config)
    }

    /// What can't be is found before anything starts.
    pub(crate) fn check(&self) -> Result<()> {
        let mut names = BTreeSet::new();
        for (name, settings) in &self.queues {
            check_name(name)?;
            check_entity(name, settings)?;
            if !names.insert(name.to_lowercase()) {
                return Err(problem(name, "there are two entities of this name"));
            }
        }
        for (name, topic) in &self.topics {
            check_name(name)?;
            check_entity(name, &topic.entity())?;
            if !names.insert(name.to_lowercase()) {
                return Err(problem(name, "there are two entities of this name"));
            }
            let mut subscriptions = BTreeSet::new();
            for (subscription, settings) in &topic.subscriptions {
                check_name(subscription)?;
                check_entity(subscription, settings)?;
                if subscription.contains('/') {
                    return Err(problem(subscription, "a subscription's name has no slash"));
                }
                if !subscriptions.insert(subscription.to_lowercase()) {
                    return Err(problem(subscription, "its topic has two of this name"));
                }
            }
        }
        if self.shared_access_key.is_empty() || self.shared_access_key.contains(';') {
            return Err(problem("shared_access_key", "give it one or more characters, no ;"));
        }
        Ok(())
    }
}

fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.chars().count() > NAME_CHARS_MAX {
        return Err(problem(name, "a name has 1 to 260 characters"));
    }
    let parts: Vec<&str> = name.split('/').collect();
    let allowed = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | '~');
    if parts.iter().any(|part| part.is_empty() || !part.chars().all(allowed)) {
        return Err(problem(name, "a name has letters, digits, . - _ ~ and single slashes"));
    }
    if parts.iter().any(|part| part.eq_ignore_ascii_case("subscriptions")) {
        return Err(problem(name, "no part of a name is `subscriptions`"));
    }
    Ok(())
}

fn check_entity(name: &str, settings: &Entity) -> Result<()> {
    if !(1..=MESSAGE_BYTES_MAX).contains(&settings.max_message_bytes) {
        return Err(problem(name, "max_message_bytes lies between 1 and 104857600"));
    }
    if settings.max_delivery_count == 0 {
        return Err(problem(name, "max_delivery_count is at least 1"));
    }
    if settings.lock_duration.is_zero() {
        return Err(problem(name, "lock_duration is more than nothing"));
    }
    Ok(())
}

fn problem(name: &str, problem: &str) -> Error {
    Error::Config { name: name.to_owned(), problem: problem.to_owned() }
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    let parsed = text.parse::<jiff::SignedDuration>().map_err(serde::de::Error::custom)?;
    parsed.try_into().map_err(|_| serde::de::Error::custom("a duration is not negative"))
}

fn optional_duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    duration(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_and_the_rest_has_defaults() {
        let text = "[queues.orders]\nrequires_session = true\nlock_duration = \"5s\"\n\
            duplicate_detection_window = \"10m\"\n[topics.t.subscriptions.a]\n";
        let config = Config::from_toml(text).expect("it is right");
        let orders = &config.queues["orders"];
        assert!(orders.requires_session);
        assert_eq!(orders.lock_duration, Duration::from_secs(5));
        assert_eq!(orders.duplicate_detection_window, Some(Duration::from_secs(600)));
        assert_eq!(orders.max_message_bytes, 262_144);
        assert_eq!(config.topics["t"].subscriptions["a"].max_delivery_count, 10);
        assert_eq!(config.listen, "127.0.0.1:0".parse().expect("an address"));
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        for (text, part) in [
            ("[queues.orders]\nsession = true\n", "can't be read"),
            ("[queues.orders]\nlock_duration = \"-5s\"\n", "can't be read"),
            ("[queues.orders]\nlock_duration = \"0s\"\n", "orders: lock_duration"),
            ("[queues.orders]\nmax_delivery_count = 0\n", "orders: max_delivery_count"),
            ("[queues.orders]\nmax_message_bytes = 0\n", "orders: max_message_bytes"),
            ("[queues.orders]\n[queues.ORDERS]\n", "two entities"),
            ("[queues.orders]\n[topics.Orders]\n", "two entities"),
            ("[queues.\"a//b\"]\n", "single slashes"),
            ("[queues.\"a/Subscriptions/b\"]\n", "no part"),
            ("[topics.t.subscriptions.\"a/b\"]\n", "no slash"),
            ("shared_access_key = \"\"\n", "shared_access_key"),
        ] {
            let error = Config::from_toml(text).expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn the_key_is_not_shown() {
        let shown = format!("{:?}", Config::default());
        assert!(!shown.contains("SAS_KEY_VALUE"), "{shown}");
    }
}
