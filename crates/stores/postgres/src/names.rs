//! The names of an outbox's tables and functions, and SQL texts with them filled in.
//!
//! What lives here: quoting, and the placeholders of the migrations and statements. What does not:
//! any statement. Invariant: a name from outside reaches SQL only through `identifier` or
//! `literal`.

use std::fmt::Write as _;

use crate::config::PayloadType;

/// Quotes a name as an identifier.
pub(crate) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quotes a text as a literal. Safe whatever `standard_conforming_strings` says.
pub(crate) fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    match quoted.contains('\\') {
        true => format!("E'{}'", quoted.replace('\\', "\\\\")),
        false => format!("'{quoted}'"),
    }
}

/// What one record costs of a page's byte budget beside its payload, in bytes: an estimate of its
/// texts.
const RECORD_BYTES: usize = 256;

/// What an adopted table's feed is made from: parts of an ordinary outbox's migrations, so that
/// both are the same, and what differs. Their placeholders are filled by SQL.
fn template(name: &str) -> Option<&'static str> {
    let outbox = include_str!("../migrations/0001_outbox.sql");
    let between = |from: &str, to: &str| {
        let begin = outbox.find(from).expect("the migration has the part");
        let end = outbox.find(to).expect("the migration has the part");
        &outbox[begin..end]
    };
    let retention = include_str!("../migrations/0003_retention.sql");
    Some(match name {
        "ticks_template_text" => between("-- One cut of the feed each.", "-- Cuts the feed"),
        "functions_template_text" => &outbox[outbox.find("-- Cuts the feed")?..],
        "passed_template_text" => retention.split("-- The table that holds a segment").next()?,
        "ripe_template_text" => include_str!("../migrations/ripe_ticks.sql"),
        "adopted_retention_template_text" => include_str!("../migrations/adopted_retention.sql"),
        _ => return None,
    })
}

/// The names of one outbox.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    schema: String,
    outbox: String,
    payload: PayloadType,
}

impl Names {
    pub(crate) fn new(schema: &str, outbox: &str, payload: PayloadType) -> Self {
        Self { schema: schema.to_owned(), outbox: outbox.to_owned(), payload }
    }

    pub(crate) fn outbox(&self) -> &str {
        &self.outbox
    }

    pub(crate) fn schema(&self) -> &str {
        &self.schema
    }

    pub(crate) fn payload(&self) -> PayloadType {
        self.payload
    }

    /// The number under which this outbox takes advisory locks: FNV-1a of its name, because two
    /// outboxes of one database must not wait for each other.
    pub(crate) fn lock_class(&self) -> i32 {
        let name = format!("postrider\0{}\0{}", self.schema, self.outbox);
        let hash = name
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        i32::from_be_bytes(hash.to_be_bytes())
    }

    /// One of the outbox's own locks, apart from those of its keys.
    fn lock(&self, number: i64) -> i64 {
        i64::from(self.lock_class()) << 32 | number
    }

    /// Fills the placeholders of a SQL text: see the heads of the migrations.
    pub(crate) fn fill(&self, sql: &str) -> String {
        let mut text = String::with_capacity(sql.len() + sql.len() / 4);
        let mut rest = sql;
        while let Some(open) = rest.find('{') {
            let Some(length) = rest[open..].find('}') else { break };
            let name = &rest[open + 1..open + length];
            text.push_str(&rest[..open]);
            match self.value(name) {
                Some(value) => text.push_str(&value),
                None => {
                    let _ = write!(text, "{{{name}}}");
                }
            }
            rest = &rest[open + length + 1..];
        }
        text.push_str(rest);
        text
    }

    fn value(&self, name: &str) -> Option<String> {
        let schema = identifier(&self.schema);
        let json = self.payload == PayloadType::Json;
        let part = |suffix: &str| format!("{}{suffix}", self.outbox);
        Some(match name {
            "schema" => schema,
            "schema_text" => literal(&self.schema),
            "schema_ident_text" => literal(&schema),
            "outbox_text" => literal(&self.outbox),
            // The outbox itself, for a cast to regclass.
            "outbox_table_text" => literal(&format!("{schema}.{}", identifier(&self.outbox))),
            "outbox_ident_text" => literal(&identifier(&self.outbox)),
            "payload" => (if json { "json" } else { "bytea" }).to_owned(),
            "payload_type_text" => literal(if json { "json" } else { "bytea" }),
            "payload_out" if json => "convert_to(l.payload::text, 'UTF8')".to_owned(),
            "payload_out" => "l.payload".to_owned(),
            "payload_in" if json => "convert_from(e.payload, 'UTF8')::json".to_owned(),
            "payload_in" => "e.payload".to_owned(),
            "content_type_text" if json => literal("application/json"),
            "content_type_text" => literal("application/octet-stream"),
            "record_bytes" => RECORD_BYTES.to_string(),
            "lock_class" => self.lock_class().to_string(),
            "tick_lock" => self.lock(2).to_string(),
            "retention_lock" => self.lock(3).to_string(),
            _ if name.ends_with("_template_text") => literal(template(name)?),
            _ => {
                let rest = name.strip_prefix("outbox")?;
                let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
                if !rest.bytes().all(legal) || !(rest.is_empty() || rest.starts_with('_')) {
                    return None;
                }
                match rest.strip_suffix("_text") {
                    // A relation's name, for a cast to regclass.
                    Some(rest) => literal(&format!("{schema}.{}", identifier(&part(rest)))),
                    None => identifier(&part(rest)),
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_outside_are_quoted_wherever_they_stand() {
        let names = Names::new("a\"; drop", "o'x\\", PayloadType::Bytea);
        assert_eq!(
            names.fill("{schema}.{outbox_tick} {outbox_text} {outbox_seq_text} {other} '{}'"),
            "\"a\"\"; drop\".\"o'x\\_tick\" E'o''x\\\\' \
             E'\"a\"\"; drop\".\"o''x\\\\_seq\"' {other} '{}'"
        );
    }

    #[test]
    fn outboxes_lock_apart() {
        let class = |schema, outbox| Names::new(schema, outbox, PayloadType::Bytea).lock_class();
        assert_ne!(class("postrider", "outbox"), class("postrider", "orders"));
        assert_ne!(class("a", "bc"), class("ab", "c"));
    }
}
