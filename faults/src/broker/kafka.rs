//! A broker that speaks Kafka's protocol: a topic of one partition. In every other schedule events
//! come in transactions, and only what is committed counts.
//!
//! What lives here: the topic, and reading it. What does not: outages (`mod.rs`), the server, and
//! the way to it that tells relays the proxy's port (`servers/src/kafka/`).
//! Invariant: relays have no more events under way, all together, than is told of the topic's
//! nature. The server forgets what it confirmed last when it is killed, so it never is: it ends in
//! order whenever it is to end. It aborts what was open then, and forgets whom it had fenced: the
//! way fences the producers of before when it has started again.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use postrider_servers::kafka::protocol::NOT_ENOUGH_REPLICAS;
use postrider_servers::kafka::{Kafka, Way};
use rdkafka::ClientConfig;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

use super::{Nature, PATIENCE, Server, Takes};
use crate::schedule::Schedule;
use crate::writer::LARGEST;

const TOPIC: &str = "events";
/// Where the sink notes what it committed.
const NOTES: &str = "notes";
/// The key of the record that this runner puts behind all others.
const END: &[u8] = b"end of the schedule";
/// With one, the topic has an order of its own.
const PARTITION: i32 = 0;
const LIMIT: &str = "max.message.bytes";
/// The largest record that the topic takes while it refuses: about one event in a hundred is
/// larger.
const SMALL_BYTES: &str = "40000";
/// Far above the largest event.
const ANY_BYTES: &str = "1000000";
/// Events in one producer of a relay's sink (`queue.buffering.max.messages`, in a hurry): few, so
/// that little is in doubt. In transactions nothing is.
const QUEUED: u64 = 16;
/// Of a relay's sink: the usual one, and the one for events that were refused together.
const PRODUCERS: u64 = 2;
/// What the proxy waits before each piece while the broker is slow.
const SLOW: Duration = Duration::from_millis(20);
/// How long the reader waits for a record before it looks at the clock.
const POLL: Duration = Duration::from_millis(100);

/// A running server with its topic.
pub(super) struct Topic {
    server: Kafka,
    way: Way,
    runtime: Runtime,
    /// Connected to the server that runs now.
    reader: Option<BaseConsumer>,
    relays: u64,
    in_transactions: bool,
}

impl Topic {
    pub(super) fn start(schedule: &Schedule) -> Result<Self> {
        let server = Kafka::start().context("start a broker of Kafka's protocol")?;
        let way = Way::start(server.address()).context("start a way to it")?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        let (relays, in_transactions) = (schedule.relays as u64, schedule.index % 2 == 1);
        let mut topic = Self { server, way, runtime, reader: None, relays, in_transactions };
        // Clocks are moved, also by months.
        let made = [TOPIC, NOTES].map(|name| {
            NewTopic::new(name, 1, TopicReplication::Fixed(1)).set("retention.ms", "-1")
        });
        topic.administer(async |admin| {
            let made = admin.create_topics(&made, &AdminOptions::new()).await?;
            Ok(made.into_iter().all(|one| one.is_ok()))
        })?;
        Ok(topic)
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.server.address().to_string());
        config.set("group.id", "judge").set("enable.auto.commit", "false");
        config.set("isolation.level", "read_committed");
        config.set("allow.auto.create.topics", "false").set("log.connection.close", "false");
        config
    }

    fn administer(
        &mut self,
        ask: impl AsyncFnOnce(&AdminClient<DefaultClientContext>) -> Result<bool>,
    ) -> Result<()> {
        let admin = self.client().create().context("make a client")?;
        let asked = async { tokio::time::timeout(PATIENCE, ask(&admin)).await };
        let done = self.runtime.block_on(asked).context("wait for the broker")?;
        ensure!(done.context("administer the topic")?, "the broker refused a change of the topic");
        Ok(())
    }

    fn reader(&mut self) -> Result<&BaseConsumer> {
        if !self.server.is_running() {
            bail!("the broker is away");
        }
        if self.reader.is_none() {
            self.reader = Some(self.client().create().context("make a client")?);
        }
        self.reader.as_ref().context("there is a reader")
    }

    /// The first record's place and the place after the last.
    fn marks(&mut self) -> Result<(i64, i64)> {
        let marks = self.reader()?.fetch_watermarks(TOPIC, PARTITION, PATIENCE);
        marks.context("ask for the topic's end")
    }

    fn put_end(&self) -> Result<()> {
        let producer: ThreadedProducer<_> = self.client().create().context("make a client")?;
        let end = BaseRecord::to(TOPIC).partition(PARTITION).key(END).payload(END);
        producer.send(end).map_err(|(error, _)| error).context("put a record at the end")?;
        producer.flush(PATIENCE).context("put a record at the end")
    }

    fn end(&mut self) -> Result<()> {
        self.reader = None;
        Ok(self.server.stop()?)
    }
}

impl Server for Topic {
    fn address(&self) -> SocketAddr {
        self.way.address()
    }

