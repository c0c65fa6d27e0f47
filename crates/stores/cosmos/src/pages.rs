//! Pages of a type's documents.
//!
//! What lives here: the query, pages and their continuations. What does not: reading by id.
//! Invariant: a continuation names the container and the type that it is of, and is refused for any
//! other; what comes after one is what a whole reading would have shown then.

use std::num::NonZeroU32;

use azure_data_cosmos::Query;
use azure_data_cosmos::feed::{ContinuationToken, FeedScope};
use azure_data_cosmos::options::{MaxItemCountHint, QueryOptions};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use futures_util::StreamExt;
use postrider_core::{DocumentPage, Error, PageRequest, Result};
use sha2::{Digest, Sha256};

use crate::CosmosStore;
use crate::document_json::{Stored, Wire};
use crate::error::failed;

const READ_PAGE: &str = "read a page of documents";
/// Most documents in a page, as the service has it.
const MAX_PAGE: u32 = 1_000;
/// Most requests for one page: a range without documents of the type answers with an empty one.
const MAX_REQUESTS: usize = 16;

/// A document's own content says of its deletion where the document does not (`document_json.rs`).
const OF_A_TYPE: &str = "SELECT * FROM c WHERE c.type = @type AND (\
    (IS_BOOL(c.deleted) AND c.deleted = false) OR \
    (NOT IS_BOOL(c.deleted) AND (NOT IS_BOOL(c.data.deleted) OR c.data.deleted = false)))";

impl CosmosStore {
    pub(crate) async fn page(&self, request: &PageRequest) -> Result<DocumentPage> {
        let size = request.size.clamp(1, MAX_PAGE) as usize;
        let mut token = match &request.continuation {
            None => None,
            Some(text) => Some(self.open_continuation(&request.document_type, text)?),
        };
        let mut documents = Vec::with_capacity(size);
        for _ in 0..MAX_REQUESTS {
            let missing = u32::try_from(size - documents.len()).unwrap_or(MAX_PAGE);
            let (found, next) = self.part(&request.document_type, missing, token).await?;
            documents.extend(found.into_iter().map(|wire| Stored::from(wire).document));
            token = next;
            if token.is_none() || documents.len() >= size {
                break;
            }
        }
        let continuation =
            token.map(|token| self.close_continuation(&request.document_type, &token));
        Ok(DocumentPage { documents, continuation })
    }

    /// At most `most` documents after a token, and the token after them; none at the end.
    async fn part(
        &self,
        document_type: &str,
        most: u32,
        token: Option<String>,
    ) -> Result<(Vec<Wire>, Option<String>)> {
        let most = NonZeroU32::new(most).unwrap_or(NonZeroU32::MIN);
        let mut options =
            QueryOptions::default().with_max_item_count(MaxItemCountHint::Limit(most));
        if let Some(token) = token {
            options = options.with_continuation_token(ContinuationToken::from_string(token));
        }
        let query = Query::from(OF_A_TYPE)
            .with_parameter("@type", document_type)
            .map_err(failed(READ_PAGE))?;
        let scope = FeedScope::full_container();
        let asked = self.container().query_items::<Wire>(query, scope, Some(options)).await;
        let mut pages = asked.map_err(failed(READ_PAGE))?.into_pages();
        let Some(page) = pages.next().await else { return Ok((Vec::new(), None)) };
        let page = page.map_err(failed(READ_PAGE))?;
        let after = pages.to_continuation_token().map_err(failed(READ_PAGE))?;
        Ok((page.into_items(), Some(after.as_str().to_owned())))
    }

    fn seal(&self, document_type: &str, token: &str) -> [u8; 8] {
        let mut digest = Sha256::new();
        for part in [&self.inner.container_rid, document_type, token] {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        let mut seal = [0; 8];
        seal.copy_from_slice(&digest.finalize()[..8]);
        seal
    }

    fn close_continuation(&self, document_type: &str, token: &str) -> String {
        let mut sealed = self.seal(document_type, token).to_vec();
        sealed.extend_from_slice(token.as_bytes());
        BASE64.encode(sealed)
    }

    fn open_continuation(&self, document_type: &str, text: &str) -> Result<String> {
        let sealed = BASE64.decode(text).ok();
        let token = sealed.and_then(|sealed| {
            let (seal, token) = sealed.split_at_checked(8)?;
            let token = std::str::from_utf8(token).ok()?;
            (self.seal(document_type, token) == seal).then(|| token.to_owned())
        });
        token.ok_or_else(|| {
            Error::permanent(
                "the continuation is not one that this store gave for this type; begin at the \
                 first page",
            )
        })
    }
}
