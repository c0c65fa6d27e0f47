//! That a stream has each event once, and all of them: what publishing ids are for.
//!
//! What lives here: late rows, requeues, recoveries, crashes, lost answers, late bytes, take-overs.
//! What does not: refusals (`failures.rs`), servers in trouble (`trouble.rs`).
//! Invariant: a second sink of the same settings is another process's, which knows nothing but what
//! the server tells it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use postrider_conformance::sink::ReceiverFault;
use postrider_core::{ErrorKind, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_sink_rabbitmq::RabbitMqStreamConfig;

use super::middle::Middle;
use super::{Broker, confirm, fail, ids_of, known, publish, publish_all, sink};
use crate::one;

fn events(keys: &str, from: u64) -> Vec<Record> {
    keys.chars().zip(from..).map(|(key, n)| one(&key.to_string(), n)).collect()
}

fn through(middle: &Middle, broker: &Broker) -> RabbitMqStreamConfig {
    RabbitMqStreamConfig { servers: vec![Secret::new(middle.url())], ..broker.config() }
}

/// First to the middle, then, whenever a connection ends, to the server itself.
fn first_through(middle: &Middle, broker: &Broker) -> RabbitMqStreamConfig {
    let servers = vec![Secret::new(middle.url()), Secret::new(broker.url.clone())];
    RabbitMqStreamConfig { servers, timeout_ms: 1_000, ..broker.config() }
}

/// With the outbox's number as publishing id all of these would be dropped in silence, and
/// confirmed: they stand below what was published before.
#[tokio::test(flavor = "multi_thread")]
async fn late_rows_requeues_and_a_recovery_are_not_dropped() {
    let broker = Broker::shared().await;
    let first = sink(&broker.config());
    let mut all = events("abc", 1_000);
    confirm(&first, &all).await;
    // A row whose transaction committed late, and letters that were requeued a day later.
    for late in [events("d", 7), events("bd", 3), events("a", 2_000), events("c", 1)] {
        confirm(&first, &late).await;
        all.extend(late);
    }
    // The database was restored: its numbers begin again, under new ids.
    let second = sink(&broker.config());
    let restored = events("abab", 5);
    confirm(&second, &restored).await;
    all.extend(restored);
    // And a third process, with an event that is new and has the oldest number of all.
    let third = sink(&broker.config());
    let oldest = events("z", 0);
    confirm(&third, &oldest).await;
    all.extend(oldest);
    assert_eq!(broker.ids().await, ids_of(&all));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_dies_before_the_confirmation_leaves_no_repetition() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let first = sink(&through(&middle, &broker));
    confirm(&first, &events("xy", 1)).await;
    let before = broker.ids().await;
    middle.orders().next = Some((1, ReceiverFault::LosingConfirms));
    let sent = events("abcab", 10);
    let outcomes = publish(&first, &sent).await;
    assert!(matches!(outcomes[0], Outcome::Failed(_)), "{outcomes:?}");
    // It is killed, and another gets the events in another order and other calls, with new ones.
    drop(first);
    let second = sink(&broker.config());
    let [a, b, c] =
        [[0, 3], [1, 4], [2, 2]].map(|[one, two]| [sent[one].clone(), sent[two].clone()]);
    let new = events("ca", 20);
    confirm(&second, &new[..1]).await;
    known(&second, &c[..1]).await;
    known(&second, &b).await;
    known(&second, &a).await;
    confirm(&second, &new[1..]).await;
    assert_eq!(broker.ids().await, [before, ids_of(&sent), ids_of(&new)].concat());
}

/// The first frame of all is the one that is lost: there is nothing yet of the reference.
#[tokio::test(flavor = "multi_thread")]
async fn the_very_first_events_are_not_repeated_either() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let first = sink(&through(&middle, &broker));
    middle.orders().next = Some((1, ReceiverFault::LosingConfirms));
    let sent = events("abc", 1);
    fail(&first, &sent[0]).await;
    drop(first);
    let second = sink(&broker.config());
    let outcomes = publish(&second, &sent).await;
    assert!(matches!(outcomes[0], Outcome::Duplicate), "{outcomes:?}");
    assert!(matches!(outcomes[1..], [Outcome::Confirmed, Outcome::Confirmed]), "{outcomes:?}");
    assert_eq!(broker.ids().await, ids_of(&sent));
}

/// The server has confirmed, and the question what its last id is gets no answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_confirmation_counts_only_with_the_last_id() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&through(&middle, &broker));
    confirm(&sink, &events("a", 1)).await;
    middle.orders().forgetful = 1;
    let sent = events("bcb", 2);
    let error = fail(&sink, &sent[0]).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    let outcomes = publish(&sink, &sent).await;
    assert!(matches!(outcomes[0], Outcome::Duplicate), "{outcomes:?}");
    assert_eq!(broker.ids().await[1..], ids_of(&sent));
    // The same id again, and no other for the same event.
    let ids = middle.orders().ids.clone();
    assert_eq!((ids[1], ids[2] - ids[1], ids.len()), (ids[0] + 1, 0, 5), "{ids:?}");
}

