//! A connection without a socket: a client of a few lines, frame by frame.
//!
//! What lives here: what each frame is answered with. What does not: the official clients, which
//! `tests/` runs.
//! Invariant: nothing waits; what is not there after a frame does not come.

use bytes::{Bytes, BytesMut};
use fe2o3_amqp_types::definitions::{Error, Role};
use fe2o3_amqp_types::messaging::{
    ApplicationProperties, DeliveryState, MessageId, Properties, Rejected, TargetArchetype,
};
use fe2o3_amqp_types::performatives::{Attach, Close, Disposition, Flow, Performative};
use fe2o3_amqp_types::primitives::SimpleValue;
use serde_amqp::Value;
use serde_amqp::described::Described;
use serde_amqp::descriptor::Descriptor;
use serde_amqp::primitives::{OrderedMap, Symbol};

use super::client::{begin, credit, data, greeting, link, message, open, transfer};
use super::*;
use crate::config::{Config, Entity};
use crate::faults::Faults;
use crate::refusal::name;
use crate::wire;

const BATCH: u32 = 0x8001_3700;

/// The client, and the emulator's end of the connection.
struct Client {
    connection: Connection,
    shared: Arc<Shared>,
    /// What came and was not looked at.
    came: Vec<(Performative, Bytes)>,
    next_delivery: u32,
}

impl Client {
    /// Has come as far as a session, by user name and password.
    fn start(config: Config) -> Self {
        Self::on(Arc::new(Shared::new(config)))
    }

    fn on(shared: Arc<Shared>) -> Self {
        let connection = Connection::new(Arc::clone(&shared));
        let mut client = Self { connection, shared, came: Vec::new(), next_delivery: 0 };
        client.push(&greeting());
        client.raw_output();
        client.send(&open(4_096), &[]);
        client.send(&begin(), &[]);
        assert!(matches!(client.next().0, Performative::Open(_)));
        assert!(matches!(client.next().0, Performative::Begin(_)));
        client
    }

    fn push(&mut self, bytes: &[u8]) {
        let mut input = BytesMut::from(bytes);
        self.connection.receive(&mut input);
        assert!(input.is_empty() || self.connection.is_over(), "all of it was whole");
    }

    fn send<T: serde::Serialize>(&mut self, performative: &T, payload: &[u8]) {
        let frame = frame::write(Kind::Amqp, 0, performative, payload);
        self.push(&frame.expect("it can be encoded"));
    }

    fn raw_output(&mut self) -> BytesMut {
        let mut output = BytesMut::new();
        while let Some(bytes) = self.connection.pop_due(Instant::now()) {
            output.extend_from_slice(&bytes);
        }
        output
    }

    fn read(&mut self) {
        let mut output = self.raw_output();
        while let Some(raw) = frame::next(&mut output).expect("it is well formed") {
            self.came.push(frame::performative(raw.body).expect("it is well formed"));
        }
    }

    /// The next frame; flows are not waited for.
    fn next(&mut self) -> (Performative, Bytes) {
        self.try_next().expect("a frame has come")
    }

    fn try_next(&mut self) -> Option<(Performative, Bytes)> {
        self.read();
        while let Some((Performative::Flow(_), _)) = self.came.first() {
            self.came.remove(0);
        }
        (!self.came.is_empty()).then(|| self.came.remove(0))
    }

    fn attach(&mut self, attach: Attach) -> Attach {
        self.send(&attach, &[]);
        match self.next().0 {
            Performative::Attach(attach) => attach,
            other => panic!("no attach: {other:?}"),
        }
    }

    fn transfer(&mut self, handle: u32, format: u32, bytes: &[u8]) -> u32 {
        let id = self.next_delivery;
        self.next_delivery += 1;
        self.send(&transfer(handle, id, format, false), bytes);
        id
    }

    fn outcome(&mut self) -> (u32, DeliveryState) {
        match self.next().0 {
            Performative::Disposition(Disposition { first, settled: true, state, .. }) => {
                (first, state.expect("it has an outcome"))
            }
            other => panic!("no outcome: {other:?}"),
        }
    }

    fn detached(&mut self) -> String {
        match self.next().0 {
            Performative::Detach(detach) => {
                condition_of(detach.error.as_ref().expect("it says why"))
            }
            other => panic!("no detach: {other:?}"),
        }
    }

    fn faults(&self) -> Faults<'_> {
        Faults { shared: &self.shared }
    }
}

