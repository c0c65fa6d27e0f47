//! Dead letters, each with its whole event, so that retention may forget the original.
//!
//! What lives here: the seam over `[dead_letter]`. What does not: what a letter looks like in a row
//! and in a request (`letters.rs`), the decision to park.
//! Invariant: numbers only grow, and within a key letters leave in the order of their numbers.

use async_trait::async_trait;
use postrider_core::{
    BatchLimit, ConsumerName, DeadLetter, DeadLetterFilter, DeadLetterId, DeadLetterState,
    DeadLetters, Error, HeldLease, Key, NewDeadLetter, PartitionId, Position, Result, key_hash,
};
use serde::Serialize;
use tiberius::Row;

use crate::SqlServerStore;
use crate::connections::Param;
use crate::leases::{Fence, short_answer};
use crate::letters::{Letters, page, read_letters, state_text};
use crate::names::exact;
use crate::row::{number, whole};
use crate::sql;

/// A key as `dead_letter_blocked.sql` reads it.
#[derive(Serialize)]
struct KeyRow<'a> {
    n: usize,
    h: u32,
    k: &'a str,
}

/// A letter's number in a list.
#[derive(Serialize)]
struct IdRow {
    i: i64,
}

fn ids_text(ids: &[DeadLetterId]) -> String {
    let rows: Vec<IdRow> = ids.iter().map(|id| IdRow { i: whole(id.get()) }).collect();
    serde_json::to_string(&rows).expect("numbers always serialise")
}

/// What a filter asks for, as the texts' first five parameters: empty for any, for the driver sends
/// a null text as one of no type, which not every engine takes.
struct Wanted<'a> {
    ids: String,
    consumer: &'a str,
    hash: Option<i64>,
    key: &'a str,
    state: &'static str,
}

impl<'a> Wanted<'a> {
    fn of(filter: &'a DeadLetterFilter) -> Self {
        Self {
            ids: ids_text(&filter.ids),
            consumer: filter.consumer.as_ref().map_or("", ConsumerName::as_str),
            hash: filter.key.as_ref().map(|key| i64::from(key_hash(key))),
            key: filter.key.as_ref().map_or("", Key::as_str),
            state: filter.state.map_or("", state_text),
        }
    }
}

/// The one number that a statement answers with.
fn answer(place: &str, sets: &[Vec<Row>], what: &'static str) -> Result<u64> {
    let row = sets.last().and_then(|set| set.first()).ok_or_else(|| short_answer(place))?;
    Ok(number(row, 0, what)?.unsigned_abs())
}

impl SqlServerStore {
    async fn transit(
        &self,
        filter: &DeadLetterFilter,
        from: [DeadLetterState; 2],
        to: DeadLetterState,
    ) -> Result<u64> {
        let place = "change the dead letters' state";
        let wanted = Wanted::of(filter);
        let [first, second] = from.map(state_text);
        let to = state_text(to);
        let params: [Param<'_>; 8] = [
            &wanted.ids,
            &wanted.consumer,
            &wanted.hash,
            &wanted.key,
            &wanted.state,
            &first,
            &second,
            &to,
        ];
        let sets = self.run(place, sql::DEAD_LETTER_TRANSIT, &params).await?;
        answer(place, &sets, "changed")
    }
}

#[async_trait]
impl DeadLetters for SqlServerStore {
    async fn park(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        letters: &[NewDeadLetter],
    ) -> Result<u64> {
        exact("consumer", consumer.as_str())?;
        let place = "park dead letters";
        let Fence { group, partition, holder, epoch } = Fence::of(lease);
        let mut added = 0;
        // All in one statement where they fit, as they always do after one batch.
        for part in Letters::parts(letters)? {
            let params: [Param<'_>; 8] = [
                &group,
                &partition,
                &holder,
                &epoch,
                &consumer.as_str(),
                &part.json,
                &part.payloads,
                &part.positions,
            ];
            let sets = self.run(place, sql::DEAD_LETTER_PARK, &params).await?;
            added += answer(place, &sets, "added")?;
        }
        Ok(added)
    }

