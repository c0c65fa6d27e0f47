//! What every store promises of dead letters: the whole state machine.
//!
//! What lives here: parking, waiting, release, refusal, skipping and dropping. What does not:
//! fencing.
//! Invariant: within a key, letters leave in the order in which they came.

use postrider_core::{
    BatchLimit, Checkpoints, DeadLetter, DeadLetterFilter, DeadLetterState, DeadLetters, Entry,
    HeldLease, Malformed, NewDeadLetter, Record, Retention, RetentionPolicy,
};
use std::sync::Arc;
use std::time::Duration;

use super::{
    PAST_SHORT_TTL, Prunes, StoreHarness, TTL, advance, append, lease, partition, read_all,
};
use crate::samples::{WHOLE, consumer, event, fresh_id, key, number, rich_event, sized_event};

use DeadLetterState::{Parked, Requeued, Skipped, Waiting};

/// A letter about a record, after two attempts.
pub(crate) fn letter(record: &Record, state: DeadLetterState) -> NewDeadLetter {
    NewDeadLetter {
        entry: Entry::Record(record.clone()),
        state,
        reason: "refused: 400 Bad Request".to_owned(),
        attempts: 2,
    }
}

/// Requeues whatever can be.
pub(crate) async fn requeue_all<S: DeadLetters + ?Sized>(store: &S) -> u64 {
    store.requeue(&DeadLetterFilter::default()).await.expect("requeued")
}

/// One store with one partition, a lease, and letters for the given keys and states.
struct Desk<H: StoreHarness> {
    harness: H,
    store: Arc<H::Store>,
    lease: HeldLease,
    records: Vec<Record>,
}

impl<H: StoreHarness> Desk<H> {
    async fn with(letters: &[(&str, DeadLetterState)]) -> Self {
        let harness = H::fresh(1).await;
        let events: Vec<_> =
            letters.iter().zip(1..).map(|((key, _), number)| event(key, number)).collect();
        append(&harness, &events).await;
        let store = harness.store();
        let records = read_all(&*store, &partition(0, 1)).await;
        let lease = lease(&harness, &partition(0, 1), "one", TTL).await;
        let desk = Self { harness, store, lease, records };
        let states = letters.iter().map(|(_, state)| *state);
        let new: Vec<_> = desk.records.iter().zip(states).map(|(r, s)| letter(r, s)).collect();
        assert_eq!(desk.park(&new).await, new.len() as u64);
        desk.pass().await;
        desk
    }

    /// Moves the checkpoint past every record that was parked at first.
    async fn pass(&self) {
        if let Some(last) = self.records.last() {
            advance(&self.harness, &self.lease, &consumer("sink"), &last.position, 0).await;
        }
    }

    async fn park(&self, letters: &[NewDeadLetter]) -> u64 {
        let added = self.store.park(&self.lease, &consumer("sink"), letters).await;
        added.expect("parked")
    }

    /// The numbers of the events that may be sent now.
    async fn free(&self) -> Vec<u64> {
        self.released(WHOLE).await.iter().map(event_number).collect()
    }

    async fn released(&self, limit: BatchLimit) -> Vec<DeadLetter> {
        let letters = self.store.released(&consumer("sink"), &partition(0, 1), limit).await;
        letters.expect("readable")
    }

    async fn states(&self) -> Vec<(u64, DeadLetterState)> {
        let letters = self.store.list(&DeadLetterFilter::default(), None, 100).await;
        letters.expect("listed").iter().map(|one| (event_number(one), one.state)).collect()
    }

    /// Only the letter of this event.
    async fn only(&self, number: u64) -> DeadLetterFilter {
        let letters = self.store.list(&DeadLetterFilter::default(), None, 100).await;
        let letters = letters.expect("listed");
        let found = letters.iter().find(|one| event_number(one) == number);
        let id = found.expect("the letter is there").id;
        DeadLetterFilter { ids: vec![id], ..DeadLetterFilter::default() }
    }

    async fn resolve(&self, numbers: &[u64]) {
        for number in numbers {
            let ids = self.only(*number).await.ids;
            let done = self.store.resolve(&self.lease, &consumer("sink"), &ids).await;
            done.expect("resolved");
        }
    }

