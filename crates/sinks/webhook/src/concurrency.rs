//! How many requests one host gets at a time from this process.
//!
//! What lives here: the process-wide table of hosts. What does not: waiting times and retries.
//! Invariant: all sinks that send to one host and port share one limit; the first of them sets it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use tokio::sync::Semaphore;

static HOSTS: OnceLock<Mutex<HashMap<String, Weak<Semaphore>>>> = OnceLock::new();

/// The permits of a host, made with `limit` of them if no other sink has it in use.
pub(crate) fn permits(host_and_port: &str, limit: usize) -> Arc<Semaphore> {
    let hosts = HOSTS.get_or_init(Mutex::default);
    // The table is whole at every point where a panic could poison it.
    let mut hosts = hosts.lock().unwrap_or_else(PoisonError::into_inner);
    hosts.retain(|_, permits| permits.strong_count() > 0);
    if let Some(permits) = hosts.get(host_and_port).and_then(Weak::upgrade) {
        return permits;
    }
    let permits = Arc::new(Semaphore::new(limit));
    hosts.insert(host_and_port.to_owned(), Arc::downgrade(&permits));
    permits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_one_limit_for_as_long_as_it_is_in_use() {
        let first = permits("one.test:443", 3);
        let second = permits("one.test:443", 9);
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(second.available_permits(), 3);
        assert!(!Arc::ptr_eq(&first, &permits("one.test:444", 3)));
        drop((first, second));
        assert_eq!(permits("one.test:443", 9).available_permits(), 9);
    }
}
