//! The fault runner's command line; `cargo xtask faults` builds everything and calls it.
//!
//! What lives here: flags, the mount namespace of one's own, and the roles that this binary plays
//! as a child of itself. What does not: any of the work.
//! Invariant: exit code 0 means that every promise was kept in every schedule.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use postrider_faults::campaign::{self, Campaign};
use postrider_faults::figure::Figure;
use postrider_faults::schedule::{SinkKind, SourceKind, generator};
use postrider_faults::{cosmos, outage, takeover, writer};
use rustix::mount::{MountFlags, mount};

/// Set in the process that has a mount namespace of its own.
const IN_NAMESPACE: &str = "POSTRIDER_FAULTS_IN_NAMESPACE";
/// Schedules of brokers in the smoke test: one in which each is killed, one in which it refuses
/// events, one of a relay that dies.
const SMOKE_OF_BROKERS: [u64; 3] = [1, 9, 10];
/// Schedules from Cosmos DB in the smoke test: relays that are killed, a split, lost answers, a
/// merge.
const SMOKE_OF_COSMOS: [u64; 4] = [0, 3, 6, 11];
/// Schedules per source and sink in the smoke test, evenly spread: with each sink other themes.
const SMOKE_SCHEDULES: u64 = 4;

/// What an outage can be measured of.
const BROKERS: [SinkKind; 4] =
    [SinkKind::Nats, SinkKind::Rabbitmq, SinkKind::Kafka, SinkKind::Redis];
/// A short outage, in the smoke test.
const SMOKE_OUTAGE: Duration = Duration::from_secs(2);
const SMOKE_BACKLOG: u64 = 2_000;

const EXAMPLES: &str = "Examples:
  cargo xtask faults --smoke
  cargo xtask faults --source postgres-feed --sink webhook --schedules 300 --seed 7 --json
  cargo xtask faults --source sqlite --seed 7 --schedules 1000 --from 400    go on where it stopped
  cargo xtask faults --source postgres-feed --sink jsonl --seed 7 --only 15  play one again
  cargo xtask faults --source postgres-wal --sink webhook --schedules 100 --events 10000
  cargo xtask faults --source sqlite --sink servicebus --schedules 100       against the emulator
  cargo xtask faults --source postgres-wal --sink nats --schedules 100       against a real server,
                                                             also rabbitmq, kafka and redis
  cargo xtask faults --source cosmos --sink servicebus --schedules 100       between two emulators
  cargo xtask faults takeover
  cargo xtask faults takeover --source cosmos
  cargo xtask faults outage --sink nats --seconds 60 --events 100000";

/// Runs the real relay under injected faults and judges what arrived.
#[derive(Parser)]
#[command(name = "cargo xtask faults", args_conflicts_with_subcommands = true)]
#[command(after_help = EXAMPLES)]
struct Cli {
    #[command(flatten)]
    schedules: Schedules,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Args)]