    async fn refuse(&self, number: u64, state: DeadLetterState) {
        let id = self.only(number).await.ids[0];
        let done = self.store.refuse(&self.lease, id, state, "still refused", 3).await;
        done.expect("refused");
    }

    /// Whether later events of these keys have to wait, and how many letters hold them back.
    async fn blocked(&self, keys: &[&str]) -> (Vec<String>, u64) {
        let (sink, only) = (consumer("sink"), partition(0, 1));
        let keys: Vec<_> = keys.iter().map(|text| key(text)).collect();
        let found = self.store.blocked(&sink, &only, &keys).await.expect("readable");
        let mut found: Vec<String> = found.iter().map(|key| key.as_str().to_owned()).collect();
        found.sort();
        (found, self.store.blocking(&sink, &only).await.expect("readable"))
    }
}

fn event_number(letter: &DeadLetter) -> u64 {
    match &letter.entry {
        Entry::Record(record) => number(&record.event),
        Entry::Malformed(_) => 0,
    }
}

/// A letter keeps the event, its position, the reason and the attempts, and is found by its place.
pub async fn a_letter_is_kept_whole<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    append(&harness, &[rich_event(fresh_id())]).await;
    let (store, only, sink) = (harness.store(), partition(0, 1), consumer("sink"));
    let record = read_all(&*store, &only).await.remove(0);
    let held = lease(&harness, &only, "one", TTL).await;
    let new = letter(&record, Parked);
    assert_eq!(store.park(&held, &sink, std::slice::from_ref(&new)).await.expect("parked"), 1);
    let kept = store.at(&sink, &only, &record.position).await.expect("readable");
    let kept = kept.expect("it is found by its place");
    assert_eq!((&kept.consumer, &kept.partition), (&sink, &only));
    assert_eq!(kept.entry, new.entry);
    let told = (kept.state, kept.reason.as_str(), kept.attempts);
    assert_eq!(told, (Parked, new.reason.as_str(), 2));
    let listed = store.list(&DeadLetterFilter::default(), None, 10).await.expect("listed");
    assert_eq!(listed, [kept]);
    let elsewhere = store.at(&consumer("other"), &only, &record.position).await;
    assert_eq!(elsewhere.expect("readable"), None);
}

/// Parking the same record again, as after a crash, adds nothing and leaves the first as it is.
pub async fn parking_again_adds_nothing<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("b", Parked)]).await;
    requeue_all(&*desk.store).await;
    let again: Vec<_> = desk.records.iter().map(|record| letter(record, Parked)).collect();
    assert_eq!(desk.park(&again).await, 0);
    assert_eq!(desk.states().await, [(1, Requeued), (2, Requeued)]);
    append(&desk.harness, &[event("c", 3)]).await;
    let third = read_all(&*desk.store, &partition(0, 1)).await.remove(2);
    let mixed = [letter(&desk.records[0], Parked), letter(&third, Parked)];
    assert_eq!(desk.park(&mixed).await, 1, "only the new one is added");
}

/// An unreadable entry is kept with its bytes, blocks its key if it has one, and never comes back.
pub async fn an_unreadable_entry_is_kept_and_never_released<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[]).await;
    append(&desk.harness, &[event("a", 1), event("b", 2)]).await;
    let records = read_all(&*desk.store, &partition(0, 1)).await;
    let keys = [Some(key("a")), None];
    let letters: Vec<_> =
        records.iter().zip(keys).map(|(record, key)| unreadable(record, key)).collect();
    assert_eq!(desk.park(&letters).await, 2);
    let kept = desk.store.list(&DeadLetterFilter::default(), None, 10).await.expect("listed");
    let entries: Vec<_> = kept.iter().map(|letter| letter.entry.clone()).collect();
    assert_eq!(entries, letters.iter().map(|new| new.entry.clone()).collect::<Vec<_>>());
    assert_eq!(desk.blocked(&["a", "b"]).await.0, ["a"]);
    requeue_all(&*desk.store).await;
    assert!(desk.released(WHOLE).await.is_empty());
    desk.store.discard(&DeadLetterFilter::default()).await.expect("dropped");
    assert!(desk.blocked(&["a"]).await.0.is_empty());
}

