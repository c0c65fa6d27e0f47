//! The API on Microsoft's emulator of Azure Cosmos DB, and the article's walk-through.
//!
//! What lives here: what the documents in the container look like, and the whole way through a
//! relay once. What does not: the store's own tests.
//! Invariant: documents are looked at as any client of the service sees them.

use std::process::{Command, Stdio};
use std::sync::Arc;

use futures_util::TryStreamExt;
use postrider::cosmos::azure_data_cosmos::feed::FeedScope;
use postrider::relay::embedded;
use postrider::sinks::servicebus::{ServiceBus, ServiceBusConfig};
use postrider::sinks::webhook::{Webhook, WebhookConfig};
use postrider::{Secret, SystemClock};
use postrider_servers::servicebus_sdk::Sdk;
use postrider_servicebus_emulator::{Config as BusConfig, Emulator, Entity};
use serde_json::{Value, json};

#[path = "concurrency.rs"]
mod concurrency;
#[path = "endpoints.rs"]
mod endpoints;
#[path = "receiver.rs"]
mod receiver;

/// What those tests use, on this store.
mod harness {
    pub(crate) use crate::harness::{Answer, DEADLINE, Kept, john};

    pub(crate) type Running = crate::harness::RunningOn<crate::harness::CosmosContainer>;
}

use harness::{DEADLINE, Running, john};
use receiver::{KEY, follow, receiving, secret};

const QUEUE: &str = "contacts";

/// Every document of a logical partition: the contact first, then its events in order.
async fn documents(service: &Running, contact: &str) -> Vec<Value> {
    let store = service.kept.store().await;
    let scope = FeedScope::partition(contact.to_owned());
    let found = store.container().query_items::<Value>("SELECT * FROM c", scope, None).await;
    let mut found: Vec<Value> =
        found.expect("the query").try_collect().await.expect("the documents");
    found.sort_by_key(|document| document["seq"].as_u64());
    found
}

/// Takes out what differs each time, and checks that it is there.
fn article(mut document: Value, contact: &str) -> Value {
    let members = document.as_object_mut().expect("an object");
    // What the service adds to every document.
    members.retain(|name, _| !name.starts_with('_'));
    let id = members.remove("id").expect("an id");
    assert_eq!(members.remove("partitionKey"), Some(json!(contact)));
    if members["type"] == "domainEvent" {
        // The event's version and the caller's trace, which the article's events have not.
        let headers = members.remove("headers").expect("headers");
        assert_eq!((&headers[0][0], &headers[0][1]), (&json!("event-version"), &json!("1")));
        assert_eq!(headers[1][0], "traceparent");
    }
    let of_event = members["type"] == "domainEvent";
    let data = members["data"].as_object_mut().expect("an object");
    assert_eq!(data.remove("id"), Some(id.clone()));
    if of_event {
        assert_eq!(data.remove("contactId"), Some(json!(contact)));
    } else {
        assert_eq!(id, json!(contact));
    }
    for times in ["createdAt", "modifiedAt", "deletedAt"] {
        let time = data.remove(times);
        let time = time.as_ref().and_then(Value::as_str);
        assert!(time.is_none_or(|time| time.parse::<jiff::Timestamp>().is_ok()), "{time:?}");
        assert!(time.is_some() || times != "createdAt");
    }
    document
}

/// The steps of the article's walk-through; the company and the name that they give.
async fn walk_through(service: &Running, path: &str) -> (Value, Value) {
    let company = json!({
        "companyName": "Contoso", "street": "Street", "houseNumber": "1a",
        "postalCode": "092821", "city": "Palo Alto", "country": "US",
    });
    let jane = json!({ "firstName": "Jane", "lastName": "Doe" });
    let steps = [
        ("update-name", jane.clone()),
        ("update-email", json!({ "email": "jane@contoso.com" })),
        ("update-company", company.clone()),
        ("update-description", json!({ "description": "Another one" })),
    ];
    for (action, body) in steps {
        let answer = service.post(&format!("{path}/{action}"), &body).await;
        assert_eq!(answer.status, 204, "{action}: {}", answer.text);
    }
    (company, jane)
}

/// Create, rename, change e-mail, company and description, delete: as the article does.
#[tokio::test]
async fn the_articles_walk_through_leaves_the_articles_documents() {
    let service = Running::start().await;
    let (path, etag) = service.create("John").await;
    let contact = path.rsplit('/').next().expect("an id").to_owned();
    let (company, jane) = walk_through(&service, &path).await;
    // A version of before: refused, and neither document nor event is saved.
    let stale = service.post_if(&format!("{path}/update-name"), &jane, "if-match", &etag).await;
    stale.problem(412);
    assert_eq!(documents(&service, &contact).await.len(), 6);
    assert_eq!(service.delete(&path).await.status, 200);
    service.delete(&path).await.problem(404);

    let found = documents(&service, &contact).await;
    let found: Vec<Value> = found.into_iter().map(|one| article(one, &contact)).collect();
    let event = |seq: u64, action: &str, mut data: Value| {
        data["action"] = json!(action);
        json!({ "type": "domainEvent", "data": data, "ttl": 864_000, "seq": seq })
    };
    let entity = json!({
        "type": "contact", "ttl": -1, "lastSeq": 6,
        "data": {
            "name": jane, "email": "jane@contoso.com", "company": company,
            "description": "Another one", "deleted": true,
        },
    });
    assert_eq!(found[0], entity);
    let created = &found[1]["data"]["contact"];
    assert_eq!(created["name"], json!({ "firstName": "John", "lastName": "Doe" }));
    assert_eq!(created["email"], "johndoe@contoso.com");
    assert_eq!(found[1]["data"]["action"], "ContactCreatedEvent");
    assert_eq!((&found[1]["ttl"], &found[1]["seq"]), (&json!(864_000), &json!(1)));
    let expected = [
        event(2, "ContactNameUpdatedEvent", json!({ "name": jane })),
        event(3, "ContactEmailUpdatedEvent", json!({ "email": "jane@contoso.com" })),
        event(4, "ContactCompanyUpdatedEvent", json!({ "company": company })),
        event(5, "ContactDescriptionUpdatedEvent", json!({ "description": "Another one" })),
        event(6, "ContactDeletedEvent", json!({})),
    ];
    assert_eq!(found[2..], expected);
    service.stop().await;
}

