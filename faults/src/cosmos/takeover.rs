//! How soon the ranges of a relay that was killed are served by others.
//!
//! What lives here: the measurement, in real time with the default lease, three relays and twelve
//! ranges. What does not: the same of a database in a file (`../takeover.rs`), faults in general.
//! Invariant: all ranges are served when the dead relay holds none of them, and an event of each
//! key that was saved after the kill has arrived.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use postrider_core::limits::LEASE_TTL_MS;
use rustix::process::Signal;

use super::account::Account;
use super::{PATIENCE, setup};
use crate::bus::Bus;
use crate::figure::Figure;
use crate::relays::{Relay, Setup};

const RANGES: u32 = 12;
const RELAYS: usize = 3;
const LEASE_TTL: Duration = Duration::from_millis(LEASE_TTL_MS);
/// A killed relay's ranges are served again within its lease and this.
const AFTER_LEASE: Duration = Duration::from_secs(1);
/// Keys of the events that tell: with so many each of the ranges has some.
const PROBES: usize = 120;

/// Measures `rounds` take-overs.
///
/// # Errors
/// When the machine refuses, or the relays never share the ranges evenly.
pub fn takeover(binary: &Path, rounds: usize) -> Result<Vec<Figure>> {
    let folder = tempfile::tempdir().context("make a folder")?;
    let (account, bus) = (Account::start(RANGES, &[])?, Bus::start()?);
    let setup = Setup { lease_ttl: LEASE_TTL, ..setup(binary, folder.path(), &account, &bus) };
    let mut relays = Vec::new();
    for number in 0..RELAYS {
        relays.push(setup.start(number, number, None)?);
    }
    let mut times = Vec::new();
    for round in 0..rounds {
        eventually("the relays share the ranges evenly", || are_even(&account, &relays))?;
        // One that has been there for a while, and never the same.
        let mut dead = relays.remove(0);
        let (took, late) = one(&account, &bus, &mut dead, round)?;
        eprintln!("round {round}: {took:?}, of which the events took {late:?}");
        times.push(took);
        relays.push(setup.start(RELAYS + round, 0, None)?);
    }
    for relay in &mut relays {
        relay.signal(Signal::TERM)?;
        relay.finish(PATIENCE)?;
    }
    times.sort();
    let goal = LEASE_TTL + AFTER_LEASE;
    let line = |which: &str, time: Duration, goal: Option<Duration>| {
        let figure = format!("cosmos kill-9 {which}");
        Figure::at_most("takeover", figure, ms(time), "ms", goal.map(ms))
    };
    let worst = times.last().copied().unwrap_or(Duration::MAX);
    Ok(vec![line("median", times[times.len() / 2], None), line("worst", worst, Some(goal))])
}

fn ms(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 10_000.0).round() / 10.0
}

/// Whether each relay holds its third.
fn are_even(account: &Account, relays: &[Relay]) -> Result<bool> {
    let held = account.holders()?;
    let even = relays.iter().all(|relay| {
        let own = held.iter().filter(|holder| is_of(holder, relay)).count();
        own == RANGES as usize / RELAYS
    });
    Ok(even)
}

/// Relays hold leases under names that have their process ids in them.
fn is_of(holder: &str, relay: &Relay) -> bool {
    holder.contains(&format!("-{}-", relay.process_id()))
}

/// From the kill until all ranges are served, and how long of it the last events took.
fn one(
    account: &Account,
    bus: &Bus,
    dead: &mut Relay,
    round: usize,
) -> Result<(Duration, Duration)> {
    let begun = Instant::now();
    dead.kill()?;
    let events = account.probe(round, PROBES)?;
    eventually("its leases are taken over", || {
        Ok(!account.holders()?.iter().any(|holder| is_of(holder, dead)))
    })?;
    let taken = begun.elapsed();
    eventually("all ranges are served", || Ok(bus.has(&events)))?;
    Ok((begun.elapsed(), begun.elapsed().saturating_sub(taken)))
}

fn eventually(what: &str, mut attempt: impl FnMut() -> Result<bool>) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !attempt()? {
        ensure!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
