//! The history of a cluster's timelines: where each one ended and the next one began.
//!
//! What lives here: reading it from the server, and whether a place of one timeline lies on the way
//! to another. What does not: who asks (`mirror/adopt.rs`).
//! Invariant: a place counts as shared only if all of the log up to it is the same on both sides.

use postrider_core::{Error, Result};

use super::Wal;
use super::lsn::Lsn;
use super::position::WalPlace;
use super::wire::Walsender;

/// Where a timeline ended, because the next one in the list branched off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Branch {
    pub(crate) timeline: u32,
    pub(crate) end: Lsn,
}

/// All timelines before one, the oldest first.
pub(crate) type History = Vec<Branch>;

/// Reads a history file: `1<tab>0/3000158<tab>reason` a line.
///
/// # Errors
/// `Corrupt` for a line that is none.
pub(crate) fn parse(text: &str) -> Result<History> {
    let lines =
        text.lines().map(str::trim).filter(|line| !(line.is_empty() || line.starts_with('#')));
    let branch = |line: &str| {
        let mut parts = line.split_whitespace();
        let timeline = parts.next().and_then(|number| number.parse().ok());
        let end = parts.next().map(Lsn::parse).transpose()?;
        let both = timeline.zip(end).map(|(timeline, end)| Branch { timeline, end });
        both.ok_or_else(|| Error::corrupt("the server's history of timelines can't be read"))
    };
    lines.map(branch).collect()
}

/// The history of a timeline, from the server. The first one has none, and no file either.
///
/// # Errors
/// The server's: 58P01 where it has no file of that timeline.
pub(crate) async fn read(wal: &Wal, timeline: u32) -> Result<History> {
    if timeline <= 1 {
        return Ok(History::new());
    }
    let mut walsender = Walsender::connect(wal.store.inner.connections.servers()).await?;
    let rows = walsender.query(&format!("TIMELINE_HISTORY {timeline}")).await?;
    let content = rows.first().and_then(|row| row.get(1)).and_then(Option::as_deref);
    parse(content.ok_or_else(|| Error::corrupt("the server tells no history of its timeline"))?)
}

/// How a place of an earlier moment lies to the timeline that is written now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// On the same timeline: all before is the same, unless an older copy of the files went on
    /// under the same number, which its history does not tell.
    SameTimeline,
    /// On one before, below the point at which the next one branched off.
    Shared,
    /// Not on the way; why.
    Astray(String),
}

/// Compares a place and the history of its own timeline with the present timeline and its history.
pub(crate) fn way(place: &WalPlace, past: &[Branch], now: u32, present: &[Branch]) -> Way {
    let own = place.timeline;
    if own == now {
        return match past == present {
            true => Way::SameTimeline,
            false => Way::Astray(format!("timeline {now} branched off elsewhere there")),
        };
    }
    let Some(at) = present.iter().position(|branch| branch.timeline == own) else {
        return Way::Astray(format!("timeline {own} is not in the history of timeline {now}"));
    };
    if present[..at] != *past {
        return Way::Astray(format!("timeline {own} branched off elsewhere there"));
    }
    // A commit record that begins at the end itself was never replayed: of its transaction nothing
    // may count.
    let end = present[at].end;
    if place.key() <= (end, 0) {
        return Way::Shared;
    }
    Way::Astray(format!("timeline {own} ended at {end}, before it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(timeline: u32, lsn: u64, ordinal: u32) -> WalPlace {
        WalPlace { system: 7, timeline, lsn: Lsn(lsn), ordinal }
    }

    #[test]
    fn a_history_file_is_read() {
        let text = "1\t0/3000158\tno recovery target specified\n\n# a word\n2\t1/10\tbefore x\n";
        let branch = |timeline, end| Branch { timeline, end: Lsn(end) };
        assert_eq!(parse(text).unwrap(), [branch(1, 0x300_0158), branch(2, 0x1_0000_0010)]);
        assert_eq!(parse("").unwrap(), []);
        for text in ["1", "x\t0/1", "1\t0-1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_what_lies_below_the_branch_is_shared() {
        let branch = |timeline, end| Branch { timeline, end: Lsn(end) };
        let history = [branch(1, 100), branch(2, 200)];
        let way = |at, past: &[Branch]| way(&at, past, 3, &history);
        assert_eq!(way(place(1, 96, 7), &[]), Way::Shared);
        assert_eq!(way(place(1, 100, 0), &[]), Way::Shared);
        assert!(matches!(way(place(1, 100, 1), &[]), Way::Astray(_)), "its record is not there");
        assert!(matches!(way(place(1, 101, 0), &[]), Way::Astray(_)));
        assert_eq!(way(place(2, 150, 1), &history[..1]), Way::Shared);
        assert!(matches!(way(place(2, 250, 0), &history[..1]), Way::Astray(_)));
        assert!(matches!(way(place(2, 150, 1), &[branch(1, 90)]), Way::Astray(_)), "another 2");
        assert_eq!(way(place(3, 900, 1), &history), Way::SameTimeline);
        assert!(matches!(way(place(3, 900, 1), &history[..1]), Way::Astray(_)), "another 3");
        assert!(matches!(way(place(4, 150, 1), &history), Way::Astray(_)), "of the future");
    }
}
