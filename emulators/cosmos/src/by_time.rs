//! A change feed that is read from a time on.
//!
//! What lives here: the first answer to `If-Modified-Since`. What does not: what is read on from
//! it, which is any other change feed.
//! Invariant: the answer has no document, only the place before the first change at that time or
//! after it, as the service's has; a client that throws the place away never reads anything.

use azure_core::http::Request;
use azure_core::http::headers::HeaderName;
use azure_core::time::parse_rfc7231;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{CONTENT_LENGTH, ETAG, HeaderValue};
use hyper::{Response, StatusCode};

use crate::places::{MOST, Place};
use crate::request::header;
use crate::service::{COUNT, Outcome, Service, error, json};

const INCREMENTAL: &str = "Incremental feed";

/// From which second on a request wants changes; none where it names a place already.
pub(crate) fn start(request: &Request) -> Option<u64> {
    let incremental = header(request, "a-im")?.eq_ignore_ascii_case(INCREMENTAL);
    let named =
        ["if-none-match", "x-ms-continuation"].iter().any(|name| header(request, name).is_some());
    if !incremental || named {
        return None;
    }
    let time = parse_rfc7231(header(request, "if-modified-since")?).ok()?;
    u64::try_from(time.unix_timestamp()).ok()
}

/// No document, and the place before the first one that was written then or later.
pub(crate) async fn answer(service: &Service, request: &Request, seconds: u64) -> Outcome {
    let by = |most: Option<usize>| {
        let (mut request, name) = (request.clone(), HeaderName::from_static(MOST));
        match most {
            Some(most) => request.headers_mut().insert(name, most.to_string()),
            None => drop(request.headers_mut().remove(name)),
        }
        request
    };
    let Outcome::Answer(all) = service.tagged(&by(None)).await else { return Outcome::Closed };
    let (parts, body) = all.into_parts();
    let content = match body.collect().await {
        Ok(content) => content.to_bytes(),
        Err(never) => match never {},
    };
    let older = match parts.status {
        StatusCode::OK => match older(&content, seconds) {
            Some(older) => older,
            None => return Outcome::Answer(error(500, None, "the emulator's page is another one")),
        },
        StatusCode::NOT_MODIFIED => 0,
        _ => return Outcome::Answer(Response::from_parts(parts, Full::new(content))),
    };
    let parts = match older {
        0 => parts,
        older => match service.tagged(&by(Some(older))).await {
            Outcome::Answer(answer) => answer.into_parts().0,
            Outcome::Closed => return Outcome::Closed,
        },
    };
    Outcome::Answer(emptied(parts, older == 0))
}

/// How many documents of a page stand before the first that was written then or later.
fn older(content: &Bytes, seconds: u64) -> Option<usize> {
    let content: serde_json::Value = serde_json::from_slice(content).ok()?;
    let written = |document: &serde_json::Value| {
        let document = document.get("current").unwrap_or(document);
        document["_ts"].as_u64().unwrap_or_default()
    };
    let documents = content["Documents"].as_array()?;
    Some(documents.iter().take_while(|document| written(document) < seconds).count())
}

/// The same answer without documents, at its own place or before everything.
fn emptied(mut parts: hyper::http::response::Parts, before_all: bool) -> Response<Full<Bytes>> {
    let content = serde_json::json!({ "_rid": "", "Documents": [], "_count": 0 });
    let empty = json(200, &content);
    parts.status = StatusCode::OK;
    parts.headers.remove(CONTENT_LENGTH);
    parts.headers.extend(empty.headers().clone());
    parts.headers.insert(COUNT, HeaderValue::from_static("0"));
    let etag = parts.headers.get(ETAG).and_then(|etag| etag.to_str().ok());
    let etag = etag.filter(|_| before_all).and_then(Place::before_all);
    if let Some(etag) = etag.and_then(|etag| etag.parse().ok()) {
        parts.headers.insert(ETAG, etag);
    }
    Response::from_parts(parts, empty.into_body())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_a_second_is_counted() {
        let page = br#"{"Documents": [{"_ts": 1}, {"current": {"_ts": 2}}, {"_ts": 3}]}"#;
        let page = Bytes::from_static(page);
        for (seconds, count) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)] {
            assert_eq!(older(&page, seconds), Some(count));
        }
        assert_eq!(older(&Bytes::from_static(b"{}"), 1), None);
    }
}
