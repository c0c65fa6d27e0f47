//! Requests as a receiver sees them.
//!
//! What lives here: bodies, headers, encodings, URLs, limits. What does not: failures.
//! Invariant: body bytes are compared with the payload's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{Method, Version};
use axum::response::IntoResponse;
use postrider_core::{Chain, ErrorKind, Outcome, PartitionId, Publish, Secret, Sink};
use postrider_encoding::{CloudEvent, Encoding, decode_header_value};
use postrider_sink_webhook::{Webhook, WebhookConfig};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::receiver::Receiver;
use crate::{Fixed, OTHER_KEY, config, confirm, fail, record, webhook};

#[tokio::test]
async fn a_plain_request_carries_body_and_attributes_unchanged() {
    let receiver = Receiver::answering(204).await;
    let mut config = config(receiver.url("/hook"));
    config.headers = BTreeMap::from([("Authorization".into(), Secret::new("Bearer x"))]);
    let payload = [b"{\"a\": 1.0}\n".as_slice(), &[0xff, 0]].concat();
    confirm(&webhook(&config), record(1, "Zoë 42", &payload)).await;

    let requests = receiver.received();
    let [request] = &requests[..] else { panic!("{requests:?}") };
    assert_eq!((&request.method, request.uri.as_str()), (&Method::POST, "/hook"));
    assert_eq!(request.version, Version::HTTP_11);
    assert_eq!(&request.body[..], &payload[..]);
    for (name, value) in [
        ("content-type", "application/json"),
        ("webhook-id", "00000000-0000-0000-0000-000000000001"),
        ("webhook-timestamp", "1672671845"),
        ("postrider-topic", "orders"),
        ("postrider-type", "OrderPlaced"),
        ("postrider-key", "Zo%C3%AB%2042"),
        ("postrider-header-tenant", "50%20%25%20%22%C3%A9%22"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "vendor=1"),
        ("authorization", "Bearer x"),
        ("postrider-header-traceparent", ""),
        ("accept-encoding", ""),
    ] {
        assert_eq!(request.header(name), value, "{name}");
    }
    assert!(request.header("user-agent").starts_with("postrider/"));
    let tenant = request.header("postrider-header-tenant");
    assert_eq!(decode_header_value(tenant.as_bytes()).expect("UTF-8"), "50 % \"é\"");
}

#[tokio::test]
async fn cloud_events_arrive_in_both_modes() {
    let receiver = Receiver::answering(200).await;
    let mut config = config(receiver.url("/"));
    config.source = Some("/shop".into());
    for encoding in [Encoding::CloudEventsBinary, Encoding::CloudEventsStructured] {
        config.encoding = encoding;
        confirm(&webhook(&config), record(1, "Zoë 42", b"{\"a\": 1.0}")).await;
    }
    let requests = receiver.received();
    let [binary, structured] = &requests[..] else { panic!("{requests:?}") };
    let headers = binary.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    let from_binary = CloudEvent::from_http_binary(headers, binary.body.clone()).expect("valid");
    assert_eq!(structured.header("content-type"), "application/cloudevents+json");
    let from_structured = CloudEvent::from_structured(&structured.body).expect("valid");
    assert_eq!(from_binary, from_structured);
    assert_eq!(&from_binary.data[..], b"{\"a\": 1.0}");
    assert_eq!(from_binary.source, "/shop");
    assert_eq!(from_binary.subject.as_deref(), Some("Zoë 42"));
    assert_eq!(structured.header("postrider-header-tenant"), "50%20%25%20%22%C3%A9%22");
}

