//! The contacts' endpoints.
//!
//! What lives here: one handler for each row of the endpoint table, and its description for
//! OpenAPI. What does not: reading and changing contacts (`service.rs`).
//! Invariant: every answer about one contact carries its ETag.

use axum::Extension;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use postrider::{ETag, Timestamp};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::extract::{Body, ContactId};
use super::model::{
    ContactDetails, ContactPage, ContactSummary, CreateContact, UpdateCompany, UpdateDescription,
    UpdateEmail, UpdateName,
};
use super::preconditions::{IfMatch, IfNoneMatch};
use crate::domain::Contact;
use crate::problem::{Problem, ProblemDocument};
use crate::service::Service;
use crate::trace::RequestTrace;

const CONTINUATION_TOKEN: HeaderName = HeaderName::from_static("x-continuation-token");
const DEFAULT_PAGE_SIZE: u32 = 10;
const MAX_PAGE_SIZE: u32 = 100;

/// The contacts' endpoints.
pub(crate) fn routes() -> OpenApiRouter<Service> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(read, delete))
        .routes(routes!(update_name))
        .routes(routes!(update_description))
        .routes(routes!(update_email))
        .routes(routes!(update_company))
}

fn etag_header(etag: &ETag) -> Result<[(HeaderName, HeaderValue); 1], Problem> {
    let value = HeaderValue::from_str(etag.as_str())
        .map_err(|_| Problem::internal("the store's ETag is no header value"))?;
    Ok([(header::ETAG, value)])
}

