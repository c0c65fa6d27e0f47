//! Short texts with a meaning each: topic, event type, content type, consumer, group, relay.
//!
//! What lives here: the newtypes and their one rule. What does not: `Key`, which has a limit and a
//! meaning of its own.
//! Invariant: a value is never empty, never longer than `MAX_NAME_BYTES`, and has no control
//! characters, so that it can travel in any medium's header.

use std::fmt;
use std::sync::Arc;

use crate::limits::MAX_NAME_BYTES;
use crate::{Error, Result};

/// Checks a short text; `what` names it in the error.
pub(crate) fn check_text(what: &'static str, text: &str, max_bytes: usize) -> Result<()> {
    if text.is_empty() {
        return Err(Error::permanent(format!("{what} is empty; give it at least one character")));
    }
    if text.len() > max_bytes {
        return Err(Error::permanent(format!(
            "{what} has {} bytes; {max_bytes} are allowed",
            text.len()
        )));
    }
    if let Some(at) = text.chars().position(char::is_control) {
        return Err(Error::permanent(format!(
            "{what} has a control character at character {}; remove it",
            at + 1
        )));
    }
    Ok(())
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Takes the text if it is not empty, at most 255 bytes, and free of control
            /// characters.
            ///
            /// # Errors
            /// [`ErrorKind::Permanent`](crate::ErrorKind::Permanent), naming the field and the
            /// rule.
            pub fn new(text: impl Into<Arc<str>>) -> Result<Self> {
                let text = text.into();
                check_text($what, &text, MAX_NAME_BYTES)?;
                Ok(Self(text))
            }

            /// The text itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }
    };
}

name!(
    /// Where an event goes: a broker's topic, queue, subject or stream, before templates.
    Topic, "topic"
);
name!(
    /// What happened, for example `OrderPlaced`.
    EventType, "event type"
);
name!(
    /// The payload's media type, for example `application/json`.
    ContentType, "content type"
);
name!(
    /// Who reads a feed with a checkpoint of its own: a sink's name or a subscription's.
    ConsumerName, "consumer name"
);
name!(
    /// The relays (or subscription instances) that share partitions between them.
    GroupName, "group name"
);
name!(
    /// One running relay process; unique for each start.
    RelayId, "relay id"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_name_is_refused_with_its_place_and_the_rule() {
        assert_eq!(
            Topic::new("").map_err(|e| e.to_string()),
            Err("topic is empty; give it at least one character".into())
        );
        let long = "x".repeat(256);
        assert_eq!(
            EventType::new(long).map_err(|e| e.to_string()),
            Err("event type has 256 bytes; 255 are allowed".into())
        );
        assert_eq!(
            ConsumerName::new("a\nb").map_err(|e| e.to_string()),
            Err("consumer name has a control character at character 2; remove it".into())
        );
    }
}