/// What a connection that was given up still held reaches the server later than everything else.
#[tokio::test(flavor = "multi_thread")]
async fn late_bytes_of_a_lost_connection_store_nothing_twice() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&first_through(&middle, &broker));
    let before = events("a", 1);
    confirm(&sink, &before).await;
    middle.hold(true);
    let sent = events("abab", 2);
    let error = fail(&sink, &sent[0]).await;
    assert!(error.chain().contains("unknown"), "{}", error.chain());
    publish_all(&sink, &sent).await;
    middle.hold(false);
    let after = events("ab", 9);
    confirm(&sink, &after).await;
    assert_eq!(broker.ids().await, ids_of(&[before, sent, after].concat()));
}

/// The same of a process that is gone: its successor keeps out what comes then.
#[tokio::test(flavor = "multi_thread")]
async fn late_bytes_of_a_dead_relay_store_nothing_twice() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let first = sink(&first_through(&middle, &broker));
    let before = events("a", 1);
    confirm(&first, &before).await;
    middle.hold(true);
    let sent = events("abab", 2);
    fail(&first, &sent[0]).await;
    drop(first);
    let second = sink(&broker.config());
    publish_all(&second, &sent).await;
    middle.hold(false);
    let after = events("ab", 9);
    confirm(&second, &after).await;
    assert_eq!(broker.ids().await, ids_of(&[before, sent, after].concat()));
}

/// The dead one stored nothing under its own ids, and its successor begins where it began.
#[tokio::test(flavor = "multi_thread")]
async fn late_first_bytes_of_a_dead_relay_store_nothing_twice() {
    let broker = Broker::shared().await;
    let before = events("a", 1);
    confirm(&sink(&broker.config()), &before).await;
    let middle = Middle::before(broker.address()).await;
    middle.hold(true);
    let dead = sink(&RabbitMqStreamConfig { timeout_ms: 1_000, ..through(&middle, &broker) });
    let sent = events("abab", 2);
    fail(&dead, &sent[0]).await;
    drop(dead);
    let second = sink(&broker.config());
    publish_all(&second, &sent).await;
    middle.hold(false);
    middle.until_passed(1).await;
    let after = events("ab", 9);
    confirm(&second, &after).await;
    assert_eq!(broker.ids().await, ids_of(&[before, sent, after].concat()));
}

/// A partition goes away and comes back before anything was sent of it.
#[tokio::test(flavor = "multi_thread")]
async fn who_began_and_sent_nothing_reads_again_before_it_sends() {
    let broker = Broker::shared().await;
    let before = events("abc", 1);
    confirm(&sink(&broker.config()), &before).await;
    let first = sink(&broker.config());
    known(&first, &before).await;
    let sent = events("abab", 10);
    confirm(&sink(&broker.config()), &sent).await;
    known(&first, &sent).await;
    let after = events("ab", 20);
    confirm(&first, &after).await;
    assert_eq!(broker.ids().await, ids_of(&[before, sent, after].concat()));
}

/// The server confirms what it drops. Who was overtaken believes none of it, and nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_was_overtaken_takes_no_confirmation_for_one() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let paused = sink(&RabbitMqStreamConfig { timeout_ms: 30_000, ..through(&middle, &broker) });
    let before = events("a", 1);
    confirm(&paused, &before).await;
    middle.hold(true);
    let sent = events("bcb", 2);
    let successor = async {
        middle.until_waiting().await;
        confirm(&sink(&broker.config()), &sent[1..2]).await;
        middle.hold(false);
    };
    let (outcomes, ()) = tokio::join!(publish(&paused, &sent), successor);
    match &outcomes[0] {
        Outcome::Failed(error) => {
            assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
            assert!(error.chain().contains("took over"), "{}", error.chain());
        }
        other => panic!("{other:?}"),
    }
    assert!(!outcomes.iter().any(|one| matches!(one, Outcome::Confirmed)), "{outcomes:?}");
    assert_eq!(broker.ids().await, ids_of(&[&before[..], &sent[1..2]].concat()));
    // It may begin again, and knows by then what its successor did.
    publish_all(&paused, &sent).await;
    let ids = ids_of(&sent);
    assert_eq!(broker.ids().await[1..], [ids[1], ids[0], ids[2]]);
}

