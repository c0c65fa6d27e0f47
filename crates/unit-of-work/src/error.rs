//! Why a commit saved nothing.
//!
//! What lives here: `CommitError` and its making from a store's answer. What does not: the
//! reactions to it, which are the caller's.
//! Invariant: whatever the variant, the unit of work still holds all that it held.

use std::time::Duration;

use postrider_core::{DocumentError, ETag, Error, ErrorKind};

/// Any error of the application.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a commit saved nothing.
#[derive(Debug)]
pub enum CommitError {
    /// A document to update or delete does not exist.
    NotFound {
        /// Which.
        id: String,
    },
    /// A document to create exists already, or an event's id was saved before.
    Conflict {
        /// Which.
        id: String,
    },
    /// Somebody else changed the document: read it again and repeat the change.
    PreconditionFailed {
        /// Which.
        id: String,
        /// The version that is current, if the store says.
        current_etag: Option<ETag>,
    },
    /// More than one commit may hold; the text names the limit.
    TooLarge(String),
    /// The store asks for patience: commit the same unit of work again, later.
    Throttled {
        /// The wait that it named, if any.
        retry_after: Option<Duration>,
    },
    /// The unit of work can't be saved as it stands; the error says what to change.
    Invalid(Error),
    /// An event handler refused; the error is its own.
    Handler(BoxError),
    /// Anything else of the store: see its kind. After a `Transient` error the outcome may be
    /// unknown; committing the same unit of work again is safe, because it repeats the same ids.
    Store(Error),
}

impl From<DocumentError> for CommitError {
    fn from(error: DocumentError) -> Self {
        match error {
            DocumentError::NotFound { id } => Self::NotFound { id },
            DocumentError::Conflict { id } => Self::Conflict { id },
            DocumentError::PreconditionFailed { id, current_etag } => {
                Self::PreconditionFailed { id, current_etag }
            }
            DocumentError::TooLarge(what) => Self::TooLarge(what),
            DocumentError::Store(error) => match error.kind() {
                ErrorKind::Throttled { retry_after } => Self::Throttled { retry_after },
                ErrorKind::Transient
                | ErrorKind::Permanent
                | ErrorKind::Fenced
                | ErrorKind::Unsupported
                | ErrorKind::Corrupt => Self::Store(error),
            },
        }
    }
}

impl std::fmt::Display for CommitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotFound { id } => write!(f, "document {id} does not exist"),
            Self::Conflict { id } => write!(f, "document or event {id} exists already"),
            Self::PreconditionFailed { id, .. } => {
                write!(f, "document {id} was changed by somebody else; read it again")
            }
            Self::TooLarge(what) => f.write_str(what),
            Self::Throttled { retry_after: Some(wait) } => {
                write!(f, "the store is busy; try again in {} ms", wait.as_millis())
            }
            Self::Throttled { retry_after: None } => f.write_str("the store is busy; try later"),
            Self::Invalid(_) => f.write_str("the unit of work can't be saved as it stands"),
            Self::Handler(_) => f.write_str("an event handler refused the commit"),
            Self::Store(_) => f.write_str("the document store failed"),
        }
    }
}

impl std::error::Error for CommitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Invalid(error) | Self::Store(error) => Some(error),
            Self::Handler(error) => Some(&**error),
            Self::NotFound { .. }
            | Self::Conflict { .. }
            | Self::PreconditionFailed { .. }
            | Self::TooLarge(_)
            | Self::Throttled { .. } => None,
        }
    }
}
