//! A set of transaction ids, in blocks that are stored one by one.
//!
//! What lives here: the set, and a block's bytes. What does not: which ids belong in it
//! (`ledger.rs`).
//! Invariant: a block holds 65,536 ids and is never empty; in memory it takes 8 KiB at most, and so
//! do its bytes.

use std::collections::{BTreeMap, BTreeSet};

use postrider_core::{Error, Result};

use super::snapshot::Snapshot;

/// Ids of a block are told apart by so many low bits.
const BLOCK_BITS: u32 = 16;
const WORDS: usize = 1 << (BLOCK_BITS - 6);
/// The bytes of a block that has a bit for each id.
pub(crate) const BITMAP_BYTES: usize = WORDS * 8;
/// From here on a bit for each id takes less than a list of them.
const MAX_LISTED: usize = BITMAP_BYTES / 2;

/// How a block's bytes are to be read: their first one.
const LIST: u8 = 0;
const RUNS: u8 = 1;
const BITMAP: u8 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Block {
    /// Sorted.
    Few(Vec<u16>),
    Many(Box<[u64; WORDS]>),
}

/// Where an id has its bit.
fn bit(low: u16) -> (usize, u64) {
    (usize::from(low >> 6), 1 << (low & 63))
}

fn pair(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

impl Block {
    fn contains(&self, low: u16) -> bool {
        match self {
            Self::Few(list) => list.binary_search(&low).is_ok(),
            Self::Many(words) => words[bit(low).0] & bit(low).1 != 0,
        }
    }

    fn insert(&mut self, low: u16) {
        match self {
            Self::Few(list) => {
                // Ids come nearly in order: mostly this is the end.
                let at = list.partition_point(|one| *one < low);
                if list.get(at) == Some(&low) {
                    return;
                }
                list.insert(at, low);
                if list.len() > MAX_LISTED {
                    *self = Self::Many(Self::words(list));
                }
            }
            Self::Many(words) => words[bit(low).0] |= bit(low).1,
        }
    }

    fn words(list: &[u16]) -> Box<[u64; WORDS]> {
        let mut words = Box::new([0; WORDS]);
        for low in list {
            words[bit(*low).0] |= bit(*low).1;
        }
        words
    }

    fn list(&self) -> Vec<u16> {
        match self {
            Self::Few(list) => list.clone(),
            Self::Many(words) => {
                let mut list = Vec::with_capacity(MAX_LISTED);
                for (at, word) in words.iter().enumerate() {
                    let base = (at as u16) << 6;
                    let mut left = *word;
                    while left != 0 {
                        list.push(base + left.trailing_zeros() as u16);
                        left &= left - 1;
                    }
                }
                list
            }
        }
    }

    /// The first and last id of each stretch without a gap.
    fn runs(list: &[u16]) -> Vec<(u16, u16)> {
        let mut runs: Vec<(u16, u16)> = Vec::new();
        for low in list {
            match runs.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(*low) => *last = *low,
                _ => runs.push((*low, *low)),
            }
        }
        runs
    }

    /// A bit for each id, as SQL's `get_bit` counts them.
    fn bitmap(&self) -> Vec<u8> {
        let words = match self {
            Self::Few(list) => &Self::words(list),
            Self::Many(words) => words,
        };
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// The shortest of three forms.
    fn bytes(&self) -> Vec<u8> {
        let list = self.list();
        let runs = Self::runs(&list);
        let (listed, run) = (list.len() * 2, runs.len() * 4);
        let (form, body): (u8, Vec<u8>) = if run <= listed.min(BITMAP_BYTES) {
            let ends = runs.iter().flat_map(|(first, last)| [*first, *last]);
            (RUNS, ends.flat_map(u16::to_be_bytes).collect())
        } else if listed <= BITMAP_BYTES {
            (LIST, list.iter().flat_map(|low| low.to_be_bytes()).collect())
        } else {
            (BITMAP, self.bitmap())
        };
        [vec![form], body].concat()
    }

    fn of_bytes(bytes: &[u8]) -> Result<Self> {
        let corrupt = || Error::corrupt("a block of delivered transactions can't be read");
        let (form, body) = bytes.split_first().ok_or_else(corrupt)?;
        let mut block = Self::Few(Vec::new());
        if body.is_empty() || body.len() > BITMAP_BYTES {
            return Err(corrupt());
        }
        match (*form, body.len()) {
            (LIST, length) if length % 2 == 0 => {
                let list: Vec<u16> = body.chunks_exact(2).map(pair).collect();
                if !list.windows(2).all(|pair| pair[0] < pair[1]) {
                    return Err(corrupt());
                }
                block = Self::Few(list);
            }
            (RUNS, length) if length % 4 == 0 => {
                let mut next = 0u32;
                for run in body.chunks_exact(4) {
                    let (first, last) = (pair(run), pair(&run[2..]));
                    if u32::from(first) < next || last < first {
                        return Err(corrupt());
                    }
                    next = u32::from(last) + 1;
                    (first..=last).for_each(|low| block.insert(low));
                }
            }
            (BITMAP, BITMAP_BYTES) => {
                let mut words = Box::new([0; WORDS]);
                for (word, bytes) in words.iter_mut().zip(body.chunks_exact(8)) {
                    *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
                }
                if words.iter().all(|word| *word == 0) {
                    return Err(corrupt());
                }
                block = Self::Many(words);
            }
            _ => return Err(corrupt()),
        }
        Ok(block)
    }
}

/// A set of transaction ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Xids {
    blocks: BTreeMap<u64, Block>,
}

/// The number of the block that an id is in.
pub(crate) fn block_of(xid: u64) -> u64 {
    xid >> BLOCK_BITS
}

fn low_of(xid: u64) -> u16 {
    (xid & u64::from(u16::MAX)) as u16
}

