//! What a broker in trouble makes of events.
//!
//! What lives here: brokers that are gone, topics that are missing, refusals, leaders that change,
//! lost answers, calls that are given up. What does not: sizes and times (`limits.rs`), logins and
//! certificates (`access.rs`), breaks in the middle of an event, which the suite has.
//! Invariant: nothing counts as sent that is not in the topic, and nothing of a key overtakes.

use std::collections::HashMap;
use std::time::Duration;

use postrider_conformance::sink::ReceiverFault;
use postrider_core::{ErrorKind, EventId, Outcome, Record, Sink};
use postrider_encoding::Encoding;
use postrider_sink_kafka::{KafkaConfig, RecordTime, Unroutable};
use rdkafka::message::Message;
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tokio::time::Instant;

use crate::middle::Middle;
use crate::{
    PATIENCE, TOPIC, all_confirmed, blocking, broker, brokers, config, confirm, delete_topic,
    empty_broker, fail, first_failed, header, ids, make_topic, one, publish, records, sink,
    stored_ids,
};

const THROTTLED: ErrorKind = ErrorKind::Throttled { retry_after: None };

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_gone_is_waited_for_and_keeps_what_it_confirmed() {
    let mut broker = broker().await;
    let brokers = brokers(&broker);
    let sink = sink(&KafkaConfig { timeout_ms: 1_500, ..config(&*brokers) });
    let events: Vec<Record> = (0..4).map(|n| one("a", n)).collect();
    confirm(&sink, &events[0]).await;
    for round in 1..=2 {
        let mut broker_gone = broker;
        let stopped = blocking(move || {
            broker_gone.stop().expect("it ends");
            broker_gone
        });
        let mut stopped = stopped.await;
        let outcomes = publish(&sink, &events[round..]).await;
        let error = first_failed(&outcomes);
        assert_eq!(error.kind(), ErrorKind::Transient, "{}", error.chain());
        assert!(sink.check().await.is_err());
        broker = blocking(move || {
            stopped.start_again().expect("it starts");
            stopped
        })
        .await;
        let until = Instant::now() + PATIENCE;
        while sink.check().await.is_err() {
            assert!(Instant::now() < until, "it is there again");
        }
        // The client may take longer than one attempt lasts to find it again.
        while !all_confirmed(&publish(&sink, &events[round..=round]).await) {
            assert!(Instant::now() < until, "it takes events again");
        }
    }
    confirm(&sink, &events[3]).await;
    let mut stored = stored_ids(&brokers).await;
    stored.dedup();
    assert_eq!(stored, ids(&events));
    drop(blocking(move || broker.stop()).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_topic_is_waited_for_or_parks_and_flows_once_it_is_made() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    let waiting = sink(&KafkaConfig { topic: TOPIC.into(), ..config(&*brokers) });
    let parking = sink(&KafkaConfig { unroutable: Unroutable::Park, ..config(&*brokers) });
    let events = [one("a", 1), one("a", 2)];
    for _ in 0..2 {
        let outcomes = publish(&waiting, &events).await;
        let error = first_failed(&outcomes);
        assert_eq!(error.kind(), THROTTLED);
        assert!(error.chain().contains("the topic orders does not exist"), "{}", error.chain());
    }
    let error = waiting.check().await.expect_err("there is none").chain();
    assert!(error.contains("create_topics"), "{error}");
    // Not by one answer: brokers that make a topic say so at first, too.
    assert_eq!(fail(&parking, &events[0]).await.kind(), THROTTLED);
    let until = Instant::now() + PATIENCE;
    while fail(&parking, &events[0]).await.kind() != ErrorKind::Permanent {
        assert!(Instant::now() < until, "it is parked after a while");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    make_topic(&brokers, TOPIC, 1, &[]).await;
    waiting.check().await.expect("there is one");
    assert!(all_confirmed(&publish(&waiting, &events).await));
    assert_eq!(stored_ids(&brokers).await, ids(&events));
}

/// A topic that the sink knows is deleted under its hands.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_was_deleted_takes_nothing_until_it_is_made_again() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let sink = sink(&KafkaConfig { timeout_ms: 1_500, ..config(&*brokers) });
    confirm(&sink, &one("a", 0)).await;
    delete_topic(&brokers, TOPIC).await;
    let events = [one("a", 1), one("a", 2)];
    let until = Instant::now() + PATIENCE;
    loop {
        let outcomes = publish(&sink, &events).await;
        let error = first_failed(&outcomes);
        assert_ne!(error.kind(), ErrorKind::Permanent, "{}", error.chain());
        if error.chain().contains("does not exist") {
            break;
        }
        assert!(Instant::now() < until, "{}", error.chain());
    }
    make_topic(&brokers, TOPIC, 1, &[]).await;
    let mut outcomes = publish(&sink, &events).await;
    while !all_confirmed(&outcomes) {
        assert!(Instant::now() < until, "{outcomes:?}");
        outcomes = publish(&sink, &events).await;
    }
    let mut stored = stored_ids(&brokers).await;
    stored.dedup();
    assert_eq!(stored, ids(&events));
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_make_a_topic_only_if_they_may() {
    let broker = empty_broker().await;
    let brokers = brokers(&broker);
    let event = one("a", 1);
    assert_eq!(fail(&sink(&config(&*brokers)), &event).await.kind(), THROTTLED);
    confirm(&sink(&KafkaConfig { create_topics: true, ..config(&*brokers) }), &event).await;
    assert_eq!(stored_ids(&brokers).await, [event.event.id()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_no_topic_has_parks() {
    let broker = broker().await;
    let sink = sink(&KafkaConfig { topic: "{key}".into(), ..config(brokers(&broker)) });
    let error = fail(&sink, &one("Zoë/1", 1)).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.chain().contains("Kafka takes letters"), "{}", error.chain());
}

/// The broker's own codes, each until it takes events again.
#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_told_apart_and_events_flow_again_afterwards() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&KafkaConfig { timeout_ms: 1_500, ..config(middle.brokers()) });
    let mut confirmed = Vec::new();
    for (code, kind, part) in [
        // TOPIC_AUTHORIZATION_FAILED
        (29, THROTTLED, "grant it Write"),
        // POLICY_VIOLATION
        (44, THROTTLED, "policy"),
        // NOT_ENOUGH_REPLICAS, NOT_LEADER_OR_FOLLOWER: the client tries again in vain.
        (19, THROTTLED, "in time"),
        (6, THROTTLED, "in time"),
        // INVALID_RECORD, INVALID_TIMESTAMP
        (87, ErrorKind::Permanent, "its own rules"),
        (32, ErrorKind::Permanent, "record_time"),
        // MESSAGE_TOO_LARGE, without a limit that the event passes.
        (10, ErrorKind::Permanent, "max.message.bytes"),
        // CLUSTER_AUTHORIZATION_FAILED
        (31, ErrorKind::Transient, "IdempotentWrite"),
        // OUT_OF_ORDER_SEQUENCE_NUMBER: the producer gives up for good.
        (45, ErrorKind::Transient, "gave up"),
    ] {
        middle.orders().refusal = Some(code);
        let events = [one("a", 1), one("a", 2)];
        let outcomes = publish(&sink, &events).await;
        let error = first_failed(&outcomes);
        assert_eq!(error.kind(), kind, "{code}: {}", error.chain());
        assert!(error.chain().contains(part), "{code}: {}", error.chain());
        middle.orders().refusal = None;
        let until = Instant::now() + PATIENCE;
        let mut outcomes = publish(&sink, &events).await;
        while !all_confirmed(&outcomes) {
            assert!(Instant::now() < until, "{code}: {outcomes:?}");
            outcomes = publish(&sink, &events).await;
        }
        confirmed.extend(ids(&events));
    }
    let mut stored = stored_ids(&brokers).await;
    stored.dedup();
    assert_eq!(stored, confirmed);
}

/// What lasts shorter than a confirmation may take is the client's affair.
#[tokio::test(flavor = "multi_thread")]
async fn short_trouble_is_ridden_out() {
    let cluster = MockCluster::new(3).expect("a cluster");
    cluster.create_topic(TOPIC, 1, 3).expect("made");
    let brokers = cluster.bootstrap_servers();
    let sink = sink(&KafkaConfig { timeout_ms: 20_000, ..config(&*brokers) });
    let events: Vec<Record> = (0..40).map(|n| one(&format!("k{}", n % 4), n)).collect();
    for (round, events) in events.chunks(8).enumerate() {
        let errors = [
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__TRANSPORT,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE,
        ];
        cluster.request_errors(RDKafkaApiKey::Produce, &errors[round..=round]);
        let leader = i32::try_from(round % 3).expect("small") + 1;
        cluster.partition_leader(TOPIC, 0, Some(leader)).expect("moved");
        assert!(all_confirmed(&publish(&sink, events).await), "round {round}");
    }
    let stored = stored_ids(&brokers).await;
    for key in 0..4 {
        let of_key = |n: &usize| n % 4 == key;
        let expected: Vec<EventId> = (0..40).filter(of_key).map(|n| events[n].event.id()).collect();
        let arrived: Vec<EventId> =
            stored.iter().copied().filter(|id| expected.contains(id)).collect();
        // This cluster does not drop what the client repeats.
        let mut first = Vec::new();
        for id in arrived {
            if !first.contains(&id) {
                first.push(id);
            }
        }
        assert_eq!(first, expected, "key {key}");
    }
}

/// A topic that the login may not even see.
#[tokio::test(flavor = "multi_thread")]
async fn a_topic_without_permission_is_waited_for() {
    let cluster = MockCluster::new(1).expect("a cluster");
    cluster.create_topic(TOPIC, 1, 1).expect("made");
    let forbidden = RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    cluster.topic_error(TOPIC, forbidden).expect("told");
    let sink = sink(&KafkaConfig { topic: TOPIC.into(), ..config(cluster.bootstrap_servers()) });
    let event = one("a", 1);
    let error = fail(&sink, &event).await;
    assert_eq!(error.kind(), THROTTLED);
    assert!(error.chain().contains("grant it Write"), "{}", error.chain());
    assert!(sink.check().await.is_err());
    cluster.topic_error(TOPIC, RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR).expect("told");
    confirm(&sink, &event).await;
}

/// One of two brokers is gone, with the only copy of a topic.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_gone_does_not_hold_up_the_others_topics() {
    let cluster = MockCluster::new(2).expect("a cluster");
    for (topic, leader) in [("a", 1), ("b", 2)] {
        cluster.create_topic(topic, 1, 1).expect("made");
        cluster.partition_leader(topic, 0, Some(leader)).expect("moved");
    }
    let template = KafkaConfig { topic: "{key}".into(), ..config(cluster.bootstrap_servers()) };
    let sink = sink(&template);
    let events = [one("a", 1), one("b", 2), one("a", 3)];
    assert!(all_confirmed(&publish(&sink, &[one("a", 0), one("b", 0)]).await));
    cluster.broker_down(1).expect("down");
    let outcomes = publish(&sink, &events).await;
    assert!(matches!(outcomes[1], Outcome::Confirmed), "{outcomes:?}");
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    match &outcomes[0] {
        // Not transient: it would be given up while others go on.
        Outcome::Failed(error) => assert_eq!(error.kind(), THROTTLED, "{}", error.chain()),
        other => panic!("{other:?}"),
    }
    cluster.broker_up(1).expect("up");
    let until = Instant::now() + PATIENCE;
    while !all_confirmed(&publish(&sink, &events).await) {
        assert!(Instant::now() < until, "it is there again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_overtakes_an_event_that_is_refused_in_the_middle() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&config(middle.brokers()));
    let events: Vec<Record> = (0..4).map(|n| one("a", n)).collect();
    middle.orders().poisoned.insert(events[1].event.id(), ReceiverFault::Refusing);
    confirm(&sink, &events[0]).await;
    for _ in 0..3 {
        first_failed(&publish(&sink, &events[1..]).await);
        assert_eq!(stored_ids(&brokers).await, ids(&events[..1]));
    }
    middle.orders().poisoned.clear();
    let until = Instant::now() + PATIENCE;
    while !all_confirmed(&publish(&sink, &events[1..]).await) {
        // The request that he spoiled is spoiled for good; another attempt is another request.
        assert!(Instant::now() < until);
    }
    assert_eq!(stored_ids(&brokers).await, ids(&events));
}

/// The client repeats what had no answer, and the broker drops the repetition.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_was_cut_off_doubles_nothing() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&KafkaConfig { timeout_ms: 20_000, ..config(middle.brokers()) });
    let events: Vec<Record> = (0..10).map(|n| one("a", n)).collect();
    for event in &events {
        middle.orders().cut_next = true;
        confirm(&sink, event).await;
    }
    assert_eq!(stored_ids(&brokers).await, ids(&events));
}

/// Answers are lost for good, whatever the client repeats: the events come again, in order.
#[tokio::test(flavor = "multi_thread")]
async fn events_whose_answers_were_lost_come_again_and_none_overtakes() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&KafkaConfig { timeout_ms: 1_500, ..config(middle.brokers()) });
    let events: Vec<Record> = (0..60).map(|n| one(&format!("k{}", n % 5), n)).collect();
    let mut pending = events.clone();
    let until = Instant::now() + PATIENCE * 3;
    for attempt in 0.. {
        if attempt < 2 {
            middle.orders().spoil_next(2, ReceiverFault::LosingConfirms);
        }
        let outcomes = publish(&sink, &pending).await;
        if attempt == 0 {
            assert!(!all_confirmed(&outcomes));
        }
        let open = pending.into_iter().zip(outcomes);
        let open = open.filter(|(_, outcome)| !matches!(outcome, Outcome::Confirmed));
        pending = open.map(|(event, _)| event).collect();
        if pending.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "all arrive");
    }
    let mut first: HashMap<EventId, usize> = HashMap::new();
    for (place, id) in stored_ids(&brokers).await.into_iter().enumerate() {
        first.entry(id).or_insert(place);
    }
    for key in 0..5 {
        let places = events.iter().skip(key).step_by(5).map(|one| first[&one.event.id()]);
        assert!(places.is_sorted(), "key {key}");
    }
}

