//! What one schedule does, derived from its seed, number, source and sink alone.
//!
//! What lives here: the plan of a schedule, and its derivation for SQLite. What does not: that for
//! PostgreSQL (`postgres.rs`, `postgres_wal.rs`), and carrying it out.
//! Invariant: the same seed, number, source and sink give the same plan, whatever ran before; every
//! kind of fault comes up within a round of themes, because each has its turn to be the theme.

mod fault;
mod postgres;
mod postgres_wal;

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::writer::LARGEST;

pub use fault::{Fault, Outage, ServerEnd, Side, SlotFault, WireFault};

/// Time to live of a lease in every schedule: short, so that a take-over fits into one.
pub const LEASE_TTL: Duration = Duration::from_millis(600);

/// Schedules in a row after which every theme of SQLite has come up.
const SQLITE_THEMES: u64 = 12;

/// Named places of the relay at which it dies when told to.
const FAILPOINTS: [&str; 7] = [
    "relay::before_publish",
    "relay::after_publish",
    "relay::before_checkpoint",
    "relay::after_checkpoint",
    "relay::before_park",
    "relay::after_park",
    "relay::before_resolve",
];

/// How many of them, from the first, are passed without a parking.
const NEVER_PARKING: usize = 4;

/// Where the schedule's events come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// The outbox in SQLite.
    Sqlite,
    /// The outbox in PostgreSQL, read as a feed.
    PostgresFeed,
    /// The outbox in PostgreSQL, read from the write-ahead log.
    PostgresWal,
    /// Documents in Azure Cosmos DB, by its change feed.
    Cosmos,
}

impl SourceKind {
    /// Schedules in a row after which every theme has come up.
    pub fn themes(self) -> u64 {
        match self {
            Self::Sqlite => SQLITE_THEMES,
            Self::PostgresFeed => postgres::THEMES,
            Self::PostgresWal => postgres_wal::THEMES,
            Self::Cosmos => crate::cosmos::THEMES,
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sqlite => "sqlite",
            Self::PostgresFeed => "postgres-feed",
            Self::PostgresWal => "postgres-wal",
            Self::Cosmos => "cosmos",
        })
    }
}

/// Which sink the schedule delivers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SinkKind {
    /// HTTP requests to a receiver that verifies, and misbehaves on purpose.
    Webhook,
    /// Lines in a file.
    Jsonl,
    /// Messages of Azure Service Bus, to the emulator.
    Servicebus,
    /// Messages in a stream of NATS JetStream.
    Nats,
    /// Messages in a queue of RabbitMQ.
    Rabbitmq,
    /// Records of a topic of a broker that speaks Kafka's protocol.
    Kafka,
    /// Entries of a stream in Redis.
    Redis,
}

impl SinkKind {
    /// Whether it can be out of order for a while.
    pub fn takes_outages(self) -> bool {
        match self {
            Self::Webhook
            | Self::Servicebus
            | Self::Nats
            | Self::Rabbitmq
            | Self::Kafka
            | Self::Redis => true,
            Self::Jsonl => false,
        }
    }

    /// Whether relays with it can be shown a moved clock. Kafka's client library waits by the wall
    /// clock, and libfaketime moves the clock that is read, not the one that the kernel waits by:
    /// a wait until a moved time has no meaning, as it has with a clock that was really set.
    pub fn takes_moved_clocks(self) -> bool {
        match self {
            Self::Kafka => false,
            Self::Webhook
            | Self::Jsonl
            | Self::Servicebus
            | Self::Nats
            | Self::Rabbitmq
            | Self::Redis => true,
        }
    }

    /// Whether it can refuse a few events for good until the faults are over.
    pub fn refuses(self) -> bool {
        match self {
            Self::Webhook | Self::Nats | Self::Rabbitmq | Self::Kafka | Self::Redis => true,
            Self::Jsonl | Self::Servicebus => false,
        }
    }
}

