//! CloudEvents 1.0: the JSON document of structured mode, and decoding of both modes.
//!
//! What lives here: the format. What does not: which attributes an event gets (`encoder.rs`).
//! Invariant: a JSON payload stands in `data` byte for byte, any other in `data_base64`; decoding
//! gives the bytes back, and refuses what is no CloudEvent without ever panicking.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use postrider_core::{Error, Record, Result, Timestamp};
use serde_json::value::RawValue;

use crate::http::{CLOUD_EVENTS_PREFIX, decode_header_value};
use crate::payload::{as_json, is_json};
use crate::time::parse_rfc3339;

/// The one version that is written and read.
pub const SPEC_VERSION: &str = "1.0";
/// Media type of a structured message.
pub const STRUCTURED_CONTENT_TYPE: &str = "application/cloudevents+json";
/// Attribute names longer than this are no CloudEvent's (the specification asks for at most 20).
const MAX_NAME_BYTES: usize = 64;

/// Attributes beyond those that CloudEvents itself defines, by name.
pub type Extensions = BTreeMap<String, String>;

/// A decoded CloudEvent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudEvent {
    /// Unique within the source: the event's id.
    pub id: String,
    /// Where it comes from.
    pub source: String,
    /// What happened.
    pub event_type: String,
    /// What it happened to: the event's key.
    pub subject: Option<String>,
    /// When it was appended.
    pub time: Option<Timestamp>,
    /// Media type of the data.
    pub data_content_type: Option<String>,
    /// All other attributes.
    pub extensions: Extensions,
    /// The data: the payload, byte for byte.
    pub data: Bytes,
}

impl CloudEvent {
    /// Reads a structured message.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) with what is wrong.
    pub fn from_structured(body: &[u8]) -> Result<Self> {
        let members: BTreeMap<String, &RawValue> = serde_json::from_slice(body)
            .map_err(|cause| Error::permanent("body is no JSON object").with_source(cause))?;
        let mut attributes = Extensions::new();
        let (mut data, mut data_base64) = (None, None);
        for (name, raw) in members {
            match name.as_str() {
                "data" => data = Some(raw),
                "data_base64" => data_base64 = Some(raw),
                _ => attributes.extend(scalar(&name, raw)?.map(|value| (name, value))),
            }
        }
        let data = match (data, data_base64) {
            (Some(_), Some(_)) => {
                return Err(Error::permanent("CloudEvent has both data and data_base64"));
            }
            (Some(raw), None) => inline_data(raw, attributes.get("datacontenttype")),
            (None, Some(raw)) => binary_data(raw)?,
            (None, None) => Bytes::new(),
        };
        Self::from_attributes(attributes, data)
    }

    /// Reads a binary-mode HTTP message: all its headers, names in any case, and its body.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) with what is wrong.
    pub fn from_http_binary<'a>(
        headers: impl IntoIterator<Item = (&'a str, &'a [u8])>,
        body: Bytes,
    ) -> Result<Self> {
        let mut attributes = Extensions::new();
        for (name, value) in headers {
            let name = name.to_ascii_lowercase();
            if let Some(name) = name.strip_prefix(CLOUD_EVENTS_PREFIX) {
                attributes.insert(name.to_owned(), decode_header_value(value)?);
            } else if name == "content-type" {
                let text = String::from_utf8(value.to_vec()).map_err(|cause| {
                    Error::permanent("content-type is not UTF-8").with_source(cause)
                })?;
                attributes.insert("datacontenttype".into(), text);
            }
        }
        Self::from_attributes(attributes, body)
    }

    fn from_attributes(mut attributes: Extensions, data: Bytes) -> Result<Self> {
        if let Some(name) = attributes.keys().find(|name| !is_attribute_name(name)) {
            return Err(Error::permanent(format!(
                "CloudEvents attribute {name:?} is no name: use lower-case letters and digits"
            )));
        }
        let mut required = |name: &str| match attributes.remove(name) {
            Some(value) if !value.is_empty() => Ok(value),
            _ => Err(Error::permanent(format!("CloudEvent has no {name}"))),
        };
        let version = required("specversion")?;
        if version != SPEC_VERSION {
            return Err(Error::permanent(format!(
                "CloudEvents version {version:?} is not supported; send {SPEC_VERSION}"
            )));
        }
        let (id, source, event_type) = (required("id")?, required("source")?, required("type")?);
        let time = attributes.remove("time").map(|text| parse_rfc3339(&text)).transpose()?;
        Ok(Self {
            id,
            source,
            event_type,
            subject: attributes.remove("subject"),
            time,
            data_content_type: attributes.remove("datacontenttype"),
            extensions: attributes,
            data,
        })
    }
}

fn is_attribute_name(name: &str) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.bytes().all(legal)
}

/// An attribute's text. `null` counts as absent (JSON format 1.0.2, 2.2).
fn scalar(name: &str, raw: &RawValue) -> Result<Option<String>> {
    match serde_json::from_str(raw.get()) {
        Ok(serde_json::Value::String(text)) => Ok(Some(text)),
        Ok(serde_json::Value::Null) => Ok(None),
        Ok(serde_json::Value::Bool(value)) => Ok(Some(value.to_string())),
        Ok(serde_json::Value::Number(value)) => Ok(Some(value.to_string())),
        Ok(serde_json::Value::Array(_) | serde_json::Value::Object(_)) | Err(_) => Err(
            Error::permanent(format!("CloudEvents attribute {name:?} is no text, number or truth")),
        ),
    }
}

/// `data` of a JSON media type is its own bytes; of another one, a JSON string is its text.
fn inline_data(raw: &RawValue, content_type: Option<&String>) -> Bytes {
    let json = content_type.is_none_or(|content_type| is_json(content_type));
    match serde_json::from_str::<String>(raw.get()) {
        Ok(text) if !json => text.into(),
        _ => Bytes::copy_from_slice(raw.get().as_bytes()),
    }
}

fn binary_data(raw: &RawValue) -> Result<Bytes> {
    let bad = |cause: Box<dyn std::error::Error + Send + Sync>| {
        Error::permanent("data_base64 is no base 64 text").with_source(cause)
    };
    let text: String = serde_json::from_str(raw.get()).map_err(|cause| bad(cause.into()))?;
    Ok(STANDARD.decode(text).map_err(|cause| bad(cause.into()))?.into())
}

/// The JSON document: attributes, media type, then the payload.
pub(crate) fn write_structured(record: &Record, attributes: &[(&'static str, String)]) -> Bytes {
    let event = &record.event;
    let payload = event.payload();
    let mut out = Vec::with_capacity(512 + payload.len() * 4 / 3);
    let mut separator = b'{';
    for (name, value) in attributes {
        write_member(&mut out, separator, name, value);
        separator = b',';
    }
    write_member(&mut out, separator, "datacontenttype", event.content_type().as_str());
    if let Some(raw) = as_json(event) {
        out.extend_from_slice(b",\"data\":");
        out.extend_from_slice(raw.get().as_bytes());
        out.push(b'}');
    } else {
        out.extend_from_slice(b",\"data_base64\":\"");
        out.extend_from_slice(STANDARD.encode(payload).as_bytes());
        out.extend_from_slice(b"\"}");
    }
    out.into()
}

fn write_member(out: &mut Vec<u8>, separator: u8, name: &str, value: &str) {
    out.push(separator);
    write_text(out, name);
    out.push(b':');
    write_text(out, value);
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a string serialises, and memory takes every write");
}
