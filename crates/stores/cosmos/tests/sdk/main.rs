//! Microsoft's own clients for Python and JavaScript beside the store, on one container.
//!
//! What lives here: running their scripts and the guide's. What does not: what they do (`steps.py`,
//! `steps.mjs`, `docs/stores/cosmos.md`).
//! Invariant: what a client wrote, the store reads, and what the store wrote, a client reads.

mod guide;
mod run;
mod world;

use postrider_servers::cosmos_sdk::Sdk;

use run::Script;
use world::World;

async fn reads_and_writes(sdk: Sdk) -> Vec<String> {
    let world = World::new().await;
    world.create_contact("Created").await;
    let (name, text) = match sdk {
        Sdk::Python => ("steps.py", include_str!("steps.py")),
        Sdk::JavaScript => ("steps.mjs", include_str!("steps.mjs")),
    };
    let printed = Script::new(sdk, name, text).run(&world).await;
    assert_eq!(world.last_number().await, 3);
    let events = world.events().await;
    let actions: Vec<&str> = events.iter().map(|event| event.event_type().as_str()).collect();
    assert_eq!(actions, ["Created", "FromSdk", "AfterSplit"], "as the store's own feed has them");
    printed
}

#[tokio::test]
async fn the_client_for_python_reads_and_writes_the_same_container() {
    let printed = reads_and_writes(Sdk::Python).await;
    let expected = ["seen Created FromSdk", "seen AfterSplit", "no patches in batches: 400"];
    assert_eq!(printed, expected);
}

#[tokio::test]
async fn the_client_for_javascript_reads_and_writes_the_same_container() {
    let printed = reads_and_writes(Sdk::JavaScript).await;
    let expected = ["seen Created FromSdk", "seen AfterSplit", "no patches in batches: 400"];
    assert_eq!(printed, expected);
}
