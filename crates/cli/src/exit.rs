//! How the process ends.
//!
//! What lives here: the exit codes and which error means which. What does not: printing.
//! Invariant: the codes are those that `--help` and docs/operations.md list.

use std::fmt;
use std::process::ExitCode;

use postrider_core::{Error, ErrorKind};

use crate::config::Problems;

/// It failed, or not everything could be done.
pub(crate) const FAILURE: u8 = 1;
/// The command line or the configuration is wrong.
pub(crate) const USAGE: u8 = 2;
/// The source is not ready.
pub(crate) const NOT_READY: u8 = 3;
/// Stopped by a second signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// What was asked for makes no sense; nothing was started.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Marks an error as "the source is not ready"; the text says what was tried.
#[derive(Debug)]
pub(crate) struct NotReady(pub(crate) String);

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotReady {}

/// Names the call to the source that failed, and marks it as "not ready" where the source is in
/// trouble rather than the question wrong.
pub(crate) trait SourceContext<T> {
    /// `what` is a verb and an object.
    ///
    /// # Errors
    /// The call's own.
    fn source_context(self, what: impl Into<String>) -> anyhow::Result<T>;
}

impl<T> SourceContext<T> for postrider_core::Result<T> {
    fn source_context(self, what: impl Into<String>) -> anyhow::Result<T> {
        self.map_err(|error| {
            let not_ready = is_not_ready(&error);
            let error = anyhow::Error::from(error);
            if not_ready {
                error.context(NotReady(what.into()))
            } else {
                error.context(what.into())
            }
        })
    }
}

fn is_not_ready(error: &Error) -> bool {
    match error.kind() {
        // One without a cause below it is the store's own answer: a consumer is at work.
        ErrorKind::Transient => std::error::Error::source(error).is_some(),
        ErrorKind::Throttled { .. } | ErrorKind::Corrupt => true,
        ErrorKind::Permanent | ErrorKind::Fenced | ErrorKind::Unsupported => false,
    }
}

/// The reader of our output went away: no reason to say anything.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

/// The exit code of an error.
pub(crate) fn code_of(error: &anyhow::Error) -> ExitCode {
    ExitCode::from(number_of(error))
}

fn number_of(error: &anyhow::Error) -> u8 {
    if error.downcast_ref::<Problems>().is_some() || error.downcast_ref::<Usage>().is_some() {
        USAGE
    } else if error.downcast_ref::<NotReady>().is_some() {
        NOT_READY
    } else {
        FAILURE
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn each_kind_of_error_has_its_code_also_below_a_context() {
        assert_eq!(number_of(&anyhow!("x")), FAILURE);
        assert_eq!(number_of(&anyhow!(Usage("x".to_owned())).context("parse")), USAGE);
        assert_eq!(number_of(&anyhow!("x").context(NotReady("open".to_owned()))), NOT_READY);
    }

    #[test]
    fn a_source_in_trouble_is_not_ready_and_a_refused_question_failed() {
        let number =
            |error: Error| number_of(&Err::<(), _>(error).source_context("x").unwrap_err());
        let locked = || Error::transient("locked").with_source(std::io::Error::other("code 5"));
        assert_eq!(number(locked()), NOT_READY);
        assert_eq!(number(Error::transient("in use")), FAILURE);
        assert_eq!(number(Error::corrupt("damaged")), NOT_READY);
        assert_eq!(number(Error::permanent("beyond the head")), FAILURE);
    }
}
