//! Which column of an application's table is which part of an event.
//!
//! What lives here: a mapping as `adopt_table` was given it, and how it fits the columns that the
//! log shows. What does not: reading a row (`mapped.rs`), where mappings come from (`adopted.rs`).
//! Invariant: as the view of the table has it (`mapped_field` and `mapped_columns` in
//! `migrations/0002_adopted_table.sql`): a row read from the log and from the table is one event.

use std::collections::{HashMap, HashSet};

use postrider_core::{Error, Result};
use serde_json::{Map, Value};
use tokio_postgres::types::Type;

use super::pgoutput::Column;

/// The mapping, as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping(Map<String, Value>);

/// What of the server's types is not to be seen in a column's own.
#[derive(Debug, Default)]
pub(super) struct Types {
    /// Of each domain, the type beneath.
    pub(super) domains: HashMap<u32, u32>,
    /// As a text, values of these are other ones than the log shows.
    pub(super) unlike: HashSet<u32>,
}

/// How a value's text differs from what the log shows, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Same,
    /// `t` and `f`.
    Bool,
    /// Filled up with blanks.
    Padded,
    /// Without the length of the whole network.
    Inet,
}

/// Where a part of an event comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Constant(String),
    Column { index: usize, form: Form },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Zoned(usize),
    Utc(usize),
    Millis(usize),
    /// Not told: when it was committed stands in.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HeadersOf {
    Nothing,
    /// A JSON value, of which only an object has any.
    Json(Part),
    Text(Part),
    /// Name and value of each.
    Columns(Vec<(String, Part)>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Payload {
    Bytes(usize),
    Text(Part),
}

/// A mapping on the columns of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fitted {
    pub(super) id: Part,
    /// The id is a number, unique in its table only.
    pub(super) id_is_number: bool,
    pub(super) key: Part,
    pub(super) topic: Part,
    pub(super) event_type: Part,
    pub(super) payload: Payload,
    pub(super) content_type: Option<Part>,
    /// Where a row has none.
    pub(super) usual_content_type: &'static str,
    pub(super) at: At,
    pub(super) headers: HeadersOf,
    /// The columns that `adopt_table` adds.
    pub(super) xid: Option<usize>,
    pub(super) seq: Option<usize>,
}

/// Why a mapping does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Misfit {
    /// A field's column is not there; its name, if the mapping says one.
    Missing(String, Option<String>),
    /// A field's column is of a type whose text is not in the log.
    Unlike(String, String),
}

impl Mapping {
    /// # Errors
    /// `Corrupt` for what is no JSON object.
    pub(super) fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).map(Self).map_err(|error| {
            Error::corrupt("the mapping of the adopted table is no JSON object").with_source(error)
        })
    }

    /// Finds the mapping's columns among these.
    pub(super) fn fit(&self, columns: &[Column], types: &Types) -> Result<Fitted, Misfit> {
        let fit = Fit { columns, types };
        let needed = |field: &str, usual: &[&str]| {
            let found = fit.part(field, self.0.get(field), usual)?;
            found.ok_or_else(|| Misfit::Missing(field.to_owned(), None))
        };
        let given = |field: &'static str| fit.part(field, self.0.get(field), &[field]);
        let (id, payload) = (needed("id", &["id"])?, needed("payload", &["payload"])?);
        let is = |part: &Part, types: &[Type]| {
            fit.type_of(part).is_some_and(|found| types.contains(&found))
        };
        let (payload, usual_content_type) = match payload {
            Part::Column { index, .. } if is(&payload, &[Type::BYTEA]) => {
                (Payload::Bytes(index), "application/octet-stream")
            }
            _ if is(&payload, &[Type::JSON, Type::JSONB]) => {
                (Payload::Text(payload), "application/json")
            }
            _ => (Payload::Text(payload), "text/plain; charset=utf-8"),
        };
        let at = match given("created_at")? {
            Some(part @ Part::Column { index, .. }) => match fit.type_of(&part) {
                Some(Type::TIMESTAMPTZ) => At::Zoned(index),
                Some(Type::TIMESTAMP) => At::Utc(index),
                Some(Type::INT8) => At::Millis(index),
                _ => At::Unknown,
            },
            Some(Part::Constant(_)) | None => At::Unknown,
        };
        let own = |name: &str| columns.iter().position(|column| column.name == name);
        Ok(Fitted {
            id_is_number: is(&id, &[Type::INT2, Type::INT4, Type::INT8]),
            id,
            key: needed("key", &["aggregateid", "aggregate_id", "key"])?,
            topic: needed("topic", &["aggregatetype", "aggregate_type", "topic"])?,
            event_type: needed("type", &["type"])?,
            payload,
            content_type: given("content_type")?,
            usual_content_type,
            at,
            headers: self.headers(&fit)?,
            xid: own("postrider_xid"),
            seq: own("postrider_seq"),
        })
    }

    fn headers(&self, fit: &Fit<'_>) -> Result<HeadersOf, Misfit> {
        let wanted = self.0.get("headers");
        if let Some(Value::Object(by_name)) = wanted.and_then(|wanted| wanted.get("columns")) {
            let mut found = Vec::with_capacity(by_name.len());
            for (name, wanted) in by_name {
                if let Some(part) = fit.part("headers", Some(wanted), &[])? {
                    found.push((name.clone(), part));
                }
            }
            // As jsonb keeps them.
            found.sort_by(|(a, _), (b, _)| (a.len(), a).cmp(&(b.len(), b)));
            return Ok(HeadersOf::Columns(found));
        }
        Ok(match fit.part("headers", wanted, &["headers"])? {
            None => HeadersOf::Nothing,
            Some(part) => match fit.type_of(&part) {
                Some(Type::JSON | Type::JSONB) => HeadersOf::Json(part),
                _ => HeadersOf::Text(part),
            },
        })
    }
}

