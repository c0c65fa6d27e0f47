//! From the file's text to the values of its sections.
//!
//! What lives here: syntax, unknown keys, kinds, required keys, shapes of values. What does not:
//! what values mean together (`model.rs`).
//! Invariant: reading goes on after a problem, so that a person sees all of them at once.

use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{KIND, Key, Kind, Need, SECTIONS, SINK_KEYS, Section, Shape};
use super::model::{self, Config, Parts, SinkPart, SourcePart};
use super::secrets::{Found, look_up};
use super::value::{Fields, Value, example, read_plain, read_text, type_of};
use super::{Demand, Lookup, Place, Problem, Problems, nearest};
use crate::compose;

/// Parses and checks `text`, which `file` holds.
///
/// # Errors
/// All problems at once.
pub(super) fn parse(
    text: &str,
    file: &Path,
    demand: Demand,
    lookup: Lookup,
) -> Result<Config, Problems> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // What the parser recovered may be nonsense: judging it would add false problems.
        let list = errors.iter().map(|error| syntax_problem(text, error)).collect();
        return Err(Problems::new(file, list));
    }
    let folder = file.parent().unwrap_or(Path::new(""));
    let mut walk = Walk { text, folder, lookup, problems: Vec::new() };
    let parts = walk.document(table.get_ref(), demand);
    let mut problems = walk.problems;
    let config = model::build(parts, file, demand, &mut problems);
    match config {
        Some(config) if problems.is_empty() => Ok(config),
        _ => Err(Problems::new(file, problems)),
    }
}

fn syntax_problem(text: &str, error: &toml::de::Error) -> Problem {
    let place = error.span().map(|span| Place::of(text, span.start));
    let text = format!("not TOML: {}", error.message().replace('\n', "; "));
    Problem { place, key: String::new(), text }
}

type Table<'i> = DeTable<'i>;

struct Walk<'a> {
    text: &'a str,
    folder: &'a Path,
    lookup: Lookup,
    problems: Vec<Problem>,
}

