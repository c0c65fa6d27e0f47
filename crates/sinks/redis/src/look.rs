//! What a server says of itself, and what follows for events.
//!
//! What lives here: reading `INFO`, `CONFIG GET` and a stream's type; advice. What does not:
//! changing anything at the server.
//! Invariant: a server that does not tell is taken as it is: nothing here keeps events back.

use std::collections::HashMap;

use postrider_core::{Error, Result};
use redis::aio::MultiplexedConnection;
use redis::{Value, cmd};

use crate::error::redis_error;

/// What a replica calls itself.
const REPLICA: &str = "slave";

/// Largest text that the server takes, in bytes, if it tells.
pub(crate) async fn max_text_bytes(connection: &mut MultiplexedConnection) -> Option<usize> {
    setting(connection, "proto-max-bulk-len").await?.parse().ok()
}

/// A setting of the server. Many providers forbid to ask.
async fn setting(connection: &mut MultiplexedConnection, name: &str) -> Option<String> {
    let asked = cmd("CONFIG").arg("GET").arg(name).query_async(connection).await;
    let mut found: HashMap<String, String> = asked.ok()?;
    found.remove(name)
}

/// Whether the server says that it is a replica. Logins may be permitted to ask in one way only.
pub(crate) async fn is_replica(connection: &mut MultiplexedConnection) -> bool {
    let asked = cmd("INFO").arg("replication").query_async(connection).await;
    let info: Option<String> = asked.ok();
    if let Some(role) = info.and_then(|info| fields(&info).remove("role")) {
        return role == REPLICA;
    }
    let role: Option<Vec<Value>> = cmd("ROLE").query_async(connection).await.ok();
    let role = role.and_then(|told| told.into_iter().next());
    matches!(role, Some(Value::BulkString(role)) if role == REPLICA.as_bytes())
}

/// The error of a server that is a replica.
pub(crate) fn replica() -> Error {
    Error::transient("url: the server is a replica, which takes no events; name the primary")
}

/// What the server tells.
pub(crate) struct Look {
    info: HashMap<String, String>,
    fsync: Option<String>,
    /// `no-appendfsync-on-rewrite`.
    no_fsync_on_rewrite: Option<String>,
}

impl Look {
    /// Asks the server.
    pub(crate) async fn at(connection: &mut MultiplexedConnection) -> Self {
        let info: Option<String> = cmd("INFO").query_async(connection).await.ok();
        let fsync = setting(connection, "appendfsync").await;
        let no_fsync_on_rewrite = setting(connection, "no-appendfsync-on-rewrite").await;
        Self { info: fields(&info.unwrap_or_default()), fsync, no_fsync_on_rewrite }
    }

    fn is(&self, name: &str, value: &str) -> bool {
        self.info.get(name).is_some_and(|found| found == value)
    }

    /// Why the server can take no event, if so.
    ///
    /// # Errors
    /// Transient, with the remedy.
    pub(crate) fn takes_events(&self) -> Result<()> {
        if self.is("cluster_enabled", "1") {
            return Err(Error::transient(
                "url: the server is a node of a Redis Cluster, which this sink can't use",
            ));
        }
        if self.is("role", REPLICA) {
            return Err(replica());
        }
        Ok(())
    }

    /// What confirmed events may not survive there, and what lets events come twice.
    pub(crate) fn advice(&self, remembers: bool) -> Vec<String> {
        let mut advice = Vec::new();
        let policy = self.info.get("maxmemory_policy").map(String::as_str).unwrap_or_default();
        let is_bounded = self.info.get("maxmemory").is_some_and(|bytes| bytes != "0");
        if is_bounded && policy.starts_with("allkeys-") {
            advice.push(format!(
                "maxmemory-policy is {policy}: when memory is short the server drops whole \
                 streams, with events that nobody has read; set noeviction"
            ));
        } else if is_bounded && policy.starts_with("volatile-") && remembers {
            advice.push(format!(
                "maxmemory-policy is {policy}: when memory is short the server forgets which \
                 events it has, and a repetition is appended twice; set noeviction"
            ));
        }
        if self.is("aof_enabled", "0") {
            advice.push(
                "appendonly is off: events that are confirmed are lost when the server ends before \
                 its next snapshot; set appendonly yes and appendfsync always"
                    .to_owned(),
            );
            return advice;
        }
        if let Some(other) = self.fsync.as_deref().filter(|fsync| *fsync != "always") {
            advice.push(format!(
                "appendfsync is {other}: a server that is killed with its machine loses the last \
                 confirmed events; set appendfsync always"
            ));
        }
        if self.no_fsync_on_rewrite.as_deref() == Some("yes") {
            advice.push(
                "no-appendfsync-on-rewrite is yes: while the server rewrites its log or takes a \
                 snapshot it syncs nothing, and a machine that stops then loses what was confirmed \
                 meanwhile; set no-appendfsync-on-rewrite no"
                    .to_owned(),
            );
        }
        advice
    }
}

