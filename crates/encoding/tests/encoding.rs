//! Encodings and templates, from the outside: what goes in comes out.
//!
//! What lives here: round trips through each encoding, and templates. What does not: one file's
//! own vectors, which stand beside the code.
//! Invariant: every test compares bytes, not meanings.

use bytes::Bytes;
use postrider_core::{
    ContentType, Event, EventId, EventType, Headers, Key, NewEvent, Position, Record, Timestamp,
    Topic, TraceContext,
};
use postrider_encoding::{
    CloudEvent, Encoder, Encoding, Escape, EventSource, Message, Template, encode_header_value,
};
use proptest::prelude::*;
use uuid::Uuid;

const ID: Uuid = Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0001);

fn event(key: &str, content_type: &str, payload: &[u8]) -> Event {
    let mut headers = Headers::new();
    headers.insert("Tenant", "a/b c").expect("valid");
    let trace = TraceContext::new(
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        Some("vendor=1".into()),
    )
    .expect("valid");
    NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .id(EventId::from_uuid(ID))
    .headers(headers)
    .trace(&trace)
    .expect("valid")
    .payload(ContentType::new(content_type).expect("valid"), payload.to_vec())
    .build()
    .expect("valid")
    .identified(|| EventId::from_uuid(Uuid::nil()))
}

fn record(event: Event) -> Record {
    let appended_at = Timestamp::from_millis(1_672_671_845_123);
    Record { position: Position::START, appended_at, event }
}

fn encode(encoding: Encoding, record: &Record) -> Message {
    let source = EventSource::new("/shop").expect("valid");
    Encoder::new(encoding, source).encode(record)
}

fn decode_binary(message: &Message) -> CloudEvent {
    let mut headers: Vec<(String, Vec<u8>)> = message
        .attributes
        .iter()
        .map(|(name, value)| (format!("Ce-{name}"), encode_header_value(value).as_bytes().to_vec()))
        .collect();
    headers.push(("Content-Type".into(), message.content_type.clone().into_bytes()));
    let headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_slice()));
    CloudEvent::from_http_binary(headers, message.body.clone()).expect("own message")
}

fn assert_same(decoded: &CloudEvent, record: &Record) {
    let event = &record.event;
    assert_eq!(decoded.id, event.id().to_string());
    assert_eq!(decoded.source, "/shop");
    assert_eq!(decoded.event_type, event.event_type().as_str());
    assert_eq!(decoded.subject.as_deref(), Some(event.key().as_str()));
    assert_eq!(decoded.time, Some(record.appended_at));
    assert_eq!(decoded.data_content_type.as_deref(), Some(event.content_type().as_str()));
    assert_eq!(decoded.extensions["partitionkey"], event.key().as_str());
    let trace = event.trace().expect("has one");
    assert_eq!(decoded.extensions["traceparent"], trace.traceparent);
    assert_eq!(Some(&decoded.extensions["tracestate"]), trace.tracestate.as_ref());
    assert_eq!(decoded.extensions.len(), 3);
    assert_eq!(&decoded.data, event.payload());
}

