//! The shared sink suite.
//!
//! What lives here: the harness, whose receiver reads requests by hand so that it can break off at
//! any point. What does not: behaviours.
//! Invariant: a request counts as taken only if its signature is genuine.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{Clock, EventId, Secret, Sink};
use postrider_encoding::decode_header_value;
use postrider_sink_webhook::verify::{SignedRequest, Verifier};
use postrider_sink_webhook::{Webhook, WebhookConfig};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::watch;
use uuid::Uuid;

use crate::receiver::{RawServer, write};
use crate::{KEY, Wall, config};

const EVENT_HEADER: &str = "postrider-header-";

#[derive(Default)]
struct State {
    taken: Vec<Delivered>,
    next: Option<(u32, ReceiverFault)>,
    poisoned: HashMap<EventId, ReceiverFault>,
    waiting: bool,
}

struct Harness {
    state: Arc<Mutex<State>>,
    held: watch::Sender<bool>,
    config: WebhookConfig,
    sink: Arc<Webhook>,
    _server: RawServer,
}

struct Request {
    headers: BTreeMap<String, Vec<u8>>,
    body: Vec<u8>,
}

impl Request {
    async fn read(stream: &mut TcpStream) -> Option<Self> {
        let mut seen = Vec::new();
        let end = loop {
            if let Some(end) = seen.windows(4).position(|four| four == b"\r\n\r\n") {
                break end;
            }
            if stream.read_buf(&mut seen).await.ok()? == 0 {
                return None;
            }
        };
        let mut body = seen.split_off(end + 4);
        let mut headers = BTreeMap::new();
        for line in seen[..end].split(|byte| *byte == b'\n').skip(1) {
            let colon = line.iter().position(|byte| *byte == b':').expect("a header");
            let name = String::from_utf8(line[..colon].to_ascii_lowercase()).expect("ASCII");
            headers.insert(name, line[colon + 1..].trim_ascii().to_vec());
        }
        let length = headers.get("content-length").map_or(b"0".as_slice(), Vec::as_slice);
        let length: usize = std::str::from_utf8(length).ok()?.parse().ok()?;
        while body.len() < length {
            if stream.read_buf(&mut body).await.ok()? == 0 {
                return None;
            }
        }
        Some(Self { headers, body })
    }

    fn text(&self, name: &str) -> &str {
        std::str::from_utf8(&self.headers[name]).expect("UTF-8")
    }

    fn decoded(&self, name: &str) -> String {
        decode_header_value(&self.headers[name]).expect("percent-encoded")
    }

    fn delivered(&self) -> Delivered {
        let signed = SignedRequest {
            id: self.text("webhook-id"),
            timestamp: self.text("webhook-timestamp"),
            signature: self.text("webhook-signature"),
            body: &self.body,
        };
        let verifier = Verifier::new(&[Secret::new(KEY)]).expect("a valid key");
        verifier.verify(&signed, Wall.now()).expect("genuine");
        let own = |name: &String| name.strip_prefix(EVENT_HEADER).map(str::to_owned);
        let headers = self.headers.keys().filter_map(|name| Some((own(name)?, self.decoded(name))));
        Delivered {
            id: EventId::from_uuid(self.text("webhook-id").parse::<Uuid>().expect("a UUID")),
            key: self.decoded("postrider-key"),
            topic: self.decoded("postrider-topic"),
            event_type: self.decoded("postrider-type"),
            content_type: self.text("content-type").to_owned(),
            headers: headers.collect(),
            payload: self.body.clone(),
        }
    }
}

fn fault_of(state: &mut State, id: EventId) -> Option<ReceiverFault> {
    if let Some(fault) = state.poisoned.get(&id) {
        return Some(*fault);
    }
    let (times, fault) = state.next.take()?;
    if times > 1 {
        state.next = Some((times - 1, fault));
    }
    Some(fault)
}

async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>, mut held: watch::Receiver<bool>) {
    let Some(request) = Request::read(&mut stream).await else { return };
    if *held.borrow() {
        state.lock().expect("not poisoned").waiting = true;
        if held.wait_for(|held| !held).await.is_err() {
            return;
        }
    }
    let delivered = request.delivered();
    let answer = {
        let mut state = state.lock().expect("not poisoned");
        let fault = fault_of(&mut state, delivered.id);
        if matches!(fault, None | Some(ReceiverFault::LosingConfirms)) {
            state.taken.push(delivered);
        }
        match fault {
            None => "200 OK\r\n".to_owned(),
            Some(ReceiverFault::Refusing) => "422 No\r\n".to_owned(),
            Some(ReceiverFault::Throttling { retry_after }) => {
                format!("429 Wait\r\nretry-after: {}\r\n", retry_after.as_secs())
            }
            Some(ReceiverFault::Unreachable | ReceiverFault::LosingConfirms) => return,
        }
    };
    let answer = format!("HTTP/1.1 {answer}content-length: 0\r\nconnection: close\r\n\r\n");
    write(&mut stream, &answer).await;
}

impl Harness {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("not poisoned")
    }
}

#[async_trait]
impl SinkHarness for Harness {
    async fn fresh() -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        let (held, holding) = watch::channel(false);
        let shared = state.clone();
        let server =
            RawServer::start(move |_, stream| serve(stream, shared.clone(), holding.clone())).await;
        let url = server.url().replace("//", "//user:passw0rd@") + "t0ken?secret=qu3ry";
        let mut config = config(url);
        config.headers = BTreeMap::from([("authorization".into(), Secret::new("Bearer b3arer"))]);
        let sink = Arc::new(Webhook::new(&config, Arc::new(Wall)).expect("valid settings"));
        Self { state, held, config, sink, _server: server }
    }
    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }
    async fn delivered(&self) -> Vec<Delivered> {
        self.state().taken.clone()
    }
    fn can(&self, _: ReceiverFault) -> bool {
        true
    }
    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        self.state().next = Some((times, fault));
    }
    async fn fail_event(&self, id: EventId, fault: ReceiverFault) {
        self.state().poisoned.insert(id, fault);
    }
    fn can_hold(&self) -> bool {
        true
    }
    async fn hold(&self) {
        self.held.send_replace(true);
    }
    async fn release(&self) {
        self.held.send_replace(false);
    }
    async fn is_waiting(&self) -> bool {
        self.state().waiting
    }
    fn secrets(&self) -> Vec<String> {
        let key = KEY.trim_start_matches("whsec_");
        [key, "passw0rd", "t0ken", "qu3ry", "b3arer"].map(String::from).to_vec()
    }
    fn printed(&self) -> String {
        format!("{:?} {:?}", self.sink, self.config)
    }
}

postrider_conformance::sink_suite!(Harness);
