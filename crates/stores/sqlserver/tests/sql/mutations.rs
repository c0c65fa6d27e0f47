//! The four bugs that a published library of this design once had, and one that this one had, put
//! back: each fixture is one of our procedures with one of them in it. Here it is shown that a
//! fixture differs from the procedure in just that place; `behaviour/mutations.rs` shows on a
//! server that a scenario fails on it.

use crate::text::{FILES, batches, template};

/// A procedure with a bug in it.
pub(crate) struct Mutation {
    pub(crate) name: &'static str,
    /// The template it stands in for; nothing where it is a procedure of all feeds.
    pub(crate) template: Option<&'static str>,
    pub(crate) text: &'static str,
    /// Lines of the procedure that the bug takes the place of, and the bug's.
    lines: (usize, usize),
}

/// The first allocation on a shard stores where it began: the next one in the same millisecond
/// repeats its ULIDs.
pub(crate) const FIRST_ALLOCATION: Mutation = Mutation {
    name: "first_allocation",
    template: Some("update_state"),
    text: include_str!("mutations/first_allocation.sql"),
    lines: (1, 1),
};

/// The feed is read again only where the lock had to be waited for: a reader that gets it at once,
/// behind another that has moved a batch, moves the next one and jumps over the first.
pub(crate) const READ_AGAIN: Mutation = Mutation {
    name: "read_again",
    template: Some("read_feed"),
    text: include_str!("mutations/read_again.sql"),
    lines: (9, 13),
};

/// Outbox rows are taken whatever their shard is: the reader of one shard takes those of all.
pub(crate) const SHARD_FILTER: Mutation = Mutation {
    name: "shard_filter",
    template: Some("move_outbox"),
    text: include_str!("mutations/shard_filter.sql"),
    lines: (1, 1),
};

/// The outbox is scanned once: where that scan waits for an open writer, it has passed the places
/// of rows that go in meanwhile, and takes what follows them first.
pub(crate) const ONE_SCAN: Mutation = Mutation {
    name: "one_scan",
    template: Some("move_outbox"),
    text: include_str!("mutations/one_scan.sql"),
    lines: (4, 1),
};

/// Key columns are looked up by their place in the index: the wrong ones where the key's columns
/// are not the table's first.
pub(crate) const KEY_COLUMNS: Mutation = Mutation {
    name: "key_columns",
    template: None,
    text: include_str!("mutations/key_columns.sql"),
    lines: (1, 1),
};

impl Mutation {
    /// The procedure without the bug.
    fn original(&self) -> String {
        let of_all = |batch: &String| batch.contains(&format!("[{}]\n", "describe_key"));
        match self.template {
            Some(name) => template(name).text.trim_start().to_owned(),
            None => {
                let all = batches(FILES[0].1);
                let batch = all.iter().find(|batch| of_all(batch)).expect("describe_key is there");
                let from = batch.find("create procedure").expect("it is made there");
                batch[from..].to_owned()
            }
        }
    }
}

/// How many lines at the front and at the back are the same, and how many there are in between.
fn differing(left: &str, right: &str) -> (usize, usize) {
    let (left, right): (Vec<_>, Vec<_>) = (left.lines().collect(), right.lines().collect());
    let front = left.iter().zip(&right).take_while(|(a, b)| a == b).count();
    let most = left.len().min(right.len()) - front;
    let back = left.iter().rev().zip(right.iter().rev()).take(most).take_while(|(a, b)| a == b);
    let back = back.count();
    (left.len() - front - back, right.len() - front - back)
}

#[test]
fn each_differs_from_the_procedure_in_just_one_place() {
    for mutation in [FIRST_ALLOCATION, READ_AGAIN, SHARD_FILTER, ONE_SCAN, KEY_COLUMNS] {
        let found = differing(&mutation.original(), mutation.text);
        assert_eq!(found, mutation.lines, "{}", mutation.name);
    }
    assert_eq!(differing("a\nb\nc\n", "a\nx\ny\nc\n"), (1, 2));
    assert_eq!(differing("a\nb\n", "a\nb\n"), (0, 0));
}
