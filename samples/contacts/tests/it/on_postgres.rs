//! The tests of the API and of the receiver on PostgreSQL, and the whole way once.

use std::sync::Arc;

use postrider::postgres::{PostgresOptions, PostgresStore};
use postrider::relay::embedded;
use postrider::sinks::webhook::{Webhook, WebhookConfig};
use postrider::{Secret, SystemClock};
use serde_json::json;

#[path = "concurrency.rs"]
mod concurrency;
#[path = "endpoints.rs"]
mod endpoints;
#[path = "events.rs"]
mod events;
#[path = "receiver.rs"]
mod receiver;

/// What those tests use, on this store.
mod harness {
    pub(crate) use crate::harness::{Answer, DEADLINE, Kept, john};

    pub(crate) type Running = crate::harness::RunningOn<crate::harness::PostgresDatabase>;
}

use harness::{Running, john};
use receiver::{KEY, follow, receiving, secret};

/// A relay delivers the service's events to the service's own receiver, in the contact's order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contacts_events_travel_through_a_relay_to_the_receiver() {
    let service = Running::with(receiving).await;
    let store = PostgresStore::open(PostgresOptions::new(service.kept.url())).await;
    let url = Secret::new(format!("{}/webhooks/contacts", service.base));
    let mut config = WebhookConfig::new(url, vec![secret(KEY)]);
    config.allow_private = true;
    config.allow_http = true;
    let webhook = Webhook::new(&config, Arc::new(SystemClock)).expect("build the webhook");
    let relay = embedded(store.expect("open the store")).sink("contacts", webhook);
    let relay = relay.expect("a valid name");
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
    let outbox = service.outbox().await;
    let mut appended: Vec<_> = outbox.iter().map(|r| r.event.id().to_string()).collect();
    let mut arrived: Vec<_> =
        shown.iter().map(|(_, e)| e["id"].as_str().unwrap().to_owned()).collect();
    appended.sort();
    arrived.sort();
    assert_eq!(arrived, appended);
    service.stop().await;
}
