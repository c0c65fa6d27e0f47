//! What a relay keeps: leases, checkpoints, dead letters, retention, and their sums.

use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlite::{OnDuplicate, SqliteOptions, SqliteStore};

use crate::support::*;

const NOTHING: Tally = Tally { published: 0, parked: 0 };

fn published(count: u64) -> Tally {
    Tally { published: count, parked: 0 }
}

fn letter(entry: &Entry, state: DeadLetterState) -> NewDeadLetter {
    NewDeadLetter { entry: entry.clone(), state, reason: "refused".into(), attempts: 3 }
}

fn all() -> DeadLetterFilter {
    DeadLetterFilter::default()
}

/// Case O67: what completes after the lease has gone to another changes nothing.
#[tokio::test]
async fn o67_every_write_under_a_lost_lease_is_fenced() {
    let world = World::new(1).await;
    let (store, me, part) = (&world.store, consumer("sink"), p(0, 1));
    world.append(vec![event("k", "1"), event("k", "2")]).await;
    let page = world.page(&part, &Position::START).await;
    let old = world.held(&part, "old").await;
    let parked = [letter(&page.entries[0], DeadLetterState::Parked)];
    store.park(&old, &me, &parked).await.expect("park");
    store.requeue(&all()).await.expect("requeue");
    world.clock.advance(TTL + Duration::from_millis(1));
    let new = world.held(&part, "new").await;
    assert!(new.epoch() > old.epoch());
    let before = format!("{:?}", (store.progress().await, store.list(&all(), None, 9).await));
    let id = store.list(&all(), None, 1).await.expect("list")[0].id;
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 10, dry_run: false };
    let fenced = [
        store.advance(&old, &me, &page.position, published(2)).await.map(drop),
        store.park(&old, &me, &[letter(&page.entries[1], DeadLetterState::Parked)]).await.map(drop),
        store.resolve(&old, &me, &[id]).await,
        store.refuse(&old, id, DeadLetterState::Parked, "again", 1).await,
        store.finish(&old, &me, &[]).await,
        store.prune(Some(&old), &policy).await.map(drop),
    ];
    for result in fenced {
        assert_eq!(result.expect_err("fenced").kind(), ErrorKind::Fenced);
    }
    let after = format!("{:?}", (store.progress().await, store.list(&all(), None, 9).await));
    assert_eq!(before, after, "nothing was written");
    assert_eq!(
        store.renew(&[&old, &new], TTL).await.expect("renew"),
        [Renewal::Lost, Renewal::Renewed]
    );
    store.release(&old).await.expect("releasing a lost lease does nothing");
    store.advance(&new, &me, &page.position, published(1)).await.expect("the holder may");
}

/// The host's wall clock moves by a day in either direction: no lease notices.
#[tokio::test]
async fn leases_do_not_follow_the_wall_clock() {
    let world = World::new(1).await;
    let part = p(0, 1);
    let _held = world.held(&part, "one").await;
    for day_ms in [86_400_000, -2 * 86_400_000] {
        world.clock.move_wall_clock(day_ms);
        match world.store.acquire(&group(), &part, &relay_id("two"), TTL).await.expect("answer") {
            Acquired::Busy { holder, remaining } => {
                assert_eq!(holder, relay_id("one"));
                assert!(remaining <= TTL && remaining > TTL / 2, "{remaining:?}");
            }
            Acquired::Held(lease) => panic!("taken: {lease:?}"),
        }
    }
}

/// After a reboot the counter starts anew: a lease of another boot has expired, whatever it says.
#[tokio::test]
async fn a_lease_of_another_boot_has_expired() {
    let world = World::new(1).await;
    let part = p(0, 1);
    let old = world.held(&part, "one").await;
    world
        .connection()
        .execute("UPDATE postrider_lease SET boot_id = 'before', expires_ms = expires_ms * 2", [])
        .expect("update");
    let new = world.held(&part, "two").await;
    assert!(new.epoch() > old.epoch());
}

