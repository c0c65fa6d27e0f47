//! The command line: every flag, defined once.
//!
//! What lives here: what can be typed, and its help. What does not: what it means (`commands/`).
//! Invariant: a value that clap accepted is well-formed; what is impossible was refused with exit
//! code 2 before anything was opened.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use postrider_core::{
    ConsumerName, DeadLetterFilter, DeadLetterId, DeadLetterState, Key, StartFrom, Topic,
};

use crate::config::value::{read_duration, read_start};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    it failed, or not everything could be done
  2    the command line or the configuration is wrong; nothing was started
  3    not ready: the database can't be reached, is locked, full, damaged, not
       initialised, or has another schema version
  130  stopped by a second signal before the drain was over

Environment:
  POSTRIDER_CONFIG  the configuration file, as --config
  POSTRIDER_LOG     the log level, instead of [log] level
  NO_COLOR          no colours

Examples:
  postrider demo                                 see it work, without any server
  postrider init && postrider run                create the tables, then deliver events
  postrider status                               where everything stands
  postrider dead-letters list --state parked     what needs a person";

/// Flags of all commands stand below each command's own.
const EVERYWHERE: &str = "Options of every command";

/// Reliable, ordered events out of your database.
#[derive(Debug, Parser)]
#[command(name = "postrider", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    /// What every command understands.
    #[command(flatten)]
    pub(crate) global: Global,
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What every command understands.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// The configuration file
    #[arg(
        long,
        short,
        global = true,
        help_heading = EVERYWHERE,
        value_name = "FILE",
        env = "POSTRIDER_CONFIG",
        default_value = "postrider.toml"
    )]
    pub(crate) config: PathBuf,
    /// Use this SQLite database instead of a configuration file (not for run and replay)
    #[arg(
        long,
        global = true,
        help_heading = EVERYWHERE,
        value_name = "PATH",
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    pub(crate) source: Option<String>,
    /// Print JSON for programs instead of text for people
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub(crate) json: bool,
    /// When to use colours
    #[arg(
        long,
        global = true,
        help_heading = EVERYWHERE,
        value_enum,
        default_value_t = Color::Auto
    )]
    pub(crate) color: Color,
    /// Show no progress
    #[arg(long, short, global = true, help_heading = EVERYWHERE)]
    pub(crate) quiet: bool,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a contacts service, a relay and a receiver in this process, to see events arrive
    #[cfg(feature = "demo")]
    Demo(DemoArgs),
    /// Create the outbox and everything beside it in the source's database
    Init(InitArgs),
    /// Deliver events until SIGTERM or SIGINT; a second signal stops at once
    Run(RunArgs),
    /// Show partitions, leases, consumers, lag and what needs attention
    Status(StatusArgs),
    /// Follow the feed; payloads are shown only with --payload
    Tail(TailArgs),
    /// See and settle events that a sink refused
    #[command(subcommand)]
    DeadLetters(DeadLettersCommand),
    /// Publish a part of the feed to one sink again, outside its checkpoint
    Replay(ReplayArgs),
    /// See and forget who reads the feed
    #[command(subcommand)]
    Consumers(ConsumersCommand),
    /// Delete events that every consumer has passed
    Prune(PruneArgs),
    /// Check a configuration file, or print its JSON Schema
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print completions for a shell
    Completions(CompletionsArgs),
}

/// `demo`.
#[cfg(feature = "demo")]
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Keep the data in this folder instead of a temporary one
    #[arg(long, value_name = "FOLDER")]
    pub(crate) data: Option<PathBuf>,
    /// Deliver to a local Service Bus too, and show what arrives by session instead of by webhook
    #[arg(long)]
    pub(crate) servicebus: bool,
    /// Where the contacts service listens; without it 127.0.0.1:8080 or a free port
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
}

/// `init`.
#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Print the SQL for review, and do nothing
    #[arg(long)]
    pub(crate) sql: bool,
}

/// `run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The admin listener's address instead of [admin] listen
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) admin: Option<SocketAddr>,
    /// Create or upgrade the schema first, as init does
    #[arg(long)]
    pub(crate) init: bool,
}

/// `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Whose leases to show, when there is no configuration file
    #[arg(long, value_name = "GROUP")]
    pub(crate) group: Option<String>,
    /// End with exit code 1 if anything needs attention
    #[arg(long)]
    pub(crate) check: bool,
}

/// `tail`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  postrider tail --from oldest --no-follow           everything that is kept
  postrider tail --key order-17 --payload            one key's events from now on
  postrider tail --from 2026-11-27T22:00:00Z --json  JSON lines for programs")]
pub(crate) struct TailArgs {
    /// Begin at oldest, now, a time (RFC 3339) or a position
    #[arg(long, value_name = "PLACE", default_value = "now", value_parser = read_start)]
    pub(crate) from: StartFrom,
    /// Only events with this key
    #[arg(long, value_parser = key)]
    pub(crate) key: Option<Key>,
    /// Only events for this topic
    #[arg(long, value_parser = topic)]
    pub(crate) topic: Option<Topic>,
    /// End after this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: Option<u64>,
    /// End at the head instead of waiting for more
    #[arg(long)]
    pub(crate) no_follow: bool,
    /// Show headers and payload too
    #[arg(long)]
    pub(crate) payload: bool,
}

