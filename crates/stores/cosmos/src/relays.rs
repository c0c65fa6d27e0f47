//! The list of live relays.
//!
//! What lives here: their documents, and who is still alive. What does not: leases (`leases.rs`),
//! how relays share partitions by the list.
//! Invariant: a relay is off the list once it has said nothing for its time to live, as seen by
//! whoever asks; one that has left is put back by nobody but itself.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use postrider_core::{GroupName, HeldLease, News, RelayId, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::CosmosStore;
use crate::control::{Kept, Write, Written, id, read_as};
use crate::leases::{LEASE, Lease, TRIES, busy, ms};
use crate::letters::is_any_requeued;

pub(crate) const RELAY: &str = "relay";
/// How long a relay's document outlives its last word, by the database's own time to live.
const RELAY_TTL_SECONDS: u64 = 3_600;

/// A relay that said it is alive.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Relay {
    #[serde(rename = "leaseGroup")]
    group: String,
    relay: String,
    ttl_ms: u64,
    beat: u64,
    /// The database's own: an old relay's document goes by itself.
    ttl: u64,
}

/// The documents of this process's relays, as they were written last.
#[derive(Debug, Default)]
pub(crate) struct Own(Mutex<HashMap<String, (Relay, String)>>);

impl Own {
    fn take(&self, id: &str) -> Option<(Relay, String)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(id)
    }

    fn keep(&self, id: String, relay: Relay, etag: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, (relay, etag));
    }
}

fn relay_id(group: &str, relay: &str) -> String {
    id(RELAY, &[group.as_bytes(), relay.as_bytes()])
}

/// What a look at a group finds.
#[derive(Default)]
pub(crate) struct Group {
    pub(crate) leases: Vec<Kept<Lease>>,
    /// Those that are alive.
    relays: Vec<String>,
}

impl CosmosStore {
    /// Writes a relay's document, known in a version or not there.
    async fn put_relay(&self, id: &str, next: Relay, etag: Option<String>) -> Result<bool> {
        let control = &self.inner.control;
        let document = control.document(RELAY, id, &next)?;
        let write = match etag {
            None => Write::Create(document),
            Some(etag) => Write::Replace(document, etag),
        };
        let Written::All(etags) = control.write(&[write]).await? else { return Ok(false) };
        self.inner.own.keep(id.to_owned(), next, etags.into_iter().next().unwrap_or_default());
        Ok(true)
    }

    /// Puts a relay on the list for another time to live.
    pub(crate) async fn say_alive(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<()> {
        let id = relay_id(group.as_str(), relay.as_str());
        for _ in 0..TRIES {
            let found = self.inner.control.read::<Relay>(&id).await?;
            let beat = found.as_ref().map_or(0, |found| found.body.beat.wrapping_add(1));
            let (group, relay) = (group.as_str().to_owned(), relay.as_str().to_owned());
            let next = Relay { group, relay, ttl_ms: ms(ttl), beat, ttl: RELAY_TTL_SECONDS };
            if self.put_relay(&id, next, found.map(|found| found.etag)).await? {
                return Ok(());
            }
        }
        Err(busy("join the relays"))
    }

    /// Keeps a relay on the list that is on it.
    async fn say_still_alive(
        &self,
        group: &GroupName,
        relay: &RelayId,
        ttl: Duration,
    ) -> Result<()> {
        let id = relay_id(group.as_str(), relay.as_str());
        for _ in 0..TRIES {
            let (last, etag) = match self.inner.own.take(&id) {
                Some(known) => known,
                None => match self.inner.control.read::<Relay>(&id).await? {
                    Some(found) => (found.body, found.etag),
                    None => return Ok(()),
                },
            };
            let next = Relay { beat: last.beat.wrapping_add(1), ttl_ms: ms(ttl), ..last };
            if self.put_relay(&id, next, Some(etag)).await? {
                return Ok(());
            }
        }
        Err(busy("stay among the relays"))
    }

    /// Takes a relay off the list.
    pub(crate) async fn say_gone(&self, group: &GroupName, relay: &RelayId) -> Result<()> {
        let id = relay_id(group.as_str(), relay.as_str());
        for _ in 0..TRIES {
            self.inner.own.take(&id);
            let Some(found) = self.inner.control.read::<Relay>(&id).await? else { return Ok(()) };
            let gone = Write::Delete(id.clone(), found.etag);
            if let Written::All(_) = self.inner.control.write(&[gone]).await? {
                self.inner.seen.forget(&id);
                return Ok(());
            }
        }
        Err(busy("leave the relays"))
    }

    /// One look at a group's leases and relays, from which on their times to live run.
    pub(crate) async fn look_at(&self, group: &GroupName, kinds: &[&str]) -> Result<Group> {
        let values = [("@group", json!(group.as_str())), ("@kinds", json!(kinds))];
        let clause = "ARRAY_CONTAINS(@kinds, c.kind) AND c.leaseGroup = @group";
        let mut found = Group::default();
        for kept in self.inner.control.find::<Value>(clause, &values, usize::MAX).await? {
            if kept.body["kind"] == LEASE {
                found.leases.push(read_as(kept)?);
                continue;
            }
            let kept: Kept<Relay> = read_as(kept)?;
            let of = relay_id(&kept.body.group, &kept.body.relay);
            let ttl = Duration::from_millis(kept.body.ttl_ms);
            if !self.inner.seen.remaining(&of, &kept.etag, ttl).is_zero() {
                found.relays.push(kept.body.relay);
            }
        }
        Ok(found)
    }

    /// The live relays of a group, in order; the one that asks is alive.
    pub(crate) async fn live_relays(
        &self,
        group: &GroupName,
        own: Option<&RelayId>,
    ) -> Result<Vec<RelayId>> {
        let relays = self.look_at(group, &[RELAY]).await?.relays;
        let mut live = relays.into_iter().map(RelayId::new).collect::<Result<Vec<_>>>()?;
        if let Some(own) = own.filter(|own| !live.contains(own)) {
            live.push(own.clone());
        }
        live.sort_unstable();
        Ok(live)
    }

    /// What a relay at rest has to know; its leases' holders stay on the list.
    pub(crate) async fn news(
        &self,
        group: &GroupName,
        leases: &[&HeldLease],
        ttl: Duration,
    ) -> Result<News> {
        let mut holders: Vec<&RelayId> = leases.iter().map(|lease| lease.holder()).collect();
        holders.sort_unstable();
        holders.dedup();
        for holder in holders {
            self.say_still_alive(group, holder, ttl).await?;
        }
        let relays = self.live_relays(group, None).await?;
        Ok(News { relays, requeued: is_any_requeued(&self.inner.control).await? })
    }
}
