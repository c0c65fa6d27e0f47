//! Dead letters, each with its whole event, so that its time to live may delete the original.
//!
//! What lives here: the seam over letter documents. What does not: what they say (`letters.rs`),
//! the decision to park.
//! Invariant: within a key letters leave in the order of their numbers.

use std::collections::HashSet;

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, DeadLetter, DeadLetterFilter, DeadLetterId, DeadLetterState,
    DeadLetters, Error, HeldLease, Key, NewDeadLetter, PartitionId, Position, Result, Successor,
};
use serde_json::{Value, json};

use crate::CosmosStore;
use crate::checkpoints::{Change, encode};
use crate::control::{Kept, MAX_BATCH_BYTES, Write, Written};
use crate::letters::{LETTER, Letter, changed, letter, park, state_text};
use crate::position::Place;

/// Letters that are read at once where all that match are wanted.
const PAGE: usize = 100;
/// Letters that one batch writes at most: with the lease, the numbers and the checkpoint it stays
/// within the service's limit of operations.
const AT_ONCE: usize = 90;
/// How often a person's change that met another's is tried again.
const TRIES: u32 = 20;

/// What of a consumer and partition a query asks for.
const OF: &str = "AND c.consumer = @consumer AND c.partition = @partition";
const BLOCKS: &str = "AND c.state IN ('parked', 'waiting', 'requeued')";

fn of<'a>(consumer: &ConsumerName, partition: &PartitionId) -> Vec<(&'a str, Value)> {
    vec![("@consumer", json!(consumer.as_str())), ("@partition", json!(partition.as_str()))]
}

impl CosmosStore {
    /// How many letters a consumer has in a partition.
    pub(crate) async fn letters_of(&self, consumer: &str, partition: &str) -> Result<u64> {
        let values = [("@consumer", json!(consumer)), ("@partition", json!(partition))];
        self.inner.control.count(LETTER, OF, &values).await
    }

    async fn matching(
        &self,
        filter: &DeadLetterFilter,
        after: u64,
        most: usize,
    ) -> Result<Vec<Kept<Letter>>> {
        let mut clause = String::from("AND c.number > @after");
        let mut values = vec![("@after", json!(after))];
        if !filter.ids.is_empty() {
            let numbers: Vec<u64> = filter.ids.iter().map(|id| id.get()).collect();
            clause.push_str(" AND ARRAY_CONTAINS(@numbers, c.number)");
            values.push(("@numbers", json!(numbers)));
        }
        let mut also = |text: &str, name: &'static str, value: Option<&str>| {
            if let Some(value) = value {
                clause.push_str(text);
                values.push((name, json!(value)));
            }
        };
        let consumer = filter.consumer.as_ref().map(ConsumerName::as_str);
        also(" AND c.consumer = @consumer", "@consumer", consumer);
        also(" AND c.key = @key", "@key", filter.key.as_ref().map(Key::as_str));
        also(" AND c.state = @state", "@state", filter.state.map(state_text));
        clause.push_str(" ORDER BY c.number");
        self.inner.control.query(LETTER, &clause, &values, most).await
    }

    /// Changes every letter that matches, one after the other: `change` gives what it becomes, or
    /// nothing to leave it. A letter that changes meanwhile is looked at again.
    async fn change_all(
        &self,
        filter: &DeadLetterFilter,
        change: impl Fn(&Letter) -> Option<Letter>,
    ) -> Result<u64> {
        let control = &self.inner.control;
        let (mut count, mut after) = (0, 0);
        loop {
            let page = self.matching(filter, after, PAGE).await?;
            let Some(last) = page.last() else { return Ok(count) };
            after = last.body.number;
            for found in page {
                let mut current = Some(found);
                for _ in 0..TRIES {
                    let Some(found) = current else { break };
                    let Some(next) = change(&found.body) else { break };
                    let write = [changed(control, &found, next)?];
                    if let Written::All(_) = control.write(&write).await? {
                        count += 1;
                        break;
                    }
                    current = control.read::<Letter>(&found.body.id()?).await?;
                }
            }
        }
    }

    /// Deletes every letter that matches, and counts it as dropped by its consumer.
    async fn discard_all(&self, filter: &DeadLetterFilter, count_dropped: bool) -> Result<u64> {
        let control = &self.inner.control;
        let (mut count, mut after) = (0, 0);
        loop {
            let page = self.matching(filter, after, PAGE).await?;
            let Some(last) = page.last() else { return Ok(count) };
            after = last.body.number;
            for found in page {
                let mut current = Some(found);
                for _ in 0..TRIES {
                    let Some(found) = current else { break };
                    let mut writes = vec![Write::Delete(found.body.id()?, found.etag.clone())];
                    if count_dropped {
                        let (consumer, partition) = (&found.body.consumer, &found.body.partition);
                        let mut change = Change::read(control, consumer, partition).await?;
                        change.standing.dropped += 1;
                        writes.push(change.write(control)?);
                    }
                    if let Written::All(_) = control.write(&writes).await? {
                        count += 1;
                        break;
                    }
                    current = control.read::<Letter>(&found.body.id()?).await?;
                }
            }
        }
    }

    /// Deletes all letters of a consumer that is forgotten.
    pub(crate) async fn discard_letters(&self, consumer: &ConsumerName) -> Result<u64> {
        let all = DeadLetterFilter { consumer: Some(consumer.clone()), ..Default::default() };
        self.discard_all(&all, false).await
    }

    /// Letters of a finished partition go to the successor that has their key now: nobody leases
    /// the old partition any more, and the key's later events must find them. One without a
    /// readable key goes to the first.
    pub(crate) async fn hand_letters_on(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        successors: &[Successor],
    ) -> Result<()> {
        let Some(first) = successors.first() else { return Ok(()) };
        loop {
            let values = of(consumer, lease.partition());
            let control = &self.inner.control;
            let page = control.query::<Letter>(LETTER, OF, &values, AT_ONCE).await?;
            let mut moves = Vec::new();
            for kept in page {
                let heir = match kept.body.key.as_deref() {
                    None => &first.partition,
                    Some(key) => self.heir(key, successors).await?.unwrap_or(&first.partition),
                };
                let partition = heir.as_str().to_owned();
                let next = Letter { partition, ..kept.body.clone() };
                moves.push(changed(control, &kept, next)?);
            }
            if moves.is_empty() {
                return Ok(());
            }
            for together in chunks(moves) {
                // What changed meanwhile is read again by the next look.
                self.under(lease).write(together).await?;
            }
        }
    }
}

