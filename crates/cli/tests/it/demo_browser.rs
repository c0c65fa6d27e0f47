//! demo in headless Chromium: a person creates, edits and deletes a contact and sees its events.

use rustix::process::Signal;

use crate::harness::{Home, address_in};

#[path = "../../../../samples/contacts/tests/it/page.rs"]
#[expect(dead_code, reason = "the sample's own tests use the rest")]
mod page;

#[test]
fn a_person_sees_three_events_in_order_and_ctrl_c_ends_the_demonstration() {
    let home = Home::new();
    let demo = home.start(&["demo", "--listen", "127.0.0.1:0"]);
    let address = address_in(&demo.line_with("http://"));
    let runtime = tokio::runtime::Runtime::new().expect("a runtime starts");
    let (contact, shown) = runtime.block_on(async {
        let page = page::Page::open(&format!("http://{address}/")).await;
        page.create("Ada", "King").await;
        let contact = page.contact_id().await;
        page.rename("Augusta").await;
        page.delete().await;
        let shown = page.events(3).await;
        page.close().await;
        (contact, shown)
    });
    let facts: Vec<_> = shown.iter().map(|event| (&*event.number, &*event.subject)).collect();
    let expected = [
        ("1", "ContactCreatedEvent"),
        ("2", "ContactNameUpdatedEvent"),
        ("3", "ContactDeletedEvent"),
    ];
    assert_eq!(facts, expected);
    for event in &shown {
        assert_eq!(event.key, contact);
        assert_eq!(event.payload["contactId"], *contact);
        assert_eq!(event.payload["id"], *event.id);
        assert_eq!(event.payload["action"], *event.subject);
        // The terminal tells the same.
        let line = demo.line_with(&event.id);
        assert!(line.contains(&event.subject) && line.contains(&event.key), "{line}");
    }
    demo.signal(Signal::INT);
    assert_eq!(demo.ended(), Some(0));
}
