//! The sink itself.
//!
//! What lives here: `Webhook`, its client and the life of one request. What does not: the mapping
//! of answers to kinds (`error.rs`).
//! Invariant: `Confirmed` is said after a 2xx status and nothing else.

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::limits::BUDGET_BYTES;
use postrider_core::{
    Capabilities, Chain, Clock, Error, Key, Outcome, Publish, Record, Result, Sink,
};
use postrider_encoding::{Encoder, EventSource};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, Proxy, Response};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::concurrency::permits;
use crate::config::WebhookConfig;
use crate::encode::{event_headers, fixed_headers};
use crate::error::{resolve_error, status_error, transport_error};
use crate::resolve::GuardedResolver;
use crate::signature::{SIGNATURE_HEADER, SigningKey, TIMESTAMP_HEADER, WEBHOOK_ID_HEADER};
use crate::target::Target;

/// An answer's body is read only so that its connection can be used again.
const MAX_ANSWER_BYTES: usize = 64 * 1024;
/// A slow body is not waited for: a new connection costs less.
const ANSWER_WAIT: Duration = Duration::from_millis(250);
const USER_AGENT: &str = concat!("postrider/", env!("CARGO_PKG_VERSION"));

/// Sends each event as one signed POST request.
///
/// # Ordering
/// It sends concurrently and so takes one event of a key at a time ([`Chain::One`]).
/// # Cancellation
/// A dropped `publish`, like a time-out, leaves it unknown whether the receiver took the event:
/// it is delivered again under the same `webhook-id`.
pub struct Webhook {
    target: Target,
    encoder: Encoder,
    keys: Vec<SigningKey>,
    fixed_headers: HeaderMap,
    client: Client,
    resolver: GuardedResolver,
    proxied: bool,
    permits: Arc<Semaphore>,
    concurrency: usize,
    connect_timeout: Duration,
    clock: Arc<dyn Clock>,
    closed: AtomicBool,
}

impl Webhook {
    /// The sink of a configuration. Nothing is sent yet. `clock` tells the time of signing.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible settings,
    /// among them an address that is not public without `allow_private`.
    pub fn new(config: &WebhookConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        config.check()?;
        let target = Target::new(config)?;
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        // With a proxy the only name resolved here is the proxy's, which the operator chose.
        let proxied = config.proxy.is_some();
        let resolver = GuardedResolver { allow_private: config.allow_private || proxied };
        let host_and_port = format!("{}:{}", target.host(), target.port());
        Ok(Self {
            encoder: Encoder::new(config.encoding, source),
            keys: signing_keys(config)?,
            fixed_headers: fixed_headers(&config.headers)?,
            client: client(config, &target, resolver)?,
            resolver,
            proxied,
            permits: permits(&host_and_port, config.concurrency),
            concurrency: config.concurrency,
            connect_timeout: Duration::from_millis(config.connect_timeout_ms),
            target,
            clock,
            closed: AtomicBool::new(false),
        })
    }

    /// Sends one event and waits for the status of the answer.
    async fn send(&self, record: &Record) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::transient("the webhook sink is closed"));
        }
        let url = self.target.url(&record.event)?;
        let message = self.encoder.encode(record);
        let mut headers = self.fixed_headers.clone();
        event_headers(record, &message, &mut headers)?;
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        // Signed after the wait for a permit: receivers refuse old times.
        self.sign(record, &message.body, &mut headers);
        let request = self.client.post(url).headers(headers).body(message.body);
        let response = request.send().await.map_err(transport_error)?;
        let status = response.status();
        let result = match status.is_success() {
            true => Ok(()),
            false => Err(status_error(status, response.headers(), self.clock.now())),
        };
        // Whatever becomes of the body, the status has decided.
        let _ = timeout(ANSWER_WAIT, drain(response)).await;
        result
    }

    fn sign(&self, record: &Record, body: &[u8], headers: &mut HeaderMap) {
        let id = record.event.id().to_string();
        let timestamp = self.clock.now().as_millis() / 1_000;
        let mut insert = |name, text: &str| {
            let value = HeaderValue::from_str(text).expect("ids, digits and base 64 are ASCII");
            headers.insert(HeaderName::from_static(name), value);
        };
        if !self.keys.is_empty() {
            let signatures: Vec<String> =
                self.keys.iter().map(|key| key.sign(&id, timestamp, body)).collect();
            insert(SIGNATURE_HEADER, &signatures.join(" "));
        }
        insert(WEBHOOK_ID_HEADER, &id);
        insert(TIMESTAMP_HEADER, &timestamp.to_string());
    }
}

