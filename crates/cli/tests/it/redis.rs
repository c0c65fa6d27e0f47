//! `kind = "redis"`: the binary against a real server.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_servers::redis::Redis;
use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};
use redis::aio::MultiplexedConnection;
use rustix::process::Signal;

use crate::harness::{Home, eventually};

const STREAM: &str = "events:orders";
const KEYS: usize = 10;
/// Events of each round.
const ROUND: usize = 1_000;

/// Reads the stream, on a runtime of its own, since these tests have none.
struct Reader {
    runtime: tokio::runtime::Runtime,
    client: redis::Client,
}

impl Reader {
    fn of(server: &Redis) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let client = redis::Client::open(server.url()).expect("an address");
        Self { runtime: runtime.expect("a runtime"), client }
    }

    async fn connection(&self) -> MultiplexedConnection {
        self.client.get_multiplexed_async_connection().await.expect("the server answers")
    }

    fn count(&self) -> usize {
        self.runtime.block_on(async {
            let mut connection = self.connection().await;
            let mut length = redis::cmd("XLEN");
            length.arg(STREAM).query_async(&mut connection).await.expect("a stream, or none")
        })
    }

    /// Key, id and number of each event, in the stream's order.
    fn events(&self) -> Vec<(String, String, usize)> {
        let entries: Vec<(String, Vec<String>)> = self.runtime.block_on(async {
            let mut connection = self.connection().await;
            let mut range = redis::cmd("XRANGE");
            let range = range.arg(STREAM).arg("-").arg("+");
            range.query_async(&mut connection).await.expect("a stream")
        });
        let event = |(_, fields): (String, Vec<String>)| {
            let field = |name: &str| {
                let at = fields.iter().step_by(2).position(|field| field == name).expect(name);
                fields[2 * at + 1].clone()
            };
            (field("key"), field("id"), field("payload").parse().expect("a number"))
        };
        entries.into_iter().map(event).collect()
    }
}

fn append(home: &Home, from: usize) {
    append_to(home, "orders", from..from + ROUND);
}

/// Each topic's keys are its own.
fn append_to(home: &Home, topic: &str, numbers: std::ops::Range<usize>) {
    let event = |n: usize| {
        NewEvent::builder(
            Key::new(format!("{topic}-{}", n % KEYS)).expect("valid"),
            Topic::new(topic).expect("valid"),
            EventType::new("OrderPlaced").expect("valid"),
        )
        .payload(ContentType::new("application/json").expect("valid"), n.to_string())
        .build()
        .expect("valid")
    };
    let events: Vec<NewEvent> = numbers.map(event).collect();
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    postrider_store_sqlite::append(&tx, &events).expect("appended");
    tx.commit().expect("committed");
}

/// The relay is killed in the middle, and then the server: each event stands in the stream once,
/// and each key's in order.
#[test]
fn kills_of_relay_and_server_lose_nothing_and_the_stream_has_each_event_once() {
    let mut server = Redis::start("").expect("a server");
    let reader = Reader::of(&server);
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"redis\"\n\
             url = \"{}\"\nstream = \"events:{{topic}}\"\ntimeout_ms = 1000\n\n\
             [admin]\nlisten = \"off\"\n",
            server.url()
        ),
    );
    append(&home, 0);
    let relay = home.start(&["run"]);
    eventually("some arrive", || (reader.count() > 0).then_some(()));
    relay.signal(Signal::KILL);
    assert_eq!(relay.ended(), None);
    append(&home, ROUND);
    let relay = home.start(&["run"]);
    eventually("more than the first arrive", || (reader.count() > ROUND).then_some(()));
    append(&home, 2 * ROUND);
    server.kill().expect("killed");
    server.start_again().expect("started");
    let all = 3 * ROUND;
    eventually("all arrive", || (reader.count() >= all).then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    let events = reader.events();
    let ids: HashSet<&String> = events.iter().map(|(_, id, _)| id).collect();
    assert_eq!((ids.len(), events.len()), (all, all), "missing, or more than once");
    let mut last: HashMap<&String, usize> = HashMap::new();
    for (key, _, number) in &events {
        let before = last.insert(key, *number);
        assert!(before.is_none_or(|before| before + KEYS == *number), "{key}: {number}");
    }
}

