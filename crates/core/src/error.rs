//! The one error of the seams, and the six kinds a caller may branch on.
//!
//! What lives here: `Error` and `ErrorKind`. What does not: the mapping from driver codes to kinds,
//! which each store and sink keeps in its own `error.rs`.
//! Invariant: a kind is a *reaction*; two errors that call for the same reaction share a kind.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

/// Result of every fallible call at a seam.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a caller should react to an [`Error`].
///
/// Deliberately not `#[non_exhaustive]`: a seventh kind must break every `match`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same call may succeed later: connection lost, database locked, time-out, 5xx.
    Transient,
    /// The other side asks for patience.
    Throttled {
        /// The wait that the server named, if it named one.
        retry_after: Option<Duration>,
    },
    /// The same call can never succeed: too large, refused, unroutable, invalid.
    Permanent,
    /// Another relay holds the lease by now; stop and write nothing more.
    Fenced,
    /// This store or sink lacks the capability.
    Unsupported,
    /// Stored state is damaged or from a newer version; a person has to look.
    Corrupt,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transient => "transient",
            Self::Throttled { .. } => "throttled",
            Self::Permanent => "permanent",
            Self::Fenced => "fenced",
            Self::Unsupported => "unsupported",
            Self::Corrupt => "corrupt",
        })
    }
}

/// What went wrong at a seam: a kind to branch on, a context to read, and the cause.
///
/// `Display` shows this layer only; walk [`StdError::source`] (or use [`Error::chain`]) for the
/// rest. Never holds a payload or a secret.
pub struct Error {
    kind: ErrorKind,
    context: Cow<'static, str>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error without a cause below it. `context` names the place and the remedy.
    pub fn new(kind: ErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, context: context.into(), source: None }
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Shorthand for a [`ErrorKind::Transient`] error.
    pub fn transient(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Transient, context)
    }

    /// Shorthand for a [`ErrorKind::Permanent`] error.
    pub fn permanent(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Permanent, context)
    }

    /// Shorthand for a [`ErrorKind::Fenced`] error.
    pub fn fenced(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Fenced, context)
    }

    /// Shorthand for a [`ErrorKind::Unsupported`] error.
    pub fn unsupported(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unsupported, context)
    }

    /// Shorthand for a [`ErrorKind::Corrupt`] error.
    pub fn corrupt(context: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Corrupt, context)
    }

    /// The only thing a caller may branch on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// This layer and every cause below it, joined by `: `, for a log line or a dead letter.
    pub fn chain(&self) -> String {
        let mut text = self.context.to_string();
        let mut cause = self.source();
        while let Some(inner) = cause {
            text.push_str(": ");
            text.push_str(&inner.to_string());
            cause = inner.source();
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.chain(), self.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_shows_its_own_layer_and_chain_shows_all() {
        let inner = Error::transient("connection reset");
        let outer = Error::permanent("read page of partition 3").with_source(inner);
        assert_eq!(outer.to_string(), "read page of partition 3");
        assert_eq!(outer.chain(), "read page of partition 3: connection reset");
        assert_eq!(outer.kind(), ErrorKind::Permanent);
    }
}
