//! `kind = "nats"`: the binary against a real server.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_nats::jetstream::{self, stream};
use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_servers::nats::{Nats, Version};
use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};
use rustix::process::Signal;

use crate::harness::{Home, eventually};

const STREAM: &str = "EVENTS";
const KEYS: usize = 10;
/// Events of each round.
const ROUND: usize = 1_000;

/// Reads the stream, on a runtime of its own, since these tests have none.
struct Reader {
    runtime: tokio::runtime::Runtime,
    url: String,
}

impl Reader {
    fn of(server: &Nats) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let reader = Self { runtime: runtime.expect("a runtime"), url: server.url() };
        reader.runtime.block_on(async {
            let config = stream::Config {
                name: STREAM.into(),
                subjects: vec!["events.>".into()],
                duplicate_window: Duration::from_secs(120),
                ..stream::Config::default()
            };
            reader.context().await.create_stream(config).await.expect("a stream");
        });
        reader
    }

    async fn context(&self) -> jetstream::Context {
        jetstream::new(async_nats::connect(&self.url).await.expect("the server answers"))
    }

    fn count(&self) -> u64 {
        self.runtime.block_on(async {
            let mut stream = self.context().await.get_stream(STREAM).await.expect("the stream");
            stream.info().await.expect("its state").state.messages
        })
    }

    /// Key, id and number of each event, in the stream's order.
    fn events(&self) -> Vec<(String, String, usize)> {
        self.runtime.block_on(async {
            let mut stream = self.context().await.get_stream(STREAM).await.expect("the stream");
            let last = stream.info().await.expect("its state").state.last_sequence;
            let mut events = Vec::new();
            for sequence in 1..=last {
                let message = stream.get_raw_message(sequence).await.expect("a message");
                let header = |name: &str| message.headers.get(name).expect(name).to_string();
                let number = String::from_utf8(message.payload.to_vec()).expect("text");
                let number = number.parse().expect("a number");
                events.push((header("postrider-key"), header("Nats-Msg-Id"), number));
            }
            events
        })
    }
}

fn append(home: &Home, from: usize) {
    let event = |n: usize| {
        NewEvent::builder(
            Key::new(format!("k{}", n % KEYS)).expect("valid"),
            Topic::new("orders").expect("valid"),
            EventType::new("OrderPlaced").expect("valid"),
        )
        .payload(ContentType::new("application/json").expect("valid"), n.to_string())
        .build()
        .expect("valid")
    };
    append_all(home, &(from..from + ROUND).map(event).collect::<Vec<_>>());
}

fn append_all(home: &Home, events: &[NewEvent]) {
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    postrider_store_sqlite::append(&tx, events).expect("appended");
    tx.commit().expect("committed");
}

