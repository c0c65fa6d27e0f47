//! Errors as the client sees them: RFC 9457 problem documents.
//!
//! What lives here: `Problem`, its status map, and the middleware that writes it out. What does
//! not: deciding which problem it is, which the handlers do.
//! Invariant: every answer of 4xx or 5xx is `application/problem+json` with the request's path and
//! trace id, and a 5xx is logged here, once, with its cause.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use postrider::{DocumentError, ErrorKind};
use serde::Serialize;
use utoipa::ToSchema;

use crate::trace::RequestTrace;
use crate::values::Violations;

/// Media type of a problem document.
pub(crate) const PROBLEM_JSON: &str = "application/problem+json";
/// Longest time from a request's head to the head of its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// Wait asked of a client when the store names none.
const RETRY_AFTER_SECONDS: u64 = 1;

/// Why a request was not done. Becomes a problem document in [`answer_with_problems`].
#[derive(Debug, Clone)]
pub(crate) struct Problem(Box<Parts>);

#[derive(Debug, Clone)]
struct Parts {
    status: StatusCode,
    title: &'static str,
    detail: String,
    errors: BTreeMap<&'static str, Vec<String>>,
    retry_after_seconds: Option<u64>,
    allow: Option<HeaderValue>,
    /// For the log only, never for the client.
    cause: Option<String>,
}

/// What a client reads (RFC 9457).
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProblemDocument<'a> {
    /// Where the status code is specified.
    #[serde(rename = "type")]
    kind: &'a str,
    /// What kind of problem, in a few words.
    title: &'a str,
    /// The HTTP status code.
    status: u16,
    /// What happened this time, and what to do.
    detail: &'a str,
    /// The path that was asked for.
    instance: &'a str,
    /// Names the request in the service's log.
    trace_id: &'a str,
    /// What is wrong with each field; only on validation errors.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    errors: &'a BTreeMap<&'static str, Vec<String>>,
}

impl Problem {
    fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self(Box::new(Parts {
            status,
            title,
            detail: detail.into(),
            errors: BTreeMap::new(),
            retry_after_seconds: None,
            allow: None,
            cause: None,
        }))
    }

    /// 400: the request cannot be understood.
    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Bad Request", detail)
    }

    /// 400: one named field is wrong.
    pub(crate) fn field(name: &'static str, what: impl Into<String>) -> Self {
        Violations::one(name, what).into()
    }

    /// 401: the sender did not prove who it is.
    pub(crate) fn unauthorized(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", detail)
    }

    /// 404.
    pub(crate) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not Found", detail)
    }

    /// 405.
    pub(crate) fn method_not_allowed() -> Self {
        let detail = "this path exists, but not with this method; the header Allow lists them";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed", detail)
    }

    /// 409: exists already, or changed so often that this request never had its turn.
    pub(crate) fn conflict(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "Conflict", detail)
    }

    /// 412: the client's version is not the current one.
    pub(crate) fn precondition_failed() -> Self {
        let detail = "somebody else changed the contact since it was read; read it again, then \
                      repeat the change with the new ETag";
        Self::new(StatusCode::PRECONDITION_FAILED, "Mid-Air Collision", detail)
    }

    /// 413.
    pub(crate) fn too_large(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "Content Too Large", detail)
    }

    /// 415.
    pub(crate) fn unsupported_media_type() -> Self {
        let detail = "send JSON, with the header Content-Type: application/json";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Unsupported Media Type", detail)
    }

    /// 428: this service was set up to refuse unconditional changes.
    pub(crate) fn precondition_required() -> Self {
        let detail = "send the header If-Match with the ETag of the contact as you read it";
        Self::new(StatusCode::PRECONDITION_REQUIRED, "Precondition Required", detail)
    }

    /// 500, its cause told to the log only.
    pub(crate) fn internal(cause: impl Into<String>) -> Self {
        let detail = "the service failed; its log has the reason under this trace id";
        let mut problem =
            Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error", detail);
        problem.0.cause = Some(cause.into());
        problem
    }

    /// 503 with Retry-After: the same request may succeed in a moment.
    pub(crate) fn unavailable(
        detail: impl Into<String>,
        wait: Option<Duration>,
        cause: impl Into<String>,
    ) -> Self {
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", detail);
        let seconds = wait.map_or(RETRY_AFTER_SECONDS, |wait| {
            wait.as_secs() + u64::from(wait.subsec_nanos() > 0)
        });
        problem.0.retry_after_seconds = Some(seconds);
        problem.0.cause = Some(cause.into());
        problem
    }
}

