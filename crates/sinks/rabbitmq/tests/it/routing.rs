//! What becomes of events that the broker takes to no queue, and of exchanges and queues.
//!
//! What lives here: returned messages, missing exchanges, declarations. What does not: what queues
//! and connections do in trouble.
//! Invariant: nothing counts as sent that is in no queue.

use lapin::ExchangeKind;
use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use postrider_core::{ErrorKind, Outcome, Record, Sink};
use postrider_sink_rabbitmq::{ExchangeType, QueueType, RabbitMqConfig, Unroutable};

use crate::{Broker, confirm, fail, one, publish, sink, stored};

#[tokio::test(flavor = "multi_thread")]
async fn an_event_that_no_queue_takes_is_waited_for_or_parks() {
    let broker = Broker::shared().await;
    let waiting = sink(&broker.config());
    let parking = sink(&RabbitMqConfig { unroutable: Unroutable::Park, ..broker.config() });
    let event = one("a", 1);
    let error = fail(&waiting, &event).await;
    assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
    let text = error.chain();
    assert!(text.contains("\"orders\"") && text.contains(&broker.exchange), "{text}");
    assert_eq!(fail(&parking, &event).await.kind(), ErrorKind::Permanent);
    assert!(broker.stored().await.is_empty());
    broker.bind("orders").await;
    confirm(&waiting, &event).await;
    confirm(&parking, &one("a", 2)).await;
    assert_eq!(broker.stored().await.len(), 2);
}

