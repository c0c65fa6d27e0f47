//! Writes under a lease while it is taken over, by real connections at the same time; and what
//! staying alive costs.

use std::time::Duration;

use futures_util::future::BoxFuture;
use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::PostgresStore;
use tokio_postgres::Client;

use crate::support::*;

on_both_versions! {
    no_write_slips_past_a_take_over_that_is_under_way
    a_take_over_waits_for_a_write_that_is_under_way
    of_many_askers_at_once_one_gets_each_lease
    a_checkpoint_of_a_tick_that_is_gone_is_fenced
    joining_again_writes_nothing_while_half_the_time_is_left
    renewing_keeps_the_relay_itself_alive_and_never_brings_it_back
    a_heartbeat_tells_who_lives_and_whether_anything_was_requeued
}

const SHORT: Duration = Duration::from_millis(100);
const ALL: BatchLimit = BatchLimit { records: 100, bytes: 1 << 20 };

/// A store with a partition's lease that has run out, and a letter and a record to write about.
struct Desk {
    world: World,
    lease: HeldLease,
    record: Record,
    letter: DeadLetterId,
}

impl Desk {
    async fn new(version: Version) -> Self {
        let world = World::new(version, 1).await;
        world.append(vec![event("a", "1"), event("b", "2")]).await;
        let records = world.records(&p(0, 1)).await;
        let lease = world.held_for(&p(0, 1), "old", SHORT).await;
        let (store, me) = (&world.store, consumer("sink"));
        store.park(&lease, &me, &[parked(&records[0])]).await.expect("parked");
        let tally = Tally { published: 0, parked: 1 };
        store.advance(&lease, &me, &records[0].position, tally).await.expect("moved");
        store.requeue(&DeadLetterFilter::default()).await.expect("requeued");
        let letter = store.released(&me, &p(0, 1), ALL).await.expect("readable")[0].id;
        tokio::time::sleep(SHORT).await;
        Self { world, lease, record: records[1].clone(), letter }
    }

    /// All that writes under the lease have left, as one text.
    async fn kept(&self, client: &Client) -> String {
        one(
            client,
            "SELECT (SELECT string_agg(c::text, ' ' ORDER BY partition) FROM postrider.checkpoint c)
                || (SELECT string_agg(d::text, ' ' ORDER BY number) FROM postrider.dead_letter d)",
        )
        .await
    }
}

fn parked(record: &Record) -> NewDeadLetter {
    NewDeadLetter {
        entry: Entry::Record(record.clone()),
        state: DeadLetterState::Parked,
        reason: "no\0".into(),
        attempts: 1,
    }
}

type Write = for<'a> fn(&'a PostgresStore, &'a Desk) -> BoxFuture<'a, Result<()>>;

/// Every write under a lease.
const WRITES: [Write; 5] = [
    |store, desk| {
        let tally = Tally { published: 1, parked: 0 };
        Box::pin(async move {
            store.advance(&desk.lease, &consumer("sink"), &desk.record.position, tally).await
        })
    },
    |store, desk| {
        Box::pin(async move {
            let heir = Successor { partition: p(0, 2), from: Position::START };
            store.finish(&desk.lease, &consumer("sink"), &[heir]).await
        })
    },
    |store, desk| {
        Box::pin(async move {
            let letters = [parked(&desk.record)];
            store.park(&desk.lease, &consumer("sink"), &letters).await.map(drop)
        })
    },
    |store, desk| {
        Box::pin(async move { store.resolve(&desk.lease, &consumer("sink"), &[desk.letter]).await })
    },
    |store, desk| {
        Box::pin(async move {
            let state = DeadLetterState::Parked;
            store.refuse(&desk.lease, desk.letter, state, "again", 1).await
        })
    },
];

/// The take-over has the row and has not committed: the old holder's write must not go by what was
/// committed before it.
async fn no_write_slips_past_a_take_over_that_is_under_way(version: Version) {
    let desk = Desk::new(version).await;
    let watcher = desk.world.session().await;
    let before = desk.kept(&watcher).await;
    for write in WRITES {
        let session = desk.world.session().await;
        let take_over = "BEGIN; UPDATE postrider.lease SET holder = 'new', epoch = epoch + 1";
        session.batch_execute(take_over).await.expect("taken over");
        let written = write(&desk.world.store, &desk);
        let committed = async {
            until_one_waits(&watcher).await;
            session.batch_execute("COMMIT").await.expect("committed");
        };
        let (written, ()) = tokio::join!(written, committed);
        assert_eq!(written.map_err(|error| error.kind()), Err(ErrorKind::Fenced));
        assert_eq!(desk.kept(&watcher).await, before, "nothing was written");
        let restore = "UPDATE postrider.lease SET holder = 'old', epoch = epoch - 1";
        watcher.batch_execute(restore).await.expect("put back");
    }
    for write in WRITES {
        write(&desk.world.store, &desk).await.expect("nobody took the lease over");
    }
}

