//! What all connections of one emulator share.
//!
//! What lives here: the broker, the faults, the counters. What does not: sockets.
//! Invariant: counters only grow; each is raised by the one place that does what it counts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::broker::{Broker, LinkId};
use crate::config::Config;
use crate::error::Result;
use crate::faults::FaultState;

/// What an entity has seen since the emulator started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Deliveries that came whole from senders, rejected ones too.
    pub transfers: u64,
    /// Transfers that were batches.
    pub batches: u64,
    /// Messages that were stored, or scheduled.
    pub messages: u64,
    /// Messages that were dropped as repetitions.
    pub duplicates: u64,
    /// Transfers that were rejected.
    pub rejected: u64,
    /// Transfers for which their link had been waiting: none before them was still unanswered. A
    /// sender that awaits each transfer has as many as transfers, one that has several in flight
    /// has fewer.
    pub round_trips: u64,
    /// Links that senders attached.
    pub sender_links: u64,
    /// Links that receivers attached.
    pub receiver_links: u64,
    /// Messages that were sent to receivers.
    pub deliveries: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    pub config: Config,
    pub broker: Broker,
    pub faults: FaultState,
    counts: Mutex<HashMap<String, Counts>>,
    pub put_tokens: AtomicU64,
    pub connections: AtomicU64,
    links: AtomicU64,
}

impl Shared {
    /// In memory.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn new(config: Config) -> Self {
        Self::with(Broker::new(&config), config)
    }

    /// With the file that the configuration names, if it names one.
    pub(crate) fn open(config: Config) -> Result<Self> {
        let broker = match &config.data {
            Some(path) => Broker::open(&config, path)?,
            None => Broker::new(&config),
        };
        Ok(Self::with(broker, config))
    }

    fn with(broker: Broker, config: Config) -> Self {
        Self {
            broker,
            config,
            faults: FaultState::new(),
            counts: Mutex::default(),
            put_tokens: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            // 0 is nobody.
            links: AtomicU64::new(1),
        }
    }

    /// A number that no other link has.
    pub(crate) fn next_link(&self) -> LinkId {
        self.links.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn count(&self, key: &str, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.lock();
        match counts.get_mut(key) {
            Some(counts) => change(counts),
            None => change(counts.entry(key.to_owned()).or_default()),
        }
    }

    pub(crate) fn counts(&self, key: &str) -> Counts {
        self.lock().get(key).copied().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Counts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
