//! `demo --servicebus`: a local Service Bus, and receivers of its sessions.
//!
//! What lives here: the bus, receivers that take one contact's session after another, and the
//! comparison of what they got with what was appended. What does not: the service and the relay
//! (`../demo.rs`).
//! Invariant: an event is told before it is completed, so that none is completed unseen; a session
//! is given back long before its lock ends.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use fe2o3_amqp::link::ReceiverAttachError;
use fe2o3_amqp::link::delivery::Delivery;
use fe2o3_amqp::link::receiver::CreditMode;
use fe2o3_amqp::sasl_profile::SaslProfile;
use fe2o3_amqp::session::SessionHandle;
use fe2o3_amqp::types::definitions::{Fields, ReceiverSettleMode, SenderSettleMode};
use fe2o3_amqp::types::messaging::{Body, MessageId, Source};
use fe2o3_amqp::types::primitives::{OrderedMap, Symbol, Value};
use fe2o3_amqp::{Connection, Receiver, Session};
use postrider_core::{BatchLimit, ConsumerName, Entry, Feed, Position};
use postrider_servicebus_emulator::{Config, Emulator, Entity};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::exit::SourceContext;
use crate::output::{Output, Tone, escape};

/// The queue; one session is one contact.
pub(super) const QUEUE: &str = "contacts";
/// How long the queue remembers an event's id.
pub(super) const DEDUP_WINDOW: &str = "10m";
/// So many contacts are received side by side.
const RECEIVERS: usize = 4;
/// How long a receiver waits for a session before it looks whether all is over.
const SESSION_WAIT_MS: u32 = 500;
/// A session that is quiet for so long is given back, for another contact's turn.
const QUIET: Duration = Duration::from_millis(200);
/// The longest that a session is kept; its lock lasts a minute.
const TURN: Duration = Duration::from_secs(20);
/// How long receivers may need at the end for what is left.
const DRAIN: Duration = Duration::from_secs(20);
/// Messages that a receiver asks for at a time.
const CREDIT: u32 = 20;
const PAGE: BatchLimit = BatchLimit { records: 256, bytes: 1024 * 1024 };

/// An event as a receiver of its session got it.
struct Received {
    contact: String,
    id: String,
    event_type: String,
}

/// The bus and whoever receives from it. Dropping it ends both.
pub(super) struct Bus {
    emulator: Arc<Emulator>,
    receivers: JoinSet<Result<()>>,
    arrivals: mpsc::Receiver<Received>,
    /// By contact, in the order of arrival.
    seen: HashMap<String, Vec<String>>,
}

impl Bus {
    /// Starts the bus and its receivers; they end when `over` is cancelled and nothing is left.
    pub(super) async fn start(over: &CancellationToken) -> Result<Self> {
        let window = jiff_seconds(DEDUP_WINDOW);
        let contacts = Entity {
            requires_session: true,
            duplicate_detection_window: Some(window),
            ..Entity::default()
        };
        let config = Config::default().with_queue(QUEUE, contacts);
        let emulator = Arc::new(Emulator::start(config).await.context("start the bus")?);
        let (sender, arrivals) = mpsc::channel(64);
        let mut receivers = JoinSet::new();
        for number in 0..RECEIVERS {
            let (sender, over) = (sender.clone(), over.clone());
            let emulator = Arc::clone(&emulator);
            receivers.spawn(async move { receive(number, &emulator, &sender, &over).await });
        }
        Ok(Self { emulator, receivers, arrivals, seen: HashMap::new() })
    }

    pub(super) fn connection_string(&self) -> String {
        self.emulator.connection_string()
    }

    /// Prints each event when the receiver of its contact has it, until all receivers have ended.
    ///
    /// # Errors
    /// A receiver's, or when nobody reads the output any more.
    pub(super) async fn print(&mut self, output: Output) -> Result<()> {
        while let Some(event) = self.arrivals.recv().await {
            let of_contact = self.seen.entry(event.contact.clone()).or_default();
            of_contact.push(event.id.clone());
            let number = of_contact.len();
            if output.json {
                output.json_line(&serde_json::json!({
                    "contact": event.contact,
                    "number": number,
                    "type": event.event_type,
                    "id": event.id,
                }))?;
            } else {
                output.line(format!(
                    "received  {}  contact={}  number {number}  id={}",
                    output.paint(Tone::Good, escape(&event.event_type)),
                    escape(&event.contact),
                    event.id
                ))?;
            }
        }
        while let Some(ended) = self.receivers.join_next().await {
            ended.context("receive from the bus")??;
        }
        Ok(())
    }

    /// Compares what was received with what was appended, and says so.
    ///
    /// # Errors
    /// When an event came twice, behind a later one of its contact, or not at all though a later
    /// one did; when the feed can't be read.
    pub(super) async fn judge(&self, feed: &dyn Feed, output: Output) -> Result<()> {
        let appended = appended(feed).await?;
        let mut received = 0;
        for (contact, ids) in &self.seen {
            let all = appended.get(contact).map(Vec::as_slice).unwrap_or_default();
            if !is_run(all, ids) {
                bail!(
                    "the events of contact {} came as {ids:?}, and were appended as {all:?}",
                    escape(contact)
                );
            }
            received += ids.len();
        }
        let contacts = self.seen.len();
        if output.json {
            output.json_line(&serde_json::json!({
                "received": received,
                "contacts": contacts,
                "exactlyOnceInOrder": true,
            }))?;
        } else {
            output.line(format!(
                "Received {received} events of {contacts} contacts by session: each exactly once, \
                 each contact's in order."
            ))?;
        }
        Ok(())
    }
}