/// A call is dropped while its event waits in the client for a broker that is gone.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dropped_call_had_not_sent_is_never_sent() {
    let mut broker = broker().await;
    let brokers = brokers(&broker);
    let sink = sink(&KafkaConfig { timeout_ms: 60_000, ..config(&*brokers) });
    let events = [one("a", 0), one("a", 1), one("a", 2)];
    confirm(&sink, &events[0]).await;
    let mut stopped = blocking(move || {
        broker.stop().expect("it ends");
        broker
    })
    .await;
    let call = publish(&sink, &events[1..2]);
    let dropped = tokio::time::timeout(Duration::from_millis(300), call).await;
    assert!(dropped.is_err(), "nobody took it, yet {dropped:?}");
    let _running = blocking(move || {
        stopped.start_again().expect("it starts");
        stopped
    })
    .await;
    confirm(&sink, &events[2]).await;
    // As long as the client takes to find a broker again.
    let until = Instant::now() + Duration::from_millis(2_500);
    while Instant::now() < until {
        assert_eq!(stored_ids(&brokers).await, [events[0].event.id(), events[2].event.id()]);
    }
}

/// A lost lease drops the calls of one partition; the others' events are on their way by the same
/// producer.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_call_repeats_nothing_of_others_that_was_on_its_way() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&KafkaConfig { timeout_ms: 60_000, ..config(middle.brokers()) });
    confirm(&sink, &one("a", 0)).await;
    // On a busy machine answers may take too long; not every time.
    for round in 0..20 {
        middle.hold(true);
        middle.orders().waiting = false;
        let others: Vec<Record> = (0..5).map(|n| one(&format!("b{n}"), n)).collect();
        let (dropped, mut outcomes) = (one("a", round + 1), Vec::new());
        tokio::join!(async { outcomes = publish(&sink, &others).await }, async {
            while !middle.orders().waiting {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let call = publish(&sink, std::slice::from_ref(&dropped));
            let call = tokio::time::timeout(Duration::from_millis(50), call).await;
            assert!(call.is_err(), "nobody answered, yet {call:?}");
            middle.hold(false);
        });
        let open = others.iter().zip(&outcomes);
        let open = open.filter(|(_, outcome)| !matches!(outcome, Outcome::Confirmed));
        for (event, _) in open {
            confirm(&sink, event).await;
        }
        let stored = stored_ids(&brokers).await;
        let times = |event: &Record| stored.iter().filter(|id| **id == event.event.id()).count();
        assert!(others.iter().all(|event| times(event) > 0), "{outcomes:?}");
        if others.iter().all(|event| times(event) == 1) {
            return;
        }
    }
    panic!("each time something was repeated");
}

