//! Making containers, and refusing those that won't do.
//!
//! What lives here: what `create_containers` makes, and the checks when a store is opened. What
//! does not: settings without an account (`src/config.rs`).
//! Invariant: a container that would lose events or keep them for ever is never opened.

use postrider_core::ErrorKind;
use postrider_servers::cosmos::Cosmos;
use postrider_store_cosmos::{CosmosStore, create_containers};

use super::world::{CONTAINER, DATABASE, config};

#[tokio::test]
async fn what_is_missing_is_made_once_and_can_be_opened() {
    let account = Cosmos::start().expect("the emulator starts");
    let config = config(&account);
    let missing = CosmosStore::open(&config).await.expect_err("nothing is there");
    assert_eq!(missing.kind(), ErrorKind::Permanent, "{missing:?}");
    let made = create_containers(&config).await.expect("made");
    assert_eq!(made, [DATABASE, CONTAINER, "leases"]);
    assert!(create_containers(&config).await.expect("nothing to do").is_empty());
    CosmosStore::open(&config).await.expect("it opens");
}

#[tokio::test]
async fn a_container_that_will_not_do_is_refused_by_name() {
    for (settings, says) in [
        (r#""partitionKey": ["/id"]"#, "/partitionKey"),
        (r#""partitionKey": ["/partitionKey", "/id"]"#, "/partitionKey"),
        (r#""defaultTtl": null"#, "defaultTtl -1"),
        (r#""defaultTtl": 60"#, "defaultTtl -1"),
    ] {
        let account = Cosmos::start().expect("the emulator starts");
        account.create_container(DATABASE, "leases", 1).expect("it is new");
        let asked =
            format!(r#"{{"database": "{DATABASE}", "container": "{CONTAINER}", {settings}}}"#);
        account.ask("POST", "containers", &asked).expect("it is new");
        let refused = CosmosStore::open(&config(&account)).await.expect_err(settings);
        assert_eq!(refused.kind(), ErrorKind::Permanent, "{settings}");
        assert!(refused.to_string().contains(says), "{settings}: {refused}");
    }
}

#[tokio::test]
async fn a_wrong_key_is_refused_and_not_shown() {
    let account = Cosmos::start().expect("the emulator starts");
    account.create_container(DATABASE, CONTAINER, 1).expect("it is new");
    let mut config = config(&account);
    let wrong = "d3Jvbmc=";
    config.url = postrider_core::Secret::new(account.endpoint());
    config.key = Some(postrider_core::Secret::new(wrong));
    let refused = CosmosStore::open(&config).await.expect_err("the key is wrong");
    assert_eq!(refused.kind(), ErrorKind::Permanent, "{refused:?}");
    assert!(!format!("{refused:?}").contains(wrong), "{refused:?}");
}
