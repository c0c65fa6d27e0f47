//! Three brokers as the sinks of one relay: what is wrong with one is nobody else's.

use std::time::Duration;

use async_nats::jetstream::{self, stream};
use lapin::options::{
    BasicGetOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_servers::nats::{Nats, Version};
use postrider_servers::proxy::Proxy;
use postrider_servers::rabbitmq::{self, RabbitMq};
use postrider_servers::redis::Redis;
use postrider_store_sqlite::rusqlite;
use rustix::process::Signal;
use tokio::runtime::Runtime;
use uuid::Uuid;

use crate::harness::{Home, Running, address_in, eventually, http};

const STREAM: &str = "EVENTS";
const SUBJECTS: &str = "events.>";
/// Beyond the limit of each of the brokers that have one.
const LARGE_BYTES: usize = 1_300_000;
const LIMIT_BYTES: &str = "1048576";
/// Each of three sinks with its own.
const SINKS: [&str; 3] = ["nats", "rabbitmq", "redis"];

/// The servers, and what tests do to them, on a runtime of its own.
struct Brokers {
    runtime: Runtime,
    nats: Nats,
    redis: Redis,
    /// One's own where it is set otherwise; else the one that tests share.
    _rabbitmq: Option<RabbitMq>,
    rabbitmq_url: String,
    /// Exchange and queue, under a name that nobody else has.
    name: String,
    channel: Channel,
    _connection: Connection,
}

impl Brokers {
    /// No stream, an exchange and an unbound queue, and nothing in Redis.
    fn start(rabbitmq: Option<RabbitMq>, redis: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let url = match &rabbitmq {
            Some(own) => own.url(),
            None => rabbitmq::shared().expect("a server"),
        };
        let name = format!("events-{}", Uuid::new_v4());
        let (channel, connection) = runtime.block_on(async {
            let limited = format!("{url}/%2f?frame_max=131072");
            let connection = Connection::connect(&limited, ConnectionProperties::default()).await;
            let connection = connection.expect("it answers");
            let channel = connection.create_channel().await.expect("a channel");
            let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
            let (kind, none) = (ExchangeKind::Topic, FieldTable::default());
            let made = channel.exchange_declare(name.as_str().into(), kind, durable, none);
            made.await.expect("made");
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            let made = channel.queue_declare(name.as_str().into(), durable, FieldTable::default());
            made.await.expect("made");
            (channel, connection)
        });
        Self {
            runtime,
            nats: Nats::start(Version::New, "").expect("a server"),
            redis: Redis::start(redis).expect("a server"),
            _rabbitmq: rabbitmq,
            rabbitmq_url: url,
            name,
            channel,
            _connection: connection,
        }
    }

    async fn context(&self) -> jetstream::Context {
        jetstream::new(async_nats::connect(self.nats.url()).await.expect("it answers"))
    }

    fn make_stream(&self) {
        let config = stream::Config {
            name: STREAM.into(),
            subjects: vec![SUBJECTS.into()],
            ..stream::Config::default()
        };
        self.runtime
            .block_on(async { self.context().await.create_stream(config).await.map(drop) })
            .expect("made");
    }

    fn bind(&self) {
        let name = || self.name.as_str().into();
        let (options, none) = (QueueBindOptions::default(), FieldTable::default());
        let bound = self.channel.queue_bind(name(), name(), "#".into(), options, none);
        self.runtime.block_on(bound).expect("bound");
    }

    fn unbind(&self) {
        let name = || self.name.as_str().into();
        let unbound = self.channel.queue_unbind(name(), name(), "#".into(), FieldTable::default());
        self.runtime.block_on(unbound).expect("unbound");
    }

    fn tell_redis(&self, words: &[&str]) -> redis::Value {
        let client = redis::Client::open(self.redis.url()).expect("an address");
        let mut connection = client.get_connection().expect("it answers");
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]).query(&mut connection).expect("permitted")
    }

    /// How many messages each broker has.
    fn counts(&self) -> [u64; 3] {
        let nats = self.runtime.block_on(async {
            let stream = self.context().await.get_stream(STREAM).await;
            stream.map_or(0, |stream| stream.cached_info().state.messages)
        });
        let passive = QueueDeclareOptions { passive: true, durable: true, ..Default::default() };
        let name = self.name.as_str().into();
        let queue = self.channel.queue_declare(name, passive, FieldTable::default());
        let queue = self.runtime.block_on(queue).expect("the queue");
        let redis::Value::Int(redis) = self.tell_redis(&["XLEN", "events"]) else {
            panic!("a length is a number")
        };
        [nats, u64::from(queue.message_count()), redis.unsigned_abs()]
    }

    /// The configuration, with these lines for each of the sinks.
    fn config(&self, redis_port: u16, more: [&str; 3]) -> String {
        let [nats, rabbitmq, redis] = more;
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n\
             [[sink]]\nname = \"nats\"\nkind = \"nats\"\nservers = [\"{}\"]\n\
             subject = \"events.{{topic}}\"\n{nats}\n\n\
             [[sink]]\nname = \"rabbitmq\"\nkind = \"rabbitmq\"\nservers = [\"{}\"]\n\
             exchange = \"{}\"\n{rabbitmq}\n\n\
             [[sink]]\nname = \"redis\"\nkind = \"redis\"\nstream = \"events\"\n\
             url = \"redis://127.0.0.1:{redis_port}\"\n{redis}\n\n\
             [admin]\nlisten = \"127.0.0.1:0\"\n",
            self.nats.url(),
            self.rabbitmq_url,
            self.name
        )
    }
}

