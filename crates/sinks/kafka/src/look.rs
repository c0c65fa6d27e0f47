//! What the brokers say about themselves and their topics.
//!
//! What lives here: whether a topic is there, where the brokers are, a topic's limit. What does
//! not: sending.
//! Invariant: a look waits only so long, off the runtime's threads, and makes a topic only where
//! the settings let the brokers do so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider_core::{Error, Result};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::FromClientConfig;
use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::metadata::Metadata;
use rdkafka::producer::Producer;

use crate::connect::Link;
use crate::error::{is_missing, question_error};
use crate::login::Login;

/// How often a topic that is being made is looked for.
const POLL: Duration = Duration::from_millis(50);
const LIMIT: &str = "max.message.bytes";
const POLICY: &str = "cleanup.policy";

/// Whether a topic takes events.
#[derive(Debug)]
pub(crate) enum Found {
    /// It does.
    There,
    /// The brokers know of none.
    Missing,
    /// They know of it, and say this.
    Refused(Code),
}

/// Looks for a topic, or at the brokers alone.
///
/// # Errors
/// `Transient` if no broker answers, or one is elsewhere and would be spoken to in the clear.
pub(crate) async fn look(
    link: &Arc<Link>,
    login: &Arc<Login>,
    topic: Option<&str>,
) -> Result<Found> {
    let (link, login) = (Arc::clone(link), Arc::clone(login));
    let topic = topic.map(str::to_owned);
    let looked = tokio::task::spawn_blocking(move || look_now(&link, &login, topic.as_deref()));
    looked.await.map_err(|error| Error::transient("look at Kafka").with_source(error))?
}

fn look_now(link: &Link, login: &Login, topic: Option<&str>) -> Result<Found> {
    let until = Instant::now() + login.patience();
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(POLL);
        let answer = link.producer().client().fetch_metadata(topic, left);
        let metadata = answer.map_err(|error| question_error(&error, link.trouble()))?;
        link.answered();
        permitted(login, &metadata)?;
        let Some(topic) = topic else { return Ok(Found::There) };
        let found = metadata.topics().iter().find(|one| one.name() == topic);
        let code = match found {
            None => Some(Code::UnknownTopicOrPartition),
            Some(one) => one.error().map(Code::from),
        };
        match code {
            None => {
                link.learn(topic);
                return Ok(Found::There);
            }
            // It is being made.
            Some(Code::LeaderNotAvailable) if Instant::now() < until => std::thread::sleep(POLL),
            Some(code) if is_missing(code) => return Ok(Found::Missing),
            Some(code) => return Ok(Found::Refused(code)),
        }
    }
}

fn permitted(login: &Login, metadata: &Metadata) -> Result<()> {
    let elsewhere = metadata.brokers().iter().find(|broker| !login.permits(broker.host()));
    match elsewhere {
        Some(broker) => Err(Error::transient(format!(
            "tls: the brokers say that one of them is {}, which is not on this machine, so its \
             connection has to be encrypted: say tls = true, or tls = false",
            broker.host()
        ))),
        None => Ok(()),
    }
}

/// The largest record that a topic takes, in the broker's own words, if it tells.
pub(crate) async fn limit(config: ClientConfig, topic: &str, patience: Duration) -> Option<String> {
    setting(config, topic, LIMIT, patience).await
}

/// Refuses a topic of notes of which the brokers keep each key's last one alone, if they tell.
///
/// # Errors
/// `Transient`, with the remedy.
pub(crate) async fn keeps_all(config: ClientConfig, topic: &str, patience: Duration) -> Result<()> {
    match setting(config, topic, POLICY, patience).await {
        Some(policy) if policy.contains("compact") => Err(Error::transient(format!(
            "transactions_topic: {topic} is compacted ({POLICY}={policy}), which deletes notes, so \
             that events may be sent twice; set {POLICY}=delete"
        ))),
        Some(_) | None => Ok(()),
    }
}

/// A topic's setting in the broker's own words, if it tells.
async fn setting(
    config: ClientConfig,
    topic: &str,
    name: &str,
    patience: Duration,
) -> Option<String> {
    let made = tokio::task::spawn_blocking(move || {
        AdminClient::<DefaultClientContext>::from_config(&config)
    });
    let admin = made.await.ok()?.ok()?;
    let options = AdminOptions::new().request_timeout(Some(patience));
    let asked = [ResourceSpecifier::Topic(topic)];
    let answer = admin.describe_configs(&asked, &options).await;
    // Its end waits for a thread.
    tokio::task::spawn_blocking(move || drop(admin));
    let told = answer.ok()?.into_iter().next()?.ok()?;
    told.get(name)?.value.clone()
}
