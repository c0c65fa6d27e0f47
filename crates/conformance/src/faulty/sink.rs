//! A sink under the dice.
//!
//! What lives here: the sink seam. What does not: the dice.
//! Invariant: what fails was either not sent or its confirmation lost; after a cut nothing later is
//! sent, so that no key is overtaken.

use async_trait::async_trait;
use postrider_core::{Capabilities, Error, Outcome, Publish, Result, Sink};

use super::{Faulty, Strike};

fn failed(what: &'static str) -> Outcome {
    Outcome::Failed(Error::transient(what))
}

#[async_trait]
impl<S: Sink + ?Sized> Sink for Faulty<S> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        self.dice.delay().await;
        let strike = self.dice.roll();
        let sent = match strike {
            Strike::None | Strike::After => records.len(),
            Strike::Before => 0,
            Strike::Cut => self.dice.below(records.len() + 1),
        };
        let mut outcomes = Vec::new();
        if sent > 0 {
            let part = Publish::new(batch.partition(), &records[..sent]);
            outcomes = self.inner.publish(part.within(batch.sending_time())).await;
        }
        self.dice.delay().await;
        if strike == Strike::After {
            outcomes = outcomes.into_iter().map(lost).collect();
        }
        outcomes.extend(records[sent..].iter().map(|_| failed("injected before sending")));
        outcomes
    }

    async fn check(&self) -> Result<()> {
        self.struck("checking the sink", self.inner.check()).await
    }

    async fn close(&self) -> Result<()> {
        self.struck("closing the sink", self.inner.close()).await
    }
}

/// The outcome of an event whose answer did not arrive.
fn lost(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Confirmed | Outcome::Duplicate => failed("injected loss of a confirmation"),
        Outcome::Failed(error) => Outcome::Failed(error),
        Outcome::HeldBack => Outcome::HeldBack,
    }
}
