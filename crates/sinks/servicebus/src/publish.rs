//! The sink itself.
//!
//! What lives here: `ServiceBus`, and the way of a call's events: one chain of transfers for each
//! key, many chains at a time. What does not: the connection (`worker.rs`), kinds (`error.rs`).
//! Invariant: `Confirmed` is said after the disposition `accepted` and nothing else; a key's next
//! transfer leaves only after that of the one before.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use postrider_core::{
    Capabilities, Chain, Clock, Error, ErrorKind, Outcome, Publish, Record, Result, Sink, by_key,
};
use postrider_encoding::{Encoder, EventSource};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use crate::batch::{Filled, Limits, MAX_BATCH_MESSAGES, Transfer, fill};
use crate::config::{Auth, ServiceBusConfig};
use crate::connect::Dialer;
use crate::connection_string::ConnectionString;
use crate::doubts::Doubts;
use crate::encode::MessageEncoder;
use crate::error::{self, Failure, Fate};
use crate::tls;
use crate::token::{SharedAccess, TokenSource};
use crate::worker::{Command, SharedLimits, Worker};

/// Most bytes of a call: several batches' worth, and a fraction of the relay's budget.
const CALL_BYTES: usize = 4 * 1024 * 1024;
/// Calls at a time from one partition: while one waits for its last key, others fill the link.
const CALLS_IN_FLIGHT: usize = 4;
/// Into so many parts a batch is split that was refused as a whole. Each step is a round trip of
/// the call's time: 4,500 events take five of them, where halving would take thirteen.
const SPLIT_INTO: usize = 8;
/// Commands that wait for the worker; more than that wait before they are made.
const QUEUED_COMMANDS: usize = 64;
/// How long closing waits for the worker beyond its own bounds.
const WORKER_WAIT: Duration = Duration::from_secs(6);

/// Sends events to a queue or topic, batched by session.
///
/// # Ordering
/// A key's events are of one session and leave in order, each batch after the acceptance of the one
/// before ([`Chain::Many`]). After a failure its later events are held back.
/// # Cancellation
/// A dropped `publish`, like a time-out or a lost connection, leaves it unknown whether the service
/// took what was on its way: it is delivered again under the same message id. The connection is
/// given up and cut with it, so that nothing of it leaves this host any more.
pub struct ServiceBus {
    dialer: Arc<Dialer>,
    encoder: MessageEncoder,
    permits: Semaphore,
    in_flight: usize,
    timeout: Duration,
    dedup_window: Option<Duration>,
    doubts: Doubts,
    limits: SharedLimits,
    running: Mutex<Option<Running>>,
    closed: AtomicBool,
}

struct Running {
    commands: mpsc::Sender<Command>,
    /// Dropping it ends the worker.
    _task: JoinSet<()>,
}

impl ServiceBus {
    /// The sink of a configuration. Nothing is connected to yet. `clock` tells when tokens expire.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) for impossible settings.
    pub fn new(config: &ServiceBusConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        config.check()?;
        let tokens = match config.auth {
            Auth::ConnectionString => None,
            Auth::Entra => Some(entra_tokens(config)?),
        };
        Self::build(config, clock, tokens)
    }

