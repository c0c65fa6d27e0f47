//! Entities that outlive the emulator in a file.
//!
//! What lives here: what is there after an orderly restart, and after `kill -9` amid sends and
//! completions; files that can't be had. What does not: what is never kept (locks, faults, counts).
//! Invariant: what a client was told counts, and nothing that it was not told is counted on.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use postrider_servicebus_emulator::{
    Config, Emulator, Entity, Error, MessageState, StoredMessage, Topic,
};
use rustix::process::Signal;
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;

use crate::client::{Client, Post, Shown, Want, post, refused, send, send_batch};
use crate::program::{SOON, first_line, killed, limited, start};

const SECOND: Duration = Duration::from_secs(1);
/// How often the program is killed.
const ROUNDS: usize = 5;
/// So many confirmed sends in a round, then it is killed.
const SENDS: usize = 150;

fn config(data: &Path) -> Config {
    let entity = Entity::default;
    let plain = Entity { max_delivery_count: 3, ..entity() };
    let sessions = Entity { requires_session: true, ..entity() };
    let detecting = Entity { duplicate_detection_window: Some(600 * SECOND), ..entity() };
    let topic = Topic::default().with_subscription("all", entity());
    Config::default()
        .with_data(data)
        .with_queue("plain", plain)
        .with_queue("sessions", sessions)
        .with_queue("detecting", detecting)
        .with_topic("events", topic)
}

async fn emulator(data: &Path) -> Emulator {
    Emulator::start(config(data)).await.expect("it starts")
}

async fn client(emulator: &Emulator) -> Client {
    Client::open(&emulator.connection_string()).await.expect("it lets us in")
}

fn found(messages: &[StoredMessage]) -> Vec<(String, i64, MessageState)> {
    let text = |message: &StoredMessage| String::from_utf8_lossy(&message.body).into_owned();
    messages.iter().map(|message| (text(message), message.sequence_number, message.state)).collect()
}

#[tokio::test]
async fn an_orderly_restart_changes_nothing_but_locks() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("bus.db");
    let before = emulator(&data).await;
    let mut client = client(&before).await;
    let posts = ["gone", "held", "deferred", "buried", "abandoned", "waits"].map(post);
    client.send("plain", posts).await.expect("they are taken");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    let got = inbox.receive(5).await.expect("they come");
    inbox.complete(&got[0]).await.expect("it is held");
    inbox.defer(&got[2]).await.expect("it is held");
    inbox.dead_letter(&got[3], "no good", "at all").await.expect("it is held");
    inbox.abandon(&got[4]).await.expect("it is held");
    let mut management = client.management("plain").await.expect("it is there");
    let due_ms = got[0].moment_ms("x-opt-enqueued-time") + 3_600_000;
    let later = Post { due_ms: Some(due_ms), ttl_ms: Some(10_000), ..post("later") };
    let numbers = management.schedule(&[later.clone(), later]).await.expect("they are taken");
    management.cancel(numbers[1]).await.expect("it is there");
    before.stop().await;

    let after = emulator(&data).await;
    use MessageState::{Active, Deferred, Scheduled};
    let left = after.entity("plain").messages();
    let expected = [
        ("held", 2, Active),
        ("deferred", 3, Deferred),
        ("abandoned", 5, Active),
        ("waits", 6, Active),
        ("later", 7, Scheduled),
    ];
    assert_eq!(found(&left), expected.map(|(body, at, state)| (body.to_owned(), at, state)));
    assert_eq!(left.iter().map(|one| one.delivery_count).collect::<Vec<_>>(), [0, 0, 1, 0, 0]);
    let letters = after.entity("plain").dead_letters();
    assert_eq!(found(&letters), [("buried".to_owned(), 4, Active)]);

    let mut client = self::client(&after).await;
    let mut letters = client.inbox("plain/$DeadLetterQueue", Want::Deleted).await.expect("there");
    let letter = letters.one().await.expect("it comes");
    assert_eq!(letter.text_property("DeadLetterReason"), Some("no good"));
    assert_eq!(letter.text_property("DeadLetterErrorDescription"), Some("at all"));
    let mut management = client.management("plain").await.expect("it is there");
    let deferred = management.receive_deferred(3).await.expect("it is there");
    assert_eq!(deferred[0].body(), b"deferred");
    management.complete(deferred[0].token()).await.expect("it is held");
    // The number of the cancelled one is never given again.
    client.send("plain", [post("new")]).await.expect("it is taken");
    assert_eq!(after.entity("plain").messages().last().expect("it is there").sequence_number, 9);
    let mut inbox = client.inbox("plain", Want::Deleted).await.expect("it is there");
    inbox.receive(4).await.expect("they come");
    after.advance(3_601 * SECOND);
    assert_eq!(inbox.one().await.expect("it comes, being due").body(), b"later");
    after.stop().await;
    let last = emulator(&data).await;
    assert_eq!(last.entity("plain").messages(), []);
    assert_eq!(last.entity("plain").dead_letters(), []);
}