/// Cuts writes so that each batch is within the service's limits.
fn chunks(writes: Vec<Write>) -> Vec<Vec<Write>> {
    let mut all: Vec<Vec<Write>> = Vec::new();
    let mut bytes = 0;
    for write in writes {
        let size = match &write {
            Write::Create(document) | Write::Replace(document, _) => document.to_string().len(),
            Write::Delete(..) => 0,
        };
        match all.last_mut() {
            Some(last) if last.len() < AT_ONCE && bytes + size <= MAX_BATCH_BYTES => {
                last.push(write);
                bytes += size;
            }
            _ => {
                all.push(vec![write]);
                bytes = size;
            }
        }
    }
    all
}

/// The first so many letters whose documents fit into one batch.
fn first_that_fit(consumer: &ConsumerName, letters: &[NewDeadLetter]) -> usize {
    let mut bytes = 0usize;
    let fits = letters.iter().take(AT_ONCE).take_while(|letter| {
        bytes = bytes.saturating_add(Letter::size(consumer.as_str(), letter));
        bytes <= MAX_BATCH_BYTES
    });
    fits.count().max(1)
}

#[async_trait]
impl DeadLetters for CosmosStore {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        let (mut added, mut rest) = (0, letters);
        while !rest.is_empty() {
            let (now, later) = rest.split_at(first_that_fit(consumer, rest));
            let mut under = self.under(lease);
            added += loop {
                let (writes, new) = park(&self.inner.control, lease, consumer, now).await?;
                if under.write(writes).await? {
                    break new;
                }
            };
            rest = later;
        }
        Ok(added)
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        if self.blocking(consumer, partition).await? == 0 {
            return Ok(Vec::new());
        }
        let mut blocked = HashSet::new();
        for some in keys.chunks(PAGE) {
            let texts: Vec<&str> = some.iter().map(Key::as_str).collect();
            let mut values = of(consumer, partition);
            values.push(("@keys", json!(texts)));
            let clause = format!("{OF} {BLOCKS} AND ARRAY_CONTAINS(@keys, c.key)");
            let control = &self.inner.control;
            blocked.extend(control.texts(LETTER, "c.key", &clause, &values, some.len()).await?);
        }
        Ok(keys.iter().filter(|key| blocked.contains(key.as_str())).cloned().collect())
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        let clause = format!("{OF} {BLOCKS}");
        self.inner.control.count(LETTER, &clause, &of(consumer, partition)).await
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let control = &self.inner.control;
        let standing = Change::read(control, consumer.as_str(), partition.as_str()).await?;
        let Some(position) = standing.standing.position()? else { return Ok(Vec::new()) };
        let passed = Place::read(&position)?.ordinal();
        let (mut page, mut bytes, mut after) = (Vec::new(), 0usize, 0u64);
        let mut held: HashSet<String> = HashSet::new();
        loop {
            let mut values = of(consumer, partition);
            values.push(("@after", json!(after)));
            let clause = format!("{OF} {BLOCKS} AND c.number > @after ORDER BY c.number");
            let found = control.query::<Letter>(LETTER, &clause, &values, PAGE).await?;
            let Some(last) = found.last() else { return Ok(page) };
            after = last.body.number;
            for kept in found {
                let body = &kept.body;
                if body.is_malformed() || body.state == state_text(DeadLetterState::Parked) {
                    if body.state == state_text(DeadLetterState::Parked) {
                        held.extend(body.key.clone());
                    }
                    continue;
                }
                let waits = body.key.as_ref().is_some_and(|key| held.contains(key));
                if waits || body.ordinal()? > passed {
                    continue;
                }
                let letter = letter(&kept)?;
                bytes = bytes.saturating_add(letter.entry.cost_bytes());
                if page.len() >= limit.records || (!page.is_empty() && bytes > limit.bytes) {
                    return Ok(page);
                }
                page.push(letter);
            }
        }
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        let (control, partition) = (&self.inner.control, lease.partition());
        for some in ids.chunks(AT_ONCE) {
            let numbers: Vec<u64> = some.iter().map(|id| id.get()).collect();
            let mut under = self.under(lease);
            loop {
                let mut values = of(consumer, partition);
                values.push(("@numbers", json!(numbers)));
                let clause = format!("{OF} AND ARRAY_CONTAINS(@numbers, c.number)");
                let found = control.query::<Letter>(LETTER, &clause, &values, usize::MAX).await?;
                let name = consumer.as_str();
                let mut change = Change::read(control, name, partition.as_str()).await?;
                change.standing.published += found.len() as u64;
                let mut writes = Vec::new();
                for kept in &found {
                    writes.push(Write::Delete(kept.body.id()?, kept.etag.clone()));
                }
                if !found.is_empty() {
                    writes.push(change.write(control)?);
                }
                if under.write(writes).await? {
                    break;
                }
            }
        }
        Ok(())
    }

    async fn refuse(
        &self,
        lease: &HeldLease,
        id: DeadLetterId,
        state: DeadLetterState,
        reason: &str,
        attempts: u32,
    ) -> Result<()> {
        if !matches!(state, DeadLetterState::Parked | DeadLetterState::Skipped) {
            return Err(Error::permanent("a refused dead letter is parked again or skipped"));
        }
        let control = &self.inner.control;
        let mut under = self.under(lease);
        loop {
            let values =
                [("@number", json!(id.get())), ("@partition", json!(lease.partition().as_str()))];
            let clause = "AND c.number = @number AND c.partition = @partition";
            let found = control.query::<Letter>(LETTER, clause, &values, 1).await?;
            let mut writes = Vec::new();
            for kept in &found {
                let mut next = kept.body.clone();
                // A person who gave it up meanwhile has the last word.
                if next.state != state_text(DeadLetterState::Skipped) {
                    state_text(state).clone_into(&mut next.state);
                }
                reason.clone_into(&mut next.reason);
                next.attempts = next.attempts.saturating_add(attempts);
                writes.push(changed(control, kept, next)?);
            }
            if under.write(writes).await? {
                return Ok(());
            }
        }
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        let after = after.map_or(0, DeadLetterId::get);
        let found = self.matching(filter, after, limit).await?;
        found.iter().map(letter).collect()
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.change_all(filter, |letter| {
            let may = ["parked", "skipped"].contains(&letter.state.as_str());
            may.then(|| Letter { state: "requeued".to_owned(), ..letter.clone() })
        })
        .await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.change_all(filter, |letter| {
            let may = ["parked", "requeued"].contains(&letter.state.as_str());
            may.then(|| Letter { state: "skipped".to_owned(), ..letter.clone() })
        })
        .await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        self.discard_all(filter, true).await
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        let mut values = of(consumer, partition);
        values.push(("@position", json!(encode(position))));
        let clause = format!("{OF} AND c.position = @position");
        let found = self.inner.control.query::<Letter>(LETTER, &clause, &values, 1).await?;
        found.first().map(letter).transpose()
    }
}
