//! What a client sends, for tests and fuzzing.
//!
//! What lives here: frames as the official clients build them, as values. What does not: a client.
//! Invariant: everything here is well formed; whoever wants it otherwise breaks it.

use fe2o3_amqp_types::definitions::{Handle, ReceiverSettleMode, Role, SenderSettleMode};
use fe2o3_amqp_types::messaging::{MessageId, Properties, Source, Target, TargetArchetype};
use fe2o3_amqp_types::performatives::{
    Attach, Begin, ChannelMax, Flow, MaxFrameSize, Open, Transfer,
};
use fe2o3_amqp_types::sasl::SaslInit;
use serde_amqp::Value;
use serde_amqp::primitives::Symbol;
use serde_bytes::ByteBuf;

use crate::wire;
use crate::wire::frame::{self, AMQP_HEADER, Kind, SASL_HEADER};

/// All that comes before the open, by name and key.
pub(crate) fn greeting() -> Vec<u8> {
    let response = ByteBuf::from(*b"\0RootManageSharedAccessKey\0SAS_KEY_VALUE");
    let init = SaslInit {
        mechanism: Symbol::from("PLAIN"),
        initial_response: Some(response),
        hostname: None,
    };
    let init = frame::write(Kind::Sasl, 0, &init, &[]).expect("it can be encoded");
    [&SASL_HEADER[..], &init, &AMQP_HEADER].concat()
}

pub(crate) fn begin() -> Begin {
    Begin {
        remote_channel: None,
        next_outgoing_id: 0,
        incoming_window: 100,
        outgoing_window: 100,
        handle_max: Handle::default(),
        offered_capabilities: None,
        desired_capabilities: None,
        properties: None,
    }
}

pub(crate) fn open(frame_bytes: u32) -> Open {
    Open {
        container_id: "client".to_owned(),
        hostname: None,
        max_frame_size: MaxFrameSize(frame_bytes),
        channel_max: ChannelMax(0),
        idle_time_out: None,
        outgoing_locales: None,
        incoming_locales: None,
        offered_capabilities: None,
        desired_capabilities: None,
        properties: None,
    }
}

pub(crate) fn transfer(handle: u32, id: u32, format: u32, more: bool) -> Transfer {
    Transfer {
        handle: Handle(handle),
        delivery_id: Some(id),
        delivery_tag: Some(ByteBuf::from(id.to_be_bytes())),
        message_format: Some(format),
        settled: Some(false),
        more,
        rcv_settle_mode: None,
        state: None,
        resume: false,
        aborted: false,
        batchable: false,
    }
}

pub(crate) fn link(name: &str, handle: u32, role: Role, source: &str, target: &str) -> Attach {
    let source = Source { address: Some(source.to_owned()), ..Source::default() };
    let target = Target { address: Some(target.to_owned()), ..Target::default() };
    Attach {
        name: name.to_owned(),
        handle: Handle(handle),
        initial_delivery_count: (role == Role::Sender).then_some(0),
        role,
        snd_settle_mode: SenderSettleMode::Unsettled,
        rcv_settle_mode: ReceiverSettleMode::Second,
        source: Some(Box::new(source)),
        target: Some(Box::new(TargetArchetype::Target(target))),
        unsettled: None,
        incomplete_unsettled: false,
        max_message_size: None,
        offered_capabilities: None,
        desired_capabilities: None,
        properties: None,
    }
}

pub(crate) fn credit(handle: u32, credit: u32, drain: bool) -> Flow {
    Flow {
        next_incoming_id: Some(0),
        incoming_window: 100,
        next_outgoing_id: 0,
        outgoing_window: 100,
        handle: Some(Handle(handle)),
        delivery_count: Some(0),
        link_credit: Some(credit),
        available: None,
        drain,
        echo: false,
        properties: None,
    }
}

pub(crate) fn message(id: &str, body: &[u8]) -> Vec<u8> {
    let properties =
        Properties { message_id: Some(MessageId::String(id.to_owned())), ..Properties::default() };
    let mut bytes = wire::encode(&properties).expect("it can be encoded");
    bytes.extend(data(body));
    bytes
}

pub(crate) fn data(body: &[u8]) -> Vec<u8> {
    let body = Value::Binary(ByteBuf::from(body));
    [vec![0x00, 0x53, 0x75], wire::encode(&body).expect("it can be encoded")].concat()
}
