//! The HTTP API and its OpenAPI document.
//!
//! What lives here: the routes. What does not: what the receiver does (`receiver`), and the pages.
//! Invariant: the document is made from the same routes that answer, so that they cannot differ.

mod contacts;
mod extract;
mod health;
mod model;
mod preconditions;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::header;
use axum::routing::get;
use bytes::Bytes;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

pub(crate) use preconditions::IfMatch;

use crate::receiver;
use crate::service::Service;

/// Largest request body: a contact with every field at its limit, each character escaped as
/// `\uXXXX` twice, has less than 24 KiB.
pub(crate) const MAX_BODY_BYTES: usize = 32 * 1024;

#[derive(OpenApi)]
#[openapi(info(
    title = "Contacts",
    description = "Contacts whose changes are delivered as events by Postrider. \
                   Errors are RFC 9457 problem documents."
))]
struct Document;

/// The API with its document at `/openapi.json`.
pub(crate) fn routes() -> Router<Service> {
    let (router, document) = OpenApiRouter::with_openapi(Document::openapi())
        .merge(contacts::routes())
        .merge(health::routes())
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .merge(receiver::routes())
        .split_for_parts();
    let json = serde_json::to_vec(&document).expect("an OpenAPI document serialises");
    let json = Bytes::from(json);
    let media_type = [(header::CONTENT_TYPE, "application/json")];
    router.route("/openapi.json", get(move || async move { (media_type, json) }))
}
