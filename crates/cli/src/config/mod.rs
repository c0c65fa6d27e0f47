//! The configuration file: `postrider.toml`.
//!
//! What lives here: the way from a path to a `Config`. What does not: the keys of one store or
//! sink (`compose.rs`).
//! Invariant: a `Config` exists only if every value in it is possible; nothing was connected to.

pub(crate) mod keys;
mod model;
mod parse;
mod problem;
pub(crate) mod schema;
mod secrets;
pub(crate) mod value;

use std::path::Path;

pub(crate) use model::{AdminConfig, Config, LogConfig, SinkConfig, SourceConfig, TraceConfig};
pub(crate) use problem::{Place, Problem, Problems, nearest};
pub(crate) use secrets::Lookup;

use crate::compose;

/// What a command needs of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Demand {
    /// The source alone: `env:` and `file:` of sinks are not looked up.
    Source,
    /// The source and at least one sink.
    SourceAndSinks,
}

/// Reads, parses and checks the file.
///
/// # Errors
/// All problems at once, each with its place, key and remedy.
pub(crate) fn load(file: &Path, demand: Demand, lookup: Lookup) -> Result<Config, Problems> {
    let text = std::fs::read(file).map_err(|error| unreadable(file, &error))?;
    let text = String::from_utf8(text).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let valid = String::from_utf8_lossy(&error.as_bytes()[..at]).into_owned();
        let problem = Problem {
            place: Some(Place::of(&valid, at)),
            key: String::new(),
            text: "not UTF-8 from here on; save the file as UTF-8".to_owned(),
        };
        Problems::new(file, vec![problem])
    })?;
    checked(parse::parse(&text, file, demand, lookup)?)
}

/// What the source's own rules refuse is refused here, so that every command says it alike.
fn checked(config: Config) -> Result<Config, Problems> {
    let mut problems = Vec::new();
    compose::check_source(&config.source, &mut problems);
    if problems.is_empty() { Ok(config) } else { Err(Problems::new(&config.file, problems)) }
}

/// The configuration that `--source PATH` stands for: a SQLite database and all defaults.
///
/// # Errors
/// When the path can't be one.
pub(crate) fn of_source(path: &str) -> Result<Config, Problems> {
    let escaped = toml::Value::from(path).to_string();
    let text = format!("[source]\nkind = \"sqlite\"\nurl = {escaped}\n");
    checked(parse::parse(&text, Path::new("--source"), Demand::Source, Lookup::Resolve)?)
}

/// A configuration that the program wrote itself; `name` stands for the file in messages.
///
/// # Errors
/// As [`load`].
#[cfg(feature = "demo")]
pub(crate) fn of_text(text: &str, name: &str) -> Result<Config, Problems> {
    checked(parse::parse(text, Path::new(name), Demand::SourceAndSinks, Lookup::Resolve)?)
}

fn unreadable(file: &Path, error: &std::io::Error) -> Problems {
    let text = match error.kind() {
        std::io::ErrorKind::NotFound => {
            "there is no such file; create it (see postrider config --help), name another with \
             --config, or a SQLite database with --source"
                .to_owned()
        }
        _ => format!("can't be read: {error}"),
    };
    Problems::new(file, vec![Problem { place: None, key: String::new(), text }])
}
