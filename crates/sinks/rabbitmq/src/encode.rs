//! From an event to a message of AMQP 0-9-1: its properties and headers.
//!
//! What lives here: which field carries what of the event, and whether all of them fit. What does
//! not: the body (`postrider-encoding`) and sending.
//! Invariant: every text arrives as it was appended; nothing of an event can stand for one of the
//! sink's own headers, nor route its message.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use postrider_core::{Error, Record, Result, TRACEPARENT, TRACESTATE};
use postrider_encoding::Message;

/// Prefix of CloudEvents attributes, as in the binding of AMQP 1.0 (CloudEvents 1.0.2, 3.1.3.1):
/// readers over AMQP 1.0 get headers as application properties.
pub(crate) const CLOUD_EVENTS_PREFIX: &str = "cloudEvents:";
pub(crate) const TOPIC: &str = "postrider-topic";
pub(crate) const KEY: &str = "postrider-key";
/// The broker would take these for further routing keys, and refuse texts.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];
/// Survives a restart of the broker, on queues that are durable.
const PERSISTENT: u8 = 2;
/// What a header of the frame takes beside the table: class, sizes, flags, the mode, the time, and
/// three texts of at most 255 bytes each.
const FIXED_BYTES: usize = 1_024;

/// The properties of an event's message, which has to fit one frame.
///
/// # Errors
/// `Permanent` if it does not, which tells the limit.
pub(crate) fn properties(
    record: &Record,
    message: &Message,
    frame_max: usize,
) -> Result<BasicProperties> {
    let event = &record.event;
    let mut headers = Table { table: FieldTable::default(), bytes: FIXED_BYTES };
    for (name, value) in event.headers().iter() {
        if ROUTING_HEADERS.contains(&name) {
            headers.insert(&name.to_ascii_lowercase(), value)?;
        } else if !name.eq_ignore_ascii_case(TRACEPARENT) && !name.eq_ignore_ascii_case(TRACESTATE)
        {
            headers.insert(name, value)?;
        }
    }
    for (attribute, value) in &message.attributes {
        headers.insert(&format!("{CLOUD_EVENTS_PREFIX}{attribute}"), value)?;
    }
    if let Some(trace) = event.trace() {
        headers.insert(TRACEPARENT, &trace.traceparent)?;
        if let Some(state) = &trace.tracestate {
            headers.insert(TRACESTATE, state)?;
        }
    }
    headers.insert(TOPIC, event.topic().as_str())?;
    headers.insert(KEY, event.key().as_str())?;
    if headers.bytes > frame_max {
        return Err(Error::permanent(format!(
            "the event's headers take up to {} bytes; one frame of the connection has {frame_max} \
             (frame_max)",
            headers.bytes
        )));
    }
    Ok(BasicProperties::default()
        .with_message_id(short("id", &event.id().to_string())?)
        .with_type(short("type", event.event_type().as_str())?)
        .with_content_type(short("content type", &message.content_type)?)
        .with_delivery_mode(PERSISTENT)
        .with_timestamp(record.appended_at.as_millis() / 1_000)
        .with_headers(headers.table))
}

struct Table {
    table: FieldTable,
    /// What it takes in its frame, at most.
    bytes: usize,
}

impl Table {
    fn insert(&mut self, name: &str, value: &str) -> Result<()> {
        // Length and text of the name, kind, length and text of the value.
        self.bytes += 1 + name.len() + 1 + 4 + value.len();
        self.table.insert(short("header's name", name)?, AMQPValue::LongString(value.into()));
        Ok(())
    }
}