/// A key with a parked letter is blocked; another is not.
pub async fn a_parked_key_is_blocked_and_others_are_not<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("b", Skipped), ("a", Waiting)]).await;
    assert_eq!(desk.blocked(&["b", "a", "c"]).await, (vec!["a".to_owned()], 2));
    assert_eq!(desk.blocked(&["b", "c"]).await.0, Vec::<String>::new());
    assert_eq!(desk.blocked(&[]).await.0, Vec::<String>::new());
}

/// Letters behind a parked one of their key are not released.
pub async fn letters_behind_a_parked_one_wait<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("a", Waiting), ("b", Parked)]).await;
    assert!(desk.free().await.is_empty());
    desk.store.requeue(&desk.only(3).await).await.expect("requeued");
    assert_eq!(desk.free().await, [3], "key a still waits");
}

/// Requeueing the first letter of a key releases it and those that wait behind it, in order; a
/// second parked one stops the rest.
pub async fn a_requeued_letter_is_released_in_order_with_those_behind_it<H: StoreHarness>() {
    let letters = [("a", Parked), ("b", Parked), ("a", Waiting), ("a", Waiting), ("b", Waiting)];
    let desk = Desk::<H>::with(&letters).await;
    let changed = desk.store.requeue(&desk.only(1).await).await.expect("requeued");
    assert_eq!(changed, 1, "waiting ones are released as they are");
    assert_eq!(desk.free().await, [1, 3, 4]);
    assert_eq!(desk.blocked(&["a", "b"]).await.0, ["a", "b"], "until they are delivered");
    desk.resolve(&[1]).await;
    desk.refuse(3, Parked).await;
    assert!(desk.free().await.is_empty(), "4 waits behind 3, 5 behind 2");
    assert_eq!(desk.store.requeue(&desk.only(4).await).await.expect("answered"), 0);
    desk.store.requeue(&DeadLetterFilter::default()).await.expect("requeued");
    assert_eq!(desk.free().await, [2, 3, 4, 5]);
    desk.resolve(&[2, 3, 4, 5]).await;
    assert_eq!(desk.blocked(&["a", "b"]).await, (Vec::new(), 0));
}

/// A letter that the sink confirmed is gone and counts as published, once.
pub async fn a_resolved_letter_counts_as_published<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked)]).await;
    let sink = consumer("sink");
    advance(&desk.harness, &desk.lease, &sink, &desk.records[0].position, 0).await;
    requeue_all(&*desk.store).await;
    let ids = desk.only(1).await.ids;
    for _ in 0..2 {
        desk.store.resolve(&desk.lease, &sink, &ids).await.expect("resolving again is no error");
        let kept = desk.store.checkpoint(&sink, &partition(0, 1)).await.expect("readable");
        assert_eq!(kept.expect("written").published, 1);
    }
    assert!(desk.states().await.is_empty());
}

/// A released letter that is refused again is parked with the new reason and all its attempts.
pub async fn a_letter_refused_again_is_parked_with_its_attempts<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("a", Waiting)]).await;
    requeue_all(&*desk.store).await;
    desk.refuse(1, Parked).await;
    assert!(desk.free().await.is_empty());
    let found = desk.store.list(&desk.only(1).await, None, 1).await.expect("listed").remove(0);
    let told = (found.state, found.reason.as_str(), found.attempts);
    assert_eq!(told, (Parked, "still refused", 5));
    assert!(found.updated_at >= found.parked_at);
}

/// A released letter that is refused and skipped lets the next of its key go.
pub async fn a_letter_refused_as_skipped_holds_nothing_back<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("a", Waiting)]).await;
    requeue_all(&*desk.store).await;
    desk.refuse(1, Skipped).await;
    assert_eq!(desk.free().await, [2]);
    assert_eq!(desk.states().await, [(1, Skipped), (2, Waiting)]);
}

