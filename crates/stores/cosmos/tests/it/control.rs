//! What this store keeps for relays, beyond what the shared suites ask: large letters, heartbeats,
//! and the end of a range.
//!
//! What lives here: tests against the emulator. What does not: the feed (`feed.rs`).
//! Invariant: a letter is whole or not there; a decision that letters follow is never unmade.

use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt;
use postrider_conformance::samples::{consumer, event, group, relay};
use postrider_core::{
    Acquired, Checkpoints, ContentType, DeadLetterFilter, DeadLetterState, DeadLetters, Entry,
    ErrorKind, EventType, Feed, HeldLease, Key, Leases, Malformed, NewDeadLetter, NewEvent,
    PartitionId, Position, Successor, Tally, Timestamp, Topic,
};
use postrider_store_cosmos::CosmosStore;
use postrider_store_cosmos::azure_data_cosmos::feed::FeedScope;
use serde_json::Value;

use crate::support::{CONTAINER, LEASES, WHOLE, World, config, read_from};

const TTL: Duration = Duration::from_secs(30);

async fn held(store: &CosmosStore, partition: &PartitionId, name: &str) -> HeldLease {
    let answer = store.acquire(&group("g"), partition, &relay(name), TTL).await;
    match answer.expect("an answer") {
        Acquired::Held(lease) => lease,
        Acquired::Busy { .. } => panic!("it is free"),
    }
}

fn parked(entry: Entry) -> NewDeadLetter {
    let reason = "refused".to_owned();
    NewDeadLetter { entry, state: DeadLetterState::Parked, reason, attempts: 1 }
}

/// How many documents the lease container has of a kind.
async fn kept(world: &World, kind: &str) -> usize {
    let mut other = config(&world.account);
    (other.container, other.lease_container) = (LEASES.to_owned(), CONTAINER.to_owned());
    let store = CosmosStore::open(&other).await.expect("the store opens");
    let text = format!("SELECT * FROM c WHERE c.kind = '{kind}'");
    let scope = FeedScope::full_container();
    let found = store.container().query_items::<Value>(text, scope, None).await;
    found.expect("a query").try_collect::<Vec<_>>().await.expect("documents").len()
}

/// An event of nearly 2 MB, the most that a container holds, and a document as large that is none:
/// both become letters, are read and sent again, and leave nothing behind.
#[tokio::test]
async fn a_letter_of_nearly_two_megabytes_is_kept_whole() {
    const SIZE: usize = 1_990_000;
    let world = World::new(1).await;
    let store = &world.store;
    let text: String = (0..SIZE).map(|n| char::from(b'a' + (n % 23) as u8)).collect();
    let large = NewEvent::builder(
        Key::new("k").expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("Large").expect("valid"),
    )
    .payload(ContentType::new("text/plain").expect("valid"), Bytes::from(text))
    .build()
    .expect("within the limits");
    world.append(&[large]).await;
    let partition = store.partitions(&consumer("sink")).await.expect("listed").remove(0);
    let (records, end, _) = read_from(store, &partition, &Position::START, WHOLE).await;
    let [record] = &records[..] else { panic!("one event") };
    let broken = Malformed {
        position: end.clone(),
        appended_at: Timestamp::from_millis(1),
        key: Some(Key::new("m").expect("valid")),
        reason: "broken".to_owned(),
        raw: Bytes::from((0..SIZE).map(|n| (n % 251) as u8).collect::<Vec<u8>>()),
    };
    let lease = held(store, &partition, "one").await;
    let letters = [parked(Entry::Record(record.clone())), parked(Entry::Malformed(broken.clone()))];
    assert_eq!(store.park(&lease, &consumer("sink"), &letters).await.expect("parked"), 2);
    // A repetition after a lost answer adds nothing.
    assert_eq!(store.park(&lease, &consumer("sink"), &letters).await.expect("parked"), 0);
    assert_eq!((kept(&world, "letter").await, kept(&world, "part").await), (2, 4));
    let all = DeadLetterFilter::default();
    let listed = store.list(&all, None, 10).await.expect("listed");
    let Entry::Record(found) = &listed[0].entry else { panic!("an event") };
    assert!(found.event == record.event);
    let Entry::Malformed(found) = &listed[1].entry else { panic!("no event") };
    assert!(found.raw == broken.raw && found.reason == broken.reason);

    store
        .advance(&lease, &consumer("sink"), &end, Tally { published: 0, parked: 0 })
        .await
        .expect("advanced");
    store.requeue(&all).await.expect("requeued");
    let released = store.released(&consumer("sink"), &partition, WHOLE).await.expect("read");
    let [letter] = &released[..] else { panic!("the event alone is sent again") };
    let Entry::Record(found) = &letter.entry else { panic!("an event") };
    assert!(found.event == record.event);
    store.resolve(&lease, &consumer("sink"), &[letter.id]).await.expect("resolved");
    assert_eq!((kept(&world, "letter").await, kept(&world, "part").await), (1, 2));
    assert_eq!(store.discard(&all).await.expect("discarded"), 1);
    assert_eq!((kept(&world, "letter").await, kept(&world, "part").await), (0, 0));
}

