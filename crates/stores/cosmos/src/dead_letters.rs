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
use crate::letter_parts::{self, removal, whole};
use crate::letters::{HEAD, Head, LETTER, Letter, changed, letter, park, state_text};
use crate::position::Place;

/// Heads of letters, and keys, that are asked for at once.
const PAGE: usize = 100;
/// Whole letters that are read at once.
const WHOLE: usize = 16;
/// Letters that one batch writes at most: with the lease, the numbers and the checkpoint it stays
/// within the service's limit of operations.
const AT_ONCE: usize = 90;
/// Letters that one batch removes at most, each with its parts: three hold what a container may.
const RESOLVED: usize = 22;
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
            let page = self.matching(filter, after, WHOLE).await?;
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
                    current = control.read::<Letter>(&found.body.id).await?;
                }
            }
        }
    }

    /// Deletes every letter that matches, and counts it as dropped by its consumer.
    async fn discard_all(&self, filter: &DeadLetterFilter, count_dropped: bool) -> Result<u64> {
        let control = &self.inner.control;
        let (mut count, mut after) = (0, 0);
        loop {
            let page = self.matching(filter, after, WHOLE).await?;
            let Some(last) = page.last() else { return Ok(count) };
            after = last.body.number;
            for found in page {
                let mut current = Some(found);
                for _ in 0..TRIES {
                    let Some(found) = current else { break };
                    let letter = &found.body;
                    let mut writes = removal(control, &letter.id, letter.parts).await?;
                    writes.push(Write::Delete(letter.id.clone(), found.etag.clone()));
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
                    current = control.read::<Letter>(&found.body.id).await?;
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
        let control = &self.inner.control;
        let values = of(consumer, lease.partition());
        loop {
            let clause = format!("{OF} ORDER BY c.number");
            let heads = control.heads::<Head>(LETTER, HEAD, &clause, &values, AT_ONCE).await?;
            if heads.is_empty() {
                return Ok(());
            }
            for some in heads.chunks(WHOLE) {
                let mut moves = Vec::new();
                for kept in self.letters(some).await? {
                    let heir = match kept.body.key.as_deref() {
                        None => &first.partition,
                        Some(key) => self.heir(key, successors).await?.unwrap_or(&first.partition),
                    };
                    let partition = heir.as_str().to_owned();
                    let next = Letter { partition, ..kept.body.clone() };
                    moves.push(changed(control, &kept, next)?);
                }
                for together in chunks(moves) {
                    // What changed meanwhile is read again by the next look.
                    self.under(lease).write(together).await?;
                }
            }
        }
    }

    /// The letters of these heads that are there still, without what stands beside them.
    async fn letters(&self, heads: &[Kept<Head>]) -> Result<Vec<Kept<Letter>>> {
        let numbers: Vec<u64> = heads.iter().map(|head| head.body.number).collect();
        let values = [("@numbers", json!(numbers))];
        let clause = "AND ARRAY_CONTAINS(@numbers, c.number) ORDER BY c.number";
        self.inner.control.query::<Letter>(LETTER, clause, &values, usize::MAX).await
    }
}

/// Cuts writes so that each batch is within the service's limits.
fn chunks(writes: Vec<Write>) -> Vec<Vec<Write>> {
    let mut all: Vec<Vec<Write>> = Vec::new();
    let mut bytes = 0;
    for write in writes {
        let size = match &write {
            Write::Create(document) | Write::Replace(document, _) => document.to_string().len(),
            Write::Delete(..) | Write::Drop(_) => 0,
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
        let made = Letter::made(consumer.as_str(), "", letter);
        bytes = bytes.saturating_add(made.letter.size());
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
            for new in now {
                let made = Letter::made(consumer.as_str(), "", new);
                if let Some(content) = made.beside {
                    let (control, letter) = (&self.inner.control, &made.letter.id);
                    letter_parts::write(control, &mut self.under(lease), letter, &content).await?;
                }
            }
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
        let (mut chosen, mut bytes, mut after) = (Vec::new(), 0usize, 0u64);
        let mut held: HashSet<String> = HashSet::new();
        'looking: loop {
            let mut values = of(consumer, partition);
            values.push(("@after", json!(after)));
            let clause = format!("{OF} {BLOCKS} AND c.number > @after ORDER BY c.number");
            let found = control.heads::<Head>(LETTER, HEAD, &clause, &values, PAGE).await?;
            let Some(last) = found.last() else { break };
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
                bytes = bytes.saturating_add(body.bytes);
                if chosen.len() >= limit.records || (!chosen.is_empty() && bytes > limit.bytes) {
                    break 'looking;
                }
                chosen.push(kept);
            }
        }
        let mut page = Vec::new();
        for some in chosen.chunks(WHOLE) {
            for found in self.letters(some).await? {
                // A person may have changed it just now.
                if some.iter().any(|head| head.body.state == found.body.state) {
                    page.push(letter(&whole(control, found).await?)?);
                }
            }
        }
        Ok(page)
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        let (control, partition) = (&self.inner.control, lease.partition());
        for some in ids.chunks(RESOLVED) {
            let numbers: Vec<u64> = some.iter().map(|id| id.get()).collect();
            let mut under = self.under(lease);
            loop {
                let mut values = of(consumer, partition);
                values.push(("@numbers", json!(numbers)));
                let clause = format!("{OF} AND ARRAY_CONTAINS(@numbers, c.number)");
                let found =
                    control.heads::<Head>(LETTER, HEAD, &clause, &values, usize::MAX).await?;
                let name = consumer.as_str();
                let mut change = Change::read(control, name, partition.as_str()).await?;
                change.standing.published += found.len() as u64;
                let mut writes = Vec::new();
                for kept in &found {
                    writes.extend(removal(control, &kept.body.id, kept.body.parts).await?);
                    writes.push(Write::Delete(kept.body.id.clone(), kept.etag.clone()));
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
        let mut all = Vec::new();
        for found in self.matching(filter, after, limit).await? {
            all.push(letter(&whole(&self.inner.control, found).await?)?);
        }
        Ok(all)
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
        let control = &self.inner.control;
        let mut found = control.query::<Letter>(LETTER, &clause, &values, 1).await?;
        match found.pop() {
            Some(found) => letter(&whole(control, found).await?).map(Some),
            None => Ok(None),
        }
    }
}
