//! Topics that brokers said they know nothing of, and since when.
//!
//! What lives here: whether a topic has been missing for so long that it is believed. What does
//! not: asking (`look.rs`), and what becomes of its events (`error.rs`).
//! Invariant: no single answer parks an event. Brokers that make a topic say at first that there is
//! none (Kafka: the creation is handed to the controller, and the request answered before), and so
//! does one that was just started and has not heard of its topics yet.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For how long it has to be missing, by at least two looks.
const SETTLED: Duration = Duration::from_secs(5);
/// A topic that nobody has looked for in this time may have been there in between.
const STALE: Duration = Duration::from_secs(60);
/// Topics remembered. Beyond them those that nobody looks for any more are forgotten, or all.
const MOST: usize = 10_000;

/// The first and the last look that found each missing.
#[derive(Debug, Default)]
pub(crate) struct Missing(Mutex<HashMap<String, (Instant, Instant)>>);

impl Missing {
    /// Notes that a topic was found missing at `now`; whether it has been so for long enough.
    pub(crate) fn is_settled(&self, topic: &str, now: Instant) -> bool {
        let mut topics = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if topics.len() >= MOST && !topics.contains_key(topic) {
            topics.retain(|_, (_, last)| now.duration_since(*last) < STALE);
            if topics.len() >= MOST {
                topics.clear();
            }
        }
        let (first, last) = topics.entry(topic.to_owned()).or_insert((now, now));
        if now.duration_since(*last) >= STALE {
            *first = now;
        }
        *last = now;
        now.duration_since(*first) >= SETTLED
    }

    /// A look has found it.
    pub(crate) fn is_there(&self, topic: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(topic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_is_believed_missing_after_a_while_of_looks_that_find_none() {
        let (missing, begun) = (Missing::default(), Instant::now());
        let after = |seconds| begun + Duration::from_secs(seconds);
        assert!(!missing.is_settled("a", after(0)));
        assert!(!missing.is_settled("a", after(4)));
        assert!(missing.is_settled("a", after(5)));
        assert!(!missing.is_settled("b", after(5)), "each by itself");
        missing.is_there("a");
        assert!(!missing.is_settled("a", after(6)), "it was there");
        assert!(!missing.is_settled("b", after(100)), "nobody has looked in between");
    }

    #[test]
    fn memory_is_bounded() {
        let (missing, begun) = (Missing::default(), Instant::now());
        for number in 0..=MOST {
            assert!(!missing.is_settled(&number.to_string(), begun));
        }
        assert!(missing.0.lock().expect("not poisoned").len() <= MOST);
    }
}