#[tokio::test]
async fn live_relays_are_listed_until_they_leave_or_expire() {
    let world = World::new(1).await;
    let (store, group) = (&world.store, group());
    for name in ["b", "a"] {
        store.join(&group, &relay_id(name), TTL).await.expect("join");
    }
    let seen = store.join(&group, &relay_id("c"), TTL * 3).await.expect("join");
    assert_eq!(seen, ["a", "b", "c"].map(relay_id));
    store.leave(&group, &relay_id("a")).await.expect("leave");
    world.clock.advance(TTL * 2);
    let seen = store.join(&group, &relay_id("d"), TTL).await.expect("join");
    assert_eq!(seen, ["c", "d"].map(relay_id));
}

/// published + parked + dropped + pending = appended, at every step of a dead letter's life.
#[tokio::test]
async fn nothing_is_lost_from_the_sums() {
    let world = World::new(1).await;
    let (store, me, part) = (&world.store, consumer("sink"), p(0, 1));
    world.append((0..10).map(|i| event("k", &i.to_string())).collect()).await;
    let page = world.page(&part, &Position::START).await;
    let lease = world.held(&part, "r").await;
    let sums = || async {
        let progress = store.progress().await.expect("progress").remove(0);
        let parts =
            [progress.checkpoint.published, progress.parked, progress.dropped, progress.pending];
        assert_eq!(parts.iter().sum::<u64>(), 10, "{parts:?}");
        parts
    };
    let to = page.entries[0].position();
    store.advance(&lease, &me, to, published(1)).await.expect("advance");
    assert_eq!(sums().await, [1, 0, 0, 9]);
    let letters: Vec<_> =
        page.entries[1..6].iter().map(|entry| letter(entry, DeadLetterState::Parked)).collect();
    assert_eq!(store.park(&lease, &me, &letters).await.expect("park"), 5);
    assert_eq!(
        store.park(&lease, &me, &letters).await.expect("again"),
        0,
        "a repetition adds none"
    );
    let tally = Tally { published: 1, parked: 5 };
    store.advance(&lease, &me, page.entries[6].position(), tally).await.expect("advance");
    assert_eq!(sums().await, [2, 5, 0, 3]);
    let kept = store.list(&all(), None, 10).await.expect("list");
    let ids = |range: std::ops::Range<usize>| -> Vec<DeadLetterId> {
        kept[range].iter().map(|letter| letter.id).collect()
    };
    let some = |ids| DeadLetterFilter { ids, ..all() };
    assert_eq!(store.discard(&some(ids(0..2))).await.expect("discard"), 2);
    assert_eq!(sums().await, [2, 3, 2, 3]);
    assert_eq!(store.requeue(&some(ids(2..3))).await.expect("requeue"), 1);
    assert_eq!(sums().await, [2, 3, 2, 3]);
    let gone = store.released(&me, &part, LIMIT).await.expect("released");
    assert_eq!(gone.iter().map(|letter| letter.id).collect::<Vec<_>>(), ids(2..3));
    store.resolve(&lease, &me, &ids(2..3)).await.expect("resolve");
    store.resolve(&lease, &me, &ids(2..3)).await.expect("again counts none");
    assert_eq!(sums().await, [3, 2, 2, 3]);
    assert_eq!(store.skip(&all()).await.expect("skip"), 2);
    assert_eq!(sums().await, [3, 2, 2, 3]);
    store.advance(&lease, &me, &page.position, published(3)).await.expect("advance");
    assert_eq!(sums().await, [6, 2, 2, 0]);
    let error = store.advance(&lease, &me, to, NOTHING).await.expect_err("backwards");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    let error = store.remove_consumer(&me).await.expect_err("at work");
    assert_eq!(error.kind(), ErrorKind::Transient);
    store.release(&lease).await.expect("release");
    assert!(store.remove_consumer(&me).await.expect("remove"));
    assert!(!store.remove_consumer(&me).await.expect("it is gone"));
    assert!(store.list(&all(), None, 10).await.expect("list").is_empty());
}

