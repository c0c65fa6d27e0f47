//! Lanes: one queue per key, at most one chain of each in flight.
//!
//! What lives here: the queues, who is ready, and which call carries what. What does not: sending,
//! retry decisions, the window.
//! Invariant: a lane's items leave from its head, in order; a lane in flight is never ready; lanes
//! that fail and lanes that do not are never in one call.

use std::collections::{HashSet, VecDeque};

use hashbrown::HashTable;
use postrider_core::{Capabilities, Chain, DeadLetterId, Entry, Key};
use slab::Slab;

use crate::window::Seq;

/// Where an item came from, and so what finishing it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Read from the source: finishing it frees its place in the window.
    Feed(Seq),
    /// A released dead letter: finishing it resolves the letter.
    DeadLetter(DeadLetterId),
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) entry: Entry,
    pub(crate) origin: Origin,
    /// Attempts before this relay took it up: a released letter's.
    pub(crate) earlier_attempts: u32,
    /// Whether the sink can take it at all: readable, and not too large.
    pub(crate) sendable: bool,
    next: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In the ready queue.
    Ready,
    InFlight,
    /// Between attempts.
    Waiting,
}

/// Which of the ready lanes a call carries. Who waits for an answer that does not come must not
/// keep back others, so what failed before is sent apart from what did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Heads that were not tried yet.
    First,
    /// Heads that failed before.
    Again,
}

impl Turn {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::First => Self::Again,
            Self::Again => Self::First,
        }
    }
}

/// A lane's number, good while the lane has items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LaneId(usize);

#[derive(Debug)]
struct Lane {
    /// Of its key, which its items carry.
    hash: u64,
    head: usize,
    tail: usize,
    state: State,
    tries: Tries,
}

/// Failures of a lane's head.
#[derive(Debug, Default)]
pub(crate) struct Tries {
    /// All of them: they lengthen the wait.
    pub(crate) all: u32,
    /// Those while the sink took other events: they use up the event's attempts.
    pub(crate) counted: u32,
    /// The sink's successes when the head last failed.
    pub(crate) successes_seen: u64,
    /// The sink's successes when it failed first, if that tells of the sink (`health.rs`).
    pub(crate) began: Option<u64>,
    /// Whether the sink said for how long to wait.
    pub(crate) asked: bool,
    /// The last error, for a letter.
    pub(crate) reason: String,
}

/// Items of one call, by lane, in the order of the call.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    /// (lane, number of items taken from its head).
    pub(crate) taken: Vec<(LaneId, usize)>,
}

#[derive(Debug, Default)]
pub(crate) struct Lanes {
    items: Slab<Item>,
    lanes: Slab<Lane>,
    hasher: ahash::RandomState,
    by_key: HashTable<usize>,
    ready: VecDeque<usize>,
    /// As `ready`, of `Turn::Again`.
    again: VecDeque<usize>,
    bytes: usize,
    dead_letters: usize,
    unsendable: usize,
}

/// What `push` takes.
#[derive(Debug)]
pub(crate) struct NewItem {
    pub(crate) entry: Entry,
    pub(crate) origin: Origin,
    pub(crate) earlier_attempts: u32,
    pub(crate) sendable: bool,
}

impl Lanes {
    /// Puts an entry at the end of its key's lane.
    ///
    /// # Panics
    /// If the entry has no key.
    pub(crate) fn push(&mut self, new: NewItem) {
        let NewItem { entry, origin, earlier_attempts, sendable } = new;
        let key = entry.key().expect("what enters a lane has a key");
        let hash = self.hasher.hash_one(key);
        let found = self.find(hash, key);
        self.bytes += entry.cost_bytes();
        self.dead_letters += usize::from(matches!(origin, Origin::DeadLetter(_)));
        self.unsendable += usize::from(!sendable);
        let item = Item { entry, origin, earlier_attempts, sendable, next: None };
        let item = self.items.insert(item);
        if let Some(lane) = found {
            let tail = std::mem::replace(&mut self.lanes[lane].tail, item);
            self.items[tail].next = Some(item);
            return;
        }
        let (state, tries) = (State::Ready, Tries::default());
        let lane = self.lanes.insert(Lane { hash, head: item, tail: item, state, tries });
        let lanes = &self.lanes;
        self.by_key.insert_unique(hash, lane, |&lane| lanes[lane].hash);
        let turn = self.turn(lane);
        self.queue(turn).push_back(lane);
    }

    /// A released letter that was tried by an earlier relay, or before it was a letter, is no new
    /// one either.
    fn turn(&self, lane: usize) -> Turn {
        let lane = &self.lanes[lane];
        let tried = lane.tries.all > 0 || self.items[lane.head].earlier_attempts > 0;
        if tried { Turn::Again } else { Turn::First }
    }

