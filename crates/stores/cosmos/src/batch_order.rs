//! Events of one batch in the order in which they were saved.
//!
//! What lives here: which documents of a page are of one batch, and their order. What does not:
//! reading pages (`feed.rs`).
//! Invariant: events of different batches stay as they stand; those of one come by their numbers.

use std::collections::HashMap;

use serde_json::Value;

use crate::event_document::{seq, text};

/// Where a document has the number of its change, if the service tells it.
pub(crate) const LSN: &str = "_lsn";

/// What one document has of a batch: its moment. Documents of one batch stand beside each other.
fn moment(document: &Value) -> Option<u64> {
    document.get(LSN).or_else(|| document.get("_ts")).and_then(Value::as_u64)
}

/// Whether two neighbours may be of one batch although their moments differ: where the service
/// tells no more than the second, a batch may be written across the end of one.
fn are_close(one: &Value, other: &Value) -> bool {
    let second = |document: &Value| match document.get(LSN) {
        Some(_) => None,
        None => moment(document).filter(|_| seq(document).is_some_and(|number| number > 0)),
    };
    matches!((second(one), second(other)), (Some(one), Some(other)) if one.abs_diff(other) <= 1)
}

/// Events of one batch in the order of their numbers: they have one moment, and no order of their
/// own. Events of different batches stay as they stand, whatever their numbers: those that no
/// entity counts have numbers of their batch alone, below zero, and an entity that is made anew
/// begins anew. Documents of another key may stand between those of one batch: ranges that were
/// merged had the same moments.
///
/// Where the service tells no more than the second of a change, batches of one key and one second
/// are told apart by the sign of their numbers only, and events of one or of neighbouring seconds
/// are put in order if their numbers follow each other without a gap: one batch may have two
/// seconds. (An entity made anew within such a second, whose numbers happen to end where its last
/// ones began, is then taken for the same.)
pub(crate) fn in_order(documents: &mut [Value]) {
    let mut of_keys: HashMap<String, Vec<Standing>> = HashMap::new();
    let (mut run, mut before) = (0, None);
    for (at, document) in documents.iter().enumerate() {
        let key = text(document, "partitionKey");
        run += usize::from(key != before);
        before = key;
        if seq(document).is_some() {
            of_keys
                .entry(key.unwrap_or_default().to_owned())
                .or_default()
                .push(Standing { at, run });
        }
    }
    let chains = of_keys.values().flat_map(|places| chains(documents, places));
    for chain in chains.collect::<Vec<_>>() {
        let mut sorted: Vec<Value> =
            chain.iter().map(|at| std::mem::take(&mut documents[*at])).collect();
        sorted.sort_by_key(seq);
        for (at, document) in chain.into_iter().zip(sorted) {
            documents[at] = document;
        }
    }
}

/// Where an event stands.
#[derive(Debug, Clone, Copy)]
struct Standing {
    at: usize,
    /// Which of the stretches that are of one key each.
    run: usize,
}

/// The events of a key that are of one batch each, as far as that can be told.
fn chains(documents: &[Value], places: &[Standing]) -> Vec<Vec<usize>> {
    let document = |place: &Standing| &documents[place.at];
    let sign = |place: &Standing| seq(document(place)).is_some_and(|number| number < 0);
    let together = |a: &Standing, b: &Standing| {
        let side_by_side = a.run == b.run || document(a).get(LSN).is_some();
        side_by_side && moment(document(a)) == moment(document(b)) && sign(a) == sign(b)
    };
    let close = |a: &Standing, b: &Standing| together(a, b) || are_close(document(a), document(b));
    let numbered = |place: &Standing| (seq(document(place)).unwrap_or_default(), place.at);
    let places_of = |near: &[Standing]| near.iter().map(|place| place.at).collect::<Vec<_>>();
    let mut all = Vec::new();
    for near in places.chunk_by(close) {
        // The number of a change tells a batch exactly, whatever numbers its events have.
        if near.iter().all(|place| document(place).get(LSN).is_some()) {
            all.extend(near.chunk_by(together).map(places_of));
            continue;
        }
        let rows = rows(near.iter().map(numbered).collect());
        let whole = |group: &[Standing]| rows.iter().any(|row| has_all(row, group));
        if near.chunk_by(together).all(whole) {
            all.extend(rows);
            continue;
        }
        for near in near.chunk_by(|a, b| a.run == b.run) {
            match self::rows(near.iter().map(numbered).collect()).len() {
                1 => all.push(places_of(near)),
                _ => all.extend(near.chunk_by(together).map(places_of)),
            }
        }
    }
    all
}

fn has_all(row: &[usize], group: &[Standing]) -> bool {
    group.iter().all(|place| row.contains(&place.at))
}