/// The lines of `INFO`.
fn fields(info: &str) -> HashMap<String, String> {
    let lines = info.lines().filter_map(|line| line.split_once(':'));
    lines.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

/// Looks whether a stream can be appended to; `false` if it does not exist.
///
/// # Errors
/// Transient, if the key is something else.
pub(crate) async fn has_stream(
    connection: &mut MultiplexedConnection,
    stream: &str,
) -> Result<bool> {
    let kind: String = match cmd("TYPE").arg(stream).query_async(connection).await {
        Ok(kind) => kind,
        // Not permitted to ask; the first event tells.
        Err(error) if error.code() == Some("NOPERM") => return Ok(true),
        Err(error) => return Err(redis_error("look at the stream", &error)),
    };
    match kind.as_str() {
        "stream" => Ok(true),
        "none" => Ok(false),
        other => Err(Error::transient(format!(
            "stream: the key {stream} holds a {other}; rename or delete it, or name another"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(info: &str, fsync: Option<&str>) -> Look {
        let fsync = fsync.map(str::to_owned);
        Look { info: fields(info), fsync, no_fsync_on_rewrite: None }
    }

    const DURABLE: &str = "# Server\r\nredis_version:7.0.15\r\nmaxmemory:0\r\n\
                           maxmemory_policy:noeviction\r\naof_enabled:1\r\nrole:master\r\n\
                           cluster_enabled:0\r\n";

    #[test]
    fn what_may_be_lost_or_doubled_is_told() {
        let advice = |info: &str, fsync, remembers| look(info, fsync).advice(remembers);
        assert!(advice(DURABLE, Some("always"), true).is_empty());
        assert!(advice("", None, true).is_empty(), "a server that does not tell");
        let told = advice(DURABLE, Some("everysec"), true);
        assert!(told.len() == 1 && told[0].contains("appendfsync"), "{told:?}");
        let off = DURABLE.replace("aof_enabled:1", "aof_enabled:0");
        let told = advice(&off, Some("always"), true);
        assert!(told.len() == 1 && told[0].contains("appendonly"), "{told:?}");
        for (policy, remembers, part) in [
            ("allkeys-lru", true, Some("whole streams")),
            ("allkeys-lru", false, Some("whole streams")),
            ("volatile-ttl", true, Some("twice")),
            ("volatile-ttl", false, None),
        ] {
            let bounded = DURABLE.replace("maxmemory:0", "maxmemory:1048576");
            let told = advice(&bounded.replace("noeviction", policy), Some("always"), remembers);
            assert_eq!(told.first().is_some_and(|text| text.contains(policy)), part.is_some());
            assert!(part.is_none_or(|part| told[0].contains(part)), "{told:?}");
            let boundless = DURABLE.replace("noeviction", policy);
            assert!(advice(&boundless, Some("always"), true).is_empty());
        }
    }

    #[test]
    fn a_log_that_is_not_synced_at_times_is_told() {
        let told = |info: &str, setting: Option<&str>| {
            let no_fsync_on_rewrite = setting.map(str::to_owned);
            Look { no_fsync_on_rewrite, ..look(info, Some("always")) }.advice(true)
        };
        assert!(told(DURABLE, None).is_empty() && told(DURABLE, Some("no")).is_empty());
        let advice = told(DURABLE, Some("yes"));
        assert!(advice.len() == 1 && advice[0].contains("set no-appendfsync-on-rewrite no"));
        let off = told(&DURABLE.replace("aof_enabled:1", "aof_enabled:0"), Some("yes"));
        assert!(off.len() == 1 && off[0].contains("appendonly"), "{off:?}");
    }

    #[test]
    fn a_server_that_takes_no_events_is_named() {
        let told = |info: &str| look(info, None).takes_events().err().map(|error| error.chain());
        assert_eq!(told(DURABLE), None);
        let replica = told(&DURABLE.replace("role:master", "role:slave"));
        assert!(replica.expect("refused").contains("name the primary"));
        let node = told(&DURABLE.replace("cluster_enabled:0", "cluster_enabled:1"));
        assert!(node.expect("refused").contains("Redis Cluster"));
    }
}
