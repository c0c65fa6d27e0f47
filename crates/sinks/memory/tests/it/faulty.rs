//! The faulty wrapper over a memory sink.
//!
//! What lives here: that its outcomes are true of the log. What does not: sources and stores.
//! Invariant: what is confirmed is in the log, and no key is overtaken in one call.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use postrider_conformance::clock::{ManualClock, TokioClock};
use postrider_conformance::faulty::{Dice, FaultRates, Faulty};
use postrider_conformance::samples::{event, record};
use postrider_core::{Outcome, PartitionId, Publish, Record, Sink};
use postrider_sink_memory::MemorySink;

const RATES: FaultRates = FaultRates {
    before: 0.15,
    after: 0.15,
    cut: 0.3,
    delayed: 0.2,
    longest_delay: Duration::from_millis(5),
};

#[tokio::test(start_paused = true)]
async fn outcomes_under_faults_are_true_of_the_log() {
    let sink = MemorySink::new(Arc::new(ManualClock::default()));
    let dice = Dice::new(11, RATES, Arc::new(TokioClock::default()));
    let faulty = Faulty::new(Arc::new(sink.clone()), Arc::clone(&dice));
    let (mut confirmed, mut unsent, mut lost) = (0, 0, 0);
    for round in 0..200 {
        sink.clear();
        let records: Vec<Record> =
            (0..6).map(|n| record(event(&format!("k{}", n % 2), n), n + round * 6)).collect();
        let partition = PartitionId::numbered(0, 1);
        let outcomes = faulty.publish(Publish::new(&partition, &records)).await;
        assert_eq!(outcomes.len(), records.len());
        let log = sink.deliveries();
        let mut stopped: HashSet<&str> = HashSet::new();
        for (outcome, record) in outcomes.iter().zip(&records) {
            let stored = log.iter().any(|one| one.event.id() == record.event.id());
            let sent_after_a_gap = stored && stopped.contains(record.event.key().as_str());
            assert!(!sent_after_a_gap, "round {round}: a key was overtaken");
            match (matches!(outcome, Outcome::Confirmed), stored) {
                (true, true) => confirmed += 1,
                (false, true) => lost += 1,
                (false, false) => {
                    stopped.insert(record.event.key().as_str());
                    unsent += 1;
                }
                (true, false) => panic!("round {round}: confirmed and not in the log"),
            }
        }
    }
    assert!(confirmed > 0 && unsent > 0 && lost > 0, "{confirmed} {unsent} {lost}");
    assert!(dice.strikes() > 50);
}
