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
    let events: Vec<NewEvent> = (from..from + ROUND).map(event).collect();
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    postrider_store_sqlite::append(&tx, &events).expect("appended");
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
