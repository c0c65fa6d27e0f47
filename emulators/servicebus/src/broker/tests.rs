//! Queues, topics and sessions without a wire.
//!
//! What lives here: what becomes of messages, step by step. What does not: frames.
//! Invariant: time is moved, never waited for.

use std::time::Duration;

use fe2o3_amqp_types::messaging::{Header, MessageId, Properties};

use super::message::{Message, time};
use super::queue::{Delivery, Mode, Settlement, State};
use super::*;
use crate::config::Topic;

const SECOND: Duration = Duration::from_secs(1);

fn broker() -> Broker {
    let entity = Entity::default;
    let lock_duration = 30 * SECOND;
    let sessions = Entity { requires_session: true, lock_duration, ..entity() };
    let topic = Topic::default()
        .with_subscription("plain", entity())
        .with_subscription("sessions", sessions.clone());
    Broker::new(
        &Config::default()
            .with_queue("plain", Entity { max_delivery_count: 2, lock_duration, ..entity() })
            .with_queue("sessions", sessions)
            .with_queue("small", Entity { max_entity_bytes: 100, ..entity() })
            .with_queue(
                "detecting",
                Entity { duplicate_detection_window: Some(20 * SECOND), ..entity() },
            )
            .with_topic("topic", topic),
    )
}

fn message(id: &str) -> Message {
    let properties =
        Properties { message_id: Some(MessageId::String(id.to_owned())), ..Properties::default() };
    Message { properties, size: 40, ..Message::default() }
}

fn in_session(id: &str, session: &str) -> Message {
    let mut message = message(id);
    message.properties.group_id = Some(session.to_owned());
    message
}

fn send(broker: &Broker, path: &str, message: Message) -> Submitted {
    broker.submit(path, vec![message]).expect("it is taken")
}

fn next(broker: &Broker, path: &str, link: LinkId) -> Option<Delivery> {
    broker
        .with(path, |queue, now_ms| Ok(queue.next(link, None, Mode::PeekLock, now_ms)))
        .expect("the queue is there")
}

fn settle(
    broker: &Broker,
    path: &str,
    delivery: &Delivery,
    how: Settlement,
) -> Result<(), Refusal> {
    broker.with(path, |queue, now_ms| queue.settle(delivery.token, how, now_ms))
}

fn ids(broker: &Broker, path: &str) -> Vec<String> {
    let ids = broker.look(path, |queue| {
        queue.messages().filter_map(|stored| stored.message.message_id()).collect()
    });
    ids.expect("the queue is there")
}

#[test]
fn a_locked_message_is_nobody_elses_until_its_lock_ends() {
    let broker = broker();
    send(&broker, "plain", message("a"));
    let first = next(&broker, "plain", 1).expect("it is ready");
    assert!(next(&broker, "plain", 2).is_none());
    broker.clock.advance(31 * SECOND);
    let second = next(&broker, "plain", 2).expect("it is ready again");
    let lost = settle(&broker, "plain", &first, Settlement::Complete).expect_err("it was lost");
    assert_eq!(lost.condition, condition::MESSAGE_LOCK_LOST);
    settle(&broker, "plain", &second, Settlement::Complete).expect("this one holds it");
    assert_eq!(ids(&broker, "plain"), [""; 0]);
}

#[test]
fn too_many_deliveries_end_among_the_dead_letters() {
    let broker = broker();
    send(&broker, "plain", message("a"));
    for _ in 0..2 {
        let delivery = next(&broker, "plain", 1).expect("it is ready");
        let abandon = Settlement::Abandon(Vec::new());
        settle(&broker, "plain", &delivery, abandon).expect("it is held");
    }
    assert!(next(&broker, "plain", 1).is_none());
    assert_eq!(ids(&broker, "plain/$DeadLetterQueue"), ["a"]);
    // There it stays, however often it is given back.
    for _ in 0..5 {
        let delivery = next(&broker, "plain/$deadletterqueue", 1).expect("it is ready");
        let abandon = Settlement::Abandon(Vec::new());
        settle(&broker, "plain/$deadletterqueue", &delivery, abandon).expect("it is held");
    }
    assert_eq!(ids(&broker, "plain/$DeadLetterQueue"), ["a"]);
}

