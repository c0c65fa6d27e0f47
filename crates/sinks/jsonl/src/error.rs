//! From the operating system's codes to error kinds.
//!
//! What lives here: the one mapping. What does not: what follows, which the relay decides.
//! Invariant: every failure of a file or pipe is `Transient`. None of them is about one event, so
//! none may park one: with the disk full, the folder read-only or the reader of a pipe gone, events
//! wait in the outbox until a person has put it right.

use std::fmt;
use std::io;
use std::sync::Arc;

use postrider_core::Error;

/// A failed step that concerned many events; cloned to each of them.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    step: &'static str,
    cause: Arc<io::Error>,
}

impl Failure {
    /// `step` is verb and object, for example "append to the file".
    pub(crate) fn new(step: &'static str, cause: io::Error) -> Self {
        Self { step, cause: Arc::new(cause) }
    }

    /// The error at the seam.
    pub(crate) fn to_error(&self) -> Error {
        let remedy = match self.cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ": the disk is full; free some space"
            }
            io::ErrorKind::BrokenPipe => ": nobody reads the output any more; start the reader",
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                ": writing is not allowed; check owner and mode of the file and its folder"
            }
            io::ErrorKind::NotFound => ": its folder does not exist; create it",
            io::ErrorKind::IsADirectory => ": a folder is in its place; name a file",
            _ => "",
        };
        Error::transient(format!("{}{remedy}", self.step)).with_source(Shared(self.cause.clone()))
    }
}

/// One event's copy of the error that a whole call met.
pub(crate) fn share(error: &Error) -> Error {
    let copy = Error::new(error.kind(), error.to_string());
    match std::error::Error::source(error).map(ToString::to_string) {
        Some(cause) => copy.with_source(cause),
        None => copy,
    }
}

#[derive(Debug)]
struct Shared(Arc<io::Error>);

impl fmt::Display for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Shared {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::ErrorKind;

    #[test]
    fn every_code_is_transient_and_the_common_ones_name_a_remedy() {
        for (kind, remedy) in [
            (io::ErrorKind::StorageFull, "free some space"),
            (io::ErrorKind::QuotaExceeded, "free some space"),
            (io::ErrorKind::BrokenPipe, "start the reader"),
            (io::ErrorKind::PermissionDenied, "check owner and mode"),
            (io::ErrorKind::ReadOnlyFilesystem, "check owner and mode"),
            (io::ErrorKind::NotFound, "create it"),
            (io::ErrorKind::IsADirectory, "name a file"),
            (io::ErrorKind::Other, "append"),
        ] {
            let error = Failure::new("append to the file", kind.into()).to_error();
            assert_eq!(error.kind(), ErrorKind::Transient);
            assert!(error.to_string().contains(remedy), "{error}");
        }
    }
}
