//! The sink's end of `jsonl`: the files, as any reader finds them.
//!
//! What lives here: reading every file in order, and marks. What does not: writing them.
//! Invariant: rotated files are read in the order of their names, then the current one; a line
//! counts when it is whole, and an unfinished one is passed over as the format's readers do.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postrider_conformance::sink::Delivered;
use postrider_core::EventId;
use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::deliveries::{Arrived, Delivery, Mark, Place};

/// Name of the current file.
pub const FILE: &str = "events.jsonl";
/// What each line of the sink starts with: a torn one is a part of such a line.
const LINE_START: &str = "{\"id\":\"";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    id: Uuid,
    topic: String,
    key: String,
    #[serde(rename = "type")]
    event_type: String,
    content_type: String,
    headers: BTreeMap<String, String>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    data_base64: Option<String>,
}

/// The rotated files by name, then the current one.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut rotated = Vec::new();
    for entry in fs::read_dir(folder).context("list the sink's files")? {
        let path = entry.context("list the sink's files")?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        if name.is_some_and(|name| name.starts_with("events-") && name.ends_with(".jsonl")) {
            rotated.push(path);
        }
    }
    rotated.sort();
    let current = folder.join(FILE);
    rotated.extend(current.exists().then_some(current));
    Ok(rotated)
}

/// How long every file is now.
///
/// # Errors
/// When the folder can't be read.
pub fn mark(folder: &Path) -> Result<Mark> {
    loop {
        let before = files(folder)?;
        let mut lengths = HashMap::new();
        for path in &before {
            if let Ok(metadata) = fs::metadata(path) {
                lengths.insert(metadata.ino(), metadata.len());
            }
        }
        // A rotation meanwhile may have hidden a file from this look.
        if files(folder)? == before && lengths.len() == before.len() {
            return Ok(Mark::Lengths(lengths));
        }
    }
}

/// Leaves the beginning of a line at the end of the current file, as a writer that died does.
///
/// # Errors
/// The file system's, save for a full disk, where nobody could have left anything.
pub fn tear(folder: &Path) -> Result<()> {
    let file = fs::OpenOptions::new().append(true).create(true).open(folder.join(FILE));
    let written = file.and_then(|mut file| file.write_all(b"{\"id\":\"0123"));
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::StorageFull => Ok(()),
        other => other.context("tear a line"),
    }
}

/// Everything that stands in the files.
///
/// # Errors
/// When they can't be read.
pub fn read(folder: &Path) -> Result<Arrived> {
    let mut arrived = Arrived::default();
    let mut behind_torn = Vec::new();
    for path in files(folder)? {
        let bytes = fs::read(&path).context("read a file of the sink")?;
        let inode = fs::metadata(&path).context("read a file of the sink")?.ino();
        let mut end = 0u64;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            end += line.len() as u64;
            match parse(line, Place::Line { inode, end }) {
                Ok(delivery) => arrived.deliveries.push(delivery),
                Err(_) if is_torn(line) => behind_torn.push(arrived.deliveries.len()),
                Err(error) => arrived.unreadable.push(format!("{error:#}")),
            }
        }
    }
    arrived.withheld = unconfirmed(&arrived.deliveries, &behind_torn);
    Ok(arrived)
}

/// Whether the line is the beginning of one of ours, perhaps with another one behind it.
fn is_torn(line: &[u8]) -> bool {
    let head = &line[..line.len().min(LINE_START.len())];
    let head = head.strip_suffix(b"\n").unwrap_or(head);
    LINE_START.as_bytes().starts_with(head)
}

fn parse(line: &[u8], place: Place) -> Result<Delivery> {
    let text = line.strip_suffix(b"\n").context("a line without its end")?;
    let line: Line<'_> = serde_json::from_slice(text).context("a line that can't be read")?;
    let payload = match (&line.data, &line.data_base64) {
        (Some(raw), None) => raw.get().as_bytes().to_vec(),
        (None, Some(encoded)) => STANDARD.decode(encoded).context("dataBase64 of a line")?,
        (Some(_), Some(_)) | (None, None) => anyhow::bail!("a line with no or two payloads"),
    };
    let message = Delivered {
        id: EventId::from_uuid(line.id),
        key: line.key,
        topic: line.topic,
        event_type: line.event_type,
        content_type: line.content_type,
        headers: line.headers.into_iter().collect(),
        payload,
    };
    Ok(Delivery { message, place })
}

/// Events of writes that were not confirmed because they met another writer's torn line: right
/// behind such a line, a run of lines that come again.
fn unconfirmed(deliveries: &[Delivery], behind_torn: &[usize]) -> Vec<EventId> {
    let mut withheld = Vec::new();
    for at in behind_torn {
        let mut later: HashMap<EventId, usize> = HashMap::new();
        for delivery in &deliveries[*at..] {
            *later.entry(delivery.id()).or_default() += 1;
        }
        let mut seen = HashSet::new();
        let run = deliveries[*at..]
            .iter()
            .take_while(|delivery| later[&delivery.id()] > 1 && seen.insert(delivery.id()));
        withheld.extend(run.map(Delivery::id));
    }
    withheld
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: u128, key: &str) -> String {
        format!(
            "{{\"id\":\"{}\",\"position\":\"0\",\"partition\":\"0/1\",\"topic\":\"t\",\
             \"key\":\"{key}\",\"type\":\"T\",\"contentType\":\"application/json\",\
             \"appendedAt\":\"\",\"headers\":{{}},\"data\":{{\"a\": 1}}}}\n",
            Uuid::from_u128(id)
        )
    }

    #[test]
    fn rotated_files_come_first_and_a_torn_line_is_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).expect("written");
        };
        write(FILE, &format!("{}{{\"id\":\"01\n{}{}", line(3, "c"), line(4, "d"), "{\"i"));
        write("events-20260101T000000000Z-001.jsonl", &line(2, "b"));
        write("events-20260101T000000000Z-000.jsonl", &line(1, "a"));
        let arrived = read(folder.path()).expect("read");
        let ids: Vec<u128> =
            arrived.deliveries.iter().map(|d| d.id().as_uuid().as_u128()).collect();
        assert_eq!(ids, [1, 2, 3, 4]);
        assert!(arrived.unreadable.is_empty() && arrived.withheld.is_empty());
        let now = mark(folder.path()).expect("marked");
        assert!(arrived.deliveries.iter().all(|delivery| delivery.is_before(&now)));
        let early = Mark::Lengths(HashMap::new());
        assert!(!arrived.deliveries[0].is_before(&early));
    }

    #[test]
    fn foreign_text_is_unreadable_and_not_torn() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(FILE), "hello\n{\"x\":1}\n").expect("written");
        assert_eq!(read(folder.path()).expect("read").unreadable.len(), 2);
    }

    #[test]
    fn a_write_behind_a_torn_line_may_come_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let torn = "{\"id\":\"01{\"id\":\"02\"}\n";
        let text = [line(9, "z"), torn.to_owned(), line(1, "a"), line(2, "b"), line(3, "c")];
        let again = [line(1, "a"), line(2, "b")];
        fs::write(folder.path().join(FILE), text.concat() + &again.concat()).expect("written");
        let withheld = read(folder.path()).expect("read").withheld;
        assert_eq!(withheld, [1, 2].map(|id| EventId::from_uuid(Uuid::from_u128(id))));
    }
}
