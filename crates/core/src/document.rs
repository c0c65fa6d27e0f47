//! The document seam: what a unit of work commits through.
//!
//! What lives here: documents with ETags, one-partition batches, and the typed failures of a
//! commit. What does not: entities and their events (`unit-of-work`).
//! Invariant: a batch is saved whole or not at all, events included.

use async_trait::async_trait;
use bytes::Bytes;

use crate::{Error, NewEvent, Timestamp};

/// The version of a stored document; changes with every write. Compared byte by byte, with its
/// quotes, as HTTP shows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ETag(String);

impl ETag {
    /// Takes a store's or an HTTP header's text, quotes included.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, quotes included.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for ETag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A stored document: the article's envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Unique within its partition key.
    pub id: String,
    /// The logical partition.
    pub partition_key: String,
    /// What kind of document, for example `contact`.
    pub document_type: String,
    /// The content: JSON text, kept as given.
    pub data: Bytes,
    /// Seconds to live; -1 for ever.
    pub ttl_seconds: i64,
    /// Whether it is softly deleted: left out of pages, still readable by id.
    pub deleted: bool,
    /// The version that was read; ignored when writing.
    pub etag: ETag,
    /// When it was last written, in the database's time; ignored when writing.
    pub written_at: Timestamp,
}

/// The answer to a point read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DocumentRead {
    /// Here it is.
    Found(Document),
    /// The caller's version is still the current one.
    NotModified,
    /// There is none.
    NotFound,
}

/// Which page of documents to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRequest {
    /// Documents of this type only.
    pub document_type: String,
    /// Most documents; at least 1.
    pub size: u32,
    /// Where the last page ended, as it said; opaque, and checked.
    pub continuation: Option<String>,
}

/// One page; softly deleted documents are left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentPage {
    /// In a stable order of the store's choice.
    pub documents: Vec<Document>,
    /// Where the next page begins; none at the end.
    pub continuation: Option<String>,
}

/// One write within a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DocumentOperation {
    /// Must not exist yet.
    Create(Document),
    /// Must exist, in the given version if one is given.
    Replace {
        /// The new content.
        document: Document,
        /// The version that must be current.
        if_match: Option<ETag>,
    },
    /// Must exist, in the given version if one is given.
    Delete {
        /// Which document.
        id: String,
        /// The version that must be current.
        if_match: Option<ETag>,
    },
}

/// Writes and events that are saved together, all in one logical partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentBatch {
    /// The logical partition of every document in it.
    pub partition_key: String,
    /// In order.
    pub operations: Vec<DocumentOperation>,
    /// Appended in the same transaction, in order.
    pub events: Vec<NewEvent>,
}

/// A document that was saved, with its new version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedDocument {
    /// Which document.
    pub id: String,
    /// Its new version; for a deleted one, the last it had.
    pub etag: ETag,
}

/// Why a commit saved nothing.
#[derive(Debug)]
pub enum DocumentError {
    /// A document to replace or delete does not exist.
    NotFound {
        /// Which.
        id: String,
    },
    /// A document to create exists already, or an event's id was appended before.
    Conflict {
        /// Which.
        id: String,
    },
    /// The version asked for is not the current one.
    PreconditionFailed {
        /// Which.
        id: String,
        /// The version that is current.
        current_etag: Option<ETag>,
    },
    /// Above the store's limits; the text names the limit.
    TooLarge(String),
    /// Anything else: reach for its kind.
    Store(Error),
}

impl std::fmt::Display for DocumentError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotFound { id } => write!(f, "document {id} does not exist"),
            Self::Conflict { id } => write!(f, "document or event {id} exists already"),
            Self::PreconditionFailed { id, .. } => {
                write!(f, "document {id} was changed by somebody else; read it again")
            }
            Self::TooLarge(what) => f.write_str(what),
            Self::Store(_) => f.write_str("the document store failed"),
        }
    }
}

impl std::error::Error for DocumentError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Store(error) => Some(error),
            Self::NotFound { .. }
            | Self::Conflict { .. }
            | Self::PreconditionFailed { .. }
            | Self::TooLarge(_) => None,
        }
    }
}

impl From<Error> for DocumentError {
    fn from(error: Error) -> Self {
        Self::Store(error)
    }
}

/// Documents beside the outbox, in the same database.
#[async_trait]
pub trait DocumentStore: Send + Sync {
    /// One document by id. With `if_none_match`, its content is spared when unchanged.
    async fn read(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<DocumentRead, Error>;

    /// One page of a type's documents.
    ///
    /// # Errors
    /// `Permanent` for a continuation that is not the store's own.
    async fn read_page(&self, request: &PageRequest) -> Result<DocumentPage, Error>;

    /// Saves all operations and events, or nothing. One answer for each operation, in order. A
    /// batch without operations and events does nothing.
    ///
    /// # Errors
    /// The first operation that fails decides; see [`DocumentError`].
    async fn commit(&self, batch: DocumentBatch) -> Result<Vec<SavedDocument>, DocumentError>;
}
