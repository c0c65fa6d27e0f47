//! Which partition a key goes to.
//!
//! What lives here: the sink against the partitioner of Kafka's own Java client, over a broker.
//! What does not: empty keys, as no event has one.
//! Invariant: an application that produces or looks up keys with Java's default partitioner finds
//! each key where the sink puts it.

use std::collections::HashMap;

use postrider_core::{Outcome, PartitionId, Publish, Record, Sink};
use rdkafka::message::Message;

use crate::{TOPIC, brokers, config, empty_broker, make_topic, one, records, sink};

/// Java's `toPositive(murmur2(key))` and the key, for 10,000 of them, 6,966 beyond ASCII. Made once
/// with `kafka.partitioner.default.murmur2` of kafka-python 3.0.12 from random keys; that function
/// gives the values of Kafka's own `UtilsTest` (`foobar`: -790332482, `abc`: 479470107).
const GOLDEN: &str = include_str!("../data/murmur2.tsv");

fn golden() -> Vec<(u32, &'static str)> {
    let line = |line: &'static str| {
        let (hash, key) = line.split_once('\t').expect("a hash and a key");
        (hash.parse().expect("a number"), key)
    };
    GOLDEN.lines().map(line).collect()
}

async fn assert_partitions(count: u32, keys: &[(u32, &str)]) {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    make_topic(&brokers, TOPIC, i32::try_from(count).expect("few"), &[]).await;
    let sink = sink(&config(&*brokers));
    let events: Vec<Record> = keys.iter().zip(0..).map(|((_, key), n)| one(key, n)).collect();
    let partition = PartitionId::numbered(0, 1);
    for chunk in events.chunks(sink.capabilities().max_batch_records) {
        let outcomes = sink.publish(Publish::new(&partition, chunk)).await;
        assert!(outcomes.iter().all(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    }
    let mut found = HashMap::new();
    for message in records(&brokers, TOPIC).await {
        let key = String::from_utf8(message.key().expect("a key").to_vec()).expect("text");
        assert_eq!(found.insert(key, message.partition()), None, "each key was sent once");
    }
    assert_eq!(found.len(), keys.len());
    for (hash, key) in keys {
        let expected = i32::try_from(hash % count).expect("few");
        assert_eq!(found.get(*key), Some(&expected), "{key}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_keys_go_where_java_puts_them() {
    let keys = golden();
    assert_eq!(keys.len(), 10_000);
    assert!(keys.iter().filter(|(_, key)| !key.is_ascii()).count() > 5_000);
    assert_partitions(101, &keys).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_few_partitions_are_chosen_as_by_java() {
    for count in [1, 3, 12] {
        assert_partitions(count, &golden()[7_000..7_500]).await;
    }
}
