//! The JSON Schema (2020-12) of `postrider.toml`, for editors.
//!
//! What lives here: turning the tables of keys into a schema. What does not: any key.
//! Invariant: whatever the parser takes, the schema allows; it may allow more, since `env:` and
//! `file:` stand for any value that is written as text.

use serde_json::{Map, Value as Json, json};

use super::keys::{KIND, Key, Kind, Need, SECTIONS, SINK_KEYS, Section, Shape};
use crate::compose;

/// The whole schema.
pub(crate) fn schema() -> Json {
    let mut properties = Map::new();
    properties.insert("source".to_owned(), one_of(compose::SOURCE_KINDS, &[]));
    let sinks = json!({
        "type": "array",
        "description": "Where events go; each with checkpoints of its own.",
        "items": one_of(compose::SINK_KINDS, SINK_KEYS),
    });
    properties.insert("sink".to_owned(), sinks);
    for section in SECTIONS {
        properties.insert(section.name.to_owned(), table(section));
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "postrider.toml",
        "description": "Configuration of the postrider binary.",
        "type": "object",
        "properties": properties,
        "required": ["source"],
        "additionalProperties": false,
    })
}

fn one_of(kinds: &[Kind], shared: &[Key]) -> Json {
    let kinds = kinds.iter().map(|kind| {
        let mut properties = Map::new();
        properties.insert(KIND.to_owned(), json!({ "const": kind.name, "description": kind.doc }));
        let mut required = vec![KIND];
        for key in shared.iter().chain(kind.keys) {
            properties.insert(key.name.to_owned(), property(key));
            if key.need == Need::Required {
                required.push(key.name);
            }
        }
        json!({
            "type": "object",
            "title": kind.name,
            "description": kind.doc,
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    });
    json!({ "oneOf": kinds.collect::<Vec<_>>() })
}

fn table(section: &Section) -> Json {
    let properties: Map<String, Json> =
        section.keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    json!({
        "type": "object",
        "description": section.doc,
        "properties": properties,
        "additionalProperties": false,
    })
}

const REFERENCE: &str = "^(env|file):.+";
const DURATION: &str = r"^\s*([0-9]+\s*(ms|s|m|min|h|d)\s*)+$";

fn property(key: &Key) -> Json {
    let mut schema = shape(key.shape);
    let object = schema.as_object_mut().expect("every shape is an object");
    object.insert("description".to_owned(), Json::from(key.doc));
    if let Need::Default(toml) = key.need {
        // The defaults are texts, numbers and switches, which TOML and JSON write alike.
        let default = serde_json::from_str(toml).expect("a default that JSON reads, a test checks");
        object.insert("default".to_owned(), default);
    }
    schema
}

fn shape(shape: Shape) -> Json {
    let text = json!({ "type": "string", "minLength": 1 });
    let reference = json!({ "type": "string", "pattern": REFERENCE });
    match shape {
        Shape::Text | Shape::Secret | Shape::Start | Shape::Listen => text,
        Shape::Secrets => json!({ "type": "array", "items": text }),
        Shape::SecretTable => json!({ "type": "object", "additionalProperties": text }),
        Shape::Choice(words) => json!({ "anyOf": [{ "enum": words }, reference] }),
        Shape::Duration { .. } => {
            json!({ "anyOf": [{ "type": "string", "pattern": DURATION }, reference] })
        }
        Shape::DurationOrOff { .. } => json!({
            "anyOf": [{ "type": "string", "pattern": DURATION }, { "const": "off" }, reference],
        }),
        Shape::Size { min, max } => json!({
            "anyOf": [
                { "type": "integer", "minimum": min, "maximum": max },
                { "type": "string", "pattern": r"^\s*[0-9]+\s*([kKmMgG][iI]?)?[bB]?\s*$" },
                reference,
            ],
        }),
        Shape::Integer { min, max } => {
            json!({ "type": "integer", "minimum": min, "maximum": max })
        }
        Shape::Fraction => json!({ "type": "number", "minimum": 0, "maximum": 1 }),
        Shape::Switch => json!({ "type": "boolean" }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse::add_defaults;
    use super::super::value::Fields;
    use super::*;

    #[test]
    fn every_default_is_readable_and_within_its_bounds() {
        let kinds = compose::SOURCE_KINDS.iter().chain(compose::SINK_KINDS);
        for keys in kinds.map(|kind| kind.keys).chain(SECTIONS.iter().map(|s| s.keys)) {
            add_defaults(&mut Fields::default(), keys.iter());
        }
        add_defaults(&mut Fields::default(), SINK_KEYS.iter());
        assert!(schema().is_object());
    }

    #[test]
    fn no_kind_redefines_a_key_that_every_sink_has() {
        for kind in compose::SINK_KINDS {
            for key in kind.keys {
                assert!(SINK_KEYS.iter().all(|shared| shared.name != key.name), "{}", key.name);
                assert_ne!(key.name, KIND);
            }
        }
    }
}