#[test]
fn a_release_does_not_count() {
    let broker = broker();
    send(&broker, "plain", message("a"));
    for _ in 0..5 {
        let delivery = next(&broker, "plain", 1).expect("it is ready");
        settle(&broker, "plain", &delivery, Settlement::Release).expect("it is held");
    }
    assert_eq!(ids(&broker, "plain"), ["a"]);
}

#[test]
fn a_deferred_message_comes_by_its_number_alone_and_stays_deferred() {
    let broker = broker();
    let number = send(&broker, "plain", message("a")).sequence_numbers[0];
    let delivery = next(&broker, "plain", 1).expect("it is ready");
    settle(&broker, "plain", &delivery, Settlement::Defer(Vec::new())).expect("it is held");
    assert!(next(&broker, "plain", 1).is_none());
    let by_number = |numbers: &[i64]| {
        broker.with("plain", |queue, now_ms| {
            queue.receive_deferred(numbers, None, Mode::PeekLock, now_ms)
        })
    };
    assert!(by_number(&[number + 1]).is_err());
    // Asked for twice, it comes once.
    let taken = by_number(&[number, number]).expect("it is there");
    assert_eq!(taken.len(), 1);
    assert!(by_number(&[number]).is_err(), "it is locked");
    broker.clock.advance(31 * SECOND);
    broker.advance();
    let state = broker.look("plain", |queue| queue.messages().map(|one| one.state).collect());
    assert_eq!(state, Some(vec![State::Deferred]));
}

#[test]
fn repeated_ids_are_dropped_within_the_window_alone() {
    let broker = broker();
    assert_eq!(send(&broker, "detecting", message("a")).duplicates, 0);
    assert_eq!(send(&broker, "detecting", message("a")).duplicates, 1);
    broker.clock.advance(19 * SECOND);
    assert_eq!(send(&broker, "detecting", message("a")).duplicates, 1);
    broker.clock.advance(SECOND);
    assert_eq!(send(&broker, "detecting", message("a")).duplicates, 0);
    assert_eq!(ids(&broker, "detecting"), ["a", "a"]);
}

#[test]
fn a_batch_is_taken_whole_or_not_at_all() {
    let broker = broker();
    let mut long = message("b");
    long.properties.message_id = Some(MessageId::String("x".repeat(129)));
    let refusal = broker.submit("plain", vec![message("a"), long]).expect_err("the id is long");
    assert_eq!(refusal.condition, condition::ARGUMENT_ERROR);
    assert_eq!(ids(&broker, "plain"), [""; 0]);
    let refusal = broker.submit("small", vec![message("a"), message("b"), message("c")]);
    assert_eq!(refusal.expect_err("it is full").condition, condition::RESOURCE_LIMIT);
    assert_eq!(ids(&broker, "small"), [""; 0]);
    broker.submit("small", vec![message("a"), message("b")]).expect("there is room for two");
}

#[test]
fn a_sessions_holder_alone_gets_its_messages_and_loses_them_with_it() {
    let broker = broker();
    for (id, session) in [("1", "a"), ("2", "b"), ("3", "a")] {
        send(&broker, "sessions", in_session(id, session));
    }
    let accept = |id: Option<&str>, link| {
        broker.with("sessions", |queue, now_ms| match id {
            Some(id) => queue.accept_session(id, link, now_ms).map(|granted| Some(granted.id)),
            None => Ok(queue.accept_next_session(link, now_ms).map(|granted| granted.id)),
        })
    };
    let next = |session: &str, link| {
        broker.with("sessions", |queue, now_ms| {
            Ok(queue.next(link, Some(session), Mode::PeekLock, now_ms))
        })
    };
    assert_eq!(accept(None, 1), Ok(Some("a".to_owned())));
    assert_eq!(accept(None, 2), Ok(Some("b".to_owned())));
    assert_eq!(accept(None, 3), Ok(None));
    let taken = accept(Some("a"), 3).expect_err("it is held");
    assert_eq!(taken.condition, condition::SESSION_CANNOT_BE_LOCKED);
    assert!(next("a", 2).expect("the queue is there").is_none());
    let delivery = next("a", 1).expect("the queue is there").expect("it waits");
    broker.clock.advance(31 * SECOND);
    assert_eq!(accept(Some("a"), 3), Ok(Some("a".to_owned())));
    assert!(settle(&broker, "sessions", &delivery, Settlement::Complete).is_err());
    assert!(next("a", 1).expect("the queue is there").is_none());
    assert!(next("a", 3).expect("the queue is there").is_some());
}