#[tokio::test]
async fn sessions_known_ids_and_subscriptions_outlive_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("bus.db");
    let before = emulator(&data).await;
    let mut client = client(&before).await;
    let posts = ["a", "b"].map(|session| post(session).session(session));
    client.send("sessions", posts).await.expect("they are taken");
    let inbox = client.inbox("sessions", Want::Session("a")).await.expect("it is free");
    let mut management = client.management("sessions").await.expect("it is there");
    management.set_session_state("a", Some(b"page 7")).await.expect("it is held");
    client.send("detecting", [post("1").id("1")]).await.expect("it is taken");
    client.send("events", [post("copied")]).await.expect("it is taken");
    before.stop().await;
    drop(inbox);

    let after = emulator(&data).await;
    let mut client = self::client(&after).await;
    let mut inbox = client.inbox("sessions", Want::Session("a")).await.expect("it is free again");
    let mut management = client.management("sessions").await.expect("it is there");
    assert_eq!(management.session_state("a").await, Ok(Some(b"page 7".to_vec())));
    assert_eq!(inbox.one().await.expect("it comes").body(), b"a");
    management.set_session_state("a", None).await.expect("it is held");
    let mut sender = client.sender("detecting").await.expect("it is there");
    send(&mut sender, &post("1 again").id("1")).await.expect("it is known");
    let batch = [post("2").id("2"), post("1 once more").id("1")];
    send_batch(&mut sender, &batch).await.expect("one of them is new");
    let known = found(&after.entity("detecting").messages());
    let bodies: Vec<&str> = known.iter().map(|(body, ..)| body.as_str()).collect();
    assert_eq!(bodies, ["1", "2"]);
    assert_eq!(after.entity("events/Subscriptions/all").messages()[0].body, b"copied");
    after.stop().await;

    let last = emulator(&data).await;
    let mut client = self::client(&last).await;
    let _inbox = client.inbox("sessions", Want::Session("a")).await.expect("it is free again");
    let mut management = client.management("sessions").await.expect("it is there");
    assert_eq!(management.session_state("a").await, Ok(None));
}

/// What is known of the messages of all rounds.
#[derive(Default)]
struct Known {
    /// A confirmation came.
    sent: BTreeSet<String>,
    /// It was sent, and nothing more is known of it.
    tried: BTreeSet<String>,
    /// A confirmation of its completion came.
    completed: BTreeSet<String>,
    /// Its completion was asked for, and nothing more is known of it.
    leaving: BTreeSet<String>,
}

/// Sends until there is nobody to send to.
async fn send_all(address: &str, round: usize, known: &Mutex<Known>, confirmed: mpsc::Sender<()>) {
    let Ok(mut client) = Client::open(address).await else { return };
    let Ok(mut sender) = client.sender("orders").await else { return };
    for number in 0.. {
        // Single messages and batches by turns.
        let ids: Vec<String> =
            (0..1 + number % 2 * 4).map(|i| format!("{round}-{number}-{i}")).collect();
        known.lock().await.tried.extend(ids.iter().cloned());
        let posts: Vec<Post<'_>> = ids.iter().map(|id| post(id).id(id)).collect();
        let sent = match posts.as_slice() {
            [one] => send(&mut sender, one).await,
            many => send_batch(&mut sender, many).await,
        };
        if sent.is_err() {
            return;
        }
        known.lock().await.sent.extend(ids);
        if confirmed.send(()).await.is_err() {
            return;
        }
    }
}

