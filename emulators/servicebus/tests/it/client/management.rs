//! Requests to an entity's `$management` node.
//!
//! What lives here: asking and being answered, and each operation's fields. What does not: what is
//! done with the answers.
//! Invariant: one request at a time; an answer belongs to the request before it, and says so.

use fe2o3_amqp::session::SessionHandle;
use fe2o3_amqp::types::messaging::annotations::OwnedKey;
use fe2o3_amqp::types::messaging::message::__private::Deserializable;
use fe2o3_amqp::types::messaging::{
    AmqpValue, ApplicationProperties, Body, Message, MessageId, Properties,
};
use fe2o3_amqp::types::primitives::{Array, OrderedMap, SimpleValue, Value};
use fe2o3_amqp::{Receiver, Sender};
use serde_bytes::ByteBuf;
use tokio::time::timeout;
use uuid::Uuid;

use super::post::Post;
use super::{Result, Trouble, WITHIN, inbox};

/// A pair of links.
pub(crate) struct Management {
    sender: Sender,
    receiver: Receiver,
    reply_to: String,
    asked: u64,
}

/// A message that was looked at or taken by its number.
#[derive(Debug)]
pub(crate) struct Shown {
    message: Message<Body<Value>>,
    token: Option<Uuid>,
}

impl Shown {
    pub(crate) fn body(&self) -> Vec<u8> {
        inbox::body(&self.message.body)
    }

    pub(crate) fn sequence_number(&self) -> i64 {
        let annotations = self.message.message_annotations.as_ref().expect("they are there");
        match annotations.get(&OwnedKey::from("x-opt-sequence-number")) {
            Some(Value::Long(number)) => *number,
            other => panic!("no number: {other:?}"),
        }
    }

    pub(crate) fn token(&self) -> Uuid {
        self.token.expect("it is locked")
    }
}

impl Management {
    pub(super) async fn attach(
        session: &mut SessionHandle<()>,
        name: &str,
        path: &str,
    ) -> Result<Self> {
        let node = format!("{path}/$management");
        let sender = Sender::attach(session, format!("{name}-requests"), node.as_str());
        let sender = sender.await.map_err(Trouble::lost)?;
        let receiver = Receiver::builder()
            .name(format!("{name}-answers"))
            .source(node)
            .target(name)
            .attach(session)
            .await
            .map_err(Trouble::lost)?;
        Ok(Self { sender, receiver, reply_to: name.to_owned(), asked: 0 })
    }

    async fn ask(&mut self, operation: &str, body: Value) -> Result<Option<Value>> {
        self.asked += 1;
        let id = MessageId::Ulong(self.asked);
        let mut properties = ApplicationProperties::default();
        let operation = SimpleValue::String(format!("com.microsoft:{operation}"));
        properties.insert("operation".to_owned(), operation);
        let request = Message {
            header: None,
            delivery_annotations: None,
            message_annotations: None,
            properties: Some(Properties {
                message_id: Some(id.clone()),
                reply_to: Some(self.reply_to.clone()),
                ..Properties::default()
            }),
            application_properties: Some(properties),
            body: AmqpValue(body),
            footer: None,
        };
        let settlement = self.sender.send_batchable(request).await.map_err(Trouble::lost)?;
        super::settled(&mut self.sender, settlement).await?;
        let answer = timeout(WITHIN, self.receiver.recv::<AmqpValue<Value>>()).await;
        let answer = answer.expect("it is answered").map_err(Trouble::lost)?;
        self.receiver.accept(&answer).await.map_err(Trouble::lost)?;
        let answer = answer.into_message();
        let correlation = answer.properties.and_then(|properties| properties.correlation_id);
        assert_eq!(correlation, Some(id));
        let properties = answer.application_properties.expect("it has a status");
        match (properties.get("statusCode"), properties.get("errorCondition")) {
            (Some(SimpleValue::Int(200)), None) => Ok(Some(answer.body.0)),
            (Some(SimpleValue::Int(204)), None) => Ok(None),
            (_, Some(SimpleValue::Symbol(condition))) => Err(Trouble::Refused(condition.0.clone())),
            (code, condition) => panic!("no status: {code:?}, {condition:?}"),
        }
    }

