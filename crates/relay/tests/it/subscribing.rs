//! Subscriptions: a closure over batches, with a pointer of its own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postrider_conformance::samples::{consumer, number, relay as instance};
use postrider_core::Error;
use postrider_relay::{Delivery, Subscription, SubscriptionOptions};
use tokio_util::sync::CancellationToken;

use crate::hooked::{Call, Heartbeats, Hooked};
use crate::world::World;

fn subscription(world: &World, name: &str, id: &str) -> Subscription {
    let options = SubscriptionOptions::new(consumer(name), instance(id));
    Subscription::new(world.source(), Arc::new(world.store.clone()), options)
        .clock(Arc::clone(&world.clock), postrider_relay::Keeper::SameRuntime)
}

#[tokio::test(start_paused = true)]
async fn two_subscribers_each_see_everything_in_order_and_resume_where_they_stopped() {
    let world = World::new(2);
    world.append_dealt(6_000, 7);
    for name in ["billing", "search"] {
        let seen: Arc<Mutex<Vec<(String, u64)>>> = Arc::default();
        for life in 0..20 {
            if seen.lock().expect("no holder panics").len() == 6_000 {
                break;
            }
            let stop = CancellationToken::new();
            let (log, enough) = (Arc::clone(&seen), stop.clone());
            let goal = (1_500 * (life + 1)).min(6_000);
            let handler = move |delivery: Delivery| {
                let (log, enough) = (Arc::clone(&log), enough.clone());
                async move {
                    let mut log = log.lock().expect("no holder panics");
                    for record in &delivery.records {
                        log.push((record.event.key().to_string(), number(&record.event)));
                    }
                    if log.len() >= goal {
                        enough.cancel();
                    }
                    Ok(())
                }
            };
            let life = format!("{name}-{life}");
            subscription(&world, name, &life).run(handler, stop).await.expect("ends well");
        }
        let seen = seen.lock().expect("no holder panics");
        assert_eq!(seen.len(), 6_000, "{name} saw each event once");
        for k in 0..7 {
            let of_key = |(key, _): &&(String, u64)| *key == format!("k{k}");
            let numbers: Vec<u64> = seen.iter().filter(of_key).map(|(_, n)| *n).collect();
            assert_eq!(numbers, (0..6_000).filter(|n| n % 7 == k).collect::<Vec<_>>());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_fails_for_now_gets_the_same_batch_again() {
    let world = World::new(1);
    world.append_dealt(10, 1);
    let attempts = Arc::new(AtomicU32::new(0));
    let stop = CancellationToken::new();
    let (count, done) = (Arc::clone(&attempts), stop.clone());
    let handler = move |delivery: Delivery| {
        let (count, done) = (Arc::clone(&count), done.clone());
        async move {
            assert_eq!(number(&delivery.records[0].event), 0);
            if count.fetch_add(1, Ordering::Relaxed) < 20 {
                return Err(Error::transient("not yet"));
            }
            done.cancel();
            Ok(())
        }
    };
    subscription(&world, "s", "i").run(handler, stop).await.expect("ends well");
    assert_eq!(attempts.load(Ordering::Relaxed), 21);
    assert_eq!(world.pending().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_refuses_halts_its_partition_and_loses_nothing() {
    let world = World::new(1);
    world.append_dealt(10, 1);
    let stop = CancellationToken::new();
    let subscriber = subscription(&world, "s", "i");
    let status = subscriber.status();
    let refuse = |_: Delivery| async { Err(Error::permanent("never")) };
    let run = subscriber.run(refuse, stop.clone());
    let watch = async {
        world
            .until("halted", |_| {
                status.snapshot().reasons.iter().any(|reason| reason.contains("never"))
            })
            .await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        stop.cancel();
    };
    let (ended, ()) = tokio::join!(run, watch);
    ended.expect("ends well");
    assert_eq!(world.pending().await, 10, "its checkpoint stands where it began");
}

/// A stop ends a subscription also while the database answers nothing but "not now".
#[tokio::test(start_paused = true)]
async fn a_stop_does_not_wait_for_a_database_in_trouble() {
    let world = World::new(1);
    let hook = |call| {
        let error = (call == Call::Checkpoint).then(|| Error::transient("not now"));
        (Duration::ZERO, error)
    };
    let store = Arc::new(Hooked {
        inner: world.store.clone(),
        hook: Arc::new(hook),
        heartbeats: Heartbeats::Bare,
    });
    let options = SubscriptionOptions::new(consumer("s"), instance("i"));
    let subscriber = Subscription::new(world.source(), store, options)
        .clock(Arc::clone(&world.clock), postrider_relay::Keeper::SameRuntime);
    let stop = CancellationToken::new();
    let stopping = async {
        tokio::time::sleep(Duration::from_secs(30)).await;
        stop.cancel();
    };
    let run = subscriber.run(|_: Delivery| async { Ok(()) }, stop.clone());
    let ended = async { tokio::time::timeout(Duration::from_secs(60), run).await };
    let (ended, ()) = tokio::join!(ended, stopping);
    ended.expect("it ends").expect("ends well");
}