    /// The same with tokens from elsewhere; the connection string then has an endpoint and no key.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_tokens(
        config: &ServiceBusConfig,
        clock: Arc<dyn Clock>,
        tokens: Arc<dyn TokenSource>,
    ) -> Result<Self> {
        config.check()?;
        Self::build(config, clock, Some(tokens))
    }

    fn build(
        config: &ServiceBusConfig,
        clock: Arc<dyn Clock>,
        tokens: Option<Arc<dyn TokenSource>>,
    ) -> Result<Self> {
        let mut address = ConnectionString::parse(&config.address())?;
        let entity = config.entity(address.entity.as_deref())?;
        let ttl = Duration::from_millis(config.token_ttl_ms);
        let tokens = match (tokens, address.credential.take()) {
            (Some(tokens), None) => tokens,
            (None, Some(credential)) => Arc::new(SharedAccess { credential, ttl }),
            (Some(_), Some(_)) => {
                return Err(Error::permanent(
                    "connection_string: it has a key or a signature, and tokens come from \
                     elsewhere; keep the Endpoint alone",
                ));
            }
            (None, None) => {
                return Err(Error::permanent(
                    "connection_string: SharedAccessKeyName and SharedAccessKey are missing (or a \
                     SharedAccessSignature)",
                ));
            }
        };
        let tls = match address.emulator {
            true => None,
            false => Some(tls::connector(config.ca_file.as_deref())?),
        };
        let source = match &config.source {
            Some(text) => EventSource::new(text.as_str())?,
            None => EventSource::default(),
        };
        let encoder = MessageEncoder {
            encoder: Encoder::new(config.encoding, source),
            long_keys: config.long_keys,
        };
        let connect_timeout = Duration::from_millis(config.connect_timeout_ms);
        let doubts = Doubts::new(&entity, config.dedup_window(), Arc::clone(&clock));
        let dialer = Dialer { address, entity, tokens, tls, clock, timeout: connect_timeout };
        Ok(Self {
            dialer: Arc::new(dialer),
            encoder,
            permits: Semaphore::new(config.in_flight),
            in_flight: config.in_flight,
            timeout: Duration::from_millis(config.timeout_ms),
            dedup_window: config.dedup_window(),
            doubts,
            limits: SharedLimits::default(),
            running: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// The worker, started when it is first needed.
    fn worker(&self) -> Result<mpsc::Sender<Command>, Failure> {
        // The slot is whole at every point where a panic could poison it.
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::Acquire) {
            return Err(Failure::transient("the sink is closed"));
        }
        if let Some(running) = running.as_ref().filter(|running| !running.commands.is_closed()) {
            return Ok(running.commands.clone());
        }
        let (sender, commands) = mpsc::channel(QUEUED_COMMANDS);
        let (dialer, limits) = (Arc::clone(&self.dialer), Arc::clone(&self.limits));
        let mut task = JoinSet::new();
        task.spawn(Worker { dialer, commands, limits }.run());
        *running = Some(Running { commands: sender.clone(), _task: task });
        Ok(sender)
    }

    /// Gives the worker a command and waits for its answer, for so long.
    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, Failure>>) -> Command,
        longest: Duration,
    ) -> Result<T, Failure> {
        let worker = self.worker()?;
        let (sender, answer) = oneshot::channel();
        let asked = async {
            worker.send(command(sender)).await.map_err(|_| error::not_handed_over())?;
            answer.await.unwrap_or_else(|_| Err(error::not_handed_over()))
        };
        timeout(longest, asked).await.unwrap_or_else(|_| Err(error::no_link(longest)))
    }

    /// Connecting, and before it the end of a transfer that waits for credit.
    fn longest_wait(&self) -> Duration {
        self.dialer.timeout + self.timeout
    }

    /// Sends one transfer and waits until it is settled. When that takes too long, or nobody waits
    /// any longer, its link is given up.
    async fn send(&self, transfer: Transfer, longest: Duration) -> Fate {
        let sent = async {
            let worker = self.worker().map_err(Fate::Failed)?;
            let (sender, answer) = oneshot::channel();
            let lost = || Fate::Failed(error::not_handed_over());
            worker.send(Command::Send(Box::new(transfer), sender)).await.map_err(|_| lost())?;
            let handed = answer.await.unwrap_or_else(|_| Err(lost()))?;
            Ok::<_, Fate>(handed.fate().await)
        };
        match timeout(longest, sent).await {
            Ok(Ok(fate)) | Ok(Err(fate)) => fate,
            Err(_) => Fate::Unknown(error::unsettled(longest)),
        }
    }

    /// Sends a key's events in order until the time for it is over, and says how many were taken
    /// before what.
    async fn chain(
        &self,
        records: &[&Record],
        limits: Limits,
        times: Times,
    ) -> (usize, Option<Error>) {
        let mut taken = 0;
        let mut most = MAX_BATCH_MESSAGES;
        while taken < records.len() && Instant::now() < times.begin_until {
            let permit = timeout_at(times.begin_until, self.permits.acquire()).await;
            let Ok(permit) = permit else { break };
            let _permit = permit.expect("the semaphore is never closed");
            let filled = fill(&self.encoder, &records[taken..], limits, most);
            let Filled { count, transfer } = match filled {
                Ok(filled) => filled,
                Err(error) => return (taken, Some(error)),
            };
            let longest = times.settled_until.saturating_duration_since(Instant::now());
            let on_their_way = self.doubts.on_their_way(&records[taken..taken + count]);
            match self.send(transfer, longest.min(self.timeout)).await {
                Fate::Accepted => {
                    on_their_way.confirmed();
                    taken += count;
                }
                // One of several is to blame, and is found by sending fewer at a time.
                Fate::Refused(_) if count > 1 => {
                    on_their_way.not_taken();
                    most = count.div_ceil(SPLIT_INTO);
                }
                Fate::Refused(failure) | Fate::Failed(failure) => {
                    on_their_way.not_taken();
                    return (taken, Some(failure.error()));
                }
                Fate::Unknown(failure) => return (taken, Some(failure.error())),
            }
        }
        // Behind what was taken, the rest is held back for want of time alone.
        (taken, (taken == 0).then(|| error::not_begun(times.sending).error()))
    }

    async fn publish_chains(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let records = batch.records();
        if records.is_empty() {
            return Vec::new();
        }
        let times = Times::of(&batch);
        let longest = self.longest_wait().min(times.sending);
        let (keys, limits) = (by_key(records), self.ask(Command::Connect, longest).await);
        let mut outcomes: Vec<Outcome> = records.iter().map(|_| Outcome::HeldBack).collect();
        let limits = match limits {
            Ok(limits) => limits,
            Err(failure) => {
                for at in keys.iter().filter_map(|places| places.first()) {
                    outcomes[*at] = Outcome::Failed(failure.error());
                }
                return outcomes;
            }
        };
        let mut chains: FuturesUnordered<_> = keys
            .iter()
            .map(|places| async move {
                let chain: Vec<&Record> = places.iter().map(|at| &records[*at]).collect();
                (places, self.chain(&chain, limits, times).await)
            })
            .collect();
        while let Some((places, (taken, error))) = chains.next().await {
            for at in &places[..taken] {
                outcomes[*at] = Outcome::Confirmed;
            }
            if let Some(error) = error {
                outcomes[places[taken]] = Outcome::Failed(error);
            }
        }
        outcomes
    }
}