struct Schedules {
    /// Where the events come from
    #[arg(long, value_enum, default_value_t = SourceKind::Sqlite)]
    source: SourceKind,
    /// Where they go; webhook and jsonl, one after the other, when left out, and servicebus from
    /// cosmos
    #[arg(long, value_enum)]
    sink: Option<SinkKind>,
    /// How many schedules; one round of themes when left out
    #[arg(long)]
    schedules: Option<u64>,
    /// The run's seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The first schedule's number: to go on with an interrupted run
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Only this schedule: to replay one
    #[arg(long, conflicts_with_all = ["from", "schedules"])]
    only: Option<u64>,
    /// A few schedules with each source, in about a minute
    #[arg(long, conflicts_with_all = ["only", "from", "schedules", "sink", "source"])]
    smoke: bool,
    /// How many events each schedule appends at least, by 16 writers; only from postgres-wal
    #[arg(long, conflicts_with = "smoke")]
    events: Option<u64>,
    /// How many schedules at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// End with one line of JSON on standard output
    #[arg(long)]
    json: bool,
    /// The relay's binary, built with the feature failpoints; beside this one when left out
    #[arg(long)]
    postrider: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// Measures how fast another relay serves everything, after kill -9 and after SIGTERM
    Takeover {
        /// Where the events come from: a file, or twelve ranges of cosmos (kill -9 alone)
        #[arg(long, value_enum, default_value_t = SourceKind::Sqlite)]
        source: SourceKind,
        /// How often each is measured
        #[arg(long, default_value_t = 9)]
        rounds: usize,
        /// Print a line of JSON per figure
        #[arg(long)]
        json: bool,
        /// The relay's binary; beside this one when left out
        #[arg(long)]
        postrider: Option<PathBuf>,
    },
    /// Lets a broker be away while a backlog grows: attempts, log lines, memory, and how soon
    /// everything is delivered once it is back
    Outage {
        /// The broker; each of them, one after the other, when left out
        #[arg(long, value_enum)]
        sink: Option<SinkKind>,
        /// How long it is away, in seconds
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// How many events are appended meanwhile
        #[arg(long, default_value_t = 100_000)]
        events: u64,
        /// Print a line of JSON per figure
        #[arg(long)]
        json: bool,
        /// The relay's binary; beside this one when left out
        #[arg(long)]
        postrider: Option<PathBuf>,
    },
    /// Writes events, as an application does
    #[command(hide = true)]
    Writer {
        database: PathBuf,
        #[arg(long)]
        length_ms: u64,
        #[arg(long)]
        largest: usize,
        #[arg(long)]
        name: String,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        index: u64,
    },
    /// Writes events to a server, as an application does
    #[command(hide = true)]
    PostgresWriter {
        url: String,
        #[arg(long)]
        length_ms: u64,
        #[arg(long)]
        largest: usize,
        #[arg(long)]
        name: String,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        index: u64,
        #[arg(long)]
        retries: bool,
        #[arg(long)]
        events: Option<u64>,
    },
    /// Holds a transaction open that has written events
    #[command(hide = true)]
    PostgresHolder {
        url: String,
        #[arg(long)]
        length_ms: u64,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        index: u64,
        #[arg(long)]
        prepared: bool,
    },
    /// Holds the database's write lock
    #[command(hide = true)]
    HoldLock {
        database: PathBuf,
        #[arg(long)]
        length_ms: u64,
    },
}

fn main() -> ExitCode {
    run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("faults: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Some(Command::Writer { database, length_ms, largest, name, seed, index }) => {
            let length = Duration::from_millis(length_ms);
            let task = writer::sqlite::Task { database: &database, name: &name, length, largest };
            writer::sqlite::run(task, generator(seed, index, &name))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::PostgresWriter {
            url,
            length_ms,
            largest,
            name,
            seed,
            index,
            retries,
            events,
        }) => {
            let length = Duration::from_millis(length_ms);
            let task =
                writer::postgres::Task { url: &url, name: &name, length, retries, events, largest };
            writer::postgres::run(task, generator(seed, index, &name))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::PostgresHolder { url, length_ms, seed, index, prepared }) => {
            let (length, rng) =
                (Duration::from_millis(length_ms), generator(seed, index, "holder"));
            writer::postgres::hold_open(&url, length, prepared, rng)?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::HoldLock { database, length_ms }) => {
            writer::sqlite::hold_lock(&database, Duration::from_millis(length_ms))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Takeover { source, rounds, json, postrider }) => {
            ensure!(rounds > 0, "--rounds is 0; measure at least once");
            let binary = binary(postrider)?;
            match source {
                SourceKind::Sqlite => takeover::run(&binary, rounds, json),
                SourceKind::Cosmos => Ok(told(&cosmos::takeover(&binary, rounds)?, json)),
                SourceKind::PostgresFeed | SourceKind::PostgresWal => {
                    bail!("take-overs are measured with --source sqlite or cosmos, not {source}")
                }
            }
        }
        Some(Command::Outage { sink, seconds, events, json, postrider }) => {
            ensure!(seconds > 0 && events > 0, "--seconds and --events: give at least 1");
            let sinks = sink.map_or(BROKERS.to_vec(), |sink| vec![sink]);
            let length = Duration::from_secs(seconds);
            outages(&sinks, length, events, true, json, &binary(postrider)?)
        }
        None => schedules(&cli.schedules),
    }
}

