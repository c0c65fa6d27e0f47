//! Whether the process lives, and whether it can serve.
//!
//! What lives here: the two probes. What does not: the relay's readiness, which it tells itself.
//! Invariant: ready means that the store just answered.

use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::problem::{Problem, ProblemDocument};
use crate::service::Service;

/// The probes.
pub(crate) fn routes() -> OpenApiRouter<Service> {
    OpenApiRouter::new().routes(routes!(healthz)).routes(routes!(readyz))
}

/// Whether the process lives
#[utoipa::path(get, path = "/healthz", tag = "health",
    responses((status = 200, description = "It does")))]
async fn healthz() -> &'static str {
    "ok\n"
}

/// Whether the store answers
#[utoipa::path(get, path = "/readyz", tag = "health",
    responses(
        (status = 200, description = "It does"),
        (status = 503, description = "It does not", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
async fn readyz(State(service): State<Service>) -> Result<&'static str, Problem> {
    service.check().await?;
    Ok("ready\n")
}
