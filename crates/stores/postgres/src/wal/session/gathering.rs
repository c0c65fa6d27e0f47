//! When to let a stream gather before it is read again.
//!
//! What lives here: the decision, and the wait. What does not: reading (`../session.rs`).
//! Invariant: a stream that brings few events is read at once, and one that brings more than is
//! taken at a time is, too; nothing waits longer than one rest.
//!
//! A server that is no faster than its reader sends each row by itself. To read it, hand it on and
//! wake somebody for it takes many times what the row takes, and takes it from the server where
//! both are on one machine. So while many rows come, they are read some milliseconds' worth at a
//! time.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Events are counted over at least this long.
const WINDOW: Duration = Duration::from_millis(8);
/// From so many events a millisecond on, that long a rest: some ten of them come meanwhile.
const RESTS: [(u128, Duration); 2] = [(8, Duration::from_millis(4)), (4, Duration::from_millis(2))];

/// How many events come, and the rest between two reads.
pub(super) struct Gathering {
    since: Instant,
    events: u128,
    rest: Option<Duration>,
    until: Option<Instant>,
}

impl Gathering {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, events: 0, rest: None, until: None }
    }

    /// Takes note of so many events that were read at once. A rest begins if many come, unless it
    /// was as much as is read at once.
    pub(super) fn read(&mut self, events: usize, was_full: bool, now: Instant) {
        self.events += events as u128;
        let passed = now - self.since;
        if passed >= WINDOW {
            let busy = |(rate, _): &&(u128, Duration)| self.events >= rate * passed.as_millis();
            self.rest = RESTS.iter().find(busy).map(|(_, rest)| *rest);
            self.since = now;
            self.events = 0;
        }
        self.until = self.rest.filter(|_| !was_full).map(|rest| now + rest);
    }

    /// Whether nothing is to be read at present.
    pub(super) fn rests(&self) -> bool {
        self.until.is_some()
    }

    /// Waits for the end of the rest. Cancel-safe.
    pub(super) async fn rested(&mut self) {
        if let Some(until) = self.until {
            sleep_until(until).await;
            self.until = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Reads of `events` each millisecond; how long the last of them rests.
    fn rest(gathering: &mut Gathering, now: &mut Instant, events: usize, times: u32) -> Duration {
        for _ in 0..times {
            *now += MS;
            gathering.read(events, false, *now);
        }
        gathering.until.map_or(Duration::ZERO, |until| until - *now)
    }

    #[test]
    fn only_a_stream_of_many_events_gathers_and_it_stops_when_there_are_few() {
        let mut now = Instant::now();
        let mut gathering = Gathering::new(now);
        assert_eq!(rest(&mut gathering, &mut now, 3, 100), Duration::ZERO, "few");
        assert_eq!(rest(&mut gathering, &mut now, 5, 16), 2 * MS, "some");
        assert_eq!(rest(&mut gathering, &mut now, 50, 16), 4 * MS, "many");
        gathering.read(50, true, now);
        assert!(!gathering.rests(), "there is more already");
        gathering.read(50, false, now);
        assert!(gathering.rests());
        assert_eq!(rest(&mut gathering, &mut now, 1, 17), Duration::ZERO, "few again");
        assert_eq!(rest(&mut gathering, &mut now, 50, 16), 4 * MS, "many again");
        now += Duration::from_secs(1);
        assert_eq!(rest(&mut gathering, &mut now, 50, 1), Duration::ZERO, "after a pause");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_ends() {
        let began = Instant::now();
        let mut gathering = Gathering::new(began - WINDOW);
        gathering.read(1_000, false, began);
        gathering.rested().await;
        assert_eq!((began.elapsed(), gathering.rests()), (4 * MS, false));
        gathering.rested().await;
        assert_eq!(began.elapsed(), 4 * MS, "once");
    }
}
