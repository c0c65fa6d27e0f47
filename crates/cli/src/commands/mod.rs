//! The commands: one file each.
//!
//! What lives here: dispatch, and what several commands begin with. What does not: flags
//! (`args.rs`), stores and sinks by name (`compose.rs`).
//! Invariant: a command opens nothing before its flags and the configuration are checked.

mod completions;
mod config;
mod consumers;
mod dead_letters;
#[cfg(feature = "demo")]
mod demo;
mod init;
mod log_standing;
mod prune;
mod replay;
mod run;
mod status;
mod tail;

use std::future::Future;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::args::{Cli, Command, Global};
use crate::compose::{self, OnSchema, Opened};
use crate::config::{self as configuration, Config, Demand, Lookup};
use crate::exit::{NotReady, Usage};
use crate::logging;
use crate::output::Output;

/// Runs the command that was typed.
///
/// # Errors
/// Whatever it met; `exit.rs` knows the code.
pub(crate) fn run(cli: Cli, output: Output) -> Result<ExitCode> {
    let global = cli.global;
    match cli.command {
        #[cfg(feature = "demo")]
        Command::Demo(args) => demo::run(&args, output),
        Command::Init(args) => init::run(&global, &args, output),
        Command::Run(args) => run::run(&global, &args),
        Command::Status(args) => status::run(&global, &args, output),
        Command::Tail(args) => tail::run(&global, &args, output),
        Command::DeadLetters(command) => dead_letters::run(&global, command, output),
        Command::Replay(args) => replay::run(&global, &args, output),
        Command::Consumers(command) => consumers::run(&global, command, output),
        Command::Prune(args) => prune::run(&global, &args, output),
        Command::Config(command) => config::run(&global, command, output),
        Command::Completions(args) => completions::run(&args, output),
    }
}

/// The configuration of a command that needs the source alone: the file, or `--source`.
///
/// # Errors
/// All problems of the file.
fn source_config(global: &Global) -> Result<Config> {
    match &global.source {
        Some(path) => Ok(configuration::of_source(path)?),
        None => Ok(configuration::load(&global.config, Demand::Source, Lookup::Resolve)?),
    }
}

/// The configuration of a command that needs sinks: the file.
///
/// # Errors
/// All problems of the file, or `--source` beside it.
fn full_config(global: &Global) -> Result<Config> {
    if global.source.is_some() {
        let text =
            "--source names a database and no sinks; this command needs a configuration file";
        return Err(Usage(text.to_owned()).into());
    }
    Ok(configuration::load(&global.config, Demand::SourceAndSinks, Lookup::Resolve)?)
}

/// Opens the source of an initialised outbox.
///
/// # Errors
/// Marked as not ready.
async fn open(config: &Config) -> Result<Opened> {
    open_with(config, OnSchema::Require).await
}

/// Opens the source.
///
/// # Errors
/// Marked as not ready.
async fn open_with(config: &Config, schema: OnSchema) -> Result<Opened> {
    let shown = compose::show_source(&config.source);
    compose::open_source(&config.source, schema)
        .await
        .with_context(|| NotReady(format!("open {shown}")))
}

/// Runs a short command's future; warnings go to standard error.
///
/// # Errors
/// The future's own.
fn block_on<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    let tracing = logging::start(&logging::quiet(), None)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    let result = runtime.block_on(future);
    // A blocking call that hangs (a locked file) must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    tracing.finish();
    result
}
