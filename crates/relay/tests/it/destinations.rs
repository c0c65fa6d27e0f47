//! One destination of a sink in trouble, beside others: who waits, who does not, and what is told.
//!
//! What lives here: many keys that fail for long, a destination that does not answer, and outages
//! beside them. What does not: one key's failures (`failures.rs`).
//! Invariant: times are those of a virtual clock, so that they are exact.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postrider_conformance::samples::{event, key, number};
use postrider_core::{Capabilities, Chain, ErrorKind, Outcome, Publish, Sink};
use postrider_relay::{Relay, SinkOptions, SinkState};
use postrider_sink_memory::{Delivery, Fault, MemorySink};

use crate::world::{Running, World, start};

const MISSING: Fault = Fault::Refuse(ErrorKind::Throttled { retry_after: None });
const TROUBLE: Fault = Fault::Refuse(ErrorKind::Transient);
/// Between two events that nothing is wrong with.
const BEAT: Duration = Duration::from_millis(25);

/// What the relay logs while this lives.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn taken(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let writer = move || log.clone();
        tracing::subscriber::set_default(
            tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish(),
        )
    }

    fn lines(&self) -> Vec<String> {
        let text = self.0.lock().expect("not poisoned").clone();
        String::from_utf8(text).expect("UTF-8").lines().map(str::to_owned).collect()
    }

    fn count(&self, part: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(part)).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("not poisoned").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A partition of a broker that answers in 10 ms, and what flows through it.
struct Flow {
    world: World,
    relay: Running,
    next: u64,
    /// When each good event was appended.
    appended: Vec<Duration>,
}

impl Flow {
    fn new() -> Self {
        Self::with_budget(World::sink_options().budget_bytes)
    }

    fn with_budget(budget_bytes: usize) -> Self {
        let world = World::new(1);
        world.sink.set_latency(Duration::from_millis(10));
        let options = SinkOptions { budget_bytes, ..World::sink_options() };
        let relay = world.relay_with(World::options("a"), options);
        Self { world, relay, next: 0, appended: Vec::new() }
    }

    /// A good event each beat, of ever another key, and whatever `each` does.
    async fn flow(&mut self, beats: u32, beat: Duration, mut each: impl FnMut(&World, u32)) {
        for at in 0..beats {
            each(&self.world, at);
            self.world.append(&[event(&format!("good{}", self.next), self.next)]);
            self.next += 1;
            self.appended.push(self.world.clock.elapsed());
            assert_eq!(self.relay.status.snapshot().sinks[0].state, SinkState::Flowing);
            tokio::time::sleep(beat).await;
        }
    }

    /// How long each good event took, the longest last.
    async fn latencies(&self) -> Vec<Duration> {
        self.latencies_from(0).await
    }

    /// The same without the first ones.
    async fn latencies_from(&self, first: usize) -> Vec<Duration> {
        self.all_good_arrive().await;
        let clock = &self.world.clock;
        let began = clock.now().as_millis() - clock.elapsed().as_millis() as u64;
        let mut took: Vec<Duration> = Vec::new();
        for one in self.good() {
            let index = usize::try_from(number(&one.event)).expect("few");
            if index >= first {
                let at = Duration::from_millis(one.at.as_millis() - began);
                took.push(at.saturating_sub(self.appended[index]));
            }
        }
        took.sort_unstable();
        took
    }

    fn good(&self) -> Vec<Delivery> {
        let mut all = self.world.sink.deliveries();
        all.retain(|one| one.event.key().as_str().starts_with("good"));
        all
    }

    async fn all_good_arrive(&self) {
        let all = usize::try_from(self.next).expect("few");
        self.world.until("all good events arrive", |_| self.good().len() >= all).await;
    }

    fn calls(&self) -> u64 {
        self.relay.status.snapshot().sinks[0].calls
    }
}

/// `percent` of the latencies are not longer.
fn percentile(took: &[Duration], percent: usize) -> Duration {
    took[(took.len() * percent / 100).min(took.len() - 1)]
}

fn fail(world: &World, keys: u64, fault: Fault) {
    for n in 0..keys {
        world.sink.fail_key(key(&format!("bad{n}")), fault);
        world.append(&[event(&format!("bad{n}"), n)]);
    }
}

