//! Conditions and failures as a relay sees them.
//!
//! What lives here: each condition in each place where it can come, and that everything flows again
//! without a new sink. What does not: the table itself (`src/error.rs`).
//! Invariant: nothing that the queue does not hold is ever confirmed.

use std::time::{Duration, Instant};

use postrider_core::{ErrorKind, Outcome, Record, Secret, Sink};
use postrider_servicebus_emulator::Status;
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::{Bus, QUEUE, confirm, confirm_in_the_end, fail, ids, publish, record, sink};

const BUSY: ErrorKind = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(10)) };
const REFUSED: ErrorKind = ErrorKind::Permanent;
const AGAIN: ErrorKind = ErrorKind::Transient;

/// Conditions, and their kinds: of a delivery; of a link, session or connection.
const CONDITIONS: [(&str, ErrorKind, ErrorKind); 23] = [
    ("amqp:link:message-size-exceeded", REFUSED, AGAIN),
    ("amqp:not-allowed", REFUSED, AGAIN),
    ("amqp:not-implemented", REFUSED, AGAIN),
    ("amqp:invalid-field", REFUSED, AGAIN),
    ("amqp:decode-error", REFUSED, AGAIN),
    ("amqp:precondition-failed", REFUSED, AGAIN),
    ("com.microsoft:argument-error", REFUSED, AGAIN),
    ("com.microsoft:argument-out-of-range", REFUSED, AGAIN),
    ("com.microsoft:server-busy", BUSY, BUSY),
    ("amqp:resource-limit-exceeded", BUSY, BUSY),
    ("amqp:unauthorized-access", AGAIN, AGAIN),
    ("com.microsoft:auth-failed", AGAIN, AGAIN),
    ("amqp:not-found", AGAIN, AGAIN),
    ("amqp:resource-deleted", AGAIN, AGAIN),
    ("com.microsoft:entity-disabled", AGAIN, AGAIN),
    ("com.microsoft:timeout", AGAIN, AGAIN),
    ("com.microsoft:session-cannot-be-locked", AGAIN, AGAIN),
    ("amqp:internal-error", AGAIN, AGAIN),
    ("amqp:link:detach-forced", AGAIN, AGAIN),
    ("amqp:link:stolen", AGAIN, AGAIN),
    ("amqp:link:redirect", AGAIN, AGAIN),
    ("amqp:connection:forced", AGAIN, AGAIN),
    ("com.example:unheard-of", AGAIN, AGAIN),
];

#[tokio::test]
async fn each_condition_of_a_rejection_has_its_kind() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    for (condition, kind, _) in CONDITIONS {
        bus.emulator.faults().reject_next(QUEUE, 1, condition);
        let error = fail(&sink, record(1, "k", b"{}")).await;
        assert_eq!(error.kind(), kind, "{condition}: {error:?}");
        assert!(error.to_string().contains(condition), "{error}");
        confirm(&sink, &[record(2, "k", b"{}")]).await;
    }
    assert_eq!(bus.stored().len(), CONDITIONS.len());
    assert_eq!(bus.tap.connections(), 1, "a rejection is no reason to connect anew");
}

/// A transfer is held on its way, so that it is unsettled when the end comes.
async fn unsettled_at(bus: &Bus, end: impl FnOnce(&Bus)) -> Vec<Outcome> {
    let sink = bus.sink();
    sink.check().await.expect("reachable");
    bus.emulator.faults().lose_confirmations(QUEUE, 1);
    let records = [record(1, "k", b"{}"), record(2, "k", b"{}")];
    let before = bus.stored().len();
    let mut call = std::pin::pin!(publish(&sink, &records));
    tokio::select! {
        outcomes = &mut call => panic!("nothing is settled, yet {outcomes:?}"),
        () = crate::until("it is stored", || bus.stored().len() > before) => {}
    }
    end(bus);
    let begin = Instant::now();
    let outcomes = call.await;
    assert!(begin.elapsed() < Duration::from_secs(5), "it was told at once");
    confirm_in_the_end(&sink, record(3, "k", b"{}")).await;
    outcomes
}