#[tokio::test]
async fn the_url_may_hold_placeholders() {
    let receiver = Receiver::answering(200).await;
    let sink = webhook(&config(receiver.url("/{topic}/{key}?t={header.tenant}")));
    confirm(&sink, record(1, "a/b", b"{}")).await;
    assert_eq!(receiver.received()[0].uri, "/orders/a%2Fb?t=50%20%25%20%22%C3%A9%22");
    let error = fail(&sink, record(2, "..", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    let missing = webhook(&config(receiver.url("/{header.absent}")));
    let error = fail(&missing, record(3, "k", b"{}")).await;
    assert!(error.to_string().contains("no header absent"), "{error}");
    assert_eq!(receiver.received().len(), 1);
}

#[tokio::test]
async fn a_redelivery_has_the_same_id_also_from_a_new_sink() {
    let receiver = Receiver::answering(200).await;
    for _ in 0..2 {
        confirm(&webhook(&config(receiver.url("/"))), record(9, "k", b"{}")).await;
    }
    let ids: Vec<String> =
        receiver.received().iter().map(|request| request.header("webhook-id").into()).collect();
    assert_eq!(ids[0], ids[1]);
}

#[tokio::test]
async fn one_host_gets_no_more_requests_at_a_time_than_allowed_whichever_sink_sends() {
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let gate = Arc::new(Barrier::new(3));
    let (seen, highest, door) = (running.clone(), most.clone(), gate.clone());
    let receiver = Receiver::start(move |_| {
        let (seen, highest, door) = (seen.clone(), highest.clone(), door.clone());
        async move {
            highest.fetch_max(seen.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Three at a time get through together: fewer permits would hang, more would count.
            door.wait().await;
            tokio::task::yield_now().await;
            seen.fetch_sub(1, Ordering::SeqCst);
            axum::http::StatusCode::OK.into_response()
        }
    })
    .await;
    let config = WebhookConfig { concurrency: 3, ..config(receiver.url("/")) };
    let sinks = [Arc::new(webhook(&config)), Arc::new(webhook(&config))];
    assert_eq!(sinks[0].capabilities().max_in_flight, 3);
    assert_eq!(sinks[0].capabilities().chain, Chain::One);
    assert_eq!(sinks[0].capabilities().max_batch_records, 1);
    let mut calls = JoinSet::new();
    for number in 0..12u128 {
        let sink = sinks[usize::from(number % 2 == 0)].clone();
        calls.spawn(async move { confirm(&sink, record(number, "k", b"{}")).await });
    }
    while let Some(done) = calls.join_next().await {
        done.expect("confirmed");
    }
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn after_a_failure_later_events_of_the_key_are_held_back() {
    let receiver = Receiver::start(|request| async move {
        let refused = &request.body[..] == b"bad";
        axum::http::StatusCode::from_u16(if refused { 400 } else { 200 })
            .expect("a status")
            .into_response()
    })
    .await;
    let sink = webhook(&config(receiver.url("/")));
    let records = [
        record(1, "a", b"bad"),
        record(2, "b", b"good"),
        record(3, "a", b"good"),
        record(4, "b", b"good"),
    ];
    let outcomes = sink.publish(Publish::new(&PartitionId::numbered(0, 1), &records)).await;
    assert!(matches!(
        &outcomes[..],
        [Outcome::Failed(_), Outcome::Confirmed, Outcome::HeldBack, Outcome::Confirmed]
    ));
    assert_eq!(receiver.received().len(), 3);
}

#[tokio::test]
async fn an_idle_connection_is_used_again_and_a_large_event_passes() {
    let receiver = Receiver::answering(200).await;
    let sink = webhook(&config(receiver.url("/")));
    let large = vec![b' '; 8 * 1024 * 1024];
    confirm(&sink, record(1, "k", &large)).await;
    confirm(&sink, record(2, "k", b"{}")).await;
    assert_eq!(receiver.received()[0].body.len(), large.len());
    sink.check().await.expect("reachable");
    sink.close().await.expect("closed");
}

#[tokio::test]
async fn names_that_resolve_to_private_addresses_are_refused_at_connect() {
    let receiver = Receiver::answering(200).await;
    let url = receiver.url("/").replace("127.0.0.1", "localhost");
    let config = WebhookConfig { allow_private: false, ..config(url) };
    let sink = webhook(&config);
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("allow_private"), "{error:?}");
    let error = sink.check().await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(receiver.received().is_empty());
    let allowed = webhook(&WebhookConfig { allow_private: true, ..config });
    allowed.check().await.expect("reachable");
    confirm(&allowed, record(1, "k", b"{}")).await;
}

#[test]
fn settings_are_checked_before_anything_is_sent() {
    let refused = |change: fn(&mut WebhookConfig), expected: &str| {
        let mut config = config("http://127.0.0.1:9/");
        change(&mut config);
        let error = Webhook::new(&config, Arc::new(Fixed)).expect_err(expected);
        assert_eq!(error.kind(), ErrorKind::Permanent);
        assert!(error.to_string().contains(expected), "{error}");
    };
    refused(|config| config.signing_keys.clear(), "signing_keys");
    refused(|config| config.signing_keys.push(Secret::new("whsec_!")), "whsec_");
    refused(|config| config.signing_keys.push(Secret::new("hunter2")), "signing key");
    refused(|config| config.allow_private = false, "allow_private");
    refused(|config| config.source = Some("a b".into()), "URI-reference");
    refused(|config| config.timeout_ms = 0, "timeout_ms");
    refused(|config| config.ca_file = Some("/nowhere/ca.pem".into()), "ca_file");
    refused(|config| config.proxy = Some(Secret::new("::")), "proxy");
    refused(
        |config| drop(config.headers.insert("Host".into(), Secret::new("x"))),
        "set by the sink itself",
    );
    let config = config("http://u:hunter2@127.0.0.1:9/hunter2");
    let shown = format!("{:?}", webhook(&config));
    assert!(!shown.contains("hunter2") && shown.contains("127.0.0.1:9"), "{shown}");
}

#[tokio::test]
async fn a_proxy_is_used_only_when_configured() {
    let proxy = Receiver::answering(200).await;
    let mut config = config("http://webhook.test/hook");
    config.allow_http = true;
    config.proxy = Some(Secret::new(proxy.url("")));
    confirm(&webhook(&config), record(1, "k", b"{}")).await;
    assert_eq!(proxy.received()[0].uri, "http://webhook.test/hook");
}

#[tokio::test]
async fn each_active_key_adds_a_signature() {
    let receiver = Receiver::answering(200).await;
    let mut config = config(receiver.url("/"));
    config.signing_keys.push(Secret::new(OTHER_KEY));
    confirm(&webhook(&config), record(1, "k", b"{}")).await;
    config.signing_keys.clear();
    config.unsigned = true;
    config.timeout_ms = Duration::from_secs(20).as_millis() as u64;
    confirm(&webhook(&config), record(2, "k", b"{}")).await;
    let requests = receiver.received();
    assert_eq!(requests[0].header("webhook-signature").matches("v1,").count(), 2);
    assert!(!requests[1].headers.contains_key("webhook-signature"));
}
