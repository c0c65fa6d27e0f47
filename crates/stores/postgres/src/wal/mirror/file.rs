//! The copy in a file.
//!
//! What lives here: one JSON file for an outbox with all of its consumers, read and replaced as a
//! whole. What does not: what it says of each (`kept.rs`), and when it is written.
//! Invariant: whoever reads sees the old file or the new one, also after a crash: the new one is
//! on the disk before it takes the old one's name. Only its owner may read it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use postrider_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::kept::Kept;
use super::{Owner, Update};

const FORMAT: &str = "postrider-checkpoints";
const VERSION: u32 = 1;
/// A larger file is none of ours.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: String,
    version: u32,
    database: String,
    schema: String,
    outbox: String,
    consumers: BTreeMap<String, Kept>,
}

pub(crate) struct MirrorFile {
    path: PathBuf,
    /// For whoever reads or writes it.
    pub(super) alone: Mutex<()>,
}

impl MirrorFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, alone: Mutex::new(()) }
    }

    pub(crate) fn shown(&self) -> String {
        format!("file {}", self.path.display())
    }

    fn about(&self, what: &str) -> impl Fn(io::Error) -> Error {
        let text = format!("{what} the copy of the checkpoints, {}", self.path.display());
        move |error| {
            let kind = match error.kind() {
                ErrorKind::PermissionDenied
                | ErrorKind::NotFound
                | ErrorKind::IsADirectory
                | ErrorKind::NotADirectory
                | ErrorKind::ReadOnlyFilesystem => Error::permanent,
                _ => Error::transient,
            };
            kind(format!("{text}: {error}")).with_source(error)
        }
    }

    fn strange(&self, why: &str) -> Error {
        Error::permanent(format!(
            "{} is no copy of this outbox's checkpoints: {why}; look what it is, and move it away \
             or give mirror_file another path: it is made anew then",
            self.path.display()
        ))
    }

    fn read_all(&self, owner: &Owner) -> Result<BTreeMap<String, Kept>> {
        match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(self.about("look at")(error)),
            Ok(facts) if !facts.is_file() => return Err(self.strange("it is no file")),
            Ok(facts) if facts.len() > MAX_BYTES => return Err(self.strange("it is too large")),
            Ok(_) => {}
        }
        let text = std::fs::read(&self.path).map_err(self.about("read"))?;
        let head: Head = serde_json::from_slice(&text)
            .map_err(|error| self.strange(&format!("line {} can't be read", error.line())))?;
        if head.format != FORMAT || head.version != VERSION {
            return Err(self.strange(&format!(
                "its format is {:?}, version {}, and this program knows {FORMAT:?}, version \
                 {VERSION}",
                head.format, head.version
            )));
        }
        let content: Content = serde_json::from_slice(&text)
            .map_err(|error| self.strange(&format!("line {} can't be read", error.line())))?;
        let Content { database, schema, outbox, .. } = &content;
        if (database, schema, outbox) != (&owner.database, &owner.schema, &owner.outbox) {
            return Err(self.strange(&format!(
                "it belongs to outbox {outbox:?} in schema {schema:?} of database {database:?}"
            )));
        }
        Ok(content.consumers)
    }

    pub(crate) fn list(&self, owner: &Owner) -> Result<Vec<(String, Kept)>> {
        Ok(self.read_all(owner)?.into_iter().collect())
    }

    /// Whether it can be read and replaced. Changes nothing.
    pub(crate) fn ready(&self, owner: &Owner) -> Result<()> {
        self.read_all(owner)?;
        let probe = self.beside("probe");
        let made = create(&probe).and_then(|mut file| {
            file.write_all(b"{}")?;
            file.sync_all()
        });
        let removed = std::fs::remove_file(&probe);
        made.map_err(self.about("write"))?;
        removed.map_err(self.about("write"))
    }

    /// Replaces what is there of these consumers, and returns those whose copy is further: they are
    /// left as they are.
    pub(crate) fn write(&self, owner: &Owner, entries: &[Update]) -> Result<Vec<usize>> {
        let mut consumers = self.read_all(owner)?;
        let mut left = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            let known = consumers.get(&entry.consumer);
            let gives_way = known.map(|known| entry.may_replace(known)).transpose()?;
            match gives_way {
                Some(false) => left.push(at),
                _ => drop(consumers.insert(entry.consumer.clone(), entry.kept.clone())),
            }
        }
        self.replace(owner, consumers)?;
        Ok(left)
    }

    pub(crate) fn forget(&self, owner: &Owner, consumer: &str) -> Result<bool> {
        let mut consumers = self.read_all(owner)?;
        let known = consumers.remove(consumer).is_some();
        if known {
            self.replace(owner, consumers)?;
        }
        Ok(known)
    }

    fn replace(&self, owner: &Owner, consumers: BTreeMap<String, Kept>) -> Result<()> {
        let content = Content {
            format: FORMAT.to_owned(),
            version: VERSION,
            database: owner.database.clone(),
            schema: owner.schema.clone(),
            outbox: owner.outbox.clone(),
            consumers,
        };
        let text = serde_json::to_vec_pretty(&content)
            .map_err(|error| Error::corrupt("write the copy").with_source(error))?;
        let new = self.beside("new");
        let written = create(&new).and_then(|mut file| {
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&new, &self.path)?;
            sync_folder(&self.folder())
        });
        written.map_err(|error| {
            // It may be the disk that is full.
            let _ = std::fs::remove_file(&new);
            self.about("write")(error)
        })
    }

    fn folder(&self) -> PathBuf {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        }
    }

    /// A file in the same folder, of this process alone.
    fn beside(&self, what: &str) -> PathBuf {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.{what}", std::process::id()));
        self.folder().join(name)
    }
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// A name is on the disk once its folder is.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::kept::tests::kept;
    use super::*;

    fn owner() -> Owner {
        let name = |text: &str| text.to_owned();
        Owner { database: name("shop"), schema: name("postrider"), outbox: name("outbox") }
    }

    fn entry(consumer: &str, lsn: u64) -> Update {
        Update { consumer: consumer.to_owned(), kept: kept(1, lsn), over: None }
    }

    #[test]
    fn consumers_are_replaced_one_by_one_and_never_moved_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = MirrorFile::new(folder.path().join("copy.json"));
        file.ready(&owner()).expect("it can be written");
        assert_eq!(file.list(&owner()).expect("readable"), []);
        let (low, high) = (entry("a", 8), entry("a", 16));
        let none: [usize; 0] = [];
        assert_eq!(file.write(&owner(), &[low.clone(), entry("b", 8)]).expect("written"), none);
        assert_eq!(file.write(&owner(), std::slice::from_ref(&high)).expect("written"), none);
        assert_eq!(file.write(&owner(), std::slice::from_ref(&low)).expect("left"), [0]);
        let list = file.list(&owner()).expect("readable");
        assert_eq!(list[0], ("a".to_owned(), high.kept.clone()));
        assert_eq!(list.len(), 2);
        let refused = Update { over: Some(high.kept.seal), ..low };
        assert_eq!(file.write(&owner(), std::slice::from_ref(&refused)).expect("written"), none);
        assert_eq!(file.list(&owner()).expect("readable")[0].1, refused.kept);
        assert!(file.forget(&owner(), "a").expect("written"));
        assert!(!file.forget(&owner(), "a").expect("nothing"));
        let names: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").collect();
        assert_eq!(names.len(), 1, "nothing else is left: {names:?}");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let facts = std::fs::metadata(folder.path().join("copy.json")).expect("a file");
            assert_eq!(facts.permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn what_is_no_copy_of_this_outbox_is_refused_with_path_and_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("copy.json");
        let file = MirrorFile::new(path.clone());
        file.write(&owner(), &[entry("a", 8)]).expect("written");
        let good = std::fs::read_to_string(&path).expect("text");
        let other = Owner { outbox: "other".to_owned(), ..owner() };
        let refused = |owner: &Owner, says: &str| {
            let error = file.ready(owner).expect_err(says);
            let text = error.to_string();
            for part in [says, "copy.json", "move it away"] {
                assert!(text.contains(part), "{text}");
            }
            assert!(file.write(owner, &[entry("a", 8)]).is_err(), "it is left as it is");
        };
        refused(
            &other,
            "belongs to outbox \"outbox\" in schema \"postrider\" of database \"shop\"",
        );
        for (text, says) in [
            (good[..good.len() / 2].to_owned(), "can't be read"),
            ("name,value\n1,2\n".to_owned(), "line 1 can't be read"),
            (String::new(), "can't be read"),
            (good.replace("\"version\": 1", "\"version\": 2"), "version 2"),
            (good.replace(FORMAT, "something"), "its format is \"something\""),
            (good.replace("\"ordinal\"", "\"ordinary\""), "can't be read"),
        ] {
            std::fs::write(&path, text).expect("written");
            refused(&owner(), says);
        }
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("made");
        refused(&owner(), "it is no file");
    }

    #[test]
    fn a_place_that_can_not_be_written_is_told_with_its_path() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = MirrorFile::new(folder.path().join("not there").join("copy.json"));
        let error = file.ready(&owner()).expect_err("no folder");
        assert!(error.to_string().contains("not there/copy.json"), "{error}");
    }
}
