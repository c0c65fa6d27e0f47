//! The steps of the client in Rust, by the names that the SDKs' scripts have for theirs.
//!
//! What lives here: messages and their fates, sessions, locks. What does not: refusals and broken
//! connections (`steps_trouble.rs`), and what is left in the emulator afterwards (`../steps.rs`).
//! Invariant: a step ends its connection in order, so that all it said has been heard by then.

use std::collections::BTreeMap;
use std::time::Duration;

use fe2o3_amqp::types::messaging::{MessageId, Properties};
use fe2o3_amqp::types::primitives::{SimpleValue, Symbol};
use postrider_servicebus_emulator::Emulator;
use tokio::task::JoinSet;

use super::inbox::{Got, Want};
use super::post::{Post, post};
use super::{Client, refused, send, send_batch, steps_trouble};

pub(super) const NOT_FOUND: &str = "com.microsoft:message-not-found";
const DEAD_LETTERS: &str = "plain/$DeadLetterQueue";

/// Runs a step to its end, and returns what it has to tell.
pub(crate) async fn run(emulator: &Emulator, step: &str) -> Vec<String> {
    let mut told = Vec::new();
    match step {
        "single" => single(emulator).await,
        "batch" => told.push(batch(emulator).await),
        "named_session" => named_session(emulator).await,
        "next_session" => next_session(emulator).await,
        "abandon" => abandon(emulator).await,
        "dead_letter" => dead_letter(emulator).await,
        "defer" => defer(emulator).await,
        "renew" => renew(emulator).await,
        "renew_session" => renew_session(emulator).await,
        "schedule" => schedule(emulator).await,
        "peek" => peek(emulator).await,
        "session_state" => session_state(emulator).await,
        "duplicates" => duplicates(emulator).await,
        "concurrent_sessions" => concurrent_sessions(emulator).await,
        "receive_and_delete" => receive_and_delete(emulator).await,
        "topics" => topics(emulator).await,
        "time_to_live" => time_to_live(emulator).await,
        "limits" => steps_trouble::limits(emulator).await,
        "wrong_key" => steps_trouble::wrong_key(emulator).await,
        "busy" => steps_trouble::busy(emulator).await,
        "disabled" => steps_trouble::disabled(emulator).await,
        "full" => steps_trouble::full(emulator).await,
        "recovers" => steps_trouble::recovers(emulator).await,
        _ => panic!("an unknown step: {step}"),
    }
    told
}

pub(super) async fn client(emulator: &Emulator) -> Client {
    Client::open(&emulator.connection_string()).await.expect("it lets us in")
}

fn bodies(got: &[Got]) -> Vec<String> {
    got.iter().map(|got| String::from_utf8(got.body()).expect("it is text")).collect()
}

fn pass(emulator: &Emulator, seconds: u64) {
    emulator.advance(Duration::from_secs(seconds));
}

async fn single(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let text = |text: &str| Some(text.to_owned());
    let fields = Properties {
        subject: text("created"),
        content_type: Some(Symbol::from("application/json")),
        correlation_id: Some(MessageId::String("c-1".to_owned())),
        to: text("somebody"),
        reply_to: text("me"),
        ..Properties::default()
    };
    let properties = [
        ("text", SimpleValue::String("ä".to_owned())),
        ("number", SimpleValue::Long(7)),
        ("truth", SimpleValue::Bool(true)),
        ("fraction", SimpleValue::Double(0.5.into())),
    ];
    let sent = Post {
        ttl_ms: Some(300_000),
        fields: fields.clone(),
        properties: properties.to_vec(),
        ..post(b"\x00\xffbody").id("id-1")
    };
    client.send("plain", [sent]).await.expect("it is taken");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    let got = inbox.one().await.expect("it comes");
    assert_eq!(got.body(), b"\x00\xffbody");
    let id = Some(MessageId::String("id-1".to_owned()));
    assert_eq!(got.fields(), &Properties { message_id: id, ..fields });
    assert_eq!(got.ttl_ms(), Some(300_000));
    for (name, value) in &properties {
        assert_eq!(got.property(name), Some(value), "{name}");
    }
    assert_eq!((got.sequence_number(), got.delivery_count()), (1, 0));
    let lasts = got.moment_ms("x-opt-locked-until") - got.moment_ms("x-opt-enqueued-time");
    assert!((30_000..60_000).contains(&lasts), "{lasts}");
    inbox.complete(&got).await.expect("it is held");
    inbox.nothing().await;
    client.close().await;
}

