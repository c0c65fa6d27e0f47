//! The sink's end of `servicebus`: the emulator, with duplicate detection on.
//!
//! What lives here: the queue that relays send to, its outages, and receiving all of it at the end
//! by Microsoft's own SDK for Python. What does not: the emulator itself, and judging what came.
//! Invariant: what arrived is what receivers of sessions got, in the order in which each had it; if
//! the queue held anything else, that is told.

use std::collections::{BTreeMap, HashSet};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use postrider_servers::servicebus_sdk::Sdk;
use postrider_servicebus_emulator::{Config, Emulator, Entity, Status, StoredMessage};
use postrider_sink_servicebus::TOPIC_PROPERTY;
use serde::Deserialize;
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

use crate::deliveries::{Arrived, Delivery, Mark, Place};
use crate::schedule::Outage;

/// The queue.
pub const QUEUE: &str = "events";
/// The property that the sink adds to an event's trace.
const DIAGNOSTIC_ID: &str = "Diagnostic-Id";
/// What the SDK does. It ends by itself, also if the emulator should not answer.
const SCRIPT: &str = include_str!("bus/receive.py");
/// After so many transfers the first connection ends without an answer, in every schedule.
const FIRST_DEATH: u64 = 25;
/// Longer than any schedule.
const FOR_EVER: Duration = Duration::from_secs(3_600);

/// A running emulator.
pub struct Bus {
    emulator: Emulator,
    /// Ends the emulator's tasks with itself.
    _runtime: Runtime,
}

impl Bus {
    /// Starts it on a free port of the loopback interface.
    ///
    /// # Errors
    /// When there is none.
    pub fn start() -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.context("start the emulator's runtime")?;
        let entity = Entity {
            requires_session: true,
            duplicate_detection_window: Some(FOR_EVER),
            ..Entity::default()
        };
        let config = Config::default().with_queue(QUEUE, entity);
        let emulator = runtime.block_on(Emulator::start(config)).context("start the emulator")?;
        emulator.faults().drop_connection_after(QUEUE, FIRST_DEATH);
        Ok(Self { emulator, _runtime: runtime })
    }

    /// What relays connect with.
    pub fn connection_string(&self) -> String {
        self.emulator.connection_string()
    }

    /// Begins or ends an outage.
    pub fn set_outage(&self, outage: Option<Outage>) {
        let faults = self.emulator.faults();
        match outage {
            None => faults.clear(),
            Some(Outage::ServerError) => faults.set_status(QUEUE, Status::SendDisabled),
            Some(Outage::Throttled) => faults.throttle_for(QUEUE, FOR_EVER),
            Some(Outage::Silent) => faults.lose_confirmations(QUEUE, u64::MAX),
            Some(Outage::Refused) => {
                faults.refuse_tokens(u64::MAX);
                faults.drop_connections();
            }
        }
    }

    /// From now on everything is taken and confirmed.
    pub fn heal(&self) {
        self.emulator.faults().clear();
    }

    /// Whether messages of all these ids are in the queue.
    pub fn has(&self, ids: &[String]) -> bool {
        let messages = self.emulator.entity(QUEUE).messages();
        let held: HashSet<&str> =
            messages.iter().filter_map(|message| message.message_id.as_deref()).collect();
        ids.iter().all(|id| held.contains(id.as_str()))
    }

    /// This moment.
    pub fn mark(&self) -> Mark {
        let messages = self.emulator.entity(QUEUE).messages();
        Mark::Count(messages.last().map_or(0, |last| place(last) + 1))
    }

    /// Everything that the SDK's receivers get, session by session. The queue is empty afterwards.
    ///
    /// # Errors
    /// When the SDK is not installed, or does not come to its end.
    pub fn arrived(&self) -> Result<Arrived> {
        let mut arrived = Arrived { drops_repetitions: true, ..Arrived::default() };
        let held = self.emulator.entity(QUEUE).messages().len();
        let received = self.receive()?;
        let left = self.emulator.entity(QUEUE).messages().len();
        if (received.len(), left) != (held, 0) {
            let received = received.len();
            arrived.unreadable.push(format!(
                "of {held} messages in the queue receivers got {received}, and {left} are left"
            ));
        }
        for received in received {
            let begun = received.sequence_number;
            match message(received) {
                // A message does not tell which relay sent it; none can come twice.
                Ok(message) => {
                    let place = Place::Request { begun, relay: usize::MAX };
                    arrived.deliveries.push(Delivery { message, place });
                }
                Err(error) => arrived.unreadable.push(format!("{error:#}")),
            }
        }
        Ok(arrived)
    }

    /// Runs the SDK's receivers until there is no session left.
    fn receive(&self) -> Result<Vec<Received>> {
        let output = Command::new(Sdk::Python.program()?)
            .args(["-c", SCRIPT, QUEUE])
            .env("CONNECTION_STRING", self.connection_string())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .output()
            .context("start the SDK's receivers")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "the SDK's receivers: {}\n{said}", output.status);
        let text = String::from_utf8(output.stdout).context("read what the receivers got")?;
        let lines = text.lines().map(|line| serde_json::from_str(line).context("read a message"));
        lines.collect()
    }
}

/// A message as the SDK's receiver told it.
#[derive(Deserialize)]
struct Received {
    id: Option<String>,
    session: Option<String>,
    sequence_number: u64,
    subject: Option<String>,
    content_type: Option<String>,
    properties: BTreeMap<String, String>,
    /// In base64.
    body: String,
}

fn place(stored: &StoredMessage) -> u64 {
    stored.sequence_number.unsigned_abs()
}

/// The event, as it was received.
fn message(received: Received) -> Result<Delivered> {
    let id = received.id.context("a message has no id")?;
    let id: Uuid = id.parse().context("read the id of a message")?;
    let mut properties = received.properties;
    let topic = properties.remove(TOPIC_PROPERTY).context("a message has no topic")?;
    properties.remove(DIAGNOSTIC_ID);
    let mut headers: Vec<(String, String)> =
        properties.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect();
    headers.sort();
    Ok(Delivered {
        id: EventId::from_uuid(id),
        key: received.session.context("a message has no session")?,
        topic,
        event_type: received.subject.context("a message has no subject")?,
        content_type: received.content_type.context("a message has no content type")?,
        headers,
        payload: BASE64.decode(received.body).context("read the body of a message")?,
    })
}