    pub(crate) async fn schedule(&mut self, posts: &[Post<'_>]) -> Result<Vec<i64>> {
        let entry = |post: &Post<'_>| map([("message", binary(&post.encoded()))]);
        let messages = Value::List(posts.iter().map(entry).collect());
        let answer = self.ask("schedule-message", map([("messages", messages)])).await?;
        Ok(elements(answer, "sequence-numbers").into_iter().map(long).collect())
    }

    pub(crate) async fn cancel(&mut self, number: i64) -> Result<()> {
        let numbers = Value::Array(Array(vec![Value::Long(number)]));
        let body = map([("sequence-numbers", numbers)]);
        self.ask("cancel-scheduled-message", body).await.map(drop)
    }

    pub(crate) async fn peek(&mut self, from: i64, count: i32) -> Result<Vec<Shown>> {
        let from = ("from-sequence-number", Value::Long(from));
        let body = map([from, ("message-count", Value::Int(count))]);
        let answer = self.ask("peek-message", body).await?;
        Ok(answer.map_or_else(Vec::new, |answer| shown(Some(answer))))
    }

    pub(crate) async fn receive_deferred(&mut self, number: i64) -> Result<Vec<Shown>> {
        let numbers = Value::Array(Array(vec![Value::Long(number)]));
        let mode = ("receiver-settle-mode", Value::Uint(1));
        let body = map([("sequence-numbers", numbers), mode]);
        Ok(shown(self.ask("receive-by-sequence-number", body).await?))
    }

    pub(crate) async fn complete(&mut self, token: Uuid) -> Result<()> {
        let status = ("disposition-status", Value::String("completed".to_owned()));
        let body = map([status, ("lock-tokens", tokens(token))]);
        self.ask("update-disposition", body).await.map(drop)
    }

    /// Renews a message's lock; until when, in milliseconds since 1970.
    pub(crate) async fn renew(&mut self, token: Uuid) -> Result<i64> {
        let answer = self.ask("renew-lock", map([("lock-tokens", tokens(token))])).await?;
        Ok(moment(elements(answer, "expirations").remove(0)))
    }

    pub(crate) async fn renew_session(&mut self, id: &str) -> Result<i64> {
        let answer = self.ask("renew-session-lock", session(id)).await?;
        Ok(moment(field(answer, "expiration")))
    }

    pub(crate) async fn session_state(&mut self, id: &str) -> Result<Option<Vec<u8>>> {
        let answer = self.ask("get-session-state", session(id)).await?;
        Ok(match field(answer, "session-state") {
            Value::Binary(state) => Some(state.into_vec()),
            Value::Null => None,
            other => panic!("no state: {other:?}"),
        })
    }

    pub(crate) async fn set_session_state(&mut self, id: &str, state: Option<&[u8]>) -> Result<()> {
        let state = state.map_or(Value::Null, binary);
        let id = Value::String(id.to_owned());
        let body = map([("session-id", id), ("session-state", state)]);
        self.ask("set-session-state", body).await.map(drop)
    }
}

fn map<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let fields = fields.into_iter().map(|(name, value)| (Value::String(name.to_owned()), value));
    Value::Map(OrderedMap::from_iter(fields))
}

fn session(id: &str) -> Value {
    map([("session-id", Value::String(id.to_owned()))])
}

fn binary(bytes: &[u8]) -> Value {
    Value::Binary(ByteBuf::from(bytes))
}

fn tokens(token: Uuid) -> Value {
    Value::Array(Array(vec![Value::Uuid(token.into_bytes().into())]))
}

fn field(answer: Option<Value>, name: &str) -> Value {
    let Some(Value::Map(mut fields)) = answer else { panic!("no map: {answer:?}") };
    fields.swap_remove(&Value::String(name.to_owned())).expect("it has the field")
}

fn elements(answer: Option<Value>, name: &str) -> Vec<Value> {
    match field(answer, name) {
        Value::List(elements) => elements,
        Value::Array(elements) => elements.0,
        other => panic!("{name} is no list: {other:?}"),
    }
}

fn long(value: Value) -> i64 {
    match value {
        Value::Long(number) => number,
        other => panic!("no number: {other:?}"),
    }
}

fn moment(value: Value) -> i64 {
    match value {
        Value::Timestamp(time) => time.milliseconds(),
        other => panic!("no time: {other:?}"),
    }
}

fn shown(answer: Option<Value>) -> Vec<Shown> {
    let entries = elements(answer, "messages").into_iter().map(|entry| {
        let Value::Map(mut entry) = entry else { panic!("no map: {entry:?}") };
        let mut take = |name: &str| entry.swap_remove(&Value::String(name.to_owned()));
        let Some(Value::Binary(bytes)) = take("message") else { panic!("there is no message") };
        let token = take("lock-token").map(|token| match token {
            Value::Uuid(token) => Uuid::from_bytes(token.into_inner()),
            other => panic!("no token: {other:?}"),
        });
        let message: Deserializable<Message<Body<Value>>> =
            serde_amqp::from_slice(&bytes).expect("it is a message");
        Shown { message: message.0, token }
    });
    entries.collect()
}