impl fmt::Display for SinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Webhook => "webhook",
            Self::Jsonl => "jsonl",
            Self::Servicebus => "servicebus",
            Self::Nats => "nats",
            Self::Rabbitmq => "rabbitmq",
            Self::Kafka => "kafka",
            Self::Redis => "redis",
        })
    }
}

/// What a PostgreSQL server of a schedule is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PostgresPlan {
    /// Its major version.
    pub version: u32,
    /// Whether what it has confirmed outlives its sudden end.
    pub durable: bool,
    /// Whether PgBouncer stands in front of it, in transaction mode.
    pub pooler: bool,
    /// Whether an older copy takes its place.
    pub replaced: bool,
    /// Whether its data stands on a small disk.
    pub small_disk: bool,
    /// Whether it is read from its log.
    pub wal: bool,
}

/// A fault and when it begins, counted from the start of the writers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// When.
    pub at: Duration,
    /// What.
    pub fault: Fault,
}

/// What stands on a disk of a few megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum SmallDisk {
    /// The database.
    Database,
    /// The sink's files.
    Lines,
}

/// How the receiver misbehaves outside its outages, in requests per thousand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moods {
    /// 500.
    pub server_error: u32,
    /// 429 with `Retry-After: 1`.
    pub throttled: u32,
    /// The request is taken and the connection reset instead of an answer.
    pub lost_confirm: u32,
    /// The connection is reset in the middle of the request.
    pub cut: u32,
    /// The answer comes late.
    pub slow: u32,
    /// The connection is closed after the answer, without a word.
    pub closed: u32,
    /// One event out of so many is refused with 400 until the faults are over; 0: none. A broker
    /// refuses the large ones instead.
    pub refused_one_in: u64,
}

