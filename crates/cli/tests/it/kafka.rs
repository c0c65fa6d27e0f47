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

/// Makes a topic of three partitions, with the limit of its records' bytes.
const MAKE: &str = r"
import sys
from confluent_kafka.admin import AdminClient, NewTopic
brokers, topic, limit = sys.argv[1:4]
made = NewTopic(topic, 3, 1, config={'max.message.bytes': limit})
admin = AdminClient({'bootstrap.servers': brokers})
admin.create_topics([made])[topic].result()
";
/// Changes that limit.
const RAISE: &str = r"
import sys
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
brokers, topic, limit = sys.argv[1:4]
entry = ConfigEntry('max.message.bytes', limit, incremental_operation=AlterConfigOpType.SET)
resource = ConfigResource('topic', topic, incremental_configs=[entry])
admin = AdminClient({'bootstrap.servers': brokers})
admin.incremental_alter_configs([resource])[resource].result()
";
/// As brokers have it from the start.
const USUAL_LIMIT: &str = "1048588";
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

fn event(key: &str, payload: String) -> NewEvent {
    NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new(TOPIC).expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .payload(ContentType::new("application/json").expect("valid"), payload)
    .build()
    .expect("valid")
}

fn append_round(home: &Home, from: usize) {
    let numbers = from..from + ROUND;
    let events = numbers.map(|n| event(&format!("k{}", n % KEYS), n.to_string()));
    append(home, &events.collect::<Vec<_>>());
}

fn append(home: &Home, events: &[NewEvent]) {
    let mut connection = Connection::open(home.path("app.db")).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    postrider_store_sqlite::append(&tx, events).expect("appended");
    tx.commit().expect("committed");
}

/// The relay is killed in the middle, and then the broker stops for a while: no event is missing,
/// and each key's come first in order.
#[test]
fn kills_of_the_relay_and_stops_of_the_broker_lose_nothing_and_keep_each_keys_order() {
    let mut broker = Kafka::start().expect("a broker");
    let brokers = broker.address().to_string();
    python(MAKE, &[&brokers, TOPIC, USUAL_LIMIT]);
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"kafka\"\n\
             brokers = \"{brokers}\"\ntimeout_ms = 2000\n\
             librdkafka = {{ \"compression.type\" = \"zstd\" }}\n\n[admin]\nlisten = \"off\"\n"
        ),
    );
    append_round(&home, 0);
    let relay = home.start(&["run"]);
    eventually("some arrive", || (count(&brokers) > 0).then_some(()));
    relay.signal(Signal::KILL);
    assert_eq!(relay.ended(), None);
    append_round(&home, ROUND);
    let relay = home.start(&["run"]);
    eventually("more than the first arrive", || (count(&brokers) > ROUND).then_some(()));
    append_round(&home, 2 * ROUND);
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

/// Two sinks into the broker, with a line of settings each.
fn two_sinks(brokers: &str, settings: [(&str, &str); 2]) -> String {
    let sink = |(name, more): (&str, &str)| {
        format!(
            "[[sink]]\nkind = \"kafka\"\nname = \"{name}\"\nbrokers = \"{brokers}\"\n\
             max_delay = \"500ms\"\ntimeout_ms = 2000\n{more}\n\n"
        )
    };
    let source = "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n";
    let admin = "[admin]\nlisten = \"off\"\n";
    format!("{source}{}{admin}", settings.map(sink).concat())
}

/// Sink, state and reason of each dead letter.
fn letters(home: &Home) -> Vec<(String, String, String)> {
    let list = home.postrider(&["dead-letters", "list", "--json"]).expect(0).json_lines();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let letter =
        |one: &serde_json::Value| (text(&one["sink"]), text(&one["state"]), text(&one["reason"]));
    list.iter().map(letter).collect()
}

/// Nothing counts as sent while the topic is missing; what waits flows once it is made, and what
/// was parked when it is requeued, both without a restart.
#[test]
fn a_missing_topic_is_waited_for_or_parks_and_flows_once_it_is_made() {
    let broker = Kafka::start().expect("a broker");
    let brokers = broker.address().to_string();
    let home = Home::with_outbox();
    let settings = [("waits", ""), ("parks", "unroutable = \"park\"")];
    home.write("postrider.toml", two_sinks(&brokers, settings));
    let relay = home.start(&["run"]);
    append(&home, &[event("a", "1".into()), event("b", "2".into())]);
    let found = eventually("two are parked", || {
        let found = letters(&home);
        (found.len() == 2).then_some(found)
    });
    for (sink, state, why) in &found {
        assert_eq!((sink.as_str(), state.as_str()), ("parks", "parked"));
        assert!(why.contains("the topic orders does not exist"), "{why}");
    }
    python(MAKE, &[&brokers, TOPIC, USUAL_LIMIT]);
    eventually("what waited flows", || (count(&brokers) == 2).then_some(()));
    home.postrider(&["dead-letters", "requeue", "--sink", "parks"]).expect(0);
    eventually("what was parked flows", || (count(&brokers) == 4).then_some(()));
    let none_of_waits = letters(&home).iter().all(|(sink, ..)| sink != "waits");
    assert!(none_of_waits, "nothing of the one that waits was parked");
    // A letter is resolved after its event is in the topic.
    eventually("no letter is left", || letters(&home).is_empty().then_some(()));
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}

/// What is larger than the topic takes is parked with its limit; its key waits or goes on as it is
/// set, other keys flow; and it goes, when it is asked for, once the limit was raised.
#[test]
fn an_oversize_event_parks_with_the_topics_limit_and_only_its_key_waits() {
    let broker = Kafka::start().expect("a broker");
    let brokers = broker.address().to_string();
    python(MAKE, &[&brokers, TOPIC, "50000"]);
    let home = Home::with_outbox();
    let settings = [("parks", ""), ("skips", "on_failure = \"skip\"")];
    home.write("postrider.toml", two_sinks(&brokers, settings));
    let relay = home.start(&["run"]);
    let sized = |key: &str, bytes: usize| event(key, format!("\"{}\"", "x".repeat(bytes)));
    append(&home, &[sized("a", 1), sized("a", 60_000), sized("a", 2), sized("b", 3)]);
    // The first of a and the one of b; where it is skipped, the last of a, too.
    eventually("the rest flows", || (count(&brokers) == 2 + 3).then_some(()));
    let mut found = eventually("it is parked", || {
        let found = letters(&home);
        (found.len() == 3).then_some(found)
    });
    found.sort();
    let states: Vec<(&str, &str)> =
        found.iter().map(|(sink, state, _)| (sink.as_str(), state.as_str())).collect();
    assert_eq!(states, [("parks", "parked"), ("parks", "waiting"), ("skips", "skipped")]);
    for (sink, state, reason) in found.iter().filter(|(_, state, _)| state != "waiting") {
        assert!(reason.contains("takes 50000"), "{sink}, {state}: {reason}");
    }
    python(RAISE, &[&brokers, TOPIC, USUAL_LIMIT]);
    home.postrider(&["dead-letters", "requeue", "--sink", "parks"]).expect(0);
    eventually("the key flows again", || (count(&brokers) == 4 + 3).then_some(()));
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
