//! Regions that can't be reached, answers that don't come, and replicas that are behind.
//!
//! What lives here: what becomes of reads and commits meanwhile. What does not: one batch's own
//! refusals (`failures.rs`).
//! Invariant: whatever a commit says, what is in the container is one change and its event, or
//! neither.

use std::time::{Duration, Instant};

use postrider_core::{DocumentBatch, DocumentError, DocumentRead, DocumentStore, ErrorKind};
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::CosmosStore;

use super::world::{CONTAINER, DATABASE, World, config, create, event, replace};

/// Longest wait for anything that must happen.
const DEADLINE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

async fn save(store: &CosmosStore, data: &str) -> Result<(), DocumentError> {
    let operations = vec![replace(data, None)];
    let events = vec![event("Changed")];
    let batch = DocumentBatch { partition_key: "c1".to_owned(), operations, events };
    store.commit(batch).await.map(drop)
}

#[tokio::test]
async fn commits_go_on_in_the_region_that_takes_writes_now() {
    let regions = ["--region", "East US", "--region", "West US"];
    let account = Cosmos::start_with(&regions).expect("the emulator starts");
    for container in [CONTAINER, "leases"] {
        account.create_container(DATABASE, container, 2).expect("it is new");
    }
    let mut config = config(&account);
    config.preferred_regions = vec!["East US".to_owned(), "West US".to_owned()];
    let store = CosmosStore::open(&config).await.expect("the store opens");
    let world = World { account, store };
    world.save(create("0"), vec![event("Created")]).await;
    world.account.write_region("West US").expect("it takes writes");
    let (deadline, mut saved) = (Instant::now() + DEADLINE, 0);
    while saved < 3 && Instant::now() < deadline {
        match save(&world.store, "1").await {
            Ok(()) => saved += 1,
            Err(DocumentError::Store(error)) => {
                assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => panic!("nobody else writes: {error:?}"),
        }
    }
    assert_eq!(saved, 3, "the other region takes writes");
    world.account.region_offline("East US").expect("it goes");
    save(&world.store, "2").await.expect("saved without it");
    assert_eq!(world.numbers().await, [1, 2, 3, 4, 5]);
    assert_eq!(world.last_number().await, Some(5));
}

/// The region that takes writes is gone without a word, so that nobody refuses a write: the account
/// is looked at again within seconds, not at the SDK's next look in five minutes.
#[tokio::test]
async fn commits_go_on_when_the_region_that_took_writes_is_gone() {
    let regions = ["--region", "East US", "--region", "West US"];
    let account = Cosmos::start_with(&regions).expect("the emulator starts");
    for container in [CONTAINER, "leases"] {
        account.create_container(DATABASE, container, 2).expect("it is new");
    }
    let store = CosmosStore::open(&config(&account)).await.expect("the store opens");
    let world = World { account, store };
    world.save(create("0"), vec![event("Created")]).await;
    world.account.region_offline("East US").expect("it goes");
    let deadline = Instant::now() + DEADLINE;
    while let Err(error) = save(&world.store, "1").await {
        let DocumentError::Store(error) = error else { panic!("nobody else writes: {error:?}") };
        assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
        assert!(Instant::now() < deadline, "the other region is never asked");
        tokio::time::sleep(PAUSE).await;
    }
    assert_eq!(world.numbers().await, [1, 2]);
}

#[tokio::test]
async fn a_replica_that_is_behind_is_not_taken_for_a_missing_document() {
    let world = World::new().await;
    world.save(create("1"), vec![]).await;
    let session = format!(
        r#"{{"region": "East US", "database": "{DATABASE}", "container": "{CONTAINER}",
            "partitionKey": "c1"}}"#
    );
    world.account.ask("POST", "session", &session).expect("a session");
    match world.store.read("c1", "c1", None).await {
        Ok(DocumentRead::Found(document)) => assert_eq!(document.data, "1"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}"),
        Ok(other) => panic!("it is there: {other:?}"),
    }
}

/// A server that takes a batch, carries it out, and says nothing for as long as anybody would wait.
#[tokio::test]
async fn a_batch_without_an_answer_is_looked_for_and_saved_once() {
    let world = World::new().await;
    let etag = world.save(create("1"), vec![event("Created")]).await;
    let silence = r#"{"operation": "batch", "carriedOut": true, "delayMs": 600000, "count": 1000}"#;
    world.account.fault(silence).expect("a fault");
    let events = vec![event("Changed")];
    // Nobody said so, but it was: the store looks.
    let saved = world.commit(vec![replace("2", Some(&etag))], events.clone()).await;
    let saved = saved.expect("saved");
    assert_eq!(world.read("c1").await.expect("there").etag, saved[0].etag);
    world.account.clear_faults().expect("cleared");
    let again = world.commit(vec![replace("2", Some(&etag))], events).await.expect("saved");
    assert_eq!(again, saved);
    assert_eq!(world.numbers().await, [1, 2]);
}

/// The same without its being carried out.
#[tokio::test]
async fn a_batch_without_an_answer_has_an_end() {
    let world = World::new().await;
    let etag = world.save(create("1"), vec![event("Created")]).await;
    let silence = r#"{"operation": "batch", "delayMs": 600000, "count": 1000}"#;
    world.account.fault(silence).expect("a fault");
    let refused = world.commit(vec![replace("2", Some(&etag))], vec![event("Changed")]).await;
    let Err(DocumentError::Store(error)) = refused else { panic!("{refused:?}") };
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    assert_eq!(world.read("c1").await.expect("there").data, "1");
    assert_eq!(world.numbers().await, [1]);
}

/// What a test leaves behind when it is killed.
#[test]
fn an_account_ends_with_the_process_that_started_it() {
    use std::process::{Command, Stdio};
    let program = postrider_servers::cosmos::program().expect("it is built");
    let mut command = Command::new(program);
    command.arg("--with-parent").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("it starts");
    drop(process.stdin.take());
    assert!(process.wait().expect("it ends").success());
}