    fn queue(&mut self, turn: Turn) -> &mut VecDeque<usize> {
        match turn {
            Turn::First => &mut self.ready,
            Turn::Again => &mut self.again,
        }
    }

    fn find(&self, hash: u64, key: &Key) -> Option<usize> {
        let same = |&lane: &usize| self.key(LaneId(lane)) == key;
        self.by_key.find(hash, same).copied()
    }

    /// Whether the key has items from the feed: then later ones of it queue behind them.
    pub(crate) fn has_feed_items(&self, key: &Key) -> bool {
        let Some(lane) = self.find(self.hasher.hash_one(key), key) else { return false };
        let mut at = Some(self.lanes[lane].head);
        while let Some(item) = at {
            if matches!(self.items[item].origin, Origin::Feed(_)) {
                return true;
            }
            at = self.items[item].next;
        }
        false
    }

    /// Takes ready lanes of one turn into one call, up to the sink's limits; `fits` refuses heads
    /// that must not be sent (now), whose lanes stay ready.
    pub(crate) fn take(
        &mut self,
        turn: Turn,
        limits: &Capabilities,
        records: &mut Vec<postrider_core::Record>,
        fits: impl Fn(&Item) -> bool,
    ) -> Chains {
        let mut chains = Chains::default();
        let mut bytes = 0;
        for lanes_left in (1..=self.queue(turn).len()).rev() {
            if records.len() >= limits.max_batch_records || bytes >= limits.max_batch_bytes {
                break;
            }
            let lane = self.queue(turn).pop_front().expect("counted");
            let room = limits.max_batch_records - records.len();
            let most = match limits.chain {
                Chain::One => 1,
                Chain::InTurn => (room / lanes_left).max(1),
                Chain::Many => room,
            };
            let mut taken = 0;
            let mut at = Some(self.lanes[lane].head);
            while let Some(index) = at.filter(|_| taken < most) {
                let item = &self.items[index];
                let Entry::Record(record) = &item.entry else { break };
                if !item.sendable {
                    break;
                }
                let cost = item.entry.cost_bytes();
                let full = !records.is_empty() && bytes + cost > limits.max_batch_bytes;
                if full || !fits(item) {
                    break;
                }
                bytes += cost;
                records.push(record.clone());
                taken += 1;
                at = item.next;
            }
            if taken == 0 {
                self.queue(turn).push_back(lane);
                continue;
            }
            self.lanes[lane].state = State::InFlight;
            chains.taken.push((LaneId(lane), taken));
        }
        chains
    }

    /// A ready lane whose head can't be sent at all; it counts as in flight from now on.
    pub(crate) fn take_unsendable(&mut self) -> Option<LaneId> {
        if self.unsendable == 0 {
            return None;
        }
        let unsendable = |&lane: &usize| !self.items[self.lanes[lane].head].sendable;
        let found = |queue: &VecDeque<usize>| queue.iter().position(unsendable);
        let (turn, at) = found(&self.ready)
            .map(|at| (Turn::First, at))
            .or_else(|| found(&self.again).map(|at| (Turn::Again, at)))?;
        let lane = self.queue(turn).remove(at).expect("just found");
        self.lanes[lane].state = State::InFlight;
        Some(LaneId(lane))
    }

    /// Removes the head of a lane that is not ready: it was confirmed or will be a dead letter.
    /// Says whether the lane has more; if not, its number is free for another key.
    pub(crate) fn pop(&mut self, lane: LaneId) -> (Item, bool) {
        let state = &mut self.lanes[lane.0];
        let item = self.items.remove(state.head);
        state.tries = Tries::default();
        self.bytes -= item.entry.cost_bytes();
        self.dead_letters -= usize::from(matches!(item.origin, Origin::DeadLetter(_)));
        self.unsendable -= usize::from(!item.sendable);
        match item.next {
            Some(next) => state.head = next,
            None => {
                let hash = self.lanes.remove(lane.0).hash;
                if let Ok(found) = self.by_key.find_entry(hash, |&found| found == lane.0) {
                    found.remove();
                }
            }
        }
        let left = item.next.is_some();
        (item, left)
    }

    /// Removes a whole lane that is not ready, head first.
    pub(crate) fn pop_all(&mut self, lane: LaneId) -> Vec<Item> {
        let mut items = Vec::new();
        loop {
            let (item, left) = self.pop(lane);
            items.push(item);
            if !left {
                return items;
            }
        }
    }

    pub(crate) fn head(&self, lane: LaneId) -> &Item {
        &self.items[self.lanes[lane.0].head]
    }

    pub(crate) fn key(&self, lane: LaneId) -> &Key {
        self.head(lane).entry.key().expect("what enters a lane has a key")
    }

