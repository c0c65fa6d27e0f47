//! Domain events: what happened, as a type of the application.
//!
//! What lives here: the trait, its way to a `NewEvent`, and the link from an event to its entity.
//! What does not: collecting events (`pending.rs`) and the article's extra members
//! (`envelope.rs`).
//! Invariant: `TYPE` and `TOPIC` are constants, so that renaming a struct changes no message.

use std::any::Any;

use postrider_core::{ContentType, Error, EventType, Headers, Key, NewEvent, Result, Topic};

/// Name of the header that carries [`DomainEvent::VERSION`].
pub const EVENT_VERSION: &str = "event-version";

/// What `serde` can write as JSON. It stands between the two so that the compiler, where a derive
/// of `Serialize` is missing, says so and does not speak of a sealed trait.
pub trait ToJson: serde::Serialize {}

impl<T: serde::Serialize> ToJson for T {}

/// Something that happened, ready to be told to others. Derive it:
/// `#[derive(serde::Serialize, DomainEvent)]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a domain event",
    label = "not a domain event",
    note = "derive it: `#[derive(serde::Serialize, DomainEvent)]` with `#[event(…)]`"
)]
pub trait DomainEvent: ToJson {
    /// What happened, for example `OrderPlaced`; the message's type or subject.
    const TYPE: &'static str;
    /// The version of the payload's shape, from 1; travels in the header [`EVENT_VERSION`].
    const VERSION: u32;
    /// Where it goes.
    const TOPIC: &'static str;

    /// The key within which it keeps its order, for example the order's id.
    fn key(&self) -> String;

    /// The event to append: its fields as JSON. `append` gives it an id.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if it has no JSON form, its
    /// key is empty or too long, or its payload is too large.
    fn to_event(&self) -> Result<NewEvent>
    where
        Self: Sized,
    {
        let payload = to_json(Self::TYPE, self)?;
        builder(Self::TOPIC, Self::TYPE, Self::VERSION, &self.key(), payload)?.build()
    }
}

/// Says that an event is one of `T`'s: only such an event can be raised on a `T`. The derive
/// writes it for `#[event(entity = T)]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an event of `{T}`",
    label = "an event of another entity, or of none",
    note = "an event names its entity: `#[event(entity = …)]`"
)]
pub trait EventOf<T: ?Sized>: DomainEvent + Send + Sync + 'static {}

/// A domain event whose type was left behind; `as_any` gives it back to a handler.
pub(crate) trait AnyEvent: Send + Sync {
    fn topic(&self) -> &'static str;
    fn event_type(&self) -> &'static str;
    fn version(&self) -> u32;
    fn key(&self) -> String;
    fn to_json(&self) -> Result<Vec<u8>>;
    fn as_any(&self) -> &(dyn Any + Send + Sync);
}

impl<E: DomainEvent + Send + Sync + 'static> AnyEvent for E {
    fn topic(&self) -> &'static str {
        E::TOPIC
    }

    fn event_type(&self) -> &'static str {
        E::TYPE
    }

    fn version(&self) -> u32 {
        E::VERSION
    }

    fn key(&self) -> String {
        DomainEvent::key(self)
    }

    fn to_json(&self) -> Result<Vec<u8>> {
        to_json(E::TYPE, self)
    }

    fn as_any(&self) -> &(dyn Any + Send + Sync) {
        self
    }
}

fn to_json<E: serde::Serialize>(event_type: &str, event: &E) -> Result<Vec<u8>> {
    serde_json::to_vec(event).map_err(|e| {
        Error::permanent(format!("event {event_type} has no JSON form")).with_source(e)
    })
}

/// The event's builder with everything that a domain event says about itself.
pub(crate) fn builder(
    topic: &'static str,
    event_type: &'static str,
    version: u32,
    key: &str,
    payload: Vec<u8>,
) -> Result<postrider_core::NewEventBuilder> {
    let mut headers = Headers::new();
    headers.insert(EVENT_VERSION, &version.to_string())?;
    Ok(NewEvent::builder(Key::new(key)?, Topic::new(topic)?, EventType::new(event_type)?)
        .headers(headers)
        .payload(ContentType::new("application/json")?, payload))
}
