//! `config check` and `config schema`.
//!
//! What lives here: saying what is wrong with a file, or what may stand in one. What does not: the
//! checks themselves (`crate::config`, and each sink's own).
//! Invariant: nothing is connected to and no file but the configuration is opened.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use crate::args::{ConfigCommand, Global};
use crate::compose;
use crate::config::{self as configuration, Demand, Lookup, Problem, Problems, schema};
use crate::exit::USAGE;
use crate::output::{Output, Tone};

/// Runs the subcommand.
///
/// # Errors
/// All problems of the file.
pub(super) fn run(global: &Global, command: ConfigCommand, output: Output) -> Result<ExitCode> {
    match command {
        ConfigCommand::Schema => {
            output.json_document(&schema::schema())?;
            Ok(ExitCode::SUCCESS)
        }
        ConfigCommand::Check { file, skip_references } => {
            let file = file.as_deref().unwrap_or(&global.config);
            let lookup = if skip_references { Lookup::Leave } else { Lookup::Resolve };
            match check(file, lookup) {
                Ok(found) => {
                    if output.json {
                        output.json_line(&json!({ "ok": true, "problems": [] }))?;
                    } else {
                        output.line(output.paint(Tone::Good, found))?;
                    }
                    Ok(ExitCode::SUCCESS)
                }
                Err(problems) if output.json => {
                    output.json_line(&as_json(&problems))?;
                    Ok(ExitCode::from(USAGE))
                }
                Err(problems) => Err(problems.into()),
            }
        }
    }
}

fn check(file: &Path, lookup: Lookup) -> Result<String, Problems> {
    let config = configuration::load(file, Demand::SourceAndSinks, lookup)?;
    let mut list = Vec::new();
    if lookup == Lookup::Resolve {
        for sink in &config.sinks {
            list.extend(compose::open_sink(sink).err());
        }
    }
    if !list.is_empty() {
        return Err(Problems::new(file, list));
    }
    let sinks: Vec<_> = config.sinks.iter().map(|sink| sink.name.as_str()).collect();
    Ok(format!(
        "{}: usable; source {}, sinks {}",
        file.display(),
        config.source.kind,
        sinks.join(", ")
    ))
}

fn as_json(problems: &Problems) -> serde_json::Value {
    let list = problems.list().iter().map(|Problem { place, key, text }| {
        json!({
            "file": problems.file().display().to_string(),
            "line": place.map(|place| place.line),
            "column": place.map(|place| place.column),
            "key": key,
            "problem": text,
        })
    });
    json!({ "ok": false, "problems": list.collect::<Vec<_>>() })
}