/// The places of numbers that follow each other without a gap, in the order in which they stand;
/// nothing if a number comes twice.
fn rows(mut numbered: Vec<(i64, usize)>) -> Vec<Vec<usize>> {
    numbered.sort_unstable();
    if numbered.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Vec::new();
    }
    let follow = |one: &(i64, usize), next: &(i64, usize)| next.0 == one.0 + 1;
    let rows = numbered.chunk_by(follow).map(|row| {
        let mut places: Vec<usize> = row.iter().map(|(_, at)| *at).collect();
        places.sort_unstable();
        places
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(key: &str, second: u64, seq: i64) -> Value {
        json!({ "type": "domainEvent", "partitionKey": key, "_ts": second, "seq": seq })
    }

    fn order(mut documents: Vec<Value>) -> Vec<i64> {
        in_order(&mut documents);
        documents.iter().filter_map(seq).collect()
    }

    #[test]
    fn only_events_of_one_batch_are_put_in_order() {
        let entity = json!({ "type": "order", "partitionKey": "k", "_ts": 1, "lastSeq": 3 });
        let batch = vec![event("k", 1, 3), entity, event("k", 1, 1), event("k", 1, 2)];
        assert_eq!(order(batch), [1, 2, 3]);
        // Without their entity, twice: each has numbers of its own.
        let twice =
            vec![event("k", 1, -1), event("k", 1, -2), event("k", 2, -1), event("k", 2, -3)];
        assert_eq!(order(twice), [-2, -1, -3, -1]);
        // With the entity, and then without.
        assert_eq!(
            order(vec![event("k", 1, 1), event("k", 1, -1), event("k", 1, -2)]),
            [1, -2, -1]
        );
        // Deleted and made anew.
        assert_eq!(order(vec![event("k", 1, 6), event("k", 2, 1)]), [6, 1]);
        // One batch, written across the end of a second.
        assert_eq!(order(vec![event("k", 2, 7), event("k", 2, 8), event("k", 1, 6)]), [6, 7, 8]);
        assert_eq!(order(vec![event("k", 2, 8), event("k", 1, 6), event("k", 2, 7)]), [6, 7, 8]);
        assert_eq!(order(vec![event("k", 5, 8), event("k", 1, 7)]), [8, 7]);
        // Another key between them, as after a merge.
        assert_eq!(order(vec![event("k", 1, 2), event("l", 1, 9), event("k", 1, 1)]), [1, 9, 2]);
        let both = [("k", 3), ("l", 2), ("k", 1), ("l", 1), ("k", 2)];
        let both = both.map(|(key, number)| event(key, 1, number));
        assert_eq!(order(both.to_vec()), [1, 1, 2, 2, 3]);
        // Made anew, with another key between: in the order in which they stand.
        let anew = [("k", 5), ("k", 6), ("l", 9), ("k", 2), ("k", 1)];
        let anew = anew.map(|(key, number)| event(key, 1, number));
        assert_eq!(order(anew.to_vec()), [5, 6, 9, 1, 2]);
        let anew = [("k", 2), ("k", 1), ("l", 9), ("k", 3), ("k", 2), ("k", 1)];
        let anew = anew.map(|(key, number)| event(key, 1, number));
        assert_eq!(order(anew.to_vec()), [1, 2, 9, 1, 2, 3]);
        // Without an entity, batches are told apart by what stands between.
        let alone = [("k", -1), ("k", -2), ("l", 9), ("k", -1)];
        let alone = alone.map(|(key, number)| event(key, 1, number));
        assert_eq!(order(alone.to_vec()), [-2, -1, 9, -1]);
    }

    #[test]
    fn the_number_of_a_change_tells_batches_apart() {
        let mut documents = vec![event("k", 1, -1), event("k", 1, -2), event("k", 1, -1)];
        for (document, change) in documents.iter_mut().zip([7, 7, 8]) {
            document[LSN] = json!(change);
        }
        assert_eq!(order(documents), [-2, -1, -1]);
        // A batch, and one of another key between, that had the same number before a merge.
        let both = [("k", -1), ("l", -1), ("k", -2), ("l", -2)];
        let mut both = both.map(|(key, number)| event(key, 1, number)).to_vec();
        both.iter_mut().for_each(|document| document[LSN] = json!(7));
        assert_eq!(order(both), [-2, -2, -1, -1]);
        // The same, with a number that is missing.
        let both = [("k", 5), ("l", 9), ("k", 3)];
        let mut both = both.map(|(key, number)| event(key, 1, number)).to_vec();
        both.iter_mut().for_each(|document| document[LSN] = json!(7));
        assert_eq!(order(both), [3, 9, 5]);
    }
}
