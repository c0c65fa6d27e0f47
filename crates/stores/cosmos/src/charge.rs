//! Request charges as a metric.
//!
//! What lives here: the counter, fed by the SDK itself after every operation. What does not:
//! prices.
//! Invariant: an operation counts with all its attempts, whether it succeeded or not.

use azure_core::http::Context;
use azure_data_cosmos::diagnostics::{
    CosmosOperationContext, DiagnosticsContext, DiagnosticsHandler,
};

/// What the service charged, by operation and container: thousandths of request units, as the
/// counter counts whole numbers and a point read costs one unit.
const CHARGED: &str = "postrider_cosmos_request_milliunits_total";
/// Requests to the service, repetitions included.
const REQUESTS: &str = "postrider_cosmos_requests_total";
const MILLIUNITS: f64 = 1_000.0;

/// Hears of each operation that ended.
pub(crate) struct Charges;

impl DiagnosticsHandler for Charges {
    fn handle(&self, diagnostics: &DiagnosticsContext, cx: &Context<'_>) {
        let operation = cx.value::<CosmosOperationContext>();
        let text = |found: Option<&str>| found.unwrap_or_default().to_owned();
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