/// Fills a batch up to what the link takes.
async fn batch(emulator: &Emulator) -> String {
    let mut client = client(emulator).await;
    let mut sender = client.sender("plain").await.expect("it is there");
    let limit = sender.max_message_size().expect("it is told");
    assert_eq!(limit, 262_144);
    let body = [b'x'; 1_000];
    let mut full = Vec::new();
    // An envelope and a section have less than this around them.
    let mut room = usize::try_from(limit).expect("it fits") - 100;
    loop {
        let next = post(body).id(full.len().to_string());
        let taken = next.encoded().len() + 8;
        if taken > room {
            break;
        }
        room -= taken;
        full.push(next);
    }
    let count = full.len();
    assert!(count > 200, "{count}");
    send_batch(&mut sender, &full).await.expect("it fits");
    let list: Vec<Post<'_>> = (0..5).map(|i| post(format!("list-{i}"))).collect();
    send_batch(&mut sender, &list).await.expect("it fits");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    let got = inbox.receive(u32::try_from(count).expect("they are few") + 5).await;
    let got = got.expect("all come");
    for (at, got) in got[..count].iter().enumerate() {
        assert_eq!((got.id(), got.body()), (at.to_string(), body.to_vec()));
    }
    assert_eq!(bodies(&got[count..]), ["list-0", "list-1", "list-2", "list-3", "list-4"]);
    for got in &got {
        inbox.complete(got).await.expect("it is held");
    }
    client.close().await;
    format!("sent {}", count + 5)
}

async fn named_session(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let posts = (0..3).flat_map(|i| ["a", "b"].map(|s| post(format!("{s}{i}")).session(s)));
    client.send("sessions", posts).await.expect("they are taken");
    let mut inbox = client.inbox("sessions", Want::Session("b")).await.expect("it is free");
    assert_eq!(inbox.session_id(), "b");
    let got = inbox.receive(3).await.expect("they come");
    assert_eq!(bodies(&got), ["b0", "b1", "b2"]);
    let lasts = inbox.session_until_ms() - got[2].moment_ms("x-opt-enqueued-time");
    assert!((60_000..120_000).contains(&lasts), "{lasts}");
    for got in &got {
        assert_eq!(got.session_id(), Some("b"));
        inbox.complete(got).await.expect("it is held");
    }
    inbox.nothing().await;
    let mut other = self::client(emulator).await;
    let taken = other.inbox("sessions", Want::Session("b")).await.map(drop);
    refused(taken, "com.microsoft:session-cannot-be-locked");
    other.close().await;
    client.close().await;
}

async fn next_session(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let posts = [post("1").session("first"), post("2").session("second")];
    client.send("sessions", posts).await.expect("they are taken");
    for expected in ["first", "second"] {
        let any = Want::NextSession(20_000);
        let mut inbox = client.inbox("sessions", any).await.expect("one is free");
        assert_eq!(inbox.session_id(), expected);
        let got = inbox.one().await.expect("it comes");
        inbox.complete(&got).await.expect("it is held");
        inbox.close().await.expect("it ends in order");
    }
    let none = client.inbox("sessions", Want::NextSession(200)).await.map(drop);
    refused(none, "com.microsoft:timeout");
    client.close().await;
}

