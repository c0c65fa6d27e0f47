//! Receiving: links with and without sessions, and what is said of messages.
//!
//! What lives here: attaching, taking exactly so many messages, settling them. What does not:
//! renewing locks and looking by number (`management.rs`).
//! Invariant: no message is asked for that nobody waits for, so none is locked in vain.

use std::time::Duration;

use fe2o3_amqp::Receiver;
use fe2o3_amqp::link::delivery::Delivery;
use fe2o3_amqp::link::receiver::CreditMode;
use fe2o3_amqp::link::{ReceiverAttachError, RecvError};
use fe2o3_amqp::session::SessionHandle;
use fe2o3_amqp::types::definitions::{
    Error, ErrorCondition, Fields, ReceiverSettleMode, SenderSettleMode,
};
use fe2o3_amqp::types::messaging::annotations::OwnedKey;
use fe2o3_amqp::types::messaging::{Body, Modified, Properties, Source};
use fe2o3_amqp::types::primitives::{OrderedMap, SimpleValue, Symbol, Value};
use tokio::time::timeout;
use uuid::Uuid;

use super::{Result, Trouble, WITHIN};

const SESSION_FILTER: &str = "com.microsoft:session-filter";
/// Long enough for a message that is there, short enough to wait for one that is not.
const BRIEFLY: Duration = Duration::from_millis(300);

/// How messages are wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Want<'a> {
    Locked,
    /// Gone once they are received.
    Deleted,
    Session(&'a str),
    /// Of any session; waits so long for one.
    NextSession(u32),
}

/// A receiver's link.
pub(crate) struct Inbox {
    receiver: Receiver,
}

/// A message that came.
#[derive(Debug)]
pub(crate) struct Got(Delivery<Body<Value>>);

impl Inbox {
    pub(super) async fn attach(
        session: &mut SessionHandle<()>,
        name: &str,
        path: &str,
        want: Want<'_>,
    ) -> Result<Self, ReceiverAttachError> {
        let mut source = Source::builder().address(path).build();
        let mut link = Fields::default();
        let asked = match want {
            Want::Locked | Want::Deleted => None,
            Want::Session(id) => Some(Value::String(id.to_owned())),
            Want::NextSession(wait_ms) => {
                link.insert(Symbol::from("com.microsoft:timeout"), Value::Uint(wait_ms));
                Some(Value::Null)
            }
        };
        source.filter =
            asked.map(|asked| OrderedMap::from_iter([(Symbol::from(SESSION_FILTER), asked)]));
        let (from, to) = match want {
            Want::Deleted => (SenderSettleMode::Settled, ReceiverSettleMode::First),
            _ => (SenderSettleMode::Unsettled, ReceiverSettleMode::Second),
        };
        let receiver = Receiver::builder()
            .name(name)
            .source(source)
            .properties(link)
            .sender_settle_mode(from)
            .receiver_settle_mode(to)
            .credit_mode(CreditMode::Manual)
            .attach(session)
            .await?;
        Ok(Self { receiver })
    }

    /// The session that it was given.
    pub(crate) fn session_id(&self) -> String {
        let source = self.receiver.source().as_ref().expect("it was attached");
        let filter = source.filter.as_ref().expect("it names the session");
        match filter.get(&Symbol::from(SESSION_FILTER)) {
            Some(Value::String(id)) => id.clone(),
            other => panic!("no session: {other:?}"),
        }
    }

    /// Until when it has the session, in milliseconds since 1970.
    pub(crate) fn session_until_ms(&self) -> i64 {
        let name = Symbol::from("com.microsoft:locked-until-utc");
        let ticks = self.receiver.properties(|link| match link.as_ref()?.get(&name) {
            Some(Value::Long(ticks)) => Some(*ticks),
            _ => None,
        });
        (ticks.expect("it is told") - 621_355_968_000_000_000) / 10_000
    }

    /// Exactly so many messages.
    pub(crate) async fn receive(&mut self, count: u32) -> Result<Vec<Got>> {
        self.receiver.set_credit(count).await.map_err(Trouble::lost)?;
        let mut got = Vec::new();
        for _ in 0..count {
            let next = timeout(WITHIN, self.receiver.recv()).await;
            got.push(Got(next.expect("it comes").map_err(trouble)?));
        }
        Ok(got)
    }

    /// One message.
    pub(crate) async fn one(&mut self) -> Result<Got> {
        Ok(self.receive(1).await?.remove(0))
    }

