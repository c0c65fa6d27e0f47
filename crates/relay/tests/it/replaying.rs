//! Replays: a range again, in order, beside the checkpoints.

use std::sync::Arc;

use postrider_conformance::samples::{consumer, fresh_id, key, number};
use postrider_core::{
    BatchLimit, Capabilities, ConsumerName, ErrorKind, Feed, FeedPage, PartitionId, Position,
    Result, RetryPolicy, Sink, StartFrom, Successor, Timestamp,
};
use postrider_relay::{Replay, ReplayReport};
use postrider_sink_memory::Fault;

use crate::world::World;

fn replay(world: &World) -> Replay {
    Replay {
        feed: Arc::new(world.store.clone()),
        sink: Some(Arc::new(world.sink.clone())),
        clock: Arc::clone(&world.clock),
        from: StartFrom::Oldest,
        to_time: None,
        to_position: None,
        key: None,
        new_ids: None,
        retry: RetryPolicy { max_attempts: 3, ..RetryPolicy::default() },
    }
}

async fn run(replay: Replay) -> ReplayReport {
    replay.run(&consumer("replay"), |_| {}).await.expect("the feed can be read")
}

#[tokio::test(start_paused = true)]
async fn a_replay_sends_the_same_ids_in_the_same_order_and_moves_no_checkpoint() {
    let world = World::new(4);
    world.append_dealt(2_000, 20);
    let relay = world.relay("a");
    world.until_delivered(2_000).await;
    relay.stop().await;
    let before: std::collections::HashSet<_> =
        world.sink.deliveries().iter().map(|one| one.event.id()).collect();
    world.sink.clear();
    let mut again = replay(&world);
    let sink = postrider_sink_memory::MemorySink::new(Arc::clone(&world.clock));
    sink.fail_next(3, Fault::Refuse(ErrorKind::Transient));
    again.sink = Some(Arc::new(sink.clone()));
    let report = run(again).await;
    assert_eq!((report.progress.matched, report.progress.published), (2_000, 2_000));
    let after: std::collections::HashSet<_> =
        sink.deliveries().iter().map(|one| one.event.id()).collect();
    assert_eq!(before, after);
    for k in 0..20 {
        let numbers: Vec<u64> = sink
            .deliveries()
            .iter()
            .filter(|one| one.event.key().as_str() == format!("k{k}"))
            .map(|one| number(&one.event))
            .collect();
        assert_eq!(numbers, (0..2_000).filter(|n| n % 20 == k).collect::<Vec<_>>());
    }
    assert_eq!(world.pending().await, 0);
}

/// What the broker has already is confirmed, and may be published nowhere again.
#[tokio::test(start_paused = true)]
async fn what_the_broker_had_already_is_counted_apart() {
    let mut world = World::new(1);
    world.append_dealt(10, 2);
    let window = Some(std::time::Duration::from_secs(600));
    let dedup = Capabilities { dedup_window: window, ..world.sink.capabilities() };
    world.sink = world.sink.with_capabilities(dedup);
    let first = run(replay(&world)).await.progress;
    assert_eq!((first.published, first.duplicates), (10, 0));
    world.append_dealt(5, 1);
    let second = run(replay(&world)).await.progress;
    assert_eq!((second.published, second.duplicates), (15, 10));
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_counts_and_sends_nothing() {
    let world = World::new(2);
    world.append_dealt(100, 10);
    let report = run(Replay { sink: None, key: Some(key("k3")), ..replay(&world) }).await;
    assert_eq!((report.progress.read, report.progress.matched), (100, 10));
    assert_eq!(world.sink.delivered(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_range_ends_at_its_time_and_new_ids_are_new() {
    let world = World::new(1);
    world.append_dealt(10, 1);
    let until = world.clock.now();
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    world.append_dealt(10, 1);
    let new_ids: Box<dyn Fn() -> postrider_core::EventId + Send + Sync> = Box::new(fresh_id);
    let report =
        run(Replay { to_time: Some(until), new_ids: Some(new_ids), ..replay(&world) }).await;
    assert_eq!(report.progress.published, 10);
    let all = run(Replay { to_time: None, ..replay(&world) }).await;
    assert_eq!(all.progress.published, 20);
    assert_eq!(world.repetitions(), 0, "the first ten went out under new ids");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_is_refused_is_reported_and_passed_over() {
    let world = World::new(1);
    world.append_dealt(10, 2);
    world.sink.fail_key(key("k1"), Fault::Refuse(ErrorKind::Permanent));
    let report = run(replay(&world)).await;
    assert_eq!((report.progress.published, report.failures), (5, 5));
    assert!(report.failed[0].1.contains("scripted"), "{:?}", report.failed[0]);
}

/// A feed that gives places without events, and whose one partition was another one's before.
struct Moved(Arc<dyn Feed>);

const QUIET: &[u8] = b"quiet";

fn before() -> PartitionId {
    PartitionId::new("before").expect("a valid name")
}

#[async_trait::async_trait]
impl Feed for Moved {
    fn identity(&self) -> String {
        self.0.identity()
    }

    async fn partitions(&self, _: &ConsumerName) -> Result<Vec<PartitionId>> {
        Ok(vec![before()])
    }

    async fn read(&self, of: &PartitionId, at: &Position, limit: BatchLimit) -> Result<FeedPage> {
        let quiet = Position::from_bytes(QUIET)?;
        if *at == Position::START {
            return Ok(FeedPage { entries: Vec::new(), position: quiet, ended: None });
        }
        let partition = self.0.partitions(&consumer("replay")).await?.remove(0);
        if *of == before() && *at != quiet {
            let ended = Some(vec![Successor { partition, from: at.clone() }]);
            return Ok(FeedPage { entries: Vec::new(), position: at.clone(), ended });
        }
        let after = if *at == quiet { &Position::START } else { at };
        let few = BatchLimit { records: 4, ..limit };
        let mut page = self.0.read(&partition, after, few).await?;
        if page.entries.is_empty() {
            page.position = at.clone();
        }
        Ok(page)
    }

    fn is_head(&self, page: &FeedPage, after: &Position) -> bool {
        page.entries.is_empty() && page.position == *after
    }

    async fn head(&self, partition: &PartitionId) -> Result<Position> {
        self.0.head(partition).await
    }

    async fn position_at(&self, partition: &PartitionId, time: Timestamp) -> Result<Position> {
        self.0.position_at(partition, time).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_place_without_events_is_no_end_and_a_successor_goes_on_where_it_begins() {
    let world = World::new(1);
    world.append_dealt(10, 2);
    let feed = Arc::new(Moved(Arc::new(world.store.clone())));
    let report = run(Replay { feed, ..replay(&world) }).await;
    assert_eq!(report.progress.published, 10);
    assert_eq!(world.repetitions(), 0);
}
