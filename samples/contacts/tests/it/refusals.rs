//! Bad requests: each a problem document that says what to do, and none the end of the service.

use std::time::Duration;

use postrider::sqlite::rusqlite::Connection;
use postrider_sample_contacts::StoreConfig;
use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::harness::{Answer, Running, john};

#[tokio::test]
async fn bodies_that_are_no_contact_are_refused() {
    let service = Running::start().await;
    let send = async |content_type: &str, body: Vec<u8>| {
        let request = service.request(Method::POST, "/api/contacts");
        Answer::of(request.header("content-type", content_type).body(body)).await
    };
    let json = "application/json";
    for bad in ["", "{", "[]", "null", "7", "{\"firstName\":5}", "{\"firstName\":\"\\ud800\"}"] {
        send(json, bad.into()).await.problem(400);
    }
    send(json, b"{\"firstName\":\"\xff\"}".to_vec()).await.problem(400);
    send(json, "[".repeat(20_000).into()).await.problem(400);
    let mut misspelt = john("John");
    misspelt["fistName"] = "John".into();
    let problem = send(json, misspelt.to_string().into()).await.problem(400);
    assert!(problem["detail"].as_str().unwrap().contains("fistName"), "{problem}");
    send("text/plain", john("John").to_string().into()).await.problem(415);
    let padded = format!("{}{}", john("John"), " ".repeat(40 * 1024));
    send(json, padded.into()).await.problem(413);
    assert_eq!(service.event_types().await, [""; 0]);
    service.create("John").await;
    service.stop().await;
}

#[tokio::test]
async fn paths_and_methods_that_do_not_exist_answer_with_problems() {
    let service = Running::start().await;
    let problem = service.get("/nowhere?secret=1").await.problem(404);
    assert_eq!(problem["instance"], "/nowhere");
    let (path, _) = service.create("John").await;
    let put = Answer::of(service.request(Method::PUT, &path)).await;
    put.problem(405);
    assert!(put.header("allow").contains("DELETE"), "{put:?}");
    let head = Answer::of(service.request(Method::HEAD, "/nowhere")).await;
    assert_eq!((head.status, head.text.as_str()), (StatusCode::NOT_FOUND, ""));
    service.stop().await;
}

#[tokio::test]
async fn problems_carry_the_callers_trace_id_or_one_of_their_own() {
    let service = Running::start().await;
    let ask = async |traceparent: &str| {
        let request = service.request(Method::GET, "/nowhere").header("traceparent", traceparent);
        Answer::of(request).await.problem(404)["traceId"].as_str().unwrap().to_owned()
    };
    let given = "0af7651916cd43dd8448eb211c80319c";
    assert_eq!(ask(&format!("00-{given}-b7ad6b7169203331-01")).await, given);
    let own = ask("not of the form").await;
    assert!(own.len() == 32 && own.bytes().all(|b| b.is_ascii_hexdigit()), "{own}");
    assert_ne!(ask("not of the form").await, own);
    service.stop().await;
}

#[tokio::test]
async fn a_busy_store_answers_503_with_retry_after_and_recovers() {
    let service = Running::with(|config| {
        if let StoreConfig::Sqlite { busy_timeout, .. } = &mut config.store {
            *busy_timeout = Duration::from_millis(50);
        }
    })
    .await;
    let (path, _) = service.create("John").await;
    let other = Connection::open(service.database()).expect("open the same file");
    other.execute_batch("BEGIN IMMEDIATE").expect("take the write lock");
    for answer in [
        service.post("/api/contacts", &john("Jane")).await,
        service.post(&format!("{path}/update-email"), &json!({})).await,
        service.delete(&path).await,
    ] {
        answer.problem(503);
        assert_eq!(answer.header("retry-after"), "1");
    }
    assert_eq!(service.get(&path).await.status, StatusCode::OK);
    other.execute_batch("ROLLBACK").expect("let the lock go");
    assert_eq!(service.delete(&path).await.status, StatusCode::OK);
    service.stop().await;
}

#[tokio::test]
async fn a_damaged_document_answers_500_without_telling_what_it_holds() {
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let other = Connection::open(service.database()).expect("open the same file");
    let damage = "UPDATE postrider_document SET data = CAST('{\"secret\":1}' AS BLOB)";
    assert_eq!(other.execute(damage, []).expect("damage the document"), 1);
    let answer = service.get(&path).await;
    let problem = answer.problem(500);
    assert!(!answer.text.contains("secret"), "{problem}");
    service.stop().await;
}
