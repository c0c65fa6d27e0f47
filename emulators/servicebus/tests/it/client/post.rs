//! Messages as they are sent, alone and in batches.
//!
//! What lives here: which field of a message carries what. What does not: sending them.
//! Invariant: a batch is laid out as the official clients do it: whole messages in data sections,
//! under the first one's identity.

use fe2o3_amqp::Sendable;
use fe2o3_amqp::types::messaging::message::__private::Serializable;
use fe2o3_amqp::types::messaging::{
    ApplicationProperties, Batch, Data, Header, Message, MessageAnnotations, MessageId, Properties,
};
use fe2o3_amqp::types::primitives::{SimpleValue, Timestamp, Value};

const BATCH_FORMAT: u32 = 0x8001_3700;

/// What is sent.
#[derive(Debug, Clone, Default)]
pub(crate) struct Post<'a> {
    pub(crate) body: Vec<u8>,
    pub(crate) id: Option<String>,
    pub(crate) session: Option<&'a str>,
    pub(crate) ttl_ms: Option<u32>,
    /// When it is to appear, in milliseconds since 1970.
    pub(crate) due_ms: Option<i64>,
    pub(crate) fields: Properties,
    pub(crate) properties: Vec<(&'a str, SimpleValue)>,
}

/// A message of a body alone.
pub(crate) fn post<'a>(body: impl AsRef<[u8]>) -> Post<'a> {
    Post { body: body.as_ref().to_vec(), ..Post::default() }
}

impl<'a> Post<'a> {
    pub(crate) fn id(self, id: impl Into<String>) -> Self {
        Self { id: Some(id.into()), ..self }
    }

    pub(crate) fn session(self, session: &'a str) -> Self {
        Self { session: Some(session), ..self }
    }

    pub(crate) fn message(&self) -> Message<Data> {
        Message {
            header: self.ttl_ms.map(|ttl| Header { ttl: Some(ttl), ..Header::default() }),
            delivery_annotations: None,
            message_annotations: self.annotations(),
            properties: Some(self.identity(self.fields.clone())),
            application_properties: self.application_properties(),
            body: Data::from(self.body.as_slice()),
            footer: None,
        }
    }

    fn identity(&self, fields: Properties) -> Properties {
        Properties {
            message_id: self.id.clone().map(MessageId::String),
            group_id: self.session.map(str::to_owned),
            ..fields
        }
    }

    fn annotations(&self) -> Option<MessageAnnotations> {
        let due = Timestamp::from_milliseconds(self.due_ms?);
        let name = "x-opt-scheduled-enqueue-time";
        Some(MessageAnnotations::builder().insert(name, Value::Timestamp(due)).build())
    }

    fn application_properties(&self) -> Option<ApplicationProperties> {
        let mut properties = ApplicationProperties::default();
        for (name, value) in &self.properties {
            properties.insert((*name).to_owned(), value.clone());
        }
        (!self.properties.is_empty()).then_some(properties)
    }

    /// The whole of it, as it stands in a batch or in a request.
    pub(crate) fn encoded(&self) -> Vec<u8> {
        serde_amqp::to_vec(&Serializable(self.message())).expect("it can be encoded")
    }
}

/// Many in one transfer.
pub(crate) fn batch(posts: &[Post<'_>]) -> Sendable<Batch<Data>> {
    let first = posts.first().expect("a batch has messages");
    let sections: Vec<Data> = posts.iter().map(|post| Data::from(post.encoded())).collect();
    let message = Message {
        header: None,
        delivery_annotations: None,
        message_annotations: None,
        properties: Some(first.identity(Properties::default())),
        application_properties: None,
        body: Batch::new(sections),
        footer: None,
    };
    Sendable::builder().message(message).message_format(BATCH_FORMAT).build()
}