async fn abandon(emulator: &Emulator) {
    let mut client = client(emulator).await;
    client.send("plain", [post("poison").id("p")]).await.expect("it is taken");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    for attempt in 0..3 {
        let got = inbox.one().await.expect("it comes again");
        assert_eq!(got.delivery_count(), attempt);
        inbox.abandon(&got).await.expect("it is held");
    }
    inbox.nothing().await;
    let mut letters = client.inbox(DEAD_LETTERS, Want::Locked).await.expect("it is there");
    let letter = letters.one().await.expect("it comes");
    assert_eq!((letter.id(), letter.body()), ("p".to_owned(), b"poison".to_vec()));
    assert_eq!(letter.text_property("DeadLetterReason"), Some("MaxDeliveryCountExceeded"));
    let why = letter.text_property("DeadLetterErrorDescription").expect("it is told");
    assert!(why.contains("3 delivery attempts"), "{why}");
    letters.complete(&letter).await.expect("it is held");
    client.close().await;
}

async fn dead_letter(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let kept = vec![("kept", SimpleValue::String("yes".to_owned()))];
    let bad = Post { properties: kept, ..post("bad") };
    client.send("plain", [bad]).await.expect("it is taken");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    let got = inbox.one().await.expect("it comes");
    inbox.dead_letter(&got, "no good", "at all").await.expect("it is held");
    inbox.nothing().await;
    let mut letters = client.inbox(DEAD_LETTERS, Want::Locked).await.expect("it is there");
    let letter = letters.one().await.expect("it comes");
    assert_eq!(letter.text_property("DeadLetterReason"), Some("no good"));
    assert_eq!(letter.text_property("DeadLetterErrorDescription"), Some("at all"));
    assert_eq!(letter.text_property("kept"), Some("yes"));
    letters.complete(&letter).await.expect("it is held");
    client.close().await;
}

async fn defer(emulator: &Emulator) {
    let mut client = client(emulator).await;
    client.send("plain", [post("later"), post("now")]).await.expect("they are taken");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    let first = inbox.one().await.expect("it comes");
    inbox.defer(&first).await.expect("it is held");
    let second = inbox.one().await.expect("it comes");
    assert_eq!(second.body(), b"now");
    inbox.complete(&second).await.expect("it is held");
    inbox.nothing().await;
    let mut management = client.management("plain").await.expect("it is there");
    let number = first.sequence_number();
    let deferred = management.receive_deferred(number).await.expect("it is there");
    let [deferred] = deferred.as_slice() else { panic!("one was asked for: {deferred:?}") };
    assert_eq!((deferred.body(), deferred.sequence_number()), (b"later".to_vec(), number));
    management.complete(deferred.token()).await.expect("it is held");
    refused(management.receive_deferred(number).await, NOT_FOUND);
    client.close().await;
}

async fn renew(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let mut management = client.management("plain").await.expect("it is there");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    client.send("plain", [post("held")]).await.expect("it is taken");
    let held = inbox.one().await.expect("it comes");
    pass(emulator, 20);
    let until = management.renew(held.token()).await.expect("it is held");
    assert!(until >= held.moment_ms("x-opt-locked-until") + 20_000);
    // It would have ended by now.
    pass(emulator, 20);
    inbox.complete(&held).await.expect("it is held");
    client.send("plain", [post("lost")]).await.expect("it is taken");
    let lost = inbox.one().await.expect("it comes");
    pass(emulator, 31);
    let renewed = management.renew(lost.token()).await;
    refused(renewed, "com.microsoft:message-lock-lost");
    let again = inbox.one().await.expect("it comes again");
    assert_eq!((again.delivery_count(), again.body()), (1, b"lost".to_vec()));
    inbox.complete(&again).await.expect("it is held");
    client.close().await;
}

async fn renew_session(emulator: &Emulator) {
    let mut client = client(emulator).await;
    client.send("sessions", [post("held").session("s")]).await.expect("it is taken");
    let mut inbox = client.inbox("sessions", Want::Session("s")).await.expect("it is free");
    let mut management = client.management("sessions").await.expect("it is there");
    pass(emulator, 40);
    let until = management.renew_session("s").await.expect("it is held");
    assert!(until >= inbox.session_until_ms() + 40_000);
    pass(emulator, 40);
    let got = inbox.one().await.expect("it comes");
    inbox.complete(&got).await.expect("it is held");
    // What is asked after it on the same connection is answered after it.
    assert!(management.peek(1, 1).await.expect("it answers").is_empty());
    pass(emulator, 61);
    let renewed = management.renew_session("s").await;
    refused(renewed, "com.microsoft:session-lock-lost");
    client.close().await;
}

