//! The receiver of webhooks, and the stream of events that pages follow.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use hmac::{Hmac, KeyInit as _, Mac as _};
use postrider::Secret;
use postrider_sample_contacts::Config;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sha2::Sha256;
use uuid::Uuid;

use super::harness::{Answer, DEADLINE, Kept as _, Running};

pub(crate) const KEY: &[u8] = b"a key of thirty-two bytes, exact";
const OTHER_KEY: &[u8] = b"another key of thirty-two bytes.";

pub(crate) fn secret(key: &[u8]) -> Secret {
    Secret::new(format!("whsec_{}", STANDARD.encode(key)))
}

pub(crate) fn receiving(config: &mut Config) {
    config.webhook_secrets = vec![secret(KEY)];
}

/// One delivery, as a sender of Standard Webhooks makes it; each part can be falsified.
#[derive(Clone)]
struct Delivery {
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Delivery {
    fn signed(key: &[u8], id: &str, at: u64, body: &[u8]) -> Self {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes any key");
        mac.update(format!("{id}.{at}.").as_bytes());
        mac.update(body);
        let signature = STANDARD.encode(mac.finalize().into_bytes());
        let headers = vec![
            ("content-type", "application/json".to_owned()),
            ("webhook-id", id.to_owned()),
            ("webhook-timestamp", at.to_string()),
            ("webhook-signature", format!("v1,{signature}")),
        ];
        Self { headers, body: body.to_vec() }
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.retain(|(have, _)| *have != name);
        self.headers.push((name, value.to_owned()));
        self
    }

    async fn send(&self, service: &Running) -> Answer {
        let mut request = service.request(Method::POST, "/webhooks/contacts");
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        Answer::of(request.body(self.body.clone())).await
    }
}

#[expect(clippy::disallowed_methods, reason = "a sender signs with the wall clock")]
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

fn payload(number: u128) -> (String, Value) {
    let id = Uuid::from_u128(number).to_string();
    let payload = json!({
        "name": { "firstName": "Jane", "lastName": "Doe" },
        "contactId": "b5e2e7aa-4982-4735-9422-c39a7c4af5c2",
        "action": "ContactNameUpdatedEvent", "id": id,
        "createdAt": "2021-09-22T09:37:37.302Z",
    });
    (id, payload)
}

fn delivery(number: u128) -> Delivery {
    let (id, payload) = payload(number);
    Delivery::signed(KEY, &id, now(), payload.to_string().as_bytes())
}

/// Follows `/api/events` until it has shown `count` events: their ids in the stream, their data.
pub(crate) async fn follow(
    service: &Running,
    last: Option<&str>,
    count: usize,
) -> Vec<(String, Value)> {
    let mut request = service.request(Method::GET, "/api/events");
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let response = request.send().await.expect("the stream opens");
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut chunks = response.bytes_stream();
    let (mut text, mut events) = (String::new(), Vec::new());
    let read = async {
        while events.len() < count {
            let chunk = chunks.next().await.expect("the stream goes on").expect("no error");
            text.push_str(std::str::from_utf8(&chunk).expect("UTF-8"));
            while let Some(end) = text.find("\n\n") {
                let message: String = text.drain(..end + 2).collect();
                let line = |name: &str| {
                    let line = message.lines().find_map(|line| line.strip_prefix(name));
                    line.map(|value| value.trim_start().to_owned())
                };
                if let Some(data) = line("data:") {
                    let data = serde_json::from_str(&data).expect("JSON");
                    events.push((line("id:").expect("an id"), data));
                }
            }
        }
    };
    tokio::time::timeout(DEADLINE, read).await.expect("the events arrive");
    events
}

fn ids(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(_, data)| data["id"].as_str().expect("an id")).collect()
}

#[tokio::test]
async fn a_signed_delivery_is_kept_and_shown_with_its_subject_id_key_and_payload() {
    let service = Running::with(receiving).await;
    let sent = delivery(1);
    let answer = sent.send(&service).await;
    assert_eq!((answer.status, answer.text.as_str()), (StatusCode::NO_CONTENT, ""));
    let (id, payload) = payload(1);
    let expected = json!({
        "number": 1, "id": id, "type": "ContactNameUpdatedEvent",
        "key": "b5e2e7aa-4982-4735-9422-c39a7c4af5c2", "payload": payload,
    });
    assert_eq!(follow(&service, None, 1).await[0].1, expected);
    service.stop().await;
}