/// The columns that there are.
struct Fit<'a> {
    columns: &'a [Column],
    types: &'a Types,
}

impl Fit<'_> {
    /// The part that is wanted, or the first of the usual columns that is there.
    fn part(
        &self,
        field: &str,
        wanted: Option<&Value>,
        usual: &[&str],
    ) -> Result<Option<Part>, Misfit> {
        let place = |name: &str| self.columns.iter().position(|column| column.name == name);
        let index = match wanted {
            None => match usual.iter().find_map(|name| place(name)) {
                Some(index) => index,
                None => return Ok(None),
            },
            Some(wanted) => {
                if let Some(Value::String(text)) = wanted.get("value") {
                    return Ok(Some(Part::Constant(text.clone())));
                }
                let name = wanted.as_str().map_or_else(|| wanted.to_string(), str::to_owned);
                place(&name).ok_or_else(|| Misfit::Missing(field.to_owned(), Some(name)))?
            }
        };
        let column = &self.columns[index];
        let base = self.types.domains.get(&column.type_id).copied().unwrap_or(column.type_id);
        if self.types.unlike.contains(&base) {
            return Err(Misfit::Unlike(field.to_owned(), column.name.clone()));
        }
        let form = match Type::from_oid(base) {
            Some(Type::BOOL) => Form::Bool,
            Some(Type::BPCHAR) => Form::Padded,
            Some(Type::INET) => Form::Inet,
            _ => Form::Same,
        };
        Ok(Some(Part::Column { index, form }))
    }

    /// A column's own type, if it is one of the server's.
    fn type_of(&self, part: &Part) -> Option<Type> {
        let Part::Column { index, .. } = part else { return None };
        self.columns.get(*index).and_then(|column| Type::from_oid(column.type_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(of: &[(&str, Type)]) -> Vec<Column> {
        let column = |(name, ty): &(&str, Type)| Column {
            name: (*name).to_owned(),
            type_id: ty.oid(),
            modifier: -1,
            key: false,
        };
        of.iter().map(column).collect()
    }

    fn same(index: usize) -> Part {
        Part::Column { index, form: Form::Same }
    }

    fn debezium() -> Vec<Column> {
        columns(&[
            ("id", Type::UUID),
            ("aggregatetype", Type::VARCHAR),
            ("aggregateid", Type::VARCHAR),
            ("type", Type::VARCHAR),
            ("payload", Type::JSONB),
        ])
    }

    #[test]
    fn debeziums_columns_need_no_mapping() {
        let mapping = Mapping::parse("{}").expect("an object");
        let fitted = mapping.fit(&debezium(), &Types::default()).expect("it fits");
        assert_eq!((fitted.key, fitted.topic, fitted.event_type), (same(2), same(1), same(3)));
        assert_eq!(fitted.payload, Payload::Text(same(4)));
        assert_eq!(fitted.usual_content_type, "application/json");
        assert_eq!((fitted.id, fitted.id_is_number), (same(0), false));
        assert_eq!((fitted.at, fitted.headers), (At::Unknown, HeadersOf::Nothing));
        assert_eq!((fitted.xid, fitted.seq), (None, None));
    }

    #[test]
    fn constants_headers_and_types_are_as_the_view_has_them() {
        let mapping = r#"{"topic": {"value": "orders"}, "key": "customer",
            "headers": {"columns": {"long": "type", "b": "flag", "a": {"value": "x"}}}}"#;
        let of = columns(&[
            ("id", Type::INT4),
            ("customer", Type::BPCHAR),
            ("flag", Type::BOOL),
            ("type", Type::TEXT),
            ("payload", Type::BYTEA),
            ("created_at", Type::INT8),
            ("postrider_xid", Type::XID8),
            ("postrider_seq", Type::INT8),
        ]);
        let fitted = Mapping::parse(mapping).expect("an object").fit(&of, &Types::default());
        let fitted = fitted.expect("it fits");
        assert_eq!(fitted.topic, Part::Constant("orders".to_owned()));
        assert_eq!(fitted.key, Part::Column { index: 1, form: Form::Padded });
        assert!(fitted.id_is_number);
        assert_eq!((fitted.payload, fitted.at), (Payload::Bytes(4), At::Millis(5)));
        assert_eq!((fitted.xid, fitted.seq), (Some(6), Some(7)));
        let headers = [
            ("a".to_owned(), Part::Constant("x".to_owned())),
            ("b".to_owned(), Part::Column { index: 2, form: Form::Bool }),
            ("long".to_owned(), same(3)),
        ];
        assert_eq!(fitted.headers, HeadersOf::Columns(headers.to_vec()));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let fit = |mapping: &str, types: &Types| {
            Mapping::parse(mapping).expect("an object").fit(&debezium(), types).expect_err("no")
        };
        let none = Types::default();
        let missing = |field: &str, name: &str| {
            Misfit::Missing(field.to_owned(), Some(name).filter(|n| !n.is_empty()).map(Into::into))
        };
        assert_eq!(fit(r#"{"payload": "body"}"#, &none), missing("payload", "body"));
        assert_eq!(fit(r#"{"headers": {"columns": {"h": "x"}}}"#, &none), missing("headers", "x"));
        let mut few = debezium();
        few.remove(2);
        let misfit = Mapping::parse("{}").expect("an object").fit(&few, &none);
        assert_eq!(misfit, Err(missing("key", "")));
        let unlike = Types { unlike: HashSet::from([Type::JSONB.oid()]), ..Types::default() };
        let misfit = Misfit::Unlike("payload".to_owned(), "payload".to_owned());
        assert_eq!(fit("{}", &unlike), misfit);
    }
}