/// The key's later letters stay behind its first parked one and leave in order.
#[tokio::test]
async fn released_letters_keep_their_keys_order() {
    let world = World::new(1).await;
    let (store, me, part) = (&world.store, consumer("sink"), p(0, 1));
    world.append(["a", "b", "a", "b", "a"].map(|k| event(k, k)).into()).await;
    let page = world.page(&part, &Position::START).await;
    let lease = world.held(&part, "r").await;
    let letters: Vec<_> = page
        .entries
        .iter()
        .zip([
            DeadLetterState::Parked,
            DeadLetterState::Waiting,
            DeadLetterState::Waiting,
            DeadLetterState::Parked,
            DeadLetterState::Waiting,
        ])
        .map(|(entry, state)| letter(entry, state))
        .collect();
    store.park(&lease, &me, &letters).await.expect("park");
    let passed = store.advance(&lease, &me, &page.position, NOTHING).await;
    passed.expect("advance");
    let ids: Vec<_> =
        store.list(&all(), None, 9).await.expect("list").iter().map(|l| l.id).collect();
    let released = || async {
        let letters = store.released(&me, &part, LIMIT).await.expect("released");
        letters.iter().map(|letter| letter.id).collect::<Vec<_>>()
    };
    assert_eq!(released().await, [ids[1]]);
    let first = DeadLetterFilter { ids: vec![ids[0]], ..all() };
    assert_eq!(store.requeue(&first).await.expect("requeue"), 1);
    assert_eq!(released().await, [ids[0], ids[1], ids[2], ids[4]]);
    store.refuse(&lease, ids[0], DeadLetterState::Parked, "still", 2).await.expect("refuse");
    let again = store.at(&me, &part, page.entries[0].position()).await.expect("at");
    let again = again.expect("it is there");
    assert_eq!((again.attempts, again.reason.as_str()), (5, "still"));
    assert_eq!(released().await, [ids[1]]);
    assert_eq!(store.skip(&first).await.expect("skip"), 1);
    assert_eq!(released().await, [ids[1], ids[2], ids[4]]);
    let keys = [key("a"), key("b"), key("c")];
    assert_eq!(store.blocked(&me, &part, &keys).await.expect("blocked"), [key("a"), key("b")]);
    assert_eq!(store.blocking(&me, &part).await.expect("blocking"), 4);
}

/// Case O37: an outage longer than the retention; what is unsent stays, and the newest event too.
#[tokio::test]
async fn o37_nothing_unsent_is_pruned_however_old() {
    let world = World::new(1).await;
    let (store, me, part) = (&world.store, consumer("sink"), p(0, 1));
    world.append((0..10).map(|i| event("k", &i.to_string())).collect()).await;
    let policy = RetentionPolicy { keep: Duration::from_secs(60), batch: 3, dry_run: false };
    world.clock.advance(Duration::from_secs(86_400));
    assert_eq!(store.prune(None, &policy).await.expect("prune").events, 0, "no consumer yet");
    let page = world.page(&part, &Position::START).await;
    let lease = world.held(&part, "r").await;
    store.advance(&lease, &me, page.entries[4].position(), published(5)).await.expect("advance");
    let dry = RetentionPolicy { dry_run: true, ..policy };
    let counted = store.prune(None, &dry).await.expect("dry run");
    assert_eq!((counted.events, counted.more, counted.horizon), (3, true, None));
    let one = store.prune(None, &policy).await.expect("prune");
    assert_eq!((one.events, one.more), (3, true));
    let two = store.prune(None, &policy).await.expect("prune");
    assert_eq!((two.events, two.more), (2, false));
    assert_eq!(two.horizon.as_ref(), Some(page.entries[4].position()));
    assert_eq!(store.prune(None, &policy).await.expect("prune").events, 0);
    let rest = world.page(&part, page.entries[4].position()).await;
    assert_eq!(rest.entries, page.entries[5..], "everything unsent is there");
    assert_eq!(world.page(&part, &Position::START).await.entries, page.entries[5..]);
    let below = page.entries[3].position();
    let error = Feed::read(store, &part, below, LIMIT).await.expect_err("pruned");
    assert!(error.to_string().contains("below the retention horizon"), "{error}");
    assert!(error.to_string().contains(&page.entries[4].position().to_string()), "{error}");
    let early = record(&page.entries[0]).appended_at;
    let early = Timestamp::from_millis(early.as_millis() - 1);
    assert!(store.position_at(&part, early).await.is_err());
    store.advance(&lease, &me, &page.position, published(5)).await.expect("advance");
    while store.prune(None, &policy).await.expect("prune").more {}
    let left = world.page(&part, &Position::START).await;
    assert_eq!(left.entries, page.entries[9..], "the newest seeds the next");
    let store_of = store.clone();
    let next = event("k", "next");
    store
        .transaction(move |tx| store_of.append(tx, &[next], OnDuplicate::Fail))
        .await
        .expect("append");
    assert_eq!(payloads(&world.page(&part, &page.position).await), ["next"]);
}

