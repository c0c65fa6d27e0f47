//! One test for each step of each client: Microsoft's SDKs, and one in Rust.
//!
//! What lives here: which steps there are, and what each leaves in the emulator. What does not: the
//! steps themselves (`tests/sdk`, `client/steps.rs`).
//! Invariant: a step is the same for every client, and so is what it leaves.

use std::time::Duration;

use postrider_servers::servicebus_sdk::Sdk;
use postrider_servicebus_emulator::{Emulator, Status, condition};

use crate::client;
use crate::sdk::{self, emulator};

/// Who goes through the steps.
#[derive(Debug, Clone, Copy)]
enum Client {
    Microsoft(Sdk),
    Rust,
}

/// Runs a step to its end, and returns what it has to tell.
async fn run(client: Client, emulator: &Emulator, step: &str) -> Vec<String> {
    match client {
        Client::Microsoft(sdk) => sdk::run(sdk, emulator, step).await,
        Client::Rust => client::run(emulator, step).await,
    }
}

/// Steps that need nothing but the emulator as it starts.
macro_rules! steps {
    ($($step:ident),* $(,)?) => {
        mod python {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $step() {
                    super::$step(Client::Microsoft(Sdk::Python)).await;
                }
            )*
        }
        mod javascript {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $step() {
                    super::$step(Client::Microsoft(Sdk::JavaScript)).await;
                }
            )*
        }
        mod rust {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $step() {
                    super::$step(Client::Rust).await;
                }
            )*
        }
    };
}

steps!(
    single,
    batch,
    named_session,
    next_session,
    abandon,
    dead_letter,
    defer,
    renew,
    renew_session,
    schedule,
    peek,
    session_state,
    duplicates,
    concurrent_sessions,
    receive_and_delete,
    topics,
    time_to_live,
    limits,
    wrong_key,
    busy,
    disabled,
    full,
    recovers,
);

async fn step(client: Client, name: &str) -> Emulator {
    let emulator = emulator().await;
    run(client, &emulator, name).await;
    emulator
}

/// Nothing is left in an entity.
fn is_empty(emulator: &Emulator, path: &str) {
    assert_eq!(emulator.entity(path).messages(), []);
    assert_eq!(emulator.entity(path).dead_letters(), []);
}

async fn single(client: Client) {
    let emulator = step(client, "single").await;
    is_empty(&emulator, "plain");
    assert_eq!(emulator.entity("plain").counts().transfers, 1);
}

async fn batch(client: Client) {
    let emulator = emulator().await;
    let printed = run(client, &emulator, "batch").await;
    is_empty(&emulator, "plain");
    let counts = emulator.entity("plain").counts();
    assert_eq!((counts.transfers, counts.batches), (2, 2));
    assert_eq!(printed, [format!("sent {}", counts.messages)]);
}

async fn named_session(client: Client) {
    let emulator = step(client, "named_session").await;
    let left = emulator.entity("sessions").messages();
    assert!(left.iter().all(|message| message.session_id.as_deref() == Some("a")), "{left:?}");
    assert_eq!(left.len(), 3);
}

async fn next_session(client: Client) {
    is_empty(&step(client, "next_session").await, "sessions");
}

async fn abandon(client: Client) {
    is_empty(&step(client, "abandon").await, "plain");
}

async fn dead_letter(client: Client) {
    is_empty(&step(client, "dead_letter").await, "plain");
}

async fn defer(client: Client) {
    is_empty(&step(client, "defer").await, "plain");
}

async fn renew(client: Client) {
    is_empty(&step(client, "renew").await, "plain");
}

async fn renew_session(client: Client) {
    is_empty(&step(client, "renew_session").await, "sessions");
}

async fn schedule(client: Client) {
    let emulator = step(client, "schedule").await;
    assert_eq!(emulator.entity("plain").messages().len(), 3);
}

async fn peek(client: Client) {
    let emulator = step(client, "peek").await;
    assert_eq!(emulator.entity("plain").messages().len(), 5);
}

async fn session_state(client: Client) {
    is_empty(&step(client, "session_state").await, "sessions");
}

async fn duplicates(client: Client) {
    let emulator = step(client, "duplicates").await;
    let counts = emulator.entity("detecting").counts();
    assert_eq!((counts.messages, counts.duplicates), (4, 4));
}

async fn concurrent_sessions(client: Client) {
    is_empty(&step(client, "concurrent_sessions").await, "sessions");
}

async fn receive_and_delete(client: Client) {
    is_empty(&step(client, "receive_and_delete").await, "plain");
}

async fn topics(client: Client) {
    let emulator = step(client, "topics").await;
    assert_eq!(emulator.entity("events").messages(), []);
    assert_eq!(emulator.entity("events/subscriptions/by-session").messages().len(), 2);
}

async fn time_to_live(client: Client) {
    is_empty(&step(client, "time_to_live").await, "plain");
}

async fn limits(client: Client) {
    let emulator = step(client, "limits").await;
    is_empty(&emulator, "plain");
    is_empty(&emulator, "sessions");
    assert_eq!(emulator.entity("large").messages()[0].body.len(), 300_000);
}

async fn wrong_key(client: Client) {
    let emulator = step(client, "wrong_key").await;
    is_empty(&emulator, "plain");
    assert_eq!(emulator.entity("plain").counts().sender_links, 0);
}

async fn busy(client: Client) {
    let emulator = emulator().await;
    emulator.faults().reject_next("plain", 2, condition::SERVER_BUSY);
    run(client, &emulator, "busy").await;
    let counts = emulator.entity("plain").counts();
    assert_eq!((counts.rejected, counts.messages), (2, 1));
}

async fn disabled(client: Client) {
    let emulator = emulator().await;
    emulator.faults().set_status("plain", Status::Disabled);
    run(client, &emulator, "disabled").await;
    emulator.faults().set_status("plain", Status::Active);
    run(client, &emulator, "single").await;
}

async fn full(client: Client) {
    let emulator = emulator().await;
    emulator.faults().set_full("plain", true);
    run(client, &emulator, "full").await;
    is_empty(&emulator, "plain");
    // Time does not help.
    emulator.advance(Duration::from_secs(60));
    run(client, &emulator, "full").await;
}

async fn recovers(client: Client) {
    let emulator = step(client, "recovers").await;
    assert_eq!(emulator.entity("plain").counts().messages, 5);
    assert_eq!(emulator.entity("plain").messages().len(), 2);
    // Two faults may hit one link: the SDK need not have come back in between.
    assert!(emulator.entity("plain").counts().sender_links > 1);
}
