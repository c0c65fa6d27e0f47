//! From PostgreSQL's SQLSTATE to reactions; nowhere else in this crate.
//!
//! What lives here: the mapping, with a remedy for each row. What does not: what is refused before
//! the server is asked. Invariant: matched by code, never by the server's text, which is translated
//! into its own language.

use postrider_core::{Error, ErrorKind};
use tokio_postgres::error::SqlState;

/// A position beyond the head, raised by the feed's own functions.
const BEYOND_HEAD: &str = "PR001";
/// A position that names no tick and is no time.
const NAMES_NOTHING: &str = "PR002";
/// A position below the retention horizon.
const BELOW_HORIZON: &str = "PR003";

/// The kind of a SQLSTATE, and what a person should do about it.
fn classify(code: &str) -> (ErrorKind, &'static str) {
    let missing = (ErrorKind::Permanent, "Postrider's tables are missing; run `postrider init`");
    match code {
        "40001" | "40P01" => (
            ErrorKind::Transient,
            "another transaction was in the way; begin this one again from its start",
        ),
        "55P03" => (ErrorKind::Transient, "a lock was not free in time; try again"),
        "57014" => (ErrorKind::Transient, "the statement ran into its time-out; try again"),
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" => {
            (ErrorKind::Transient, "the server ended the connection; connect again")
        }
        "25006" => (
            ErrorKind::Transient,
            "the server is read-only (a standby); wait for the fail-over or name the primary",
        ),
        "3D000" => (ErrorKind::Permanent, "there is no database of that name; create it"),
        "42501" => (
            ErrorKind::Permanent,
            "the role lacks a privilege; see the roles in docs/stores/postgres.md",
        ),
        "3F000" | "42P01" | "42883" | "42703" => missing,
        BEYOND_HEAD | NAMES_NOTHING | BELOW_HORIZON => (ErrorKind::Permanent, "refused"),
        "XX001" | "XX002" => (
            ErrorKind::Corrupt,
            "the database reports damaged data; stop, check its disks, restore a backup",
        ),
        _ => match &code[..2.min(code.len())] {
            "08" => (ErrorKind::Transient, "the connection failed; connect again"),
            "53" => (ErrorKind::Transient, "the server is short of a resource; try again later"),
            "58" => (ErrorKind::Transient, "the server met an error of its system; look there"),
            "28" => (ErrorKind::Permanent, "the server refused the login; check role and password"),
            "22" | "23" => (ErrorKind::Permanent, "the server refused the value"),
            _ => (ErrorKind::Permanent, "the server refused the statement"),
        },
    }
}

fn compose(place: &str, code: &str, message: &str) -> Error {
    let (kind, remedy) = classify(code);
    let own = [BEYOND_HEAD, NAMES_NOTHING, BELOW_HORIZON].contains(&code);
    let refusal = own || code.starts_with("22") || code.starts_with("23") || code == "P0001";
    match refusal {
        // Our own functions and constraints say it best.
        true => Error::new(kind, format!("{place}: {message}")),
        false => Error::new(kind, format!("{place}: {remedy}")),
    }
}

/// Turns the driver's error into a reaction; `place` is a verb and an object.
pub fn postgres_error(place: &str, error: tokio_postgres::Error) -> Error {
    if let Some(cause) = error.as_db_error() {
        return compose(place, cause.code().code(), cause.message()).with_source(error);
    }
    let text = error.to_string();
    if text.starts_with("error deserializing") || text.starts_with("invalid column") {
        let context = format!("{place}: a stored value is not what Postrider writes; look at it");
        return Error::corrupt(context).with_source(error);
    }
    Error::transient(format!("{place}: the connection failed; trying again")).with_source(error)
}

/// What the caller's own transaction, or the values, have brought about. Nothing of the server's
/// error goes along: its details repeat the row that was refused, and rows hold payloads.
fn append_refusal(code: &str, message: &str, routine: Option<&str>) -> Option<Error> {
    let place = crate::append::PLACE;
    match code {
        // A standby's refusal comes from another routine.
        "25006" if routine == Some("PreventCommandIfReadOnly") => Some(Error::permanent(format!(
            "{place}: the transaction is READ ONLY; begin it READ WRITE"
        ))),
        "25P02" => Some(Error::permanent(format!(
            "{place}: a statement before failed the transaction; roll it back and begin again"
        ))),
        "54001" => Some(Error::permanent(format!(
            "{place}: the payload is nested deeper than the server can follow; use an outbox \
             with payloads of bytes"
        ))),
        _ if code.starts_with("22") || code.starts_with("23") => {
            Some(compose(place, code, message))
        }
        _ => None,
    }
}

/// [`postgres_error`] for statements that append.
pub(crate) fn append_error(error: tokio_postgres::Error) -> Error {
    let refusal = error
        .as_db_error()
        .and_then(|cause| append_refusal(cause.code().code(), cause.message(), cause.routine()));
    refusal.unwrap_or_else(|| postgres_error(crate::append::PLACE, error))
}

/// [`append_error`] for the errors of `sqlx`.
#[cfg(feature = "sqlx")]
pub(crate) fn append_sqlx_error(error: sqlx::Error) -> Error {
    use sqlx::postgres::PgDatabaseError;
    let place = crate::append::PLACE;
    let cause = error.as_database_error().and_then(|e| e.try_downcast_ref::<PgDatabaseError>());
    let Some(cause) = cause else {
        let context = format!("{place}: the connection failed; begin again");
        return Error::transient(context).with_source(error);
    };
    match append_refusal(cause.code(), cause.message(), cause.routine()) {
        Some(refusal) => refusal,
        None => compose(place, cause.code(), cause.message()).with_source(error),
    }
}

/// [`postgres_error`] as the argument of `map_err`.
pub(crate) fn failed(place: &'static str) -> impl FnOnce(tokio_postgres::Error) -> Error {
    move |error| postgres_error(place, error)
}

/// Whether the error says that a value which must be unique exists already.
pub(crate) fn is_duplicate(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::UNIQUE_VIOLATION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_reactions() {
        for (code, kind) in [
            ("40P01", ErrorKind::Transient),
            ("57014", ErrorKind::Transient),
            ("57P01", ErrorKind::Transient),
            ("25006", ErrorKind::Transient),
            ("08006", ErrorKind::Transient),
            ("53300", ErrorKind::Transient),
            ("28P01", ErrorKind::Permanent),
            ("42501", ErrorKind::Permanent),
            ("42P01", ErrorKind::Permanent),
            ("PR003", ErrorKind::Permanent),
            ("23514", ErrorKind::Permanent),
            ("XX001", ErrorKind::Corrupt),
            ("", ErrorKind::Permanent),
        ] {
            assert_eq!(compose("read", code, "text").kind(), kind, "{code}");
        }
    }
}
