//! Answers and failures as a relay sees them.
//!
//! What lives here: statuses, redirects, resets, time-outs, unhelpful bodies. What does not: the
//! whole table of statuses (`src/error.rs`).
//! Invariant: nothing but a 2xx is ever confirmed, and no error shows a secret or a body.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use postrider_core::{Error, ErrorKind, Sink};
use postrider_sink_webhook::WebhookConfig;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::receiver::{RawServer, Receiver, read_request, write};
use crate::{config, confirm, fail, record, webhook};

async fn error_of(config: &WebhookConfig) -> Error {
    let error = fail(&webhook(config), record(1, "k", b"{}")).await;
    let text = format!("{} {error:?}", error.chain());
    assert!(!text.contains("hunter2"), "{text}");
    error
}

#[tokio::test]
async fn statuses_become_reactions_without_the_answers_body() {
    for (status, kind) in [
        (301, ErrorKind::Permanent),
        (400, ErrorKind::Permanent),
        (401, ErrorKind::Transient),
        (410, ErrorKind::Permanent),
        (422, ErrorKind::Permanent),
        (429, ErrorKind::Throttled { retry_after: Some(Duration::from_secs(7)) }),
        (500, ErrorKind::Transient),
        (503, ErrorKind::Throttled { retry_after: Some(Duration::from_secs(7)) }),
    ] {
        let code = StatusCode::from_u16(status).expect("a status");
        let receiver = Receiver::start(move |_| async move {
            (code, [("retry-after", "7"), ("location", "/else")], "hunter2").into_response()
        })
        .await;
        let url = receiver.url("/?token=hunter2").replace("//127", "//u:hunter2@127");
        let error = error_of(&config(url)).await;
        assert_eq!(error.kind(), kind, "{status}");
        assert!(error.to_string().contains(&status.to_string()), "{error}");
        assert_eq!(receiver.received().len(), 1, "no redirect is followed, nothing is repeated");
    }
}

#[tokio::test]
async fn connection_failures_are_told_apart_and_transient() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let free = listener.local_addr().expect("bound");
    drop(listener);
    let reset = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        // Unread bytes or a zero linger time make the system send a reset.
        stream.set_zero_linger().expect("set");
    })
    .await;
    let closed = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream.shutdown().await;
    })
    .await;
    let garbage = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        write(&mut stream, "hello\r\n\r\n").await;
    })
    .await;
    let plain = RawServer::start(|_, mut stream| async move {
        write(&mut stream, "HTTP/1.1 400 Bad Request\r\n\r\n").await;
        read_request(&mut stream).await;
    })
    .await;
    for (url, expected) in [
        (format!("http://u:hunter2@{free}/hunter2"), "refused"),
        (reset.url(), "reset"),
        (closed.url(), "closed before an answer"),
        (garbage.url(), "no answer"),
        (plain.url().replace("http:", "https:"), "TLS"),
        ("http://nowhere.invalid/hunter2".into(), "cannot be resolved"),
    ] {
        let config = WebhookConfig { allow_http: true, ..config(url.as_str()) };
        let error = error_of(&config).await;
        assert_eq!(error.kind(), ErrorKind::Transient, "{url}");
        assert!(error.to_string().contains(expected), "{url}: {error:?}");
    }
    let refused = webhook(&config(format!("http://{free}/")));
    assert!(refused.check().await.is_err());
}

#[tokio::test]
async fn a_silent_or_dripping_receiver_is_given_up_in_time() {
    let silent = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        std::future::pending::<()>().await;
    })
    .await;
    let dripping = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        let mut ticks = tokio::time::interval(Duration::from_millis(20));
        loop {
            ticks.tick().await;
            write(&mut stream, "H").await;
        }
    })
    .await;
    for server in [&silent, &dripping] {
        let config = WebhookConfig { timeout_ms: 300, ..config(server.url()) };
        let begin = Instant::now();
        let error = error_of(&config).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}

#[tokio::test]
async fn a_2xx_confirms_whatever_becomes_of_its_body() {
    let endless = Receiver::start(|_| async {
        let chunks = futures_util::stream::repeat_with(|| {
            Ok::<_, std::io::Error>(axum::body::Bytes::from(vec![b'x'; 16_384]))
        });
        Response::new(Body::from_stream(chunks))
    })
    .await;
    let sink = webhook(&config(endless.url("/")));
    confirm(&sink, record(1, "k", b"{}")).await;
    let cut = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        write(&mut stream, "HTTP/1.1 202 Accepted\r\ncontent-length: 100\r\n\r\nabc").await;
    })
    .await;
    confirm(&webhook(&config(cut.url())), record(2, "k", b"{}")).await;
    let held = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        write(&mut stream, "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n").await;
        std::future::pending::<()>().await;
    })
    .await;
    let begin = Instant::now();
    confirm(&webhook(&config(held.url())), record(3, "k", b"{}")).await;
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_connection_closed_while_idle_costs_no_event() {
    let server = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        write(&mut stream, "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        // Announced nothing, and closes nevertheless.
        let _ = stream.shutdown().await;
    })
    .await;
    let sink = webhook(&config(server.url()));
    let mut confirmed = 0;
    for number in 0..20 {
        // A close that meets a request on its way is an unknown outcome: transient, sent again.
        let partition = postrider_core::PartitionId::numbered(0, 1);
        let records = [record(number, "k", b"{}")];
        let outcomes = sink.publish(postrider_core::Publish::new(&partition, &records)).await;
        match &outcomes[..] {
            [postrider_core::Outcome::Confirmed] => confirmed += 1,
            [postrider_core::Outcome::Failed(error)] => {
                assert_eq!(error.kind(), ErrorKind::Transient);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(confirmed >= 10, "{confirmed}");
}

#[tokio::test]
async fn informational_answers_are_not_the_answer() {
    let server = RawServer::start(|_, mut stream| async move {
        read_request(&mut stream).await;
        write(&mut stream, "HTTP/1.1 103 Early Hints\r\n\r\n").await;
        write(&mut stream, "HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n").await;
    })
    .await;
    assert_eq!(error_of(&config(server.url())).await.kind(), ErrorKind::Transient);
}