    /// Nothing comes.
    pub(crate) async fn nothing(&mut self) {
        self.receiver.set_credit(1).await.expect("the link is there");
        let next = timeout(BRIEFLY, self.receiver.recv::<Body<Value>>()).await;
        assert!(next.is_err(), "{next:?}");
    }

    pub(crate) async fn complete(&self, got: &Got) -> Result<()> {
        self.receiver.accept(&got.0).await.map_err(Trouble::lost)
    }

    pub(crate) async fn abandon(&self, got: &Got) -> Result<()> {
        self.modify(got, false).await
    }

    pub(crate) async fn defer(&self, got: &Got) -> Result<()> {
        self.modify(got, true).await
    }

    async fn modify(&self, got: &Got, undeliverable_here: bool) -> Result<()> {
        let modified = Modified {
            delivery_failed: Some(!undeliverable_here),
            undeliverable_here: Some(undeliverable_here),
            message_annotations: None,
        };
        self.receiver.modify(&got.0, modified).await.map_err(Trouble::lost)
    }

    pub(crate) async fn dead_letter(&self, got: &Got, reason: &str, why: &str) -> Result<()> {
        let text = |text: &str| Value::String(text.to_owned());
        let info = [("DeadLetterReason", text(reason)), ("DeadLetterErrorDescription", text(why))];
        let info = info.into_iter().map(|(name, value)| (Symbol::from(name), value));
        let condition = ErrorCondition::Custom(Symbol::from("com.microsoft:dead-letter"));
        let info = Some(Box::new(OrderedMap::from_iter(info)));
        let error = Error { condition, description: None, info };
        self.receiver.reject(&got.0, error).await.map_err(Trouble::lost)
    }

    /// Gives its session back.
    pub(crate) async fn close(self) -> Result<()> {
        self.receiver.close().await.map_err(Trouble::lost)
    }
}

fn trouble(error: RecvError) -> Trouble {
    Trouble::lost(error)
}

impl Got {
    pub(crate) fn body(&self) -> Vec<u8> {
        body(self.0.body())
    }

    pub(crate) fn fields(&self) -> &Properties {
        self.0.message().properties.as_ref().expect("every message has an id")
    }

    pub(crate) fn id(&self) -> String {
        match &self.fields().message_id {
            Some(fe2o3_amqp::types::messaging::MessageId::String(id)) => id.clone(),
            other => panic!("no id: {other:?}"),
        }
    }

    pub(crate) fn session_id(&self) -> Option<&str> {
        self.fields().group_id.as_deref()
    }

    pub(crate) fn delivery_count(&self) -> u32 {
        self.0.message().header.as_ref().expect("every message has one").delivery_count
    }

    pub(crate) fn ttl_ms(&self) -> Option<u32> {
        self.0.message().header.as_ref().expect("every message has one").ttl
    }

    fn annotation(&self, name: &str) -> Option<&Value> {
        self.0.message().message_annotations.as_ref()?.get(&OwnedKey::from(name))
    }

    pub(crate) fn sequence_number(&self) -> i64 {
        match self.annotation("x-opt-sequence-number") {
            Some(Value::Long(number)) => *number,
            other => panic!("no number: {other:?}"),
        }
    }

    /// A moment among its annotations, in milliseconds since 1970.
    pub(crate) fn moment_ms(&self, name: &str) -> i64 {
        match self.annotation(name) {
            Some(Value::Timestamp(time)) => time.milliseconds(),
            other => panic!("no {name}: {other:?}"),
        }
    }

    pub(crate) fn property(&self, name: &str) -> Option<&SimpleValue> {
        self.0.message().application_properties.as_ref()?.get(name)
    }

    pub(crate) fn text_property(&self, name: &str) -> Option<&str> {
        match self.property(name)? {
            SimpleValue::String(text) => Some(text),
            other => panic!("{name} is no text: {other:?}"),
        }
    }

    /// The lock's token, which is the delivery's tag in the order of .NET.
    pub(crate) fn token(&self) -> Uuid {
        Uuid::from_slice_le(self.0.delivery_tag()).expect("a tag has 16 bytes")
    }
}

/// The bytes of all data sections.
pub(crate) fn body(body: &Body<Value>) -> Vec<u8> {
    match body {
        Body::Data(sections) => sections.iter().flat_map(|data| data.0.to_vec()).collect(),
        other => panic!("no data: {other:?}"),
    }
}
