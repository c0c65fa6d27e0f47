//! The repository: reads entities back from their documents.
//!
//! What lives here: point reads and pages. What does not: writing; a unit of work does it.
//! Invariant: a softly deleted entity is not found, whatever version the caller has of it.

use std::marker::PhantomData;
use std::sync::Arc;

use postrider_core::{Document, DocumentRead, DocumentStore, ETag, Error, PageRequest, Result};

use crate::Entity;

/// Entities of one type in a store.
pub struct Repository<T, S: ?Sized> {
    store: Arc<S>,
    entity: PhantomData<fn() -> T>,
}

/// The answer to a point read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntityRead<T> {
    /// Here it is, in this version.
    Found(T, ETag),
    /// The caller's version is still the current one.
    NotModified,
    /// There is none, or it was deleted.
    NotFound,
}

/// One page of entities with their versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntityPage<T> {
    /// In a stable order of the store's choice.
    pub entities: Vec<(T, ETag)>,
    /// Where the next page begins; none at the end.
    pub continuation: Option<String>,
}

impl<T: Entity, S: DocumentStore + ?Sized> Repository<T, S> {
    /// The entities of type `T` in `store`.
    pub fn new(store: Arc<S>) -> Self {
        Self { store, entity: PhantomData }
    }

    /// One entity whose partition key is its id.
    ///
    /// # Errors
    /// As the store's `read`; [`ErrorKind::Corrupt`](postrider_core::ErrorKind::Corrupt) if the
    /// document is no `T`.
    pub async fn read(&self, id: &str, if_none_match: Option<&ETag>) -> Result<EntityRead<T>> {
        self.read_in(id, id, if_none_match).await
    }

    /// One entity of a logical partition.
    ///
    /// # Errors
    /// As [`Repository::read`].
    pub async fn read_in(
        &self,
        partition_key: &str,
        id: &str,
        if_none_match: Option<&ETag>,
    ) -> Result<EntityRead<T>> {
        // The version is compared here and not by the store: its "not modified" would not tell
        // whether the version that both know is a deleted one.
        let document = match self.store.read(partition_key, id, None).await? {
            DocumentRead::Found(document) => document,
            DocumentRead::NotModified | DocumentRead::NotFound => return Ok(EntityRead::NotFound),
        };
        if document.deleted || document.document_type != T::TYPE {
            return Ok(EntityRead::NotFound);
        }
        if if_none_match == Some(&document.etag) {
            return Ok(EntityRead::NotModified);
        }
        let (entity, etag) = to_entity(document)?;
        Ok(EntityRead::Found(entity, etag))
    }

    /// One page of at most `size` entities, from where the last one ended.
    ///
    /// # Errors
    /// `Permanent` for a continuation that is not the store's own; `Corrupt` as above.
    pub async fn read_page(
        &self,
        size: u32,
        continuation: Option<String>,
    ) -> Result<EntityPage<T>> {
        let request = PageRequest { document_type: T::TYPE.to_owned(), size, continuation };
        let page = self.store.read_page(&request).await?;
        let entities = page.documents.into_iter().map(to_entity).collect::<Result<_>>()?;
        Ok(EntityPage { entities, continuation: page.continuation })
    }
}

impl<T, S: ?Sized> Clone for Repository<T, S> {
    fn clone(&self) -> Self {
        Self { store: Arc::clone(&self.store), entity: PhantomData }
    }
}

fn to_entity<T: Entity>(document: Document) -> Result<(T, ETag)> {
    let entity = serde_json::from_slice(&document.data).map_err(|e| {
        let what = format!("document {} can't be read as a {}", document.id, T::TYPE);
        Error::corrupt(what).with_source(e)
    })?;
    Ok((entity, document.etag))
}
