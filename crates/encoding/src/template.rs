//! Templates over an event: `{topic}`, `{type}`, `{key}`, `{header.NAME}`.
//!
//! What lives here: parsing, with errors that name the place, and rendering. What does not: what a
//! rendered text is used for; its sink says so by the escape policy.
//! Invariant: a value is escaped as a whole; only the template's own text can add structure.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use postrider_core::{Error, Event, Headers, Result};

const PLACEHOLDERS: [&str; 3] = ["topic", "type", "key"];
const HEADER_PREFIX: &str = "header.";
/// Longest template, in bytes: far above any URL or subject that a broker takes.
const MAX_TEMPLATE_BYTES: usize = 8 * 1024;

/// RFC 3986's unreserved characters stay; everything else is encoded.
const URL_ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// As in a URL, but without the dot: no value can name a folder, a hidden file or a suffix.
const FILE_ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// How a value is made safe for the place it goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Escape {
    /// As it is: for brokers whose names take any text.
    None,
    /// Percent-encoded, for a URL's path or query.
    Url,
    /// Percent-encoded, for one part of a file's name.
    FileName,
    /// Percent-encoded, for levels of a subject or routing key, which dots separate. A topic and a
    /// type keep the dots between their own parts; any other value is one level.
    Subject,
}

/// A parsed template. `{{` and `}}` stand for the braces themselves.
#[derive(Clone, PartialEq, Eq)]
pub struct Template(Vec<Part>);

#[derive(Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Topic,
    Type,
    Key,
    Header(String),
}

impl Template {
    /// Parses a template; done once, when a sink is made.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) that names the byte and the
    /// nearest placeholder. The text itself is not repeated: it may hold a secret.
    pub fn parse(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::permanent("template is empty"));
        }
        if text.len() > MAX_TEMPLATE_BYTES {
            return Err(Error::permanent(format!(
                "template has {} bytes; {MAX_TEMPLATE_BYTES} are allowed",
                text.len()
            )));
        }
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            let place = text.len() - rest.len() + at + 1;
            literal.push_str(&rest[..at]);
            let (brace, after) = rest[at..].split_at(1);
            if let Some(after) = after.strip_prefix(brace) {
                literal.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(Error::permanent(format!(
                    "template has a }} at byte {place} that closes nothing; write }}}} for a brace"
                )));
            }
            let Some((name, after)) = after.split_once('}') else {
                return Err(Error::permanent(format!(
                    "template has a {{ at byte {place} without its }}; write {{{{ for a brace"
                )));
            };
            if !literal.is_empty() {
                parts.push(Part::Literal(std::mem::take(&mut literal)));
            }
            parts.push(placeholder(name, place)?);
            rest = after;
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        Ok(Self(parts))
    }

    /// The whole text, if it has no placeholder.
    pub fn constant(&self) -> Option<&str> {
        match self.0.as_slice() {
            [Part::Literal(text)] => Some(text),
            _ => None,
        }
    }

    /// The text before the first placeholder.
    pub fn literal_prefix(&self) -> &str {
        match self.0.first() {
            Some(Part::Literal(text)) => text,
            _ => "",
        }
    }

    /// The text for one event.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if the event lacks a header
    /// that the template names.
    pub fn render(&self, event: &Event, escape: Escape) -> Result<String> {
        let mut text = String::new();
        for part in &self.0 {
            let value = match part {
                Part::Literal(literal) => {
                    text.push_str(literal);
                    continue;
                }
                Part::Topic => event.topic().as_str(),
                Part::Type => event.event_type().as_str(),
                Part::Key => event.key().as_str(),
                Part::Header(name) => event.headers().get(name).ok_or_else(|| {
                    Error::permanent(format!(
                        "event has no header {name}, which the sink's template asks for"
                    ))
                })?,
            };
            let is_name = matches!(part, Part::Topic | Part::Type);
            match escape {
                Escape::Subject if is_name && value.split('.').all(|level| !level.is_empty()) => {
                    for (index, level) in value.split('.').enumerate() {
                        text.push_str(if index > 0 { "." } else { "" });
                        text.extend(utf8_percent_encode(level, FILE_ENCODED));
                    }
                }
                Escape::None => text.push_str(value),
                Escape::Url => text.extend(utf8_percent_encode(value, URL_ENCODED)),
                Escape::FileName | Escape::Subject => {
                    text.extend(utf8_percent_encode(value, FILE_ENCODED));
                }
            }
        }
        Ok(text)
    }
}

impl fmt::Debug for Template {
    /// Placeholders only: the text between them may hold a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Template(")?;
        for part in &self.0 {
            match part {
                Part::Literal(_) => f.write_str("…")?,
                Part::Topic => f.write_str("{topic}")?,
                Part::Type => f.write_str("{type}")?,
                Part::Key => f.write_str("{key}")?,
                Part::Header(name) => write!(f, "{{header.{name}}}")?,
            }
        }
        f.write_str(")")
    }
}

fn placeholder(name: &str, place: usize) -> Result<Part> {
    match name {
        "topic" => return Ok(Part::Topic),
        "type" => return Ok(Part::Type),
        "key" => return Ok(Part::Key),
        _ => {}
    }
    if let Some(header) = name.strip_prefix(HEADER_PREFIX) {
        // A name that no event can carry would refuse every event; refuse it here instead.
        Headers::new().insert(header, "").map_err(|cause| {
            Error::permanent(format!("template placeholder at byte {place}")).with_source(cause)
        })?;
        return Ok(Part::Header(header.to_owned()));
    }
    let distance = |candidate: &&str| strsim::damerau_levenshtein(candidate, name);
    let nearest = PLACEHOLDERS.into_iter().min_by_key(distance).filter(|near| distance(near) <= 2);
    let shown: String = name.chars().take(40).collect();
    Err(Error::permanent(match nearest {
        Some(near) => {
            format!("template has no placeholder {{{shown}}} (byte {place}); meant {{{near}}}?")
        }
        None => format!(
            "template has no placeholder {{{shown}}} (byte {place}); there are {{topic}}, \
             {{type}}, {{key}} and {{header.NAME}}"
        ),
    }))
}