/// A stream that is missing with hundreds of keys: others are as fast as without it, nothing says
/// that the sink is away, and the keys arrive once it is there.
#[tokio::test(start_paused = true)]
async fn a_missing_destination_with_many_keys_holds_up_nobody_else_and_is_no_outage() {
    let log = Log::default();
    let _taken = log.taken();
    let mut flow = Flow::new();
    flow.flow(400, BEAT, |_, _| {}).await;
    let calm = flow.latencies().await;
    let (before, lines) = (flow.calls(), log.lines().len());
    flow.flow(4_800, BEAT, |world, at| {
        if at == 0 {
            fail(world, 500, MISSING);
        }
    })
    .await;
    let took = flow.latencies().await;
    for percent in [50, 90, 99] {
        let (was, is) = (percentile(&calm, percent), percentile(&took, percent));
        assert!(is <= was.mul_f64(1.1), "{percent} %: {was:?} before, {is:?} with it");
    }
    assert!(*took.last().expect("some") <= Duration::from_millis(250), "{:?}", took.last());
    // One call for each good event, and twenty a second for the others.
    let calls = flow.calls() - before;
    assert!(calls < 4_800 + 20 * 120 + 100, "{calls} calls in two minutes");
    assert_eq!(log.count("outage") + log.count("takes events again"), 0, "{:#?}", log.lines());
    // One line for each step of the back-off: 1, 2, 4, … 30 s.
    let lines = log.lines().len() - lines;
    assert!((1..=9).contains(&lines), "{lines} lines: {:#?}", log.lines());
    assert!(log.count("keys_waiting=500") > 0, "{:#?}", log.lines());

    assert!(flow.world.letters().await.is_empty(), "they wait");
    for n in 0..500 {
        flow.world.sink.mend_key(&key(&format!("bad{n}")));
    }
    flow.world.until_delivered(500 + flow.next).await;
    flow.relay.stop().await;
    assert_eq!(flow.world.repetitions(), 0);
}

/// More of its events than fit the memory, among others: what fails on goes to the dead letters for
/// the time being, or nothing more would be read for the others.
#[tokio::test(start_paused = true)]
async fn a_missing_destination_never_fills_the_memory_of_the_others() {
    const BAD: u32 = 3_000;
    let mut flow = Flow::with_budget(1 << 20);
    flow.flow(40, BEAT, |_, _| {}).await;
    flow.flow(BAD, BEAT, |world, at| {
        world.sink.fail_key(key(&format!("bad{at}")), MISSING);
        world.append(&[event(&format!("bad{at}"), at.into())]);
    })
    .await;
    flow.flow(400, BEAT, |_, _| {}).await;
    let took = flow.latencies().await;
    assert!(percentile(&took, 99) <= Duration::from_millis(250), "{:?}", took.last());
    for n in 0..BAD {
        flow.world.sink.mend_key(&key(&format!("bad{n}")));
    }
    flow.world.until_delivered(u64::from(BAD) + flow.next).await;
    flow.relay.stop().await;
    assert_eq!(flow.world.repetitions(), 0);
}

/// Keys that were in calls of which others got through fail for no reason of their own: it may be
/// an outage that began in the middle of them.
#[tokio::test(start_paused = true)]
async fn an_outage_is_seen_by_the_same_few_keys_too() {
    let flow = Flow::new();
    let world = &flow.world;
    for n in 0..40 {
        world.append(&[event(&format!("k{}", n % 20), n)]);
    }
    world.until_delivered(40).await;
    // Half of each call fails first, then all of it.
    for n in 0..10 {
        world.sink.fail_key(key(&format!("k{n}")), TROUBLE);
    }
    for n in 40..60 {
        world.append(&[event(&format!("k{}", n % 20), n)]);
    }
    world.until_delivered(50).await;
    for n in 0..20 {
        world.sink.fail_key(key(&format!("k{n}")), TROUBLE);
    }
    tokio::time::sleep(Duration::from_secs(120)).await;
    let state = flow.relay.status.snapshot().sinks[0].state.clone();
    assert!(matches!(state, SinkState::Outage { .. }), "{state:?}");
    // Back-offs have grown to half a minute; its end is heard of sooner.
    for n in 0..20 {
        world.sink.mend_key(&key(&format!("k{n}")));
    }
    let back = world.clock.elapsed();
    world.until_delivered(60).await;
    let took = world.clock.elapsed().saturating_sub(back);
    assert!(took <= Duration::from_secs(5), "{took:?}");
    flow.relay.stop().await;
}

/// The same where little else flows: a good event every three seconds goes at once.
#[tokio::test(start_paused = true)]
async fn a_missing_destination_holds_up_nobody_else_where_little_else_flows() {
    let log = Log::default();
    let _taken = log.taken();
    let mut flow = Flow::new();
    let beat = Duration::from_secs(3);
    flow.flow(20, beat, |_, _| {}).await;
    let calm = flow.latencies().await;
    flow.flow(1, beat, |world, _| fail(world, 300, MISSING)).await;
    let lines = log.lines().len();
    // Since the first good event after them it is known whose trouble it is.
    let from = flow.appended.len() + 1;
    flow.flow(200, beat, |_, _| {}).await;
    let took = flow.latencies_from(from).await;
    assert!(took.last() <= calm.last(), "{:?} before, {:?} with it", calm.last(), took.last());
    assert_eq!(log.lines()[lines..].iter().filter(|line| line.contains("outage")).count(), 0);
    flow.relay.stop().await;
}

