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

use std::io::Read;
use std::path::Path;

pub(crate) use model::{AdminConfig, Config, LogConfig, SinkConfig, SourceConfig, TraceConfig};
pub(crate) use problem::{Place, Problem, Problems, nearest};
pub(crate) use secrets::Lookup;

use crate::compose;

/// Longest configuration: more than anybody writes, and little to hold.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

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
    let text = read(file).map_err(|error| unreadable(file, demand, &error))?;
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
    checked(parse::parse(&text, file, demand, lookup)?, demand)
}

/// What the source's own rules refuse is refused here, so that every command says it alike; of
/// sinks only where they are asked for.
fn checked(config: Config, demand: Demand) -> Result<Config, Problems> {
    let mut problems = Vec::new();
    compose::check_source(&config.source, &mut problems);
    if demand == Demand::SourceAndSinks {
        compose::check_sinks(&config.source, &config.sinks, &mut problems);
    }
    if problems.is_empty() { Ok(config) } else { Err(Problems::new(&config.file, problems)) }
}

/// The configuration that `--source PATH` stands for: a SQLite database and all defaults.
///
/// # Errors
/// When the path can't be one.
pub(crate) fn of_source(path: &str) -> Result<Config, Problems> {
    let escaped = toml::Value::from(path).to_string();
    let text = format!("[source]\nkind = \"sqlite\"\nurl = {escaped}\n");
    let name = Path::new("--source");
    let config = parse::parse(&text, name, Demand::Source, Lookup::Resolve)
        .and_then(|config| checked(config, Demand::Source));
    // Lines and keys of a text that nobody wrote would only mislead.
    config.map_err(|problems| {
        let plain = |problem: &Problem| Problem {
            place: None,
            key: String::new(),
            text: problem.text.clone(),
        };
        Problems::new(name, problems.list().iter().map(plain).collect())
    })
}

/// A configuration that the program wrote itself; `name` stands for the file in messages.
///
/// # Errors
/// As [`load`].
#[cfg(feature = "demo")]
pub(crate) fn of_text(text: &str, name: &str) -> Result<Config, Problems> {
    let demand = Demand::SourceAndSinks;
    checked(parse::parse(text, Path::new(name), demand, Lookup::Resolve)?, demand)
}

/// Reads the whole file, or refuses one that can't be meant, such as a database.
fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(file)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let text = format!(
            "it has more than the {MAX_FILE_BYTES} bytes that a configuration may have; name \
             another with --config"
        );
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text));
    }
    Ok(text)
}

fn unreadable(file: &Path, demand: Demand, error: &std::io::Error) -> Problems {
    let text = match (error.kind(), demand) {
        (std::io::ErrorKind::NotFound, Demand::Source) => {
            "there is no such file; create it (see postrider config --help), name another with \
             --config, or a SQLite database with --source"
                .to_owned()
        }
        (std::io::ErrorKind::NotFound, Demand::SourceAndSinks) => {
            "there is no such file; create it (see postrider config --help), or name another"
                .to_owned()
        }
        _ => format!("can't be read: {error}"),
    };
    Problems::new(file, vec![Problem { place: None, key: String::new(), text }])
}
