//! One connection to the broker, its channels, and its end.
//!
//! What lives here: making it, its channels, noticing that it is gone or blocked. What does not:
//! the login (`login.rs`), what is under way (`under_way.rs`) and what is sent (`publish.rs`).
//! Invariant: a channel has at most one event under way. Only so the broker's answers belong to
//! one event for sure: a message that it returns, and an error that closes the channel. Nor does a
//! channel's number come twice on one connection: the client library keeps the error that closed
//! a channel, and would tell it to the next one of its number.

use std::io;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_rs::Runtime;
use futures_util::{FutureExt, Stream as FuturesStream, StreamExt};
use lapin::options::ConfirmSelectOptions;
use lapin::uri::{AMQPQueryString, AMQPUri};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties, Event};
use postrider_core::Result;
use tokio::time::timeout;
use tokio_util::compat::TokioAsyncReadCompatExt;
use tracing::Dispatch;
use tracing::instrument::WithSubscriber;

use crate::error::connect_error;
use crate::line::Cutter;
use crate::login::{Address, Login};
use crate::reach;
use crate::runtime::{Kit, silence_this_thread};
use crate::under_way::{UnderWay, lock};

/// In seconds. A connection that is silent while events are under way is left far earlier.
const HEARTBEAT_S: u16 = 10;
/// Largest frame, in bytes: RabbitMQ's default. The client library makes buffers for many of them,
/// and would believe a server that names more, or no limit at all.
const FRAME_MAX: u32 = 131_072;
/// Where the broker blocked the connection and gave no reason.
const NO_REASON: &str = "connection.blocked";

/// A connection.
pub(crate) struct Link {
    connection: Connection,
    cutter: Cutter,
    /// Takes no new events; who sent what is under way may wait for its answer.
    retired: AtomicBool,
    /// Somebody did not wait for the answer of what is under way.
    given_up: AtomicBool,
    /// Channels that were opened so far, and how many there may be.
    opened: AtomicUsize,
    enough: usize,
    most: usize,
    under_way: UnderWay,
    notices: Mutex<Notices>,
}

/// What the broker says of the connection as a whole.
struct Notices {
    events: Pin<Box<dyn FuturesStream<Item = Event> + Send>>,
    reason: String,
}

impl Link {
    /// Connects and logs in, to the first server that can be had of the list from its place `next`
    /// on. That moves on with each attempt, also with one that is given up halfway: whoever comes
    /// back does not wait for the same dead server again.
    ///
    /// # Errors
    /// `Transient`, the last server's; nothing was sent.
    pub(crate) async fn open(
        login: &Login,
        next: &AtomicUsize,
        in_flight: usize,
        within: Duration,
    ) -> Result<Self> {
        let to = |address| Self::to(address, login, in_flight).with_subscriber(Dispatch::none());
        reach::first(login, next, within, to).await
    }

    async fn to(address: &Address, login: &Login, in_flight: usize) -> Result<Self> {
        let (stream, cutter) = reach::line(address, login).await?;
        let query = AMQPQueryString {
            heartbeat: Some(HEARTBEAT_S),
            frame_max: Some(FRAME_MAX),
            ..Default::default()
        };
        let uri = AMQPUri { vhost: address.vhost.clone(), query, ..AMQPUri::default() };
        let properties = ConnectionProperties::default()
            .with_connection_name("postrider".into())
            .with_auth_provider(address.way.clone());
        let handed = Mutex::new(Some(stream.compat()));
        // It is called on the library's own thread, and once: nothing is made again by itself.
        let connect = async move |_: AMQPUri, _: Runtime<Kit>| {
            silence_this_thread();
            let stream = lock(&handed).take();
            let gone = || lapin::Error::from(io::Error::from(io::ErrorKind::NotConnected));
            stream.map(AsyncTcpStream::Plain).ok_or_else(gone)
        };
        let runtime = Runtime::new(Kit::current());
        let connection = Connection::connector(uri, runtime, connect, properties).await;
        let connection = connection.map_err(|failure| connect_error(&failure))?;
        let notices = Box::pin(connection.events_listener());
        let most = usize::from(connection.configuration().channel_max()).max(1);
        // One number for each, and twice as many for channels that the broker closes.
        let events = in_flight.min(most / 3).max(1);
        let under_way = UnderWay::new(events, cutter.token());
        Ok(Self {
            connection,
            cutter,
            retired: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            opened: AtomicUsize::new(0),
            // Whoever has room for an event by then may open one more.
            enough: (most - events).max(1),
            most,
            under_way,
            notices: Mutex::new(Notices { events: notices, reason: NO_REASON.to_owned() }),
        })
    }

    /// What is under way.
    pub(crate) fn under_way(&self) -> &UnderWay {
        &self.under_way
    }

    /// A channel without an event under way, in confirm mode.
    ///
    /// # Errors
    /// Why none could be opened. It says nothing of any event.
    pub(crate) async fn channel(&self) -> lapin::Result<Channel> {
        if let Some(channel) = self.under_way.idle_channel() {
            return Ok(channel);
        }
        let channel = self.fresh_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(channel)
    }

    /// A channel of its own, under a number that no other had.
    ///
    /// # Errors
    /// Why none could be opened.
    pub(crate) async fn fresh_channel(&self) -> lapin::Result<Channel> {
        let opened = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        if opened > self.enough {
            self.retire();
        }
        if opened > self.most {
            return Err(lapin::ErrorKind::ChannelsLimitReached.into());
        }
        self.connection.create_channel().await
    }

    /// Largest frame, in bytes.
    pub(crate) fn frame_max(&self) -> usize {
        usize::try_from(self.connection.configuration().frame_max()).unwrap_or(usize::MAX)
    }

    /// Whether new events may be sent on it.
    pub(crate) fn is_up(&self) -> bool {
        !self.retired.load(Ordering::SeqCst) && self.is_connected()
    }

    /// Whether an answer can be one to an event. What the client library tells once the connection
    /// has failed is the connection's error, whichever event it tells it to.
    pub(crate) fn is_connected(&self) -> bool {
        !self.cutter.has_ended() && self.connection.status().connected()
    }

    /// Why the broker takes no messages of this connection now, if it does not.
    pub(crate) fn blocked(&self) -> Option<String> {
        let mut notices = lock(&self.notices);
        while let Some(Some(event)) = notices.events.next().now_or_never() {
            if let Event::ConnectionBlocked(reason) = event {
                notices.reason = reason;
            }
        }
        self.connection.status().blocked().then(|| notices.reason.clone())
    }

    /// Takes no new events, for which another connection is made. Who waits for an answer may wait
    /// on; what nobody waits for must not arrive behind what the other connection sends.
    fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
        if self.given_up.load(Ordering::SeqCst) {
            self.cut();
        }
    }

    /// Notes that an event is under way for whose answer nobody waits any more.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::SeqCst);
        if self.retired.load(Ordering::SeqCst) {
            self.cut();
        }
    }

    /// Ends it at once: nothing of it is sent any more.
    pub(crate) fn cut(&self) {
        self.retired.store(true, Ordering::SeqCst);
        self.cutter.cut();
    }

    /// Waits until the connection is gone.
    pub(crate) async fn ended(&self) {
        self.cutter.ended().await;
    }

    /// Ends it in order. It ends in any case.
    pub(crate) async fn close(&self, within: Duration) {
        self.retired.store(true, Ordering::SeqCst);
        // Whoever can't hear it will see the connection end.
        let _ = timeout(within, self.connection.close(200, "OK".into())).await;
        self.cut();
    }
}
