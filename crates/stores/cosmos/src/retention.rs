//! Retention, which is the database's here: each event's document has a time to live.
//!
//! What lives here: the seam, which deletes nothing. What does not: the forecast of what an unsent
//! event's time to live leaves (`advice.rs`).
//! Invariant: Postrider deletes no event here, so it can delete none that is unsent; the time to
//! live, which goes by age alone, is what can.

use async_trait::async_trait;
use postrider_core::{Error, HeldLease, Pruned, Result, Retention, RetentionPolicy};

use crate::CosmosStore;

#[async_trait]
impl Retention for CosmosStore {
    async fn prune(&self, lease: Option<&HeldLease>, _: &RetentionPolicy) -> Result<Pruned> {
        if let Some(lease) = lease {
            let mut under = self.under(lease);
            while !under.write(Vec::new()).await? {}
            return Ok(Pruned::default());
        }
        Err(Error::unsupported(
            "events of an Azure Cosmos DB container go by their time to live; there is nothing to \
             prune",
        ))
    }
}
