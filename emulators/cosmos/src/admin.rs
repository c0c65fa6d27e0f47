//! What tests do to the account beside the service's own interface, under `/_emu/`.
//!
//! What lives here: containers with a number of ranges, splits, merges, regions, faults, counters.
//! What does not: what a client of the service can do by itself.
//! Invariant: an answer comes when what was asked for has happened, never before.

use std::time::Duration;

use azure_core::http::Method;
use azure_data_cosmos_driver::error::CosmosError;
use azure_data_cosmos_driver::in_memory_emulator::{ContainerConfig, ManualControlPlaneResult};
use azure_data_cosmos_driver::models::PartitionKeyDefinition;
use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::counts::Counts;
use crate::faults::Fault;
use crate::places;
use crate::service::{Service, error, json as answered, locked};

/// A container to make, and its database if that is missing.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NewContainer {
    database: String,
    container: String,
    /// A path, or several of a hierarchical key.
    #[serde(default = "partition_key")]
    partition_key: Vec<String>,
    /// How many ranges it has.
    #[serde(default = "ranges")]
    ranges: u32,
    /// Request units for each second; without it nothing is ever throttled.
    #[serde(default)]
    throughput: Option<u64>,
    /// Seconds to live for documents that name none; -1 for ever. Without it `ttl` has no effect.
    #[serde(default = "for_ever")]
    default_ttl: Option<i64>,
}

#[expect(clippy::unnecessary_wraps, reason = "null in its place means none")]
const fn for_ever() -> Option<i64> {
    Some(-1)
}

fn partition_key() -> Vec<String> {
    vec!["/partitionKey".to_owned()]
}

const fn ranges() -> u32 {
    4
}

/// A range to split, or two to merge.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Ranges {
    database: String,
    container: String,
    ranges: Vec<u32>,
    /// For so long its documents are out of reach, with 410 and 1007.
    #[serde(default)]
    lock_ms: u64,
}

/// A region, and whether it can be reached; or the one that takes writes from now on.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Region {
    name: String,
}

/// The next read of a partition key finds the session not available, 404 with 1002.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Session {
    region: String,
    database: String,
    container: String,
    partition_key: String,
}

/// Why something was not done.
struct Refused(String);

impl From<CosmosError> for Refused {
    fn from(error: CosmosError) -> Self {
        Self(error.to_string())
    }
}

impl From<serde_json::Error> for Refused {
    fn from(error: serde_json::Error) -> Self {
        Self(error.to_string())
    }
}

/// Does what is asked for.
pub(crate) async fn answer(
    service: &Service,
    method: &hyper::Method,
    path: &str,
    content: &Bytes,
) -> Response<Full<Bytes>> {
    match done(service, method, path, content).await {
        Ok(Some(content)) => answered(200, &content),
        Ok(None) => error(404, None, "there is no such command"),
        Err(Refused(why)) => error(400, None, &why),
    }
}

async fn done(
    service: &Service,
    method: &hyper::Method,
    path: &str,
    content: &Bytes,
) -> Result<Option<Value>, Refused> {
    let store = service.emulator.store();
    let done = match (method.as_str(), path) {
        ("POST", "containers") => {
            create(service, parsed(content)?).await?;
            json!({})
        }
        ("POST", "split") => split(service, parsed(content)?).await?,
        ("POST", "merge") => merge(service, parsed(content)?).await?,
        ("POST", "regions/offline") => {
            let Region { name } = parsed(content)?;
            store.set_region_offline(&name)?;
            service.settled(&name).await;
            json!({})
        }
        ("POST", "regions/online") => {
            let Region { name } = parsed(content)?;
            store.set_region_online(&name)?;
            service.settled(&name).await;
            json!({})
        }
        ("POST", "regions/write") => {
            store.set_write_region(&parsed::<Region>(content)?.name)?;
            json!({})
        }
        ("POST", "session") => {
            let Session { region, database, container, partition_key } = parsed(content)?;
            let key = json!([partition_key]).to_string();
            store.force_session_not_available(&region, &database, &container, &key)?;
            json!({})
        }
        ("POST", "faults") => {
            locked(&service.faults).add(parsed::<Fault>(content)?);
            json!({})
        }
        ("GET", "faults") => serde_json::to_value(locked(&service.faults).waiting())?,
        ("DELETE", "faults") => {
            locked(&service.faults).clear();
            json!({})
        }
        ("GET", "requests") => serde_json::to_value(&*locked(&service.counts))?,
        ("DELETE", "requests") => {
            *locked(&service.counts) = Counts::default();
            json!({})
        }
        _ => return Ok(None),
    };
    Ok(Some(done))
}