/// Chunks come whole, in frames beyond what was agreed on (`stream.frame_max`), with messages that
/// others may have stored by other ways: none of that keeps a producer from knowing what is stored.
#[tokio::test(flavor = "multi_thread")]
async fn chunks_beyond_the_servers_frame_max_are_read() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let before = events("ab", 1);
    confirm(&sink(&broker.config()), &before).await;
    let channel = broker.channel().await;
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let (none, options) = (BasicProperties::default(), BasicPublishOptions::default());
    let large = vec![7; 20 << 20];
    let sent =
        channel.basic_publish("".into(), broker.stream.as_str().into(), options, &large, none);
    sent.await.expect("sent").await.expect("confirmed");
    let behind = events("ab", 3);
    confirm(&sink(&broker.config()), &behind).await;
    let heir = sink(&through(&middle, &broker));
    known(&heir, &[before, behind].concat()).await;
    assert!(middle.orders().largest_chunk > 20 << 20);
    confirm(&heir, &events("ab", 5)).await;
}

/// Two that both believe the partition to be theirs: what they do to each other loses nothing, and
/// an event comes twice only if it was the first of one that took over.
#[tokio::test(flavor = "multi_thread")]
async fn two_relays_at_once_lose_nothing() {
    let broker = Broker::shared().await;
    let all: Vec<Record> = (0..240).map(|n| one(&format!("k{}", n % 24), n)).collect();
    let [one, other] = [(); 2].map(|()| sink(&broker.config()));
    let work = |sink: std::sync::Arc<_>, size: usize, all: Vec<Record>| async move {
        for call in all.chunks(size) {
            publish_all(&sink, call).await;
        }
    };
    tokio::join!(work(one, 7, all.clone()), work(other, 11, all.clone()));
    let stored = broker.stored().await;
    let distinct: HashSet<_> = stored.iter().map(|one| one.id).collect();
    assert_eq!(distinct.len(), all.len(), "an event is lost");
    // In order, but for repetitions.
    let mut last: HashMap<String, u64> = HashMap::new();
    let mut first_time = HashSet::new();
    for one in stored.iter().filter(|one| first_time.insert(one.id)) {
        let n: u64 = std::str::from_utf8(&one.payload).expect("text").parse().expect("a number");
        let before = last.insert(one.key.clone(), n);
        assert!(before.is_none_or(|before| before < n), "{} after {before:?}", n);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_share_a_stream_and_each_has_a_producer() {
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&through(&middle, &broker));
    let partitions: Vec<PartitionId> = (0..4).map(|n| PartitionId::numbered(n, 4)).collect();
    let of_each: Vec<Vec<Record>> =
        ["aa", "bb", "cc", "dd"].iter().map(|keys| events(keys, 1)).collect();
    let calls = partitions.iter().zip(&of_each);
    let calls = calls.map(|(partition, records)| sink.publish(Publish::new(partition, records)));
    for outcomes in futures_util::future::join_all(calls).await {
        assert!(matches!(outcomes[..], [Outcome::Confirmed, Outcome::Confirmed]), "{outcomes:?}");
    }
    assert_eq!(middle.orders().connections, 4);
    let stored = broker.ids().await;
    assert_eq!(stored.len(), 8);
    for records in &of_each {
        let place = |record: &Record| stored.iter().position(|id| *id == record.event.id());
        assert!(place(&records[0]) < place(&records[1]));
    }
}

/// A stream that was deleted and made anew gets what is published again.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_made_anew_is_not_taken_for_the_old_one() {
    let broker = Broker::shared().await;
    let sink = sink(&broker.config());
    let sent = events("abc", 1);
    confirm(&sink, &sent).await;
    known(&sink, &sent).await;
    broker.delete().await;
    let error = fail(&sink, &events("a", 4)[0]).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None }, "{}", error.chain());
    broker.make().await;
    publish_all(&sink, &sent).await;
    assert_eq!(broker.ids().await[..], ids_of(&sent));
}

/// Many events in few frames; a call that is larger than a frame is cut.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_goes_in_as_few_frames_as_it_fits() {
    use postrider_conformance::samples::{record, sized_event};
    let broker = Broker::shared().await;
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&through(&middle, &broker));
    let small: Vec<Record> = (0..500).map(|n| one(&format!("k{n}"), n)).collect();
    confirm(&sink, &small).await;
    // The first goes alone: it keeps out whoever sent before.
    assert_eq!(middle.orders().frames, [1, 499]);
    let large: Vec<Record> = (0..5).map(|n| record(sized_event("k", n, 800_000), n)).collect();
    confirm(&sink, &large).await;
    assert_eq!(middle.orders().frames[2..], [2, 2, 1]);
    assert_eq!(broker.ids().await, ids_of(&[small, large].concat()));
    assert!(tokio::time::timeout(Duration::from_secs(20), sink.close()).await.is_ok());
}