/// Appends an event of so many bytes for each key.
fn append(home: &Home, events: &[(&str, usize)]) {
    let event = |(key, bytes): &(&str, usize)| {
        NewEvent::builder(
            Key::new(*key).expect("valid"),
            Topic::new("orders").expect("valid"),
            EventType::new("OrderPlaced").expect("valid"),
        )
        .payload(ContentType::new("text/plain").expect("valid"), vec![b'x'; *bytes])
        .build()
        .expect("valid")
    };
    let events: Vec<NewEvent> = events.iter().map(event).collect();
    let mut connection = rusqlite::Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction().expect("begun");
    postrider_store_sqlite::append(&tx, &events).expect("appended");
    tx.commit().expect("committed");
}

/// Fifty small events of as many keys.
fn append_many(home: &Home) {
    let keys: Vec<String> = (0..50).map(|n| format!("key-{n}")).collect();
    let events: Vec<(&str, usize)> = keys.iter().map(|key| (key.as_str(), 10)).collect();
    append(home, &events);
}

fn published(text: &str, sink: &str) -> u64 {
    let name = format!("postrider_published_total{{sink=\"{sink}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(name.as_str()));
    line.map_or(0, |count| count.parse().expect("a count"))
}

/// Sink, state and reason of each dead letter.
fn letters(home: &Home) -> Vec<(String, String, String)> {
    let list = home.postrider(&["dead-letters", "list", "--json"]).expect(0).json_lines();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let letter =
        |one: &serde_json::Value| (text(&one["sink"]), text(&one["state"]), text(&one["reason"]));
    list.iter().map(letter).collect()
}

fn end(relay: Running) {
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

/// One sink has no stream, then another one's queue is taken away, then the third one falls silent:
/// the other two flow each time, readiness names the one, and it flows again without a restart.
#[test]
fn one_bad_sink_of_three_holds_up_no_other_and_is_named() {
    let brokers = Brokers::start(None, "");
    brokers.bind();
    let proxy = Proxy::start(brokers.redis.address()).expect("a proxy");
    let home = Home::with_outbox();
    // As patient with a sink as it takes for a test to see the end of it.
    let quick = "max_delay = \"500ms\"";
    home.write("postrider.toml", brokers.config(proxy.port(), [quick; 3]));
    let relay = home.start(&["run"]);
    let address = address_in(&relay.line_with("/metrics"));
    append_many(&home);
    eventually("two sinks have all", || (brokers.counts() == [0, 50, 50]).then_some(()));
    let text = eventually("readiness names the bad one", || {
        let (status, text) = http(address, "GET /readyz", "");
        (status == 503).then_some(text)
    });
    assert!(text.contains("nats") && text.contains("events.orders"), "{text}");
    assert!(!text.contains("rabbitmq") && !text.contains("redis"), "{text}");
    let (_, metrics) = http(address, "GET /metrics", "");
    assert_eq!(SINKS.map(|sink| published(&metrics, sink)), [0, 50, 50], "{metrics}");

    brokers.make_stream();
    eventually("it flows again", || (brokers.counts() == [50; 3]).then_some(()));
    eventually("it is ready", || (http(address, "GET /readyz", "").0 == 200).then_some(()));

    brokers.unbind();
    append_many(&home);
    eventually("the others flow", || (brokers.counts() == [100, 50, 100]).then_some(()));
    let (_, metrics) = http(address, "GET /metrics", "");
    assert_eq!(published(&metrics, "rabbitmq"), 50, "nothing that came back counts");
    brokers.bind();
    eventually("it flows again", || (brokers.counts() == [100; 3]).then_some(()));

    proxy.freeze();
    append_many(&home);
    eventually("the others flow", || (brokers.counts() == [150, 150, 100]).then_some(()));
    proxy.thaw();
    eventually("it flows again", || (brokers.counts() == [150; 3]).then_some(()));
    assert_eq!(letters(&home), [], "nothing was parked");
    end(relay);
}

/// What is larger than a broker takes is parked with the broker's limit; its key waits or goes on
/// as it is set, other keys flow; and it goes, when it is asked for, once the limit was raised.
#[test]
fn an_oversize_event_parks_with_the_brokers_limit_and_only_its_key_waits() {
    let own = RabbitMq::start(&format!("max_message_size = {LIMIT_BYTES}")).expect("a server");
    let brokers = Brokers::start(Some(own), "proto-max-bulk-len 1mb");
    brokers.bind();
    brokers.make_stream();
    let home = Home::with_outbox();
    let skip = "on_failure = \"skip\"";
    let port = brokers.redis.address().port();
    home.write("postrider.toml", brokers.config(port, ["", skip, ""]));
    let relay = home.start(&["run"]);
    append(&home, &[("a", 10), ("a", LARGE_BYTES), ("a", 20), ("b", 30)]);
    // The first of a and the one of b; where it is skipped, the last of a, too.
    eventually("the rest flows", || (brokers.counts() == [2, 3, 2]).then_some(()));
    let mut found = eventually("it is parked", || {
        let found = letters(&home);
        (found.len() == 5).then_some(found)
    });
    found.sort();
    let states: Vec<(&str, &str)> =
        found.iter().map(|(sink, state, _)| (sink.as_str(), state.as_str())).collect();
    let expected = [
        ("nats", "parked"),
        ("nats", "waiting"),
        ("rabbitmq", "skipped"),
        ("redis", "parked"),
        ("redis", "waiting"),
    ];
    assert_eq!(states, expected);
    for (sink, state, reason) in found.iter().filter(|(_, state, _)| state != "waiting") {
        assert!(reason.contains(LIMIT_BYTES), "{sink}, {state}: {reason}");
    }
    brokers.tell_redis(&["CONFIG", "SET", "proto-max-bulk-len", "4mb"]);
    home.postrider(&["dead-letters", "requeue", "--sink", "redis"]).expect(0);
    eventually("the key flows again", || (brokers.counts() == [2, 3, 4]).then_some(()));
    end(relay);
}

/// Where it is asked for, what has no stream or queue is parked, and counts as nothing else; it
/// flows when it is requeued once that is mended, without a restart.
#[test]
fn what_has_no_stream_or_queue_is_parked_where_asked_and_flows_once_it_has() {
    let brokers = Brokers::start(None, "");
    let home = Home::with_outbox();
    let park = "unroutable = \"park\"";
    let port = brokers.redis.address().port();
    let redis = format!("{park}\ncreate_streams = false");
    home.write("postrider.toml", brokers.config(port, [park, park, &redis]));
    let relay = home.start(&["run"]);
    let address = address_in(&relay.line_with("/metrics"));
    append(&home, &[("a", 10), ("b", 20)]);
    let found = eventually("all are parked", || {
        let found = letters(&home);
        (found.len() == 6).then_some(found)
    });
    for (sink, part) in [("nats", "events.orders"), ("rabbitmq", "orders"), ("redis", "events")] {
        let mut own = found.iter().filter(|(of, _, _)| of == sink);
        assert!(own.clone().count() == 2, "{found:?}");
        assert!(own.all(|(_, state, why)| state == "parked" && why.contains(part)), "{found:?}");
    }
    let (_, metrics) = http(address, "GET /metrics", "");
    assert_eq!(SINKS.map(|sink| published(&metrics, sink)), [0; 3], "{metrics}");
    brokers.make_stream();
    brokers.bind();
    brokers.tell_redis(&["XGROUP", "CREATE", "events", "readers", "$", "MKSTREAM"]);
    home.postrider(&["dead-letters", "requeue", "--all"]).expect(0);
    eventually("all of them flow", || (brokers.counts() == [2; 3]).then_some(()));
    let taken = BasicGetOptions { no_ack: true };
    let first = brokers.channel.basic_get(brokers.name.as_str().into(), taken);
    assert!(brokers.runtime.block_on(first).expect("read").is_some());
    end(relay);
}