#[tokio::test]
async fn a_delivery_without_a_good_signature_is_refused_with_401() {
    let service = Running::with(receiving).await;
    let (id, payload) = payload(1);
    let body = payload.to_string().into_bytes();
    let good = Delivery::signed(KEY, &id, now(), &body);
    let mut altered = good.clone();
    altered.body.extend_from_slice(b" ");
    let mut bare = good.clone();
    bare.headers.clear();
    let bad = [
        altered,
        bare,
        Delivery::signed(OTHER_KEY, &id, now(), &body),
        Delivery::signed(KEY, &id, now() - 3_600, &body),
        Delivery::signed(KEY, &id, now() + 3_600, &body),
        good.clone().with("webhook-id", "another"),
        good.clone().with("webhook-timestamp", "now"),
        good.clone().with("webhook-timestamp", "-1"),
        good.clone().with("webhook-signature", ""),
        good.clone().with("webhook-signature", "v1,"),
        good.clone().with("webhook-signature", "v1,%%%%"),
        good.clone().with("webhook-signature", "v9,AAAA v1 v1a,AAAA"),
    ];
    for delivery in bad {
        delivery.send(&service).await.problem(401);
    }
    assert_eq!(good.send(&service).await.status, StatusCode::NO_CONTENT);
    assert_eq!(follow(&service, None, 1).await[0].1["number"], 1);
    service.stop().await;
}

#[tokio::test]
async fn both_secrets_are_good_while_they_are_rotated() {
    let service = Running::with(|config| {
        config.webhook_secrets = vec![secret(OTHER_KEY), secret(KEY)];
    })
    .await;
    for (number, key) in [(1, KEY), (2, OTHER_KEY)] {
        let (id, payload) = payload(number);
        let sent = Delivery::signed(key, &id, now(), payload.to_string().as_bytes());
        assert_eq!(sent.send(&service).await.status, StatusCode::NO_CONTENT);
    }
    service.stop().await;
}

#[tokio::test]
async fn an_event_delivered_again_is_not_shown_again_also_after_a_restart() {
    let service = Running::with(receiving).await;
    for number in [1, 2, 1, 1] {
        assert_eq!(delivery(number).send(&service).await.status, StatusCode::NO_CONTENT);
    }
    let kept = service.stop().await;
    let service = Running::on(kept, receiving).await;
    for number in [2, 1, 3] {
        assert_eq!(delivery(number).send(&service).await.status, StatusCode::NO_CONTENT);
    }
    let shown = follow(&service, None, 3).await;
    let expected: Vec<String> = (1..=3).map(|number| payload(number).0).collect();
    assert_eq!(ids(&shown), expected);
    service.stop().await;
}

/// Many copies at once: one of them is first, whichever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_delivered_at_the_same_time_are_shown_once() {
    let service = Running::with(receiving).await;
    for number in 1..=5 {
        let copies = (0..8).map(|_| async {
            assert_eq!(delivery(number).send(&service).await.status, StatusCode::NO_CONTENT);
        });
        futures_util::future::join_all(copies).await;
    }
    let shown = follow(&service, None, 5).await;
    let expected: Vec<String> = (1..=5).map(|number| payload(number).0).collect();
    assert_eq!(ids(&shown), expected);
    service.stop().await;
}

#[tokio::test]
async fn a_page_that_comes_back_sees_what_it_missed_and_nothing_twice() {
    let service = Running::with(receiving).await;
    for number in 1..=3 {
        delivery(number).send(&service).await;
    }
    let first = follow(&service, None, 3).await;
    let missed = follow(&service, Some(&first[0].0), 2).await;
    assert_eq!(missed, first[1..]);
    // A place in another journal, or none at all, is no place here: everything is shown.
    let other = format!("{}.2", Uuid::nil());
    for unknown in [&other, "", "x", "1.2.3", &format!("{}9", first[0].0).replace('.', "")] {
        assert_eq!(follow(&service, Some(unknown), 3).await, first, "{unknown:?}");
    }
    service.stop().await;
}

#[tokio::test]
async fn a_page_sees_events_while_they_arrive() {
    let service = Running::with(receiving).await;
    let send = async {
        for number in 1..=20 {
            delivery(number).send(&service).await;
        }
    };
    let (shown, ()) = tokio::join!(follow(&service, None, 20), send);
    let numbers: Vec<_> = shown.iter().map(|(_, data)| data["number"].as_u64()).collect();
    assert_eq!(numbers, (1..=20).map(Some).collect::<Vec<_>>());
    service.stop().await;
}

