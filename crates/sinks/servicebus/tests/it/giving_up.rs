//! Links and calls that are given up.
//!
//! What lives here: connections that stand still, calls that are dropped, and the time of a call.
//! What does not: conditions that the service names (`failures.rs`).
//! Invariant: of what was given up nothing arrives behind newer events.

use std::time::{Duration, Instant};

use postrider_core::{ErrorKind, Outcome, PartitionId, Publish, Record, Secret, Sink};
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::{Bus, QUEUE, confirm, confirm_in_the_end, fail, ids, publish, record, sink};

/// A sink that soon loses its patience with a transfer.
fn impatient(bus: &Bus) -> ServiceBus {
    sink(&ServiceBusConfig { timeout_ms: 500, ..bus.config() })
}

async fn publish_within(sink: &ServiceBus, records: &[Record], time: Duration) -> Vec<Outcome> {
    let partition = PartitionId::numbered(0, 1);
    sink.publish(Publish::new(&partition, records).within(time)).await
}

/// Checks until there is another connection.
async fn until_connected_anew(bus: &Bus, sink: &ServiceBus) {
    let before = bus.tap.connections();
    let checking =
        async { while sink.check().await.is_err() || bus.tap.connections() == before {} };
    timeout(crate::DEADLINE, checking).await.expect("the link is given up");
}

#[tokio::test]
async fn a_link_that_settles_nothing_is_given_up_for_another() {
    let bus = Bus::start().await;
    let sink = impatient(&bus);
    confirm(&sink, &[record(1, "k", b"{}")]).await;
    bus.tap.mute();
    let error = fail(&sink, record(2, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("whether it was taken is unknown"), "{error}");
    for number in 2..10 {
        confirm_in_the_end(&sink, record(number, "k", b"{}")).await;
    }
    assert_eq!(bus.tap.connections(), 2);
}

#[tokio::test]
async fn of_a_connection_that_was_given_up_nothing_more_is_written() {
    let bus = Bus::start().await;
    let sink = impatient(&bus);
    sink.check().await.expect("reachable");
    bus.tap.stand_still();
    const BYTES: usize = 200_000;
    let of = |number: u128, bytes| record(number, &format!("k{}", number % 64), &vec![b' '; bytes]);
    let old: Vec<Record> = (0..64).map(|number| of(number, BYTES)).collect();
    let outcomes = publish(&sink, &old).await;
    assert!(outcomes.iter().all(|one| matches!(one, Outcome::Failed(_))), "{outcomes:?}");
    let newer: Vec<Record> = (64..128).map(|number| of(number, 2)).collect();
    confirm_in_the_end(&sink, newer[0].clone()).await;
    confirm(&sink, &newer[1..]).await;
    // Only what the other side's kernel had by then is still there to be read.
    let bytes = bus.tap.drain().await;
    assert!(bytes < 64 * BYTES / 2, "{bytes} bytes came of the old connection");
    let stored: Vec<String> = bus.stored().into_iter().filter_map(|one| one.message_id).collect();
    assert!(ids(&newer).iter().all(|id| stored.contains(id)) && stored.len() == newer.len());
}

#[tokio::test]
async fn a_transfer_that_waits_for_credit_is_not_sent_once_its_call_is_dropped() {
    let bus = Bus::start().await;
    bus.emulator.faults().withhold_credit(QUEUE, true);
    let sink = bus.sink();
    sink.check().await.expect("reachable");
    let abandoned = [record(1, "k", b"{}")];
    timeout(Duration::from_millis(300), publish(&sink, &abandoned)).await.expect_err("no credit");
    bus.emulator.faults().withhold_credit(QUEUE, false);
    confirm_in_the_end(&sink, record(2, "k", b"{}")).await;
    assert_eq!(bus.session("k"), ids(&[record(2, "k", b"{}")]));
}

#[tokio::test]
async fn a_transfer_without_credit_holds_up_nothing_else_for_longer_than_its_time() {
    let bus = Bus::start().await;
    bus.emulator.faults().withhold_credit(QUEUE, true);
    let sink = impatient(&bus);
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
    sink.check().await.expect("a new link is to be had");
    bus.emulator.faults().withhold_credit(QUEUE, false);
    confirm_in_the_end(&sink, record(1, "k", b"{}")).await;
    assert_eq!(bus.stored().len(), 1);
}

#[tokio::test]
async fn a_call_that_is_dropped_takes_its_transfer_off_the_wire() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    sink.check().await.expect("reachable");
    bus.tap.hold();
    {
        let abandoned = [record(1, "k", b"{}")];
        let mut call = std::pin::pin!(publish(&sink, &abandoned));
        tokio::select! {
            outcomes = &mut call => panic!("it is held, yet {outcomes:?}"),
            () = bus.tap.until_waiting() => {}
        }
    }
    until_connected_anew(&bus, &sink).await;
    bus.tap.release();
    confirm(&sink, &[record(2, "k", b"{}")]).await;
    assert_eq!(bus.session("k"), ids(&[record(2, "k", b"{}")]));
}

