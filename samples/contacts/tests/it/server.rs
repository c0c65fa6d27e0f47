//! The process around the API: pages, probes, OpenAPI, and a clean end.

use std::time::Duration;

use reqwest::{Method, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{Answer, DEADLINE, Running, john};

#[tokio::test]
async fn the_openapi_document_has_every_row_of_the_endpoint_table() {
    let service = Running::start().await;
    let answer = service.get("/openapi.json").await;
    assert_eq!(answer.header("content-type"), "application/json");
    let document = answer.json();
    let one = "/api/contacts/{id}";
    let rows = [
        ("get", one.to_owned(), vec!["200", "304", "404"]),
        ("get", "/api/contacts".to_owned(), vec!["200", "400"]),
        ("post", "/api/contacts".to_owned(), vec!["201", "400", "409"]),
        ("post", format!("{one}/update-name"), vec!["204", "400", "404", "409", "412", "428"]),
        (
            "post",
            format!("{one}/update-description"),
            vec!["204", "400", "404", "409", "412", "428"],
        ),
        ("post", format!("{one}/update-email"), vec!["204", "400", "404", "409", "412", "428"]),
        ("post", format!("{one}/update-company"), vec!["204", "400", "404", "409", "412", "428"]),
        ("delete", one.to_owned(), vec!["200", "404", "412"]),
        ("post", "/webhooks/contacts".to_owned(), vec!["204", "400", "401", "404"]),
        ("get", "/api/events".to_owned(), vec!["200", "503"]),
    ];
    for (method, path, statuses) in rows {
        let operation = &document["paths"][&path][method];
        assert!(operation["summary"].is_string(), "{method} {path}");
        for status in statuses {
            assert!(operation["responses"][status].is_object(), "{method} {path}: {status}");
        }
    }
    let body = &document["components"]["schemas"]["CreateContact"];
    let required: Vec<_> = body["required"].as_array().unwrap().iter().collect();
    assert_eq!(required, ["firstName", "lastName", "companyName"]);
    assert_eq!(body["properties"]["firstName"]["maxLength"], 100);
    service.stop().await;
}

#[tokio::test]
async fn pages_come_from_the_service_alone() {
    let service = Running::start().await;
    for page in ["/", "/docs"] {
        let answer = service.get(page).await;
        assert_eq!(answer.header("content-type"), "text/html; charset=utf-8");
        assert!(answer.header("content-security-policy").contains("default-src 'none'"));
        assert_eq!(answer.header("x-content-type-options"), "nosniff");
        let linked: Vec<_> = answer
            .text
            .split('"')
            .filter(|text| text.starts_with('/') || text.contains("://"))
            .collect();
        assert!(linked.len() >= 3, "{linked:?}");
        for path in linked {
            assert_eq!(service.get(path).await.status, StatusCode::OK, "{path}");
        }
    }
    service.stop().await;
}

#[tokio::test]
async fn probes_answer() {
    let service = Running::start().await;
    for probe in ["/healthz", "/readyz"] {
        assert_eq!(service.get(probe).await.status, StatusCode::OK);
    }
    let tables = postrider::sqlite::rusqlite::Connection::open(service.database());
    tables.unwrap().execute_batch("DROP TABLE postrider_document").expect("break the store");
    assert_eq!(service.get("/healthz").await.status, StatusCode::OK);
    let readiness = service.get("/readyz").await;
    assert!(readiness.status.is_server_error(), "{readiness:?}");
    service.stop().await;
}

/// A request under way when the stop comes is answered, and its change is saved.
#[tokio::test]
async fn a_stop_answers_requests_under_way_and_does_not_wait_for_idle_clients() {
    let service = Running::start().await;
    let address = service.base.trim_start_matches("http://").to_owned();
    let _idle = TcpStream::connect(&address).await.expect("connect");
    let mut busy = TcpStream::connect(&address).await.expect("connect");
    let body = john("John").to_string();
    let (first, rest) = body.split_at(10);
    let head = format!(
        "POST /api/contacts HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{first}",
        body.len()
    );
    busy.write_all(head.as_bytes()).await.expect("send the first part");
    // The head has arrived once another request on a later connection is answered and the
    // service had its turn for both.
    service.get("/healthz").await;
    let base = service.base.clone();
    let stopping = tokio::time::timeout(DEADLINE, service.stop());
    let finish = async {
        until_refused(&base).await;
        busy.write_all(rest.as_bytes()).await.expect("send the rest");
        let mut answer = String::new();
        busy.read_to_string(&mut answer).await.expect("read to the end");
        answer
    };
    let (stopped, answer) = tokio::join!(stopping, finish);
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    let kept = stopped.expect("the service drains");
    let again = Running::on(kept, |_| {}).await;
    assert_eq!(again.event_types().await, ["ContactCreatedEvent"]);
    again.stop().await;
}

/// Waits until the service takes no connections any more.
async fn until_refused(base: &str) {
    let address = base.trim_start_matches("http://");
    let refused = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, refused).await.expect("the listener closes");
}

#[tokio::test]
async fn bytes_that_are_no_http_end_their_connection_only() {
    let service = Running::start().await;
    let address = service.base.trim_start_matches("http://");
    for bytes in [&b"\x00\xff\x16\x03\x01"[..], b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n "] {
        let mut socket = TcpStream::connect(address).await.expect("connect");
        socket.write_all(bytes).await.expect("send");
        socket.shutdown().await.expect("end the sending side");
        let mut answer = Vec::new();
        // A reset is as good an end as an answer.
        let ended = tokio::time::timeout(DEADLINE, socket.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "the connection stays open after {bytes:?}");
    }
    let longest = format!("/api/contacts/{}", "a".repeat(60_000));
    let answer = Answer::of(service.request(Method::GET, &longest)).await;
    assert!(answer.status.is_client_error(), "{answer:?}");
    service.create("John").await;
    service.stop().await;
}
