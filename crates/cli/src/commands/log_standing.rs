//! How the log stands, as `status` shows it.
//!
//! What lives here: the words for it. What does not: what is asked (`compose/log.rs`), and what
//! should be done about it, which the source's advice says.
//! Invariant: what is not known is not shown as a number.

use std::io;

use serde_json::{Value as Json, json};

use crate::compose::{LogMirror, LogStanding, MirrorConsumer};
use crate::output::{Cell, Output, Tone, escape, roughly, size};

/// For programs.
pub(super) fn json(log: &LogStanding, mirror: Option<&LogMirror>) -> Json {
    let consumers = log.consumers.iter().map(|one| {
        json!({
            "consumer": one.name,
            "place": one.place,
            "lagBytes": one.lag_bytes,
            "next": next(one.catches_up),
        })
    });
    json!({
        "slot": log.slot,
        "state": log.state,
        "detail": log.detail,
        "reader": log.reader,
        "walStatus": log.wal_status,
        "head": log.head,
        "retainedBytes": log.retained_bytes,
        "safeBytes": log.safe_bytes,
        "lagBytes": log.lag_bytes,
        "lostInSeconds": log.lost_in.map(|left| left.as_secs()),
        "consumers": consumers.collect::<Vec<_>>(),
        "mirror": mirror.map(mirror_json),
    })
}

fn mirror_json(mirror: &LogMirror) -> Json {
    let consumers = mirror.consumers.iter().map(|one| {
        json!({
            "consumer": one.name,
            "place": one.place,
            "ageSeconds": one.age.as_secs(),
        })
    });
    json!({
        "place": mirror.place,
        "trouble": mirror.trouble,
        "consumers": consumers.collect::<Vec<_>>(),
    })
}

/// From where a consumer goes on.
fn next(catches_up: bool) -> &'static str {
    if catches_up { "table" } else { "stream" }
}

/// For people.
///
/// # Errors
/// When the output can't be written.
pub(super) fn print(
    log: &LogStanding,
    mirror: Option<&LogMirror>,
    output: Output,
) -> io::Result<()> {
    let tone = if matches!(log.state, "active" | "idle") { Tone::Good } else { Tone::Warn };
    let mut text = format!("slot {}: {}", escape(&log.slot), output.paint(tone, log.state));
    if let Some(pid) = log.reader {
        text.push_str(&format!(", read by the server's process {pid}"));
    }
    if let Some(bytes) = log.retained_bytes {
        text.push_str(&format!("; the server keeps {} of log for it", size(bytes)));
    }
    if let Some(bytes) = log.lag_bytes {
        text.push_str(&format!(", {} beyond what was acknowledged", size(bytes)));
    }
    if let Some(bytes) = log.safe_bytes {
        text.push_str(&format!("; it is lost after {} more", size(bytes)));
        if let Some(left) = log.lost_in {
            text.push_str(&format!(", in {} at this moment's rate", roughly(left)));
        }
    }
    output.line(text)?;
    if let Some(mirror) = mirror {
        output.line(mirror_line(mirror))?;
    }
    let rows = log.consumers.iter().map(|one| {
        vec![
            Cell::plain(&one.name),
            Cell::plain(&one.place),
            Cell::plain(one.lag_bytes.map_or_else(|| "-".to_owned(), size)),
            Cell::plain(next(one.catches_up)),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return Ok(());
    }
    output.line("")?;
    output.table(&["CONSUMER", "PLACE", "BEHIND", "NEXT FROM"], &rows)
}

fn mirror_line(mirror: &LogMirror) -> String {
    let consumer = |one: &MirrorConsumer| {
        format!("{} at {}, written {} ago", escape(&one.name), one.place, roughly(one.age))
    };
    let list = match (&mirror.trouble, mirror.consumers.as_slice()) {
        (Some(_), _) => "can't be read".to_owned(),
        (None, []) => "nothing yet".to_owned(),
        (None, all) => all.iter().map(consumer).collect::<Vec<_>>().join("; "),
    };
    format!("{}: {list}", escape(&mirror.place))
}