#[tokio::test]
async fn each_condition_of_a_detach_has_its_kind_and_the_link_comes_back() {
    let bus = Bus::start().await;
    for (condition, _, kind) in CONDITIONS {
        let outcomes = unsettled_at(&bus, |bus| {
            bus.emulator.faults().detach_links(QUEUE, condition);
        })
        .await;
        let [Outcome::Failed(error), Outcome::HeldBack] = &outcomes[..] else {
            panic!("{condition}: {outcomes:?}")
        };
        assert_eq!(error.kind(), kind, "{condition}: {error:?}");
        assert!(error.to_string().contains(condition), "{error}");
    }
}

#[tokio::test]
async fn a_connection_that_is_closed_or_lost_leaves_what_was_on_its_way_unconfirmed() {
    let bus = Bus::start().await;
    for condition in ["amqp:connection:forced", "com.microsoft:server-busy", ""] {
        let outcomes = unsettled_at(&bus, |bus| match condition {
            "" => bus.emulator.faults().drop_connections(),
            _ => bus.emulator.faults().close_connections(condition),
        })
        .await;
        let [Outcome::Failed(error), Outcome::HeldBack] = &outcomes[..] else {
            panic!("{condition}: {outcomes:?}")
        };
        let expected = if condition.contains("busy") { BUSY } else { ErrorKind::Transient };
        assert_eq!(error.kind(), expected, "{condition}: {error:?}");
    }
}

/// Ends each new connection after a few transfers, of which the last is not answered.
async fn kill_each_connection(bus: &Bus) {
    let mut seen = 0;
    loop {
        let links = bus.emulator.entity(QUEUE).counts().sender_links;
        if links != seen {
            seen = links;
            bus.emulator.faults().drop_connection_after(QUEUE, 5);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Publishes, and says what is left of it. What is confirmed is stored.
async fn publish_what_is_left(bus: &Bus, sink: &ServiceBus, open: Vec<Record>) -> Vec<Record> {
    let outcomes = publish(sink, &open).await;
    let stored: Vec<String> = bus.stored().into_iter().filter_map(|one| one.message_id).collect();
    let mut left = Vec::new();
    for (record, outcome) in open.into_iter().zip(outcomes) {
        match outcome {
            Outcome::Confirmed => {
                assert!(stored.contains(&record.event.id().to_string()), "{record:?}");
            }
            Outcome::Failed(error) => {
                assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
                left.push(record);
            }
            Outcome::HeldBack | Outcome::Duplicate => left.push(record),
        }
    }
    left
}

#[tokio::test]
async fn a_connection_that_dies_amid_many_batches_loses_nothing_and_confirms_nothing_wrongly() {
    let bus = Bus::start().await;
    let sink = sink(&ServiceBusConfig { in_flight: 4, ..bus.config() });
    let mut open: Vec<Record> =
        (0..600).map(|n| record(n, &format!("k{}", n % 60), b"{}")).collect();
    let sending = async {
        while !open.is_empty() {
            open = publish_what_is_left(&bus, &sink, std::mem::take(&mut open)).await;
        }
    };
    tokio::select! {
        () = kill_each_connection(&bus) => {}
        sent = tokio::time::timeout(crate::DEADLINE, sending) => sent.expect("it makes progress"),
    }
    let links = bus.emulator.entity(QUEUE).counts().sender_links;
    assert!(links > 8, "the connection died {} times", links - 1);
    // Within a session, the first arrivals of the events are in order.
    for key in 0..60 {
        let mut seen = Vec::new();
        for id in bus.session(&format!("k{key}")) {
            if !seen.contains(&id) {
                seen.push(id);
            }
        }
        let sent: Vec<Record> = (0..10).map(|n| record(n * 60 + key, "k", b"")).collect();
        assert_eq!(seen, ids(&sent), "k{key}");
    }
}

#[tokio::test]
async fn a_disabled_entity_holds_everything_back_until_it_is_enabled() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    confirm(&sink, &[record(1, "k", b"{}")]).await;
    bus.emulator.faults().set_status(QUEUE, Status::Disabled);
    for number in 2..5 {
        let error = fail(&sink, record(number, "k", b"{}")).await;
        assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    }
    let error = sink.check().await.expect_err("disabled");
    assert!(error.to_string().contains("status to Active"), "{error}");
    bus.emulator.faults().set_status(QUEUE, Status::Active);
    confirm_in_the_end(&sink, record(2, "k", b"{}")).await;
    assert_eq!(bus.stored().len(), 2);
}

#[tokio::test]
async fn throttling_and_a_full_entity_ask_for_a_pause() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    bus.emulator.faults().throttle_for(QUEUE, Duration::from_secs(30));
    for number in 0..3 {
        let error = fail(&sink, record(number, "k", b"{}")).await;
        // The service's text names four seconds.
        let wait = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(4)) };
        assert_eq!(error.kind(), wait, "{error:?}");
    }
    bus.emulator.advance(Duration::from_secs(31));
    confirm(&sink, &[record(0, "k", b"{}")]).await;
    bus.emulator.faults().set_full(QUEUE, true);
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert_eq!(error.kind(), BUSY, "{error:?}");
    assert!(error.to_string().contains("full"), "{error}");
    bus.emulator.faults().set_full(QUEUE, false);
    confirm(&sink, &[record(1, "k", b"{}")]).await;
}