impl Parts {
    fn specification(&self) -> &'static str {
        match self.status.as_u16() {
            400 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.1",
            401 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.2",
            404 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.5",
            405 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.6",
            409 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.10",
            412 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.13",
            413 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.14",
            415 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.16",
            428 => "https://www.rfc-editor.org/rfc/rfc6585#section-3",
            503 => "https://www.rfc-editor.org/rfc/rfc9110#section-15.6.4",
            _ => "https://www.rfc-editor.org/rfc/rfc9110#section-15.6.1",
        }
    }

    fn document(&self, instance: &str, trace_id: &str) -> Response {
        let document = ProblemDocument {
            kind: self.specification(),
            title: self.title,
            status: self.status.as_u16(),
            detail: &self.detail,
            instance,
            trace_id,
            errors: &self.errors,
        };
        let body = serde_json::to_vec(&document).expect("texts and numbers serialise");
        let media_type = HeaderValue::from_static(PROBLEM_JSON);
        let mut response =
            (self.status, [(header::CONTENT_TYPE, media_type)], body).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if let Some(allow) = &self.allow {
            headers.insert(header::ALLOW, allow.clone());
        }
        response
    }
}

impl From<Violations> for Problem {
    fn from(violations: Violations) -> Self {
        let detail = "one or more fields are not valid; see errors";
        let mut problem = Self::new(StatusCode::BAD_REQUEST, "Validation Error", detail);
        problem.0.errors = violations.into_fields();
        problem
    }
}

impl From<postrider::Error> for Problem {
    fn from(error: postrider::Error) -> Self {
        let busy = "the database is busy; try again after the time in Retry-After";
        match error.kind() {
            ErrorKind::Transient => Self::unavailable(busy, None, error.chain()),
            ErrorKind::Throttled { retry_after } => {
                Self::unavailable(busy, retry_after, error.chain())
            }
            ErrorKind::Permanent
            | ErrorKind::Fenced
            | ErrorKind::Unsupported
            | ErrorKind::Corrupt => Self::internal(error.chain()),
        }
    }
}

impl From<DocumentError> for Problem {
    fn from(error: DocumentError) -> Self {
        match error {
            DocumentError::NotFound { .. } => Self::not_found("there is no contact of this id"),
            DocumentError::Conflict { .. } => {
                Self::conflict("a contact or event of this id exists already")
            }
            DocumentError::PreconditionFailed { .. } => Self::precondition_failed(),
            DocumentError::TooLarge(what) => Self::too_large(what),
            DocumentError::Store(error) => error.into(),
        }
    }
}

impl IntoResponse for Problem {
    /// Only the status; the body is written by [`answer_with_problems`], which knows the request.
    fn into_response(self) -> Response {
        let mut response = self.0.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The outermost layer: bounds a request's time, and turns every [`Problem`] into its document.
pub(crate) async fn answer_with_problems(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let head = request.method() == Method::HEAD;
    let trace = request.extensions().get::<RequestTrace>().cloned().unwrap_or_default();
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await;
    let mut response = answer.unwrap_or_else(|_| {
        let detail = "the request took too long; a change may or may not have been saved";
        Problem::unavailable(detail, None, "request timed out").into_response()
    });
    let Some(Problem(mut problem)) = response.extensions_mut().remove::<Problem>() else {
        return response;
    };
    problem.allow = response.headers().get(header::ALLOW).cloned();
    if problem.status.is_server_error() {
        let cause = problem.cause.as_deref().unwrap_or("unknown");
        let status = problem.status.as_u16();
        tracing::error!(trace_id = trace.trace_id(), status, cause, "request failed");
    }
    let mut response = problem.document(&path, trace.trace_id());
    if head {
        *response.body_mut() = axum::body::Body::empty();
    }
    response
}