/// The relay is killed in the middle, the server stops and comes back: each event stands in the
/// stream once, and each key's in order.
#[test]
fn kills_and_restarts_lose_nothing_and_the_stream_has_each_event_once() {
    let mut server = Nats::start(Version::New, "").expect("a server");
    let reader = Reader::of(&server);
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"nats\"\n\
             servers = [\"{}\"]\nsubject = \"events.{{topic}}\"\nstream = \"{STREAM}\"\n\
             timeout_ms = 1000\n\n[admin]\nlisten = \"off\"\n",
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
    eventually("more than the first arrive", || (reader.count() > ROUND as u64).then_some(()));
    server.stop().expect("stopped");
    append(&home, 2 * ROUND);
    server.start_again().expect("started");
    let all = 3 * ROUND;
    eventually("all arrive", || (reader.count() >= all as u64).then_some(()));
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

/// Hundreds of keys whose subject no stream takes: others flow, the log calls it no outage and does
/// not repeat itself for each key, and they flow once there is a stream.
#[test]
fn a_missing_stream_with_many_keys_holds_up_nobody_else_and_is_no_outage() {
    let server = Nats::start(Version::New, "").expect("a server");
    let reader = Reader::of(&server);
    let home = Home::new();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\npartitions = 1\n\n[[sink]]\n\
             kind = \"nats\"\nservers = [\"{}\"]\nsubject = \"{{topic}}\"\n\
             max_delay = \"2s\"\n\n[admin]\nlisten = \"off\"\n",
            server.url()
        ),
    );
    home.postrider(&["init"]).expect(0);
    let event = |key: String, topic: &str| {
        let (topic, kind) = (Topic::new(topic).expect("valid"), EventType::new("OrderPlaced"));
        let key = Key::new(key).expect("valid");
        NewEvent::builder(key, topic, kind.expect("valid")).build().expect("valid")
    };
    let relay = home.start(&["run"]);
    let flow = |numbers: std::ops::Range<u64>| {
        for n in numbers {
            append_all(&home, &[event(format!("good{n}"), "events.orders")]);
            eventually("it arrives", || (reader.count() > n).then_some(()));
        }
    };
    flow(0..100);
    let lost: Vec<_> = (0..500).map(|n| event(format!("lost{n}"), "lost.orders")).collect();
    append_all(&home, &lost);
    flow(100..400);
    let log = relay.seen();
    assert_eq!(
        log.matches("outage").count() + log.matches("takes events again").count(),
        0,
        "{log}"
    );
    let lines = log.matches("was not taken").count();
    assert!((1..=12).contains(&lines) && log.contains("keys_waiting="), "{lines} lines: {log}");
    let stream = reader.runtime.block_on(async {
        let subjects = vec!["lost.>".into()];
        let config = stream::Config { name: "LOST".into(), subjects, ..stream::Config::default() };
        reader.context().await.create_stream(config).await.expect("a stream")
    });
    let count = || {
        let info = reader.runtime.block_on(stream.get_info());
        info.expect("its state").state.messages
    };
    eventually("they arrive", || (count() == 500).then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    assert_eq!((count(), reader.count()), (500, 400), "each of them once");
}

#[test]
fn settings_are_told_at_the_key_that_they_name() {
    let home = Home::new();
    let refused = |more: &str, part: &str| {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\n\
                 kind = \"nats\"\n{more}\n"
            ),
        );
        home.postrider(&["config", "check"]).expect(2).err_has(&[part]);
    };
    refused("subject = \"a\"", "sink[0].servers: is missing");
    refused("servers = [\"nats://u:hunter2@example.com\"]", "allow_plain = true");
    refused("servers = [\"nats://127.0.0.1\"]\nsubject = \"a b\"", "sink[0].subject: ");
    refused("servers = [\"nats://127.0.0.1\"]\nstream = \"a.b\"", "sink[0].stream");
    refused("servers = [\"nats://127.0.0.1\"]\nunroutable = \"drop\"", "sink[0].unroutable");
    refused("servers = [\"nats://127.0.0.1\"]\nuser = \"a\"", "password");
}

/// A stream takes an id once: the second sink's event would be on no subject.
#[test]
fn two_sinks_into_one_stream_are_refused_with_the_remedy() {
    let home = Home::new();
    let sinks = |servers: [&str; 2], streams: [&str; 2]| {
        let sink = |n: usize| {
            let stream = match streams[n] {
                "" => String::new(),
                name => format!("stream = \"{name}\"\n"),
            };
            format!(
                "\n[[sink]]\nname = \"s{n}\"\nkind = \"nats\"\nservers = [\"{}\"]\n\
                 subject = \"s{n}.{{topic}}\"\n{stream}",
                servers[n]
            )
        };
        let text = format!("[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n{}{}", sink(0), sink(1));
        home.write("postrider.toml", text);
        home.postrider(&["config", "check"])
    };
    let (one, same) = ("nats://127.0.0.1:4222", "nats://127.0.0.1");
    let parts = ["sink[1].stream: ", "sink[0]", "as repetitions", "a stream of its own"];
    sinks([one, same], ["ALL", "ALL"]).expect(2).err_has(&parts);
    sinks([one, same], ["ALL", ""]).expect(2).err_has(&parts);
    sinks([one, same], ["", ""]).expect(2).err_has(&parts);
    sinks([one, same], ["ALL", "OTHER"]).expect(0);
    sinks([one, "nats://127.0.0.1:4223"], ["", ""]).expect(0);
}