fn sender(handle: u32, address: &str) -> Attach {
    link(&format!("sender-{handle}"), handle, Role::Sender, "me", address)
}

fn receiver(handle: u32, address: &str) -> Attach {
    link(&format!("receiver-{handle}"), handle, Role::Receiver, address, "me")
}

fn condition_of(error: &Error) -> String {
    name(&error.condition)
}

fn orders() -> Config {
    Config::default().with_queue("orders", Entity::default())
}

fn stored(client: &Client, path: &str) -> usize {
    client.shared.broker.look(path, |queue| queue.messages().count()).unwrap_or_default()
}

#[test]
fn a_sender_is_granted_credit_and_hears_that_its_messages_are_stored() {
    let mut client = Client::start(orders());
    let address = "amqps://127.0.0.1:5672/Orders";
    let answer = client.attach(sender(0, address));
    assert_eq!(answer.max_message_size, Some(262_144));
    let TargetArchetype::Target(target) = *answer.target.expect("it was accepted");
    assert_eq!(target.address.as_deref(), Some(address), "echoed as it came");
    let single = client.transfer(0, 0, &message("1", b"x"));
    let envelope: Vec<u8> =
        [message("2", b"y"), message("3", b"z")].iter().flat_map(|message| data(message)).collect();
    let batch = client.transfer(0, BATCH, &envelope);
    for id in [single, batch] {
        let (answered, state) = client.outcome();
        assert_eq!(answered, id);
        assert!(matches!(state, DeliveryState::Accepted(_)), "{state:?}");
    }
    let counts = client.shared.counts("orders");
    assert_eq!((counts.transfers, counts.batches, counts.messages), (2, 1, 3));
    assert_eq!(counts.round_trips, 1, "the second was sent before the first was answered");
    client.transfer(0, 0, &message("4", b"x"));
    assert_eq!(client.shared.counts("orders").round_trips, 2);
}

#[test]
fn a_message_in_many_frames_is_one_and_one_that_is_too_large_is_rejected() {
    let mut client = Client::start(orders());
    client.attach(sender(0, "orders"));
    let whole = message("1", &vec![7; 200_000]);
    let frames: Vec<&[u8]> = whole.chunks(30_000).collect();
    for (at, part) in frames.iter().enumerate() {
        client.send(&transfer(0, 0, 0, at + 1 < frames.len()), part);
    }
    assert!(matches!(client.outcome().1, DeliveryState::Accepted(_)));
    let body = client.shared.broker.look("orders", |queue| {
        queue.messages().map(|stored| stored.message.data().len()).collect::<Vec<_>>()
    });
    assert_eq!(body, Some(vec![200_000]));
    for more in [true, true, true, true, true, true, true, true, true, false] {
        assert!(client.try_next().is_none(), "the answer comes when all has come");
        client.send(&transfer(0, 1, 0, more), &[0; 30_000]);
    }
    let (_, state) = client.outcome();
    let DeliveryState::Rejected(rejected) = state else { panic!("not rejected: {state:?}") };
    let error = rejected.error.expect("it says why");
    assert_eq!(condition_of(&error), condition::MESSAGE_SIZE);
    assert!(error.description.is_some_and(|text| text.contains("size:300000 bytes")));
    assert_eq!(stored(&client, "orders"), 1);
}

#[test]
fn an_entity_needs_a_token() {
    let shared = Arc::new(Shared::new(orders()));
    let mut client = Client::on(shared);
    client.connection.hands.tokens = Tokens::default();
    let answer = client.attach(sender(0, "orders"));
    assert!(answer.target.is_none());
    assert_eq!(client.detached(), condition::UNAUTHORIZED);
    client.attach(sender(1, "$cbs"));
    client.attach(receiver(2, "$cbs"));
    client.send(&credit(2, 10, false), &[]);
    let mut properties = ApplicationProperties::default();
    for (name, value) in [("operation", "put-token"), ("type", "jwt"), ("name", "sb://h/orders")] {
        properties.insert(name.to_owned(), SimpleValue::String(value.to_owned()));
    }
    let id = MessageId::Uuid([7; 16].into());
    let head = Properties { message_id: Some(id.clone()), ..Properties::default() };
    let body = Value::String("a token that nobody here can check".to_owned());
    let request = [
        wire::encode(&head).expect("it can be encoded"),
        wire::encode(&properties).expect("it can be encoded"),
        vec![0x00, 0x53, 0x77],
        wire::encode(&body).expect("it can be encoded"),
    ];
    client.transfer(1, 0, &request.concat());
    assert!(matches!(client.outcome().1, DeliveryState::Accepted(_)));
    let (_, payload) = client.next();
    let reply = crate::broker::message::Message::decode(&payload).expect("it is a message");
    assert_eq!(reply.properties.correlation_id, Some(id));
    let properties = reply.application_properties().expect("it has them");
    assert_eq!(properties.get("status-code"), Some(&SimpleValue::Int(202)));
    assert!(client.attach(sender(3, "orders")).target.is_some());
    client.connection.obey(&Command::ExpireTokens);
    assert_eq!(client.detached(), condition::UNAUTHORIZED);
}

