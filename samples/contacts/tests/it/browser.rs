//! The pages in a real browser, with a relay that delivers the events as in production.

use std::sync::Arc;

use postrider::relay::embedded;
use postrider::sinks::webhook::{Webhook, WebhookConfig};
use postrider::sqlite::{SqliteOptions, SqliteStore};
use postrider::{Secret, SystemClock};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::harness::Running;
use crate::page::Page;
use crate::receiver::{KEY, receiving, secret};

/// Delivers the service's events to its own receiver until it is stopped.
struct Delivering {
    stop: oneshot::Sender<()>,
    tasks: JoinSet<()>,
}

impl Delivering {
    async fn start(service: &Running) -> Self {
        let store = SqliteStore::open(SqliteOptions::new(service.database())).await;
        let url = Secret::new(format!("{}/webhooks/contacts", service.base));
        let mut config = WebhookConfig::new(url, vec![secret(KEY)]);
        config.allow_private = true;
        config.allow_http = true;
        let webhook = Webhook::new(&config, Arc::new(SystemClock)).expect("build the webhook");
        let relay = embedded(store.expect("open the store")).sink("contacts", webhook);
        let relay = relay.expect("a valid name");
        let (stop, stopped) = oneshot::channel::<()>();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { relay.run_until(stopped).await.expect("the relay drains") });
        Self { stop, tasks }
    }

    async fn stop(mut self) {
        self.stop.send(()).expect("the relay runs");
        self.tasks.join_next().await.expect("one task").expect("it ends without a panic");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_person_creates_edits_and_deletes_a_contact_and_sees_three_events_in_order() {
    let service = Running::with(receiving).await;
    let delivering = Delivering::start(&service).await;
    let page = Page::open(&service.base).await;
    page.wait_for_text("connection", "live").await;
    page.create("John", "Doe").await;
    let contact = page.contact_id().await;
    page.rename("Jane").await;
    page.wait_for_text("full-name", "Jane Doe").await;
    page.delete().await;
    let shown = page.events(3).await;
    assert_eq!(page.contact_count().await, 0);

    let outbox = service.outbox().await;
    let facts: Vec<_> = shown.iter().map(|e| (&*e.number, &*e.subject, &*e.key)).collect();
    let expected = [
        ("1", "ContactCreatedEvent", &*contact),
        ("2", "ContactNameUpdatedEvent", &*contact),
        ("3", "ContactDeletedEvent", &*contact),
    ];
    assert_eq!(facts, expected);
    let ids: Vec<_> = shown.iter().map(|event| event.id.clone()).collect();
    let appended: Vec<_> = outbox.iter().map(|record| record.event.id().to_string()).collect();
    assert_eq!(ids, appended);
    assert_eq!(shown[1].payload["name"], json!({ "firstName": "Jane", "lastName": "Doe" }));
    for (event, record) in shown.iter().zip(&outbox) {
        let payload: serde_json::Value = serde_json::from_slice(record.event.payload()).unwrap();
        assert_eq!(event.payload, payload);
    }

    page.go_to(&service.base).await;
    assert_eq!(page.events(3).await, shown, "a page opened later shows the same");
    page.close().await;
    delivering.stop().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_shows_what_was_refused_and_never_overwrites_another_persons_change() {
    let service = Running::with(receiving).await;
    let page = Page::open(&service.base).await;
    page.click("save").await;
    page.wait_for_text("first-name-error", "must not be blank").await;
    page.wait_for_text("company-error", "must not be blank").await;

    page.create("<b>John</b>", "Doe").await;
    page.start_editing().await;
    let path = format!("/api/contacts/{}", page.contact_id().await);
    let name = json!({ "firstName": "Jill", "lastName": "Roe" });
    service.post(&format!("{path}/update-name"), &name).await;
    page.fill("first-name", "Jane").await;
    page.click("save").await;
    page.wait_for_text("full-name", "Jill Roe").await;
    assert!(page.text("message").await.contains("somebody else"));
    assert_eq!(service.get(&path).await.json()["name"], name);
    page.wait_for_text("form-title", "Edit contact").await;
    page.fill("last-name", "Poe").await;
    page.click("save").await;
    page.wait_for_text("full-name", "Jill Poe").await;
    page.close().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_page_sends_a_request_and_shows_its_answer() {
    let service = Running::start().await;
    let page = Page::open(&format!("{}/docs", service.base)).await;
    page.click("post-api-contacts").await;
    page.click("post-api-contacts-send").await;
    page.wait_for("post-api-contacts-answer", |text| text.starts_with("201 Created")).await;
    page.click("get-api-contacts").await;
    page.click("get-api-contacts-send").await;
    page.wait_for("get-api-contacts-answer", |text| text.contains("\"John Doe\"")).await;
    page.close().await;
    service.stop().await;
}
