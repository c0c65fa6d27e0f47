//! Events whose fate nobody knows, and until when their repetition is dropped.
//!
//! What lives here: which events were sent without an answer that is known, and what is said of
//! them before and after the window of duplicate detection is over. What does not: sending them
//! again, which the relay does, and dropping repetitions, which the service does.
//! Invariant: an event stays listed from the first time that it was sent without a known answer
//! until it is confirmed. The list and each line are bounded, and say how many more there are.
//!
//! It is a list of this process: what was sent before a restart is not in it.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::{counter, gauge};
use postrider_core::{Clock, EventId, Record};

/// What an entity with duplicate detection has when nobody chose a window.
const SERVICE_DEFAULT: Duration = Duration::from_secs(600);
/// Most events that are listed; half a megabyte.
const MAX_LISTED: usize = 10_000;
/// Most ids in one line of the log.
const MAX_SHOWN: usize = 20;
/// How often it is told at most that the end of a window is near.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// An event that another relay has delivered since is never confirmed here. Twice the longest
/// window after it was sent there is nothing left to be said of it.
const FORGET_AFTER: Duration = Duration::from_secs(14 * 86_400);

/// See the module.
pub(crate) struct Doubts {
    entity: String,
    window: Duration,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    listed: HashMap<EventId, Doubt>,
    /// Events beyond [`MAX_LISTED`], since this was last told.
    unlisted: u64,
    /// When to look whether the end of a window is near.
    look_at: Option<Duration>,
    /// Confirmed after the window, and not told yet.
    beyond: Few,
    /// How many are listed, as the metric last said.
    exported: usize,
}

#[derive(Clone, Copy)]
struct Doubt {
    /// When it was first sent without a known answer, by the clock's `elapsed`.
    since: Duration,
    /// Whether it was told that its window ends.
    told: bool,
}

/// Some of many ids.
#[derive(Default)]
struct Few {
    shown: Vec<EventId>,
    count: u64,
}

impl Few {
    fn push(&mut self, id: EventId) {
        if self.shown.len() < MAX_SHOWN {
            self.shown.push(id);
        }
        self.count += 1;
    }

    fn ids(&self) -> String {
        let mut text = String::new();
        for id in &self.shown {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a text can't fail.
            let _ = write!(text, "{comma}{id}");
        }
        text
    }

    fn more(&self, unlisted: u64) -> u64 {
        self.count - self.shown.len() as u64 + unlisted
    }
}

/// Events that are on their way. Unless an answer is known before this is dropped, they are listed.
pub(crate) struct OnTheirWay<'a> {
    doubts: &'a Doubts,
    records: &'a [&'a Record],
    since: Duration,
    known: bool,
}

impl Doubts {
    /// For an entity with this window; without one, the service's own default is assumed.
    pub(crate) fn new(entity: &str, window: Option<Duration>, clock: Arc<dyn Clock>) -> Self {
        let window = window.unwrap_or(SERVICE_DEFAULT);
        Self { entity: entity.to_owned(), window, clock, state: Mutex::default() }
    }