async fn schedule(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let mut management = client.management("plain").await.expect("it is there");
    // Now, as far as a client can know: it is when something was enqueued.
    client.send("plain", [post("now")]).await.expect("it is taken");
    let mut inbox = client.inbox("plain", Want::Deleted).await.expect("it is there");
    let now = inbox.one().await.expect("it comes").moment_ms("x-opt-enqueued-time");
    let later = |post: Post<'static>| Post { due_ms: Some(now + 60_000), ..post };
    let posts = [0, 1, 2].map(|i| later(post(format!("s{i}")).id(format!("s{i}"))));
    let numbers = management.schedule(&posts).await.expect("they are taken");
    assert_eq!(numbers, [2, 3, 4]);
    management.cancel(numbers[1]).await.expect("it is there");
    refused(management.cancel(numbers[1]).await, NOT_FOUND);
    client.send("plain", [later(post("by annotation"))]).await.expect("it is taken");
    inbox.nothing().await;
    inbox.close().await.expect("it ends in order");
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    assert_eq!(management.peek(1, 10).await.expect("it answers").len(), 3);
    pass(emulator, 61);
    let mut got = bodies(&inbox.receive(3).await.expect("they come"));
    got.sort();
    assert_eq!(got, ["by annotation", "s0", "s2"]);
    client.close().await;
}

async fn peek(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let posts = (0..5).map(|i| post(i.to_string()));
    client.send("plain", posts).await.expect("they are taken");
    let mut management = client.management("plain").await.expect("it is there");
    let shown = management.peek(1, 3).await.expect("it answers");
    let bodies: Vec<Vec<u8>> = shown.iter().map(|shown| shown.body()).collect();
    assert_eq!(bodies, [b"0", b"1", b"2"]);
    let shown = management.peek(4, 10).await.expect("it answers");
    let numbers: Vec<i64> = shown.iter().map(|shown| shown.sequence_number()).collect();
    assert_eq!(numbers, [4, 5]);
    assert!(management.peek(99, 1).await.expect("it answers").is_empty());
    // Nothing was taken by looking.
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    assert_eq!(inbox.receive(5).await.expect("they come").len(), 5);
    client.close().await;
}

async fn session_state(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let mut management = client.management("sessions").await.expect("it is there");
    let first = client.inbox("sessions", Want::Session("s")).await.expect("it is free");
    assert_eq!(management.session_state("s").await, Ok(None));
    management.set_session_state("s", Some(b"page 7")).await.expect("it is held");
    assert_eq!(management.session_state("s").await, Ok(Some(b"page 7".to_vec())));
    first.close().await.expect("it ends in order");
    let second = client.inbox("sessions", Want::Session("s")).await.expect("it is free");
    assert_eq!(management.session_state("s").await, Ok(Some(b"page 7".to_vec())));
    management.set_session_state("s", None).await.expect("it is held");
    assert_eq!(management.session_state("s").await, Ok(None));
    second.close().await.expect("it ends in order");
    client.close().await;
}

async fn duplicates(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let named = |id: &'static str| post(id).id(id);
    let mut sender = client.sender("detecting").await.expect("it is there");
    for id in ["a", "b", "a"] {
        send(&mut sender, &named(id)).await.expect("it is taken, or known");
    }
    let batch = ["b", "c", "c"].map(named);
    send_batch(&mut sender, &batch).await.expect("it is taken");
    pass(emulator, 19);
    send(&mut sender, &named("a")).await.expect("it is known");
    pass(emulator, 2);
    send(&mut sender, &named("a")).await.expect("it is taken");
    let mut inbox = client.inbox("detecting", Want::Locked).await.expect("it is there");
    let got = inbox.receive(4).await.expect("they come");
    assert_eq!(bodies(&got), ["a", "b", "c", "a"]);
    inbox.nothing().await;
    client.close().await;
}