#[tokio::test]
async fn no_two_connections_have_containers_or_links_of_one_name() {
    let bus = Bus::start().await;
    let (one, other) = (bus.sink(), bus.sink());
    one.check().await.expect("reachable");
    other.check().await.expect("reachable");
    bus.emulator.faults().drop_connections();
    until_connected_anew(&bus, &one).await;
    let (containers, links) = bus.tap.names();
    assert_eq!((containers.len(), links.len()), (3, 9), "{containers:?} {links:?}");
    for mut names in [containers, links] {
        names.sort();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    }
}

#[tokio::test]
async fn a_call_begins_nothing_after_its_time_and_waits_for_nothing_much_longer() {
    let bus = Bus::start().await;
    let time = Duration::from_millis(300);
    let soon = |begin: Instant| assert!(begin.elapsed() < Duration::from_secs(8), "{begin:?}");
    // Connecting to somebody who says nothing would take ten seconds.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = silent.local_addr().expect("bound").port();
    let text = bus.config().connection_string.expose().to_owned();
    let text = text.replace(&bus.tap.port().to_string(), &port.to_string());
    let nowhere = sink(&ServiceBusConfig { connection_string: Secret::new(text), ..bus.config() });
    let begin = Instant::now();
    let outcomes = publish_within(&nowhere, &[record(1, "k", b"{}")], time).await;
    assert!(matches!(&outcomes[..], [Outcome::Failed(_)]), "{outcomes:?}");
    soon(begin);
    // A call behind another one that has all the permits.
    let sink = sink(&ServiceBusConfig { in_flight: 1, ..bus.config() });
    sink.check().await.expect("reachable");
    bus.tap.hold();
    let (first, behind) = ([record(1, "a", b"{}")], [record(2, "b", b"{}"), record(3, "b", b"{}")]);
    let mut call = std::pin::pin!(publish(&sink, &first));
    tokio::select! {
        outcomes = &mut call => panic!("it is held, yet {outcomes:?}"),
        () = bus.tap.until_waiting() => {}
    }
    let outcomes = publish_within(&sink, &behind, time).await;
    let [Outcome::Failed(error), Outcome::HeldBack] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("not sent"), "{error}");
    bus.tap.release();
    assert!(matches!(&call.await[..], [Outcome::Confirmed]));
    assert_eq!(bus.session("b"), [""; 0]);
    // A transfer is not waited for past the caller's patience, whatever its own time.
    bus.tap.mute();
    let begin = Instant::now();
    let outcomes = publish_within(&sink, &[record(4, "c", b"{}")], time).await;
    assert!(matches!(&outcomes[..], [Outcome::Failed(_)]), "{outcomes:?}");
    soon(begin);
}
