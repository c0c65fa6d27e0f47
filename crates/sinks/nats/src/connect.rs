//! One connection to the broker, and its end.
//!
//! What lives here: making it, noticing that it is gone, what the server said meanwhile. What does
//! not: the login (`login.rs`) and what is sent (`publish.rs`).
//! Invariant: a link that is no longer up never is again, and no new event is sent on it; another
//! one is made for the next call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::context::GetStreamByNameErrorKind;
use async_nats::jetstream::{self, ContextBuilder};
use async_nats::{Client, Event, connection};
use postrider_core::{Error, Result};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::Dispatch;
use tracing::instrument::WithSubscriber;

use crate::error::connect_error;
use crate::login::Login;
use crate::look;

/// How long what a server said when it was connected to is taken for what it says now.
const LIMIT_HOLDS: Duration = Duration::from_secs(5);

/// A connection.
pub(crate) struct Link {
    client: Client,
    context: jetstream::Context,
    state: Arc<State>,
    opened: Instant,
    /// Whether a question for a stream had an answer so far: a login may not be permitted to ask.
    tells: AtomicBool,
}

/// Whether events can be sent on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Up,
    /// What is under way is still answered; new events go elsewhere.
    Retired,
    Down,
}

/// What its events tell.
struct State {
    standing: watch::Sender<Standing>,
    /// The server's last complaint; it is told apart from the request that it answers.
    complaint: Mutex<Option<String>>,
    /// When an event was answered last.
    answered: Mutex<Instant>,
}

impl State {
    fn worsen(&self, to: Standing) {
        self.standing.send_if_modified(|standing| {
            let worse = to > *standing;
            *standing = to.max(*standing);
            worse
        });
    }

    fn hear(&self, event: &Event) {
        match event {
            Event::Disconnected | Event::Closed | Event::ClientError(_) => {
                self.worsen(Standing::Down);
            }
            // A server that is about to stop.
            Event::LameDuckMode => self.worsen(Standing::Retired),
            Event::ServerError(error) => {
                let mut complaint = self.complaint.lock().unwrap_or_else(PoisonError::into_inner);
                *complaint = Some(error.to_string());
            }
            Event::Connected | Event::Draining | Event::SlowConsumer(_) => {}
        }
    }
}

impl Link {
    /// Connects and logs in.
    ///
    /// # Errors
    /// Of every kind in `error.rs`; nothing was sent.
    pub(crate) async fn open(login: &Login, ack_timeout: Duration) -> Result<Self> {
        let connected = Arc::new(AtomicBool::new(false));
        let state = Arc::new(State {
            standing: watch::Sender::new(Standing::Up),
            complaint: Mutex::default(),
            answered: Mutex::new(Instant::now()),
        });
        let heard = Arc::clone(&state);
        let options =
            login.options(Arc::clone(&connected), ack_timeout).event_callback(move |event| {
                heard.hear(&event);
                std::future::ready(())
            });
        // What the library has to say is in its error, which whoever asks for the link may log.
        let connecting = options.connect(login.addresses()).with_subscriber(Dispatch::none());
        let client = connecting.await.map_err(connect_error)?;
        connected.store(true, Ordering::Release);
        let context = ContextBuilder::new().timeout(ack_timeout).build(client.clone());
        let (opened, tells) = (Instant::now(), AtomicBool::new(true));
        Ok(Self { client, context, state, opened, tells })
    }

    pub(crate) fn context(&self) -> &jetstream::Context {
        &self.context
    }

    /// The server's own limit of a message with its headers, in bytes, when it was connected to.
    /// The client library takes no notice of a later one.
    pub(crate) fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// Whether the server's limit was learned only just now.
    pub(crate) fn is_fresh(&self) -> bool {
        self.opened.elapsed() < LIMIT_HOLDS
    }

    /// The limit of the stream that refused a subject's event as too large, in bytes, if it tells.
    pub(crate) async fn max_message_bytes(&self, stream: Option<&str>, to: &str) -> Option<i32> {
        if !self.tells.load(Ordering::Relaxed) {
            return None;
        }
        let told = look::max_message_bytes(&self.context, stream, to).await;
        self.tells.store(told.is_some(), Ordering::Relaxed);
        told
    }

    pub(crate) fn is_up(&self) -> bool {
        // Its events may be lost on their way; its state is not.
        *self.state.standing.borrow() == Standing::Up
            && self.client.connection_state() == connection::State::Connected
    }

    /// Notes that the server answered.
    pub(crate) fn answered(&self) {
        let mut answered = self.state.answered.lock().unwrap_or_else(PoisonError::into_inner);
        *answered = Instant::now();
    }

    /// Whether nothing was answered for so long.
    pub(crate) fn is_silent_for(&self, time: Duration) -> bool {
        self.state.answered.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= time
    }

    /// Whether JetStream itself says that no stream has the subject.
    pub(crate) async fn has_no(&self, subject: &str) -> bool {
        let found = self.context.stream_by_subject(subject).await;
        found.is_err_and(|error| error.kind() == GetStreamByNameErrorKind::NotFound)
    }

    /// Takes no new events; who sent what is under way may wait for its answer.
    pub(crate) fn retire(&self) {
        self.state.worsen(Standing::Retired);
    }

    /// Ends when the connection is gone.
    pub(crate) async fn down(&self) {
        let mut standing = self.state.standing.subscribe();
        // It cannot fail: this link holds the sender.
        let _ = standing.wait_for(|standing| *standing == Standing::Down).await;
    }

    /// The error of an event whose fate is unknown, with what the server complained about since
    /// the last one.
    pub(crate) fn unknown_fate(&self, error: Error) -> Error {
        let mut complaint = self.state.complaint.lock().unwrap_or_else(PoisonError::into_inner);
        match complaint.take() {
            Some(text) => error.with_source(text),
            None => error,
        }
    }
}
