//! How the copy of the checkpoints stands, for people.
//!
//! What lives here: the look. What does not: the copy itself (`../mirror.rs`).
//! Invariant: reads only; a copy that can't be read is told, and is no failure of the look.

use std::time::Duration;

use postrider_core::ConsumerName;

use super::adopt::Facts;
use crate::wal::PostgresWal;

/// One consumer in the copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirroredConsumer {
    /// Who.
    pub consumer: String,
    /// Where it stands there, as the server writes places.
    pub place: String,
    /// On which timeline.
    pub timeline: u32,
    /// How long ago that was written, by the source's database.
    pub age: Duration,
}

/// How the copy stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MirrorReport {
    /// Where it is, without secrets.
    pub place: String,
    /// By name.
    pub consumers: Vec<MirroredConsumer>,
    /// What keeps it from being read.
    pub trouble: Option<String>,
}

impl PostgresWal {
    /// What the copy of the checkpoints has, also while another process writes it; none without
    /// one.
    ///
    /// # Cancellation
    /// Safe: it changes nothing.
    pub async fn mirror(&self) -> Option<MirrorReport> {
        let mirror = self.wal.mirror.as_ref()?;
        let listed = async {
            let facts = Facts::of(&self.wal, "").await?;
            let mut consumers = Vec::new();
            for (consumer, kept) in mirror.list(&facts.owner).await? {
                let place = kept.place()?;
                consumers.push(MirroredConsumer {
                    consumer,
                    place: place.lsn.to_string(),
                    timeline: place.timeline,
                    age: kept.age(facts.now_ms),
                });
            }
            Ok::<_, postrider_core::Error>(consumers)
        };
        let (consumers, trouble) = match listed.await {
            Ok(consumers) => (consumers, None),
            Err(error) => (Vec::new(), Some(error.chain())),
        };
        Some(MirrorReport { place: mirror.shown(), consumers, trouble })
    }

    /// For how long the copy has been behind the checkpoint of each consumer that this process
    /// serves; zero for one that is up to date.
    pub fn mirror_behind(&self) -> Vec<(ConsumerName, Duration)> {
        self.wal.mirror.as_ref().map(super::Mirror::behind).unwrap_or_default()
    }
}
