//! The keys of `postrider.toml`, each defined once.
//!
//! What lives here: what a key is, and the sections every file shares. What does not: the keys of
//! one store or sink (`compose.rs`), reading a file (`parse.rs`), the JSON Schema (`schema.rs`).
//! Invariant: parser, schema and documentation read these tables and know no key by themselves.

use std::time::Duration;

/// What a key's value looks like, and its bounds.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "webhook"), allow(dead_code, reason = "tables are some sinks' alone"))]
pub(crate) enum Shape {
    /// Any text that is not empty.
    Text,
    /// Text that is never shown.
    Secret,
    /// A list of texts that are never shown.
    Secrets,
    /// A table of names and texts that are never shown.
    SecretTable,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A length of time such as `"5s"`.
    Duration { min: Duration, max: Duration },
    /// A length of time, or the word `off`.
    DurationOrOff { min: Duration, max: Duration },
    /// A size such as `"64MiB"`.
    Size { min: u64, max: u64 },
    /// A whole number.
    Integer { min: u64, max: u64 },
    /// A number from 0 to 1.
    Fraction,
    /// `true` or `false`.
    Switch,
    /// `oldest`, `now`, a time or a position.
    Start,
    /// An address such as `127.0.0.1:9180`, or the word `off`.
    Listen,
}

/// Whether a key must be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// It must.
    Required,
    /// It may be left out, and then nothing stands for it.
    Optional,
    /// It may be left out; this TOML value stands for it.
    Default(&'static str),
}

/// One key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    /// Its name in the file.
    pub(crate) name: &'static str,
    /// What its value looks like.
    pub(crate) shape: Shape,
    /// Whether it must be given.
    pub(crate) need: Need,
    /// One sentence for people.
    pub(crate) doc: &'static str,
}

/// A section with fixed keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Section {
    /// Its name in the file.
    pub(crate) name: &'static str,
    /// One sentence for people.
    pub(crate) doc: &'static str,
    /// Its keys.
    pub(crate) keys: &'static [Key],
}

/// A kind of source or sink, with the keys that it alone has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    /// What `kind` says in the file.
    pub(crate) name: &'static str,
    /// One sentence for people.
    pub(crate) doc: &'static str,
    /// Its keys.
    pub(crate) keys: &'static [Key],
}

/// A key, for the tables.
pub(crate) const fn key(name: &'static str, shape: Shape, need: Need, doc: &'static str) -> Key {
    Key { name, shape, need, doc }
}

/// Seconds, for the tables.
pub(crate) const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Milliseconds, for the tables.
pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Ten years: longer is a slip of the pen.
pub(crate) const LONGEST: Duration = s(10 * 365 * 86_400);

/// The key that says which kind of source or sink a section is.
pub(crate) const KIND: &str = "kind";

/// Keys that every `[[sink]]` has beside its kind's own.
pub(crate) const SINK_KEYS: &[Key] = &[
    key(
        "name",
        Shape::Text,
        Need::Optional,
        "The consumer name under which its checkpoints are kept; the kind, when left out.",
    ),
    key(
        "from",
        Shape::Start,
        Need::Default("\"oldest\""),
        "Where a sink without a checkpoint begins: oldest, now, a time (RFC 3339) or a position.",
    ),
    key(
        "on_failure",
        Shape::Choice(&["park", "skip", "halt"]),
        Need::Default("\"park\""),
        "What happens to an event that can't be delivered: park (its key waits), skip (its key \
         goes on), halt (the sink stops).",
    ),
    key(
        "max_attempts",
        Shape::Integer { min: 1, max: 1_000_000 },
        Need::Default("12"),
        "Attempts after which an event's own transient failure counts as permanent.",
    ),
    key(
        "base_delay",
        Shape::Duration { min: ms(1), max: s(3_600) },
        Need::Default("\"100ms\""),
        "Upper bound of the first wait before a retry; it doubles.",
    ),
    key(
        "max_delay",
        Shape::Duration { min: ms(1), max: s(86_400) },
        Need::Default("\"30s\""),
        "Upper bound of every wait before a retry, unless the server asks for more.",
    ),
    key(
        "publish_timeout",
        Shape::Duration { min: ms(10), max: s(3_600) },
        Need::Default("\"30s\""),
        "A publish that takes longer has an unknown fate and is tried again.",
    ),
    key(
        "budget",
        Shape::Size { min: 1024 * 1024, max: 1 << 40 },
        Need::Default("\"32MiB\""),
        "Most bytes read and not yet checkpointed for this sink.",
    ),
];

/// `[relay]`.
pub(crate) const RELAY: Section = Section {
    name: "relay",
    doc: "The engine: leases, checkpoints, retention.",
    keys: &[
        key(
            "group",
            Shape::Text,
            Need::Default("\"default\""),
            "Relays of one group share the partitions between them.",
        ),
        key(
            "lease_ttl",
            Shape::Duration { min: ms(200), max: s(600) },
            Need::Default("\"5s\""),
            "How long a dead relay's partitions stay with it.",
        ),
        key(
            "drain_timeout",
            Shape::Duration { min: ms(0), max: s(600) },
            Need::Default("\"10s\""),
            "How long a stop waits for publishes under way.",
        ),
        key(
            "checkpoint_every",
            Shape::Duration { min: ms(1), max: s(60) },
            Need::Default("\"100ms\""),
            "How often a moved checkpoint is written.",
        ),
        key(
            "retention",
            Shape::DurationOrOff { min: ms(0), max: LONGEST },
            Need::Default("\"7d\""),
            "Events that every consumer has passed are kept this long for replays; off keeps all.",
        ),
        key(
            "prune_every",
            Shape::Duration { min: ms(10), max: s(86_400) },
            Need::Default("\"1m\""),
            "How often the relay looks for events to prune.",
        ),
        key(
            "prune_batch",
            Shape::Integer { min: 1, max: 1_000_000 },
            Need::Default("1000"),
            "Most events deleted in one transaction.",
        ),
    ],
};

/// `[admin]`.
pub(crate) const ADMIN: Section = Section {
    name: "admin",
    doc: "The listener for /metrics, /healthz and /readyz.",
    keys: &[key(
        "listen",
        Shape::Listen,
        Need::Optional,
        "Its address, or off. When left out: 127.0.0.1:9180, or a free port if that one is taken.",
    )],
};

/// `[log]`.
pub(crate) const LOG: Section = Section {
    name: "log",
    doc: "Log lines on standard error.",
    keys: &[
        key(
            "format",
            Shape::Choice(&["text", "json"]),
            Need::Default("\"text\""),
            "Text for people or JSON for programs.",
        ),
        key(
            "level",
            Shape::Text,
            Need::Default("\"info\""),
            "error, warn, info, debug or trace; or directives such as info,postrider_relay=debug.",
        ),
    ],
};

/// `[trace]`.
pub(crate) const TRACE: Section = Section {
    name: "trace",
    doc: "OpenTelemetry traces by OTLP over HTTP (needs the cargo feature otlp).",
    keys: &[
        key(
            "otlp",
            Shape::Text,
            Need::Optional,
            "The collector's traces address, such as http://127.0.0.1:4318/v1/traces.",
        ),
        key(
            "service_name",
            Shape::Text,
            Need::Default("\"postrider\""),
            "The service's name in the traces.",
        ),
        key(
            "sample",
            Shape::Fraction,
            Need::Default("1.0"),
            "The share of traces that begin here and are recorded.",
        ),
    ],
};

/// Every section with fixed keys, in the order in which the documentation shows them.
pub(crate) const SECTIONS: &[Section] = &[RELAY, ADMIN, LOG, TRACE];