/// Whether `part` stands in `all` as it is, without gaps.
fn is_run(all: &[String], part: &[String]) -> bool {
    let from = part.first().and_then(|first| all.iter().position(|id| id == first));
    from.is_some_and(|from| all[from..].starts_with(part))
}

/// Every event's id, by its key and in the order of the feed.
async fn appended(feed: &dyn Feed) -> Result<BTreeMap<String, Vec<String>>> {
    let nobody = ConsumerName::new("postrider-demo")?;
    let mut appended: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for partition in feed.partitions(&nobody).await.source_context("list partitions")? {
        let mut after = Position::START;
        loop {
            let page = feed.read(&partition, &after, PAGE).await.source_context("read the feed")?;
            if page.entries.is_empty() {
                break;
            }
            for entry in &page.entries {
                if let Entry::Record(record) = entry {
                    let event = &record.event;
                    let of_key = appended.entry(event.key().as_str().to_owned()).or_default();
                    of_key.push(event.id().to_string());
                }
            }
            after = page.position;
        }
    }
    Ok(appended)
}

fn jiff_seconds(text: &str) -> Duration {
    let parsed: jiff::SignedDuration = text.parse().expect("a constant that is a duration");
    parsed.unsigned_abs()
}

/// Takes one session after the other until all is over.
async fn receive(
    number: usize,
    emulator: &Emulator,
    arrivals: &mpsc::Sender<Received>,
    over: &CancellationToken,
) -> Result<()> {
    let (mut connection, mut session) =
        connect(number, emulator.address()).await.context("connect to the bus")?;
    let mut until = None;
    for turn in 0_u64.. {
        if over.is_cancelled() {
            let until = *until.get_or_insert_with(|| Instant::now() + DRAIN);
            // What another receiver holds is its own to end.
            if emulator.entity(QUEUE).messages().is_empty() || Instant::now() >= until {
                break;
            }
        }
        let Some(mut receiver) = next_session(&mut session, format!("{number}-{turn}")).await?
        else {
            continue;
        };
        let turn_ends = Instant::now() + TURN;
        while Instant::now() < turn_ends {
            let Ok(came) = timeout(QUIET, receiver.recv::<Body<Value>>()).await else { break };
            let came = came.context("receive a message")?;
            if arrivals.send(told(&came)).await.is_err() {
                // Nobody is told any more: what is not completed stays in the queue.
                return Ok(());
            }
            receiver.accept(&came).await.context("complete a message")?;
        }
        receiver.close().await.context("give a session back")?;
    }
    session.end().await.context("end the session")?;
    connection.close().await.context("leave the bus")
}

async fn connect(
    number: usize,
    address: SocketAddr,
) -> Result<(fe2o3_amqp::connection::ConnectionHandle<()>, SessionHandle<()>)> {
    let Config { shared_access_key_name, shared_access_key, .. } = Config::default();
    let stream = TcpStream::connect(address).await?;
    let mut connection = Connection::builder()
        .container_id(format!("postrider-demo-{number}"))
        .hostname("127.0.0.1")
        .sasl_profile(SaslProfile::Plain {
            username: shared_access_key_name,
            password: shared_access_key,
        })
        .open_with_stream(stream)
        .await?;
    let session = Session::begin(&mut connection).await?;
    Ok((connection, session))
}

/// The session of any contact that has something and no receiver; none within the wait.
async fn next_session(session: &mut SessionHandle<()>, name: String) -> Result<Option<Receiver>> {
    let mut source = Source::builder().address(QUEUE).build();
    let any = (Symbol::from("com.microsoft:session-filter"), Value::Null);
    source.filter = Some(OrderedMap::from_iter([any]));
    let mut properties = Fields::default();
    properties.insert(Symbol::from("com.microsoft:timeout"), Value::Uint(SESSION_WAIT_MS));
    let attached = Receiver::builder()
        .name(name)
        .source(source)
        .properties(properties)
        .sender_settle_mode(SenderSettleMode::Unsettled)
        .receiver_settle_mode(ReceiverSettleMode::Second)
        .credit_mode(CreditMode::Auto(CREDIT))
        .attach(session)
        .await;
    match attached {
        Ok(receiver) => Ok(Some(receiver)),
        // That there is none is said by a detach.
        Err(ReceiverAttachError::RemoteClosedWithError(_)) => {
            sleep(Duration::from_millis(10)).await;
            Ok(None)
        }
        Err(error) => Err(error).context("ask for a session"),
    }
}

fn told(delivery: &Delivery<Body<Value>>) -> Received {
    let properties = delivery.message().properties.clone().unwrap_or_default();
    let id = match properties.message_id {
        Some(MessageId::String(id)) => id,
        _ => String::new(),
    };
    Received {
        contact: properties.group_id.unwrap_or_default(),
        id,
        event_type: properties.subject.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_no_gap_no_repetition_and_no_other_order() {
        let all = ["1", "2", "3", "4"].map(str::to_owned);
        let is = |part: &[&str]| {
            is_run(&all, &part.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>())
        };
        assert!(is(&["1", "2", "3", "4"]) && is(&["1", "2"]) && is(&["2", "3"]));
        for wrong in [&["1", "3"][..], &["2", "1"], &["1", "1"], &["1", "2", "2"], &["5"], &[]] {
            assert!(!is(wrong), "{wrong:?}");
        }
    }
}
