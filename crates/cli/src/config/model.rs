//! What a configuration means, once all its values are known.
//!
//! What lives here: the typed parts of a `Config` and the rules between values. What does not:
//! reading the file (`parse.rs`), making a store or sink of it (`compose.rs`).
//! Invariant: built only by `build`, which reports every rule that is broken.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use postrider_core::{ConsumerName, GroupName, OnFailure, RetryPolicy, StartFrom};

use super::value::{Fields, show_duration};
use super::{Demand, Place, Problem};
use crate::logging;

/// A whole configuration.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The file it came from, for messages.
    pub(crate) file: PathBuf,
    /// `[source]`.
    pub(crate) source: SourceConfig,
    /// Every `[[sink]]`.
    pub(crate) sinks: Vec<SinkConfig>,
    /// `[relay]`.
    pub(crate) relay: RelayConfig,
    /// `[admin]`.
    pub(crate) admin: AdminConfig,
    /// `[log]`.
    pub(crate) log: LogConfig,
    /// `[trace]`.
    pub(crate) trace: TraceConfig,
}

/// `[source]`: its kind, and the values that the kind knows.
#[derive(Debug, Clone)]
pub(crate) struct SourceConfig {
    /// Which kind.
    pub(crate) kind: &'static str,
    /// The kind's values.
    pub(crate) fields: Fields,
    /// Where the section stands.
    pub(crate) place: Place,
    /// Where relative paths begin.
    pub(crate) folder: PathBuf,
}

/// One `[[sink]]`.
#[derive(Debug, Clone)]
pub(crate) struct SinkConfig {
    /// Which kind.
    pub(crate) kind: &'static str,
    /// Its consumer name.
    pub(crate) name: ConsumerName,
    /// Where it begins without a checkpoint.
    pub(crate) from: StartFrom,
    /// How it meets failures.
    pub(crate) retry: RetryPolicy,
    /// When a publish has an unknown fate.
    pub(crate) publish_timeout: Duration,
    /// Its byte budget.
    pub(crate) budget_bytes: usize,
    /// The kind's values.
    pub(crate) fields: Fields,
    /// Where the section stands.
    pub(crate) place: Place,
    /// Its key's prefix, such as `sink[0]`.
    pub(crate) prefix: String,
    /// Where relative paths begin.
    pub(crate) folder: PathBuf,
}

/// `[relay]`.
#[derive(Debug, Clone)]
pub(crate) struct RelayConfig {
    /// Whose leases it shares.
    pub(crate) group: GroupName,
    /// Time to live of a lease.
    pub(crate) lease_ttl: Duration,
    /// How long a stop waits.
    pub(crate) drain_timeout: Duration,
    /// How often a checkpoint is written.
    pub(crate) checkpoint_every: Duration,
    /// How long passed events are kept; none keeps them for ever.
    pub(crate) retention: Option<Duration>,
    /// How often to look for events to prune.
    pub(crate) prune_every: Duration,
    /// Most events deleted in one transaction.
    pub(crate) prune_batch: u32,
}

/// `[admin]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdminConfig {
    /// Nothing was said: the usual port, or a free one.
    Usual,
    /// This address, or an error.
    At(SocketAddr),
    /// No listener.
    Off,
}

/// `[log]`.
#[derive(Debug, Clone)]
pub(crate) struct LogConfig {
    /// Lines as JSON.
    pub(crate) json: bool,
    /// Level or directives.
    pub(crate) level: String,
}

/// `[trace]`.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "read by the otlp exporter alone"))]
pub(crate) struct TraceConfig {
    /// The collector; none exports nothing.
    pub(crate) otlp: Option<String>,
    /// The service's name.
    pub(crate) service_name: String,
    /// The share of traces that is recorded.
    pub(crate) sample: f64,
}

