//! What the SDK tells of each operation: request charges, as a metric, and whether writes arrive.
//!
//! What lives here: the counter, fed by the SDK itself after every operation. What does not:
//! prices, and what follows when writes don't arrive (`connection.rs`).
//! Invariant: an operation counts with all its attempts, whether it succeeded or not.

use std::sync::Arc;

use azure_core::http::Context;
use azure_data_cosmos::diagnostics::{
    CosmosOperationContext, DiagnosticsContext, DiagnosticsHandler,
};

use crate::connection::Health;

/// What the service charged, by operation and container: thousandths of request units, as the
/// counter counts whole numbers and a point read costs one unit.
const CHARGED: &str = "postrider_cosmos_request_milliunits_total";
/// Requests to the service, repetitions included.
const REQUESTS: &str = "postrider_cosmos_requests_total";
const MILLIUNITS: f64 = 1_000.0;

/// What batches are called; the store writes by batches alone.
const BATCH: &str = "execute_batch";

/// Hears of each operation that ended.
pub(crate) struct Charges(pub(crate) Arc<Health>);

impl DiagnosticsHandler for Charges {
    fn handle(&self, diagnostics: &DiagnosticsContext, cx: &Context<'_>) {
        let operation = cx.value::<CosmosOperationContext>();
        let text = |found: Option<&str>| found.unwrap_or_default().to_owned();
        if operation.and_then(CosmosOperationContext::operation_name) == Some(BATCH) {
            let status = diagnostics.effective_status();
            self.0.wrote(status.map(|status| u16::from(status.status_code())));
        }
        let labels = [
            ("operation", text(operation.and_then(CosmosOperationContext::operation_name))),
            ("container", text(operation.and_then(CosmosOperationContext::container_name))),
        ];
        metrics::counter!(REQUESTS, &labels).increment(diagnostics.requests().len() as u64);
        let charged = diagnostics.total_request_charge().value();
        metrics::counter!(CHARGED, &labels).increment(milliunits(charged));
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float is cut to the bounds of the integer, and a charge has neither end"
)]
fn milliunits(units: f64) -> u64 {
    (units * MILLIUNITS).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_is_counted_in_thousandths() {
        assert_eq!(milliunits(5.29), 5_290);
        assert_eq!(milliunits(0.0), 0);
        assert_eq!(milliunits(f64::NAN), 0);
    }
}
