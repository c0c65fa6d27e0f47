//! Real processes under injected faults, and the proof that nothing was lost.
//!
//! What lives here: schedules of faults, the processes and surroundings that they disturb, and the
//! judgement of what arrived. What does not: the oracle's counts (`postrider-conformance`), and
//! anything of the relay, which is only run as the binary that users have.
//! Invariant: a schedule is derived from its seed and number alone and can be played again; what is
//! true is read from the database's business rows, never from what a relay says.
//!
//! ```text
//! writers ──▶ database ──▶ postrider run (killed, stopped, starved …) ──▶ receiver or file
//!                 │                                                           │
//!                 └──────────── truth ───────▶ judge ◀────── arrived ─────────┘
//! ```

pub mod allowance;
pub mod answer;
pub mod broker;
pub mod bus;
pub mod campaign;
pub mod clock;
pub mod cluster;
pub mod cosmos;
pub mod deliveries;
pub mod figure;
pub mod lines;
pub mod outage;
pub mod play;
pub mod receiver;
pub mod relays;
pub mod request;
pub mod schedule;
pub mod stage;
pub mod takeover;
pub mod verdict;
pub mod watch;
pub mod world;
pub mod writer;
