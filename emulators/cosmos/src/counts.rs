//! What was asked, and what it cost.
//!
//! What lives here: counters of requests by operation and by status, and the sum of request
//! charges. What does not: judging them.
//! Invariant: every answer is counted once, faults and lost answers included.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::request::Operation;

/// Since the start, or since the last reset.
#[derive(Debug, Default, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Counts {
    total: u64,
    by_operation: BTreeMap<Operation, u64>,
    /// 0 stands for an answer that was never sent.
    by_status: BTreeMap<u16, u64>,
    request_charge: f64,
}

impl Counts {
    pub(crate) fn add(&mut self, operation: Operation, status: u16, charge: f64) {
        self.total += 1;
        *self.by_operation.entry(operation).or_default() += 1;
        *self.by_status.entry(status).or_default() += 1;
        self.request_charge += charge;
    }
}