#[test]
fn faults_hit_the_next_transfers_and_no_others() {
    let mut client = Client::start(orders());
    client.attach(sender(0, "ORDERS"));
    client.faults().reject_next("Orders", 1, condition::SERVER_BUSY);
    client.transfer(0, 0, &message("1", b"x"));
    let (_, state) = client.outcome();
    let DeliveryState::Rejected(rejected) = state else { panic!("not rejected: {state:?}") };
    assert_eq!(condition_of(&rejected.error.expect("it says why")), condition::SERVER_BUSY);
    client.faults().lose_confirmations("orders", 1);
    client.transfer(0, 0, &message("2", b"x"));
    assert!(client.try_next().is_none());
    let id = client.transfer(0, 0, &message("3", b"x"));
    assert_eq!(client.outcome().0, id);
    assert_eq!(stored(&client, "orders"), 2);
    client.faults().drop_connection_after("orders", 2);
    client.transfer(0, 0, &message("4", b"x"));
    assert!(!client.connection.is_dropped());
    client.outcome();
    client.transfer(0, 0, &message("5", b"x"));
    assert!(client.connection.is_dropped());
    assert!(client.try_next().is_none());
    assert_eq!(stored(&client, "orders"), 4);
}

#[test]
fn throttling_ends_by_itself() {
    let mut client = Client::start(orders());
    client.attach(sender(0, "orders"));
    client.faults().throttle_for("orders", Duration::from_secs(30));
    client.transfer(0, 0, &message("1", b"x"));
    assert!(matches!(client.outcome().1, DeliveryState::Rejected(_)));
    client.shared.broker.clock.advance(Duration::from_secs(30));
    client.transfer(0, 0, &message("1", b"x"));
    assert!(matches!(client.outcome().1, DeliveryState::Accepted(_)));
}

#[test]
fn latency_holds_every_frame_back() {
    let mut client = Client::start(orders());
    client.faults().set_latency(Duration::from_secs(60));
    client.send(&sender(0, "orders"), &[]);
    assert!(client.try_next().is_none());
    let due = client.connection.out().next_due().expect("the answer waits");
    assert!(due > Instant::now() + Duration::from_secs(50));
    assert!(client.connection.pop_due(due).is_some());
}

#[test]
fn a_receiver_gets_what_its_credit_allows_and_a_drain_is_answered() {
    let mut client = Client::start(orders());
    client.attach(sender(0, "orders"));
    for id in ["1", "2", "3"] {
        client.transfer(0, 0, &message(id, &[1; 5_000]));
        client.outcome();
    }
    client.attach(receiver(1, "orders"));
    client.send(&credit(1, 2, false), &[]);
    // The client takes frames of 4,096 bytes.
    for more in [true, false, true, false] {
        let (performative, payload) = client.next();
        let Performative::Transfer(transfer) = performative else { panic!("{performative:?}") };
        assert_eq!(transfer.more, more);
        assert_eq!(transfer.delivery_tag.map(|tag| tag.len()), Some(16));
        assert!(payload.len() <= 4_096);
    }
    assert!(client.try_next().is_none());
    client.send(&credit(1, 10, true), &[]);
    client.read();
    let drained = client.came.iter().rev().find_map(|(performative, _)| match performative {
        Performative::Flow(flow) => Some(flow.clone()),
        _ => None,
    });
    let drained = drained.expect("the drain is answered");
    assert!(drained.drain);
    assert_eq!((drained.link_credit, drained.delivery_count), (Some(0), Some(10)));
}

