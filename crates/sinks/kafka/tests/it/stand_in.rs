//! What the broker of the tests does with transactions when it is stopped, by its client alone.
//!
//! What lives here: why it must not be trusted over a stop, and the way that makes up for it. What
//! does not: the sink, of which nothing runs here.
//! Invariant: no record is read as committed that the broker dropped, and who is behind the way
//! never hears that it was. If the first test fails, the broker keeps transactions by now: then the
//! fence of the way (`servers/src/kafka/way.rs`) has to go.

use postrider_servers::kafka::{Kafka as Broker, Way};
use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};

use crate::transactions::{NOTES, committed};
use crate::{PATIENCE, TOPIC, blocking, brokers, empty_broker, make_topic};

type Client = ThreadedProducer<rdkafka::producer::DefaultProducerContext>;

async fn broker() -> Broker {
    let broker = empty_broker().await;
    for topic in [TOPIC, NOTES] {
        make_topic(&brokers(&broker), topic, 1, &[]).await;
    }
    broker
}

/// One that has begun a transaction.
fn begun(brokers: &str, id: &str) -> Client {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("transactional.id", id);
    config.set("retry.backoff.ms", "50").set("log.connection.close", "false");
    let client: Client = config.create().expect("an address");
    client.init_transactions(PATIENCE).expect("a number");
    client.begin_transaction().expect("begun");
    client
}

/// Sends a record and waits until it is confirmed.
fn send(client: &Client, topic: &str, text: &str) {
    client.send(BaseRecord::to(topic).partition(0).key("k").payload(text)).expect("queued");
    client.flush(PATIENCE).expect("confirmed");
}

fn stop_and_start(broker: &mut Broker) {
    broker.stop().expect("it ends");
    broker.start_again().expect("it starts");
}

fn code(ended: Result<(), KafkaError>) -> Option<Code> {
    ended.err().and_then(|error| error.rdkafka_error_code())
}

async fn texts(brokers: &str, topic: &str) -> Vec<String> {
    let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into();
    let all = committed(brokers, topic).await;
    all.iter().map(|one| text(rdkafka::Message::payload(one))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_drops_what_is_open_at_a_stop_and_confirms_its_commit_and_forgets_its_fences() {
    let mut broker = broker().await;
    let address = brokers(&broker);
    let _running = blocking(move || {
        let address = brokers(&broker);
        let whole = begun(&address, "whole");
        send(&whole, TOPIC, "whole");
        send(&whole, NOTES, "whole");
        let half = begun(&address, "half");
        send(&half, TOPIC, "half");
        let fenced = begun(&address, "fenced");
        stop_and_start(&mut broker);
        whole.commit_transaction(PATIENCE).expect("it says that it is committed");
        send(&half, NOTES, "half");
        half.commit_transaction(PATIENCE).expect("it says that it is committed");
        let _later = begun(&address, "fenced");
        send(&fenced, TOPIC, "fenced");
        fenced.commit_transaction(PATIENCE).expect("it does not know the later one's id any more");
        broker
    })
    .await;
    assert_eq!(texts(&address, TOPIC).await, ["fenced"]);
    assert_eq!(texts(&address, NOTES).await, ["half"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_the_way_a_producer_of_before_a_stop_commits_nothing_and_hears_that_it_is_fenced() {
    let mut broker = broker().await;
    let address = brokers(&broker);
    let way = Way::start(broker.address()).expect("a way");
    let _running = blocking(move || {
        let by_way = way.address().to_string();
        let (whole, half) = (begun(&by_way, "whole"), begun(&by_way, "half"));
        send(&whole, TOPIC, "whole");
        send(&half, TOPIC, "half");
        let before = begun(&by_way, "before");
        send(&before, TOPIC, "before");
        before.commit_transaction(PATIENCE).expect("nothing was stopped yet");
        broker.stop().expect("it ends");
        broker.start_again().expect("it starts");
        way.fence().expect("it answers");
        assert_eq!(code(whole.commit_transaction(PATIENCE)), Some(Code::Fenced));
        let record = BaseRecord::to(NOTES).partition(0).key("k").payload("half");
        half.send(record).expect("queued");
        assert_eq!(code(half.commit_transaction(PATIENCE)), Some(Code::Fenced));
        let after = begun(&by_way, "whole");
        send(&after, TOPIC, "after");
        after.commit_transaction(PATIENCE).expect("one of after the stop");
        (broker, way)
    })
    .await;
    assert_eq!(texts(&address, TOPIC).await, ["before", "after"]);
    assert_eq!(texts(&address, NOTES).await, [""; 0]);
}
