//! What every store promises of leases and of the list of live relays.
//!
//! What lives here: who gets a lease and under which epoch. What does not: writes under one
//! (`fencing.rs`).
//! Invariant: two relays never hold one lease, and an epoch never repeats.

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{Acquired, HeldLease, Leases, Renewal};
use tokio::task::JoinSet;

use super::{PAST_SHORT_TTL, SHORT_TTL, StoreHarness, TTL, lease, partition, superseded_lease};
use crate::samples::{group, relay};

/// While one relay holds a lease, another is told who does and for how long at most.
pub async fn a_lease_is_exclusive<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    let held = lease(&harness, &partition(0, 2), "one", TTL).await;
    assert_eq!(held.holder(), &relay("one"));
    assert_eq!((held.group(), held.partition()), (&group("relays"), &partition(0, 2)));
    let (holder, remaining) = busy(&*store, "two").await.expect("the lease is held");
    assert_eq!(holder, "one");
    assert!(remaining <= TTL && remaining > TTL / 2, "{remaining:?}");
    lease(&harness, &partition(1, 2), "two", TTL).await;
}

/// Of many relays that ask at once, exactly one gets the lease.
pub async fn one_of_many_gets_the_lease<H: StoreHarness>() {
    let harness = Arc::new(H::fresh(2).await);
    let mut askers = JoinSet::new();
    for n in 0..8 {
        let store = harness.store();
        askers.spawn(async move { busy(&*store, &format!("relay-{n}")).await.is_none() });
    }
    let mut winners = 0;
    while let Some(won) = askers.join_next().await {
        winners += u32::from(won.expect("an asker ends well"));
    }
    assert_eq!(winners, 1);
}

/// An expired lease can be taken, under a higher epoch than any before.
pub async fn an_expired_lease_is_taken_under_a_higher_epoch<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let mut last = lease(&harness, &partition(0, 1), "r0", SHORT_TTL).await.epoch();
    for n in 1..4 {
        harness.pass_time(PAST_SHORT_TTL).await;
        let taken = lease(&harness, &partition(0, 1), &format!("r{n}"), SHORT_TTL).await;
        assert!(taken.epoch() > last, "{:?} after {last:?}", taken.epoch());
        last = taken.epoch();
    }
}

/// A holder that lost track of its lease gets it back at once; its older proof is worth nothing.
pub async fn a_holder_that_asks_again_gets_a_higher_epoch<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let first = lease(&harness, &partition(0, 1), "one", TTL).await;
    let second = lease(&harness, &partition(0, 1), "one", TTL).await;
    assert!(second.epoch() > first.epoch());
    let answers = harness.store().renew(&[&first, &second], TTL).await.expect("answers");
    assert_eq!(answers, [Renewal::Lost, Renewal::Renewed]);
}

/// A renewed lease runs for the full time again.
pub async fn a_renewed_lease_lives_on<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    let held = lease(&harness, &partition(0, 2), "one", SHORT_TTL).await;
    let answers = store.renew(&[&held], TTL).await.expect("answers");
    assert_eq!(answers, [Renewal::Renewed]);
    harness.pass_time(PAST_SHORT_TTL).await;
    assert!(busy(&*store, "two").await.is_some(), "the renewal counts");
}

/// A lease that ran out and that nobody took is renewed under its own epoch.
pub async fn an_expired_lease_that_nobody_took_is_renewed<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    let held = lease(&harness, &partition(0, 2), "one", SHORT_TTL).await;
    harness.pass_time(PAST_SHORT_TTL).await;
    let answers = store.renew(&[&held], TTL).await.expect("answers");
    assert_eq!(answers, [Renewal::Renewed]);
    assert!(busy(&*store, "two").await.is_some(), "it is held again");
}

/// One round trip renews several leases and answers for each, in order.
pub async fn a_renewal_answers_for_each_lease<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    let (old, new) = superseded_lease(&harness, &partition(0, 2)).await;
    let other = lease(&harness, &partition(1, 2), "old", TTL).await;
    let answers = store.renew(&[&other, &old, &new], TTL).await.expect("answers");
    assert_eq!(answers, [Renewal::Renewed, Renewal::Lost, Renewal::Renewed]);
    let none: [&HeldLease; 0] = [];
    assert_eq!(store.renew(&none, TTL).await.expect("answers"), []);
}

