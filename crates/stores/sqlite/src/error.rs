//! From SQLite's result codes to reactions; nowhere else in this crate.
//!
//! What lives here: the mapping, with a remedy for each row. What does not: what is refused before
//! SQLite is asked. Invariant: matched by number, never by SQLite's text, but for a missing table,
//! which has no number of its own.

use postrider_core::{Error, ErrorKind};
use rusqlite::ffi;

/// The kind of an extended result code, and what a person should do about it.
fn classify(code: i32, message: &str) -> (ErrorKind, &'static str) {
    if code == ffi::SQLITE_BUSY_SNAPSHOT {
        return (
            ErrorKind::Transient,
            "another connection wrote after this transaction had read; begin it as IMMEDIATE",
        );
    }
    let full = (
        ErrorKind::Transient,
        "the disk (or the database's size limit) is full; free space: nothing was saved",
    );
    // The file of shared memory beside the database could not grow.
    if code == ffi::SQLITE_IOERR_SHMSIZE {
        return full;
    }
    match code & 0xff {
        ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED => (
            ErrorKind::Transient,
            "the database is locked by another connection; shorten its transaction or raise \
             busy_timeout",
        ),
        ffi::SQLITE_READONLY => (
            ErrorKind::Permanent,
            "the database is read-only; check the rights on the file, its -wal and its folder",
        ),
        ffi::SQLITE_CORRUPT => (
            ErrorKind::Corrupt,
            "the database file is damaged; stop, run PRAGMA integrity_check, restore a backup",
        ),
        ffi::SQLITE_NOTADB => {
            (ErrorKind::Corrupt, "the file is not a SQLite database; check the configured path")
        }
        ffi::SQLITE_FULL => full,
        ffi::SQLITE_CANTOPEN => (
            ErrorKind::Permanent,
            "the database file cannot be opened; check that its folder exists and can be written",
        ),
        ffi::SQLITE_IOERR => {
            (ErrorKind::Transient, "reading or writing the disk failed; check it, then try again")
        }
        ffi::SQLITE_NOMEM | ffi::SQLITE_INTERRUPT | ffi::SQLITE_SCHEMA | ffi::SQLITE_PROTOCOL => {
            (ErrorKind::Transient, "SQLite gave up for now; try again")
        }
        ffi::SQLITE_ERROR if message.contains("no such table: postrider_") => {
            (ErrorKind::Permanent, "Postrider's tables are missing; run `postrider init` first")
        }
        ffi::SQLITE_CONSTRAINT => {
            (ErrorKind::Permanent, "a constraint of Postrider's tables refused the value")
        }
        _ => (ErrorKind::Permanent, "SQLite refused the statement"),
    }
}

fn compose(place: &str, code: i32, message: &str) -> Error {
    let (kind, remedy) = classify(code, message);
    Error::new(kind, format!("{place}: {remedy}"))
}

/// Turns SQLite's error into a reaction; `place` is a verb and an object.
pub fn sqlite_error(place: &str, error: rusqlite::Error) -> Error {
    let code = match &error {
        rusqlite::Error::SqliteFailure(cause, _)
        | rusqlite::Error::SqlInputError { error: cause, .. } => cause.extended_code,
        // All others of the driver's say that a value could not be read as what it should be.
        _ => {
            let context =
                format!("{place}: a stored value is not what Postrider writes; look at it");
            return Error::corrupt(context).with_source(error);
        }
    };
    compose(place, code, &error.to_string()).with_source(error)
}

/// [`sqlite_error`] as the argument of `map_err`.
pub(crate) fn failed(place: &'static str) -> impl FnOnce(rusqlite::Error) -> Error {
    move |error| sqlite_error(place, error)
}

/// Whether the error says that a value which must be unique exists already.
pub(crate) fn is_duplicate(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|cause| {
        matches!(
            cause.extended_code,
            ffi::SQLITE_CONSTRAINT_UNIQUE | ffi::SQLITE_CONSTRAINT_PRIMARYKEY
        )
    })
}

/// Turns an error of `sqlx` into the same reactions.
#[cfg(feature = "sqlx")]
pub(crate) fn sqlx_error(place: &str, error: sqlx::Error) -> Error {
    let code = error
        .as_database_error()
        .and_then(|cause| cause.code())
        .and_then(|code| code.parse::<i32>().ok());
    match code {
        Some(code) => compose(place, code, &error.to_string()).with_source(error),
        None => Error::transient(format!("{place}: the connection failed; try again"))
            .with_source(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that no test can bring about on a healthy disk; the others are met for real in
    /// `tests/it/errors.rs`.
    #[test]
    fn rare_codes_have_their_reactions() {
        for (code, kind, says) in [
            (ffi::SQLITE_IOERR_READ, ErrorKind::Transient, "disk failed"),
            (ffi::SQLITE_IOERR_FSYNC, ErrorKind::Transient, "disk failed"),
            (ffi::SQLITE_IOERR_SHMSIZE, ErrorKind::Transient, "is full"),
            (ffi::SQLITE_NOMEM, ErrorKind::Transient, "try again"),
            (ffi::SQLITE_PROTOCOL, ErrorKind::Transient, "try again"),
            (ffi::SQLITE_LOCKED_SHAREDCACHE, ErrorKind::Transient, "locked"),
            (ffi::SQLITE_PERM, ErrorKind::Permanent, "refused"),
        ] {
            let cause = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            let error = sqlite_error("read", cause);
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.to_string().contains(says), "{error}");
        }
        let strange = sqlite_error("read", rusqlite::Error::QueryReturnedNoRows);
        assert_eq!(strange.kind(), ErrorKind::Corrupt);
    }
}
