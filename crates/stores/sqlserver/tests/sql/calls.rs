//! Calls against declarations: a parser knows no procedure, so that a name, an argument or a column
//! that is not there would be noticed by a server alone. Shipped files, generated procedures, the
//! client's statements and the guide are held against what the migrations declare.

use std::collections::BTreeMap;
use std::path::Path;

use crate::text::{FILES, Template, batches, blocks, literals, templates};

/// One parameter of a procedure or function.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parameter {
    name: String,
    optional: bool,
    output: bool,
}

/// A text without comments, with one name for the objects of all feeds and `[changefeed].[x]` for
/// every way in which an object is written.
fn plain(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("--").next().unwrap_or_default());
    let text = lines.collect::<Vec<_>>().join("\n");
    let mut out = String::new();
    let mut rest =
        text.replace(" changefeed.", " [changefeed].").replace("(changefeed.", "([changefeed].");
    rest = rest.replace("{T}", "T").replace("{S_parameter}", " = 0");
    let mut rest = rest.as_str();
    while let Some(at) = rest.find("[changefeed].") {
        let after = at + "[changefeed].".len();
        out.push_str(&rest[..after]);
        rest = &rest[after..];
        let (name, tail) = match rest.strip_prefix('[') {
            Some(inner) => inner.split_once(']').unwrap_or((inner, "")),
            None => {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
                rest.split_at(end.unwrap_or(rest.len()))
            }
        };
        let kind = name.split(':').next().unwrap_or_default();
        let name = if name.contains(':') { format!("{kind}:T") } else { kind.to_owned() };
        out.push_str(&format!("[{name}]"));
        rest = tail;
    }
    out + rest
}

/// The parts of a list between commas that stand in no parentheses and no quotation marks.
fn parts(list: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let (mut depth, mut quoted) = (0, false);
    for c in list.chars() {
        match c {
            '\'' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    let parts = parts.into_iter().map(|part| part.trim().to_owned());
    parts.filter(|part| !part.is_empty()).collect()
}

/// What stands in the parentheses with which a text begins.
fn in_parentheses(text: &str) -> &str {
    let (mut depth, mut quoted) = (0, false);
    for (at, c) in text.char_indices() {
        match c {
            '\'' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return &text[1..at];
                }
            }
            _ => {}
        }
    }
    panic!("parentheses are closed: {text}");
}

fn parameters(list: &str) -> Vec<Parameter> {
    let parse = |part: String| Parameter {
        name: part.split_whitespace().next().unwrap_or_default().to_owned(),
        optional: part.contains('='),
        output: part.ends_with(" output"),
    };
    parts(list).into_iter().map(parse).collect()
}

/// All texts that declare or call: each with a name for messages.
fn texts() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for (name, file) in FILES {
        for batch in batches(file) {
            for made in literals(&batch).into_iter().filter(|made| made.starts_with("create ")) {
                texts.push((name.to_owned(), made));
            }
            if !batch.contains("insert into [changefeed].[template]") {
                texts.push((name.to_owned(), batch));
            }
        }
    }
    for Template { name, text, .. } in templates() {
        texts.push((
            format!("template {name}"),
            text.replace("{outbox}", "[changefeed].[outbox:T]"),
        ));
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sql");
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("a text");
        texts.push((path.file_name().expect("a name").to_string_lossy().into_owned(), text));
    }
    let page = include_str!("../../../../../docs/stores/sqlserver.md");
    texts.extend(blocks(page).into_iter().map(|(_, block)| ("the guide".to_owned(), block)));
    texts.into_iter().map(|(name, text)| (name, plain(&text))).collect()
}

/// What every procedure and function of the schema takes.
fn declared() -> BTreeMap<String, Vec<Parameter>> {
    let mut declared = BTreeMap::new();
    for (_, text) in texts() {
        for kind in ["procedure", "function"] {
            for rest in text.split(&format!("create {kind} [changefeed].[")).skip(1) {
                let (name, rest) = rest.split_once(']').expect("a name in brackets");
                let list = match kind {
                    "function" => in_parentheses(&rest[rest.find('(').expect("parameters")..]),
                    _ => rest.split("\nas\n").next().unwrap_or_default(),
                };
                let found = parameters(list);
                if let Some(other) = declared.insert(name.to_owned(), found.clone()) {
                    // Made for one engine or the other: with the same parameters.
                    assert_eq!(other.len(), found.len(), "{name}");
                }
            }
        }
    }
    declared
}

/// Holds the arguments of one call against the parameters.
fn held_against(call: &str, arguments: &[String], declared: &[Parameter]) {
    let mut given = vec![false; declared.len()];
    for (at, argument) in arguments.iter().enumerate() {
        let named = argument.split_once('=').map(|(name, _)| name.trim());
        let place = match named.filter(|name| name.starts_with('@') && !name.contains(' ')) {
            Some(name) => declared.iter().position(|parameter| parameter.name == name),
            None => (at < declared.len()).then_some(at),
        };
        let place = place.unwrap_or_else(|| panic!("{call}: no parameter for {argument}"));
        given[place] = true;
        if argument.ends_with(" output") {
            assert!(declared[place].output, "{call}: {argument} is no output");
        }
    }
    for (parameter, given) in declared.iter().zip(given) {
        assert!(given || parameter.optional, "{call}: {} is missing", parameter.name);
    }
}