/// Measures an outage of each broker, one after the other.
fn outages(
    sinks: &[SinkKind],
    length: Duration,
    events: u64,
    judges_times: bool,
    json: bool,
    binary: &Path,
) -> Result<ExitCode> {
    let mut met = true;
    for sink in sinks {
        let figures =
            outage::run(outage::Plan { sink: *sink, length, events, judges_times }, binary);
        for figure in figures.with_context(|| format!("an outage of {sink}"))? {
            met &= told(&[figure], json) == ExitCode::SUCCESS;
        }
    }
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints figures, and says whether all goals are met.
fn told(figures: &[Figure], json: bool) -> ExitCode {
    for figure in figures {
        match json {
            true => println!("{}", figure.json()),
            false => eprintln!("{}", figure.text()),
        }
    }
    let met = figures.iter().all(|figure| figure.met);
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn binary(given: Option<PathBuf>) -> Result<PathBuf> {
    let beside = || -> Result<PathBuf> {
        Ok(std::env::current_exe().context("find the own binary")?.with_file_name("postrider"))
    };
    let path = given.map_or_else(beside, Ok)?;
    ensure!(path.is_file(), "there is no relay at {}: build it first", path.display());
    std::path::absolute(path).context("find the relay's binary")
}

fn schedules(args: &Schedules) -> Result<ExitCode> {
    ensure!(args.jobs > 0, "--jobs is 0; run at least one schedule at a time");
    let counted = args.events.is_none() || args.source == SourceKind::PostgresWal;
    ensure!(counted, "--events is for --source postgres-wal, not {}", args.source);
    let binary = binary(args.postrider.clone())?;
    if std::env::var_os(IN_NAMESPACE).is_none() {
        return Err(again_in_a_namespace());
    }
    private_shared_memory()?;
    let mut code = ExitCode::SUCCESS;
    for (source, sink, indices) in runs(args) {
        let (seed, events, jobs, json) = (args.seed, args.events, args.jobs, args.json);
        let campaign = Campaign { source, sink, seed, indices, events, jobs, json };
        let sum = campaign::run(&campaign, &binary);
        if sum.exit_code() != ExitCode::SUCCESS {
            code = ExitCode::FAILURE;
        }
    }
    if args.smoke {
        let met = outages(&BROKERS, SMOKE_OUTAGE, SMOKE_BACKLOG, false, false, &binary)?;
        code = if met == ExitCode::SUCCESS { code } else { met };
    }
    Ok(code)
}

/// Each source with each sink to run, and the numbers of the schedules.
fn runs(args: &Schedules) -> Vec<(SourceKind, SinkKind, Vec<u64>)> {
    if args.smoke {
        return smoke();
    }
    let indices = match args.only {
        Some(only) => vec![only],
        None => {
            let count = args.schedules.unwrap_or(args.source.themes());
            (args.from..args.from.saturating_add(count)).collect()
        }
    };
    let usual = match args.source {
        SourceKind::Cosmos => vec![SinkKind::Servicebus],
        SourceKind::Sqlite | SourceKind::PostgresFeed | SourceKind::PostgresWal => {
            vec![SinkKind::Webhook, SinkKind::Jsonl]
        }
    };
    let sinks = args.sink.map_or(usual, |sink| vec![sink]);
    sinks.into_iter().map(|sink| (args.source, sink, indices.clone())).collect()
}

/// A few of every source and every sink.
fn smoke() -> Vec<(SourceKind, SinkKind, Vec<u64>)> {
    let sources = [SourceKind::Sqlite, SourceKind::PostgresFeed, SourceKind::PostgresWal];
    let usual = sources.into_iter().flat_map(|source| {
        [(SinkKind::Webhook, 0), (SinkKind::Jsonl, 1)].map(|(sink, at)| {
            let stride = source.themes() / SMOKE_SCHEDULES;
            (source, sink, (0..SMOKE_SCHEDULES).map(|n| n * stride + at).collect())
        })
    });
    // A sink in trouble is the same trouble from every source.
    let brokers = BROKERS.map(|sink| (SourceKind::Sqlite, sink, SMOKE_OF_BROKERS.to_vec()));
    let cosmos = (SourceKind::Cosmos, SinkKind::Servicebus, SMOKE_OF_COSMOS.to_vec());
    usual.chain(brokers).chain([cosmos]).collect()
}

/// Shared memory of our own: a process that sees a moved clock leaves a piece of it behind when it
/// is killed. Large enough for servers whose data is in memory; only what is written takes room.
fn private_shared_memory() -> Result<()> {
    mount("tmpfs", "/dev/shm", "tmpfs", MountFlags::empty(), c"size=8g")
        .context("mount shared memory of our own")
}

/// Small disks are mounted in a mount namespace, so that none outlives the run. Returns only when
/// that is impossible.
fn again_in_a_namespace() -> anyhow::Error {
    let own = match std::env::current_exe() {
        Ok(own) => own,
        Err(error) => return error.into(),
    };
    let mut unshare = Process::new("unshare");
    unshare.arg("--mount");
    if !rustix::process::geteuid().is_root() {
        unshare.arg("--map-root-user");
    }
    unshare.arg("--").arg(own).args(std::env::args_os().skip(1)).env(IN_NAMESPACE, "1");
    let error = unshare.exec();
    anyhow::Error::new(error).context("enter a mount namespace (unshare, of util-linux)")
}
