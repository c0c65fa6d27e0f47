//! Outages, and the window of duplicate detection.
//!
//! What lives here: what is told of events that were sent without a known outcome, before and after
//! the window is over, and what the queue then holds. What does not: the list's bounds
//! (`src/doubts.rs`).
//! Invariant: the emulator's clock and the sink's are moved together; nobody waits for a window.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use postrider_core::{Outcome, Record};
use postrider_servicebus_emulator::{Entity, Status};
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use tracing::subscriber::DefaultGuard;

use crate::{Bus, Moved, QUEUE, confirm, ids, publish, record};

const WINDOW: Duration = Duration::from_secs(600);
/// What the lines say.
const BEFORE: &str = "when the window of duplicate detection is over, receivers may get them twice";
const AFTER: &str = "sent again after the window of duplicate detection";

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("not poisoned").write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A queue that detects duplicates, a sink, and what is told on this test's thread.
struct Watched {
    bus: Bus,
    clock: Arc<Moved>,
    sink: ServiceBus,
    log: Log,
    _telling: DefaultGuard,
    metrics: PrometheusHandle,
}

impl Watched {
    async fn start(recorder: &PrometheusRecorder, dedup_window: Option<Duration>) -> Self {
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone());
        let telling = tracing::subscriber::set_default(subscriber.finish());
        let entity = Entity {
            requires_session: true,
            duplicate_detection_window: Some(WINDOW),
            ..Entity::default()
        };
        let bus = Bus::with(entity).await;
        let dedup_window_ms = dedup_window.map(|window| window.as_millis() as u64);
        let config = ServiceBusConfig { timeout_ms: 500, dedup_window_ms, ..bus.config() };
        let clock = Arc::new(Moved::default());
        let sink = ServiceBus::new(&config, clock.clone()).expect("valid");
        Self { bus, clock, sink, log, _telling: telling, metrics: recorder.handle() }
    }

    /// Lets time pass, for the sink and for the service.
    fn pass(&self, time: Duration) {
        self.clock.pass(time);
        self.bus.emulator.advance(time);
    }

    /// Sends, and hears of nothing.
    async fn lose(&self, records: &[Record]) {
        publish(&self.sink, &[record(900, "connects", b"{}")]).await;
        self.bus.emulator.faults().lose_confirmations(QUEUE, records.len() as u64);
        let outcomes = publish(&self.sink, records).await;
        assert!(outcomes.iter().all(|one| matches!(one, Outcome::Failed(_))), "{outcomes:?}");
        self.bus.emulator.faults().lose_confirmations(QUEUE, 0);
    }

    /// The lines with this text in them.
    fn told(&self, text: &str) -> Vec<String> {
        let log = String::from_utf8(self.log.0.lock().expect("not poisoned").clone());
        let log = log.expect("text");
        log.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    fn metric(&self, name: &str) -> Option<String> {
        let name = format!("postrider_servicebus_{name}{{entity=\"orders\"}} ");
        let text = self.metrics.render();
        text.lines().find_map(|line| line.strip_prefix(&name)).map(str::to_owned)
    }
}

fn of_five_keys(from: u128) -> Vec<Record> {
    (from..from + 5).map(|n| record(n, &format!("k{n}"), b"{}")).collect()
}

#[tokio::test]
async fn an_outage_beyond_the_window_is_told_before_and_after_with_the_ids() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let watched = Watched::start(&recorder, Some(WINDOW)).await;
    let lost = of_five_keys(1);
    watched.lose(&lost).await;
    assert_eq!(watched.metric("unknown_events").as_deref(), Some("5"));
    watched.bus.emulator.faults().set_status(QUEUE, Status::Disabled);
    // What is refused meanwhile is in no doubt.
    let refused = of_five_keys(11);
    publish(&watched.sink, &refused).await;
    watched.pass(WINDOW / 5 * 4 - Duration::from_secs(1));
    publish(&watched.sink, &refused).await;
    assert_eq!(watched.told(BEFORE), [""; 0], "there is time enough");
    watched.pass(Duration::from_secs(1));
    for _ in 0..2 {
        publish(&watched.sink, &refused).await;
    }
    let told = watched.told(BEFORE);
    let [line] = &told[..] else { panic!("once: {told:?}") };
    assert!(ids(&lost).iter().all(|id| line.contains(id)), "{line}");
    assert!(!ids(&refused).iter().any(|id| line.contains(id)), "{line}");
    watched.pass(WINDOW);
    watched.bus.emulator.faults().set_status(QUEUE, Status::Active);
    crate::confirm_in_the_end(&watched.sink, record(900, "connects", b"{}")).await;
    let everything = [lost.clone(), refused.clone()].concat();
    confirm(&watched.sink, &everything).await;
    let told = watched.told(AFTER);
    let [line] = &told[..] else { panic!("once: {told:?}") };
    assert!(line.contains("events=5") && line.contains("more=0"), "{line}");
    assert!(ids(&lost).iter().all(|id| line.contains(id)), "{line}");
    assert!(!ids(&refused).iter().any(|id| line.contains(id)), "{line}");
    assert_eq!(watched.metric("beyond_window_total").as_deref(), Some("5"));
    assert_eq!(watched.metric("unknown_events").as_deref(), Some("0"));
    // None is missing, and those that were told are there twice indeed.
    for (records, times) in [(&lost, 2), (&refused, 1)] {
        for one in records {
            let session = watched.bus.session(one.event.key().as_str());
            assert_eq!(session, vec![one.event.id().to_string(); times]);
        }
    }
}

#[tokio::test]
async fn an_outage_within_the_window_doubles_nothing_and_says_nothing() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let watched = Watched::start(&recorder, None).await;
    let lost = of_five_keys(1);
    watched.lose(&lost).await;
    watched.pass(WINDOW - Duration::from_secs(90));
    crate::confirm_in_the_end(&watched.sink, record(900, "connects", b"{}")).await;
    confirm(&watched.sink, &lost).await;
    assert_eq!(watched.told(AFTER), [""; 0]);
    assert_eq!(watched.metric("beyond_window_total"), None);
    assert!(lost.iter().all(|one| watched.bus.session(one.event.key().as_str()).len() == 1));
}