/// Skipping gives a parked or requeued letter up: it stays to be seen, and its key goes on.
pub async fn a_skipped_letter_holds_nothing_back<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("a", Waiting), ("b", Parked)]).await;
    desk.store.requeue(&desk.only(3).await).await.expect("requeued");
    let changed = desk.store.skip(&DeadLetterFilter::default()).await.expect("skipped");
    assert_eq!(changed, 2, "a waiting letter can't be skipped");
    assert_eq!(desk.states().await, [(1, Skipped), (2, Waiting), (3, Skipped)]);
    assert_eq!(desk.free().await, [2]);
    assert_eq!(desk.blocked(&["a", "b"]).await, (vec!["a".to_owned()], 1));
    desk.resolve(&[2]).await;
    assert_eq!(desk.blocked(&["a", "b"]).await, (Vec::new(), 0));
}

/// A skipped letter can be requeued and is sent like any other.
pub async fn a_skipped_letter_can_be_requeued<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Skipped)]).await;
    assert!(desk.free().await.is_empty());
    assert_eq!(requeue_all(&*desk.store).await, 1);
    assert_eq!(desk.free().await, [1]);
    assert_eq!(desk.blocked(&["a"]).await.0, ["a"]);
}

/// A discarded letter is gone for good, counts as dropped, and lets its key go on.
pub async fn a_discarded_letter_counts_as_dropped<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked), ("a", Waiting)]).await;
    let last = &desk.records[1].position;
    advance(&desk.harness, &desk.lease, &consumer("sink"), last, 0).await;
    assert_eq!(desk.store.discard(&desk.only(1).await).await.expect("dropped"), 1);
    assert_eq!(desk.free().await, [2]);
    let progress = desk.store.progress().await.expect("readable");
    assert_eq!((progress[0].parked, progress[0].dropped), (1, 1));
    assert_eq!(desk.store.discard(&DeadLetterFilter::default()).await.expect("dropped"), 1);
    assert!(desk.states().await.is_empty());
}

/// A letter above the checkpoint is not released: its event may be read again, and nothing would
/// tell that it was sent.
pub async fn a_letter_above_the_checkpoint_is_not_released<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked)]).await;
    append(&desk.harness, &[event("b", 2), event("c", 3)]).await;
    let records = read_all(&*desk.store, &partition(0, 1)).await;
    desk.park(&[letter(&records[1], Parked), letter(&records[2], Parked)]).await;
    requeue_all(&*desk.store).await;
    assert_eq!(desk.free().await, [1]);
    advance(&desk.harness, &desk.lease, &consumer("sink"), &records[1].position, 0).await;
    assert_eq!(desk.free().await, [1, 2]);
    advance(&desk.harness, &desk.lease, &consumer("sink"), &records[2].position, 0).await;
    assert_eq!(desk.free().await, [1, 2, 3]);
}

/// Released letters come by number, at most as many and as large as asked; a large one alone.
pub async fn a_page_of_released_letters_keeps_to_its_limits<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[]).await;
    let events: Vec<_> = (1..=4).map(|n| sized_event(&format!("k{n}"), n, 2_000)).collect();
    append(&desk.harness, &events).await;
    let records = read_all(&*desk.store, &partition(0, 1)).await;
    let letters: Vec<_> = records.iter().map(|record| letter(record, Parked)).collect();
    desk.park(&letters).await;
    advance(&desk.harness, &desk.lease, &consumer("sink"), &records[3].position, 0).await;
    requeue_all(&*desk.store).await;
    let page = desk.released(BatchLimit { records: 3, ..WHOLE }).await;
    assert_eq!(page.iter().map(event_number).collect::<Vec<_>>(), [1, 2, 3]);
    let two = 2 * records[0].event.cost_bytes() + 1;
    let page = desk.released(BatchLimit { records: 4, bytes: two }).await;
    assert_eq!(page.iter().map(event_number).collect::<Vec<_>>(), [1, 2]);
    let page = desk.released(BatchLimit { records: 4, bytes: 10 }).await;
    assert_eq!(page.iter().map(event_number).collect::<Vec<_>>(), [1]);
}

