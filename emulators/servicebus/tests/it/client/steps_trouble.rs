//! The steps in which the client is refused something, or loses it.
//!
//! What lives here: limits, a wrong key, entities that are busy, full or off, connections that
//! break. What does not: steps in which all goes well (`steps.rs`).
//! Invariant: a refusal is told by its condition, never by its text.

use std::time::Duration;

use fe2o3_amqp::link::SendError;
use postrider_servicebus_emulator::Emulator;
use tokio::time::timeout;

use super::inbox::{Inbox, Want};
use super::management::Management;
use super::post::{Post, post};
use super::steps::client;
use super::{Client, Result, Trouble, WITHIN, refused, send};
use crate::sdk::go_wrong;

/// Before what was refused or lost is tried again.
const PAUSE: Duration = Duration::from_millis(20);

pub(super) async fn limits(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let large = post(vec![b'x'; 300_000]);
    let mut plain = client.sender("plain").await.expect("it is there");
    // The link has told its limit, so that nothing needs to be sent to be refused.
    let error = plain.send(large.message()).await.expect_err("it is too large");
    assert!(matches!(error, SendError::MessageSizeExceeded(size) if size.max_size == 262_144));
    let mut sender = client.sender("large").await.expect("it is there");
    assert_eq!(sender.max_message_size(), Some(1024 * 1024));
    send(&mut sender, &large).await.expect("it is taken");
    let without = client.send("sessions", [post("no session")]).await;
    refused(without, "amqp:not-allowed");
    refused(client.send("missing", [post("nowhere")]).await, "amqp:not-found");
    client.close().await;
}

pub(super) async fn wrong_key(emulator: &Emulator) {
    let right = emulator.connection_string();
    let wrong = right.replace("SharedAccessKey=", "SharedAccessKey=not");
    refused(Client::open(&wrong).await.map(|_| ()), "401");
}

/// The emulator rejects the first two transfers as busy: so it is sent a third time.
pub(super) async fn busy(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let mut sender = client.sender("plain").await.expect("it is there");
    let persistent = post("persistent");
    for _ in 0..2 {
        refused(send(&mut sender, &persistent).await, "com.microsoft:server-busy");
    }
    send(&mut sender, &persistent).await.expect("it is taken");
    client.close().await;
}

pub(super) async fn disabled(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let sent = client.send("plain", [post("x")]).await;
    refused(sent, "com.microsoft:entity-disabled");
    client.close().await;
}

pub(super) async fn full(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let sent = client.send("plain", [post("x")]).await;
    refused(sent, "amqp:resource-limit-exceeded");
    client.close().await;
}

pub(super) async fn recovers(emulator: &Emulator) {
    let mut sending = Sending(None);
    sending.send(emulator, &post("0")).await;
    for (number, name) in ["detach", "expire", "drop", "close"].into_iter().enumerate() {
        go_wrong(emulator, name);
        sending.send(emulator, &post((number + 1).to_string())).await;
    }
    let mut receiving = Receiving(None);
    for name in ["", "detach", "drop"] {
        if !name.is_empty() {
            go_wrong(emulator, name);
        }
        receiving.take(emulator).await;
    }
}

async fn open(emulator: &Emulator) -> Result<Client> {
    Client::open(&emulator.connection_string()).await
}

/// A sender that connects anew when its connection is lost.
struct Sending(Option<(Client, fe2o3_amqp::Sender)>);

impl Sending {
    async fn send(&mut self, emulator: &Emulator, post: &Post<'_>) {
        let trying = async {
            while self.try_to_send(emulator, post).await.is_err() {
                self.0 = None;
                tokio::time::sleep(PAUSE).await;
            }
        };
        timeout(WITHIN, trying).await.expect("it is taken in the end");
    }

    async fn try_to_send(&mut self, emulator: &Emulator, post: &Post<'_>) -> Result<()> {
        if self.0.is_none() {
            let mut client = open(emulator).await?;
            let sender = client.sender("plain").await?;
            self.0 = Some((client, sender));
        }
        let (_, sender) = self.0.as_mut().expect("it was just made");
        send(sender, post).await
    }
}

/// A receiver that connects anew when its connection is lost.
struct Receiving(Option<(Client, Inbox, Management)>);

impl Receiving {
    /// Receives one message and completes it.
    async fn take(&mut self, emulator: &Emulator) {
        let trying = async {
            while self.try_to_take(emulator).await.is_err() {
                self.0 = None;
                tokio::time::sleep(PAUSE).await;
            }
        };
        timeout(WITHIN, trying).await.expect("it comes in the end");
    }

    async fn try_to_take(&mut self, emulator: &Emulator) -> Result<()> {
        if self.0.is_none() {
            let mut client = open(emulator).await?;
            let inbox = client.inbox("plain", Want::Locked).await?;
            let management = client.management("plain").await?;
            self.0 = Some((client, inbox, management));
        }
        let (_, inbox, management) = self.0.as_mut().expect("it was just made");
        let got = inbox.one().await?;
        inbox.complete(&got).await?;
        // What is asked after it on the same connection is answered after it. The link may have
        // been taken away in between: then the message is still there, and was not completed.
        let number = got.sequence_number();
        let left = management.peek(number, 1).await?;
        match left.first() {
            Some(left) if left.sequence_number() == number => {
                Err(Trouble::Lost(format!("message {number} was not completed")))
            }
            _ => Ok(()),
        }
    }
}
