//! A commit that fails at each of its steps.
//!
//! What lives here: refusals, throttling, and answers lost before and after the batch was carried
//! out. What does not: commits that meet no fault (`saving.rs`).
//! Invariant: never an event without its change, nor a change without its event; and a commit that
//! is made again doubles neither.

use std::time::Duration;

use postrider_core::{
    DocumentBatch, DocumentError, DocumentOperation, DocumentStore, ErrorKind, NewEvent,
};
use postrider_store_cosmos::CosmosStore;

use super::world::{World, create, delete, event, replace};

/// What of a change of `c1` from "1" to "2" and of its event is there.
async fn saved(world: &World) -> bool {
    let changed = world.read("c1").await.expect("it was there before").data == "2";
    let numbers = world.numbers().await;
    assert!(numbers == [1] || numbers == [1, 2], "an event twice: {numbers:?}");
    assert_eq!(changed, numbers.len() == 2, "the change and its event have one fate");
    assert_eq!(world.last_number().await, Some(numbers.len() as u64));
    changed
}

/// A world with `c1` in it, and a change of it that is to be saved.
async fn about_to_change() -> (World, Vec<DocumentOperation>, Vec<NewEvent>) {
    let world = World::new().await;
    let etag = world.save(create("1"), vec![event("Created")]).await;
    (world, vec![replace("2", Some(&etag))], vec![event("Changed")])
}

/// Faults that the SDK does not get over by itself, and how often a batch has to meet them.
#[tokio::test]
async fn a_refused_batch_saves_nothing_and_says_why() {
    for (answer, expected) in [
        (r#"{"status": 413}"#, None),
        (r#"{"status": 400}"#, Some(ErrorKind::Permanent)),
        (r#"{"status": 403, "subStatus": 5300}"#, Some(ErrorKind::Permanent)),
        (r#"{"status": 500}"#, Some(ErrorKind::Transient)),
    ] {
        let (world, operations, events) = about_to_change().await;
        let fault = format!(r#"{{"operation": "batch", "count": 1000, "answer": {answer}}}"#);
        world.account.fault(&fault).expect("a fault");
        let refused = world.commit(operations.clone(), events.clone()).await;
        match (expected, refused) {
            (None, Err(DocumentError::TooLarge(_))) => {}
            (Some(kind), Err(DocumentError::Store(error))) => {
                assert_eq!(error.kind(), kind, "{answer}: {error:?}");
            }
            (_, other) => panic!("{answer}: {other:?}"),
        }
        assert!(!saved(&world).await, "{answer}");
        world.account.clear_faults().expect("cleared");
        world.commit(operations, events).await.expect("saved now");
        assert!(saved(&world).await);
    }
}

/// As the batch's own answer, and as that of one of its operations.
#[tokio::test]
async fn a_throttled_batch_names_the_services_wait() {
    for status in [429, 449] {
        let operations = format!(
            r#"[{{"statusCode": 424, "requestCharge": 0}},
                {{"statusCode": {status}, "requestCharge": 0, "retryAfterMilliseconds": 70}}]"#
        );
        let (world, changes, events) = about_to_change().await;
        let fault = format!(
            r#"{{"operation": "batch", "count": 1000,
                "answer": {{"status": 207, "content": {operations}}}}}"#
        );
        world.account.fault(&fault).expect("a fault");
        let refused = world.commit(changes.clone(), events.clone()).await;
        let Err(DocumentError::Store(error)) = refused else { panic!("{status}: {refused:?}") };
        let wait = Some(Duration::from_millis(70));
        assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: wait });
        assert!(!saved(&world).await);
        world.account.clear_faults().expect("cleared");
        world.commit(changes, events).await.expect("saved now");
        assert!(saved(&world).await);
    }
}