impl Xids {
    pub(crate) fn contains(&self, xid: u64) -> bool {
        self.blocks.get(&block_of(xid)).is_some_and(|block| block.contains(low_of(xid)))
    }

    pub(crate) fn insert(&mut self, xid: u64) {
        let block = self.blocks.entry(block_of(xid)).or_insert_with(|| Block::Few(Vec::new()));
        block.insert(low_of(xid));
    }

    /// Those that the snapshot does not see: it may have far fewer of them than this set.
    pub(crate) fn unseen(&self, snapshot: &Snapshot) -> Self {
        let mut left = Self::default();
        let open = snapshot.open().iter().copied().filter(|xid| self.contains(*xid));
        open.for_each(|xid| left.insert(xid));
        for (number, block) in self.blocks.range(block_of(snapshot.xmax())..) {
            let ids = block.list().into_iter().map(|low| number << BLOCK_BITS | u64::from(low));
            ids.filter(|xid| *xid >= snapshot.xmax()).for_each(|xid| left.insert(xid));
        }
        left
    }

    /// The numbers of its blocks, in order.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        self.blocks.keys().copied().collect()
    }

    /// A block as it is stored; at most 8 KiB and a byte.
    pub(crate) fn block(&self, number: u64) -> Option<Vec<u8>> {
        self.blocks.get(&number).map(Block::bytes)
    }

    /// A block as SQL's `get_bit` looks into it: 8 KiB.
    pub(crate) fn bitmap(&self, number: u64) -> Option<Vec<u8>> {
        self.blocks.get(&number).map(Block::bitmap)
    }

    /// Takes in a block as it was stored.
    ///
    /// # Errors
    /// `Corrupt` for bytes that no block has.
    pub(crate) fn take_in(&mut self, number: u64, bytes: &[u8]) -> Result<()> {
        if number > block_of(u64::MAX) {
            return Err(Error::corrupt("a block of delivered transactions is beyond all ids"));
        }
        self.blocks.insert(number, Block::of_bytes(bytes)?);
        Ok(())
    }

    /// Of these blocks a copy, to be changed.
    pub(crate) fn copy_of(&self, numbers: &BTreeSet<u64>) -> Self {
        let copy = |number: &u64| self.blocks.get_key_value(number);
        let copies = numbers.iter().filter_map(copy);
        Self { blocks: copies.map(|(number, block)| (*number, block.clone())).collect() }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(ids: impl IntoIterator<Item = u64>) -> Xids {
        let mut set = Xids::default();
        ids.into_iter().for_each(|xid| set.insert(xid));
        set
    }

    fn ids() -> impl Strategy<Value = BTreeSet<u64>> {
        let base = prop_oneof![Just(0u64), Just(65_000), Just(u64::MAX - 70_000)];
        let dense = (base.clone(), 1..9_000u64, 1..3u64)
            .prop_map(|(from, count, step)| (0..count).map(|i| from + i * step).collect());
        let sparse = (base, prop::collection::btree_set(0..70_000u64, 0..200))
            .prop_map(|(from, ids)| ids.into_iter().map(|id| from + id).collect());
        prop_oneof![dense, sparse]
    }

    proptest! {
        #[test]
        fn a_set_is_what_was_put_in_and_reads_back(ids in ids(), others in ids()) {
            let set = set(ids.iter().copied());
            let mut again = Xids::default();
            for number in set.numbers() {
                let bytes = set.block(number).expect("its own");
                prop_assert!(bytes.len() <= BITMAP_BYTES + 1);
                again.take_in(number, &bytes).expect("its own");
            }
            for xid in ids.union(&others) {
                prop_assert_eq!(set.contains(*xid), ids.contains(xid));
                prop_assert_eq!(again.contains(*xid), ids.contains(xid));
            }
            let bits: u32 = set.numbers().into_iter().map(|number| {
                let bitmap = set.bitmap(number).expect("its own");
                bitmap.iter().map(|byte| byte.count_ones()).sum::<u32>()
            }).sum();
            prop_assert_eq!(bits as usize, ids.len());
        }

        #[test]
        fn what_a_snapshot_does_not_see_is_left(ids in ids(), which in 0..4usize, from in 0..9u64) {
            let last = ids.last().copied().unwrap_or(0);
            let xmax = [0, ids.first().copied().unwrap_or(0) + 100, last, last + 1][which];
            let open: Vec<u64> = (0..xmax).rev().take(200).filter(|x| x % 9 == from).collect();
            let open: Vec<String> = open.iter().rev().map(u64::to_string).collect();
            let text = format!("{}:{xmax}:{}", open.first().map_or("0", |x| x), open.join(","));
            let snapshot = Snapshot::parse(&text).expect("a snapshot");
            let unseen = set(ids.iter().copied().filter(|xid| !snapshot.sees(*xid)));
            prop_assert_eq!(set(ids).unseen(&snapshot), unseen);
        }

        #[test]
        fn bytes_of_any_kind_are_read_or_refused(bytes in prop::collection::vec(0..4u8, 0..40)) {
            let mut set = Xids::default();
            if set.take_in(7, &bytes).is_ok() {
                prop_assert!(set.block(7).is_some_and(|written| written.len() > 1));
            }
        }
    }

    #[test]
    fn a_million_ids_take_little() {
        let dense = set(5_000_000..6_000_000);
        let many = dense.blocks.values().filter(|block| matches!(block, Block::Many(_))).count();
        assert!(dense.blocks.len() <= 17 && many >= 15, "{} blocks", dense.blocks.len());
        let bytes = |number| dense.block(number).expect("its own").len();
        assert!(dense.numbers().into_iter().map(bytes).sum::<usize>() < 100, "a run each");
    }
}