/// Completes until there is nobody to ask.
async fn complete_all(address: &str, known: &Mutex<Known>, any: &AtomicBool) {
    let Ok(mut client) = Client::open(address).await else { return };
    let Ok(mut inbox) = client.inbox("orders", Want::Locked).await else { return };
    let Ok(mut management) = client.management("orders").await else { return };
    loop {
        let Ok(Ok(got)) = timeout(SOON, inbox.one()).await else { return };
        known.lock().await.leaving.insert(got.id());
        // The answer to this is the confirmation; that of a disposition the client keeps to itself.
        if management.complete(got.token()).await.is_err() {
            return;
        }
        known.lock().await.completed.insert(got.id());
        any.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_confirmed_outlives_a_kill() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("bus.db");
    let data = data.to_str().expect("it is text");
    let arguments = ["--queue", "orders", "--listen", "127.0.0.1:0", "--data", data];
    let known = Arc::new(Mutex::new(Known::default()));
    for round in 0..ROUNDS {
        let (child, address) = start(&arguments).await;
        let (confirmed, mut confirmations) = mpsc::channel(1);
        let any = AtomicBool::new(false);
        let play = async {
            tokio::join!(
                send_all(&address, round, &known, confirmed),
                complete_all(&address, &known, &any),
            )
        };
        let kill = async {
            for _ in 0..SENDS {
                confirmations.recv().await.expect("sends are confirmed");
            }
            // More are under way now.
            while !any.load(Ordering::Relaxed) {
                confirmations.recv().await.expect("sends are confirmed");
            }
            killed(child, Signal::KILL).await;
            confirmations.close();
            while confirmations.recv().await.is_some() {}
        };
        timeout(SOON * 3, async { tokio::join!(play, kill) }).await.expect("in time");
        let (child, address) = start(&arguments).await;
        judge(&address, &known).await;
        killed(child, Signal::KILL).await;
    }
    let known = known.lock().await;
    assert!(known.completed.len() >= ROUNDS && known.sent.len() >= ROUNDS * SENDS);
}

/// Compares what is there with what is known.
async fn judge(address: &str, known: &Mutex<Known>) {
    let mut client = Client::open(address).await.expect("it lets us in");
    let mut management = client.management("orders").await.expect("it is there");
    let (mut there, mut from) = (BTreeSet::new(), 0);
    loop {
        let shown = management.peek(from, 250).await.expect("it answers");
        let Some(last) = shown.last() else { break };
        from = last.sequence_number() + 1;
        for one in &shown {
            let id = String::from_utf8(one.body()).expect("it is text");
            assert!(there.insert(id.clone()), "{id} is there twice");
        }
    }
    let mut known = known.lock().await;
    let lost: Vec<&String> = known
        .sent
        .iter()
        .filter(|id| !there.contains(*id) && !known.leaving.contains(*id))
        .collect();
    assert!(lost.is_empty(), "confirmed and gone: {lost:?}");
    let back: Vec<&String> = known.completed.intersection(&there).collect();
    assert!(back.is_empty(), "completed and back: {back:?}");
    let foreign: Vec<&String> = there.difference(&known.tried).collect();
    assert!(foreign.is_empty(), "never sent: {foreign:?}");
    // What was not known is known now.
    known.sent = there;
    known.leaving = known.completed.clone();
    client.close().await;
}

#[tokio::test]
async fn a_file_that_cannot_be_had_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("bus.db");
    let first = emulator(&data).await;
    let taken = Emulator::start(config(&data)).await.expect_err("the first has it");
    assert!(matches!(taken, Error::Data { source: Some(_), .. }), "{taken:?}");
    first.stop().await;
    let foreign = folder.path().join("foreign.db");
    let made = rusqlite::Connection::open(&foreign)
        .and_then(|file| file.execute("create table t (a)", []));
    made.expect("it is made");
    let refused = Emulator::start(config(&foreign)).await.expect_err("it is not ours");
    assert!(refused.to_string().contains("another program's"), "{refused}");
    std::fs::write(folder.path().join("text.db"), "no database, but long enough to be looked at")
        .expect("it is written");
    assert!(Emulator::start(config(&folder.path().join("text.db"))).await.is_err());
}

/// A file that can't grow any more is what a full disk is: what does not fit is not confirmed.
#[tokio::test]
async fn what_cannot_be_saved_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("bus.db");
    let data = data.to_str().expect("it is text");
    let arguments = ["--queue", "orders", "--listen", "127.0.0.1:0", "--data", data];
    let (child, address) = first_line(limited(1024, &arguments)).await;
    let mut client = Client::open(&address).await.expect("it lets us in");
    let mut sender = client.sender("orders").await.expect("it is there");
    let mut sent = 0;
    let refusal = loop {
        assert!(sent < 2_000, "the limit has no effect");
        match send(&mut sender, &post([b'x'; 1_000])).await {
            Ok(()) => sent += 1,
            Err(refusal) => break refusal,
        }
    };
    refused::<()>(Err(refusal), "amqp:internal-error");
    killed(child, Signal::KILL).await;
    let (child, address) = start(&arguments).await;
    let mut client = Client::open(&address).await.expect("it lets us in");
    let mut management = client.management("orders").await.expect("it is there");
    let last = management.peek(sent, 10).await.expect("it answers");
    assert_eq!(last.first().map(Shown::sequence_number), Some(sent));
    killed(child, Signal::KILL).await;
}
