//! The web pages: files built into the binary.
//!
//! What lives here: which path answers with which file, and the headers that keep a page from
//! loading anything else. What does not: what the pages show, which they ask the API for.
//! Invariant: no page loads anything from another host, and no script stands inside a page.

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::service::Service;

/// Allows this host's own files and requests, and nothing inline.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The pages and their files.
pub(crate) fn routes() -> Router<Service> {
    Router::new()
        .route("/", get(|| async { file(HTML, include_str!("web/index.html")) }))
        .route("/docs", get(|| async { file(HTML, include_str!("web/docs.html")) }))
        .route(
            "/assets/contacts.css",
            get(|| async { file(CSS, include_str!("web/contacts.css")) }),
        )
        .route(
            "/assets/contacts.js",
            get(|| async { file(SCRIPT, include_str!("web/contacts.js")) }),
        )
        .route("/assets/docs.js", get(|| async { file(SCRIPT, include_str!("web/docs.js")) }))
        .route("/favicon.svg", get(|| async { file(SVG, include_str!("web/favicon.svg")) }))
}

fn file(media_type: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, HeaderValue); 5] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(media_type)),
        // The files change with the binary only, which has no version in their addresses.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (headers, text).into_response()
}