/// One heartbeat tells the live relays and whether there is anything to send again; it keeps the
/// leases' holder on the list, and puts none back that has left.
#[tokio::test]
async fn a_heartbeat_brings_what_a_relay_at_rest_has_to_know() {
    let world = World::new(1).await;
    let (one, other) = (&world.store, &world.another().await);
    let short = Duration::from_secs(2);
    let partition = one.partitions(&consumer("sink")).await.expect("listed").remove(0);
    one.join(&group("g"), &relay("one"), short).await.expect("joined");
    other.join(&group("g"), &relay("other"), short).await.expect("joined");
    let lease = held(one, &partition, "one").await;
    let beat = async || {
        let answer = one.heartbeat(&group("g"), &[&lease], short).await.expect("an answer");
        answer.news.expect("with news")
    };
    let news = beat().await;
    assert_eq!(news.relays, [relay("one"), relay("other")]);
    assert!(!news.requeued);
    // The other one says nothing more, and is missed; this one's heartbeats are enough.
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    while beat().await.relays != [relay("one")] {
        assert!(tokio::time::Instant::now() < until, "the silent relay is missed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let seen = other.join(&group("g"), &relay("other"), short).await.expect("joined");
    assert_eq!(seen, [relay("one"), relay("other")]);

    world.append(&[event("k", 1)]).await;
    let (records, end, _) = read_from(one, &partition, &Position::START, WHOLE).await;
    let letter = parked(Entry::Record(records[0].clone()));
    one.park(&lease, &consumer("sink"), &[letter]).await.expect("parked");
    one.advance(&lease, &consumer("sink"), &end, Tally { published: 0, parked: 0 })
        .await
        .expect("advanced");
    assert!(!beat().await.requeued);
    other.requeue(&DeadLetterFilter::default()).await.expect("requeued");
    assert!(beat().await.requeued);

    one.leave(&group("g"), &relay("one")).await.expect("left");
    assert!(!beat().await.relays.contains(&relay("one")), "it has left");
}

/// Whoever looks at leases sees relays beside them, so that both run out together.
#[tokio::test]
async fn a_dead_relay_is_missed_with_its_leases() {
    let world = World::new(1).await;
    let (dead, other) = (&world.store, &world.another().await);
    let short = Duration::from_secs(2);
    let partition = dead.partitions(&consumer("sink")).await.expect("listed").remove(0);
    dead.join(&group("g"), &relay("dead"), short).await.expect("joined");
    let answer = dead.acquire(&group("g"), &partition, &relay("dead"), short).await;
    assert!(matches!(answer, Ok(Acquired::Held(_))));
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    // It looks at leases only, as a relay does that waits for its share.
    while !other.leases(&group("g")).await.expect("listed")[0].remaining.is_zero() {
        assert!(tokio::time::Instant::now() < until, "the lease runs out");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let live = other.join(&group("g"), &relay("other"), short).await.expect("joined");
    assert_eq!(live, [relay("other")]);
}

/// A relay dies after it has decided who takes over from a range that was split, and the service
/// splits again before another one comes: the decision holds, for letters as for the feed.
#[tokio::test]
async fn who_takes_over_is_decided_once() {
    let world = World::new(1).await;
    let store = &world.store;
    let sink = consumer("sink");
    let partition = store.partitions(&sink).await.expect("listed").remove(0);
    world.append(&(0..8).map(|n| event(&format!("k{n}"), n)).collect::<Vec<_>>()).await;
    let (records, end, _) = read_from(store, &partition, &Position::START, WHOLE).await;
    let lease = held(store, &partition, "one").await;
    let letters: Vec<_> = records.iter().map(|r| parked(Entry::Record(r.clone()))).collect();
    store.park(&lease, &sink, &letters).await.expect("parked");
    store.advance(&lease, &sink, &end, Tally { published: 0, parked: 0 }).await.expect("advanced");
    let named = |names: &[&str]| -> Vec<Successor> {
        let partition = |name: &&str| PartitionId::new(*name).expect("valid");
        let made = names.iter().map(partition);
        made.map(|partition| Successor { partition, from: end.clone() }).collect()
    };
    let two = named(&["00-1F", "1F-FF"]);
    // The batch that ends the range is lost on its way, whatever came before it.
    let lost = r#"{"operation": "batch", "content": "\"ended\":true", "count": 100}"#;
    world.account.fault(lost).expect("a fault");
    let failed = store.finish(&lease, &sink, &two).await;
    assert!(failed.is_err(), "{failed:?}");
    world.account.clear_faults().expect("cleared");
    assert_eq!(store.partitions(&sink).await.expect("listed"), std::slice::from_ref(&partition));

    let three = named(&["00-0F", "0F-1F", "1F-FF"]);
    store.finish(&lease, &sink, &three).await.expect("finished");
    let decided: Vec<_> = two.into_iter().map(|successor| successor.partition).collect();
    assert_eq!(store.partitions(&sink).await.expect("listed"), decided);
    let listed = store.list(&DeadLetterFilter::default(), None, 100).await.expect("listed");
    assert_eq!(listed.len(), letters.len());
    assert!(listed.iter().all(|letter| decided.contains(&letter.partition)));
}

/// An account in which two relays could both hold a lease, or one not see what another wrote.
#[tokio::test]
async fn accounts_that_would_break_the_fence_are_refused() {
    let world = World::new(1).await;
    for (several, level, says) in
        [(true, "Session", "multi-region writes"), (false, "Eventual", "Eventual")]
    {
        let account = format!(
            r#"{{"operation": "account", "answer": {{"status": 200, "content": {{
                "enableMultipleWriteLocations": {several},
                "userConsistencyPolicy": {{ "defaultConsistencyLevel": "{level}" }} }} }} }}"#
        );
        world.account.fault(&account).expect("a fault");
        let refused = CosmosStore::open(&config(&world.account)).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Permanent);
        assert!(refused.to_string().contains(says), "{refused}");
    }
    // One that tells nothing is not refused for it.
    world.account.fault(r#"{"operation": "account", "answer": {"status": 403}}"#).expect("a fault");
    CosmosStore::open(&config(&world.account)).await.expect("opened");
}