/// A write that has passed the fence and waits for something else is committed before anybody else
/// has the lease: what the new holder reads cannot change any more.
async fn a_take_over_waits_for_a_write_that_is_under_way(version: Version) {
    let desk = Desk::new(version).await;
    let (store, me) = (desk.world.store.clone(), consumer("sink"));
    let (session, watcher) = (desk.world.session().await, desk.world.session().await);
    session
        .batch_execute("BEGIN; SELECT FROM postrider.checkpoint FOR UPDATE")
        .await
        .expect("held");
    let tally = Tally { published: 1, parked: 0 };
    let write = store.advance(&desk.lease, &me, &desk.record.position, tally);
    let then = async {
        until_one_waits(&watcher).await;
        let (store, only) = (store.clone(), p(0, 1));
        let taking = tokio::spawn(async move {
            let taken = store.acquire(&group(), &only, &relay_id("new"), TTL).await;
            (taken, store.checkpoint(&consumer("sink"), &only).await)
        });
        let waiting = "SELECT count(*) >= 2 FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        while !one::<bool>(&watcher, waiting).await {
            assert!(!taking.is_finished(), "it was taken over during the write");
            assert!(tokio::time::Instant::now() < deadline, "the take-over neither waits nor ends");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        session.batch_execute("COMMIT").await.expect("let go");
        taking.await.expect("it does not panic")
    };
    let (written, (taken, found)) = tokio::join!(write, then);
    written.expect("it was first");
    assert!(matches!(taken, Ok(Acquired::Held(_))), "{taken:?}");
    let found = found.expect("readable").expect("there");
    assert_eq!((found.position, found.published), (desk.record.position.clone(), 1));
}

async fn of_many_askers_at_once_one_gets_each_lease(version: Version) {
    let world = World::new(version, 4).await;
    for round in 0..5 {
        let mut asking = tokio::task::JoinSet::new();
        for asker in 0..8 {
            let store = world.store.clone();
            asking.spawn(async move {
                let name = relay_id(&format!("relay {round}.{asker}"));
                let mut held = Vec::new();
                for partition in 0..4 {
                    let answer = store.acquire(&group(), &p(partition, 4), &name, TTL).await;
                    if let Acquired::Held(lease) = answer.expect("an answer") {
                        held.push(lease);
                    }
                }
                held
            });
        }
        let held: Vec<HeldLease> = asking.join_all().await.into_iter().flatten().collect();
        let mut partitions: Vec<_> = held.iter().map(HeldLease::partition).collect();
        partitions.sort();
        assert_eq!(partitions, [&p(0, 4), &p(1, 4), &p(2, 4), &p(3, 4)]);
        assert!(held.iter().all(|lease| lease.epoch().get() == round + 1), "{held:?}");
        for lease in held {
            world.store.release(&lease).await.expect("released");
        }
    }
}

/// The database was replaced by a copy that lacks the newest tick: what was delivered from there
/// may be appended again at other places, so the relay must not note that it is done.
async fn a_checkpoint_of_a_tick_that_is_gone_is_fenced(version: Version) {
    let world = World::new(version, 1).await;
    world.append(vec![event("a", "1")]).await;
    let first = world.records(&p(0, 1)).await.remove(0);
    world.append(vec![event("a", "2")]).await;
    let second = world.records(&p(0, 1)).await.remove(1);
    let (store, me) = (&world.store, consumer("sink"));
    let lease = world.held(&p(0, 1), "one").await;
    let one_more = Tally { published: 1, parked: 0 };
    store.advance(&lease, &me, &Position::START, Tally::default()).await.expect("the start");
    let time = Position::from(ulid::Ulid::from_time(Timestamp::from_millis(1_000)));
    store.advance(&lease, &me, &time, Tally::default()).await.expect("a plain time");
    store.advance(&lease, &me, &first.position, one_more).await.expect("it is known");
    let loss = "DELETE FROM postrider.outbox_tick
        WHERE stamp = (SELECT max(stamp) FROM postrider.outbox_tick)";
    world.session().await.batch_execute(loss).await.expect("deleted");
    let error = store.advance(&lease, &me, &second.position, one_more).await.expect_err("unknown");
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error:?}");
    assert!(error.to_string().contains("older copy"), "{error}");
    let kept = store.checkpoint(&me, &p(0, 1)).await.expect("readable").expect("there");
    assert_eq!((kept.position, kept.published), (first.position, 1));
}