/// The times of a call.
#[derive(Debug, Clone, Copy)]
struct Times {
    sending: Duration,
    /// Nothing is begun after this.
    begin_until: Instant,
    /// Nothing is waited for after this: the caller's own patience, several times `sending`, ends
    /// soon after, and with it all that was confirmed would be forgotten.
    settled_until: Instant,
}

impl Times {
    fn of(batch: &Publish<'_>) -> Self {
        let (begin, sending) = (Instant::now(), batch.sending_time());
        Self { sending, begin_until: begin + sending, settled_until: begin + sending * 5 / 2 }
    }
}

#[async_trait]
impl Sink for ServiceBus {
    fn capabilities(&self) -> Capabilities {
        let limits = *self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        Capabilities {
            max_event_bytes: limits.and_then(|limits| limits.payload_bytes()),
            max_batch_records: MAX_BATCH_MESSAGES,
            max_batch_bytes: CALL_BYTES,
            max_in_flight: CALLS_IN_FLIGHT,
            chain: Chain::Many,
            dedup_window: self.dedup_window,
        }
    }

    async fn publish(&self, batch: Publish<'_>) -> Vec<Outcome> {
        let outcomes = self.publish_chains(batch).await;
        self.doubts.tell();
        outcomes
    }

    /// Connects, hands over a token, opens the link to the entity and looks whether it stays open.
    /// Sends nothing.
    async fn check(&self) -> Result<()> {
        self.ask(Command::Check, self.longest_wait()).await.map_err(|failure| failure.error())
    }

    /// Waits until what is on its way is settled, then closes link and connection.
    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let all = u32::try_from(self.in_flight).unwrap_or(u32::MAX);
        let flushed = timeout(self.timeout, self.permits.acquire_many(all)).await;
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(running) = running {
            let (sender, answer) = oneshot::channel();
            let closing = async {
                if running.commands.send(Command::Close(sender)).await.is_ok() {
                    // Without an answer the worker is gone, which is as good.
                    let _ = answer.await;
                }
            };
            let _ = timeout(WORKER_WAIT, closing).await;
        }
        match flushed {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::new(
                ErrorKind::Transient,
                "servicebus: closed before everything on its way was settled",
            )),
        }
    }
}

#[cfg(feature = "entra")]
use crate::entra::tokens as entra_tokens;

#[cfg(not(feature = "entra"))]
fn entra_tokens(_: &ServiceBusConfig) -> Result<Arc<dyn TokenSource>> {
    Err(Error::permanent(
        "auth: this build can't sign in by Microsoft Entra ID; build it with --features entra",
    ))
}

impl fmt::Debug for ServiceBus {
    /// Where it sends to; never as whom.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceBus({:?})", self.dialer)
    }
}