fn client(config: &WebhookConfig, target: &Target, resolver: GuardedResolver) -> Result<Client> {
    let mut builder = Client::builder()
        .user_agent(USER_AGENT)
        .redirect(Policy::none())
        // The environment's proxies would see every event, and connect to private addresses.
        .no_proxy()
        .dns_resolver(Arc::new(resolver))
        .timeout(Duration::from_millis(config.timeout_ms))
        .connect_timeout(Duration::from_millis(config.connect_timeout_ms))
        .pool_max_idle_per_host(config.concurrency);
    if let Some(proxy) = &config.proxy {
        let proxy = Proxy::all(proxy.expose()).map_err(|cause| {
            Error::permanent("proxy is no URL").with_source(cause.without_url())
        })?;
        builder = builder.proxy(proxy);
    } else if target.is_plain_http() {
        // No authority is needed, and machines without any can still send to loopback.
        builder = builder.tls_certs_only([]);
    }
    if let Some(path) = &config.ca_file {
        let read = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Error::permanent("ca_file: give a readable PEM file").with_source(cause)
        };
        let pem = std::fs::read(path).map_err(|cause| read(cause.into()))?;
        let authorities = Certificate::from_pem_bundle(&pem).map_err(|cause| read(cause.into()))?;
        builder = builder.tls_certs_merge(authorities);
    }
    builder.build().map_err(|cause| {
        Error::permanent("set up the HTTP client").with_source(cause.without_url())
    })
}

/// Reads the rest of an answer, up to a bound; beyond it the connection is dropped.
async fn drain(mut response: Response) {
    let mut read = 0;
    while let Ok(Some(chunk)) = response.chunk().await {
        read += chunk.len();
        if read > MAX_ANSWER_BYTES {
            return;
        }
    }
}

impl fmt::Debug for Webhook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Webhook({:?}, {} keys)", self.target, self.keys.len())
    }
}

#[async_trait]
impl Sink for Webhook {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_event_bytes: None,
            max_batch_records: 1,
            max_batch_bytes: BUDGET_BYTES,
            max_in_flight: self.concurrency,
            chain: Chain::One,
            dedup_window: None,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let mut failed: HashSet<&Key> = HashSet::new();
        let mut outcomes = Vec::with_capacity(batch.records().len());
        for record in batch.records() {
            let key = record.event.key();
            outcomes.push(match failed.contains(key) {
                true => Outcome::HeldBack,
                false => match self.send(record).await {
                    Ok(()) => Outcome::Confirmed,
                    Err(error) => {
                        failed.insert(key);
                        Outcome::Failed(error)
                    }
                },
            });
        }
        outcomes
    }

    /// Resolves the host and connects to it. Sends nothing: any request would be an event.
    async fn check(&self) -> Result<()> {
        if self.proxied {
            return Ok(());
        }
        let (host, port) = (self.target.host(), self.target.port());
        let found = match self.target.address() {
            Some(address) => vec![SocketAddr::new(address, port)],
            None => {
                let found = timeout(self.connect_timeout, self.resolver.lookup(host)).await;
                found
                    .map_err(|_| Error::transient("resolving the webhook's host took too long"))?
                    .map_err(resolve_error)?
            }
        };
        let addresses: Vec<SocketAddr> =
            found.into_iter().map(|address| SocketAddr::new(address.ip(), port)).collect();
        let connected = timeout(self.connect_timeout, TcpStream::connect(&addresses[..])).await;
        connected
            .map_err(|_| Error::transient("connecting to the webhook's host took too long"))?
            .map_err(|cause| {
                Error::transient("connect to the webhook's host").with_source(cause)
            })?;
        Ok(())
    }

    /// Sends nothing more. There is nothing to flush: each event was confirmed on its own.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        Ok(())
    }
}

/// Reads the keys; a refusal names the setting and the key's place in it, never the key.
fn signing_keys(config: &WebhookConfig) -> Result<Vec<SigningKey>> {
    let parse = |(index, text)| {
        SigningKey::parse(text).map_err(|error| {
            let number = index + 1;
            Error::new(
                error.kind(),
                format!(
                    "signing_keys: {error} (number {number} of the list); make one with echo \
                     \"whsec_$(head -c 32 /dev/urandom | base64)\""
                ),
            )
        })
    };
    config.signing_keys.iter().enumerate().map(parse).collect()
}