/// What the parser found.
#[derive(Default)]
pub(super) struct Parts {
    /// `[source]`, if it could be read.
    pub(super) source: Option<SourcePart>,
    /// Every readable `[[sink]]`.
    pub(super) sinks: Vec<SinkPart>,
    /// The sections with fixed keys.
    pub(super) sections: Vec<(&'static str, Fields)>,
}

/// A readable `[source]`.
pub(super) struct SourcePart {
    /// Its kind.
    pub(super) kind: &'static str,
    /// Its values.
    pub(super) fields: Fields,
    /// Where it stands.
    pub(super) place: Place,
}

/// A readable `[[sink]]`.
pub(super) struct SinkPart {
    /// Its kind.
    pub(super) kind: &'static str,
    /// Its values.
    pub(super) fields: Fields,
    /// Where it stands.
    pub(super) place: Place,
    /// Its key's prefix.
    pub(super) prefix: String,
}

/// Makes a configuration of the parts; rules that are broken are added to `problems`.
pub(super) fn build(
    parts: Parts,
    file: &Path,
    demand: Demand,
    problems: &mut Vec<Problem>,
) -> Option<Config> {
    let folder = file.parent().unwrap_or(Path::new("")).to_owned();
    let mut rules = Rules { problems };
    let section = |name| &find(&parts.sections, name).1;
    let relay = rules.relay(section("relay"));
    let admin = match section("admin").listen("listen") {
        None => AdminConfig::Usual,
        Some(Some(address)) => AdminConfig::At(address),
        Some(None) => AdminConfig::Off,
    };
    let log = rules.log(section("log"));
    let trace = rules.trace(section("trace"));
    if demand == Demand::SourceAndSinks && parts.sinks.is_empty() && rules.problems.is_empty() {
        let text = "is missing; add [[sink]] with kind, so that events have somewhere to go";
        rules.add(Some(Place { line: 1, column: 1 }), "sink", text.to_owned());
    }
    let mut sinks: Vec<SinkConfig> = Vec::new();
    for part in parts.sinks {
        if let Some(sink) = rules.sink(part, &sinks, &folder) {
            sinks.push(sink);
        }
    }
    let SourcePart { kind, fields, place } = parts.source?;
    let source = SourceConfig { kind, fields, place, folder };
    Some(Config { file: file.to_owned(), source, sinks, relay: relay?, admin, log, trace })
}

fn find<'a>(sections: &'a [(&'static str, Fields)], name: &str) -> &'a (&'static str, Fields) {
    let found = sections.iter().find(|(have, _)| *have == name);
    found.expect("the parser gives every section, with defaults when it is left out")
}

struct Rules<'a> {
    problems: &'a mut Vec<Problem>,
}

impl Rules<'_> {
    fn add(&mut self, place: Option<Place>, key: &str, text: String) {
        self.problems.push(Problem { place, key: key.to_owned(), text });
    }

    fn relay(&mut self, fields: &Fields) -> Option<RelayConfig> {
        let group = fields.text("group").unwrap_or("default");
        let group = GroupName::new(group)
            .map_err(|error| self.add(fields.place("group"), "relay.group", error.to_string()))
            .ok()?;
        let lease_ttl = fields.duration("lease_ttl").unwrap_or_default();
        let checkpoint_every = fields.duration("checkpoint_every").unwrap_or_default();
        if checkpoint_every >= lease_ttl && !lease_ttl.is_zero() {
            let text = format!(
                "{} is not shorter than lease_ttl ({}); a take-over would repeat too much",
                show_duration(checkpoint_every),
                show_duration(lease_ttl)
            );
            let place = fields.place("checkpoint_every").or(fields.place("lease_ttl"));
            self.add(place, "relay.checkpoint_every", text);
        }
        Some(RelayConfig {
            group,
            lease_ttl,
            drain_timeout: fields.duration("drain_timeout").unwrap_or_default(),
            checkpoint_every,
            retention: fields.duration("retention"),
            prune_every: fields.duration("prune_every").unwrap_or_default(),
            prune_batch: u32::try_from(fields.number("prune_batch").unwrap_or_default())
                .expect("the table of keys bounds it"),
        })
    }

    fn log(&mut self, fields: &Fields) -> LogConfig {
        let level = fields.text("level").unwrap_or("info").to_owned();
        if let Err(text) = logging::check_level(&level) {
            self.add(fields.place("level"), "log.level", text);
        }
        LogConfig { json: fields.text("format") == Some("json"), level }
    }

    fn trace(&mut self, fields: &Fields) -> TraceConfig {
        let otlp = fields.text("otlp").map(str::to_owned);
        if let Some(url) = &otlp {
            let place = fields.place("otlp");
            if cfg!(not(feature = "otlp")) {
                let text = "OTLP is not in this build; build with --features otlp".to_owned();
                self.add(place, "trace.otlp", text);
            } else if !(url.starts_with("http://") || url.starts_with("https://")) {
                let text = "is no web address; write http://HOST:4318/v1/traces".to_owned();
                self.add(place, "trace.otlp", text);
            }
        }
        TraceConfig {
            otlp,
            service_name: fields.text("service_name").unwrap_or("postrider").to_owned(),
            sample: fields.fraction("sample").unwrap_or(1.0),
        }
    }

    fn sink(&mut self, part: SinkPart, before: &[SinkConfig], folder: &Path) -> Option<SinkConfig> {
        let SinkPart { kind, fields, place, prefix } = part;
        let name_at = fields.place("name").or(Some(place));
        let key = format!("{prefix}.name");
        let name = ConsumerName::new(fields.text("name").unwrap_or(kind))
            .map_err(|error| self.add(name_at, &key, error.to_string()))
            .ok()?;
        if let Some(other) = before.iter().find(|other| other.name == name) {
            let text = format!(
                "{:?} is also the name of {} (line {}); give each sink a name of its own",
                name.as_str(),
                other.prefix,
                other.place.line
            );
            self.add(name_at, &key, text);
        }
        let retry = self.retry(&fields, &prefix);
        let publish_timeout = fields.duration("publish_timeout").unwrap_or_default();
        self.time_for_an_answer(&fields, publish_timeout, &prefix);
        Some(SinkConfig {
            kind,
            name,
            from: fields.start("from").cloned().unwrap_or(StartFrom::Oldest),
            retry,
            publish_timeout,
            budget_bytes: usize::try_from(fields.number("budget").unwrap_or_default())
                .unwrap_or(usize::MAX),
            fields,
            place,
            prefix,
            folder: folder.to_owned(),
        })
    }

    /// A call begins to send for a third of `publish_timeout`, so that an answer may be waited for
    /// in the other two. Of what comes later the relay has forgotten the call.
    fn time_for_an_answer(&mut self, fields: &Fields, publish_timeout: Duration, prefix: &str) {
        let Some(timeout_ms) = fields.number("timeout_ms") else { return };
        let timeout = Duration::from_millis(timeout_ms);
        if publish_timeout.is_zero() || timeout <= publish_timeout * 2 / 3 {
            return;
        }
        let text = format!(
            "{timeout_ms} ms are more than two thirds of publish_timeout ({}), after which the \
             call is forgotten and what it stored is sent again; give {} at most, or \
             publish_timeout = \"{}\"",
            show_duration(publish_timeout),
            (publish_timeout * 2 / 3).as_millis(),
            show_duration(Duration::from_millis((timeout_ms * 3).div_ceil(2))),
        );
        let place = fields.place("timeout_ms").or(fields.place("publish_timeout"));
        self.add(place, &format!("{prefix}.timeout_ms"), text);
    }

    fn retry(&mut self, fields: &Fields, prefix: &str) -> RetryPolicy {
        let base_delay = fields.duration("base_delay").unwrap_or_default();
        let max_delay = fields.duration("max_delay").unwrap_or_default();
        if base_delay > max_delay && fields.duration("max_delay").is_some() {
            let text = format!(
                "{} is longer than max_delay ({}); shorten it or raise max_delay",
                show_duration(base_delay),
                show_duration(max_delay)
            );
            let place = fields.place("base_delay").or(fields.place("max_delay"));
            self.add(place, &format!("{prefix}.base_delay"), text);
        }
        RetryPolicy {
            base_delay,
            max_delay,
            max_attempts: u32::try_from(fields.number("max_attempts").unwrap_or(12))
                .expect("the table of keys bounds it"),
            on_failure: match fields.text("on_failure") {
                Some("skip") => OnFailure::Skip,
                Some("halt") => OnFailure::Halt,
                _ => OnFailure::Park,
            },
        }
    }
}
