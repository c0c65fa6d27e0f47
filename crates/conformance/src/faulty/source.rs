//! A source and its readers under the dice.
//!
//! What lives here: the source seam. What does not: the dice.
//! Invariant: a batch whose answer was lost is handed out by the next call: a reader goes on where
//! it was, whether the call failed or was dropped.

use std::sync::Arc;

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, Error, PartitionId, Position, ReadOutcome, Reader, Result, Source,
    StartFrom,
};

use super::{Dice, Faulty, Strike};

#[async_trait]
impl<S: Source + ?Sized> Source for Faulty<S> {
    fn identity(&self) -> String {
        self.inner.identity()
    }

    async fn partitions(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        self.struck("listing partitions", self.inner.partitions(consumer)).await
    }

    async fn open(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        from: StartFrom,
    ) -> Result<Box<dyn Reader>> {
        let opened = self.inner.open(consumer, partition, from);
        let inner = self.struck("opening a reader", opened).await?;
        Ok(Box::new(FaultyReader { inner, dice: Arc::clone(&self.dice), kept: None }))
    }
}

struct FaultyReader {
    inner: Box<dyn Reader>,
    dice: Arc<Dice>,
    /// What was read and not handed out yet.
    kept: Option<ReadOutcome>,
}

#[async_trait]
impl Reader for FaultyReader {
    async fn next(&mut self, limit: BatchLimit) -> Result<ReadOutcome> {
        self.dice.delay().await;
        let strike = self.dice.roll();
        if strike == Strike::Before {
            return Err(Error::transient("injected before reading"));
        }
        if self.kept.is_none() {
            self.kept = Some(self.inner.next(limit).await?);
        }
        self.dice.delay().await;
        match strike {
            Strike::None | Strike::Before => {
                Ok(self.kept.take().expect("it was read just above, or by an earlier call"))
            }
            Strike::After | Strike::Cut => Err(Error::transient("injected after reading")),
        }
    }

    fn confirmed(&mut self, position: &Position) {
        self.inner.confirmed(position);
    }
}