#[test]
fn a_session_of_which_nothing_is_left_is_forgotten() {
    let broker = broker();
    let accept = |link| {
        broker.with("sessions", |queue, now_ms| queue.accept_session("a", link, now_ms).map(drop))
    };
    let state = |state: Option<&'static str>| {
        broker.with("sessions", |queue, _| {
            queue.set_session_state("a", state.map(|text| text.as_bytes().into()))
        })
    };
    let release = |link| {
        broker.with("sessions", |queue, now_ms| {
            queue.release_session("a", link, now_ms);
            Ok(queue.sessions.len())
        })
    };
    assert!(state(Some("x")).is_err(), "nobody holds it");
    accept(1).expect("it is free");
    state(Some("x")).expect("it is held");
    assert_eq!(release(1), Ok(1));
    accept(2).expect("it is free");
    state(None).expect("it is held");
    assert_eq!(release(2), Ok(0));
}

#[test]
fn a_topic_copies_to_each_subscription_and_keeps_nothing() {
    let broker = broker();
    send(&broker, "Topic", in_session("1", "a"));
    send(&broker, "topic", message("2"));
    assert_eq!(ids(&broker, "topic"), [""; 0]);
    assert_eq!(ids(&broker, "topic/Subscriptions/plain"), ["1", "2"]);
    assert_eq!(ids(&broker, "topic/subscriptions/sessions"), ["1"]);
    // Without a session it can't be received there.
    assert_eq!(ids(&broker, "topic/subscriptions/sessions/$deadletterqueue"), ["2"]);
    assert!(broker.submit("topic/subscriptions/plain", vec![message("3")]).is_err());
}

#[test]
fn a_scheduled_message_appears_when_it_is_due_unless_it_was_cancelled() {
    let broker = broker();
    let due_ms = broker.clock.now_ms() + 60_000;
    let later = |id: &str| {
        let mut message = message(id);
        message.annotations.insert(message::SCHEDULED_TIME.into(), time(due_ms));
        message
    };
    for path in ["plain", "topic"] {
        let number = send(&broker, path, later("a")).sequence_numbers[0];
        let cancelled = send(&broker, path, later("b")).sequence_numbers[0];
        broker.with(path, |queue, _| queue.cancel(&[cancelled])).expect("it is scheduled");
        let again = broker.with(path, |queue, _| queue.cancel(&[number, cancelled]));
        assert!(again.is_err(), "one of the two is gone, so neither is cancelled");
    }
    broker.clock.advance(59 * SECOND);
    broker.advance();
    assert!(next(&broker, "plain", 1).is_none());
    assert_eq!(ids(&broker, "topic/subscriptions/plain"), [""; 0]);
    broker.clock.advance(2 * SECOND);
    broker.advance();
    assert!(next(&broker, "plain", 1).is_some());
    assert_eq!(ids(&broker, "topic/subscriptions/plain"), ["a"]);
}

#[test]
fn a_message_outlives_its_time_only_in_somebodys_hands() {
    let broker = broker();
    let mut short = message("a");
    short.header = Header { ttl: Some(10_000), ..Header::default() };
    send(&broker, "plain", short.clone());
    send(&broker, "plain", short);
    let held = next(&broker, "plain", 1).expect("it is ready");
    broker.clock.advance(11 * SECOND);
    broker.advance();
    assert_eq!(ids(&broker, "plain").len(), 1);
    settle(&broker, "plain", &held, Settlement::Release).expect("it is held");
    assert_eq!(ids(&broker, "plain").len(), 0);
}