async fn concurrent_sessions(emulator: &Emulator) {
    let (sessions, each) = (8, 10);
    let names: Vec<String> = (0..sessions).map(|s| format!("s{s}")).collect();
    let mut sending = client(emulator).await;
    let mut sender = sending.sender("sessions").await.expect("it is there");
    for i in 0..each {
        for name in &names {
            let next = post(i.to_string()).session(name);
            send(&mut sender, &next).await.expect("it is taken");
        }
    }
    let mut workers = JoinSet::new();
    for _ in 0..4 {
        let connection_string = emulator.connection_string();
        workers.spawn(async move {
            let mut client = Client::open(&connection_string).await.expect("it lets us in");
            let mut seen = Vec::new();
            for _ in 0..2 {
                let any = Want::NextSession(20_000);
                let mut inbox = client.inbox("sessions", any).await.expect("one is free");
                let got = inbox.receive(each).await.expect("they come");
                for got in &got {
                    inbox.complete(got).await.expect("it is held");
                }
                seen.push((inbox.session_id(), bodies(&got)));
                inbox.close().await.expect("it ends in order");
            }
            client.close().await;
            seen
        });
    }
    let seen = workers.join_all().await.concat();
    // Each session had one receiver.
    assert_eq!(seen.len(), names.len());
    let order: Vec<String> = (0..each).map(|i| i.to_string()).collect();
    let expected: BTreeMap<String, Vec<String>> =
        names.iter().map(|name| (name.clone(), order.clone())).collect();
    assert_eq!(seen.into_iter().collect::<BTreeMap<_, _>>(), expected);
    sending.close().await;
}

async fn receive_and_delete(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let posts = (0..3).map(|i| post(i.to_string()));
    client.send("plain", posts).await.expect("they are taken");
    let mut inbox = client.inbox("plain", Want::Deleted).await.expect("it is there");
    let got = inbox.receive(3).await.expect("they come");
    assert_eq!(bodies(&got), ["0", "1", "2"]);
    inbox.nothing().await;
    client.close().await;
}

async fn topics(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let mut sender = client.sender("events").await.expect("it is there");
    let posts = [0, 1].map(|i| post(i.to_string()).session("s"));
    send_batch(&mut sender, &posts).await.expect("it is taken");
    let all = "events/Subscriptions/all";
    let mut inbox = client.inbox(all, Want::Locked).await.expect("it is there");
    let got = inbox.receive(2).await.expect("they come");
    assert_eq!(bodies(&got), ["0", "1"]);
    inbox.complete(&got[0]).await.expect("it is held");
    inbox.dead_letter(&got[1], "why not", "no reason").await.expect("it is held");
    let letters = format!("{all}/$DeadLetterQueue");
    let mut letters = client.inbox(&letters, Want::Locked).await.expect("it is there");
    let letter = letters.one().await.expect("it comes");
    assert_eq!(letter.text_property("DeadLetterReason"), Some("why not"));
    let by_session = "EVENTS/Subscriptions/By-Session";
    let mut session = client.inbox(by_session, Want::Session("s")).await.expect("it is free");
    assert_eq!(bodies(&session.receive(2).await.expect("they come")), ["0", "1"]);
    client.close().await;
}

async fn time_to_live(emulator: &Emulator) {
    let mut client = client(emulator).await;
    let short = |body: &str| Post { ttl_ms: Some(30_000), ..post(body) };
    client.send("plain", [short("gone")]).await.expect("it is taken");
    client.send("burying", [short("buried"), post("stays")]).await.expect("they are taken");
    pass(emulator, 31);
    let mut inbox = client.inbox("plain", Want::Locked).await.expect("it is there");
    inbox.nothing().await;
    let mut inbox = client.inbox("burying", Want::Locked).await.expect("it is there");
    assert_eq!(inbox.one().await.expect("it comes").body(), b"stays");
    let letters = "burying/$DeadLetterQueue";
    let mut letters = client.inbox(letters, Want::Locked).await.expect("it is there");
    let letter = letters.one().await.expect("it comes");
    assert_eq!(letter.body(), b"buried");
    assert_eq!(letter.text_property("DeadLetterReason"), Some("TTLExpiredException"));
    client.close().await;
}
