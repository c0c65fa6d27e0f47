//! What must hold at every moment of a world, and at its end.
//!
//! What lives here: the invariants. What does not: making things happen.
//! Invariant: the checks read the store and the broker directly, never through a faulty wrapper.

use std::collections::{HashMap, HashSet};

use postrider_conformance::oracle::{Appended, Verdict};
use postrider_conformance::sink::Delivered;
use postrider_core::{
    BatchLimit, Checkpoints, DeadLetterFilter, DeadLetters, Entry, EventId, Feed, PartitionId,
    Position, Record,
};

use crate::world::World;

const PAGE: BatchLimit = BatchLimit { records: 10_000, bytes: 1 << 30 };

/// What one moment is compared with the next by.
#[derive(Default)]
pub(crate) struct Watch {
    checkpoints: HashMap<PartitionId, Position>,
    /// Everything committed, by partition, in feed order.
    read: HashMap<PartitionId, Vec<Record>>,
}

impl Watch {
    /// Checks a moment: no checkpoint moved back, and none covers an event that is neither at the
    /// broker nor among the dead letters.
    pub(crate) async fn look(&mut self, world: &World) -> Result<(), String> {
        let progress = world.store.progress().await.map_err(|error| error.chain())?;
        let arrived: HashSet<EventId> =
            world.broker.deliveries().iter().map(|one| one.event.id()).collect();
        let letters: HashSet<EventId> = letters(world).await?;
        for one in progress {
            let position = one.checkpoint.position;
            let last = self.checkpoints.insert(one.partition.clone(), position.clone());
            if last.is_some_and(|last| last.as_bytes() > position.as_bytes()) {
                return Err(format!("the checkpoint of partition {} moved back", one.partition));
            }
            self.read_on(world, &one.partition).await?;
            let covered = self.read[&one.partition]
                .iter()
                .take_while(|record| record.position.as_bytes() <= position.as_bytes());
            for record in covered {
                let id = record.event.id();
                if !arrived.contains(&id) && !letters.contains(&id) {
                    return Err(format!(
                        "the checkpoint of partition {} covers event {id} at {}, which is neither \
                         delivered nor a dead letter",
                        one.partition, record.position
                    ));
                }
            }
        }
        Ok(())
    }

    async fn read_on(&mut self, world: &World, partition: &PartitionId) -> Result<(), String> {
        let known = self.read.entry(partition.clone()).or_default();
        let after = known.last().map_or(Position::START, |record| record.position.clone());
        let page = Feed::read(&world.store, partition, &after, PAGE).await;
        for entry in page.map_err(|error| error.chain())?.entries {
            if let Entry::Record(record) = entry {
                known.push(record);
            }
        }
        Ok(())
    }

    /// The end: the oracle's verdict over everything that was ever committed.
    pub(crate) async fn judge(&mut self, world: &World) -> Result<Verdict, String> {
        for one in world.store.progress().await.map_err(|error| error.chain())? {
            self.read_on(world, &one.partition).await?;
        }
        // Partitions of one key follow each other: an elder generation's positions are lower.
        let mut records: Vec<&Record> = self.read.values().flatten().collect();
        records.sort_by(|a, b| a.position.as_bytes().cmp(b.position.as_bytes()));
        let appended: Vec<Appended> = records.into_iter().map(Appended::from).collect();
        let delivered: Vec<Delivered> =
            world.broker.deliveries().iter().map(|one| Delivered::of(&one.event)).collect();
        Ok(Verdict::judge(&appended, &delivered))
    }
}

async fn letters(world: &World) -> Result<HashSet<EventId>, String> {
    let all = DeadLetterFilter::default();
    let letters = world.store.list(&all, None, usize::MAX).await.map_err(|error| error.chain())?;
    Ok(letters
        .iter()
        .filter_map(|letter| match &letter.entry {
            Entry::Record(record) => Some(record.event.id()),
            Entry::Malformed(_) => None,
        })
        .collect())
}