impl Walk<'_> {
    fn place<T>(&self, spanned: &Spanned<T>) -> Place {
        Place::of(self.text, spanned.span().start)
    }

    fn problem(&mut self, place: Place, key: impl Into<String>, text: impl Into<String>) {
        self.problems.push(Problem { place: Some(place), key: key.into(), text: text.into() });
    }

    fn document(&mut self, table: &Table<'_>, demand: Demand) -> Parts {
        let mut parts = Parts::default();
        for (key, value) in table {
            let place = self.place(key);
            match key.get_ref().as_ref() {
                "source" => parts.source = self.source(place, value),
                "sink" => {
                    // A command that needs the source alone runs without the sinks' secrets.
                    let full = self.lookup;
                    if demand == Demand::Source {
                        self.lookup = Lookup::Leave;
                    }
                    parts.sinks = self.sinks(place, value);
                    self.lookup = full;
                }
                name => match SECTIONS.iter().find(|section| section.name == name) {
                    Some(section) => {
                        let fields = self.section(section, place, value);
                        parts.sections.push((section.name, fields));
                    }
                    None => self.unknown_section(place, name),
                },
            }
        }
        if !table.keys().any(|key| key.get_ref() == "source") {
            let start = Place { line: 1, column: 1 };
            self.problem(start, "source", "is missing; add [source] with kind and url");
        }
        for section in SECTIONS {
            if !parts.sections.iter().any(|(name, _)| *name == section.name) {
                let mut fields = Fields::default();
                add_defaults(&mut fields, section.keys.iter());
                parts.sections.push((section.name, fields));
            }
        }
        parts
    }

    fn unknown_section(&mut self, place: Place, name: &str) {
        let valid = ["source", "sink"].into_iter().chain(SECTIONS.iter().map(|s| s.name));
        let hint = match nearest(name, valid) {
            Some("sink") => "; did you mean [[sink]]?".to_owned(),
            Some(section) => format!("; did you mean [{section}]?"),
            None => "; there are [source], [[sink]], [relay], [admin], [log], [trace]".to_owned(),
        };
        self.problem(place, name, format!("unknown section{hint}"));
    }

    fn section(&mut self, section: &Section, place: Place, value: &Spanned<DeValue<'_>>) -> Fields {
        match value.get_ref() {
            DeValue::Table(table) => {
                self.fields(section.name, table, section.keys.iter(), place, false)
            }
            other => {
                let text = format!("found {}; write [{}]", type_of(other), section.name);
                self.problem(place, section.name, text);
                let mut fields = Fields::default();
                add_defaults(&mut fields, section.keys.iter());
                fields
            }
        }
    }

    fn source(&mut self, place: Place, value: &Spanned<DeValue<'_>>) -> Option<SourcePart> {
        let DeValue::Table(table) = value.get_ref() else {
            let text = format!("found {}; write [source] once", type_of(value.get_ref()));
            self.problem(place, "source", text);
            return None;
        };
        let kind = self.kind("source", table, place, compose::SOURCE_KINDS)?;
        let fields = self.fields("source", table, kind.keys.iter(), place, true);
        Some(SourcePart { kind: kind.name, fields, place })
    }

    fn sinks(&mut self, place: Place, value: &Spanned<DeValue<'_>>) -> Vec<SinkPart> {
        let DeValue::Array(list) = value.get_ref() else {
            self.problem(place, "sink", "is one table; write [[sink]] with two brackets");
            return Vec::new();
        };
        let mut parts = Vec::new();
        for (index, item) in list.iter().enumerate() {
            let prefix = format!("sink[{index}]");
            let place = self.place(item);
            let DeValue::Table(table) = item.get_ref() else {
                let text = format!("found {}; write [[sink]]", type_of(item.get_ref()));
                self.problem(place, prefix, text);
                continue;
            };
            let Some(kind) = self.kind(&prefix, table, place, compose::SINK_KINDS) else {
                continue;
            };
            let keys = SINK_KEYS.iter().chain(kind.keys);
            let fields = self.fields(&prefix, table, keys, place, true);
            parts.push(SinkPart { kind: kind.name, fields, place, prefix });
        }
        parts
    }

    /// Finds which kind a section is; without one its other keys can't be judged.
    fn kind(
        &mut self,
        prefix: &str,
        table: &Table<'_>,
        place: Place,
        kinds: &'static [Kind],
    ) -> Option<&'static Kind> {
        let full = format!("{prefix}.{KIND}");
        let Some((_, value)) = table.iter().find(|(key, _)| key.get_ref() == KIND) else {
            self.problem(place, full, format!("is missing; write kind = {}", names(kinds)));
            return None;
        };
        let place = self.place(value);
        let DeValue::String(name) = value.get_ref() else {
            let text = format!("found {}; write {}", type_of(value.get_ref()), names(kinds));
            self.problem(place, full, text);
            return None;
        };
        let found = kinds.iter().find(|kind| kind.name == name.as_ref());
        if found.is_none() {
            let text = match compose::ABSENT.iter().find(|(kind, _)| *kind == name.as_ref()) {
                Some((kind, feature)) => {
                    format!("{kind} is not in this build; build with --features {feature}")
                }
                None => {
                    let hint = nearest(name, kinds.iter().map(|kind| kind.name))
                        .map_or(String::new(), |near| format!("; did you mean {near:?}?"));
                    format!("{name:?} is unknown; this build has {}{hint}", names(kinds))
                }
            };
            self.problem(place, full, text);
        }
        found
    }

    /// Reads every key of a section, reports what is unknown or missing, and adds defaults.
    fn fields(
        &mut self,
        prefix: &str,
        table: &Table<'_>,
        keys: impl Iterator<Item = &'static Key> + Clone,
        section: Place,
        has_kind: bool,
    ) -> Fields {
        let mut fields = Fields::default();
        let mut failed = Vec::new();
        for (name, value) in table {
            let given = name.get_ref().as_ref();
            if has_kind && given == KIND {
                continue;
            }
            let full = format!("{prefix}.{given}");
            let Some(key) = keys.clone().find(|key| key.name == given) else {
                let valid = keys.clone().map(|key| key.name);
                let hint = match nearest(given, valid.clone()) {
                    Some(near) => format!("did you mean {near:?}?"),
                    None => format!("valid are {}", valid.collect::<Vec<_>>().join(", ")),
                };
                let place = self.place(name);
                self.problem(place, full, format!("unknown key; {hint}"));
                continue;
            };
            let place = self.place(value);
            match self.value(key, value.get_ref()) {
                Ok(value) => fields.insert(key.name, value, Some(place)),
                Err(text) => {
                    failed.push(key.name);
                    self.problem(place, full, text);
                }
            }
        }
        for key in keys.clone() {
            let absent = fields.place(key.name).is_none() && !failed.contains(&key.name);
            if key.need == Need::Required && absent {
                let text = format!("is missing; write {} = {}", key.name, example(key.shape));
                self.problem(section, format!("{prefix}.{}", key.name), text);
            }
        }
        add_defaults(&mut fields, keys);
        fields
    }

    fn value(&self, key: &Key, value: &DeValue<'_>) -> Result<Value, String> {
        match (key.shape, value) {
            (Shape::Secrets, DeValue::Array(list)) => {
                let secrets = list.iter().map(|item| self.secret(key.shape, item.get_ref()));
                self.collect(secrets, Value::Secrets)
            }
            (Shape::SecretTable, DeValue::Table(table)) => {
                let secrets = table.iter().map(|(name, item)| {
                    let secret = self.secret(key.shape, item.get_ref())?;
                    Ok(secret.map(|secret| (name.get_ref().to_string(), secret)))
                });
                self.collect(secrets, Value::SecretTable)
            }
            (shape, DeValue::String(text)) => match look_up(text, self.folder, self.lookup)? {
                Found::Text(text) => read_text(shape, &text),
                Found::Left => Ok(Value::Unresolved),
            },
            (shape, other) => read_plain(shape, other),
        }
    }

    fn secret(
        &self,
        shape: Shape,
        value: &DeValue<'_>,
    ) -> Result<Option<postrider_core::Secret>, String> {
        let DeValue::String(text) = value else {
            return Err(format!("found {} in it; write {}", type_of(value), example(shape)));
        };
        match look_up(text, self.folder, self.lookup)? {
            Found::Text(text) if text.is_empty() => {
                Err(format!("has an empty text; write {}", example(shape)))
            }
            Found::Text(text) => Ok(Some(postrider_core::Secret::new(text))),
            Found::Left => Ok(None),
        }
    }

    /// A list in which one reference was left unresolved is unresolved as a whole.
    fn collect<T>(
        &self,
        items: impl Iterator<Item = Result<Option<T>, String>>,
        whole: fn(Vec<T>) -> Value,
    ) -> Result<Value, String> {
        let items = items.collect::<Result<Option<Vec<T>>, String>>()?;
        Ok(items.map_or(Value::Unresolved, whole))
    }
}

