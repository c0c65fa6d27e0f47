//! Faults on demand: which requests they meet, and what those get instead of an answer.
//!
//! What lives here: the rules, and the draw of one for a request. What does not: carrying it out
//! (`service.rs`).
//! Invariant: a rule meets exactly as many requests as it says; the eldest one that fits is drawn.

use serde::{Deserialize, Serialize};

use crate::request::Operation;

/// What happens to requests that fit.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Fault {
    /// Of this operation only.
    #[serde(default)]
    pub operation: Option<Operation>,
    /// Whose path has this text in it.
    #[serde(default)]
    pub path: Option<String>,
    /// Whose content has this text in it.
    #[serde(default)]
    pub content: Option<String>,
    /// At the region that listens on this port only.
    #[serde(default)]
    pub port: Option<u16>,
    /// So many that fit are left alone first.
    #[serde(default)]
    pub skip: u64,
    /// So many meet it; then it is gone.
    #[serde(default = "one")]
    pub count: u64,
    /// Wait before the answer, in milliseconds.
    #[serde(default)]
    pub delay_ms: u64,
    /// Whether the request is carried out all the same.
    #[serde(default)]
    pub carried_out: bool,
    /// The answer; without one the connection is closed.
    #[serde(default)]
    pub answer: Option<Answer>,
}

/// An answer in place of the true one.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Answer {
    /// 429, 449, 410 …
    pub status: u16,
    /// What tells one 410 from another.
    #[serde(default)]
    pub sub_status: Option<u32>,
    /// How long the client shall wait, in milliseconds.
    #[serde(default)]
    pub retry_after_ms: Option<u64>,
    /// The content; else an error's usual one.
    #[serde(default)]
    pub content: Option<serde_json::Value>,
}

const fn one() -> u64 {
    1
}

impl Fault {
    fn fits(&self, operation: Operation, path: &str, content: &[u8], port: u16) -> bool {
        let has = |text: &String| {
            text.is_empty() || content.windows(text.len()).any(|part| part == text.as_bytes())
        };
        self.operation.is_none_or(|wanted| wanted == operation)
            && self.path.as_ref().is_none_or(|text| path.contains(text.as_str()))
            && self.content.as_ref().is_none_or(has)
            && self.port.is_none_or(|wanted| wanted == port)
    }
}

/// Those that still wait for a request.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<Fault>);

impl Faults {
    pub(crate) fn add(&mut self, fault: Fault) {
        if fault.count > 0 {
            self.0.push(fault);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn waiting(&self) -> &[Fault] {
        &self.0
    }

    /// The one that this request meets.
    pub(crate) fn draw(
        &mut self,
        operation: Operation,
        path: &str,
        content: &[u8],
        port: u16,
    ) -> Option<Fault> {
        let at = self.0.iter().position(|fault| fault.fits(operation, path, content, port))?;
        let fault = &mut self.0[at];
        if fault.skip > 0 {
            fault.skip -= 1;
            return None;
        }
        fault.count -= 1;
        let drawn = fault.clone();
        if drawn.count == 0 {
            self.0.remove(at);
        }
        Some(drawn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(json: &str) -> Faults {
        let mut faults = Faults::default();
        faults.add(serde_json::from_str(json).expect("a fault"));
        faults
    }

    #[test]
    fn a_fault_meets_as_many_requests_as_it_says_after_those_it_skips() {
        let mut faults = faults(r#"{"operation": "batch", "skip": 1, "count": 2}"#);
        let mut batch = || faults.draw(Operation::Batch, "/dbs/d", b"", 1).is_some();
        assert_eq!([batch(), batch(), batch(), batch()], [false, true, true, false]);
        assert!(faults.waiting().is_empty());
    }

    #[test]
    fn others_pass_by() {
        let json = r#"{"operation": "readItem", "path": "/docs/1", "content": "b", "port": 2}"#;
        let mut faults = faults(json);
        let mut draw = |operation, path, content: &[u8], port| {
            faults.draw(operation, path, content, port).is_some()
        };
        assert!(!draw(Operation::Batch, "/docs/1", b"abc", 2));
        assert!(!draw(Operation::ReadItem, "/docs/2", b"abc", 2));
        assert!(!draw(Operation::ReadItem, "/docs/1", b"ac", 2));
        assert!(!draw(Operation::ReadItem, "/docs/1", b"abc", 3));
        assert!(draw(Operation::ReadItem, "/docs/1", b"abc", 2));
    }
}