    pub(crate) fn tries(&mut self, lane: LaneId) -> &mut Tries {
        &mut self.lanes[lane.0].tries
    }

    pub(crate) fn tries_of(&self, lane: LaneId) -> &Tries {
        &self.lanes[lane.0].tries
    }

    /// The lane may be sent from again, if it still has items.
    pub(crate) fn make_ready(&mut self, lane: LaneId) {
        if let Some(state) = self.lanes.get_mut(lane.0)
            && state.state != State::Ready
        {
            state.state = State::Ready;
            let turn = self.turn(lane.0);
            self.queue(turn).push_back(lane.0);
        }
    }

    /// The lane waits for another attempt.
    pub(crate) fn make_wait(&mut self, lane: LaneId) {
        self.lanes[lane.0].state = State::Waiting;
    }

    /// Lanes that wait for another attempt and whose head satisfies `wanted`.
    pub(crate) fn waiting(&self, wanted: impl Fn(&Item) -> bool) -> Vec<LaneId> {
        let waits = |lane: &Lane| lane.state == State::Waiting && wanted(&self.items[lane.head]);
        self.lanes.iter().filter(|(_, lane)| waits(lane)).map(|(id, _)| LaneId(id)).collect()
    }

    /// Lanes that wait for another attempt, and whose failures so far are such, are ready now.
    pub(crate) fn make_waiting_ready(&mut self, wanted: impl Fn(&Tries) -> bool) {
        let waits = |lane: &Lane| lane.state == State::Waiting && wanted(&lane.tries);
        let found = self.lanes.iter().filter(|(_, lane)| waits(lane));
        for lane in found.map(|(id, _)| LaneId(id)).collect::<Vec<_>>() {
            self.make_ready(lane);
        }
    }

    /// Ready lanes whose head satisfies `wanted` wait instead.
    pub(crate) fn make_ready_wait(&mut self, wanted: impl Fn(&Item) -> bool) {
        let (items, lanes) = (&self.items, &mut self.lanes);
        for queue in [&mut self.ready, &mut self.again] {
            queue.retain(|&lane| {
                let lane = &mut lanes[lane];
                let waits = wanted(&items[lane.head]);
                if waits {
                    lane.state = State::Waiting;
                }
                !waits
            });
        }
    }

    /// Whether any ready lane's head satisfies `wanted`.
    pub(crate) fn any_ready(&self, wanted: impl Fn(&Item) -> bool) -> bool {
        self.ready.iter().chain(&self.again).any(|&lane| wanted(&self.items[self.lanes[lane].head]))
    }

