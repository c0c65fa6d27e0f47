//! Values of keys: from TOML to what they mean, by the key's shape.
//!
//! What lives here: `Value`, `Fields`, and the reading of durations, sizes, times and positions.
//! What does not: sections and unknown keys (`parse.rs`), `env:` and `file:` (`secrets.rs`).
//! Invariant: a `Fields` holds a value of the right shape for every required or defaulted key.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use postrider_core::{Position, Secret, StartFrom, Timestamp};
use toml::de::DeValue;

use super::keys::Shape;
use super::problem::{Place, nearest};

/// What a key's value means.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// A text or one word of a choice.
    Text(String),
    /// A text that is never shown.
    Secret(Secret),
    /// Texts that are never shown.
    Secrets(Vec<Secret>),
    /// Names and texts that are never shown.
    SecretTable(Vec<(String, Secret)>),
    /// A length of time; none for `off`.
    Duration(Option<Duration>),
    /// A size in bytes or a whole number.
    Number(u64),
    /// A number from 0 to 1.
    Fraction(f64),
    /// Yes or no.
    Switch(bool),
    /// Where to begin.
    Start(StartFrom),
    /// An address; none for `off`.
    Listen(Option<SocketAddr>),
    /// An `env:` or `file:` value that was left unresolved on purpose.
    Unresolved,
}

/// The values of one section, by key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields {
    values: BTreeMap<&'static str, (Value, Option<Place>)>,
}

#[cfg_attr(not(feature = "webhook"), allow(dead_code, reason = "tables are some sinks' alone"))]
impl Fields {
    /// Sets a key; `place` is none for a default.
    pub(crate) fn insert(&mut self, name: &'static str, value: Value, place: Option<Place>) {
        self.values.insert(name, (value, place));
    }

    /// Where a key was given, if it was.
    pub(crate) fn place(&self, name: &str) -> Option<Place> {
        self.values.get(name).and_then(|(_, place)| *place)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.values.get(name).map(|(value, _)| value)
    }

    /// A text.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        match self.get(name) {
            Some(Value::Text(text)) => Some(text),
            Some(Value::Secret(secret)) => Some(secret.expose()),
            _ => None,
        }
    }

    /// A text that is never shown.
    pub(crate) fn secret(&self, name: &str) -> Option<&Secret> {
        match self.get(name) {
            Some(Value::Secret(secret)) => Some(secret),
            _ => None,
        }
    }

    /// Texts that are never shown.
    pub(crate) fn secrets(&self, name: &str) -> &[Secret] {
        match self.get(name) {
            Some(Value::Secrets(list)) => list,
            _ => &[],
        }
    }

    /// Names and texts that are never shown.
    pub(crate) fn secret_table(&self, name: &str) -> &[(String, Secret)] {
        match self.get(name) {
            Some(Value::SecretTable(list)) => list,
            _ => &[],
        }
    }

    /// A length of time; none for `off` or a key left out.
    pub(crate) fn duration(&self, name: &str) -> Option<Duration> {
        match self.get(name) {
            Some(Value::Duration(duration)) => *duration,
            _ => None,
        }
    }

    /// A size or a whole number.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        match self.get(name) {
            Some(Value::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// A number from 0 to 1.
    pub(crate) fn fraction(&self, name: &str) -> Option<f64> {
        match self.get(name) {
            Some(Value::Fraction(number)) => Some(*number),
            _ => None,
        }
    }

    /// Yes or no; no for a key left out.
    pub(crate) fn switch(&self, name: &str) -> bool {
        matches!(self.get(name), Some(Value::Switch(true)))
    }

    /// Where to begin.
    pub(crate) fn start(&self, name: &str) -> Option<&StartFrom> {
        match self.get(name) {
            Some(Value::Start(start)) => Some(start),
            _ => None,
        }
    }

    /// An address: none when left out, `Some(None)` for `off`.
    pub(crate) fn listen(&self, name: &str) -> Option<Option<SocketAddr>> {
        match self.get(name) {
            Some(Value::Listen(address)) => Some(*address),
            _ => None,
        }
    }
}

