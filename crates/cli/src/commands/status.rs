//! `status`: where everything stands.
//!
//! What lives here: one picture of partitions, leases, consumers and lag, and what needs attention.
//! What does not: the live view of one relay (`/readyz`, `/metrics`).
//! Invariant: read only; published + parked + dropped + pending = appended since a consumer began.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use postrider_core::{
    Clock, ConsumerName, ConsumerProgress, DeadLetterFilter, DeadLetterState, GroupName, LeaseInfo,
    Timestamp,
};
use postrider_relay::SystemClock;
use serde_json::{Value as Json, json};

use super::{block_on, log_standing, open, source_config};
use crate::args::{Global, StatusArgs};
use crate::compose::{LogMirror, LogStanding, Opened};
use crate::config::Config;
use crate::exit::{SourceContext, Usage};
use crate::output::{Cell, Output, Tone, escape, roughly, time};

/// A consumer with pending events whose checkpoint has not moved for this long is stuck or dead.
const STALE_AFTER: Duration = Duration::from_secs(60);
/// The same, when it is rather dead: what it has not passed is kept for ever.
const DEAD_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// Prints the picture.
///
/// # Errors
/// When the database fails.
pub(super) fn run(global: &Global, args: &StatusArgs, output: Output) -> Result<ExitCode> {
    let config = source_config(global)?;
    let group = match &args.group {
        Some(name) => GroupName::new(name.as_str()).map_err(|error| Usage(error.to_string()))?,
        None => config.relay.group.clone(),
    };
    block_on(async {
        let opened = open(&config).await?;
        let picture = Picture::take(&opened, group).await?;
        let mut warnings = picture.warnings(&config);
        let advice = opened.advice().await;
        warnings.extend(advice.attention);
        if output.json {
            output.json_document(&picture.json(&opened, &warnings, &advice.weaker))?;
        } else {
            picture.print(&opened, &warnings, &advice.weaker, output)?;
        }
        let attention = args.check && !warnings.is_empty();
        Ok(if attention { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

struct Picture {
    group: GroupName,
    now: Timestamp,
    heads: Vec<Head>,
    log: Option<LogStanding>,
    mirror: Option<LogMirror>,
    leases: Vec<LeaseInfo>,
    progress: Vec<ConsumerProgress>,
    /// Whether a dead letter waits for a person.
    any_parked: bool,
}

/// Where a partition ends now.
struct Head {
    partition: String,
    position: String,
    /// The same for people.
    shown: String,
}

/// One consumer, its partitions taken together.
#[derive(Default)]
struct Total {
    published: u64,
    parked: u64,
    dropped: u64,
    pending: u64,
    oldest: Option<Timestamp>,
    moved: Timestamp,
}

impl Total {
    fn appended(&self) -> u64 {
        self.published + self.parked + self.dropped + self.pending
    }

    fn lag(&self, now: Timestamp) -> Duration {
        self.oldest.map_or(Duration::ZERO, |oldest| now.since(oldest))
    }
}

fn totals(progress: &[ConsumerProgress]) -> BTreeMap<&ConsumerName, Total> {
    let mut totals: BTreeMap<&ConsumerName, Total> = BTreeMap::new();
    for one in progress {
        let total = totals.entry(&one.consumer).or_default();
        total.published += one.checkpoint.published;
        total.parked += one.parked;
        total.dropped += one.dropped;
        total.pending += one.pending;
        total.moved = total.moved.max(one.checkpoint.updated_at);
        total.oldest = match (total.oldest, one.oldest_pending_at) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    totals
}

/// Consumers that no sink of the configuration is: what they have not passed is kept for ever.
pub(super) fn strays(progress: &[ConsumerProgress], config: &Config) -> Vec<String> {
    let known = |name: &ConsumerName| config.sinks.iter().any(|sink| sink.name == *name);
    let strays = totals(progress).into_iter().filter(|(name, _)| !known(name));
    strays
        .map(|(name, total)| {
            let shown = name.as_str();
            format!(
                "consumer {shown:?} is no sink of {}: its checkpoint keeps events from being \
                 pruned ({} pending); if nobody reads as it any more: postrider consumers remove \
                 {shown:?}",
                config.file.display(),
                total.pending
            )
        })
        .collect()
}

impl Picture {
    async fn take(opened: &Opened, group: GroupName) -> Result<Self> {
        let nobody = ConsumerName::new("postrider-status")?;
        let log = match &opened.log {
            Some(log) => Some(log.standing().await.source_context("look at the log")?),
            None => None,
        };
        let mirror = match &opened.log {
            Some(log) => log.mirror().await,
            None => None,
        };
        let mut heads = Vec::new();
        let partitions = opened.source.partitions(&nobody).await;
        for partition in partitions.source_context("list partitions")? {
            let (position, shown) = match &log {
                Some(log) => (log.head.clone(), log.head.clone()),
                None => {
                    let head =
                        opened.feed.head(&partition).await.source_context("read the head")?;
                    (head.to_string(), opened.feed.describe(&head))
                }
            };
            heads.push(Head { partition: partition.as_str().to_owned(), position, shown });
        }
        let leases = opened.store.leases(&group).await.source_context("read leases")?;
        let progress = opened.store.progress().await.source_context("read checkpoints")?;
        let parked = DeadLetterFilter {
            state: Some(DeadLetterState::Parked),
            ..DeadLetterFilter::default()
        };
        // One is enough to know: each comes with its payload.
        let parked =
            opened.store.list(&parked, None, 1).await.source_context("read dead letters")?;
        let any_parked = !parked.is_empty();
        let now = SystemClock.now();
        Ok(Self { group, now, heads, log, mirror, leases, progress, any_parked })
    }

    fn totals(&self) -> BTreeMap<&ConsumerName, Total> {
        totals(&self.progress)
    }

    /// What needs attention, a sentence each, with the remedy.
    fn warnings(&self, config: &Config) -> Vec<String> {
        let mut warnings = Vec::new();
        let totals = self.totals();
        let pending: u64 = totals.values().map(|total| total.pending).sum();
        let live = self.leases.iter().filter(|lease| !lease.remaining.is_zero()).count();
        if live == 0 && (pending > 0 || totals.is_empty()) {
            warnings.push(format!(
                "no relay of group {:?} is running; start postrider run",
                self.group.as_str()
            ));
        }
        if !config.sinks.is_empty() {
            warnings.extend(strays(&self.progress, config));
        }
        for (name, total) in &totals {
            let still = self.now.since(total.moved);
            if total.pending > 0 && still > STALE_AFTER {
                let name = name.as_str();
                let dead = match still > DEAD_AFTER {
                    true => format!(
                        "; they are kept until it moves: if nobody reads as it any more, \
                         postrider consumers remove {name:?}"
                    ),
                    false => String::new(),
                };
                warnings.push(format!(
                    "consumer {name:?} has not moved for {} with {} events pending; look at the \
                     relay's log and /readyz{dead}",
                    roughly(still),
                    total.pending
                ));
            }
        }
        for sink in &config.sinks {
            if !totals.contains_key(&sink.name) {
                let name = sink.name.as_str();
                warnings.push(format!("sink {name:?} has no checkpoint yet; it has not run"));
            }
        }
        if self.any_parked {
            let letters: u64 = totals.values().map(|total| total.parked).sum();
            warnings.push(format!(
                "there are {letters} dead letters, and parked ones need a person: postrider \
                 dead-letters list --state parked"
            ));
        }
        warnings
    }

    fn json(&self, opened: &Opened, warnings: &[String], weaker: &[String]) -> Json {
        let partitions = self.heads.iter().map(|Head { partition, position, .. }| {
            let lease = self.leases.iter().find(|lease| lease.partition.as_str() == partition);
            json!({
                "partition": partition,
                "head": position,
                "lease": lease.map(|lease| json!({
                    "holder": lease.holder.as_str(),
                    "epoch": lease.epoch.get(),
                    "remainingMs": u64::try_from(lease.remaining.as_millis()).unwrap_or(u64::MAX),
                })),
            })
        });
        let consumers = self.totals().into_iter().map(|(name, total)| {
            let own = self.progress.iter().filter(|one| one.consumer == *name);
            json!({
                "consumer": name.as_str(),
                "published": total.published,
                "parked": total.parked,
                "dropped": total.dropped,
                "pending": total.pending,
                "appended": total.appended(),
                "lagSeconds": total.lag(self.now).as_secs_f64(),
                "partitions": own.map(progress_json).collect::<Vec<_>>(),
            })
        });
        json!({
            "source": opened.shown,
            "identity": opened.source.identity(),
            "schemaVersion": opened.schema_version,
            "group": self.group.as_str(),
            "partitions": partitions.collect::<Vec<_>>(),
            "consumers": consumers.collect::<Vec<_>>(),
            "log": self.log.as_ref().map(|log| log_standing::json(log, self.mirror.as_ref())),
            "warnings": warnings,
            "advice": weaker,
        })
    }

    fn print(
        &self,
        opened: &Opened,
        warnings: &[String],
        weaker: &[String],
        output: Output,
    ) -> Result<()> {
        output.line(format!(
            "{}, schema version {}, group {}",
            output.paint(Tone::Strong, opened.shown.as_str()),
            opened.schema_version,
            escape(self.group.as_str())
        ))?;
        output.line("")?;
        let rows = self.heads.iter().map(|Head { partition, shown, .. }| {
            let lease = self.leases.iter().find(|lease| lease.partition.as_str() == partition);
            let (holder, left) = match lease {
                Some(lease) if !lease.remaining.is_zero() => {
                    (lease.holder.as_str().to_owned(), roughly(lease.remaining))
                }
                Some(_) | None => ("-".to_owned(), "-".to_owned()),
            };
            let epoch = lease.map_or("-".to_owned(), |lease| lease.epoch.get().to_string());
            vec![
                Cell::plain(partition),
                Cell::plain(shown),
                Cell::plain(epoch),
                Cell::plain(left),
                Cell::plain(holder),
            ]
        });
        output.table(
            &["PARTITION", "HEAD", "EPOCH", "LEASE", "HELD BY"],
            &rows.collect::<Vec<_>>(),
        )?;
        output.line("")?;
        let totals = self.totals();
        let rows = totals.iter().map(|(name, total)| {
            let tone = if total.parked > 0 { Tone::Bad } else { Tone::Good };
            vec![
                Cell::plain(name.as_str()),
                Cell::number(total.published),
                Cell::toned(total.parked.to_string(), tone),
                Cell::number(total.dropped),
                Cell::number(total.pending),
                Cell::number(total.appended()),
                Cell::plain(roughly(total.lag(self.now))),
                Cell::plain(time(total.moved)),
            ]
        });
        let heading = [
            "CONSUMER",
            "PUBLISHED",
            "PARKED",
            "DROPPED",
            "PENDING",
            "APPENDED",
            "LAG",
            "CHECKPOINT",
        ];
        output.table(&heading, &rows.collect::<Vec<_>>())?;
        if let Some(log) = &self.log {
            output.line("")?;
            log_standing::print(log, self.mirror.as_ref(), output)?;
        }
        print_advice(warnings, weaker, output)
    }
}

/// What needs attention, and what could be better.
fn print_advice(warnings: &[String], weaker: &[String], output: Output) -> Result<()> {
    if !(warnings.is_empty() && weaker.is_empty()) {
        output.line("")?;
    }
    let attention = warnings.iter().map(|text| (Tone::Warn, "attention:", text));
    let advice = weaker.iter().map(|text| (Tone::Faint, "advice:", text));
    for (tone, word, text) in attention.chain(advice) {
        output.line(format!("{} {}", output.paint(tone, word), escape(text)))?;
    }
    Ok(())
}

/// One consumer's standing in one partition.
pub(super) fn progress_json(one: &ConsumerProgress) -> Json {
    json!({
        "consumer": one.consumer.as_str(),
        "partition": one.partition.as_str(),
        "position": one.checkpoint.position.to_string(),
        "updatedAt": time(one.checkpoint.updated_at),
        "published": one.checkpoint.published,
        "parked": one.parked,
        "dropped": one.dropped,
        "pending": one.pending,
        "oldestPendingAt": one.oldest_pending_at.map(time),
        "ended": one.ended,
    })
}
