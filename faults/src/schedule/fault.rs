//! What may go wrong in a schedule.
//!
//! What lives here: the kinds of faults. What does not: which of them a schedule has, and what they
//! do.
//! Invariant: a fault says all that it takes to make it, so that a plan that was written down can
//! be read.

use std::time::Duration;

use serde::Serialize;

/// How the receiver answers while it has an outage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Outage {
    /// 500 to everything.
    ServerError,
    /// 429 with `Retry-After: 1` to everything.
    Throttled,
    /// Requests are read, taken, and never answered.
    Silent,
    /// Connections are cut before anything is read.
    Refused,
}

/// One thing that goes wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum Fault {
    /// A relay dies by SIGKILL and is started again.
    Kill {
        /// Which relay.
        slot: usize,
        /// How long until its next start.
        down: Duration,
    },
    /// A relay dies at a named place, and is started again.
    Failpoint {
        /// Which relay.
        slot: usize,
        /// The place.
        name: &'static str,
        /// At which passage.
        count: u32,
    },
    /// A relay is stopped by SIGSTOP for longer than its lease lasts, then goes on.
    Pause {
        /// Which relay.
        slot: usize,
        /// How long.
        length: Duration,
    },
    /// A relay is told to stop by SIGTERM and another is started.
    HandOver {
        /// Which relay.
        slot: usize,
    },
    /// A writer dies by SIGKILL, perhaps in the middle of a transaction.
    KillWriter {
        /// Which writer.
        writer: usize,
    },
    /// A process that is neither relay nor writer holds the database's write lock.
    Lock {
        /// How long.
        length: Duration,
    },
    /// The disk that the schedule has made small is full.
    FillDisk {
        /// How long.
        length: Duration,
    },
    /// The wall clock of all processes jumps.
    MoveClock {
        /// How far, forth or back.
        by_seconds: i64,
    },
    /// Somebody asks for parked events to be sent again while they are still refused.
    Requeue,
    /// A process that is no more has left the beginning of a line at the end of the file.
    TearLine,
    /// The receiver takes nothing, or does not say so.
    Outage {
        /// How.
        kind: Outage,
        /// How long.
        length: Duration,
    },
    /// The database server ends and is started again.
    RestartServer {
        /// How it ends.
        how: ServerEnd,
        /// How long until its next start.
        down: Duration,
    },
    /// Sessions are ended by `pg_terminate_backend`.
    Terminate {
        /// Whose.
        whose: Side,
    },
    /// The way to the database is disturbed.
    Wire {
        /// Whose.
        whose: Side,
        /// How.
        how: WireFault,
        /// How long, where it lasts.
        length: Duration,
    },
    /// A transaction that has written events stays open, or is prepared, for a while.
    OpenTransaction {
        /// How long.
        length: Duration,
        /// Whether it is prepared meanwhile.
        prepared: bool,
    },
    /// The server takes no writes.
    ReadOnly {
        /// How long.
        length: Duration,
    },
    /// The number of partitions is doubled.
    RaisePartitions,
    /// The replication slot is taken away, or moved, from under whoever reads it.
    Slot {
        /// What becomes of it.
        how: SlotFault,
        /// How often: each time once it is there again.
        times: u32,
        /// How long after it is there again.
        pause: Duration,
    },
    /// The publication lacks the outbox, or is gone, for a while.
    Publication {
        /// Whether it is gone.
        dropped: bool,
        /// How long.
        length: Duration,
    },
    /// A copy of the server is promoted, and takes its place a while later: what was committed
    /// meanwhile never was.
    Replace {
        /// How much later.
        lag: Duration,
    },
}

/// How a database server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ServerEnd {
    /// In order.
    Fast,
    /// At once; it recovers from its log.
    Immediate,
    /// By SIGKILL to all of its processes.
    Kill,
}

/// Whose sessions and connections a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Side {
    /// One relay's.
    Relay(usize),
    /// All relays'.
    Relays,
    /// The writers'.
    Writers,
    /// Everybody's.
    All,
}

/// What happens on the way to a database server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum WireFault {
    /// Connections are closed.
    Close,
    /// Connections are reset.
    Reset,
    /// Every connection is closed after so many bytes of answers.
    CutAfter(u64),
    /// What is sent is swallowed; then connections are closed.
    BlackHole,
    /// What is sent is held back, and delivered late.
    Freeze,
    /// Each piece is late by so many milliseconds.
    Delay(u64),
    /// New connections are refused, and open ones reset.
    Refuse,
}

/// What becomes of a replication slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum SlotFault {
    /// It is dropped.
    Drop,
    /// It is moved to the end of the log.
    Advance,
    /// The server gives it up, because too much log is kept for it.
    Lose,
}