/// The server would take the one's events for repetitions of the other's, and drop them.
#[test]
fn two_sinks_of_one_stream_are_refused_unless_they_are_apart() {
    let home = Home::new();
    let check = |first: &str, second: &str| {
        let sink = |name: &str, more: &str| {
            format!("\n[[sink]]\nkind = \"redis\"\nname = \"{name}\"\n{more}\n")
        };
        let text = format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n{}{}",
            sink("plain", first),
            sink("ce", &format!("encoding = \"cloudevents-binary\"\n{second}"))
        );
        home.write("postrider.toml", text);
        home.postrider(&["config", "check"])
    };
    let url = "url = \"redis://127.0.0.1:6379/0\"";
    for same in [url, "url = \"redis://u:p@localhost/\""] {
        let seen = check(url, same).expect(2);
        seen.err_has(&["sink[1].stream: \"{topic}\" is that of sink[0]", "seen_for_ms = 0"]);
    }
    for apart in [
        "url = \"redis://127.0.0.1:6379/1\"".to_owned(),
        "url = \"redis://127.0.0.1:6380/0\"".to_owned(),
        format!("{url}\nstream = \"ce:{{topic}}\""),
        format!("{url}\nseen_for_ms = 0"),
    ] {
        check(url, &apart).expect(0);
    }
}

/// One of the streams is missing: its events wait for longer than any number of attempts takes,
/// nobody else's do, and they flow once somebody makes it.
#[test]
fn a_missing_stream_holds_up_nobody_else_and_loses_no_event() {
    let server = Redis::start("").expect("a server");
    let reader = Reader::of(&server);
    let group = |stream: &str| {
        reader.runtime.block_on(async {
            let mut connection = reader.connection().await;
            let mut made = redis::cmd("XGROUP");
            made.arg("CREATE").arg(stream).arg("readers").arg("$").arg("MKSTREAM");
            made.query_async::<()>(&mut connection).await.expect("made");
        });
    };
    let length = |stream: &str| -> usize {
        reader.runtime.block_on(async {
            let mut connection = reader.connection().await;
            redis::cmd("XLEN").arg(stream).query_async(&mut connection).await.expect("answered")
        })
    };
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"redis\"\n\
             url = \"{}\"\nstream = \"{{topic}}\"\ncreate_streams = false\nmax_attempts = 2\n\
             base_delay = \"10ms\"\nmax_delay = \"50ms\"\n\n[admin]\nlisten = \"off\"\n",
            server.url()
        ),
    );
    group("orders");
    let relay = home.start(&["run"]);
    append_to(&home, "lost", 0..10);
    // Each attempt comes after a success of others, so that it would count.
    for round in 0..40 {
        append_to(&home, "orders", round * 10..(round + 1) * 10);
        eventually("others flow", || (length("orders") >= (round + 1) * 10).then_some(()));
    }
    assert!(!relay.seen().contains("an outage"), "{}", relay.seen());
    let sink = &home.postrider(&["status", "--json"]).expect(0).json()["consumers"][0];
    assert_eq!(sink["parked"], 0, "they wait: {sink}");
    group("lost");
    eventually("they arrive", || (length("lost") == 10).then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

#[test]
fn settings_are_told_at_the_key_that_they_name() {
    let home = Home::new();
    let refused = |more: &str, part: &str| {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\n\
                 kind = \"redis\"\n{more}\n"
            ),
        );
        home.postrider(&["config", "check"]).expect(2).err_has(&[part]);
    };
    refused("stream = \"a\"", "sink[0].url: is missing");
    refused("url = \"redis://u:hunter2@example.com\"", "allow_plain = true");
    refused("url = \"redis://127.0.0.1\"\nstream = \"{nope}\"", "sink[0].stream: ");
    refused("url = \"redis://127.0.0.1\"\nseen_for_ms = -1", "sink[0].seen_for_ms");
    refused("url = \"redis://127.0.0.1\"\nunroutable = \"drop\"", "sink[0].unroutable");
    refused("url = \"redis://127.0.0.1\"\nuser = \"a\"", "password");
}