#[tokio::test]
async fn wrong_credentials_and_unknown_entities_are_told_by_the_check() {
    let bus = Bus::start().await;
    let wrong = bus.config().connection_string.expose().replace("SAS_KEY_VALUE", "hunter2");
    let config = ServiceBusConfig { connection_string: Secret::new(wrong), ..bus.config() };
    let error = sink(&config).check().await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("answered 401"), "{error}");
    assert!(!error.chain().contains("hunter2"), "{error}");
    let config = ServiceBusConfig { entity: Some("nowhere".into()), ..bus.config() };
    let error = sink(&config).check().await.expect_err("unknown");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("no such queue or topic"), "{error}");
    // A message without a session is refused by its entity alone; here every message has one.
    bus.sink().check().await.expect("the right ones");
    assert!(bus.stored().is_empty(), "a check is no event");
}

#[tokio::test]
async fn a_transfer_that_is_not_settled_in_time_is_unknown_and_the_next_is_not() {
    let bus = Bus::start().await;
    let config = ServiceBusConfig { timeout_ms: 300, ..bus.config() };
    let sink = sink(&config);
    sink.check().await.expect("reachable");
    bus.emulator.faults().lose_confirmations(QUEUE, 1);
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("unknown"), "{error}");
    confirm(&sink, &[record(1, "k", b"{}")]).await;
    assert_eq!(bus.stored().len(), 2, "it was taken both times");
}

async fn answers(answer: &'static [u8]) -> (u16, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut buffer = [0; 64];
            let _ = stream.read(&mut buffer).await;
            let _ = stream.write_all(answer).await;
        }
    });
    (port, tasks)
}

#[tokio::test]
async fn what_is_no_service_bus_is_told_apart_and_transient() {
    let bus = Bus::start().await;
    let free = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let refused = free.local_addr().expect("bound").port();
    drop(free);
    let (http, _http) = answers(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    let (closing, _closing) = answers(b"").await;
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let silent_port = silent.local_addr().expect("bound").port();
    for (port, expected) in [
        (refused, "refused"),
        (http, "AMQP 1.0"),
        (closing, "reset"),
        (silent_port, "no link could be had within"),
    ] {
        let text = format!(
            "Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=x;SharedAccessKey=hunter2;\
             UseDevelopmentEmulator=true"
        );
        let config = ServiceBusConfig {
            connection_string: Secret::new(text),
            connect_timeout_ms: 500,
            ..bus.config()
        };
        let sink = sink(&config);
        let error = fail(&sink, record(1, "k", b"{}")).await;
        assert_eq!(error.kind(), ErrorKind::Transient, "{expected}: {error:?}");
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert!(!format!("{error:?} {sink:?}").contains("hunter2"), "{error:?}");
        sink.check().await.expect_err("no better the second time");
    }
}

#[tokio::test]
async fn one_key_s_failure_is_no_other_key_s() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    let records =
        [record(1, "a", b"{}"), record(2, &"x".repeat(200), b"{}"), record(3, "b", b"{}")];
    let outcomes = publish(&sink, &records).await;
    assert!(
        matches!(outcomes[..], [Outcome::Confirmed, Outcome::Failed(_), Outcome::Confirmed]),
        "{outcomes:?}"
    );
}
