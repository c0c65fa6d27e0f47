//! Names and values of the relay's metrics.
//!
//! What lives here: handing a snapshot to whatever recorder the process installed. What does not:
//! an exporter.
//! Invariant: labels are sinks, of which there are few; never keys, topics or positions.

use metrics::{counter, gauge};

use crate::status::{SinkState, Snapshot};

/// Hands the totals since the relay's start to the recorder.
pub(crate) fn export(snapshot: &Snapshot) {
    for sink in &snapshot.sinks {
        let label = [("sink", sink.name.to_string())];
        counter!("postrider_published_total", &label).absolute(sink.published);
        counter!("postrider_duplicates_total", &label).absolute(sink.duplicates);
        counter!("postrider_parked_total", &label).absolute(sink.parked);
        counter!("postrider_failures_total", &label).absolute(sink.failures);
        counter!("postrider_publish_calls_total", &label).absolute(sink.calls);
        gauge!("postrider_outstanding_events", &label).set(as_f64(sink.outstanding));
        gauge!("postrider_in_flight_bytes", &label).set(as_f64(sink.in_flight_bytes));
        let unwritten = sink.unwritten.as_secs_f64();
        gauge!("postrider_checkpoint_failing_seconds", &label).set(unwritten);
        let state = match sink.state {
            SinkState::Flowing => 0.0,
            SinkState::Outage { .. } => 1.0,
            SinkState::Halted { .. } => 2.0,
        };
        gauge!("postrider_sink_state", &label).set(state);
    }
    gauge!("postrider_partitions_held").set(as_f64(snapshot.partitions.len() as u64));
    gauge!("postrider_ready").set(if snapshot.ready { 1.0 } else { 0.0 });
}

#[expect(clippy::cast_precision_loss, reason = "a gauge above 2^53 may be off by one")]
fn as_f64(value: u64) -> f64 {
    value as f64
}