    fn nature(&self) -> Nature {
        let under_way = QUEUED * PRODUCERS * self.relays;
        let drops_repetitions = self.in_transactions;
        Nature { drops_repetitions, under_way, slow: SLOW, forgets_at_its_end: true }
    }

    fn settings(&self, port: u16) -> String {
        self.way.tell(port);
        let transactions = match self.in_transactions {
            true => format!("transactions = \"faults\"\ntransactions_topic = \"{NOTES}\"\n"),
            false => String::new(),
        };
        format!(
            "kind = \"kafka\"\nbrokers = \"127.0.0.1:{port}\"\ntopic = \"{TOPIC}\"\n{transactions}"
        )
    }

    /// Requests stay below what the proxy cuts after, so that each comes through some time.
    fn hurry(&self) -> &'static str {
        const { assert!(LARGEST >= 65_536, "batch.size below is smaller") };
        if self.in_transactions {
            return "timeout_ms = 3000\nconnect_timeout_ms = 3000\n\
                    librdkafka = { \"batch.size\" = \"65536\" }\n";
        }
        "timeout_ms = 3000\nconnect_timeout_ms = 3000\n\
         librdkafka = { \"queue.buffering.max.messages\" = \"16\", \"batch.size\" = \"65536\" }\n"
    }

    fn stop(&mut self) -> Result<()> {
        self.end()
    }

    /// In order as well: it does not sync what it confirms.
    fn kill(&mut self) -> Result<()> {
        self.end()
    }

    /// Relays can't reach it yet: none of their producers finds out what it does not know any more.
    fn start_again(&mut self) -> Result<()> {
        if !self.server.is_running() {
            self.server.start_again()?;
            if self.in_transactions {
                self.way.fence().context("fence the producers of before")?;
            }
        }
        Ok(())
    }

    fn take(&mut self, what: Takes) -> Result<()> {
        self.way.refuse((what == Takes::Nothing).then_some(NOT_ENOUGH_REPLICAS));
        let limit = match what {
            Takes::Nothing => return Ok(()),
            Takes::Small => SMALL_BYTES,
            Takes::All => ANY_BYTES,
        };
        let change = AlterConfig::new(ResourceSpecifier::Topic(TOPIC)).set(LIMIT, limit);
        let change = change.set("retention.ms", "-1");
        self.administer(async |admin| {
            let done = admin.alter_configs(&[change], &AdminOptions::new()).await?;
            Ok(done.into_iter().all(|one| one.is_ok()))
        })
    }

    fn count(&mut self) -> Result<u64> {
        let (first, end) = self.marks()?;
        ensure!(first == 0, "the topic begins at {first}: records were deleted");
        u64::try_from(end).context("an offset is not negative")
    }

    /// What is committed. Nothing before the record that it puts at the end is open then.
    fn held(&mut self) -> Result<Vec<Result<Delivered>>> {
        self.put_end()?;
        let in_transactions = self.in_transactions;
        let reader = self.reader()?;
        let mut from = TopicPartitionList::new();
        from.add_partition_offset(TOPIC, PARTITION, Offset::Beginning)?;
        reader.assign(&from).context("begin to read")?;
        let mut held = Vec::new();
        let mut heard = Instant::now();
        loop {
            let came = held.len();
            ensure!(heard.elapsed() < PATIENCE, "after {came} records no more came, nor the end");
            let Some(record) = reader.poll(POLL) else { continue };
            let record = record.context("read a record")?;
            if record.key() == Some(END) {
                return Ok(held);
            }
            let is_next = in_transactions || record.offset() == held.len() as i64;
            ensure!(is_next, "a record is missing");
            held.push(message(&record));
            heard = Instant::now();
        }
    }
}

/// The event, as it arrived.
fn message(record: &BorrowedMessage<'_>) -> Result<Delivered> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).context("read a text");
    let mut own = std::collections::HashMap::new();
    let mut headers = Vec::new();
    for header in record.headers().context("a record has no headers")?.iter() {
        let value = text(header.value.context("a header has no value")?)?;
        match header.key {
            "content-type" => drop(own.insert("content-type", value)),
            name => match name.strip_prefix("postrider-") {
                Some("id" | "topic" | "type" | "time") => drop(own.insert(name, value)),
                Some(_) | None => headers.push((name.to_ascii_lowercase(), value)),
            },
        }
    }
    headers.sort();
    let mut take =
        |name: &str| own.remove(name).with_context(|| format!("a record has no header {name}"));
    let id: Uuid = take("postrider-id")?.parse().context("read the id of a record")?;
    Ok(Delivered {
        id: EventId::from_uuid(id),
        key: text(record.key().context("a record has no key")?)?,
        topic: take("postrider-topic")?,
        event_type: take("postrider-type")?,
        content_type: take("content-type")?,
        headers,
        payload: record.payload().unwrap_or_default().to_vec(),
    })
}
