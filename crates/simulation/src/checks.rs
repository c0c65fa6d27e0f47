//! What must hold at every moment of a world, and at its end.
//!
//! What lives here: the invariants. What does not: making things happen.
//! Invariant: the checks read the store and the brokers directly, never through a faulty wrapper.

use std::collections::{HashMap, HashSet};

use postrider_conformance::oracle::{Appended, Verdict};
use postrider_conformance::samples::consumer;
use postrider_conformance::sink::Delivered;
use postrider_core::{
    BatchLimit, Checkpoints, ConsumerName, DeadLetterFilter, DeadLetters, Entry, Event, EventId,
    Feed, PartitionId, Position, Record,
};

use crate::world::{SINKS, World};

const PAGE: BatchLimit = BatchLimit { records: 10_000, bytes: 1 << 30 };

/// What one moment is compared with the next by.
#[derive(Default)]
pub(crate) struct Watch {
    checkpoints: HashMap<(ConsumerName, PartitionId), Position>,
    /// Everything committed, by partition, in feed order.
    read: HashMap<PartitionId, Vec<Record>>,
}

impl Watch {
    /// Checks a moment: no checkpoint moved back, and none covers an event that is neither at the
    /// broker nor among the dead letters.
    pub(crate) async fn look(&mut self, world: &World) -> Result<(), String> {
        let progress = world.store.progress().await.map_err(|error| error.chain())?;
        let mut settled = Vec::new();
        for (name, broker) in SINKS.iter().zip(&world.brokers) {
            let mut ids = letters(world, &consumer(name)).await?;
            ids.extend(broker.deliveries().iter().map(|one| one.event.id()));
            settled.push((consumer(name), ids));
        }
        for one in progress {
            let ids = settled.iter().find(|(name, _)| *name == one.consumer);
            let (_, ids) = ids.ok_or_else(|| format!("{} is no sink", one.consumer))?;
            let position = one.checkpoint.position;
            let place = (one.consumer.clone(), one.partition.clone());
            let last = self.checkpoints.insert(place, position.clone());
            if last.is_some_and(|last| last.as_bytes() > position.as_bytes()) {
                return Err(format!("the checkpoint of partition {} moved back", one.partition));
            }
            self.read_on(world, &one.partition).await?;
            let covered = self.read[&one.partition]
                .iter()
                .take_while(|record| record.position.as_bytes() <= position.as_bytes());
            for record in covered {
                let id = record.event.id();
                if !ids.contains(&id) {
                    return Err(format!(
                        "the checkpoint of {} in partition {} covers event {id} at {}, which is \
                         neither delivered nor a dead letter",
                        one.consumer, one.partition, record.position
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
}

/// The end: the oracle's verdict over everything that was ever committed, for each broker.
pub(crate) fn judge(world: &World, committed: &[Event]) -> Verdict {
    let appended: Vec<Appended> =
        committed.iter().map(|event| Appended { message: Delivered::of(event) }).collect();
    let mut verdict = Verdict::default();
    for broker in &world.brokers {
        let delivered: Vec<Delivered> =
            broker.deliveries().iter().map(|one| Delivered::of(&one.event)).collect();
        verdict = verdict.plus(Verdict::judge(&appended, &delivered));
    }
    verdict
}

async fn letters(world: &World, consumer: &ConsumerName) -> Result<HashSet<EventId>, String> {
    let theirs =
        DeadLetterFilter { consumer: Some(consumer.clone()), ..DeadLetterFilter::default() };
    let letters =
        world.store.list(&theirs, None, usize::MAX).await.map_err(|error| error.chain())?;
    Ok(letters
        .iter()
        .filter_map(|letter| match &letter.entry {
            Entry::Record(record) => Some(record.event.id()),
            Entry::Malformed(_) => None,
        })
        .collect())
}