/// A message as the SDK's receiver of one session printed it.
fn messages(bus: &Emulator, session: &str, count: usize) -> Vec<Value> {
    let output = Command::new(Sdk::Python.program().expect("installed"))
        .args(["-c", include_str!("session.py"), QUEUE, session, &count.to_string()])
        .env("CONNECTION_STRING", bus.connection_string())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .output()
        .expect("started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The same way to the end: a relay sends the events, and a receiver of the contact's session by
/// Microsoft's own SDK gets what the article's handler would have sent, in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_articles_walk_through_arrives_at_a_session_receiver() {
    let sessions = Entity { requires_session: true, ..Entity::default() };
    let bus = Emulator::start(BusConfig::default().with_queue(QUEUE, sessions)).await;
    let bus = bus.expect("the bus starts");
    let mut config = ServiceBusConfig::new(Secret::new(bus.connection_string()));
    config.entity = Some(QUEUE.to_owned());
    let sink = ServiceBus::new(&config, Arc::new(SystemClock)).expect("a valid sink");
    let service = Running::start().await;
    // Its first answer tells that it has made its containers.
    service.get("/api/contacts").await;
    let relay = embedded(service.kept.store().await).sink("bus", sink).expect("a valid name");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let using = async {
        // Another contact beside it, whose session is its own.
        let (other, _) = service.create("Joan").await;
        let (path, _) = service.create("John").await;
        walk_through(&service, &path).await;
        assert_eq!(service.delete(&path).await.status, 200);
        assert_eq!(service.delete(&other).await.status, 200);
        let give_up = tokio::time::Instant::now() + DEADLINE;
        while bus.entity(QUEUE).messages().len() < 8 {
            assert!(tokio::time::Instant::now() < give_up, "not all events arrive");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        stop.send(()).expect("the relay runs");
        path
    };
    let (drained, path) = tokio::join!(relay.run_until(stopped), using);
    drained.expect("the relay drains");
    let contact = path.rsplit('/').next().expect("an id").to_owned();

    let got = tokio::task::block_in_place(|| messages(&bus, &contact, 6));
    let saved = documents(&service, &contact).await;
    let expected: Vec<Value> = saved[1..]
        .iter()
        .map(|event| {
            // The article's handler: MessageId, SessionId, Subject, ContentType and the data.
            json!({
                "id": event["id"], "session": event["partitionKey"],
                "subject": event["data"]["action"], "contentType": "application/json",
                "data": event["data"],
            })
        })
        .collect();
    assert_eq!(got, expected);
    let subjects: Vec<_> = got.iter().filter_map(|message| message["subject"].as_str()).collect();
    assert_eq!(
        subjects,
        [
            "ContactCreatedEvent",
            "ContactNameUpdatedEvent",
            "ContactEmailUpdatedEvent",
            "ContactCompanyUpdatedEvent",
            "ContactDescriptionUpdatedEvent",
            "ContactDeletedEvent",
        ]
    );
    service.stop().await;
    bus.stop().await;
}

/// A relay delivers the service's events to the service's own receiver, in the contact's order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contacts_events_travel_through_a_relay_to_the_receiver() {
    let service = Running::with(receiving).await;
    // Its first answer tells that it has made its containers.
    service.get("/api/contacts").await;
    let store = service.kept.store().await;
    let url = Secret::new(format!("{}/webhooks/contacts", service.base));
    let mut config = WebhookConfig::new(url, vec![secret(KEY)]);
    config.allow_private = true;
    config.allow_http = true;
    let webhook = Webhook::new(&config, Arc::new(SystemClock)).expect("build the webhook");
    let relay = embedded(store).sink("contacts", webhook).expect("a valid name");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let using = async {
        let (path, _) = service.create("John").await;
        let name = json!({ "firstName": "Jane", "lastName": "Doe" });
        service.post(&format!("{path}/update-name"), &name).await;
        service.delete(&path).await;
        service.post("/api/contacts", &john("Joan")).await;
        let shown = follow(&service, None, 4).await;
        stop.send(()).expect("the relay runs");
        (path, shown)
    };
    let (drained, (path, shown)) = tokio::join!(relay.run_until(stopped), using);
    drained.expect("the relay drains");
    let contact = path.rsplit('/').next().expect("an id");
    let of_contact = shown.iter().filter(|(_, event)| event["key"] == contact);
    let types: Vec<_> = of_contact.map(|(_, event)| event["type"].as_str()).collect();
    let expected = ["ContactCreatedEvent", "ContactNameUpdatedEvent", "ContactDeletedEvent"];
    assert_eq!(types, expected.map(Some));
    service.stop().await;
}