fn names(kinds: &[Kind]) -> String {
    kinds.iter().map(|kind| format!("{:?}", kind.name)).collect::<Vec<_>>().join(" or ")
}

/// Fills in what the table of keys says of keys that were left out.
pub(super) fn add_defaults(fields: &mut Fields, keys: impl Iterator<Item = &'static Key>) {
    for key in keys {
        let Need::Default(toml) = key.need else { continue };
        if fields.place(key.name).is_some() {
            continue;
        }
        let parsed = DeValue::parse(toml).expect("the table's defaults are TOML, a test checks");
        let value = match parsed.get_ref() {
            DeValue::String(text) => read_text(key.shape, text),
            other => read_plain(key.shape, other),
        };
        let value = value.expect("the table's defaults are within bounds, a test checks");
        fields.insert(key.name, value, None);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GOOD: &str = "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\npartitions = 8\n\n\
                        [[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"\nfsync = true\n\
                        base_delay = \"1s\"\nfrom = 2026-11-27T22:00:00Z\n\n[relay]\n\
                        lease_ttl = \"5s\"\nprune_batch = 0x10\n\n[trace]\nsample = 0.5\n";

    fn parsed(text: &str) -> Result<Config, Problems> {
        parse(text, Path::new("a.toml"), Demand::SourceAndSinks, Lookup::Resolve)
    }

    #[cfg(all(feature = "sqlite", feature = "jsonl"))]
    #[test]
    fn a_good_file_becomes_what_it_says() {
        let config = parsed(GOOD).expect("good");
        assert_eq!(config.relay.prune_batch, 16);
        assert_eq!(config.sinks[0].retry.base_delay.as_secs(), 1);
        assert_eq!(config.relay.retention.map(|keep| keep.as_secs()), Some(7 * 86_400));
    }

    proptest! {
        /// Whatever stands in the file, it is read or refused with a place, and never a panic.
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC{0,200}") {
            if let Err(problems) = parsed(&text) {
                prop_assert!(problems.list().iter().all(|problem| problem.place.is_some()));
            }
        }

        /// The same for a good file with a few characters changed: it reaches every rule.
        #[test]
        fn any_change_of_a_good_file_is_read_or_refused(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<char>()), 1..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut text: Vec<char> = GOOD.chars().collect();
            for (index, character) in changes {
                let at = index.index(text.len());
                text[at] = character;
            }
            let whole: String = text.iter().collect();
            let part: String = text[..cut.index(text.len())].iter().collect();
            for text in [whole, part] {
                if let Err(problems) = parsed(&text) {
                    prop_assert!(!problems.list().is_empty());
                }
            }
        }
    }
}