/// Read one contact
#[utoipa::path(get, path = "/api/contacts/{id}", tag = "contacts",
    params(
        ("id" = Uuid, Path, description = "The contact's id"),
        ("If-None-Match" = Option<String>, Header, description = "The ETags that you have"),
    ),
    responses(
        (status = 200, description = "The contact", body = ContactDetails,
            headers(("ETag" = String, description = "Its version"))),
        (status = 304, description = "You have this version already"),
        (status = 404, description = "Missing or deleted", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
async fn read(
    State(service): State<Service>,
    ContactId(id): ContactId,
    condition: IfNoneMatch,
) -> Result<Response, Problem> {
    let (contact, etag) = service.read(id).await?;
    let headers = etag_header(&etag)?;
    if condition.has(&etag) {
        return Ok((StatusCode::NOT_MODIFIED, headers).into_response());
    }
    Ok((headers, Json(ContactDetails::from(&contact))).into_response())
}

/// How much of the list is wanted.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(rename_all = "camelCase")]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Most contacts in the answer.
    #[param(value_type = Option<u32>, minimum = 1, maximum = 100, default = 10)]
    page_size: Option<String>,
}

impl ListQuery {
    fn page_size(&self) -> Result<u32, Problem> {
        let Some(text) = &self.page_size else { return Ok(DEFAULT_PAGE_SIZE) };
        match text.parse() {
            Ok(size) if (1..=MAX_PAGE_SIZE).contains(&size) => Ok(size),
            Ok(_) | Err(_) => {
                let what = format!("must be a whole number from 1 to {MAX_PAGE_SIZE}");
                Err(Problem::field("pageSize", what))
            }
        }
    }
}

/// List contacts, page by page
#[utoipa::path(get, path = "/api/contacts", tag = "contacts",
    params(
        ListQuery,
        ("x-continuation-token" = Option<String>, Header,
            description = "Where the last page ended, as its answer said"),
    ),
    responses(
        (status = 200, description = "One page", body = ContactPage,
            headers(("x-continuation-token" = String,
                description = "Where the next page begins; absent at the end"))),
        (status = 400, description = "Page size or token not valid", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
async fn list(
    State(service): State<Service>,
    query: Result<Query<ListQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let Query(query) = query.map_err(|error| Problem::bad_request(error.body_text()))?;
    let size = query.page_size()?;
    let unknown = || Problem::field("x-continuation-token", "is not one of this service's");
    let token = headers.get(&CONTINUATION_TOKEN).map(HeaderValue::to_str).transpose();
    let token = token.map_err(|_| unknown())?.map(str::to_owned);
    let (contacts, next) = service.page(size, token).await?;
    let page = ContactPage {
        has_more: next.is_some(),
        items: contacts.iter().map(ContactSummary::from).collect(),
    };
    let mut answer = Json(page).into_response();
    if let Some(next) = next {
        let value = HeaderValue::try_from(next)
            .map_err(|_| Problem::internal("the store's continuation is no header value"))?;
        answer.headers_mut().insert(CONTINUATION_TOKEN, value);
    }
    Ok(answer)
}

/// Create a contact
#[utoipa::path(post, path = "/api/contacts", tag = "contacts",
    request_body = CreateContact,
    responses(
        (status = 201, description = "Created", headers(
            ("Location" = String, description = "The contact's path"),
            ("ETag" = String, description = "Its version"))),
        (status = 400, description = "Not valid; errors by field", body = ProblemDocument,
            content_type = "application/problem+json"),
        (status = 409, description = "Exists already", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
async fn create(
    State(service): State<Service>,
    Extension(trace): Extension<RequestTrace>,
    Body(body): Body<CreateContact>,
) -> Result<Response, Problem> {
    let (id, etag) = service.create(body.check()?, &trace).await?;
    let location = HeaderValue::try_from(format!("/api/contacts/{id}"))
        .expect("a path of a UUID is a header value");
    let location = [(header::LOCATION, location)];
    Ok((StatusCode::CREATED, location, etag_header(&etag)?).into_response())
}

/// What the four updates share: the condition, the change, and the new version.
async fn update(
    service: &Service,
    id: Uuid,
    condition: &IfMatch,
    trace: &RequestTrace,
    change: impl Fn(&mut Contact, Timestamp) + Send + Sync,
) -> Result<Response, Problem> {
    let etag = service.change(id, condition, trace, change).await?;
    Ok((StatusCode::NO_CONTENT, etag_header(&etag)?).into_response())
}

/// Declares an update's endpoint: they differ in path, body and the method that they call.
macro_rules! update_endpoint {
    ($(#[doc = $doc:literal])+ $name:ident, $path:literal, $body:ident, $set:ident) => {
        $(#[doc = $doc])+
        #[utoipa::path(post, path = $path, tag = "contacts",
            params(
                ("id" = Uuid, Path, description = "The contact's id"),
                ("If-Match" = Option<String>, Header,
                    description = "The ETag of the contact as you read it"),
            ),
            request_body = $body,
            responses(
                (status = 204, description = "Changed",
                    headers(("ETag" = String, description = "The new version"))),
                (status = 400, description = "Not valid; errors by field",
                    body = ProblemDocument, content_type = "application/problem+json"),
                (status = 404, description = "Missing or deleted",
                    body = ProblemDocument, content_type = "application/problem+json"),
                (status = 409, description = "Too many changes at the same time; try again",
                    body = ProblemDocument, content_type = "application/problem+json"),
                (status = 412, description = "Changed since you read it",
                    body = ProblemDocument, content_type = "application/problem+json"),
                (status = 428, description = "If-Match is required here",
                    body = ProblemDocument, content_type = "application/problem+json"),
            ))]
        async fn $name(
            State(service): State<Service>,
            ContactId(id): ContactId,
            condition: IfMatch,
            Extension(trace): Extension<RequestTrace>,
            Body(body): Body<$body>,
        ) -> Result<Response, Problem> {
            let value = body.check()?;
            let change = |contact: &mut Contact, now| contact.$set(value.clone(), now);
            update(&service, id, &condition, &trace, change).await
        }
    };
}

update_endpoint!(
    /// Change a contact's name
    update_name, "/api/contacts/{id}/update-name", UpdateName, set_name
);
update_endpoint!(
    /// Change or remove a contact's description
    update_description, "/api/contacts/{id}/update-description", UpdateDescription, set_description
);
update_endpoint!(
    /// Change or remove a contact's email address
    update_email, "/api/contacts/{id}/update-email", UpdateEmail, set_email
);
update_endpoint!(
    /// Change a contact's company
    update_company, "/api/contacts/{id}/update-company", UpdateCompany, set_company
);

/// Delete a contact; it is kept, but no longer shown
#[utoipa::path(delete, path = "/api/contacts/{id}", tag = "contacts",
    params(
        ("id" = Uuid, Path, description = "The contact's id"),
        ("If-Match" = Option<String>, Header,
            description = "The ETag of the contact as you read it"),
    ),
    responses(
        (status = 200, description = "Deleted",
            headers(("ETag" = String, description = "The last version"))),
        (status = 404, description = "Missing or deleted before", body = ProblemDocument,
            content_type = "application/problem+json"),
        (status = 412, description = "Changed since you read it", body = ProblemDocument,
            content_type = "application/problem+json"),
        (status = 428, description = "If-Match is required here", body = ProblemDocument,
            content_type = "application/problem+json"),
    ))]
async fn delete(
    State(service): State<Service>,
    ContactId(id): ContactId,
    condition: IfMatch,
    Extension(trace): Extension<RequestTrace>,
) -> Result<Response, Problem> {
    let etag = service.change(id, &condition, &trace, Contact::delete).await?;
    Ok((StatusCode::OK, etag_header(&etag)?).into_response())
}
