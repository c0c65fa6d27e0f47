//! Several clients change one contact at the same time: no update is ever lost.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::harness::Running;

/// Neither client sends a condition, and each writes a part of its own: after both, both parts
/// must be there. A change that was refused (409, when others always were faster) may be absent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o19_two_clients_without_conditions_never_overwrite_each_other() {
    const ROUNDS: usize = 40;
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let write = async |action: &str, body: &Value| {
        let answer = service.post(&format!("{path}/{action}"), body).await;
        match answer.status {
            StatusCode::NO_CONTENT => true,
            StatusCode::CONFLICT => false,
            other => panic!("{other}: {}", answer.text),
        }
    };
    let mut made = 0;
    for round in 0..ROUNDS {
        let first_name = format!("John {round}");
        let email = format!("john-{round}@x");
        let name = json!({ "firstName": first_name, "lastName": "Doe" });
        let address = json!({ "email": email });
        let (named, addressed) =
            tokio::join!(write("update-name", &name), write("update-email", &address));
        let contact = service.get(&path).await.json();
        assert_eq!(contact["name"]["firstName"] == first_name, named, "round {round}: {contact}");
        assert_eq!(contact["email"] == email, addressed, "round {round}: {contact}");
        made += usize::from(named) + usize::from(addressed);
    }
    assert!(made > ROUNDS);
    assert_eq!(service.event_types().await.len(), 1 + made);
    service.stop().await;
}

/// Clients that count in a shared field, each on the version that it read: the sum must come out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o19_counting_clients_with_if_match_lose_no_count() {
    const CLIENTS: usize = 4;
    const COUNTS: usize = 5;
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let target = format!("{path}/update-description");
    service.post(&target, &json!({ "description": "0" })).await;
    let count = async || {
        let mut left = COUNTS;
        let mut refused = 0;
        while left > 0 {
            let read = service.get(&path).await;
            let value = read.json()["description"].as_str().unwrap().parse::<usize>().unwrap();
            let body = json!({ "description": (value + 1).to_string() });
            let answer = service.post_if(&target, &body, "if-match", &read.header("etag")).await;
            match answer.status {
                StatusCode::NO_CONTENT => left -= 1,
                StatusCode::PRECONDITION_FAILED => refused += 1,
                other => panic!("{other}: {}", answer.text),
            }
        }
        refused
    };
    let refused = tokio::join!(count(), count(), count(), count());
    let read = service.get(&path).await.json();
    assert_eq!(read["description"], (CLIENTS * COUNTS).to_string(), "{refused:?} refused");
    assert_eq!(service.event_types().await.len(), 2 + CLIENTS * COUNTS);
    service.stop().await;
}

/// Two clients read the same version and change it with `If-Match`: one wins, the other is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o19_of_two_changes_to_one_version_exactly_one_is_made() {
    let service = Running::start().await;
    for _ in 0..10 {
        let (path, etag) = service.create("John").await;
        let target = format!("{path}/update-email");
        let change = async |email: &str| {
            service.post_if(&target, &json!({ "email": email }), "if-match", &etag).await.status
        };
        let (one, two) = tokio::join!(change("one@x"), change("two@x"));
        let mut statuses = [one.as_u16(), two.as_u16()];
        statuses.sort_unstable();
        assert_eq!(statuses, [204, 412]);
        let email = if one == StatusCode::NO_CONTENT { "one@x" } else { "two@x" };
        assert_eq!(service.get(&path).await.json()["email"], email);
    }
    service.stop().await;
}

/// A contact can be deleted once, however many try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o19_of_many_deletes_exactly_one_succeeds() {
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let delete = async || service.delete(&path).await.status.as_u16();
    let (a, b, c, d) = tokio::join!(delete(), delete(), delete(), delete());
    let mut statuses = [a, b, c, d];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 404, 404, 404]);
    let types = ["ContactCreatedEvent", "ContactDeletedEvent"];
    assert_eq!(service.event_types().await, types);
    service.stop().await;
}
