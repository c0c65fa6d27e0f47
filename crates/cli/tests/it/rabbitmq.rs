//! `kind = "rabbitmq"`: the binary against a real server.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_servers::rabbitmq::RabbitMq;
use postrider_store_sqlite::rusqlite::{self, TransactionBehavior};
use rustix::process::Signal;

use crate::harness::{Home, eventually};

const KEYS: usize = 10;
/// Events of each round.
const ROUND: usize = 1_000;

/// Key, id and number of each event, in the queue's order, on a runtime of its own, since these
/// tests have none. Reading takes them out.
fn events(runtime: &tokio::runtime::Runtime, url: &str) -> Vec<(String, String, usize)> {
    runtime.block_on(async {
        let connection = Connection::connect(url, ConnectionProperties::default()).await;
        let channel = connection.as_ref().expect("it answers").create_channel().await;
        let channel = channel.expect("a channel");
        let mut events = Vec::new();
        let taken = BasicGetOptions { no_ack: true };
        while let Some(message) = channel.basic_get("orders".into(), taken).await.expect("read") {
            let properties = &message.delivery.properties;
            let headers = properties.headers().as_ref().expect("headers").inner();
            let Some(AMQPValue::LongString(key)) = headers.get("postrider-key") else {
                panic!("no key: {headers:?}");
            };
            let id = properties.message_id().as_ref().expect("an id").to_string();
            let number = String::from_utf8(message.delivery.data.clone()).expect("text");
            events.push((key.to_string(), id, number.parse().expect("a number")));
        }
        events
    })
}

/// How many messages are in the queue, once it is there.
fn count(runtime: &tokio::runtime::Runtime, url: &str) -> usize {
    let found = runtime.block_on(async {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        channel.queue_declare("orders".into(), passive, FieldTable::default()).await
    });
    found.map_or(0, |queue| queue.message_count() as usize)
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
    let mut connection = rusqlite::Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    postrider_store_sqlite::append(&tx, &events).expect("appended");
    tx.commit().expect("committed");
}

/// The relay is killed in the middle, the server stops and comes back: nothing is missing, and each
/// key's events come in order; those that come again do so under their ids.
#[test]
fn kills_and_restarts_lose_nothing_and_keep_each_keys_order() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let mut server = RabbitMq::start("").expect("a server");
    let url = server.url();
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"rabbitmq\"\n\
             servers = [\"{url}\"]\nexchange = \"events\"\ndeclare = true\nqueue = \"orders\"\n\
             queue_type = \"classic\"\ntimeout_ms = 2000\n\n[admin]\nlisten = \"off\"\n"
        ),
    );
    append(&home, 0);
    let relay = home.start(&["run"]);
    eventually("some arrive", || (count(&runtime, &url) > 0).then_some(()));
    relay.signal(Signal::KILL);
    assert_eq!(relay.ended(), None);
    append(&home, ROUND);
    let relay = home.start(&["run"]);
    eventually("more than the first arrive", || (count(&runtime, &url) > ROUND).then_some(()));
    server.stop().expect("stopped");
    append(&home, 2 * ROUND);
    server.start_again().expect("started");
    let all = 3 * ROUND;
    eventually("all are sent", || {
        let status = home.postrider(&["status", "--json"]).expect(0).json();
        (status["consumers"][0]["published"] == all).then_some(())
    });
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    let events = events(&runtime, &url);
    let mut seen = HashSet::new();
    let mut last: HashMap<&String, usize> = HashMap::new();
    for (key, id, number) in &events {
        if seen.insert(id) {
            let before = last.insert(key, *number);
            assert!(before.is_none_or(|before| before + KEYS == *number), "{key}: {number}");
        }
    }
    assert_eq!(seen.len(), all, "{} arrived", events.len());
    // At the kill and at the stop, what was under way may come again.
    assert!(events.len() <= all + 2 * KEYS * 512, "{} arrived", events.len());
}

#[test]
fn settings_are_told_at_the_key_that_they_name() {
    let home = Home::new();
    let refused = |more: &str, part: &str| {
        home.write(
            "postrider.toml",
            format!(
                "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\n\
                 kind = \"rabbitmq\"\n{more}\n"
            ),
        );
        home.postrider(&["config", "check"]).expect(2).err_has(&[part]);
    };
    let here = "servers = [\"amqp://127.0.0.1\"]\nexchange = \"e\"\n";
    refused("exchange = \"a\"", "sink[0].servers: is missing");
    refused("servers = [\"amqp://127.0.0.1\"]", "sink[0].exchange: is missing");
    refused("servers = [\"amqp://u:hunter2@a.example\"]\nexchange = \"e\"", "allow_plain = true");
    refused("servers = [\"amqp://127.0.0.1\"]\nexchange = \"{nope}\"", "sink[0].exchange: ");
    refused(&format!("{here}routing_key = \"{{nope}}\""), "sink[0].routing_key: ");
    refused(&format!("{here}unroutable = \"drop\""), "sink[0].unroutable");
    refused(&format!("{here}queue_type = \"stream\""), "sink[0].queue_type");
    refused(&format!("{here}external = true"), "sink[0].external");
    refused(&format!("{here}user = \"a\""), "password");
}