fn parsed<T: DeserializeOwned>(content: &Bytes) -> Result<T, Refused> {
    Ok(serde_json::from_slice(content)?)
}

async fn create(service: &Service, new: NewContainer) -> Result<(), Refused> {
    let mut config = ContainerConfig::new().with_partition_count(new.ranges);
    if let Some(throughput) = new.throughput {
        config = config.with_throughput(throughput);
    }
    let config = config.build()?;
    let paths = new.partition_key.into_iter().map(Into::into).collect();
    let keys = PartitionKeyDefinition::new(paths);
    // Through the door that clients use: it refuses what is there, which the store would replace.
    let database = json!({ "id": new.database });
    match service.ask(Method::Post, "/dbs", Some(&database)).await? {
        (201 | 409, _) => {}
        (status, _) => return Err(Refused(format!("the database was refused by {status}"))),
    }
    let path = format!("/dbs/{}/colls/{}", new.database, new.container);
    if service.ask(Method::Get, &path, None).await?.0 != 404 {
        return Err(Refused("the container is there already".to_owned()));
    }
    let store = service.emulator.store();
    store.create_container_with_config(&new.database, &new.container, keys, config);
    if let Some(default_ttl) = new.default_ttl {
        let (_, mut made) = service.ask(Method::Get, &path, None).await?;
        made["defaultTtl"] = default_ttl.into();
        let (status, _) = service.ask(Method::Put, &path, Some(&made)).await?;
        if status != 200 {
            return Err(Refused(format!("the time to live was refused by {status}")));
        }
    }
    Ok(())
}

async fn split(service: &Service, asked: Ranges) -> Result<Value, Refused> {
    let Ranges { database, container, ranges, lock_ms } = asked;
    let [range] = ranges[..] else { return Err(Refused("name one range".to_owned())) };
    let _alone = service.changing.lock().await;
    let store = service.emulator.store();
    let at = store.midpoint_split_epk(&database, &container, range)?;
    let lock = Duration::from_millis(lock_ms);
    let children = store.split_partition_and_wait(&database, &container, range, at, lock).await?;
    let mut history = service.history.write().await;
    let mut parts = Vec::new();
    for &child in &children {
        let bounds = places::bounds(service, &database, &container, child).await;
        let bounds = bounds.ok_or_else(|| Refused(format!("there is no range {child}")))?;
        parts.push((child, bounds));
    }
    history.entry((database, container)).or_default().split(range, parts);
    Ok(json!({ "ranges": children }))
}

/// While the ranges are locked, requests to them get 410 and 1007; while their documents get other
/// numbers, requests wait.
async fn merge(service: &Service, asked: Ranges) -> Result<Value, Refused> {
    let Ranges { database, container, ranges, lock_ms } = asked;
    let [one, other] = ranges[..] else { return Err(Refused("name two ranges".to_owned())) };
    let _alone = service.changing.lock().await;
    let requests = service.history.write().await;
    let mut parts = Vec::new();
    for range in [one, other] {
        parts.push(places::before(service, &database, &container, range).await.map_err(Refused)?);
    }
    let store = service.emulator.store();
    let merging = store.begin_manual_merge_partitions(&database, &container, one, other)?;
    drop(requests);
    tokio::time::sleep(Duration::from_millis(lock_ms)).await;
    let mut history = service.history.write().await;
    let ManualControlPlaneResult::Merge(child) = merging.complete().await? else {
        return Err(Refused("the ranges were not merged".to_owned()));
    };
    let fates = history.entry((database.clone(), container.clone())).or_default();
    let noted = places::after(service, &database, &container, child, parts, fates).await;
    noted.map_err(Refused)?;
    Ok(json!({ "ranges": [child] }))
}