/// Within the stream's window a replay publishes nothing, under another subject neither, and says
/// so.
#[test]
fn a_replay_of_what_the_stream_has_says_that_it_had_it() {
    let server = Nats::start(Version::New, "").expect("a server");
    let reader = Reader::of(&server);
    let home = Home::with_outbox();
    let config = |subject: &str| {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"nats\"\n\
                 servers = [\"{}\"]\nsubject = \"{subject}\"\n",
                server.url()
            ),
        );
    };
    config("events.{topic}");
    home.append(&[("a", "First"), ("b", "Second")]);
    let replay = |more: &[&str]| home.postrider(&[&["replay", "--from", "oldest"], more].concat());
    let first = replay(&[]).expect(0);
    assert_eq!(first.out.trim_end(), "2 of 2 matching events published to nats");
    config("events.other.{topic}");
    let again = replay(&[]).expect(0).out;
    assert!(again.contains("published to nats; 2 of them the broker had already"), "{again}");
    assert_eq!(replay(&["--json"]).expect(0).json()["duplicates"], 2);
    assert_eq!(reader.count(), 2);
    replay(&["--new-ids"]).expect(0);
    assert_eq!(reader.count(), 4);
}

fn relay_config(home: &Home, server: &str, more: &str) {
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"nats\"\n\
             servers = [\"{server}\"]\nsubject = \"events.{{topic}}\"\nmax_delay = \"100ms\"\n\
             {more}\n\n[admin]\nlisten = \"off\"\n"
        ),
    );
}

/// The client library logs each attempt by itself, for as long as it is refused.
#[test]
fn a_refused_login_is_told_as_often_as_the_relay_tells_it() {
    let settings = "authorization { users: [ { user: app, password: right } ] }";
    let server = Nats::start(Version::New, settings).expect("a server");
    let home = Home::with_outbox();
    relay_config(&home, &server.url().replace("//", "//app:wrong@"), "");
    home.append(&[("a", "First")]);
    let relay = home.start(&["run"]);
    let told = relay.line_with("the login is refused");
    assert!(told.contains("WARN"), "{told}");
    let attempts = || server.log().matches("authentication error").count();
    eventually("it is tried again", || (attempts() > 10).then_some(()));
    let (seen, tried) = (relay.seen(), attempts());
    assert!(!seen.contains("ERROR"), "{seen}");
    assert!(seen.matches("refused").count() < tried / 2, "{tried} attempts: {seen}");
    relay.signal(Signal::TERM);
    relay.ended();
}

/// A server's limit is raised by a reload: what was parked flows when it is requeued.
#[test]
fn what_was_too_large_flows_once_the_servers_limit_was_raised() {
    let server = Nats::start(Version::New, "max_payload: 1KB").expect("a server");
    let reader = Reader::of(&server);
    let home = Home::with_outbox();
    relay_config(&home, &server.url(), "");
    let large = NewEvent::builder(
        Key::new("a").expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .payload(ContentType::new("text/plain").expect("valid"), vec![b'x'; 2_000])
    .build()
    .expect("valid");
    append_all(&home, &[large]);
    let relay = home.start(&["run"]);
    let letters = || home.postrider(&["dead-letters", "list", "--json"]).expect(0).json_lines();
    let found = eventually("it is parked", || Some(letters()).filter(|found| !found.is_empty()));
    assert!(found[0]["reason"].to_string().contains("1024"), "{found:?}");
    server.configure("max_payload: 1MB").expect("written");
    server.reload().expect("reloaded");
    eventually("it flows", || {
        home.postrider(&["dead-letters", "requeue", "--all"]);
        (reader.count() == 1).then_some(())
    });
    eventually("no letter is left", || letters().is_empty().then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

/// Such a stream confirms what it keeps for nobody.
#[test]
fn a_stream_that_may_lose_events_is_warned_of_at_the_start() {
    let server = Nats::start(Version::New, "").expect("a server");
    let reader = Reader::of(&server);
    reader.runtime.block_on(async {
        let config = stream::Config {
            name: "OTHER".into(),
            subjects: vec!["other.>".into()],
            retention: stream::RetentionPolicy::Interest,
            storage: stream::StorageType::Memory,
            ..stream::Config::default()
        };
        reader.context().await.create_stream(config).await.expect("a stream");
    });
    let home = Home::with_outbox();
    relay_config(&home, &server.url(), "stream = \"OTHER\"");
    let relay = home.start(&["run"]);
    for part in ["retention is interest and there is no consumer", "storage is memory"] {
        let told = relay.line_with(part);
        assert!(told.contains("WARN") && told.contains("OTHER"), "{told}");
    }
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}