#[test]
fn a_reason_is_understood_as_the_javascript_sdk_gives_it() {
    let mut client = Client::start(orders());
    client.attach(sender(0, "orders"));
    client.transfer(0, 0, &message("1", b"x"));
    client.outcome();
    client.attach(receiver(1, "orders"));
    client.send(&credit(1, 1, false), &[]);
    assert!(matches!(client.next().0, Performative::Transfer(_)));
    let described = |code, fields| {
        let descriptor = Descriptor::Code(code);
        Value::Described(Box::new(Described { descriptor, value: Value::List(fields) }))
    };
    let text = |text: &str| Value::String(text.to_owned());
    let info = OrderedMap::from_iter([
        (text("DeadLetterReason"), text("no good")),
        (text("DeadLetterErrorDescription"), text("at all")),
    ]);
    let condition = Value::Symbol(Symbol::from(condition::DEAD_LETTER));
    let error = described(0x1d, vec![condition, Value::Null, Value::Map(info)]);
    let rejected = described(0x25, vec![error]);
    let fields =
        vec![Value::Bool(true), Value::Uint(0), Value::Uint(0), Value::Bool(false), rejected];
    client.send(&described(0x15, fields), &[]);
    let (_, state) = client.outcome();
    // With an error in it, it would say that the message could not be dead-lettered.
    assert_eq!(state, DeliveryState::Rejected(Rejected { error: None }));
    let letters = client.shared.broker.look("orders/$deadletterqueue", |queue| {
        queue.messages().filter_map(|stored| stored.letter.clone()).collect::<Vec<_>>()
    });
    let letters = letters.expect("the queue is there");
    assert_eq!(letters[0].reason.as_deref(), Some("no good"));
    assert_eq!(letters[0].description.as_deref(), Some("at all"));
}

#[test]
fn credit_that_is_withheld_comes_when_that_is_over() {
    let mut client = Client::start(orders());
    Faults { shared: &client.shared.clone() }.withhold_credit("Orders", true);
    let credits = |client: &mut Client| {
        client.read();
        let came = std::mem::take(&mut client.came);
        let flows = came.into_iter().filter_map(|(performative, _)| match performative {
            Performative::Flow(flow) => flow.link_credit,
            _ => None,
        });
        flows.collect::<Vec<u32>>()
    };
    client.send(&sender(0, "orders"), &[]);
    assert_eq!(credits(&mut client), [0]);
    client.connection.obey(&Command::GiveCredit { key: "orders".into() });
    assert_eq!(credits(&mut client), [], "it is withheld still");
    Faults { shared: &client.shared.clone() }.withhold_credit("orders", false);
    client.connection.obey(&Command::GiveCredit { key: "others".into() });
    client.connection.obey(&Command::GiveCredit { key: "orders".into() });
    assert_eq!(credits(&mut client), [1_000]);
}

#[test]
fn a_peers_window_holds_transfers_back() {
    let mut client = Client::start(orders());
    client.attach(sender(0, "orders"));
    client.transfer(0, 0, &message("1", &[1; 9_000]));
    client.outcome();
    client.attach(receiver(1, "orders"));
    client.send(&Flow { incoming_window: 1, ..credit(1, 5, false) }, &[]);
    assert!(matches!(client.next().0, Performative::Transfer(_)));
    assert!(client.try_next().is_none(), "the window has room for one frame");
    let window = Flow { next_incoming_id: Some(1), handle: None, ..credit(1, 5, false) };
    client.send(&window, &[]);
    assert!(matches!(client.next().0, Performative::Transfer(_)));
    assert!(matches!(client.next().0, Performative::Transfer(_)));
}

#[test]
fn bytes_that_are_no_amqp_end_the_connection_with_a_reason() {
    let mut client = Client::start(orders());
    client.push(&[0, 0, 0, 12, 2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    let (performative, _) = client.next();
    let Performative::Close(Close { error: Some(error) }) = performative else {
        panic!("no close: {performative:?}")
    };
    assert_eq!(condition_of(&error), condition::DECODE_ERROR);
    assert!(client.connection.is_over());
    let mut connection = Connection::new(client.shared);
    connection.receive(&mut BytesMut::from(&b"GET / HTTP/1.1\r\n"[..]));
    assert!(connection.is_over());
}

proptest::proptest! {
    #[test]
    fn random_frames_never_panic(frames in proptest::collection::vec(
        proptest::collection::vec(proptest::arbitrary::any::<u8>(), 0..200),
        1..8,
    )) {
        let mut client = Client::start(orders());
        client.attach(sender(0, "orders"));
        for body in frames {
            let size = u32::try_from(8 + body.len()).expect("it is small").to_be_bytes();
            let frame = [&size[..], &[2, 0, 0, 0], &body].concat();
            client.connection.receive(&mut BytesMut::from(&frame[..]));
        }
    }
}
