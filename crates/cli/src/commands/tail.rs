//! `tail`: follow the feed.
//!
//! What lives here: reading all partitions side by side and printing what matches. What does not:
//! checkpoints: tail has none and holds nothing back.
//! Invariant: within a partition events are printed in feed order; across partitions in the order
//! of their positions as far as pages reach. Memory holds one page a partition.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use postrider_core::{
    BatchLimit, ConsumerName, Entry, Feed, Headers, PartitionId, Position, Record, StartFrom,
};
use serde_json::{Map, Value as Json, json};

use super::{block_on, open, source_config};
use crate::args::{Global, TailArgs};
use crate::exit::SourceContext;
use crate::output::{Output, Tone, escape, time};

const PAGE: BatchLimit = BatchLimit { records: 256, bytes: 1024 * 1024 };
/// Waits at the head double between these two.
const SHORTEST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Follows the feed until the limit, the head (with `--no-follow`) or a signal.
///
/// # Errors
/// When the database fails or the start lies below the retention horizon.
pub(super) fn run(global: &Global, args: &TailArgs, output: Output) -> Result<ExitCode> {
    let config = source_config(global)?;
    block_on(async {
        let opened = open(&config).await?;
        let mut tail = Tail::begin(&*opened.feed, &args.from).await?;
        tokio::select! {
            done = tail.follow(args, output) => done?,
            interrupted = tokio::signal::ctrl_c() => interrupted.context("listen for SIGINT")?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

struct Tail<'a> {
    feed: &'a dyn Feed,
    partitions: Vec<Partition>,
    /// A page was used up: its partition's next page may begin lower than the others' rest.
    used_up: bool,
}

struct Partition {
    id: PartitionId,
    after: Position,
    page: VecDeque<Entry>,
}

impl<'a> Tail<'a> {
    async fn begin(feed: &'a dyn Feed, from: &StartFrom) -> Result<Self> {
        let nobody = ConsumerName::new("postrider-tail")?;
        let ids = feed.partitions(&nobody).await.source_context("list partitions")?;
        let mut partitions = Vec::new();
        for id in ids {
            let after = match from {
                StartFrom::Oldest => Position::START,
                StartFrom::Now => feed.head(&id).await.source_context("read the head")?,
                StartFrom::Time(time) => {
                    feed.position_at(&id, *time).await.source_context("find the time")?
                }
                StartFrom::After(position) => position.clone(),
            };
            partitions.push(Partition { id, after, page: VecDeque::new() });
        }
        Ok(Self { feed, partitions, used_up: false })
    }

    async fn follow(&mut self, args: &TailArgs, output: Output) -> Result<()> {
        let mut left = args.limit;
        let mut wait = SHORTEST_WAIT;
        loop {
            let news = self.fill().await?;
            while let Some((partition, entry)) = self.next() {
                if !matches(args, &entry) {
                    continue;
                }
                print(self.feed, &partition, &entry, args.payload, output)?;
                left = left.map(|left| left - 1);
                if left == Some(0) {
                    return Ok(());
                }
            }
            if news {
                wait = SHORTEST_WAIT;
                continue;
            }
            if args.no_follow {
                return Ok(());
            }
            // Whichever comes first; a change that is missed is found at the next look.
            let _ = tokio::time::timeout(wait, self.feed.changed()).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// Reads a page of every partition that has none. Says whether anything came, or may at once.
    async fn fill(&mut self) -> Result<bool> {
        self.used_up = false;
        let mut news = false;
        let mut ended = Vec::new();
        for (index, partition) in self.partitions.iter_mut().enumerate() {
            if !partition.page.is_empty() {
                news = true;
                continue;
            }
            let page = self
                .feed
                .read(&partition.id, &partition.after, PAGE)
                .await
                .source_context(format!("read partition {}", partition.id))?;
            news |= !self.feed.is_head(&page, &partition.after);
            partition.after = page.position;
            partition.page = page.entries.into();
            if let (true, Some(successors)) = (partition.page.is_empty(), page.ended) {
                ended.push((index, successors));
            }
        }
        for (index, successors) in ended.into_iter().rev() {
            self.partitions.remove(index);
            for successor in successors {
                if self.partitions.iter().all(|known| known.id != successor.partition) {
                    self.partitions.push(Partition {
                        id: successor.partition,
                        after: successor.from,
                        page: VecDeque::new(),
                    });
                    news = true;
                }
            }
        }
        Ok(news)
    }

    /// The entry with the lowest position; none once a page is used up.
    fn next(&mut self) -> Option<(PartitionId, Entry)> {
        if self.used_up {
            return None;
        }
        let waiting = self.partitions.iter_mut().filter(|partition| !partition.page.is_empty());
        let lowest = waiting.min_by(|a, b| a.first_position().cmp(&b.first_position()))?;
        let entry = lowest.page.pop_front()?;
        self.used_up = lowest.page.is_empty();
        Some((lowest.id.clone(), entry))
    }
}

impl Partition {
    fn first_position(&self) -> Option<&[u8]> {
        self.page.front().map(|entry| entry.position().as_bytes())
    }
}

fn matches(args: &TailArgs, entry: &Entry) -> bool {
    let key = args.key.as_ref().is_none_or(|key| entry.key() == Some(key));
    let topic = args.topic.as_ref().is_none_or(|topic| match entry {
        Entry::Record(record) => record.event.topic() == topic,
        Entry::Malformed(_) => false,
    });
    key && topic
}

fn print(
    feed: &dyn Feed,
    partition: &PartitionId,
    entry: &Entry,
    payload: bool,
    output: Output,
) -> Result<()> {
    match entry {
        Entry::Record(record) if output.json => {
            output.json_line(&record_json(partition, record, payload))?;
        }
        Entry::Record(record) => print_record(feed, partition, record, payload, output)?,
        Entry::Malformed(malformed) if output.json => output.json_line(&json!({
            "partition": partition.as_str(),
            "position": malformed.position.to_string(),
            "appendedAt": time(malformed.appended_at),
            "malformed": malformed.reason,
        }))?,
        Entry::Malformed(malformed) => {
            let text = format!("unreadable: {}", escape(&malformed.reason));
            let text = output.paint(Tone::Bad, text);
            let position = feed.describe(&malformed.position);
            output.line(format!("{position}  {partition}  {text}"))?;
        }
    }
    Ok(())
}

fn print_record(
    feed: &dyn Feed,
    partition: &PartitionId,
    record: &Record,
    payload: bool,
    output: Output,
) -> Result<()> {
    let event = &record.event;
    output.line(format!(
        "{}  {}  {partition}  {}  key={}  topic={}  id={}  {} bytes",
        time(record.appended_at),
        output.paint(Tone::Faint, feed.describe(&record.position)),
        output.paint(Tone::Strong, escape(event.event_type().as_str())),
        escape(event.key().as_str()),
        escape(event.topic().as_str()),
        event.id(),
        event.payload().len(),
    ))?;
    if payload {
        for (name, value) in event.headers().iter() {
            output.line(format!("    {name}: {}", escape(value)))?;
        }
        let shown = match std::str::from_utf8(event.payload()) {
            Ok(text) => escape(text).into_owned(),
            Err(_) => format!("base64 {}", BASE64.encode(event.payload())),
        };
        output.line(format!("    {shown}"))?;
    }
    Ok(())
}

fn record_json(partition: &PartitionId, record: &Record, payload: bool) -> Json {
    let event = &record.event;
    let mut document = json!({
        "position": record.position.to_string(),
        "partition": partition.as_str(),
        "appendedAt": time(record.appended_at),
        "id": event.id().to_string(),
        "key": event.key().as_str(),
        "topic": event.topic().as_str(),
        "type": event.event_type().as_str(),
        "contentType": event.content_type().as_str(),
        "payloadBytes": event.payload().len(),
    });
    if payload {
        document["headers"] = headers_json(event.headers());
        insert_payload(&mut document, event.payload());
    }
    document
}

/// Headers as an object.
pub(super) fn headers_json(headers: &Headers) -> Json {
    let map: Map<String, Json> =
        headers.iter().map(|(name, value)| (name.to_owned(), Json::from(value))).collect();
    Json::Object(map)
}

/// Adds the bytes as `payload` if they are text, else as `payloadBase64`.
pub(super) fn insert_payload(document: &mut Json, payload: &Bytes) {
    match std::str::from_utf8(payload) {
        Ok(text) => document["payload"] = Json::from(text),
        Err(_) => document["payloadBase64"] = Json::from(BASE64.encode(payload)),
    }
}
