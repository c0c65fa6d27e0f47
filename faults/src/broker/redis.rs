//! Redis Streams: a stream whose script drops repetitions by a key for each id.
//!
//! What lives here: the stream, and reading it. What does not: outages (`mod.rs`), the server.
//! Invariant: the server remembers ids for longer than any schedule lasts, and drops none of them
//! for want of memory.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use postrider_servers::redis::Redis;
use redis::{Client, Connection, cmd};
use uuid::Uuid;

use super::{Nature, PATIENCE, Server, Takes};

const STREAM: &str = "events";
/// Entries that are read at a time.
const PAGE: usize = 200;
/// The server's own default, in bytes.
const ANY_BYTES: u64 = 512 << 20;
/// The smallest limit of one text that the server can be told, in bytes.
const SMALL_BYTES: u64 = 1 << 20;
/// What the proxy waits before each piece while the broker is slow.
const SLOW: Duration = Duration::from_millis(20);
/// A login that may not ask for the server's settings: then the server itself refuses what is too
/// large, and ends the connection with it.
const LIMITED: &str = "user relay on >relay ~* &* +@all -config";
/// Before the names of an event's own headers.
const EVENT_HEADER: &str = "header-";

/// A running server with its stream.
pub(super) struct Stream {
    server: Redis,
    limited: bool,
    open: Option<Connection>,
}

impl Stream {
    /// In every other schedule relays have a limited login.
    pub(super) fn start(index: u64) -> Result<Self> {
        let server = Redis::start(LIMITED).context("start Redis")?;
        Ok(Self { server, limited: index % 2 == 1, open: None })
    }

    fn ask<T>(&mut self, ask: impl Fn(&mut Connection) -> redis::RedisResult<T>) -> Result<T> {
        if let Some(open) = self.open.as_mut() {
            match ask(open) {
                Ok(answer) => return Ok(answer),
                Err(error) if !error.is_io_error() => return Err(error).context("ask Redis"),
                Err(_) => self.open = None,
            }
        }
        let client = Client::open(self.server.url()).context("read the address of Redis")?;
        let open = client.get_connection_with_timeout(PATIENCE).context("connect to Redis")?;
        open.set_read_timeout(Some(PATIENCE)).context("connect to Redis")?;
        ask(self.open.insert(open)).context("ask Redis")
    }

    fn set(&mut self, name: &str, value: u64) -> Result<()> {
        self.ask(|open| cmd("CONFIG").arg("SET").arg(name).arg(value).exec(open))
    }
}

impl Server for Stream {
    fn address(&self) -> SocketAddr {
        self.server.address()
    }

    fn nature(&self) -> Nature {
        // Nothing is in doubt where repetitions are dropped.
        Nature { drops_repetitions: true, under_way: 0, slow: SLOW, forgets_at_its_end: false }
    }

    fn settings(&self, port: u16) -> String {
        let login = if self.limited { "relay:relay@" } else { "" };
        format!(
            "kind = \"redis\"\nurl = \"redis://{login}127.0.0.1:{port}\"\nstream = \"{STREAM}\"\n\
             seen_for_ms = 3600000\n"
        )
    }

    fn hurry(&self) -> &'static str {
        "timeout_ms = 1500\nconnect_timeout_ms = 1500\n"
    }

    fn stop(&mut self) -> Result<()> {
        Ok(self.server.stop()?)
    }

    fn kill(&mut self) -> Result<()> {
        Ok(self.server.kill()?)
    }

    fn start_again(&mut self) -> Result<()> {
        Ok(self.server.start_again()?)
    }

    fn take(&mut self, what: Takes) -> Result<()> {
        match what {
            // So little memory that it has more in use.
            Takes::Nothing => self.set("maxmemory", 1),
            Takes::All | Takes::Small => {
                self.set("maxmemory", 0)?;
                let limit = if what == Takes::All { ANY_BYTES } else { SMALL_BYTES };
                self.set("proto-max-bulk-len", limit)
            }
        }
    }

    fn count(&mut self) -> Result<u64> {
        self.ask(|open| cmd("XLEN").arg(STREAM).query(open))
    }

    fn held(&mut self) -> Result<Vec<Result<Delivered>>> {
        let mut held = Vec::new();
        let mut from = "-".to_owned();
        loop {
            let page: Vec<(String, Vec<Vec<u8>>)> = self.ask(|open| {
                let mut range = cmd("XRANGE");
                range.arg(STREAM).arg(&from).arg("+").arg("COUNT").arg(PAGE).query(open)
            })?;
            let Some((last, _)) = page.last() else { return Ok(held) };
            from = format!("({last}");
            held.extend(page.into_iter().map(|(_, fields)| message(fields)));
        }
    }
}

/// The event, as it arrived.
fn message(fields: Vec<Vec<u8>>) -> Result<Delivered> {
    let text = |bytes: &Vec<u8>| String::from_utf8(bytes.clone()).context("read a text");
    let mut own = std::collections::HashMap::new();
    let mut headers = Vec::new();
    for pair in fields.chunks_exact(2) {
        let (name, value) = (text(&pair[0])?, &pair[1]);
        match name.strip_prefix(EVENT_HEADER) {
            Some(header) => headers.push((header.to_ascii_lowercase(), text(value)?)),
            None => drop(own.insert(name, value.clone())),
        }
    }
    headers.sort();
    let mut bytes =
        |name: &str| own.remove(name).with_context(|| format!("an entry has no field {name}"));
    let id: Uuid = text(&bytes("id")?)?.parse().context("read the id of an entry")?;
    Ok(Delivered {
        id: EventId::from_uuid(id),
        key: text(&bytes("key")?)?,
        topic: text(&bytes("topic")?)?,
        event_type: text(&bytes("type")?)?,
        content_type: text(&bytes("content-type")?)?,
        headers,
        payload: bytes("payload")?,
    })
}
