//! The T-SQL of `migrations/` as text: its batches, its templates, and what they become for a feed.
//! What `make_feed` does on a server is done here by the same templates, taken from the same file.

use sha2::{Digest, Sha256};

/// Every file of `migrations/`, in order.
pub(crate) const FILES: [(&str, &str); 2] = [
    ("0001_changefeed.sql", include_str!("../../migrations/0001_changefeed.sql")),
    ("0002_relay.sql", include_str!("../../migrations/0002_relay.sql")),
];

/// The batches of a file: what stands between lines that are `go` alone.
pub(crate) fn batches(file: &str) -> Vec<String> {
    let mut batches = vec![String::new()];
    for line in file.lines() {
        if line.trim().eq_ignore_ascii_case("go") {
            batches.push(String::new());
        } else if let Some(last) = batches.last_mut() {
            last.push_str(line);
            last.push('\n');
        }
    }
    batches.retain(|batch| !batch.trim().is_empty());
    batches
}

/// The values of all `N'…'` in a text, in order; what stands in comments is no literal.
pub(crate) fn literals(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = text;
    loop {
        let quote = rest.find('\'');
        let comment = rest.find("--");
        match (quote, comment) {
            (None, _) => return found,
            (Some(quote), Some(comment)) if comment < quote => {
                let end = rest[comment..].find('\n').map_or(rest.len(), |end| comment + end);
                rest = &rest[end..];
            }
            (Some(quote), _) => {
                let national = rest[..quote].ends_with('N');
                let (value, after) = literal(&rest[quote + 1..]);
                if national {
                    found.push(value);
                }
                rest = after;
            }
        }
    }
}

/// A literal's value behind its opening quotation mark, and what follows it.
fn literal(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let end = rest.find('\'').expect("a literal is closed");
        value.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        let Some(more) = rest.strip_prefix('\'') else { return (value, rest) };
        value.push('\'');
        rest = more;
    }
}

/// The blocks of SQL of a page, each with what stands behind `sql` in its first line.
pub(crate) fn blocks(page: &str) -> Vec<(String, String)> {
    let found = page.split("\n```sql").skip(1).filter_map(|rest| {
        let (tag, rest) = rest.split_once('\n')?;
        let text = rest.split("\n```").next()?;
        Some((tag.trim().to_owned(), text.to_owned()))
    });
    found.collect()
}

/// One row of `[changefeed].[template]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) outbox: bool,
    pub(crate) serialized: bool,
    pub(crate) text: String,
}

/// All templates, in the order in which they are made.
pub(crate) fn templates() -> Vec<Template> {
    let mut found = Vec::new();
    for batch in batches(FILES[0].1) {
        for row in batch.split("insert into [changefeed].[template] (").skip(1) {
            let columns = "name, position, kind, outbox, serialized, text)\nvalues (N'";
            let rest = row.strip_prefix(columns).expect("rows are written alike");
            let (name, rest) = literal(rest);
            let numbers = rest.split_once("N'").expect("a kind follows").0;
            let position: u32 = numbers.trim_matches([',', ' ']).parse().expect("a position");
            let (kind, rest) = literal(rest.split_once("N'").expect("a kind").1);
            let (flags, rest) = rest.split_once("N'").expect("a text follows");
            let mut flags = flags.split(',').map(str::trim).filter(|flag| !flag.is_empty());
            let outbox = flags.next() == Some("1");
            let serialized = flags.next() == Some("1");
            let (text, _) = literal(rest);
            found.push((position, Template { name, kind, outbox, serialized, text }));
        }
    }
    assert!(found.is_sorted_by_key(|(position, _)| *position), "they stand in their order");
    found.into_iter().map(|(_, template)| template).collect()
}

/// The template of a name.
pub(crate) fn template(name: &str) -> Template {
    templates().into_iter().find(|template| template.name == name).expect("a template's name")
}

/// What `make_feed` fills in, in its order.
pub(crate) const PLACEHOLDERS: [&str; 11] = [
    "T",
    "T_text",
    "outbox",
    "S",
    "S_default",
    "S_parameter",
    "feed_id",
    "max_ahead_ms",
    "K_definitions",
    "K",
    "O",
];

/// A feed that is to be set up.
#[derive(Debug, Clone)]
pub(crate) struct Feed {
    pub(crate) schema: String,
    pub(crate) table: String,
    pub(crate) shard_key_type: &'static str,
    pub(crate) outbox: bool,
    /// Name and type of each key column, in the key's order.
    pub(crate) key: Vec<(String, String)>,
}