/// An answer that comes after the end confirms nothing.
#[tokio::test(flavor = "multi_thread")]
async fn closing_ends_what_is_under_way_without_confirming_it() {
    let broker = broker().await;
    let middle = Middle::before(broker.address()).await;
    let sink = sink(&KafkaConfig { timeout_ms: 60_000, ..config(middle.brokers()) });
    confirm(&sink, &one("a", 0)).await;
    middle.hold(true);
    middle.orders().waiting = false;
    let event = [one("a", 1)];
    let (outcomes, ()) = tokio::join!(publish(&sink, &event), async {
        while !middle.orders().waiting {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        sink.close().await.expect("closed");
        middle.hold(false);
    });
    let error = first_failed(&outcomes);
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.chain().contains("unknown"), "{}", error.chain());
    let error = fail(&sink, &event[0]).await;
    assert!(error.chain().contains("closed"), "{}", error.chain());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_without_broker_is_named_as_such() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let settings = KafkaConfig { connect_timeout_ms: 500, ..config(&*address) };
    // First nobody answers there, then nobody is there.
    let silent = sink(&settings).check().await.expect_err("no broker").chain();
    assert!(silent.contains("no broker answers in time"), "{silent}");
    drop(listener);
    let events: Vec<Record> = (0..300).map(|n| one(&format!("k{n}"), n)).collect();
    let outcomes = publish(&sink(&settings), &events).await;
    assert!(outcomes.iter().all(|one| matches!(
        one, Outcome::Failed(error) if error.kind() == ErrorKind::Transient
    )));
}