#[tokio::test]
async fn a_program_that_embeds_the_service_follows_only_what_arrives_from_then_on() {
    let service = Running::with(receiving).await;
    delivery(1).send(&service).await;
    let kept = service.stop().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let mut config = Config::new(kept.config());
    receiving(&mut config);
    let embedded = postrider_sample_contacts::open(config).await.expect("the service opens");
    let mut received = embedded.received();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = embedded.serve(listener, async { stopped.await.unwrap_or(()) });
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let using = async {
        let mut request = client.post(format!("{base}/webhooks/contacts"));
        let Delivery { headers, body } = delivery(2);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        assert_eq!(request.body(body).send().await.unwrap().status(), StatusCode::NO_CONTENT);
        let event = received.next().await.expect("the journal is read").expect("an event");
        assert_eq!((event.number, event.id), (2, Uuid::from_u128(2)));
        stop.send(()).expect("the service waits for its stop");
        assert!(received.next().await.expect("the journal is read").is_none(), "the stream ends");
    };
    tokio::time::timeout(DEADLINE, async { tokio::join!(serving, using) }).await.expect("in time");
}

#[tokio::test]
async fn the_history_is_bounded_and_keeps_the_last_events() {
    let service = Running::with(receiving).await;
    for number in 1..=205 {
        delivery(number).send(&service).await;
    }
    let shown = follow(&service, None, 200).await;
    assert_eq!(shown[0].1["number"], 6);
    assert_eq!(shown[199].1["number"], 205);
    service.stop().await;
}

#[tokio::test]
async fn unsigned_words_that_differ_from_the_signed_ones_are_refused() {
    let service = Running::with(receiving).await;
    delivery(1).with("postrider-key", "another").send(&service).await.problem(400);
    delivery(1).with("postrider-type", "ContactDeletedEvent").send(&service).await.problem(400);
    let (_, payload) = payload(1);
    let under_another_id = Uuid::from_u128(2).to_string();
    let body = payload.to_string();
    let other = Delivery::signed(KEY, &under_another_id, now(), body.as_bytes());
    other.send(&service).await.problem(400);
    service.stop().await;
}

#[tokio::test]
async fn signed_bytes_that_are_no_contact_event_are_refused() {
    let service = Running::with(receiving).await;
    for body in [&b""[..], b"{", b"[]", b"\xff\xfe", b"{\"action\":1}", b"{\"id\":\"x\"}"] {
        Delivery::signed(KEY, "x", now(), body).send(&service).await.problem(400);
    }
    let large = vec![b' '; 300 * 1024];
    Delivery::signed(KEY, "x", now(), &large).send(&service).await.problem(413);
    service.stop().await;
}

/// Line ends inside the payload's white space stay within their event of the stream.
#[tokio::test]
async fn a_payload_with_line_ends_is_shown_whole() {
    let service = Running::with(receiving).await;
    let (id, payload) = payload(1);
    let pretty = serde_json::to_string_pretty(&payload).unwrap().replace('\n', "\r\n\r\n");
    let sent = Delivery::signed(KEY, &id, now(), pretty.as_bytes());
    assert_eq!(sent.send(&service).await.status, StatusCode::NO_CONTENT);
    delivery(2).send(&service).await;
    let stream = service.request(Method::GET, "/api/events").send().await.unwrap();
    let mut chunks = stream.bytes_stream();
    let mut text = String::new();
    let read = async {
        while !text.contains(&Uuid::from_u128(2).to_string()) {
            let chunk = chunks.next().await.expect("the stream goes on").expect("no error");
            text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    };
    tokio::time::timeout(DEADLINE, read).await.expect("both arrive");
    let first = text.split("\n\n").next().unwrap();
    let lines = first.split(['\r', '\n']).filter_map(|line| line.strip_prefix("data: "));
    let data: Value = serde_json::from_str(&lines.collect::<Vec<_>>().join("\n")).unwrap();
    assert_eq!(data["payload"], payload);
    service.stop().await;
}

#[tokio::test]
async fn without_a_secret_nothing_is_received() {
    let service = Running::start().await;
    delivery(1).send(&service).await.problem(404);
    service.stop().await;
}

#[tokio::test]
async fn streams_are_limited_and_end_with_the_service() {
    let service = Running::with(receiving).await;
    let mut streams = Vec::new();
    for _ in 0..64 {
        let stream = service.request(Method::GET, "/api/events").send().await.unwrap();
        assert_eq!(stream.status(), StatusCode::OK);
        streams.push(stream);
    }
    let refused = Answer::of(service.request(Method::GET, "/api/events")).await;
    refused.problem(503);
    assert_eq!(refused.header("retry-after"), "5");
    drop(streams.pop());
    let reopened = async {
        loop {
            let stream = service.request(Method::GET, "/api/events").send().await.unwrap();
            if stream.status() == StatusCode::OK {
                return stream;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    streams.push(tokio::time::timeout(DEADLINE, reopened).await.expect("a place is free again"));
    let (_, ends) = tokio::join!(service.stop(), async {
        let mut ends = Vec::new();
        for stream in streams {
            ends.push(stream.text().await.is_ok());
        }
        ends
    });
    assert_eq!(ends, [true; 64]);
}