/// What kind of TOML value was found, for an error.
pub(crate) fn type_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// Reads a value that is no text: the switch and the numbers.
pub(crate) fn read_plain(shape: Shape, value: &DeValue<'_>) -> Result<Value, String> {
    match (shape, value) {
        (Shape::Switch, DeValue::Boolean(on)) => Ok(Value::Switch(*on)),
        (Shape::Integer { min, max } | Shape::Size { min, max }, DeValue::Integer(number)) => {
            u64::from_str_radix(number.as_str(), number.radix())
                .map_err(|_| format!("{number} is out of range; give {min} to {max}"))
                .and_then(|number| within(number, min, max))
        }
        (Shape::Fraction, DeValue::Float(number)) => read_fraction(number.as_str()),
        (Shape::Fraction, DeValue::Integer(number)) => read_fraction(number.as_str()),
        (Shape::Start, DeValue::Datetime(time)) => read_start(&time.to_string()).map(Value::Start),
        _ => Err(format!("found {}; write {}", type_of(value), example(shape))),
    }
}

/// Reads a text by the key's shape.
pub(crate) fn read_text(shape: Shape, text: &str) -> Result<Value, String> {
    if text.is_empty() {
        return Err(format!("is empty; write {}", example(shape)));
    }
    match shape {
        Shape::Text => Ok(Value::Text(text.to_owned())),
        Shape::Secret => Ok(Value::Secret(Secret::new(text))),
        Shape::Choice(words) => read_choice(words, text),
        Shape::Duration { min, max } => {
            read_duration_within(text, min, max).map(|found| Value::Duration(Some(found)))
        }
        Shape::DurationOrOff { .. } if text == "off" => Ok(Value::Duration(None)),
        Shape::DurationOrOff { min, max } => {
            read_duration_within(text, min, max).map(|found| Value::Duration(Some(found)))
        }
        Shape::Size { min, max } => read_size(text).and_then(|bytes| within(bytes, min, max)),
        Shape::Start => read_start(text).map(Value::Start),
        Shape::Listen if text == "off" => Ok(Value::Listen(None)),
        Shape::Listen => text
            .parse()
            .map(|address| Value::Listen(Some(address)))
            .map_err(|_| format!("{text:?} is no address; write {}", example(shape))),
        Shape::Integer { .. }
        | Shape::Fraction
        | Shape::Switch
        | Shape::Secrets
        | Shape::SecretTable => Err(format!("found a text; write {}", example(shape))),
    }
}

/// A value that would be right, for an error.
pub(crate) fn example(shape: Shape) -> String {
    match shape {
        Shape::Text | Shape::Secret => "a text in quotes, such as \"…\"".to_owned(),
        Shape::Secrets => "a list of texts, such as [\"env:SECRET\"]".to_owned(),
        Shape::SecretTable => "a table, such as { authorization = \"env:TOKEN\" }".to_owned(),
        Shape::Choice(words) => one_of(words),
        Shape::Duration { .. } => "a length of time, such as \"5s\" or \"100ms\"".to_owned(),
        Shape::DurationOrOff { .. } => "a length of time, such as \"7d\", or \"off\"".to_owned(),
        Shape::Size { .. } => "a size, such as \"64MiB\" or 65536".to_owned(),
        Shape::Integer { min, max } => format!("a whole number from {min} to {max}"),
        Shape::Fraction => "a number from 0 to 1".to_owned(),
        Shape::Switch => "true or false, without quotes".to_owned(),
        Shape::Start => {
            "\"oldest\", \"now\", a time such as \"2026-11-27T22:00:00Z\", or a position".to_owned()
        }
        Shape::Listen => "an address, such as \"127.0.0.1:9180\", or \"off\"".to_owned(),
    }
}

fn one_of(words: &[&str]) -> String {
    words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" or ")
}

fn read_choice(words: &[&str], text: &str) -> Result<Value, String> {
    if words.contains(&text) {
        return Ok(Value::Text(text.to_owned()));
    }
    let hint = nearest(text, words.iter().copied())
        .map_or(String::new(), |word| format!("; did you mean {word:?}?"));
    Err(format!("{text:?} is not one of {}{hint}", one_of(words)))
}

fn within(number: u64, min: u64, max: u64) -> Result<Value, String> {
    if (min..=max).contains(&number) {
        return Ok(Value::Number(number));
    }
    Err(format!("{number} is out of range; give {min} to {max}"))
}