#[tokio::test(flavor = "multi_thread")]
async fn cloud_events_follow_the_binding_for_kafka() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    for encoding in [Encoding::CloudEventsBinary, Encoding::CloudEventsStructured] {
        confirm(&sink(&KafkaConfig { encoding, ..config(&*brokers) }), &one("a", 1)).await;
    }
    let found = records(&brokers, TOPIC).await;
    assert_eq!(header(&found[0], "ce_specversion"), Some("1.0"));
    assert_eq!(header(&found[0], "ce_id"), header(&found[0], "postrider-id"));
    assert_eq!(header(&found[1], "ce_id"), None);
    assert_eq!(header(&found[1], "content-type"), Some("application/cloudevents+json"));
    let body = String::from_utf8_lossy(found[1].payload().expect("one")).into_owned();
    assert!(body.contains("\"specversion\":\"1.0\""), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_has_the_time_that_the_settings_say() {
    let broker = broker().await;
    let brokers = brokers(&broker);
    let event = one("a", 1);
    confirm(&sink(&config(&*brokers)), &event).await;
    let appended = KafkaConfig { record_time: RecordTime::Appended, ..config(&*brokers) };
    confirm(&sink(&appended), &event).await;
    let found = records(&brokers, TOPIC).await;
    let time = |place: usize| found[place].timestamp().to_millis().expect("a time");
    let appended_at = i64::try_from(event.appended_at.as_millis()).expect("small");
    assert!(time(0) > appended_at, "now is later than the sample");
    assert_eq!(time(1), appended_at);
}