    /// Called before they are sent.
    pub(crate) fn on_their_way<'a>(&'a self, records: &'a [&'a Record]) -> OnTheirWay<'a> {
        OnTheirWay { doubts: self, records, since: self.clock.elapsed(), known: false }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// So long after it was sent an event's repetition is taken for it for only a little longer.
    fn soon(&self) -> Duration {
        self.window / 5 * 4
    }

    fn list(&self, records: &[&Record], since: Duration) {
        let mut state = self.lock();
        if state.listed.len() + records.len() > MAX_LISTED {
            state.listed.retain(|_, doubt| since.saturating_sub(doubt.since) < FORGET_AFTER);
        }
        for record in records {
            let id = record.event.id();
            if state.listed.len() < MAX_LISTED || state.listed.contains_key(&id) {
                state.listed.entry(id).or_insert(Doubt { since, told: false });
            } else {
                state.unlisted += 1;
            }
        }
        let look_at = since + self.soon();
        state.look_at = Some(state.look_at.map_or(look_at, |at| at.min(look_at)));
    }

    fn confirm(&self, records: &[&Record]) {
        let mut state = self.lock();
        if state.listed.is_empty() {
            return;
        }
        let now = self.clock.elapsed();
        for record in records {
            let id = record.event.id();
            let Some(doubt) = state.listed.remove(&id) else { continue };
            if now.saturating_sub(doubt.since) >= self.window {
                state.beyond.push(id);
            }
        }
    }

    /// Says what there is to be said; after each call.
    pub(crate) fn tell(&self) {
        let now = self.clock.elapsed();
        let mut state = self.lock();
        if state.listed.len() != state.exported {
            state.exported = state.listed.len();
            let label = [("entity", self.entity.clone())];
            let listed = u32::try_from(state.exported).unwrap_or(u32::MAX);
            gauge!("postrider_servicebus_unknown_events", &label).set(listed);
        }
        if state.listed.is_empty() {
            state.look_at = None;
        }
        if state.look_at.is_some_and(|at| at <= now) {
            self.tell_before(&mut state, now);
        }
        if state.beyond.count > 0 {
            self.tell_after(&mut state);
        }
    }

    /// The window of some ends soon, or has ended, and they are not confirmed yet.
    fn tell_before(&self, state: &mut State, now: Duration) {
        let (mut near, mut next, soon) = (Few::default(), None, self.soon());
        let mut oldest = now;
        for (id, doubt) in &mut state.listed {
            if doubt.told {
                continue;
            }
            if doubt.since + soon > now {
                next = Some(next.map_or(doubt.since, |at: Duration| at.min(doubt.since)));
                continue;
            }
            doubt.told = true;
            oldest = oldest.min(doubt.since);
            near.push(*id);
        }
        state.look_at = next.map(|since: Duration| (since + soon).max(now + TELL_EVERY));
        if near.count == 0 {
            return;
        }
        tracing::warn!(
            entity = self.entity, events = near.count, sent_ago = ?now.saturating_sub(oldest),
            window = ?self.window, ids = near.ids(), more = near.more(state.unlisted),
            "events were sent and nobody knows whether they were taken; when the window of \
             duplicate detection is over, receivers may get them twice"
        );
    }

    fn tell_after(&self, state: &mut State) {
        let beyond = std::mem::take(&mut state.beyond);
        let unlisted = std::mem::take(&mut state.unlisted);
        let label = [("entity", self.entity.clone())];
        counter!("postrider_servicebus_beyond_window_total", &label).increment(beyond.count);
        tracing::warn!(
            entity = self.entity, events = beyond.count, window = ?self.window,
            ids = beyond.ids(), more = beyond.more(unlisted),
            "events were sent again after the window of duplicate detection; receivers may have \
             got them twice"
        );
    }
}

impl OnTheirWay<'_> {
    /// The service has taken them.
    pub(crate) fn confirmed(mut self) {
        self.known = true;
        self.doubts.confirm(self.records);
    }

    /// It has not, this time.
    pub(crate) fn not_taken(mut self) {
        self.known = true;
    }
}