fn read_fraction(text: &str) -> Result<Value, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(Value::Fraction(number)),
        _ => Err(format!("{text} is out of range; write {}", example(Shape::Fraction))),
    }
}

fn read_duration_within(text: &str, min: Duration, max: Duration) -> Result<Duration, String> {
    let found = read_duration(text)?;
    if (min..=max).contains(&found) {
        return Ok(found);
    }
    Err(format!("{text:?} is out of range; give {} to {}", show_duration(min), show_duration(max)))
}

/// Reads `1h30m`, `5s`, `100ms`, `7d`: numbers with units, largest first or not.
///
/// # Errors
/// What was expected, for a person.
pub(crate) fn read_duration(text: &str) -> Result<Duration, String> {
    let bad =
        || format!("{text:?} is no length of time; write a number and ms, s, m, h or d: \"5s\"");
    let mut rest = text.trim();
    let mut total_ms: u64 = 0;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        rest = rest[digits..].trim_start();
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let unit_ms: u64 = match &rest[..letters] {
            "ms" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        rest = rest[letters..].trim_start();
        let part = number.checked_mul(unit_ms).ok_or_else(bad)?;
        total_ms = total_ms.checked_add(part).ok_or_else(bad)?;
    }
    Ok(Duration::from_millis(total_ms))
}

/// A length of time in its largest whole unit, as `read_duration` reads it.
pub(crate) fn show_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    if ms == 0 {
        return "0s".to_owned();
    }
    for (unit_ms, unit) in [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
        if ms >= unit_ms && ms.is_multiple_of(unit_ms) {
            return format!("{}{unit}", ms / unit_ms);
        }
    }
    format!("{ms}ms")
}

/// Reads `64MiB`, `64 MB`, `65536`.
fn read_size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is no size; write a number and B, KiB, MiB or GiB: \"64MiB\"");
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let number: u64 = trimmed[..digits].parse().map_err(|_| bad())?;
    let unit: u64 = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(bad()),
    };
    number.checked_mul(unit).ok_or_else(bad)
}

/// Reads `oldest`, `now`, an RFC 3339 time, or a position.
///
/// # Errors
/// What was expected, for a person.
pub(crate) fn read_start(text: &str) -> Result<StartFrom, String> {
    match text {
        "oldest" => return Ok(StartFrom::Oldest),
        "now" => return Ok(StartFrom::Now),
        _ => {}
    }
    if let Ok(time) = text.parse::<jiff::Timestamp>() {
        let ms = u64::try_from(time.as_millisecond())
            .map_err(|_| format!("{text:?} lies before 1970"))?;
        return Ok(StartFrom::Time(Timestamp::from_millis(ms)));
    }
    Position::parse(text)
        .map(StartFrom::After)
        .map_err(|_| format!("{text:?} is no place in a feed; write {}", example(Shape::Start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_back_as_they_are_shown() {
        for (text, ms) in [("0s", 0), ("100ms", 100), ("5s", 5_000), ("7d", 604_800_000)] {
            assert_eq!(read_duration(text), Ok(Duration::from_millis(ms)));
            assert_eq!(show_duration(Duration::from_millis(ms)), text);
        }
        assert_eq!(read_duration("1h30m"), Ok(Duration::from_secs(5_400)));
        for bad in ["", "5", "s", "5 weeks", "-1s", "99999999999999999999d", "1.5s"] {
            assert!(read_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_know_both_families_of_units() {
        assert_eq!(read_size("64MiB"), Ok(64 << 20));
        assert_eq!(read_size("1 kb"), Ok(1_000));
        assert_eq!(read_size("17"), Ok(17));
        for bad in ["", "MiB", "1 TiBs", "99999999999999999999", "18446744073709551615GiB"] {
            assert!(read_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_start_is_a_word_a_time_or_a_position() {
        assert_eq!(read_start("oldest"), Ok(StartFrom::Oldest));
        assert_eq!(
            read_start("2023-01-02T15:04:05Z"),
            Ok(StartFrom::Time(Timestamp::from_millis(1_672_671_845_000)))
        );
        assert!(matches!(read_start("01GNSG5PM8ZZZVZZZZZZZZZZZZ"), Ok(StartFrom::After(_))));
        assert!(read_start("yesterday").is_err());
        assert!(read_start("1960-01-01T00:00:00Z").is_err());
    }
}
