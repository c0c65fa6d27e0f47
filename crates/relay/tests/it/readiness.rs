//! What `status` says: ready means that events can flow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider_conformance::samples::event;
use postrider_core::limits::WINDOW_RECORDS;
use postrider_core::{Error, ErrorKind};
use postrider_relay::Relay;
use postrider_sink_memory::Fault;

use crate::hooked::{Call, Heartbeats, Hooked};
use crate::world::{KeptOpen, World, start};

/// W51: a stall shows within 30 seconds, though the process lives and answers.
#[tokio::test(start_paused = true)]
async fn w51_a_stall_shows_within_30_seconds() {
    let world = World::new(1);
    let mut options = World::sink_options();
    options.publish_timeout = Duration::from_secs(3_600);
    let relay = world.relay_with(World::options("a"), options);
    world.append_dealt(10, 1);
    world.until_delivered(10).await;
    assert!(relay.status.snapshot().ready);
    world.sink.hold();
    world.append_dealt(10, 1);
    world.until("a call waits", |world| world.sink.waiting_calls() == 1).await;
    tokio::time::sleep(Duration::from_secs(31)).await;
    let snapshot = relay.status.snapshot();
    assert!(!snapshot.ready && snapshot.reasons[0].contains("no progress"), "{snapshot:?}");
    world.sink.release();
    world.until_delivered(20).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(relay.status.snapshot().ready);
    relay.stop().await;
}

/// One key alone is no outage of the sink; the reason for its stall is named all the same.
#[tokio::test(start_paused = true)]
async fn a_stall_of_a_single_key_names_the_last_failure_until_something_moves() {
    let world = World::new(1);
    let relay = world.relay("a");
    world.sink.set_outage(Some(Fault::Refuse(ErrorKind::Transient)));
    world.append(&[event("k0", 0)]);
    tokio::time::sleep(Duration::from_secs(40)).await;
    let snapshot = relay.status.snapshot();
    let reason = &snapshot.reasons[0];
    assert!(
        reason.contains("no progress in partition") && reason.contains(" s: scripted failure"),
        "{reason}"
    );
    world.sink.set_outage(None);
    world.until_delivered(1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(relay.status.snapshot().ready);
    relay.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_hour_raises_nothing() {
    let world = World::new(4);
    let relay = world.relay("a");
    world.append_dealt(10, 1);
    world.until_delivered(10).await;
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(60)).await;
        let snapshot = relay.status.snapshot();
        assert!(snapshot.ready, "{:?}", snapshot.reasons);
    }
    relay.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_has_not_joined_is_not_ready() {
    let world = World::new(1);
    let relay = world.relay("a");
    assert!(!relay.status.snapshot().ready);
    world.until("it has joined", |_| relay.status.snapshot().ready).await;
    relay.stop().await;
}

/// While no checkpoint can be written, what was delivered comes again after a crash: so much of it
/// and no more.
#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_can_not_be_written_is_told_and_what_may_come_again_is_bounded() {
    const EVENTS: u64 = 80_000;
    let world = World::new(1);
    let locked = Arc::new(AtomicBool::new(true));
    let is_locked = Arc::clone(&locked);
    let hook = move |call: Call| {
        let fails = call == Call::Other("advance") && is_locked.load(Ordering::Relaxed);
        (Duration::ZERO, fails.then(|| Error::transient("the table is locked")))
    };
    let store =
        Hooked { inner: world.store.clone(), hook: Arc::new(hook), heartbeats: Heartbeats::Bare };
    let relay = Relay::builder(world.source(), Arc::new(store), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::new(KeptOpen(world.sink.clone())))
        .build()
        .expect("valid options");
    let relay = start(relay);
    world.append_dealt(EVENTS, 8);
    let window = WINDOW_RECORDS as u64;
    world.until_delivered(window - 1_000).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let snapshot = relay.status.snapshot();
    assert!(snapshot.sinks[0].unwritten >= Duration::from_secs(31), "{snapshot:?}");
    let reason = &snapshot.reasons[0];
    assert!(
        !snapshot.ready && reason.contains("can't be written for") && reason.contains("locked"),
        "{reason}"
    );
    assert!(world.sink.delivered() < window + 2_000, "{} delivered", world.sink.delivered());
    locked.store(false, Ordering::Relaxed);
    world.until_delivered(EVENTS).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let snapshot = relay.status.snapshot();
    assert!(snapshot.ready && snapshot.sinks[0].unwritten.is_zero(), "{snapshot:?}");
    assert_eq!((world.pending().await, world.repetitions()), (0, 0));
    relay.stop().await;
}
