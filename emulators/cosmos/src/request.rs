//! What a request asks for, as far as faults and counters need to know.
//!
//! What lives here: the operation's name and the signed parts of a path. What does not: answering.
//! Invariant: a name is taken from the path and the headers alone, as the service does, never from
//! the content.

use azure_core::http::headers::HeaderName;
use azure_core::http::{Method, Request};
use serde::{Deserialize, Serialize};

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Operation {
    Account,
    Container,
    PartitionKeyRanges,
    Batch,
    ChangeFeed,
    Query,
    QueryPlan,
    ReadFeed,
    ReadItem,
    CreateItem,
    UpsertItem,
    ReplaceItem,
    PatchItem,
    DeleteItem,
    Other,
}

impl Operation {
    pub(crate) fn of(request: &Request) -> Self {
        let path = segments(request.url().path());
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        match (request.method(), path.as_slice()) {
            (Method::Get, []) => Self::Account,
            (_, ["dbs", _, "colls", _]) => Self::Container,
            (_, ["dbs", _, "colls", _, "pkranges"]) => Self::PartitionKeyRanges,
            (Method::Get, ["dbs", _, "colls", _, "docs"]) => {
                if header(request, "a-im").is_some() {
                    Self::ChangeFeed
                } else {
                    Self::ReadFeed
                }
            }
            (Method::Post, ["dbs", _, "colls", _, "docs"]) => Self::of_post(request),
            (Method::Get, ["dbs", _, "colls", _, "docs", _]) => Self::ReadItem,
            (Method::Put, ["dbs", _, "colls", _, "docs", _]) => Self::ReplaceItem,
            (Method::Patch, ["dbs", _, "colls", _, "docs", _]) => Self::PatchItem,
            (Method::Delete, ["dbs", _, "colls", _, "docs", _]) => Self::DeleteItem,
            _ => Self::Other,
        }
    }

    fn of_post(request: &Request) -> Self {
        let is = |name| header(request, name).is_some_and(|text| text.eq_ignore_ascii_case("true"));
        if is("x-ms-cosmos-is-query-plan-request") {
            Self::QueryPlan
        } else if is("x-ms-documentdb-isquery") || is("x-ms-documentdb-query") {
            Self::Query
        } else if is("x-ms-cosmos-is-batch-request") {
            Self::Batch
        } else if is("x-ms-documentdb-is-upsert") {
            Self::UpsertItem
        } else {
            Self::CreateItem
        }
    }
}

/// A header's text.
pub(crate) fn header<'a>(request: &'a Request, name: &'static str) -> Option<&'a str> {
    request.headers().get_optional_str(&HeaderName::from_static(name))
}

/// The decoded parts of a path.
pub(crate) fn segments(path: &str) -> Vec<String> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let decoded = percent_encoding::percent_decode_str(part).decode_utf8_lossy();
            decoded.into_owned()
        })
        .collect()
}
