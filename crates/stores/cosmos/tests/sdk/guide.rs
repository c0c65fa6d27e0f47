//! The guide's own code, as its readers copy it.
//!
//! What lives here: taking the blocks out of the page and running them. What does not: the page
//! (`docs/stores/cosmos.md`).
//! Invariant: a block that no longer works fails here.

use postrider_servers::cosmos_sdk::Sdk;

use super::run::Script;
use super::world::World;

const PAGE: &str = include_str!("../../../../../docs/stores/cosmos.md");

/// The page's one block in a language.
fn block(language: &str) -> &'static str {
    let start = format!("```{language}\n");
    let (_, rest) = PAGE.split_once(&start).expect("the page has such a block");
    let (block, after) = rest.split_once("```\n").expect("the block ends");
    assert!(!after.contains(&start), "one block alone");
    block
}

/// What the page's template sets up is what the page asks for. (Nothing here compiles it.)
#[test]
fn the_template_sets_up_what_the_guide_asks_for() {
    let template = block("bicep");
    for (part, times) in [
        ("partitionKey: { paths: ['/partitionKey'], kind: 'Hash', version: 2 }", 2),
        ("defaultTtl: -1", 2),
        ("defaultConsistencyLevel: 'Session'", 1),
        ("disableLocalAuth: true", 2),
        ("requiresDuplicateDetection: true", 1),
        ("requiresSession: true", 1),
        // "Cosmos DB Built-in Data Contributor", and "Azure Service Bus Data Sender".
        ("sqlRoleDefinitions/00000000-0000-0000-0000-000000000002", 1),
        ("69a216fc-b8fb-44d8-bc22-1f3c2cd27a39", 1),
    ] {
        assert_eq!(template.matches(part).count(), times, "{part}");
    }
    for (open, close) in [('{', '}'), ('[', ']'), ('(', ')')] {
        let count = |sign: char| template.matches(sign).count();
        assert_eq!(count(open), count(close), "{open}");
    }
}

async fn renames_a_contact(sdk: Sdk, name: &str, text: String) {
    let world = World::new().await;
    world.create_contact("ContactCreatedEvent").await;
    assert!(Script::new(sdk, name, &text).run(&world).await.is_empty());
    let contact = world.contact().await;
    assert_eq!(contact["data"]["name"]["firstName"], "Jane");
    assert_eq!(contact["lastSeq"], 2);
    let events = world.events().await;
    assert_eq!(events.len(), 2);
    assert_eq!(events[1].event_type().as_str(), "ContactNameUpdatedEvent");
    assert_eq!(events[1].key().as_str(), "c1");
    let payload: serde_json::Value =
        serde_json::from_slice(events[1].payload()).expect("the payload is JSON");
    assert_eq!(payload["name"]["lastName"], "Doe");
}

#[tokio::test]
async fn the_batch_in_python_saves_a_change_and_its_event() {
    let text = format!("{}\nrename(\"c1\", \"Jane\", \"Doe\")\nprint(\"done\")\n", block("python"));
    renames_a_contact(Sdk::Python, "guide.py", text).await;
}

#[tokio::test]
async fn the_batch_in_javascript_saves_a_change_and_its_event() {
    let end =
        "await rename(\"c1\", \"Jane\", \"Doe\");\nconsole.log(\"done\");\nprocess.exit(0);\n";
    let text = format!("{}\n{end}", block("javascript"));
    renames_a_contact(Sdk::JavaScript, "guide.mjs", text).await;
}