#[test]
fn every_procedure_that_is_called_is_there_and_takes_what_it_is_given() {
    let declared = declared();
    let mut calls = 0;
    for (name, text) in texts() {
        for rest in text.split("exec ").skip(1) {
            let rest = match rest.split_once(" = [changefeed]") {
                Some((variable, rest)) if variable.starts_with('@') && !variable.contains(' ') => {
                    format!("[changefeed]{rest}")
                }
                _ => rest.to_owned(),
            };
            let Some(rest) = rest.strip_prefix("[changefeed].[") else { continue };
            let (procedure, rest) = rest.split_once(']').expect("a name in brackets");
            let arguments = parts(rest.split(';').next().unwrap_or_default());
            let call = format!("{name}: exec {procedure} {}", arguments.join(", "));
            let takes = declared.get(procedure).unwrap_or_else(|| panic!("{call}: not declared"));
            held_against(&call, &arguments, takes);
            calls += 1;
        }
    }
    assert!(calls > 60, "{calls} calls");
}

#[test]
fn every_function_that_is_called_is_there_and_takes_what_it_is_given() {
    let declared = declared();
    let mut calls = 0;
    for (name, text) in texts() {
        for (at, _) in text.match_indices("[changefeed].[") {
            let before = text[..at].trim_end();
            let (function, rest) =
                text[at + "[changefeed].[".len()..].split_once(']').expect("a name");
            let made = ["function", "table", "into", "on", "references"];
            if made.iter().any(|word| before.ends_with(word)) || !rest.trim_start().starts_with('(')
            {
                continue;
            }
            let arguments = parts(in_parentheses(rest.trim_start()));
            let call = format!("{name}: {function}({})", arguments.join(", "));
            let takes = declared.get(function).unwrap_or_else(|| panic!("{call}: not declared"));
            assert_eq!(arguments.len(), takes.len(), "{call}");
            calls += 1;
        }
    }
    assert!(calls > 40, "{calls} calls");
}

/// The columns of every table, by `create table`.
fn tables() -> BTreeMap<String, Vec<String>> {
    let mut tables = BTreeMap::new();
    for (_, text) in texts() {
        for rest in text.split("create table [changefeed].[").skip(1) {
            let (name, rest) = rest.split_once(']').expect("a name in brackets");
            let list = in_parentheses(rest.trim_start());
            let columns = parts(list).into_iter().filter_map(|part| {
                let column = part.split_whitespace().next()?.trim_matches(['[', ']']).to_owned();
                (!["primary", "unique", "check", "{K_definitions}"].contains(&&*column))
                    .then_some(column)
            });
            tables.insert(name.to_owned(), columns.collect());
        }
    }
    tables
}

/// `insert into t (…)` names columns that are there; each that has to be given one is given.
#[test]
fn every_insert_names_columns_that_are_there() {
    let tables = tables();
    let mut inserts = 0;
    for (name, text) in texts() {
        for rest in text.split("insert into [changefeed].[").skip(1) {
            let (table, rest) = rest.split_once(']').expect("a name in brackets");
            let columns = parts(in_parentheses(rest.trim_start()));
            let known = tables.get(table).unwrap_or_else(|| panic!("{name}: no table {table}"));
            // A feed's own columns are followed by those of its key.
            let foreign = table.ends_with(":T");
            for column in columns.iter().map(|column| column.trim_matches(['[', ']'])) {
                let there = known.iter().any(|known| known == column);
                assert!(there || foreign, "{name}: {table} has no column {column}");
            }
            inserts += 1;
        }
    }
    assert!(inserts > 20, "{inserts} inserts");
}

/// Aliases of tables lead to columns: `from [changefeed].[t] as x` and `x.column`.
#[test]
fn every_column_that_is_named_by_an_alias_is_there() {
    let tables = tables();
    let mut named = 0;
    for (name, text) in texts() {
        let mut aliases: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (at, _) in text.match_indices("[changefeed].[") {
            let (table, rest) =
                text[at + "[changefeed].[".len()..].split_once(']').expect("a name");
            let Some(rest) = rest.strip_prefix(" as ") else { continue };
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
            aliases.entry(&rest[..end]).or_default().push(table);
        }
        for (alias, of) in aliases {
            let known: Vec<&String> =
                of.iter().filter_map(|table| tables.get(*table)).flatten().collect();
            let derived = text.contains(&format!(") as {alias}"))
                || text.contains(&format!("@page as {alias}"));
            if of.iter().any(|table| table.ends_with(":T")) || derived {
                continue;
            }
            for (at, _) in text.match_indices(&format!("{alias}.")) {
                let word = |c: char| c.is_ascii_alphanumeric() || ['_', '[', '@', '.'].contains(&c);
                if text[..at].ends_with(word) {
                    continue;
                }
                let rest = &text[at + alias.len() + 1..];
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_[]".contains(c)));
                let column = rest[..end.unwrap_or(rest.len())].trim_matches(['[', ']']);
                let there = known.iter().any(|known| *known == column);
                assert!(there, "{name}: {of:?} as {alias} has no column {column}");
                named += 1;
            }
        }
    }
    assert!(named > 60, "{named} columns");
}
