//! One request from its bytes to its answer.
//!
//! What lives here: connections (HTTP/1.1, and HTTP/2 without TLS), the signature's check, faults,
//! counters, and handing a request to Microsoft's emulator. What does not: what the emulator makes
//! of it.
//! Invariant: a request that a fault says is carried out is carried out whole before its answer is
//! lost; one that is not never reaches the emulator.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use azure_core::credentials::Secret;
use azure_core::http::headers::HeaderName;
use azure_core::http::{Method, RawResponse, Request};
use azure_data_cosmos_driver::error::CosmosError;
use azure_data_cosmos_driver::in_memory_emulator::InMemoryEmulatorHttpClient;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, RwLock};
use tokio::task::JoinSet;
use url::Url;

use crate::admin;
use crate::by_time;
use crate::counts::Counts;
use crate::faults::{Answer, Faults};
use crate::places::{self, History, TooWide};
use crate::request::Operation;
use crate::signature;

/// Twice the most that the service takes in one request.
const REQUEST_BYTES_MAX: usize = 8 * 1024 * 1024;
/// How often a listener looks whether its region is offline.
const LOOK: Duration = Duration::from_millis(10);
/// What an answer without a charge of its own counts as.
const CHARGE: &str = "x-ms-request-charge";
/// How many documents a page has.
pub(crate) const COUNT: &str = "x-ms-item-count";
const ETAG: HeaderName = HeaderName::from_static("etag");
/// No client of Microsoft's asks so; the service's answer is not known.
const OF_A_PART: &str = "the etag is of a range that was merged since; name its hashes by \
                         x-ms-start-epk and x-ms-end-epk to read on in them";

/// The account, and what is to go wrong with it.
pub(crate) struct Service {
    pub emulator: InMemoryEmulatorHttpClient,
    key: Secret,
    pub faults: Mutex<Faults>,
    pub counts: Mutex<Counts>,
    /// What became of ranges. Requests share it; a merge has it alone while it gives documents
    /// other numbers.
    pub history: RwLock<History>,
    /// One split or merge at a time.
    pub changing: tokio::sync::Mutex<()>,
}

/// Where a request comes in.
#[derive(Debug, Clone)]
pub(crate) enum Door {
    /// At a region's own address.
    Region(Url),
    /// At the account's, which leads to the region that takes writes.
    Account,
}

/// What a client gets.
pub(crate) enum Outcome {
    /// This.
    Answer(Response<Full<Bytes>>),
    /// The connection is closed, and everything else on it with it.
    Closed,
}

impl Service {
    pub(crate) fn new(emulator: InMemoryEmulatorHttpClient, key: &str) -> Self {
        let key = Secret::new(key.to_owned());
        Self {
            emulator,
            key,
            faults: Mutex::default(),
            counts: Mutex::default(),
            history: RwLock::default(),
            changing: tokio::sync::Mutex::default(),
        }
    }

    /// Whether a door leads to a region that can't be reached.
    fn is_offline(&self, door: &Door) -> bool {
        let Door::Region(base) = door else { return false };
        let region = self.emulator.store().config().region_for_url(base);
        region.is_some_and(|region| region.status.is_unreachable())
    }

