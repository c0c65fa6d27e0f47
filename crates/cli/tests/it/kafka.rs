//! `kind = "kafka"`: the binary against a real broker.

use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::time::Duration;

use postrider_core::{ContentType, EventType, Key, NewEvent, Topic};
use postrider_servers::kafka::{Kafka, virtual_environment};
use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};
use rustix::process::Signal;

use crate::harness::{Home, eventually};

const TOPIC: &str = "orders";
const KEYS: usize = 10;
/// Events of each round.
const ROUND: usize = 1_000;

/// Makes a topic of three partitions.
const MAKE: &str = r"
import sys
from confluent_kafka.admin import AdminClient, NewTopic
admin = AdminClient({'bootstrap.servers': sys.argv[1]})
admin.create_topics([NewTopic(sys.argv[2], 3, 1)])[sys.argv[2]].result()
";
/// Prints how many records a topic has; as many lines as it has with `-`: key, id and value.
const READ: &str = r"
import sys
from confluent_kafka import Consumer, TopicPartition
brokers, topic = sys.argv[1:3]
reader = Consumer({'bootstrap.servers': brokers, 'group.id': 'test', 'enable.auto.commit': False})
ends = {}
for partition in range(3):
    place = TopicPartition(topic, partition, 0)
    ends[partition] = reader.get_watermark_offsets(place, timeout=20)[1]
if len(sys.argv) == 3:
    print(sum(ends.values()))
else:
    reader.assign([TopicPartition(topic, partition, 0) for partition in ends])
    left = sum(ends.values())
    while left:
        record = reader.poll(20)
        if record is None:
            sys.exit('records are missing')
        if record.error():
            continue
        left -= 1
        print(record.key().decode(), dict(record.headers())['postrider-id'].decode(),
              record.value().decode())
reader.close()
";

/// Runs a program with the client that the guide's consumer uses.
fn python(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(virtual_environment().join("bin").join("python3"));
    let ran = command.args(["-c", program]).args(arguments).output().expect("it is installed");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).expect("text")
}

fn count(brokers: &str) -> usize {
    python(READ, &[brokers, TOPIC]).trim().parse().expect("a number")
}

fn append(home: &Home, from: usize) {
    let event = |n: usize| {
        NewEvent::builder(
            Key::new(format!("k{}", n % KEYS)).expect("valid"),
            Topic::new(TOPIC).expect("valid"),
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

/// The relay is killed in the middle, and then the broker stops for a while: no event is missing,
/// and each key's come first in order.
#[test]
fn kills_of_the_relay_and_stops_of_the_broker_lose_nothing_and_keep_each_keys_order() {
    let mut broker = Kafka::start().expect("a broker");
    let brokers = broker.address().to_string();
    python(MAKE, &[&brokers, TOPIC]);
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"kafka\"\n\
             brokers = \"{brokers}\"\ntimeout_ms = 2000\n\
             librdkafka = {{ \"compression.type\" = \"zstd\" }}\n\n[admin]\nlisten = \"off\"\n"
        ),
    );
    append(&home, 0);
    let relay = home.start(&["run"]);
    eventually("some arrive", || (count(&brokers) > 0).then_some(()));
    relay.signal(Signal::KILL);
    assert_eq!(relay.ended(), None);
    append(&home, ROUND);
    let relay = home.start(&["run"]);
    eventually("more than the first arrive", || (count(&brokers) > ROUND).then_some(()));
    append(&home, 2 * ROUND);
    broker.stop().expect("stopped");
    broker.start_again().expect("started");
    let all = 3 * ROUND;
    let read = || {
        let lines = python(READ, &[&brokers, TOPIC, "-"]);
        let event = |line: &str| {
            let mut words = line.split(' ').map(str::to_owned);
            let mut word = || words.next().expect("three words");
            (word(), word(), word().parse::<usize>().expect("a number"))
        };
        lines.lines().map(event).collect::<Vec<_>>()
    };
    let events = eventually("all arrive", || {
        if count(&brokers) < all {
            return None;
        }
        let events = read();
        let ids: HashSet<&String> = events.iter().map(|(_, id, _)| id).collect();
        (ids.len() == all).then_some(events)
    });
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    let (mut seen, mut last) = (HashSet::new(), HashMap::new());
    for (key, id, number) in &events {
        if seen.insert(id) {
            let before = last.insert(key, *number);
            assert!(before.is_none_or(|before: usize| before + KEYS == *number), "{key}: {number}");
        }
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
                 kind = \"kafka\"\n{more}\n"
            ),
        );
        home.postrider(&["config", "check"]).expect(2).err_has(&[part]);
    };
    refused("topic = \"a\"", "sink[0].brokers: is missing");
    refused("brokers = \"a\"", "sink[0].brokers: number 1");
    refused("brokers = \"a:1\"\ntopic = \"{nope}\"", "sink[0].topic: ");
    refused("brokers = \"a:1\"\ntopic = \"a b\"", "sink[0].topic: has ' '");
    refused("brokers = \"a:1\"\nsasl = \"gssapi\"", "sink[0].sasl: ");
    refused("brokers = \"a:1\"\nuser = \"a\"", "sink[0].sasl");
    refused("brokers = \"a:1\"\nunroutable = \"drop\"", "sink[0].unroutable");
    for (setting, part) in [
        ("\"acks\" = \"1\"", "acks may not be set so: an event counts as confirmed only"),
        ("\"enable.idempotence\" = \"false\"", "enable.idempotence may not be set so"),
        ("\"retries\" = \"0\"", "retries may not be set so"),
        ("\"max.in.flight\" = \"6\"", "max.in.flight may not be set so"),
        ("\"compresion.type\" = \"zstd\"", "compresion.type is no setting"),
    ] {
        let more = format!("brokers = \"a:1\"\nlibrdkafka = {{ {setting} }}");
        refused(&more, &format!("sink[0].librdkafka: {part}"));
    }
}