/// The plan of one schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// The run's seed.
    pub seed: u64,
    /// The schedule's number.
    pub index: u64,
    /// Where its events come from.
    pub source: SourceKind,
    /// Where it delivers to.
    pub sink: SinkKind,
    /// Partitions of the outbox.
    pub partitions: u32,
    /// Relays at once.
    pub relays: usize,
    /// Writers at once.
    pub writers: usize,
    /// How long the writers write.
    pub writing: Duration,
    /// Retention by the relay: none, or how long passed events are kept.
    pub retention: Option<Duration>,
    /// Rotation of the sink's file, in bytes.
    pub rotate_bytes: Option<u64>,
    /// What stands on a small disk.
    pub small_disk: Option<SmallDisk>,
    /// Whether the processes' wall clock can be moved.
    pub movable_clock: bool,
    /// The receiver's moods.
    pub moods: Moods,
    /// The server, for a PostgreSQL source.
    pub postgres: Option<PostgresPlan>,
    /// Whether a sink of the other kind stands beside the first one.
    pub beside: bool,
    /// How many events the writers append at least, however long it takes them.
    pub events: Option<u64>,
    /// What goes wrong, in order.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// The plan of schedule `index` of the run with `seed`.
    pub fn derive(seed: u64, index: u64, source: SourceKind, sink: SinkKind) -> Self {
        match source {
            SourceKind::Sqlite => Self::sqlite(seed, index, sink),
            SourceKind::PostgresFeed => postgres::derive(seed, index, sink),
            SourceKind::PostgresWal => postgres_wal::derive(seed, index, sink, None),
            // What goes wrong is planned beside it (`cosmos/plan.rs`).
            SourceKind::Cosmos => {
                Self { source, steps: Vec::new(), ..Self::sqlite(seed, index, sink) }
            }
        }
    }

    /// The same from PostgreSQL's log with so many events, and faults for as long as they may take
    /// to write.
    pub fn with_events(seed: u64, index: u64, sink: SinkKind, events: u64) -> Self {
        postgres_wal::derive(seed, index, sink, Some(events))
    }

    /// Whether any of its sinks can be out of order.
    pub fn takes_outages(&self) -> bool {
        self.sinks().into_iter().any(SinkKind::takes_outages)
    }

    /// The largest payload that its writers write, in bytes. No limit of Redis is below 1 MiB.
    pub fn largest_payload(&self) -> usize {
        match self.sink {
            SinkKind::Redis if self.moods.refused_one_in > 0 => 12 * LARGEST,
            _ => LARGEST,
        }
    }

    /// The kinds of its sinks, the first one first.
    pub fn sinks(&self) -> Vec<SinkKind> {
        let other = match self.sink {
            SinkKind::Webhook => SinkKind::Jsonl,
            SinkKind::Jsonl
            | SinkKind::Servicebus
            | SinkKind::Nats
            | SinkKind::Rabbitmq
            | SinkKind::Kafka
            | SinkKind::Redis => SinkKind::Webhook,
        };
        [self.sink].into_iter().chain(self.beside.then_some(other)).collect()
    }

    fn sqlite(seed: u64, index: u64, sink: SinkKind) -> Self {
        let mut rng = generator(seed, index, sink);
        let theme = index % SQLITE_THEMES;
        let lines = sink == SinkKind::Jsonl;
        let small_disk = match theme {
            5 => Some(SmallDisk::Database),
            9 if lines => Some(SmallDisk::Lines),
            _ => None,
        };
        // With the lines' disk full, what several relays left behind could not be told apart.
        let relays = match theme {
            2 => 2,
            9 if lines => 1,
            _ => 1 + usize::from(rng.random_bool(0.4)),
        };
        let rotates = lines && (theme == 10 || rng.random_bool(0.3));
        let refusing = sink.refuses() && (theme == 10 || rng.random_bool(0.35));
        let mut schedule = Self {
            seed,
            index,
            source: SourceKind::Sqlite,
            sink,
            partitions: [1, 2, 4, 8][rng.random_range(0..4)],
            relays,
            writers: rng.random_range(2..=3),
            writing: millis(&mut rng, 1_500, 2_800),
            retention: rng.random_bool(0.3).then_some(Duration::ZERO),
            rotate_bytes: rotates.then(|| rng.random_range(20_000..200_000)),
            small_disk,
            movable_clock: (theme == 6 || rng.random_bool(0.1)) && sink.takes_moved_clocks(),
            moods: moods(&mut rng, refusing),
            postgres: None,
            beside: false,
            events: None,
            steps: Vec::new(),
        };
        schedule.add_theme(&mut rng, theme);
        for _ in 0..rng.random_range(2..=5) {
            let fault = schedule.any_fault(&mut rng);
            schedule.add(&mut rng, fault);
        }
        schedule.steps.sort_by_key(|step| step.at);
        schedule
    }

    fn add(&mut self, rng: &mut StdRng, fault: Fault) {
        let last = self.writing.as_millis().try_into().unwrap_or(u64::MAX);
        let at = millis(rng, 100, last);
        self.steps.push(Step { at, fault });
    }

    fn add_theme(&mut self, rng: &mut StdRng, theme: u64) {
        let refuses = self.sink.refuses();
        let outages = self.sink.takes_outages();
        let slot = rng.random_range(0..self.relays);
        let theme_faults = match theme {
            0 | 2 => vec![kill(rng, slot), kill(rng, slot)],
            1 => vec![self.failpoint(rng, slot), self.failpoint(rng, slot)],
            8 => vec![self.failpoint(rng, slot), Fault::KillWriter { writer: 0 }],
            3 => vec![Fault::Pause { slot, length: millis(rng, 750, 1_300) }],
            4 => vec![Fault::HandOver { slot }, Fault::HandOver { slot }],
            5 => vec![Fault::FillDisk { length: millis(rng, 300, 900) }],
            6 if !self.sink.takes_moved_clocks() => vec![kill(rng, slot), outage(rng)],
            6 => {
                let forth = rng.random_range(60..400_000);
                let back = -rng.random_range(60..400_000);
                vec![Fault::MoveClock { by_seconds: forth }, Fault::MoveClock { by_seconds: back }]
            }
            7 => vec![Fault::Lock { length: millis(rng, 700, 1_500) }],
            9 if outages => vec![outage(rng)],
            9 => vec![Fault::FillDisk { length: millis(rng, 300, 900) }],
            10 if refuses => vec![self.failpoint(rng, slot), Fault::Requeue],
            10 if outages => vec![outage(rng), outage(rng), kill(rng, slot)],
            10 => vec![Fault::TearLine, Fault::TearLine, kill(rng, slot)],
            _ => vec![kill(rng, slot), Fault::Pause { slot, length: millis(rng, 700, 1_000) }],
        };
        for fault in theme_faults {
            self.add(rng, fault);
        }
    }

    fn failpoint(&self, rng: &mut StdRng, slot: usize) -> Fault {
        // Nothing is parked where nothing is refused.
        let parks = self.moods.refused_one_in > 0;
        let choice = if parks { FAILPOINTS.len() } else { NEVER_PARKING };
        let name = FAILPOINTS[rng.random_range(0..choice)];
        // A parking or a release may happen once in a schedule; calls happen by the hundred.
        let most = match name {
            _ if name.ends_with("publish") => 60,
            _ if name.ends_with("checkpoint") => 12,
            _ => 2,
        };
        Fault::Failpoint { slot, name, count: rng.random_range(1..=most) }
    }

    fn any_fault(&self, rng: &mut StdRng) -> Fault {
        let slot = rng.random_range(0..self.relays);
        loop {
            return match rng.random_range(0..10) {
                0 | 1 => kill(rng, slot),
                2 | 3 => self.failpoint(rng, slot),
                4 => Fault::HandOver { slot },
                5 => Fault::KillWriter { writer: rng.random_range(0..self.writers) },
                6 => Fault::Pause { slot, length: millis(rng, 700, 1_000) },
                7 if self.movable_clock => {
                    Fault::MoveClock { by_seconds: rng.random_range(-90_000..90_000) }
                }
                8 if self.sink.takes_outages() => outage(rng),
                8 => Fault::TearLine,
                9 if self.moods.refused_one_in > 0 => Fault::Requeue,
                _ => continue,
            };
        }
    }
}