impl Drop for OnTheirWay<'_> {
    fn drop(&mut self) {
        if !self.known {
            self.doubts.list(self.records, self.since);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encode::tests::record;
    use postrider_core::Timestamp;

    struct Fixed(Mutex<Duration>);

    #[async_trait::async_trait]
    impl Clock for Fixed {
        fn now(&self) -> Timestamp {
            Timestamp::default()
        }
        fn elapsed(&self) -> Duration {
            *self.0.lock().expect("not poisoned")
        }
        async fn sleep(&self, _: Duration) {}
    }

    fn minutes(minutes: u64) -> Duration {
        Duration::from_secs(60 * minutes)
    }

    fn doubts(window: Option<Duration>) -> (Doubts, Arc<Fixed>) {
        let clock = Arc::new(Fixed(Mutex::default()));
        (Doubts::new("orders", window, clock.clone()), clock)
    }

    fn counts(doubts: &Doubts) -> (usize, u64) {
        let state = doubts.lock();
        (state.listed.len(), state.unlisted)
    }

    fn at(clock: &Fixed, now: Duration) {
        *clock.0.lock().expect("not poisoned") = now;
    }

    #[test]
    fn without_a_window_it_is_the_services_own() {
        assert_eq!(doubts(None).0.window, minutes(10));
        assert_eq!(doubts(Some(minutes(1))).0.window, minutes(1));
    }

    #[test]
    fn the_first_time_counts_until_it_is_confirmed() {
        let (doubts, clock) = doubts(None);
        let one = record(1, "k", Vec::new());
        drop(doubts.on_their_way(&[&one]));
        at(&clock, minutes(6));
        drop(doubts.on_their_way(&[&one]));
        doubts.on_their_way(&[&one]).not_taken();
        at(&clock, minutes(10));
        doubts.on_their_way(&[&one]).confirmed();
        assert_eq!(doubts.lock().beyond.count, 1);
        doubts.tell();
        assert_eq!(doubts.lock().beyond.count, 0);
        // Confirmed within the window of the first time, or never in doubt.
        drop(doubts.on_their_way(&[&one]));
        at(&clock, minutes(20) - Duration::from_millis(1));
        doubts.on_their_way(&[&one]).confirmed();
        at(&clock, minutes(40));
        doubts.on_their_way(&[&one]).confirmed();
        let state = doubts.lock();
        assert_eq!((state.beyond.count, state.listed.len()), (0, 0));
    }

    #[test]
    fn the_list_is_bounded_and_counts_the_rest() {
        let (doubts, clock) = doubts(None);
        let many: Vec<Record> = (0..10_050).map(|n| record(n, "k", Vec::new())).collect();
        let many: Vec<&Record> = many.iter().collect();
        drop(doubts.on_their_way(&many));
        assert_eq!(counts(&doubts), (10_000, 50));
        at(&clock, minutes(11));
        doubts.on_their_way(&many).confirmed();
        let state = doubts.lock();
        assert_eq!((state.beyond.count, state.beyond.shown.len()), (10_000, MAX_SHOWN));
        assert_eq!(state.beyond.more(state.unlisted), 10_030);
    }

    #[test]
    fn what_nobody_confirms_here_is_forgotten_once_there_is_no_room() {
        let (doubts, clock) = doubts(None);
        let old: Vec<Record> = (0..10_000).map(|n| record(n, "k", Vec::new())).collect();
        drop(doubts.on_their_way(&old.iter().collect::<Vec<_>>()));
        at(&clock, FORGET_AFTER);
        drop(doubts.on_their_way(&[&record(20_000, "k", Vec::new())]));
        assert_eq!(counts(&doubts), (1, 0));
    }

    #[test]
    fn the_end_of_a_window_is_told_once_for_each_event() {
        let (doubts, clock) = doubts(None);
        let told = |doubts: &Doubts| {
            doubts.tell();
            doubts.lock().listed.values().filter(|doubt| doubt.told).count()
        };
        drop(doubts.on_their_way(&[&record(1, "k", Vec::new())]));
        at(&clock, minutes(8) - Duration::from_millis(1));
        assert_eq!(told(&doubts), 0);
        drop(doubts.on_their_way(&[&record(2, "k", Vec::new())]));
        at(&clock, minutes(8));
        assert_eq!(told(&doubts), 1);
        let later = minutes(16) - Duration::from_millis(1);
        assert_eq!(doubts.lock().look_at, Some(later));
        at(&clock, later);
        assert_eq!(told(&doubts), 2);
        assert_eq!(doubts.lock().look_at, None);
    }
}