    /// Waits until a region can be reached, or can't.
    pub(crate) async fn settled(&self, name: &str) {
        let regions = self.emulator.store().config().active_regions();
        let Some(region) = regions.iter().find(|region| region.name() == name) else { return };
        let base = region.gateway_url();
        let address = (base.host_str().unwrap_or_default(), base.port().unwrap_or_default());
        let offline = self.is_offline(&Door::Region(base.clone()));
        while TcpStream::connect(address).await.is_err() != offline {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The address of the region that takes writes.
    fn write_region(&self) -> Url {
        let store = self.emulator.store();
        let writes = store.config().write_region_name();
        let regions = store.config().active_regions();
        let region = regions.iter().find(|region| region.name() == writes);
        region.expect("one region always takes writes").gateway_url().clone()
    }

    async fn answer(&self, door: &Door, request: hyper::Request<Incoming>) -> Outcome {
        let base = match door {
            Door::Region(base) => base.clone(),
            Door::Account => self.write_region(),
        };
        let base = &base;
        let (parts, body) = request.into_parts();
        let Ok(content) = Limited::new(body, REQUEST_BYTES_MAX).collect().await else {
            return Outcome::Answer(error(413, None, "the request is too large, or was cut off"));
        };
        let content = content.to_bytes();
        if let Some(path) = parts.uri.path().strip_prefix("/_emu/") {
            return Outcome::Answer(admin::answer(self, &parts.method, path, &content).await);
        }
        let Some(request) = converted(base, &parts, &content) else {
            return Outcome::Answer(error(405, None, "the service has no such method"));
        };
        let operation = Operation::of(&request);
        let outcome = self.outcome(base, &request, operation, &content).await;
        let (status, charge) = match &outcome {
            Outcome::Answer(answer) => (answer.status().as_u16(), charge(answer)),
            Outcome::Closed => (0, 0.0),
        };
        locked(&self.counts).add(operation, status, charge);
        outcome
    }

    async fn outcome(
        &self,
        base: &Url,
        request: &Request,
        operation: Operation,
        content: &[u8],
    ) -> Outcome {
        if let Some(why) = signature::refusal(request, &self.key) {
            return Outcome::Answer(error(401, None, why));
        }
        let port = base.port().unwrap_or_default();
        let drawn = locked(&self.faults).draw(operation, request.url().path(), content, port);
        let Some(fault) = drawn else { return self.carry_out(request, operation).await };
        let outcome = if fault.carried_out {
            self.carry_out(request, operation).await
        } else {
            Outcome::Closed
        };
        tokio::time::sleep(Duration::from_millis(fault.delay_ms)).await;
        match fault.answer {
            Some(answer) => Outcome::Answer(answer.response()),
            // Only late, not lost.
            None if fault.delay_ms > 0 && fault.carried_out => outcome,
            None => Outcome::Closed,
        }
    }

    /// Asks the emulator directly, at the region that takes writes.
    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        content: Option<&serde_json::Value>,
    ) -> Result<(u16, serde_json::Value), CosmosError> {
        let mut url = self.write_region();
        url.set_path(path);
        let mut request = Request::new(url, method);
        if let Some(content) = content {
            request.set_body(content.to_string());
        }
        let answer = self.emulator.execute_request(&request).await?;
        let status = u16::from(answer.status());
        let content = answer.try_into_raw_response().await.ok();
        let content = content.and_then(|raw| serde_json::from_slice(raw.body().as_ref()).ok());
        Ok((status, content.unwrap_or_default()))
    }

    /// A page of changes, asked for directly: the etag after it and its documents, if it has any.
    pub(crate) async fn changes(
        &self,
        path: &str,
        headers: &[(&'static str, String)],
    ) -> Result<Option<(String, Vec<serde_json::Value>)>, String> {
        let mut url = self.write_region();
        url.set_path(path);
        let mut request = Request::new(url, Method::Get);
        request.headers_mut().insert("a-im", "Incremental feed");
        for (name, value) in headers {
            request.headers_mut().insert(*name, value.clone());
        }
        let answer = self.emulator.execute_request(&request).await;
        let answer = answer.map_err(|error| error.to_string())?;
        let status = u16::from(answer.status());
        let answer = answer.try_into_raw_response().await.map_err(|error| error.to_string())?;
        let etag = answer.headers().get_optional_str(&ETAG).unwrap_or_default().to_owned();
        match status {
            304 => Ok(None),
            200 => {
                let content = serde_json::from_slice(answer.body().as_ref());
                let mut content: serde_json::Value = content.map_err(|error| error.to_string())?;
                match content["Documents"].take() {
                    serde_json::Value::Array(documents) => Ok(Some((etag, documents))),
                    _ => Err("a page has no documents".to_owned()),
                }
            }
            _ => Err(format!("changes were refused by {status}")),
        }
    }

    /// What the emulator says. A region that is offline can't be reached at all.
    async fn carry_out(&self, request: &Request, operation: Operation) -> Outcome {
        let history = self.history.read().await;
        if operation != Operation::ChangeFeed {
            return self.hand_on(request).await;
        }
        let translated = match places::translated(self, &history, request).await {
            Ok(translated) => translated,
            Err(TooWide) => return Outcome::Answer(error(400, None, OF_A_PART)),
        };
        let request = translated.as_ref().unwrap_or(request);
        if let Some(seconds) = by_time::start(request) {
            return by_time::answer(self, request, seconds).await;
        }
        let mut outcome = self.tagged(request).await;
        let mut asked = request.clone();
        while let Some(next) =
            page_of(&outcome).and_then(|page| places::grown(&history, &asked, page))
        {
            outcome = self.tagged(&next).await;
            asked = next;
        }
        outcome
    }

    /// A page of changes, whose etag has its range in it.
    pub(crate) async fn tagged(&self, request: &Request) -> Outcome {
        let mut outcome = self.hand_on(request).await;
        if let Outcome::Answer(answer) = &mut outcome {
            let text = |name: &str| answer.headers().get(name)?.to_str().ok();
            let range = text(places::RANGE).and_then(|id| id.parse().ok());
            let etag = text(ETAG.as_str()).and_then(|etag| places::tagged(etag, range));
            if let Some(etag) = etag.and_then(|etag| ascii(&etag).parse().ok()) {
                answer.headers_mut().insert(hyper::header::ETAG, etag);
            }
        }
        outcome
    }

    async fn hand_on(&self, request: &Request) -> Outcome {
        let Ok(answer) = self.emulator.execute_request(request).await else {
            return Outcome::Closed;
        };
        match answer.try_into_raw_response().await {
            Ok(answer) => Outcome::Answer(response(&answer)),
            Err(_) => Outcome::Closed,
        }
    }
}

impl Answer {
    fn response(&self) -> Response<Full<Bytes>> {
        let sub_status = self.sub_status;
        let mut response = match &self.content {
            Some(content) => json(self.status, content),
            None => error(self.status, sub_status, "as a test has asked for"),
        };
        let headers = response.headers_mut();
        if let Some(sub_status) = sub_status {
            headers.insert("x-ms-substatus", sub_status.into());
        }
        if let Some(wait) = self.retry_after_ms {
            headers.insert("x-ms-retry-after-ms", wait.into());
        }
        response
    }
}

/// Takes connections until the program ends. A region that is offline takes none, and those that it
/// has are cut, as when its name is gone.
pub(crate) async fn listen(mut listener: TcpListener, door: Door, service: Arc<Service>) {
    let mut connections = JoinSet::new();
    let Ok(address) = listener.local_addr() else { return };
    loop {
        if service.is_offline(&door) {
            drop(listener);
            connections.shutdown().await;
            listener = loop {
                tokio::time::sleep(LOOK).await;
                if service.is_offline(&door) {
                    continue;
                }
                if let Ok(again) = TcpListener::bind(address).await {
                    break again;
                }
            };
        }
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream, door.clone(), Arc::clone(&service)));
                }
                // Too many open files, most likely: some will be closed.
                Err(_) => tokio::time::sleep(LOOK).await,
            },
            Some(_) = connections.join_next() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

async fn serve(stream: TcpStream, door: Door, service: Arc<Service>) {
    // It fails only if the connection is gone, which is seen soon enough.
    let _ = stream.set_nodelay(true);
    let closing = Arc::new(Notify::new());
    let handler = service_fn(|request| {
        let (service, door, closing) = (Arc::clone(&service), door.clone(), Arc::clone(&closing));
        async move {
            match service.answer(&door, request).await {
                Outcome::Answer(answer) => Ok::<_, Infallible>(answer),
                Outcome::Closed => {
                    closing.notify_one();
                    std::future::pending().await
                }
            }
        }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let connection = builder.serve_connection(TokioIo::new(stream), handler);
    tokio::select! {
        // How a client leaves is its own affair.
        _ = connection => {}
        () = closing.notified() => {}
    }
}

/// The emulator's own kind of request, addressed to its region.
fn converted(base: &Url, parts: &hyper::http::request::Parts, content: &Bytes) -> Option<Request> {
    let method = match parts.method.as_str() {
        "GET" => Method::Get,
        "POST" => Method::Post,
        "PUT" => Method::Put,
        "PATCH" => Method::Patch,
        "DELETE" => Method::Delete,
        "HEAD" => Method::Head,
        _ => return None,
    };
    let mut url = base.clone();
    // The service takes a path with a slash at its end; the emulator does not.
    url.set_path(parts.uri.path().trim_end_matches('/'));
    url.set_query(parts.uri.query());
    let mut request = Request::new(url, method);
    for (name, value) in &parts.headers {
        if let Ok(value) = value.to_str() {
            request.headers_mut().insert(name.as_str().to_owned(), value.to_owned());
        }
    }
    if !content.is_empty() {
        request.set_body(content.clone());
    }
    Some(request)
}

fn response(answer: &RawResponse) -> Response<Full<Bytes>> {
    let status = u16::from(answer.status());
    let mut response = Response::builder().status(status);
    for (name, value) in answer.headers().iter() {
        if name.as_str() != "content-length" {
            response = response.header(name.as_str(), ascii(value.as_str()));
        }
    }
    let content =
        if status == 304 { Bytes::new() } else { Bytes::copy_from_slice(answer.body().as_ref()) };
    response.body(Full::new(content)).unwrap_or_else(|_| error(500, None, "an impossible header"))
}

/// A change feed's place names a document's id, in JSON: what no header can carry is escaped there.
fn ascii(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for unit in value.chars() {
        if unit.is_ascii() {
            text.push(unit);
            continue;
        }
        let mut units = [0; 2];
        for unit in unit.encode_utf16(&mut units) {
            text.push_str(&format!("\\u{unit:04x}"));
        }
    }
    text
}

/// An answer with JSON in it.
pub(crate) fn json(status: u16, content: &serde_json::Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(content.to_string())));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST);
    let json = hyper::header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, json);
    response
}

/// A refusal in the service's own shape.
pub(crate) fn error(status: u16, sub_status: Option<u32>, why: &str) -> Response<Full<Bytes>> {
    let code = match status {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        410 => "Gone",
        412 => "PreconditionFailed",
        413 => "RequestEntityTooLarge",
        429 => "TooManyRequests",
        449 => "RetryWith",
        _ => "Error",
    };
    let mut content = serde_json::json!({ "code": code, "message": why });
    if let Some(sub_status) = sub_status {
        content["substatus"] = sub_status.into();
    }
    json(status, &content)
}

/// The etag of a page, and how many documents it has, if it has any.
fn page_of(outcome: &Outcome) -> Option<(&str, u64)> {
    match outcome {
        Outcome::Answer(answer) if answer.status() == StatusCode::OK => {
            let text = |name: &str| answer.headers().get(name)?.to_str().ok();
            Some((text(ETAG.as_str())?, text(COUNT)?.parse().ok()?))
        }
        _ => None,
    }
}

fn charge(answer: &Response<Full<Bytes>>) -> f64 {
    let text = answer.headers().get(CHARGE).and_then(|value| value.to_str().ok());
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// What is behind a lock; somebody's panic has left it whole.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
