//! Writers: applications that append business rows with their events.
//!
//! What lives here: what they say. What does not: how they say it to each source (`sqlite.rs`,
//! `postgres.rs`), starting and killing them.
//! Invariant: a payload begins with an id of its own, so that two events never say the same.

pub mod postgres;
pub mod sqlite;

use rand::RngExt;
use rand::rngs::StdRng;
use uuid::Uuid;

/// Keys that most events share, and how many others there are.
const HOT_KEYS: u32 = 5;
const COLD_KEYS: u32 = 400;
/// The largest payload, in bytes, unless a schedule wants larger ones.
pub const LARGEST: usize = 200_000;
const TOPIC: &str = "fault/events";
const BINARY: &str = "application/octet-stream";
const JSON: &str = "application/json";

/// Type and content type of an event that says something in JSON, or in bytes.
fn what(json: bool) -> (&'static str, &'static str) {
    match json {
        true => ("ThingSaid", JSON),
        false => ("ThingDone", BINARY),
    }
}

/// A key: one of a few, or one of many.
fn key(rng: &mut StdRng) -> String {
    match rng.random_bool(0.6) {
        true => format!("hot {}", rng.random_range(0..HOT_KEYS)),
        false => format!("köld/{}", rng.random_range(0..COLD_KEYS)),
    }
}

/// A payload that begins with an id of its own; one in a hundred is large.
fn payload(id: Uuid, json: bool, largest: usize, rng: &mut StdRng) -> Vec<u8> {
    if json {
        // Spaces, an escape and a number beyond 2^53 stay as they are.
        let number = rng.random::<u64>();
        return format!("{{ \"id\":\"{id}\", \"n\": {number}, \"t\":\"\\u00e9\\n é\"}}")
            .into_bytes();
    }
    let length = if rng.random_bool(0.01) {
        rng.random_range(largest / 4..largest)
    } else {
        rng.random_range(0..400)
    };
    let mut bytes = id.as_bytes().to_vec();
    bytes.resize_with(16 + length, || rng.random());
    bytes
}
