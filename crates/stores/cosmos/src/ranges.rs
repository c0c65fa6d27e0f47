//! Partitions: ranges of hash values, and who takes over when the service splits one.
//!
//! What lives here: their names, the ranges that all consumers begin with, and successors. What
//! does not: reading a range (`feed.rs`).
//! Invariant: the ranges to begin with are written down once, before anybody reads; from there on a
//! consumer comes to a smaller range only by finishing the one that held it, so that no two
//! partitions of one consumer ever overlap.

use azure_data_cosmos::feed::FeedRange;
use azure_data_cosmos::options::ReadFeedRangesOptions;
use postrider_core::{ConsumerName, Error, PartitionId, Position, Result, Successor};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::CosmosStore;
use crate::checkpoints::standings;
use crate::control::{Write, Written, id};
use crate::error::failed;

const RANGES: &str = "ranges";
/// How the lowest value is shown, which is an empty text.
const LOWEST: &str = "00";
/// Between the two ends of a range.
const TO: char = '-';

/// The ranges that consumers begin with.
#[derive(Debug, Serialize, Deserialize)]
struct Beginning {
    ranges: Vec<String>,
}

/// A range's name: its two ends, in hexadecimal.
pub(crate) fn name(range: &FeedRange) -> Result<PartitionId> {
    let lowest = range.min_inclusive().to_hex();
    let from = if lowest.is_empty() { LOWEST } else { &lowest };
    PartitionId::new(format!("{from}{TO}{}", range.max_exclusive().to_hex()))
}

/// The range of a name.
///
/// # Errors
/// `Permanent` for a name that is none of a range.
pub(crate) fn parse(partition: &PartitionId) -> Result<FeedRange> {
    let unknown = || {
        Error::permanent(format!(
            "partition {partition} is no range of an Azure Cosmos DB container"
        ))
    };
    let (from, to) = partition.as_str().split_once(TO).ok_or_else(unknown)?;
    if to.is_empty() || [from, to].iter().any(|end| !end.bytes().all(|b| b.is_ascii_hexdigit())) {
        return Err(unknown());
    }
    let from = if from == LOWEST { "" } else { from };
    let ends = json!({
        "Range": { "min": from, "max": to, "isMinInclusive": true, "isMaxInclusive": false }
    });
    serde_json::from_value(ends).map_err(|error| unknown().with_source(error))
}

/// The part of `whole` that lies in `part`, where they overlap.
fn within(whole: &FeedRange, part: &FeedRange) -> Result<Option<FeedRange>> {
    if !whole.overlaps(part) {
        return Ok(None);
    }
    let from = whole.min_inclusive().max(part.min_inclusive()).clone();
    let to = whole.max_exclusive().min(part.max_exclusive()).clone();
    let place = "cut a range";
    FeedRange::new(from, to).map(Some).map_err(failed(place))
}

impl CosmosStore {
    /// The container's ranges, as this process knows them; `refresh` asks the service.
    pub(crate) async fn ranges(&self, refresh: bool) -> Result<Vec<FeedRange>> {
        let options = ReadFeedRangesOptions::default().with_force_refresh(refresh);
        let ranges = self.container().read_feed_ranges(Some(options)).await;
        ranges.map_err(failed("read the container's ranges"))
    }

    /// Who takes over from a range that the service has split, and where they begin: at the very
    /// place at which it ends. None while it is whole.
    pub(crate) async fn successors(
        &self,
        range: &FeedRange,
        at: &Position,
    ) -> Result<Option<Vec<Successor>>> {
        let mut parts = Vec::new();
        for other in self.ranges(false).await? {
            parts.extend(within(range, &other)?);
        }
        if parts.len() < 2 {
            return Ok(None);
        }
        let successors = parts
            .iter()
            .map(|part| Ok(Successor { partition: name(part)?, from: at.clone() }))
            .collect::<Result<_>>()?;
        Ok(Some(successors))
    }

    /// The partitions that a consumer has to read now.
    pub(crate) async fn partitions_of(&self, consumer: &ConsumerName) -> Result<Vec<PartitionId>> {
        let mut partitions = self.beginning().await?;
        for found in standings(&self.inner.control, Some(consumer)).await? {
            let partition = PartitionId::new(found.body.partition.as_str())?;
            partitions.retain(|known| *known != partition);
            if !found.body.ended {
                partitions.push(partition);
            }
        }
        partitions.sort_unstable();
        Ok(partitions)
    }

    /// The ranges that consumers begin with, written down by whoever asks first.
    async fn beginning(&self) -> Result<Vec<PartitionId>> {
        let control = &self.inner.control;
        let id = id(RANGES, &[self.inner.container_rid.as_bytes()]);
        loop {
            if let Some(found) = control.read::<Beginning>(&id).await? {
                return found.body.ranges.into_iter().map(PartitionId::new).collect();
            }
            let now = self.ranges(true).await?;
            let names = now.iter().map(name).collect::<Result<Vec<_>>>()?;
            let ranges = names.iter().map(|name| name.as_str().to_owned()).collect();
            let document = control.document(RANGES, &id, &Beginning { ranges })?;
            match control.write(&[Write::Create(document)]).await? {
                Written::All(_) => return Ok(names),
                // Somebody else was first: theirs are the ones.
                Written::Stale => {}
            }
        }
    }

    /// Which successor has a key now.
    pub(crate) async fn heir<'a>(
        &self,
        key: &str,
        successors: &'a [Successor],
    ) -> Result<Option<&'a PartitionId>> {
        let place = "look up a key's range";
        let container = &self.container();
        let points = container.feed_range_from_partition_key(key.to_owned(), None).await;
        let points = points.map_err(failed(place))?;
        let Some(point) = points.first() else { return Ok(None) };
        for successor in successors {
            let range = parse(&successor.partition)?;
            let (at, from, to) =
                (point.min_inclusive(), range.min_inclusive(), range.max_exclusive());
            if from <= at && at < to {
                return Ok(Some(&successor.partition));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> PartitionId {
        PartitionId::new(text).expect("a valid name")
    }

    #[test]
    fn names_read_back() {
        for text in ["00-FF", "00-1FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF", "3F-80"] {
            assert_eq!(name(&parse(&id(text)).expect("a range")).expect("a name"), id(text));
        }
        for text in ["0/1", "00", "-", "00-", "zz-FF", "FF-00", "0-1"] {
            assert!(parse(&id(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn a_range_is_cut_by_what_overlaps_it() {
        let whole = parse(&id("20-60")).expect("a range");
        for (other, cut) in
            [("00-40", Some("20-40")), ("40-FF", Some("40-60")), ("60-FF", None), ("00-20", None)]
        {
            let found = within(&whole, &parse(&id(other)).expect("a range")).expect("ordered");
            assert_eq!(found.map(|found| name(&found).expect("a name")), cut.map(id), "{other}");
        }
    }
}
