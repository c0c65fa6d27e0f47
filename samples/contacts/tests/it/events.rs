//! What an application tells others: the events' JSON, which is the article's.

use reqwest::Method;
use serde_json::{Value, json};

use super::harness::{Answer, Running, john};

/// The event's payload without the members that differ each time, which are checked here.
fn payload(record: &postrider::Record) -> Value {
    let event = &record.event;
    let mut payload: Value = serde_json::from_slice(event.payload()).expect("JSON");
    let members = payload.as_object_mut().expect("an object");
    let taken = |members: &mut serde_json::Map<String, Value>, name: &str| {
        let value = members.remove(name).unwrap_or_else(|| panic!("no {name}"));
        value.as_str().expect("text").to_owned()
    };
    assert_eq!(taken(members, "id"), event.id().to_string());
    assert_eq!(taken(members, "action"), event.event_type().as_str());
    assert_eq!(taken(members, "contactId"), event.key().as_str());
    let created_at = taken(members, "createdAt");
    assert!(created_at.parse::<jiff::Timestamp>().is_ok(), "{created_at}");
    assert_eq!(event.topic().as_str(), "contacts");
    assert_eq!(event.content_type().as_str(), "application/json");
    payload
}

/// The payload as it was appended, its text.
fn member_order(record: &postrider::Record) -> Vec<String> {
    let text = std::str::from_utf8(record.event.payload()).expect("UTF-8");
    let mut depth = 0;
    let mut names = Vec::new();
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            b':' if depth == 1 && text[..at].ends_with('"') => {
                let name = text[..at - 1].rsplit('"').next().expect("a name before its colon");
                names.push(name.to_owned());
            }
            _ => {}
        }
    }
    names
}

#[tokio::test]
async fn payloads_have_the_articles_shape() {
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let company = json!({
        "companyName": "Contoso", "street": "Street", "houseNumber": "1a",
        "postalCode": "092821", "city": "Palo Alto", "country": "US",
    });
    let steps = [
        ("update-name", json!({ "firstName": "Jane", "lastName": "Doe" })),
        ("update-description", json!({ "description": "New" })),
        ("update-description", json!({})),
        ("update-email", json!({ "email": "jane@x.org" })),
        ("update-email", json!({ "email": null })),
        ("update-company", company.clone()),
    ];
    for (action, body) in steps {
        service.post(&format!("{path}/{action}"), &body).await;
    }
    service.delete(&path).await;
    let outbox = service.outbox().await;
    let mut payloads: Vec<Value> = outbox.iter().map(payload).collect();
    let contact = payloads[0]["contact"].as_object_mut().expect("the created contact");
    assert_eq!(contact.remove("id").expect("its id"), path.rsplit('/').next().unwrap());
    assert!(contact.remove("createdAt").is_some());
    let blank = json!({ "companyName": "Contoso", "street": "", "houseNumber": "",
        "postalCode": "", "city": "", "country": "" });
    let expected = [
        json!({ "contact": {
            "name": { "firstName": "John", "lastName": "Doe" },
            "description": "This is a contact", "email": "johndoe@contoso.com",
            "company": blank, "deleted": false,
        } }),
        json!({ "name": { "firstName": "Jane", "lastName": "Doe" } }),
        json!({ "description": "New" }),
        json!({}),
        json!({ "email": "jane@x.org" }),
        json!({}),
        json!({ "company": company }),
        json!({}),
    ];
    assert_eq!(payloads, expected);
    assert_eq!(member_order(&outbox[1]), ["name", "contactId", "action", "id", "createdAt"]);
    service.stop().await;
}

#[tokio::test]
async fn every_change_raises_one_event_in_the_order_of_the_changes() {
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let name = json!({ "firstName": "Jane", "lastName": "Doe" });
    service.post(&format!("{path}/update-name"), &name).await;
    service.post(&format!("{path}/update-name"), &name).await;
    service.delete(&path).await;
    let types = [
        "ContactCreatedEvent",
        "ContactNameUpdatedEvent",
        "ContactNameUpdatedEvent",
        "ContactDeletedEvent",
    ];
    assert_eq!(service.event_types().await, types);
    let outbox = service.outbox().await;
    let ids: std::collections::BTreeSet<_> = outbox.iter().map(|r| r.event.id()).collect();
    assert_eq!(ids.len(), outbox.len());
    service.stop().await;
}

#[tokio::test]
async fn events_carry_the_callers_trace() {
    let service = Running::start().await;
    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let request = service
        .request(Method::POST, "/api/contacts")
        .header("traceparent", traceparent)
        .header("tracestate", "vendor=1")
        .json(&john("John"));
    Answer::of(request).await;
    service.create("Jane").await;
    let outbox = service.outbox().await;
    let trace = outbox[0].event.trace().expect("the caller's trace");
    assert_eq!(trace.traceparent, traceparent);
    assert_eq!(trace.tracestate.as_deref(), Some("vendor=1"));
    let own = outbox[1].event.trace().expect("a trace of the service's own");
    assert_ne!(own.traceparent, traceparent);
    service.stop().await;
}