    async fn blocked(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        keys: &[Key],
    ) -> Result<Vec<Key>> {
        let place = "look up the blocked keys";
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let rows = keys.iter().enumerate();
        let rows = rows.map(|(n, key)| KeyRow { n, h: key_hash(key), k: key.as_str() });
        let rows = serde_json::to_string(&rows.collect::<Vec<_>>()).expect("texts serialise");
        let params: [Param<'_>; 3] = [&consumer.as_str(), &partition.as_str(), &rows];
        let sets = self.run(place, sql::DEAD_LETTER_BLOCKED, &params).await?;
        let mut found = Vec::new();
        for row in sets.first().map_or(&[][..], Vec::as_slice) {
            let n = usize::try_from(number(row, 0, "n")?).ok();
            found.push(n.filter(|n| *n < keys.len()).ok_or_else(|| short_answer(place))?);
        }
        found.sort_unstable();
        Ok(found.into_iter().map(|n| keys[n].clone()).collect())
    }

    async fn blocking(&self, consumer: &ConsumerName, partition: &PartitionId) -> Result<u64> {
        let place = "count the blocking dead letters";
        let params: [Param<'_>; 2] = [&consumer.as_str(), &partition.as_str()];
        let sets = self.run(place, sql::DEAD_LETTER_BLOCKING, &params).await?;
        answer(place, &sets, "letters")
    }

    async fn released(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        limit: BatchLimit,
    ) -> Result<Vec<DeadLetter>> {
        let most = i64::try_from(limit.records.max(1)).unwrap_or(i64::MAX);
        let bytes = i64::try_from(limit.bytes).unwrap_or(i64::MAX);
        let params: [Param<'_>; 4] = [&consumer.as_str(), &partition.as_str(), &most, &bytes];
        let place = "read the released dead letters";
        let sets = self.run(place, sql::DEAD_LETTER_RELEASED, &params).await?;
        Ok(page(read_letters(&sets)?, limit))
    }

    async fn resolve(
        &self,
        lease: &HeldLease,
        consumer: &ConsumerName,
        ids: &[DeadLetterId],
    ) -> Result<()> {
        let Fence { group, partition, holder, epoch } = Fence::of(lease);
        let ids = ids_text(ids);
        let params: [Param<'_>; 6] =
            [&group, &partition, &holder, &epoch, &consumer.as_str(), &ids];
        self.run("resolve the dead letters", sql::DEAD_LETTER_RESOLVE, &params).await.map(drop)
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
        let Fence { group, partition, holder, epoch } = Fence::of(lease);
        let (id, state, attempts) = (whole(id.get()), state_text(state), i64::from(attempts));
        let params: [Param<'_>; 8] =
            [&group, &partition, &holder, &epoch, &id, &state, &reason, &attempts];
        self.run("park the dead letter again", sql::DEAD_LETTER_REFUSE, &params).await.map(drop)
    }

    async fn list(
        &self,
        filter: &DeadLetterFilter,
        after: Option<DeadLetterId>,
        limit: usize,
    ) -> Result<Vec<DeadLetter>> {
        let wanted = Wanted::of(filter);
        let after = after.map_or(0, |id| whole(id.get()));
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let params: [Param<'_>; 7] = [
            &wanted.ids,
            &wanted.consumer,
            &wanted.hash,
            &wanted.key,
            &wanted.state,
            &after,
            &limit,
        ];
        read_letters(&self.run("list the dead letters", sql::DEAD_LETTER_LIST, &params).await?)
    }

    async fn requeue(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Skipped];
        self.transit(filter, from, DeadLetterState::Requeued).await
    }

    async fn skip(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let from = [DeadLetterState::Parked, DeadLetterState::Requeued];
        self.transit(filter, from, DeadLetterState::Skipped).await
    }

    async fn discard(&self, filter: &DeadLetterFilter) -> Result<u64> {
        let place = "drop the dead letters";
        let wanted = Wanted::of(filter);
        let params: [Param<'_>; 5] =
            [&wanted.ids, &wanted.consumer, &wanted.hash, &wanted.key, &wanted.state];
        let sets = self.run(place, sql::DEAD_LETTER_DISCARD, &params).await?;
        answer(place, &sets, "dropped")
    }

    async fn at(
        &self,
        consumer: &ConsumerName,
        partition: &PartitionId,
        position: &Position,
    ) -> Result<Option<DeadLetter>> {
        position.to_ulid()?;
        let params: [Param<'_>; 3] =
            [&consumer.as_str(), &partition.as_str(), &position.as_bytes()];
        let sets = self.run("look up a dead letter", sql::DEAD_LETTER_AT, &params).await?;
        Ok(read_letters(&sets)?.pop())
    }
}