/// A filter's parts must all match, and pages go on after a number.
pub async fn letters_are_listed_by_filter_and_page<H: StoreHarness>() {
    let letters = [("a", Parked), ("b", Parked), ("a", Waiting), ("c", Skipped)];
    let desk = Desk::<H>::with(&letters).await;
    let none = DeadLetterFilter::default();
    let listed = async |filter: DeadLetterFilter| -> Vec<u64> {
        let letters = desk.store.list(&filter, None, 100).await.expect("listed");
        letters.iter().map(event_number).collect()
    };
    assert_eq!(listed(none.clone()).await, [1, 2, 3, 4]);
    assert_eq!(listed(DeadLetterFilter { key: Some(key("a")), ..none.clone() }).await, [1, 3]);
    assert_eq!(listed(DeadLetterFilter { state: Some(Parked), ..none.clone() }).await, [1, 2]);
    let both = DeadLetterFilter { key: Some(key("a")), state: Some(Waiting), ..none.clone() };
    assert_eq!(listed(both).await, [3]);
    let other = DeadLetterFilter { consumer: Some(consumer("other")), ..none.clone() };
    assert!(listed(other).await.is_empty());
    let first = desk.store.list(&none, None, 3).await.expect("listed");
    assert_eq!(first.iter().map(event_number).collect::<Vec<_>>(), [1, 2, 3]);
    let rest = desk.store.list(&none, Some(first[2].id), 3).await.expect("listed");
    assert_eq!(rest.iter().map(event_number).collect::<Vec<_>>(), [4]);
}

/// What one consumer parked blocks no other, and two may park the same record.
pub async fn consumers_have_letters_of_their_own<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked)]).await;
    let (other, only) = (consumer("other"), partition(0, 1));
    let blocked = desk.store.blocked(&other, &only, &[key("a")]).await.expect("readable");
    assert!(blocked.is_empty());
    assert_eq!(desk.store.blocking(&other, &only).await.expect("readable"), 0);
    let same = [letter(&desk.records[0], Parked)];
    assert_eq!(desk.store.park(&desk.lease, &other, &same).await.expect("parked"), 1);
    let mine = DeadLetterFilter { consumer: Some(other.clone()), ..DeadLetterFilter::default() };
    desk.store.requeue(&mine).await.expect("requeued");
    assert!(desk.free().await.is_empty(), "the first consumer's letter did not change");
    advance(&desk.harness, &desk.lease, &other, &desk.records[0].position, 0).await;
    assert_eq!(desk.store.released(&other, &only, WHOLE).await.expect("readable").len(), 1);
}

/// A letter holds the whole event, so that it can be sent after the outbox has forgotten it.
pub async fn a_letter_outlives_its_event<H: StoreHarness>() {
    let desk = Desk::<H>::with(&[("a", Parked)]).await;
    append(&desk.harness, &[event("b", 2), event("b", 3)]).await;
    let records = read_all(&*desk.store, &partition(0, 1)).await;
    let sink = consumer("sink");
    let passed = match desk.harness.features().pruning {
        Prunes::Events => 2,
        Prunes::Segments => 3,
    };
    let to = &records[passed - 1].position;
    advance(&desk.harness, &desk.lease, &sink, to, passed as u64 - 1).await;
    desk.harness.pass_time(PAST_SHORT_TTL).await;
    let policy = RetentionPolicy { keep: Duration::ZERO, batch: 100, dry_run: false };
    let pruned = desk.store.prune(None, &policy).await.expect("pruned").events;
    assert_eq!(pruned, passed as u64);
    requeue_all(&*desk.store).await;
    let free = desk.released(WHOLE).await;
    assert_eq!(free[0].entry, Entry::Record(desk.records[0].clone()));
}

fn unreadable(record: &Record, key: Option<postrider_core::Key>) -> NewDeadLetter {
    NewDeadLetter {
        entry: Entry::Malformed(Malformed {
            position: record.position.clone(),
            appended_at: record.appended_at,
            key,
            reason: "headers are no JSON".to_owned(),
            raw: vec![0, 255, 13, 10].into(),
        }),
        state: Parked,
        reason: "unreadable".to_owned(),
        attempts: 0,
    }
}
