//! What handlers take from a request, each refusal a problem document.
//!
//! What lives here: the contact's id in the path, and the JSON body. What does not: conditions
//! (`preconditions.rs`) and the rules of the values (`values.rs`).
//! Invariant: no bytes from outside reach a handler unread, and none makes the service panic.

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use crate::problem::Problem;

/// The id in the path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContactId(pub(crate) Uuid);

impl<S: Send + Sync> FromRequestParts<S> for ContactId {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<Uuid>::from_request_parts(parts, state).await;
        path.map(|Path(id)| Self(id))
            .map_err(|_| Problem::not_found("no contact has such an id: an id is a UUID"))
    }
}

/// The body, read as JSON.
#[derive(Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let body = Json::<T>::from_request(request, state).await;
        body.map(|Json(body)| Self(body)).map_err(unreadable)
    }
}

fn unreadable(rejection: JsonRejection) -> Problem {
    match rejection {
        JsonRejection::MissingJsonContentType(_) => Problem::unsupported_media_type(),
        JsonRejection::BytesRejection(error) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            Problem::too_large(format!("the body is larger than {} bytes", super::MAX_BODY_BYTES))
        }
        other => Problem::bad_request(other.body_text()),
    }
}