/// A released lease is free at once, for a higher epoch, and can't be renewed.
pub async fn a_released_lease_is_free_at_once<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let store = harness.store();
    let held = lease(&harness, &partition(0, 1), "one", TTL).await;
    store.release(&held).await.expect("the release succeeds");
    assert_eq!(store.renew(&[&held], TTL).await.expect("answers"), [Renewal::Lost]);
    let next = lease(&harness, &partition(0, 1), "two", TTL).await;
    assert!(next.epoch() > held.epoch());
}

/// Releasing a lease that another took does not free the other's.
pub async fn releasing_a_lost_lease_does_nothing<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    let (old, new) = superseded_lease(&harness, &partition(0, 2)).await;
    store.release(&old).await.expect("releasing a lost lease is no error");
    let (holder, _) = busy(&*store, "third").await.expect("the lease is still held");
    assert_eq!(holder, new.holder().as_str());
}

/// The same partition can be leased once in each group.
pub async fn groups_do_not_meet<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    lease(&harness, &partition(0, 2), "one", TTL).await;
    let answer = store.acquire(&group("others"), &partition(0, 2), &relay("two"), TTL).await;
    assert!(matches!(answer, Ok(Acquired::Held(_))), "{answer:?}");
    store.join(&group("relays"), &relay("one"), TTL).await.expect("joined");
    let others = store.join(&group("others"), &relay("two"), TTL).await.expect("joined");
    assert_eq!(others, [relay("two")]);
    assert_eq!(store.leases(&group("nobody")).await.expect("listed"), []);
}

/// The list of live relays is the same for each, in a stable order, and ends with leaving or time.
pub async fn live_relays_are_listed_until_they_leave_or_expire<H: StoreHarness>() {
    let harness = H::fresh(1).await;
    let store = harness.store();
    let relays = group("relays");
    assert_eq!(store.join(&relays, &relay("b"), TTL).await.expect("joined"), [relay("b")]);
    let mut seen = store.join(&relays, &relay("a"), SHORT_TTL).await.expect("joined");
    let again = store.join(&relays, &relay("b"), TTL).await.expect("joined");
    assert_eq!(seen, again, "every relay sees the same order");
    seen.sort();
    assert_eq!(seen, [relay("a"), relay("b")]);
    harness.pass_time(PAST_SHORT_TTL).await;
    assert_eq!(store.join(&relays, &relay("b"), TTL).await.expect("joined"), [relay("b")]);
    store.join(&relays, &relay("c"), TTL).await.expect("joined");
    store.leave(&relays, &relay("b")).await.expect("left");
    store.leave(&relays, &relay("b")).await.expect("leaving again is no error");
    assert_eq!(store.join(&relays, &relay("c"), TTL).await.expect("joined"), [relay("c")]);
}

/// `leases` shows every lease of the group by partition: holder, epoch, and what is left of it.
pub async fn every_lease_is_listed<H: StoreHarness>() {
    let harness = H::fresh(2).await;
    let store = harness.store();
    let second = lease(&harness, &partition(1, 2), "two", SHORT_TTL).await;
    let first = lease(&harness, &partition(0, 2), "one", TTL).await;
    harness.pass_time(PAST_SHORT_TTL).await;
    let listed = store.leases(&group("relays")).await.expect("listed");
    let held: Vec<_> = listed.iter().map(|info| (&info.partition, &info.holder)).collect();
    let one = (first.partition(), first.holder());
    assert_eq!(held, [one, (second.partition(), second.holder())]);
    assert_eq!([listed[0].epoch, listed[1].epoch], [first.epoch(), second.epoch()]);
    assert!(listed[0].remaining > Duration::ZERO && listed[0].remaining <= TTL);
    assert_eq!(listed[1].remaining, Duration::ZERO, "it has expired");
    store.release(&first).await.expect("released");
    let listed = store.leases(&group("relays")).await.expect("listed");
    assert!(listed.iter().all(|info| info.remaining.is_zero()), "{listed:?}");
}

/// Asks for the lease of partition 0 of 2; the holder and what remains if another has it.
async fn busy<L: Leases + ?Sized>(leases: &L, asker: &str) -> Option<(String, Duration)> {
    let answer = leases.acquire(&group("relays"), &partition(0, 2), &relay(asker), TTL).await;
    match answer.expect("the store answers") {
        Acquired::Held(_) => None,
        Acquired::Busy { holder, remaining } => Some((holder.as_str().to_owned(), remaining)),
    }
}
