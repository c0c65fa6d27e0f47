//! Failpoints for the fault tests: die at the N-th passage of a named place.
//!
//! What lives here: arming one by the variable `POSTRIDER_FAILPOINT="name:N"`. What does not: the
//! places, which the relay and the stores name.
//! Invariant: without the cargo feature `failpoints` nothing of it is in the binary.

/// Arms the failpoint that the environment names, if it names one.
///
/// # Errors
/// When the variable is not `name:N`.
#[cfg(feature = "failpoints")]
pub(crate) fn arm() -> anyhow::Result<()> {
    use std::sync::atomic::{AtomicU64, Ordering};

    use anyhow::Context;

    use crate::exit::Usage;

    const VARIABLE: &str = "POSTRIDER_FAILPOINT";
    let Ok(text) = std::env::var(VARIABLE) else { return Ok(()) };
    let wrong = || Usage(format!("{VARIABLE} is {text:?}; write name:N, N from 1"));
    let (name, count) = text.rsplit_once(':').with_context(wrong)?;
    let fatal: u64 = count.parse().ok().filter(|count| *count > 0).with_context(wrong)?;
    let passed = AtomicU64::new(0);
    let die = move || {
        if passed.fetch_add(1, Ordering::SeqCst) + 1 == fatal {
            // As an outside kill -9: no destructor runs and nothing is flushed.
            let own = rustix::process::getpid();
            let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        }
    };
    fail::cfg_callback(name, die).map_err(|error| anyhow::anyhow!(error)).context("arm failpoint")
}

/// Nothing to arm in this build.
///
/// # Errors
/// None in this build.
#[cfg(not(feature = "failpoints"))]
pub(crate) fn arm() -> anyhow::Result<()> {
    Ok(())
}
