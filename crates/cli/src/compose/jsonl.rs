//! `kind = "jsonl"`.
//!
//! What lives here: its keys, and the sink that they make. What does not: other kinds.
//! Invariant: making it opens no file.

use std::path::PathBuf;
use std::sync::Arc;

use postrider_core::{Result, Sink};
use postrider_relay::SystemClock;
use postrider_sink_jsonl::{JsonLines, JsonlConfig};

use crate::config::SinkConfig;
use crate::config::keys::{Kind, Need, Shape, key};

pub(super) const NAME: &str = "jsonl";

pub(super) const KIND: Kind = Kind {
    name: NAME,
    doc: "Each event as a line of JSON, in a file or on standard output.",
    keys: &[
        key("path", Shape::Text, Need::Required, "The file, or - for standard output."),
        key(
            "fsync",
            Shape::Switch,
            Need::Default("true"),
            "Whether a confirmation waits until the disk has the lines.",
        ),
        key(
            "rotate_bytes",
            Shape::Size { min: 1, max: 1 << 50 },
            Need::Optional,
            "Start a new file before this one would pass this size.",
        ),
        key(
            "rotate_seconds",
            Shape::Integer { min: 1, max: 10 * 365 * 86_400 },
            Need::Optional,
            "Start a new file once this one is so many seconds old.",
        ),
        key(
            "keep",
            Shape::Integer { min: 0, max: 1_000_000 },
            Need::Optional,
            "How many rotated files to keep; all of them without it.",
        ),
    ],
};

pub(super) fn settings(config: &SinkConfig) -> JsonlConfig {
    let fields = &config.fields;
    let path = fields.text("path").unwrap_or_default();
    JsonlConfig {
        path: if path == "-" { PathBuf::from(path) } else { super::path(&config.folder, path) },
        fsync: fields.switch("fsync"),
        rotate_bytes: fields.number("rotate_bytes"),
        rotate_seconds: fields.number("rotate_seconds"),
        keep: fields.number("keep").map(|keep| usize::try_from(keep).unwrap_or(usize::MAX)),
    }
}

pub(super) fn open(config: &SinkConfig) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(JsonLines::new(&settings(config), Arc::new(SystemClock))?))
}