/// The transaction that wrote a relay's row last.
async fn writer(client: &Client, relay: &str) -> Option<String> {
    let sql = "SELECT xmin::text FROM postrider.relay WHERE relay = $1";
    client.query_opt(sql, &[&relay]).await.expect("readable").map(|row| row.get(0))
}

async fn joining_again_writes_nothing_while_half_the_time_is_left(version: Version) {
    let world = World::new(version, 1).await;
    let (store, client) = (&world.store, world.session().await);
    let (me, ttl) = (relay_id("me"), Duration::from_secs(2));
    store.join(&group(), &me, ttl).await.expect("joined");
    let first = writer(&client, "me").await;
    for _ in 0..3 {
        assert_eq!(
            store.join(&group(), &me, ttl).await.expect("joined"),
            std::slice::from_ref(&me)
        );
    }
    assert_eq!(writer(&client, "me").await, first, "its row is fresh");
    let gone = "INSERT INTO postrider.relay VALUES ('outbox', 'group', 'gone', 'epoch')";
    client.batch_execute(gone).await.expect("inserted");
    tokio::time::sleep(ttl / 2).await;
    assert_eq!(store.join(&group(), &me, ttl).await.expect("joined"), [me]);
    assert_ne!(writer(&client, "me").await, first, "half of its time was gone");
    assert_eq!(writer(&client, "gone").await, None, "whoever writes removes the dead");
}

async fn renewing_keeps_the_relay_itself_alive_and_never_brings_it_back(version: Version) {
    let world = World::new(version, 2).await;
    let store = &world.store;
    let (me, other) = (relay_id("me"), relay_id("other"));
    store.join(&group(), &me, SHORT).await.expect("joined");
    let leases = [world.held(&p(0, 2), "me").await, world.held(&p(1, 2), "me").await];
    let asked = [&leases[0], &leases[1]];
    let renewed = store.renew(&asked, TTL).await.expect("an answer");
    assert_eq!(renewed, [Renewal::Renewed; 2]);
    tokio::time::sleep(SHORT).await;
    let members = store.join(&group(), &other, TTL).await.expect("joined");
    assert_eq!(members, [me.clone(), other.clone()]);
    store.leave(&group(), &me).await.expect("left");
    store.renew(&asked, TTL).await.expect("it still drains");
    assert_eq!(store.join(&group(), &other, TTL).await.expect("joined"), [other]);
}

async fn a_heartbeat_tells_who_lives_and_whether_anything_was_requeued(version: Version) {
    let desk = Desk::new(version).await;
    let store = &desk.world.store;
    let asked = [&desk.lease];
    let beat = async || {
        let beat = store.heartbeat(&group(), &asked, TTL).await.expect("an answer");
        assert_eq!(beat.renewals, [Renewal::Renewed]);
        let news = beat.news.expect("this store has news");
        (news.relays, news.requeued)
    };
    let (me, other) = (relay_id("old"), relay_id("other"));
    assert_eq!(beat().await, (vec![], true), "it never joined");
    store.join(&group(), &me, SHORT).await.expect("joined");
    store.join(&group(), &other, SHORT).await.expect("joined");
    let stranger = GroupName::new("others").expect("valid");
    store.join(&stranger, &relay_id("stranger"), TTL).await.expect("joined");
    assert_eq!(beat().await.0, [me.clone(), other.clone()]);
    tokio::time::sleep(SHORT).await;
    assert_eq!(beat().await.0, std::slice::from_ref(&me), "the other is gone");
    store.skip(&DeadLetterFilter::default()).await.expect("skipped");
    assert_eq!(beat().await, (vec![me.clone()], false));
    store.requeue(&DeadLetterFilter::default()).await.expect("requeued");
    assert_eq!(beat().await, (vec![me], true));
}