/// Ever new keys of a missing stream, three in a beat: none of them was tried before, so each
/// might be the first sign of an outage.
#[tokio::test(start_paused = true)]
async fn ever_new_keys_of_a_missing_destination_hold_up_nobody_else() {
    let log = Log::default();
    let _taken = log.taken();
    let mut flow = Flow::new();
    flow.flow(400, BEAT, |_, _| {}).await;
    let calm = flow.latencies().await;
    flow.flow(2_400, BEAT, |world, at| {
        for n in 0..3 {
            let name = format!("bad{at}-{n}");
            world.sink.fail_key(key(&name), MISSING);
            world.append(&[event(&name, u64::from(at))]);
        }
    })
    .await;
    let took = flow.latencies().await;
    let (was, is) = (percentile(&calm, 99), percentile(&took, 99));
    assert!(is <= was.mul_f64(1.1), "{was:?} before, {is:?} with it");
    assert_eq!(log.count("outage") + log.count("takes events again"), 0, "{:#?}", log.lines());
    flow.relay.stop().await;
}

/// An outage beside a missing stream is one, for as long as it is one.
#[tokio::test(start_paused = true)]
async fn an_outage_beside_a_missing_destination_is_told_once_and_calls_seldom() {
    let log = Log::default();
    let _taken = log.taken();
    let mut flow = Flow::new();
    flow.flow(800, BEAT, |world, at| {
        if at == 0 {
            fail(world, 500, MISSING);
        }
    })
    .await;
    flow.latencies().await;
    let lines = log.lines().len();
    for _ in 0..3 {
        flow.world.sink.set_outage(Some(TROUBLE));
        let before = flow.calls();
        for _ in 0..400 {
            flow.world.append(&[event(&format!("good{}", flow.next), flow.next)]);
            flow.next += 1;
            flow.appended.push(flow.world.clock.elapsed());
            tokio::time::sleep(BEAT).await;
        }
        let state = flow.relay.status.snapshot().sinks[0].state.clone();
        assert!(matches!(state, SinkState::Outage { .. }), "{state:?}");
        let calls = flow.calls() - before;
        assert!(calls < 60, "{calls} calls in ten seconds of an outage");
        flow.world.sink.set_outage(None);
        flow.all_good_arrive().await;
    }
    let told = log.lines().split_off(lines);
    let count = |part: &str| told.iter().filter(|line| line.contains(part)).count();
    assert_eq!((count("an outage"), count("takes events again")), (3, 3), "{told:#?}");
    assert!(flow.world.letters().await.is_empty(), "no attempt was used up");
    flow.relay.stop().await;
}

/// A sink of which one destination never answers: its events fail after five seconds, and all of
/// their call with them so late.
struct Silent(MemorySink);

#[async_trait::async_trait]
impl Sink for Silent {
    fn capabilities(&self) -> Capabilities {
        Capabilities { chain: Chain::Many, max_in_flight: 4, ..self.0.capabilities() }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let silent = batch.records().iter().any(|one| one.event.key().as_str().starts_with("bad"));
        if silent {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        self.0.publish(batch).await
    }

    async fn check(&self) -> postrider_core::Result<()> {
        self.0.check().await
    }

    async fn close(&self) -> postrider_core::Result<()> {
        Ok(())
    }
}

/// Events that failed once are sent apart: who waits for a destination that does not answer is held
/// up by it once, and nobody after that.
#[tokio::test(start_paused = true)]
async fn a_destination_that_does_not_answer_holds_up_nobody_else_once_it_is_known() {
    let world = World::new(1);
    world.sink.set_latency(Duration::from_millis(10));
    let relay = Relay::builder(world.source(), Arc::new(world.store.clone()), World::options("a"))
        .clock(Arc::clone(&world.clock))
        .sink(World::sink_options(), Arc::new(Silent(world.sink.clone())))
        .build()
        .expect("valid options");
    let relay = start(relay);
    let log = Log::default();
    let _taken = log.taken();
    let mut flow = Flow { world, relay, next: 0, appended: Vec::new() };
    flow.flow(40, BEAT, |_, _| {}).await;
    // Tried for the first time they may keep all calls busy.
    flow.flow(1_200, BEAT, |world, at| {
        if at == 0 {
            fail(world, 50, MISSING);
        }
    })
    .await;
    let known_from = flow.appended.len();
    flow.flow(2_400, BEAT, |_, _| {}).await;
    let took = flow.latencies_from(known_from).await;
    assert!(*took.last().expect("some") <= Duration::from_millis(250), "{:?}", took.last());
    assert_eq!(log.count("outage"), 0, "{:#?}", log.lines());
    flow.relay.stop().await;
}