/// A consumer that has nothing yet in one partition pins that one; a slow one pins its own.
#[tokio::test]
async fn the_slowest_consumer_of_each_partition_bounds_retention() {
    let world = World::new(2).await;
    let store = &world.store;
    world.append((0..20).map(|i| event(&format!("k{i}"), "x")).collect()).await;
    let keep_none = RetentionPolicy { keep: Duration::ZERO, batch: 100, dry_run: false };
    world.clock.advance(Duration::from_millis(5));
    let pages = [
        world.page(&p(0, 2), &Position::START).await,
        world.page(&p(1, 2), &Position::START).await,
    ];
    let lease = world.held(&p(0, 2), "r").await;
    let middle = pages[0].entries[2].position();
    store.advance(&lease, &consumer("fast"), &pages[0].position, NOTHING).await.expect("advance");
    store.advance(&lease, &consumer("slow"), middle, NOTHING).await.expect("advance");
    assert_eq!(store.prune(None, &keep_none).await.expect("prune").events, 3);
    assert_eq!(world.page(&p(1, 2), &Position::START).await, pages[1]);
    // A position that was another partition's event is accepted after that event is gone.
    store.release(&lease).await.expect("release");
    store.remove_consumer(&consumer("slow")).await.expect("remove");
    while store.prune(None, &keep_none).await.expect("prune").more {}
    let mut foreign: Vec<_> =
        pages[0].entries.iter().map(|entry| entry.position().clone()).collect();
    foreign.truncate(4);
    for position in foreign {
        let page = Feed::read(store, &p(1, 2), &position, LIMIT).await.expect("accepted");
        assert!(page.entries.iter().all(|entry| {
            entry.position().to_ulid().expect("ULID") > position.to_ulid().expect("ULID")
        }));
    }
}

/// Letters of an ended partition go where their keys' later events are.
#[tokio::test]
async fn dead_letters_follow_their_keys_into_the_successors() {
    let world = World::new(1).await;
    let (store, me) = (&world.store, consumer("drain"));
    world.append((0..9).map(|i| event(&format!("k{i}"), "x")).collect()).await;
    let page = world.page(&p(0, 1), &Position::START).await;
    let lease = world.held(&p(0, 1), "r").await;
    let letters: Vec<_> =
        page.entries.iter().map(|entry| letter(entry, DeadLetterState::Parked)).collect();
    store.park(&lease, &me, &letters).await.expect("park");
    store.raise_partitions(4).await.expect("raise");
    let end = world.page(&p(0, 1), &page.position).await.ended.expect("ended");
    store.finish(&lease, &me, &end).await.expect("finish");
    for number in 0..9 {
        let key = key(&format!("k{number}"));
        let heir = p(key_hash(&key) % 4, 4);
        let blocked = store.blocked(&me, &heir, std::slice::from_ref(&key)).await.expect("blocked");
        assert_eq!(blocked, [key]);
    }
    assert_eq!(store.blocking(&me, &p(0, 1)).await.expect("blocking"), 0);
}

#[tokio::test]
async fn everything_is_there_after_the_store_is_opened_again() {
    let world = World::new(3).await;
    let identity = world.store.identity();
    world.append(vec![event("k", "1")]).await;
    let lease = world.held(&p(0, 3), "r").await;
    let head = world.store.head(&p(0, 3)).await.expect("head");
    let me = consumer("sink");
    world.store.advance(&lease, &me, &head, published(1)).await.expect("advance");
    let again = SqliteStore::open(SqliteOptions::new(world.path()).partitions(7)).await;
    let again = again.expect("open");
    assert_eq!(again.identity(), identity);
    assert_eq!(again.partitions(&me).await.expect("partitions").len(), 3, "its number is kept");
    let kept = again.checkpoint(&me, &p(0, 3)).await.expect("read").expect("kept");
    assert_eq!((kept.position, kept.published), (head, 1));
    let other = World::new(3).await;
    assert_ne!(other.store.identity(), identity, "another database is another source");
}