    /// Whether the lane still has items under this number.
    pub(crate) fn is_waiting(&self, lane: LaneId) -> bool {
        self.lanes.get(lane.0).is_some_and(|lane| lane.state == State::Waiting)
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The released dead letters among the items, and what they cost.
    pub(crate) fn letters(&self) -> (HashSet<DeadLetterId>, usize) {
        let (mut ids, mut bytes) = (HashSet::new(), 0);
        if self.dead_letters == 0 {
            return (ids, bytes);
        }
        for (_, item) in &self.items {
            if let Origin::DeadLetter(id) = item.origin {
                ids.insert(id);
                bytes += item.entry.cost_bytes();
            }
        }
        (ids, bytes)
    }

    /// How many released dead letters are among the items.
    pub(crate) fn dead_letters(&self) -> usize {
        self.dead_letters
    }

    pub(crate) fn has_ready(&self, turn: Turn) -> bool {
        match turn {
            Turn::First => !self.ready.is_empty(),
            Turn::Again => !self.again.is_empty(),
        }
    }

    /// How many lanes wait for another attempt. Counts them.
    pub(crate) fn waiting_count(&self) -> usize {
        self.lanes.iter().filter(|(_, lane)| lane.state == State::Waiting).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::{Event, EventId, EventType, NewEvent, Position, Record, Timestamp, Topic};

    const MANY: Capabilities = Capabilities {
        max_event_bytes: None,
        max_batch_records: 4,
        max_batch_bytes: 1 << 20,
        max_in_flight: 1,
        chain: Chain::Many,
        dedup_window: None,
    };

    fn event(key: &Key) -> Event {
        let topic = Topic::new("t").expect("valid");
        let kind = EventType::new("E").expect("valid");
        let new = NewEvent::builder(key.clone(), topic, kind).build().expect("valid");
        new.identified(|| EventId::from_uuid(uuid::Uuid::nil()))
    }

    fn push(lanes: &mut Lanes, key: &str, seq: Seq) {
        let key = Key::new(key).expect("valid");
        let entry = Entry::Record(Record {
            position: Position::START,
            appended_at: Timestamp::default(),
            event: event(&key),
        });
        let origin = Origin::Feed(seq);
        lanes.push(NewItem { entry, origin, earlier_attempts: 0, sendable: true });
    }

    #[test]
    fn a_key_in_flight_is_not_taken_again_and_leaves_in_order() {
        let mut lanes = Lanes::default();
        for (key, seq) in [("a", 0), ("b", 1), ("a", 2)] {
            push(&mut lanes, key, seq);
        }
        let mut records = Vec::new();
        let one = Capabilities { chain: Chain::One, ..MANY };
        let chains = lanes.take(Turn::First, &one, &mut records, |_| true);
        assert_eq!(chains.taken.iter().map(|(_, n)| *n).collect::<Vec<_>>(), [1, 1]);
        assert!(lanes.take(Turn::First, &one, &mut Vec::new(), |_| true).taken.is_empty());
        let (a, _) = chains.taken[0];
        assert_eq!(lanes.pop(a).0.origin, Origin::Feed(0));
        assert!(
            lanes.take(Turn::First, &one, &mut Vec::new(), |_| true).taken.is_empty(),
            "still in flight"
        );
        lanes.make_ready(a);
        assert_eq!(lanes.take(Turn::First, &one, &mut Vec::new(), |_| true).taken, [(a, 1)]);
        assert_eq!(lanes.pop(a).0.origin, Origin::Feed(2));
        let (b, _) = chains.taken[1];
        assert_eq!(lanes.pop(b).0.origin, Origin::Feed(1));
        assert_eq!((lanes.len(), lanes.bytes()), (0, 0));
    }

    #[test]
    fn a_call_carries_whole_chains_up_to_its_limit() {
        let mut lanes = Lanes::default();
        for seq in 0..6 {
            push(&mut lanes, "a", seq);
        }
        push(&mut lanes, "b", 6);
        let mut records = Vec::new();
        let chains = lanes.take(Turn::First, &MANY, &mut records, |_| true);
        assert_eq!(chains.taken.iter().map(|(_, n)| *n).collect::<Vec<_>>(), [4]);
        let rest = lanes.pop_all(chains.taken[0].0);
        assert_eq!(rest.len(), 6);
        assert_eq!(
            lanes.take(Turn::First, &MANY, &mut Vec::new(), |_| true).taken.len(),
            1,
            "b is ready"
        );
    }

    /// A call lasts as long as its longest chain where the sink waits between a key's events.
    #[test]
    fn keys_share_a_call_whose_events_go_in_turn() {
        let mut lanes = Lanes::default();
        for (key, seq) in (0..6).flat_map(|seq| ["a", "b", "c"].map(|key| (key, seq))) {
            push(&mut lanes, key, seq);
        }
        let in_turn = Capabilities { chain: Chain::InTurn, max_batch_records: 7, ..MANY };
        let counts = |chains: &Chains| chains.taken.iter().map(|(_, n)| *n).collect::<Vec<_>>();
        let chains = lanes.take(Turn::First, &in_turn, &mut Vec::new(), |_| true);
        assert_eq!(counts(&chains), [2, 2, 3]);
        lanes.make_ready(chains.taken[0].0);
        let alone = lanes.take(Turn::First, &in_turn, &mut Vec::new(), |_| true);
        assert_eq!(counts(&alone), [6], "nobody else waits");
        for (lane, _) in &chains.taken {
            lanes.make_ready(*lane);
        }
        let few = Capabilities { max_batch_records: 2, ..in_turn };
        assert_eq!(counts(&lanes.take(Turn::First, &few, &mut Vec::new(), |_| true)), [1, 1]);
    }

    #[test]
    fn what_failed_is_sent_apart_from_what_did_not() {
        let mut lanes = Lanes::default();
        push(&mut lanes, "a", 0);
        push(&mut lanes, "b", 1);
        let one = Capabilities { max_batch_records: 1, ..MANY };
        let (a, _) = lanes.take(Turn::First, &one, &mut Vec::new(), |_| true).taken[0];
        lanes.tries(a).all = 1;
        lanes.make_wait(a);
        assert_eq!(lanes.waiting_count(), 1);
        lanes.make_ready(a);
        let taken = |lanes: &mut Lanes, turn| {
            lanes
                .take(turn, &MANY, &mut Vec::new(), |_| true)
                .taken
                .into_iter()
                .map(|(lane, _)| lane)
                .collect::<Vec<_>>()
        };
        assert_ne!(taken(&mut lanes, Turn::First), [a], "b alone");
        assert!(!lanes.has_ready(Turn::First) && lanes.has_ready(Turn::Again));
        assert_eq!(taken(&mut lanes, Turn::Again), [a]);
        // Confirmed: what comes next in its lane was not tried yet.
        push(&mut lanes, "a", 2);
        lanes.pop(a);
        lanes.make_ready(a);
        assert_eq!(taken(&mut lanes, Turn::First), [a]);
    }
}