/// A name in brackets, as `quotename` gives it.
pub(crate) fn quoted(name: &str) -> String {
    format!("[{}]", name.replace(']', "]]"))
}

impl Feed {
    /// The T of its objects' names, as `find_table` makes it.
    pub(crate) fn name(&self) -> String {
        let full = format!("{}.{}", self.schema, self.table);
        let units: Vec<u16> = full.encode_utf16().collect();
        if units.len() <= 100 {
            return full;
        }
        let bytes: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        let hash = Sha256::digest(&bytes);
        let number = hash[..8].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let front = String::from_utf16_lossy(&units[..80]);
        format!("{front}~{:019}", number & i64::MAX.unsigned_abs())
    }

    /// A template filled in.
    pub(crate) fn render(&self, template: &Template) -> String {
        let name = self.name();
        let uuid = self.shard_key_type == "uniqueidentifier";
        let columns = |prefix: &str| {
            let names = self.key.iter().map(|(name, _)| format!("{prefix}{}", quoted(name)));
            names.collect::<Vec<_>>().join(", ")
        };
        let definitions =
            self.key.iter().map(|(name, of)| format!("{} {of} not null", quoted(name)));
        let outbox = match name.as_str() {
            "outbox" => "[changefeed].[outbox]".to_owned(),
            _ => format!("[changefeed].{}", quoted(&format!("outbox:{name}"))),
        };
        let values = [
            name.replace(']', "]]"),
            name.replace('\'', "''"),
            outbox,
            self.shard_key_type.to_owned(),
            if uuid { String::new() } else { " default (0)".to_owned() },
            if uuid { String::new() } else { " = 0".to_owned() },
            "7".to_owned(),
            "60000".to_owned(),
            definitions.collect::<Vec<_>>().join(", "),
            columns(""),
            columns("o."),
        ];
        let mut text = template.text.clone();
        for (placeholder, value) in PLACEHOLDERS.iter().zip(values) {
            text = text.replace(&format!("{{{placeholder}}}"), &value.replace('{', "{~}"));
        }
        text.replace("{~}", "{")
    }

    /// Every text that `make_feed` would run for it.
    pub(crate) fn texts(&self) -> Vec<(String, String)> {
        let mine = |template: &Template| match self.outbox {
            true => template.outbox,
            false => template.serialized,
        };
        let chosen = templates().into_iter().filter(mine);
        chosen.map(|template| (template.name.clone(), self.render(&template))).collect()
    }
}

#[test]
fn literals_are_read_and_comments_are_not() {
    let text = "-- it's N'no'\nexec N'a''b' + 'c', N''; -- don't\nset @x = N'd';";
    assert_eq!(literals(text), ["a'b", "", "d"]);
    assert_eq!(batches("a\ngo\n\nGO\nb\n"), ["a\n", "b\n"]);
}

/// The renderer of these tests and `make_feed` fill in the same placeholders in the same order, and
/// no template has another one.
#[test]
fn templates_have_the_placeholders_that_make_feed_fills_in() {
    let makes = batches(FILES[0].1);
    let make = makes
        .iter()
        .find(|batch| batch.contains("create procedure [changefeed].[make_feed]"))
        .expect("make_feed is there");
    let filled: Vec<&str> = make
        .split("[filled](@text, N'")
        .skip(1)
        .map(|rest| rest.split('\'').next().unwrap_or_default())
        .collect();
    assert_eq!(filled, PLACEHOLDERS);
    for template in templates() {
        for rest in template.text.split('{').skip(1) {
            let name = rest.split('}').next().unwrap_or_default();
            assert!(PLACEHOLDERS.contains(&name), "{{{name}}} in {}", template.name);
        }
    }
    assert_eq!(templates().len(), 15);
}

#[test]
fn a_value_that_looks_like_a_placeholder_stays_as_it_is() {
    let feed = Feed {
        schema: "a{K}".into(),
        table: "{~}{T}".into(),
        shard_key_type: "int",
        outbox: true,
        key: vec![("{S}".into(), "int".into())],
    };
    let text = feed.render(&template("fill_read"));
    assert!(text.contains("[changefeed].[feed:a{K}.{~}{T}]"), "{text}");
    assert!(text.contains("insert into #read (ulid, [{S}])"), "{text}");
}