/// The broker confirms what it returned as well, and confirms many at once.
#[tokio::test(flavor = "multi_thread")]
async fn among_many_under_way_exactly_those_fail_that_were_returned() {
    let broker = Broker::shared().await;
    let taken = |key: usize| !key.is_multiple_of(3);
    for key in (0..90).filter(|key| taken(*key)) {
        broker.bind(&format!("k{key}")).await;
    }
    let sink = sink(&RabbitMqConfig { routing_key: "{key}".into(), ..broker.config() });
    for round in 0..20 {
        let events: Vec<Record> = (0..90).map(|key| one(&format!("k{key}"), round)).collect();
        let outcomes = publish(&sink, &events).await;
        for (key, outcome) in outcomes.iter().enumerate() {
            let confirmed = matches!(outcome, Outcome::Confirmed);
            assert_eq!(confirmed, taken(key), "round {round}, key {key}: {outcome:?}");
        }
    }
    assert_eq!(broker.stored().await.len(), 20 * 60);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_that_does_not_exist_fails_its_own_events_alone() {
    let broker = Broker::shared().await;
    broker.bind("orders").await;
    // Of the keys, one makes the exchange's name.
    let (prefix, last) = broker.exchange.split_at(broker.exchange.len() - 1);
    let exchange = format!("{prefix}{{key}}");
    let waiting = sink(&RabbitMqConfig { exchange: exchange.clone(), ..broker.config() });
    let events = [one("none", 1), one(last, 2), one("none", 3), one(last, 4)];
    let outcomes = publish(&waiting, &events).await;
    match &outcomes[0] {
        Outcome::Failed(error) => {
            assert_eq!(error.kind(), ErrorKind::Throttled { retry_after: None });
            assert!(error.chain().contains("does not exist"), "{}", error.chain());
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcomes[1], Outcome::Confirmed), "{outcomes:?}");
    assert!(matches!(outcomes[2], Outcome::HeldBack), "{outcomes:?}");
    assert!(matches!(outcomes[3], Outcome::Confirmed), "{outcomes:?}");
    assert_eq!(broker.ids().await, [events[1].event.id(), events[3].event.id()]);
    let parking = RabbitMqConfig { exchange, unroutable: Unroutable::Park, ..broker.config() };
    assert_eq!(fail(&sink(&parking), &events[0]).await.kind(), ErrorKind::Permanent);
}

/// The broker closes a channel for each event to an exchange that does not exist, and has 2,047
/// numbers for the channels of one connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_exchange_is_waited_for_however_many_events_it_refused() {
    let broker = Broker::shared().await;
    let exchange = format!("later-{}", broker.exchange);
    let sink = sink(&RabbitMqConfig { exchange: exchange.clone(), ..broker.config() });
    for round in 0..6 {
        let events: Vec<Record> = (0..512).map(|key| one(&format!("k{key}"), round)).collect();
        for outcome in publish(&sink, &events).await {
            let Outcome::Failed(error) = outcome else { panic!("{outcome:?}") };
            let text = error.chain();
            let kind = ErrorKind::Throttled { retry_after: None };
            assert_eq!(error.kind(), kind, "round {round}: {text}");
            // Where the numbers end, the rest of the call is for another connection.
            let told = text.contains("does not exist") || text.contains("makes another");
            assert!(told, "round {round}: {text}");
        }
    }
    let (name, options) = (exchange.as_str().into(), ExchangeDeclareOptions::default());
    let none = FieldTable::default();
    let declared =
        broker.channel.exchange_declare(name, ExchangeKind::Fanout, options, none.clone());
    declared.await.expect("made");
    let (queue, name) = (broker.queue.as_str().into(), exchange.as_str().into());
    let bound = broker.channel.queue_bind(queue, name, "".into(), Default::default(), none);
    bound.await.expect("bound");
    let events: Vec<Record> = (0..512).map(|key| one(&format!("k{key}"), 9)).collect();
    let mut sent = 0;
    for _ in 0..2 {
        // One call may meet the end of the numbers; it does not meet it twice.
        let outcomes = publish(&sink, &events).await;
        sent = outcomes.iter().filter(|one| matches!(one, Outcome::Confirmed)).count();
    }
    assert_eq!(sent, events.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_exchange_takes_the_queues_name() {
    let broker = Broker::shared().await;
    let config = RabbitMqConfig {
        exchange: String::new(),
        routing_key: broker.queue.clone(),
        ..broker.config()
    };
    let event = one("a", 1);
    confirm(&sink(&config), &event).await;
    assert_eq!(broker.ids().await, [event.event.id()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named_by_the_check_and_made_only_where_asked() {
    let broker = Broker::shared().await;
    let new = |what: &str| format!("{what}-of-{}", broker.exchange);
    let wanted = RabbitMqConfig {
        exchange: new("exchange"),
        queue: Some(new("queue")),
        routing_key: "{topic}.{type}".into(),
        binding_key: "orders.*".into(),
        ..broker.config()
    };
    let error = sink(&wanted).check().await.expect_err("no exchange").chain();
    assert!(error.starts_with(&format!("exchange: {:?}", wanted.exchange)), "{error}");
    let queue_missing = RabbitMqConfig { exchange: broker.exchange.clone(), ..wanted.clone() };
    let error = sink(&queue_missing).check().await.expect_err("no queue").chain();
    assert!(error.starts_with(&format!("queue: {:?}", new("queue"))), "{error}");
    assert_eq!(
        fail(&sink(&wanted), &one("a", 1)).await.kind(),
        ErrorKind::Throttled { retry_after: None }
    );

    let made = RabbitMqConfig { declare: true, ..wanted.clone() };
    let event = one("a", 2);
    confirm(&sink(&made), &event).await;
    sink(&wanted).check().await.expect("both are there now");
    sink(&made).check().await.expect("made again, they are the same");
    let found = stored(&broker.channel, &new("queue")).await;
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].id, event.event.id());
    let other = RabbitMqConfig { exchange_type: ExchangeType::Fanout, ..made.clone() };
    let error = sink(&other).check().await.expect_err("another type").chain();
    assert!(error.contains("exchange") && error.contains("type"), "{error}");
    let other = RabbitMqConfig { queue_type: QueueType::Classic, ..made };
    let error = sink(&other).check().await.expect_err("another type").chain();
    assert!(error.contains("x-queue-type"), "{error}");
}