#[test]
fn a_structured_message_has_the_documented_form() {
    let record = record(event("order-42", "application/json", br#"{"b":1.0, "a":"\u00e9"}"#));
    let message = encode(Encoding::CloudEventsStructured, &record);
    assert_eq!(message.content_type, "application/cloudevents+json");
    let text = std::str::from_utf8(&message.body).expect("JSON");
    assert_eq!(
        text,
        concat!(
            r#"{"specversion":"1.0","id":"01900000-0000-7000-8000-000000000001","#,
            r#""source":"/shop","type":"OrderPlaced","subject":"order-42","#,
            r#""time":"2023-01-02T15:04:05.123Z","partitionkey":"order-42","#,
            r#""traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01","#,
            r#""tracestate":"vendor=1","datacontenttype":"application/json","#,
            r#""data":{"b":1.0, "a":"\u00e9"}}"#
        )
    );
}

#[test]
fn payloads_that_are_no_exact_json_travel_as_base64() {
    for (content_type, payload) in [
        ("application/json", &b" {}"[..]),
        ("application/json", b"{}\n"),
        ("application/json", b"{"),
        ("application/json", b""),
        ("application/json", b"\"\xff\""),
        ("application/json", b"1 2"),
        ("text/plain", b"\"quoted\""),
        ("application/octet-stream", &[0, 1, 2]),
    ] {
        let record = record(event("k", content_type, payload));
        let message = encode(Encoding::CloudEventsStructured, &record);
        let text = std::str::from_utf8(&message.body).expect("JSON");
        assert!(text.contains("\"data_base64\":") && !text.contains("\"data\":"), "{text}");
        assert_same(&CloudEvent::from_structured(&message.body).expect("own message"), &record);
    }
}

#[test]
fn plain_and_binary_share_the_payload_instead_of_copying_it() {
    let record = record(event("k", "application/json", b"[1]"));
    for encoding in [Encoding::Plain, Encoding::CloudEventsBinary] {
        let message = encode(encoding, &record);
        assert_eq!(message.body.as_ptr(), record.event.payload().as_ptr());
        assert_eq!(message.content_type, "application/json");
        assert!(!format!("{message:?}").contains("[1]"));
    }
    assert!(encode(Encoding::Plain, &record).attributes.is_empty());
}

#[test]
fn foreign_structured_events_are_read_by_the_rules_of_the_format() {
    let read = |text: &str| CloudEvent::from_structured(text.as_bytes());
    let ok = read(
        r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","n":7,"b":true,"gone":null,
            "datacontenttype":"text/plain","data":"a\"b"}"#,
    )
    .expect("valid");
    assert_eq!(ok.data, Bytes::from_static(b"a\"b"));
    assert_eq!(ok.extensions.get("n").map(String::as_str), Some("7"));
    assert!(!ok.extensions.contains_key("gone"));
    for (bad, reason) in [
        ("[]", "no JSON object"),
        (r#"{"specversion":"1.0","source":"/s","type":"t"}"#, "no id"),
        (r#"{"specversion":"0.3","id":"1","source":"/s","type":"t"}"#, "not supported"),
        (r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","A":"x"}"#, "is no name"),
        (r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","a":[]}"#, "is no text"),
        (r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","time":"x"}"#, "time is not"),
        (
            r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","data":1,"data_base64":""}"#,
            "both",
        ),
        (r#"{"specversion":"1.0","id":"1","source":"/s","type":"t","data_base64":"?"}"#, "base 64"),
    ] {
        let text = read(bad).expect_err("invalid").to_string();
        assert!(text.contains(reason), "{bad}: {text}");
    }
}

#[test]
fn templates_render_with_the_escape_of_their_place() {
    let event = event("../a b&é", "application/json", b"{}");
    let render = |text: &str, escape| {
        Template::parse(text).expect("valid").render(&event, escape).expect("rendered")
    };
    assert_eq!(render("x.{topic}.{type}.{key}", Escape::None), "x.orders.OrderPlaced.../a b&é");
    assert_eq!(render("/{key}?t={header.tenant}", Escape::Url), "/..%2Fa%20b%26%C3%A9?t=a%2Fb%20c");
    assert_eq!(render("{key}.jsonl", Escape::FileName), "%2E%2E%2Fa%20b%26%C3%A9.jsonl");
    assert_eq!(render("{{{topic}}}", Escape::None), "{orders}");
    assert_eq!(render("a.{topic}.{key}", Escape::Subject), "a.orders.%2E%2E%2Fa%20b%26%C3%A9");
    let missing = Template::parse("{header.nope}").expect("valid").render(&event, Escape::None);
    assert!(missing.expect_err("missing").to_string().contains("no header nope"));
}

#[test]
fn a_subject_has_the_levels_of_a_topic_and_none_of_a_key() {
    let rendered = |topic: &str| {
        let event = NewEvent::builder(
            Key::new("a.b.*.>").expect("valid"),
            Topic::new(topic).expect("valid"),
            EventType::new("order.placed").expect("valid"),
        );
        let event = event.build().expect("valid").identified(|| EventId::from_uuid(Uuid::nil()));
        let template = Template::parse("{topic}.{type}.{key}").expect("valid");
        template.render(&event, Escape::Subject).expect("rendered")
    };
    let rest = "order.placed.a%2Eb%2E%2A%2E%3E";
    assert_eq!(rendered("shop.orders"), format!("shop.orders.{rest}"));
    assert_eq!(rendered("shop. *"), format!("shop.%20%2A.{rest}"));
    for empty_level in [".", "a..b", ".a", "a."] {
        let encoded = empty_level.replace('.', "%2E");
        assert_eq!(rendered(empty_level), format!("{encoded}.{rest}"));
    }
}

#[test]
fn bad_templates_are_refused_with_place_and_remedy() {
    for (text, expected) in [
        ("", "template is empty"),
        ("a{topic", "{ at byte 2 without its }; write {{ for a brace"),
        ("a}b", "} at byte 2 that closes nothing; write }} for a brace"),
        ("a/{topci}", "no placeholder {topci} (byte 3); meant {topic}?"),
        ("{tenant.id}", "there are {topic}, {type}, {key} and {header.NAME}"),
        ("{}", "no placeholder {}"),
        ("{header.}", "placeholder at byte 1"),
        ("{header.a b}", "placeholder at byte 1"),
    ] {
        let error = Template::parse(text).expect_err("invalid").to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let secret = Template::parse("https://h/s3cret/{key}").expect("valid");
    assert!(!format!("{secret:?}").contains("s3cret"));
    assert_eq!(secret.literal_prefix(), "https://h/s3cret/");
    assert_eq!(secret.constant(), None);
    assert_eq!(Template::parse("{{x}}").expect("valid").constant(), Some("{x}"));
}

proptest! {
    #[test]
    fn every_event_survives_both_cloud_events_modes(
        key in "[^\\p{Cc}]{1,40}",
        json in any::<bool>(),
        payload in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..64),
            "[\\[\\]{}\",:0-9a-z \n\\\\]{0,12}".prop_map(String::into_bytes),
            any::<String>().prop_map(|s| serde_json::to_vec(&s).expect("a string")),
        ],
    ) {
        let content_type = if json { "application/json" } else { "text/plain; charset=utf-8" };
        let record = record(event(&key, content_type, &payload));
        let structured = encode(Encoding::CloudEventsStructured, &record);
        assert_same(&CloudEvent::from_structured(&structured.body).expect("own"), &record);
        let binary = encode(Encoding::CloudEventsBinary, &record);
        assert_same(&decode_binary(&binary), &record);
    }

    #[test]
    fn decoding_and_parsing_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        text in "[{}a-z.\\\\\"é:,0-9]{0,60}",
        name in "(ce-)?[a-zA-Z]{0,12}",
    ) {
        let _ = CloudEvent::from_structured(&bytes);
        let _ = CloudEvent::from_structured(text.as_bytes());
        let _ = CloudEvent::from_http_binary([(name.as_str(), bytes.as_slice())], Bytes::new());
        let _ = Template::parse(&text);
    }

    #[test]
    fn a_url_value_never_adds_structure(key in "[^\\p{Cc}]{1,40}") {
        let event = event(&key, "text/plain", b"");
        let template = Template::parse("{key}").expect("valid");
        let text = template.render(&event, Escape::Url).expect("rendered");
        prop_assert!(!text.contains(['/', '?', '#', '@', ':', '\\', '&', ' ']), "{}", text);
        let file = template.render(&event, Escape::FileName).expect("rendered");
        prop_assert!(!file.contains(['/', '\\', '.']), "{}", file);
    }
}