/// `dead-letters`.
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  postrider dead-letters list --state parked     what needs a person
  postrider dead-letters show 17 --payload       one of them, whole
  postrider dead-letters requeue --key order-17  send a key's events again, in order
  postrider dead-letters skip --id 17 --yes      give one up; its key goes on")]
pub(crate) enum DeadLettersCommand {
    /// List them, oldest first
    List {
        /// Which ones.
        #[command(flatten)]
        filter: FilterArgs,
        /// List at most this many
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: usize,
    },
    /// Show one, with its reason; the payload only with --payload
    Show {
        /// Its number
        id: u64,
        /// Show headers and payload too
        #[arg(long)]
        payload: bool,
    },
    /// Send parked and skipped ones again, in order, under the same ids
    Requeue(SettleArgs),
    /// Give up parked ones: they stay visible and their keys go on
    Skip(SettleArgs),
    /// Delete them for good
    Drop(SettleArgs),
}

/// Which dead letters to settle.
#[derive(Debug, Args)]
pub(crate) struct SettleArgs {
    /// Which ones.
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Mean all of them when no filter is given
    #[arg(long)]
    pub(crate) all: bool,
    /// Do not ask
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// Which dead letters are meant; all given parts must match.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// By number; may be repeated
    #[arg(long = "id", value_name = "N")]
    pub(crate) ids: Vec<u64>,
    /// Of this sink
    #[arg(long, value_parser = consumer)]
    pub(crate) sink: Option<ConsumerName>,
    /// Of this key
    #[arg(long, value_parser = key)]
    pub(crate) key: Option<Key>,
    /// In this state
    #[arg(long, value_enum)]
    pub(crate) state: Option<State>,
}

impl FilterArgs {
    /// The filter that was typed.
    pub(crate) fn filter(&self) -> DeadLetterFilter {
        DeadLetterFilter {
            ids: self.ids.iter().map(|id| DeadLetterId::new(*id)).collect(),
            consumer: self.sink.clone(),
            key: self.key.clone(),
            state: self.state.map(|state| match state {
                State::Parked => DeadLetterState::Parked,
                State::Waiting => DeadLetterState::Waiting,
                State::Requeued => DeadLetterState::Requeued,
                State::Skipped => DeadLetterState::Skipped,
            }),
        }
    }
}

/// Where a dead letter stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum State {
    /// Refused; its key waits for a person
    Parked,
    /// Behind a parked one of its key
    Waiting,
    /// To be sent again
    Requeued,
    /// Given up, kept to be seen
    Skipped,
}

/// `replay`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  postrider replay --from 2026-11-01T00:00:00Z --dry-run    how much would be sent
  postrider replay --from oldest --sink audit --key order-17")]
pub(crate) struct ReplayArgs {
    /// Begin at oldest, a time (RFC 3339) or after a position
    #[arg(long, value_name = "PLACE", value_parser = read_start)]
    pub(crate) from: StartFrom,
    /// End at a time (RFC 3339), a position, or now
    #[arg(long, value_name = "PLACE", default_value = "now", value_parser = read_start)]
    pub(crate) to: StartFrom,
    /// The sink; may be left out when there is one only
    #[arg(long, value_parser = consumer)]
    pub(crate) sink: Option<ConsumerName>,
    /// Only events with this key
    #[arg(long, value_parser = key)]
    pub(crate) key: Option<Key>,
    /// Count, and publish nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Give events new ids, so that receivers do not take them for repetitions
    #[arg(long)]
    pub(crate) new_ids: bool,
}

/// `consumers`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConsumersCommand {
    /// List them with their checkpoints
    List,
    /// Forget one: its checkpoints and its dead letters
    Remove {
        /// Its name
        #[arg(value_parser = consumer)]
        name: ConsumerName,
        /// Do not ask
        #[arg(long, short)]
        yes: bool,
    },
}

/// `prune`.
#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// Keep events younger than this; without it [relay] retention
    #[arg(long, value_name = "DURATION", value_parser = read_duration)]
    pub(crate) keep: Option<Duration>,
    /// Count, and delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `config`.
#[derive(Debug, Subcommand)]
#[command(after_help = "\
A file that delivers a SQLite outbox to a webhook:
  [source]
  kind = \"sqlite\"
  url  = \"app.db\"

  [[sink]]
  kind         = \"webhook\"
  url          = \"https://example.com/events\"
  signing_keys = [\"env:WEBHOOK_KEY\"]   # or file:PATH; any text may be a reference

For PostgreSQL: kind = \"postgres-feed\", url = \"env:DATABASE_URL\"

Every other key has a safe default: postrider config schema lists them.")]
pub(crate) enum ConfigCommand {
    /// Check a file; nothing is connected to
    Check {
        /// The file; without it the one of --config
        file: Option<PathBuf>,
        /// Do not look up env: and file: values
        #[arg(long)]
        skip_references: bool,
    },
    /// Print the JSON Schema of the file
    Schema,
}

/// `completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}

fn topic(text: &str) -> Result<Topic, String> {
    Topic::new(text).map_err(|error| error.to_string())
}

fn consumer(text: &str) -> Result<ConsumerName, String> {
    ConsumerName::new(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
