//! Events of one batch in the order in which they were saved.
//!
//! What lives here: which documents of a page are of one batch, and their order. What does not:
//! reading pages (`feed.rs`).
//! Invariant: events of different batches stay as they stand; those of one come by their numbers.

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
/// begins anew. Where the service tells no more than the second of a change, batches of one key
/// and one second are told apart by the sign of their numbers only, and events of neighbouring
/// seconds are put in order if their numbers follow each other without a gap: one batch may have
/// two seconds. (An entity made anew within such a second, whose numbers happen to end where its
/// last ones began, is then taken for the same.)
pub(crate) fn in_order(documents: &mut [Value]) {
    let mut from = 0;
    while from < documents.len() {
        let key = text(&documents[from], "partitionKey").map(str::to_owned);
        let of_key = |document: &&Value| text(document, "partitionKey") == key.as_deref();
        let to = from + documents[from..].iter().take_while(of_key).count();
        let places: Vec<usize> = (from..to).filter(|at| seq(&documents[*at]).is_some()).collect();
        for chain in chains(documents, &places) {
            let mut sorted: Vec<Value> =
                chain.iter().map(|at| std::mem::take(&mut documents[*at])).collect();
            sorted.sort_by_key(seq);
            for (at, document) in chain.into_iter().zip(sorted) {
                documents[at] = document;
            }
        }
        from = to;
    }
}

/// The events of a key that are of one batch each, as far as that can be told.
fn chains(documents: &[Value], places: &[usize]) -> Vec<Vec<usize>> {
    let sign = |at: &usize| seq(&documents[*at]).is_some_and(|number| number < 0);
    let together = |a: &usize, b: &usize| {
        moment(&documents[*a]) == moment(&documents[*b]) && sign(a) == sign(b)
    };
    let close = |a: &usize, b: &usize| together(a, b) || are_close(&documents[*a], &documents[*b]);
    let mut all = Vec::new();
    for near in places.chunk_by(close) {
        let mut numbers: Vec<i64> = near.iter().filter_map(|at| seq(&documents[*at])).collect();
        numbers.sort_unstable();
        match numbers.windows(2).all(|pair| pair[1] == pair[0] + 1) {
            true => all.push(near.to_vec()),
            false => all.extend(near.chunk_by(together).map(<[usize]>::to_vec)),
        }
    }
    all
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
        // Another key between them.
        assert_eq!(order(vec![event("k", 1, 2), event("l", 1, 9), event("k", 1, 1)]), [2, 9, 1]);
    }

    #[test]
    fn the_number_of_a_change_tells_batches_apart() {
        let mut documents = vec![event("k", 1, -1), event("k", 1, -2), event("k", 1, -1)];
        for (document, change) in documents.iter_mut().zip([7, 7, 8]) {
            document[LSN] = json!(change);
        }
        assert_eq!(order(documents), [-2, -1, -1]);
    }
}