/// A generator of its own for each schedule (and for `what` is random besides its plan).
pub fn generator(seed: u64, index: u64, what: impl fmt::Display) -> StdRng {
    let digest = Sha256::digest(format!("{seed} {index} {what}").as_bytes());
    StdRng::from_seed(digest.into())
}

fn millis(rng: &mut StdRng, least: u64, most: u64) -> Duration {
    Duration::from_millis(rng.random_range(least..=most))
}

fn kill(rng: &mut StdRng, slot: usize) -> Fault {
    Fault::Kill { slot, down: millis(rng, 0, 400) }
}

fn outage(rng: &mut StdRng) -> Fault {
    let kinds = [Outage::ServerError, Outage::Throttled, Outage::Silent, Outage::Refused];
    Fault::Outage { kind: kinds[rng.random_range(0..4)], length: millis(rng, 200, 800) }
}

fn moods(rng: &mut StdRng, refusing: bool) -> Moods {
    let calm = rng.random_bool(0.3);
    let mut per_thousand = |most: u32| if calm { 0 } else { rng.random_range(0..=most) };
    Moods {
        server_error: per_thousand(30),
        throttled: per_thousand(2),
        lost_confirm: per_thousand(20),
        cut: per_thousand(15),
        slow: per_thousand(30),
        closed: per_thousand(30),
        refused_one_in: if refusing { 97 } else { 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of them, for tests of every derivation.
    pub(super) const SINKS: [SinkKind; 7] = [
        SinkKind::Webhook,
        SinkKind::Jsonl,
        SinkKind::Servicebus,
        SinkKind::Nats,
        SinkKind::Rabbitmq,
        SinkKind::Kafka,
        SinkKind::Redis,
    ];

    fn sqlite(seed: u64, index: u64, sink: SinkKind) -> Schedule {
        Schedule::derive(seed, index, SourceKind::Sqlite, sink)
    }

    #[test]
    fn the_same_seed_and_number_give_the_same_schedule_and_others_another() {
        for sink in SINKS {
            for index in 0..200 {
                let once = sqlite(7, index, sink);
                assert_eq!(once, sqlite(7, index, sink));
                assert_ne!(once.steps, sqlite(8, index, sink).steps);
            }
        }
    }

    #[test]
    fn a_known_schedule_stays_what_it_is() {
        // A failure is replayed by seed and number: a change of the derivation must be meant.
        let text = serde_json::to_string(&sqlite(1, 0, SinkKind::Webhook).steps);
        assert_eq!(text.expect("JSON"), KNOWN);
    }

    const KNOWN: &str = concat!(
        r#"[{"at":{"secs":0,"nanos":108000000},"fault":{"Kill":{"slot":0,"#,
        r#""down":{"secs":0,"nanos":249000000}}}},"#,
        r#"{"at":{"secs":1,"nanos":322000000},"fault":{"Outage":{"kind":"Silent","#,
        r#""length":{"secs":0,"nanos":703000000}}}},"#,
        r#"{"at":{"secs":1,"nanos":345000000},"fault":{"HandOver":{"slot":0}}},"#,
        r#"{"at":{"secs":1,"nanos":687000000},"fault":{"Kill":{"slot":0,"down":{"secs":0,"#,
        r#""nanos":264000000}}}}]"#,
    );

    #[test]
    fn every_kind_of_fault_comes_up_within_one_round_of_themes() {
        for sink in SINKS {
            let steps: Vec<Step> =
                (0..SQLITE_THEMES).flat_map(|index| sqlite(3, index, sink).steps).collect();
            let has = |wanted: fn(&Fault) -> bool| steps.iter().any(|step| wanted(&step.fault));
            assert!(has(|f| matches!(f, Fault::Kill { .. })));
            assert!(has(|f| matches!(f, Fault::Failpoint { .. })));
            assert!(has(|f| matches!(f, Fault::Pause { .. })));
            assert!(has(|f| matches!(f, Fault::HandOver { .. })));
            assert!(has(|f| matches!(f, Fault::KillWriter { .. })));
            assert!(has(|f| matches!(f, Fault::Lock { .. })));
            assert!(has(|f| matches!(f, Fault::FillDisk { .. })));
            let moves = has(|f| matches!(f, Fault::MoveClock { .. }));
            assert_eq!(moves, sink.takes_moved_clocks());
            assert_eq!(has(|f| matches!(f, Fault::Outage { .. })), sink != SinkKind::Jsonl);
            assert_eq!(has(|f| matches!(f, Fault::Requeue)), sink.refuses());
            assert_eq!(has(|f| matches!(f, Fault::TearLine)), sink == SinkKind::Jsonl);
        }
    }

    #[test]
    fn a_fault_only_comes_where_it_can_be_made() {
        for sink in SINKS {
            for index in 0..500 {
                let schedule = sqlite(11, index, sink);
                for step in &schedule.steps {
                    match &step.fault {
                        Fault::Kill { slot, .. }
                        | Fault::Failpoint { slot, .. }
                        | Fault::HandOver { slot } => assert!(*slot < schedule.relays),
                        Fault::Pause { slot, length } => {
                            assert!(*slot < schedule.relays && *length > LEASE_TTL);
                        }
                        Fault::KillWriter { writer } => assert!(*writer < schedule.writers),
                        Fault::FillDisk { .. } => assert!(schedule.small_disk.is_some()),
                        Fault::MoveClock { .. } => assert!(schedule.movable_clock),
                        Fault::Outage { .. } => assert!(sink.takes_outages()),
                        Fault::Requeue => assert!(sink.refuses()),
                        Fault::TearLine => assert_eq!(sink, SinkKind::Jsonl),
                        Fault::Lock { .. } => {}
                        other => panic!("a fault of another source: {other:?}"),
                    }
                }
            }
        }
    }
}