/// A text that AMQP gives 255 bytes.
///
/// # Errors
/// `Permanent` if it has more.
pub(crate) fn short(what: &str, text: &str) -> Result<ShortString> {
    ShortString::try_new(text).map_err(|_| {
        Error::permanent(format!(
            "the event's {what} has {} bytes; AMQP 0-9-1 takes 255",
            text.len()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::{
        ContentType, ErrorKind, EventId, EventType, Headers, Key, NewEvent, Position, Timestamp,
        Topic, TraceContext,
    };
    use postrider_encoding::{Encoder, Encoding, EventSource};
    use uuid::Uuid;

    const SPAN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const FRAME: usize = 131_072;

    fn record(headers: Headers) -> Record {
        let event = NewEvent::builder(
            Key::new("Zoë 42").expect("valid"),
            Topic::new("orders").expect("valid"),
            EventType::new("OrderPlaced").expect("valid"),
        )
        .headers(headers)
        .trace(&TraceContext::new(SPAN, Some("vendor=1".into())).expect("valid"))
        .expect("valid")
        .payload(ContentType::new("application/json").expect("valid"), "{}")
        .build()
        .expect("valid")
        .identified(|| EventId::from_uuid(Uuid::from_u128(1)));
        let appended_at = Timestamp::from_millis(1_672_671_845_678);
        Record { position: Position::START, appended_at, event }
    }

    fn made(encoding: Encoding, headers: Headers) -> Result<BasicProperties> {
        let record = record(headers);
        let message = Encoder::new(encoding, EventSource::default()).encode(&record);
        properties(&record, &message, FRAME)
    }

    fn header(properties: &BasicProperties, name: &str) -> Option<String> {
        match properties.headers().as_ref()?.inner().get(name)? {
            AMQPValue::LongString(text) => Some(text.to_string()),
            other => panic!("{name} is {other:?}"),
        }
    }

    #[test]
    fn every_field_of_the_mapping() {
        let mut headers = Headers::new();
        for (name, value) in
            [("Tenant", "50 % \"é\""), (TOPIC, "forged"), ("CC", "queue"), ("BCC", "queue")]
        {
            headers.insert(name, value).expect("valid");
        }
        let made = made(Encoding::Plain, headers).expect("made");
        let text = |value: &Option<ShortString>| value.as_ref().map(|text| text.to_string());
        let id = "00000000-0000-0000-0000-000000000001";
        assert_eq!(text(made.message_id()).as_deref(), Some(id));
        assert_eq!(text(made.kind()).as_deref(), Some("OrderPlaced"));
        assert_eq!(text(made.content_type()).as_deref(), Some("application/json"));
        assert_eq!(*made.timestamp(), Some(1_672_671_845));
        assert_eq!(*made.delivery_mode(), Some(2));
        for (name, value) in [
            ("Tenant", Some("50 % \"é\"")),
            ("postrider-topic", Some("orders")),
            ("postrider-key", Some("Zoë 42")),
            ("traceparent", Some(SPAN)),
            ("tracestate", Some("vendor=1")),
            ("cc", Some("queue")),
            ("CC", None),
            ("BCC", None),
        ] {
            assert_eq!(header(&made, name).as_deref(), value, "{name}");
        }
    }

    #[test]
    fn cloud_events_use_the_names_of_amqp() {
        let binary = made(Encoding::CloudEventsBinary, Headers::new()).expect("made");
        assert_eq!(header(&binary, "cloudEvents:type").as_deref(), Some("OrderPlaced"));
        let structured = made(Encoding::CloudEventsStructured, Headers::new()).expect("made");
        assert_eq!(header(&structured, "cloudEvents:type"), None);
        let content_type = structured.content_type().as_ref().map(|text| text.to_string());
        assert_eq!(content_type.as_deref(), Some("application/cloudevents+json"));
    }

    #[test]
    fn headers_beyond_a_frame_are_refused_with_the_limit() {
        let many = |count: usize| {
            let mut headers = Headers::new();
            for n in 0..count {
                headers.insert(&format!("h{n}"), &"x".repeat(8_000)).expect("valid");
            }
            made(Encoding::Plain, headers)
        };
        many(16).expect("16 times 8,000 bytes and a little");
        let error = many(17).expect_err("too many");
        assert_eq!(error.kind(), ErrorKind::Permanent);
        assert!(error.to_string().contains("131072"), "{error}");
    }
}
