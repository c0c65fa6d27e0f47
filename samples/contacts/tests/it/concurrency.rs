//! Several clients change one contact at the same time: no update is ever lost.

use reqwest::StatusCode;
use serde_json::json;

use crate::harness::Running;

/// Neither client sends a condition, and each writes a part of its own: both must always find
/// their last write in place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o19_two_clients_without_conditions_never_overwrite_each_other() {
    const CHANGES: usize = 25;
    let service = Running::start().await;
    let (path, _) = service.create("John").await;
    let write = async |action: &str, field: &str, pointer: &str| {
        let mut done = 0;
        for number in 0..CHANGES {
            let value = format!("{field}-{number}@x");
            let mut body = json!({ "lastName": "Doe" });
            if action != "update-name" {
                body = json!({});
            }
            body[field] = value.as_str().into();
            let answer = service.post(&format!("{path}/{action}"), &body).await;
            match answer.status {
                StatusCode::NO_CONTENT => {
                    done += 1;
                    let read = service.get(&path).await.json();
                    assert_eq!(read.pointer(pointer).unwrap(), value.as_str());
                }
                StatusCode::CONFLICT => {}
                other => panic!("{other}: {}", answer.text),
            }
        }
        done
    };
    let (names, emails) = tokio::join!(
        write("update-name", "firstName", "/name/firstName"),
        write("update-email", "email", "/email"),
    );
    assert!(names > 0 && emails > 0);
    assert_eq!(service.event_types().await.len(), 1 + names + emails);
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