/// The SDK waits as the service asks and tries again by itself.
#[tokio::test]
async fn a_batch_that_is_throttled_for_a_moment_is_saved() {
    for answer in [
        r#"{"status": 429, "subStatus": 3200, "retryAfterMs": 20}"#,
        r#"{"status": 449, "retryAfterMs": 10}"#,
        r#"{"status": 410, "subStatus": 1002}"#,
        r#"{"status": 410, "subStatus": 1007}"#,
    ] {
        let (world, operations, events) = about_to_change().await;
        let fault = format!(r#"{{"operation": "batch", "count": 2, "answer": {answer}}}"#);
        world.account.fault(&fault).expect("a fault");
        let done = world.commit(operations.clone(), events.clone()).await;
        if let Err(error) = &done {
            let DocumentError::Store(store) = error else { panic!("{answer}: {error:?}") };
            assert!(
                matches!(store.kind(), ErrorKind::Transient | ErrorKind::Throttled { .. }),
                "{answer}: {error:?}"
            );
            assert!(!saved(&world).await, "{answer}");
            world.account.clear_faults().expect("cleared");
            world.commit(operations, events).await.expect("saved now");
        }
        assert!(saved(&world).await, "{answer}");
    }
}

/// Sends the same batch until it is saved, as a caller does that was told of a transient failure.
async fn persist(store: &CosmosStore, operations: &[DocumentOperation], events: &[NewEvent]) {
    for _ in 0..20 {
        let batch = DocumentBatch {
            partition_key: "c1".to_owned(),
            operations: operations.to_vec(),
            events: events.to_vec(),
        };
        match store.commit(batch).await {
            Ok(saved) => {
                assert_eq!(saved.len(), operations.len());
                return;
            }
            Err(DocumentError::Store(error)) => {
                assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
            }
            Err(error) => panic!("the batch is nobody else's: {error:?}"),
        }
    }
    panic!("it is saved in the end");
}

/// The heart of it: the batch is carried out, and nobody hears of it.
#[tokio::test]
async fn a_batch_whose_answer_was_lost_is_saved_once() {
    for (carried_out, lost) in [(true, 1), (true, 2), (false, 1), (true, 8), (false, 8)] {
        let (world, operations, events) = about_to_change().await;
        let fault =
            format!(r#"{{"operation": "batch", "carriedOut": {carried_out}, "count": {lost}}}"#);
        world.account.fault(&fault).expect("a fault");
        persist(&world.store, &operations, &events).await;
        assert!(saved(&world).await, "carried out: {carried_out}, {lost} times");
        // Its version is known, too: the next change needs no reading.
        let current = world.read("c1").await.expect("there").etag;
        world.save(replace("3", Some(&current)), vec![event("Changed")]).await;
        assert_eq!(world.numbers().await, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_creation_and_a_deletion_whose_answers_were_lost_are_saved_once() {
    let world = World::new().await;
    let lose = || {
        let fault = r#"{"operation": "batch", "carriedOut": true, "count": 2}"#;
        world.account.fault(fault).expect("a fault");
    };
    lose();
    persist(&world.store, &[create("1")], &[event("Created")]).await;
    assert_eq!(world.numbers().await, [1]);
    let etag = world.read("c1").await.expect("there").etag;
    world.account.clear_faults().expect("cleared");
    lose();
    persist(&world.store, &[delete("c1", Some(&etag))], &[event("Deleted")]).await;
    assert!(world.read("c1").await.is_none());
    assert_eq!(world.numbers().await, [1, 2]);
    world.account.clear_faults().expect("cleared");
    lose();
    persist(&world.store, &[], &[event("Alone"), event("Too")]).await;
    assert_eq!(world.numbers().await, [-2, -1, 1, 2]);
}

/// Another process that sends the same again after a crash is told the truth as well.
#[tokio::test]
async fn a_commit_is_made_again_by_a_process_that_has_seen_nothing() {
    let (world, operations, events) = about_to_change().await;
    world.commit(operations.clone(), events.clone()).await.expect("saved");
    let other = world.another_store().await;
    persist(&other, &operations, &events).await;
    assert!(saved(&world).await);
}

/// The requests of a commit that demands no version, by a process that has seen nothing: it looks
/// the entity up, sends the batch, and looks for what became of it.
const STEPS: [&str; 2] = ["readItem", "batch"];

/// What a commit left, and that the same one made again is saved once.
async fn one_fate(world: &World, operations: &[DocumentOperation], events: &[NewEvent], at: &str) {
    world.account.clear_faults().expect("cleared");
    // It asserts that the change and its event are both there, or neither is.
    let before = saved(world).await;
    persist(&world.another_store().await, operations, events).await;
    assert!(saved(world).await, "{at}, saved before: {before}");
    assert_eq!(world.numbers().await, [1, 2], "{at}, saved before: {before}");
}

/// Every failure that the service has a number for, and answers that are lost, at each of a
/// commit's requests, the look for what became of it included.
#[tokio::test]
async fn a_commit_that_fails_at_any_step_has_one_fate() {
    let batched = |status: u16| {
        format!(
            r#""answer": {{"status": 207, "content": [{{"statusCode": 424, "requestCharge": 0}},
                {{"statusCode": {status}, "requestCharge": 0, "retryAfterMilliseconds": 1}}]}}"#
        )
    };
    let whole = |status: u16| format!(r#""answer": {{"status": {status}, "retryAfterMs": 1}}"#);
    for step in STEPS {
        let mut faults: Vec<String> = [409, 412, 413, 429, 449, 503].map(whole).into();
        if step == "batch" {
            faults.extend([409, 412, 413, 429, 449].map(batched));
            // The batch is saved, and its answer is another one, or none.
            faults.extend(
                [408, 503].map(|status| format!("\"carriedOut\": true, {}", whole(status))),
            );
        }
        faults.push(r#""carriedOut": true"#.to_owned());
        faults.push(r#""carriedOut": false"#.to_owned());
        for fault in &faults {
            let (world, _, events) = about_to_change().await;
            let operations = [replace("2", None)];
            let store = world.another_store().await;
            let skip = u32::from(step == "readItem");
            let fault =
                format!(r#"{{"operation": "{step}", "skip": {skip}, "count": 2, {fault}}}"#);
            world.account.fault(&fault).expect("a fault");
            if step == "readItem" {
                // The first look finds nothing wrong, and the answer to the batch is lost: it is
                // the look for what became of it that fails, too.
                let lost = r#"{"operation": "batch", "carriedOut": true}"#;
                world.account.fault(lost).expect("a fault");
            }
            let batch = DocumentBatch {
                partition_key: "c1".to_owned(),
                operations: operations.to_vec(),
                events: events.clone(),
            };
            // Whatever it answers; a success is one.
            let done = store.commit(batch).await;
            let left = world.account.ask("GET", "faults", "").expect("faults");
            assert!(!left.contains("\"count\":2"), "{fault} was never met: {left}");
            if done.is_ok() {
                assert!(saved(&world).await, "{fault}");
            }
            one_fate(&world, &operations, &events, &fault).await;
        }
    }
}

/// The request that it is for is under way.
async fn fault_is_met(world: &World) {
    let until = tokio::time::Instant::now() + Duration::from_secs(60);
    while !world.account.ask("GET", "faults", "").expect("faults").contains("[]") {
        assert!(tokio::time::Instant::now() < until, "the request is never made");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A commit whose process dies at any of its requests, before and after the service has it.
#[tokio::test]
async fn a_commit_that_is_cut_off_at_any_step_has_one_fate() {
    for step in STEPS {
        for carried_out in [false, true] {
            let (world, _, events) = about_to_change().await;
            let operations = [replace("2", None)];
            let fault = format!(
                r#"{{"operation": "{step}", "count": 1, "delayMs": 60000,
                    "carriedOut": {carried_out}}}"#
            );
            world.account.fault(&fault).expect("a fault");
            let store = world.another_store().await;
            let batch = DocumentBatch {
                partition_key: "c1".to_owned(),
                operations: operations.to_vec(),
                events: events.clone(),
            };
            tokio::select! {
                done = store.commit(batch) => panic!("the answer is a minute away: {done:?}"),
                () = fault_is_met(&world) => {}
            }
            drop(store);
            if step == "batch" && carried_out {
                let until = tokio::time::Instant::now() + Duration::from_secs(30);
                while !saved(&world).await {
                    assert!(tokio::time::Instant::now() < until, "it was carried out");
                }
            }
            one_fate(&world, &operations, &events, &fault).await;
        }
    }
}

/// Batches while the container is split and merged under them.
#[tokio::test]
async fn batches_go_on_while_the_container_is_split_and_merged() {
    let world = World::new().await;
    world.save(create("0"), vec![]).await;
    let (database, container) = (super::world::DATABASE, super::world::CONTAINER);
    for round in 0..4u32 {
        persist(&world.store, &[replace("1", None)], &[event("A")]).await;
        if round == 0 {
            for range in 0..4 {
                world.account.split(database, container, range).expect("split");
            }
        } else if round == 1 {
            world.account.merge(database, container, [4, 5]).expect("merged");
        }
        persist(&world.store, &[replace("2", None)], &[event("B")]).await;
    }
    assert_eq!(world.numbers().await, (1..=8).collect::<Vec<_>>());
}
