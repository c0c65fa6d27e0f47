//! From PostgreSQL's SQLSTATE, and from what goes wrong before there is one, to reactions; nowhere
//! else in this crate.
//!
//! What lives here: the mapping, with a remedy for each row. What does not: what is refused before
//! the server is asked. Invariant: matched by code, never by the server's text, which is translated
//! into its own language. No text holds the URL, and none the row that a constraint refused.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use postrider_core::{Error, ErrorKind};
use rustls::CertificateError;
use tokio_postgres::error::SqlState;

/// A position beyond the head, raised by the feed's own functions.
pub(crate) const BEYOND_HEAD: &str = "PR001";
/// A position that names no tick and is no time.
pub(crate) const NAMES_NOTHING: &str = "PR002";
/// A position below the retention horizon.
const BELOW_HORIZON: &str = "PR003";
/// The outbox's sequence was set back.
const SET_BACK: &str = "PR006";
/// What has to come before a call was not done.
const NOT_PREPARED: &str = "PR007";

/// What a login that can't be done calls for.
pub(crate) const LOGIN_AS_ASKED: &str = "the login can't be done as asked: the server wants a \
    password and the url has none, or it lacks what the url demands";

/// What a server without TLS calls for.
pub(crate) const NO_TLS: &str =
    "the server offers no TLS; turn its `ssl` on, or allow plain text by sslmode=disable";

/// The kind of a SQLSTATE that a statement of ours was answered with, and what a person should do
/// about it.
fn classify(code: &str) -> (ErrorKind, &'static str) {
    use ErrorKind::{Corrupt, Permanent, Transient};
    match code {
        "40001" | "40P01" => {
            (Transient, "another transaction was in the way; begin this one again from its start")
        }
        "40003" => (Transient, "whether it was done is unknown; ask again"),
        "55P03" => (Transient, "a lock was not free in time; try again"),
        "55006" => (Transient, "another session uses what is to be changed; try again"),
        "55000" => (Transient, "the server is not ready for this (a standby?); try again"),
        "57014" => (Transient, "the statement ran into its time-out; try again"),
        "57P01" | "57P02" | "57P05" => (Transient, "the server ended the connection; try again"),
        "57P03" => (Transient, "the server starts or stops at this moment; try again"),
        "57P04" => (Permanent, "the database was dropped; restore it, or name another one"),
        "25P03" | "25P04" => (
            Transient,
            "the transaction was left open for too long and was rolled back; begin again",
        ),
        "25P02" => {
            (Permanent, "a statement before failed the transaction; roll it back and begin again")
        }
        "25006" => (
            Transient,
            "the server is read-only (a standby); wait for the fail-over, or name the primary",
        ),
        "26000" | "42P05" => (
            Permanent,
            "a pooler mixed up prepared statements; use none through a pooler in transaction mode",
        ),
        "28P01" => (Permanent, "the server refused the password; check role and password"),
        "28000" => (
            Permanent,
            "the server refused the role, or this way of connecting; check the role's name, that \
             it may log in, and pg_hba.conf (may it ask for TLS?)",
        ),
        "3D000" => (Permanent, "there is no database of that name; create it"),
        "42501" => (
            Permanent,
            "the role lacks a privilege; a relay needs `SELECT postrider.grant_relay('its role')` \
             by the tables' owner, init CREATE on the database: Roles in docs/stores/postgres.md",
        ),
        "3F000" | "42P01" | "42883" | "42703" => {
            (Permanent, "Postrider's tables are missing; run `postrider init`")
        }
        "42P06" | "42P07" | "42710" | "42723" | "42701" => (
            Permanent,
            "something of that name is there already and is not Postrider's; choose another \
             schema or outbox name",
        ),
        "53100" => (Transient, "the server's disk is full; free space: nothing was saved"),
        "53200" => (Transient, "the server is out of memory; try again later"),
        "53300" => (
            Transient,
            "the server has no connection left; raise its max_connections (or the role's limit), \
             or lower the option `connections`",
        ),
        BEYOND_HEAD | NAMES_NOTHING | BELOW_HORIZON => (Permanent, "the position is refused"),
        SET_BACK => (Permanent, "the outbox's sequence was set back"),
        NOT_PREPARED => (Permanent, "what has to come before was not done"),
        "P0002" | "P0003" => {
            (Corrupt, "a row that Postrider keeps is missing; stop, and restore a backup")
        }
        "XX001" | "XX002" => {
            (Corrupt, "the database reports damaged data; stop, check its disks, restore a backup")
        }
        _ => classify_class(code),
    }
}

/// [`classify`] for a statement of the application's own: what is missing there, or is not allowed,
/// is the application's.
fn classify_of_application(code: &str) -> (ErrorKind, &'static str) {
    use ErrorKind::{Permanent, Unsupported};
    match code {
        "42501" => (Permanent, "the role lacks a privilege on what the statement names; grant it"),
        "3F000" | "42P01" | "42883" | "42703" => (
            Permanent,
            "the statement names something that is not there; check the name, the search_path, \
             and that the application's own migrations have run",
        ),
        "42P06" | "42P07" | "42710" | "42723" | "42701" => {
            (Permanent, "something of that name is there already")
        }
        "P0002" | "P0003" => {
            (Permanent, "a query gave no row, or several, where its function wants one")
        }
        _ if code.starts_with("0A") => {
            (Unsupported, "this server lacks a feature that the statement needs")
        }
        _ => classify(code),
    }
}

/// The same by the code's class, its first two characters.
fn classify_class(code: &str) -> (ErrorKind, &'static str) {
    use ErrorKind::{Permanent, Transient, Unsupported};
    match &code.as_bytes()[..2.min(code.len())] {
        b"08" => (Transient, "the connection failed; try again"),
        b"0A" => (Unsupported, "this server lacks a feature that Postrider needs"),
        b"22" | b"23" => (Permanent, "the server refused the value"),
        b"28" => (Permanent, "the server refused the login; check role and password"),
        b"40" => (Transient, "the server rolled the transaction back; begin it again"),
        b"53" => (Transient, "the server is short of a resource; try again later"),
        b"54" => (Permanent, "the value is larger than the server can take"),
        b"57" => (Transient, "somebody intervened at the server; try again"),
        b"58" => (Transient, "the server met an error of its system; look at its log"),
        b"XX" => (Transient, "the server met an internal error; look at its log"),
        _ => (Permanent, "the server refused the statement"),
    }
}

/// Whether the server's own text is the best there is: our functions and constraints wrote it, or
/// it names what is wrong with a value.
fn speaks_for_itself(code: &str) -> bool {
    [BEYOND_HEAD, NAMES_NOTHING, BELOW_HORIZON, SET_BACK, NOT_PREPARED, "P0001", "25000"]
        .contains(&code)
        || is_refusal(code)
}

/// A refused value. The server's details repeat the row, and rows hold payloads.
fn is_refusal(code: &str) -> bool {
    code.starts_with("22") || code.starts_with("23")
}

pub(crate) fn compose(place: &str, code: &str, message: &str, constraint: Option<&str>) -> Error {
    compose_as(classify(code), place, code, message, constraint)
}

fn compose_as(
    (kind, remedy): (ErrorKind, &str),
    place: &str,
    code: &str,
    message: &str,
    constraint: Option<&str>,
) -> Error {
    // Our constraints are named by the sentence that a refusal should say.
    let sentence = constraint.filter(|name| code.starts_with("23") && name.contains(' '));
    match sentence {
        Some(sentence) => Error::new(kind, format!("{place}: {sentence}")),
        None if speaks_for_itself(code) => Error::new(kind, format!("{place}: {message}")),
        None => Error::new(kind, format!("{place}: {remedy}")),
    }
}

/// Turns the driver's error at a statement of the application's own into a reaction; `place` is a
/// verb and an object.
pub fn postgres_error(place: &str, error: tokio_postgres::Error) -> Error {
    driver_error_as(classify_of_application, place, error)
}

/// [`postgres_error`] for a statement of ours.
fn own_error(place: &str, error: tokio_postgres::Error) -> Error {
    driver_error_as(classify, place, error)
}

fn driver_error_as(
    classify: fn(&str) -> (ErrorKind, &'static str),
    place: &str,
    error: tokio_postgres::Error,
) -> Error {
    if let Some(cause) = error.as_db_error() {
        let code = cause.code().code();
        let (message, constraint) = (cause.message(), cause.constraint());
        let composed = compose_as(classify(code), place, code, message, constraint);
        return match is_refusal(code) {
            true => composed,
            false => composed.with_source(error),
        };
    }
    let text = error.to_string();
    if text.starts_with("error deserializing") || text.starts_with("invalid column") {
        let context = format!("{place}: a stored value is not what Postrider writes; look at it");
        return Error::corrupt(context).with_source(error);
    }
    if text.starts_with("error serializing") || text.starts_with("error encoding") {
        let context = format!("{place}: a value has a form that PostgreSQL can't take");
        return Error::permanent(context).with_source(error);
    }
    Error::transient(format!("{place}: the connection failed; try again")).with_source(error)
}

/// Turns an error on the way to a connection into a reaction; `name` is the host and its port.
pub(crate) fn connect_error(name: &str, error: tokio_postgres::Error) -> Error {
    let place = format!("connect to {name}");
    if error.as_db_error().is_some() {
        return own_error(&place, error);
    }
    let (kind, remedy) = before_the_server(&error);
    Error::new(kind, format!("{place}: {remedy}")).with_source(error)
}

/// [`connect_error`] for a connection that the driver does not make.
pub(crate) fn connect_io_error(name: &str, error: io::Error) -> Error {
    let (kind, remedy) = before_the_server(&error);
    Error::new(kind, format!("connect to {name}: {remedy}")).with_source(error)
}

/// What a server says on a connection that the driver does not make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServerError {
    /// The SQLSTATE.
    pub(crate) code: String,
    /// In the server's language.
    pub(crate) message: String,
    pub(crate) detail: Option<String>,
    pub(crate) hint: Option<String>,
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (SQLSTATE {})", self.message, self.code)?;
        let more = [("DETAIL", &self.detail), ("HINT", &self.hint)];
        more.iter().try_for_each(|(what, text)| match text {
            Some(text) => write!(f, "; {what}: {text}"),
            None => Ok(()),
        })
    }
}

impl StdError for ServerError {}

/// Turns what a server says to replication into a reaction; `place` is a verb and an object.
pub(crate) fn replication_error(place: &str, error: ServerError) -> Error {
    let code = error.code.as_str();
    if is_refusal(code) {
        return compose(place, code, &error.message, None);
    }
    let composed = match remedy_of_replication(code) {
        Some(remedy) => Error::new(classify(code).0, format!("{place}: {remedy}")),
        None => compose(place, code, &error.message, None),
    };
    composed.with_source(error)
}

/// Where a code means something else to replication than to a statement.
fn remedy_of_replication(code: &str) -> Option<&'static str> {
    Some(match code {
        "42501" => "the role lacks a privilege; replication needs `ALTER ROLE … REPLICATION`",
        "42704" => "there is no slot, or no publication, of that name",
        "42710" => "a slot of that name is there already",
        "53300" => {
            "the server has no connection left for replication; raise its max_wal_senders or \
             max_connections (or the role's limit)"
        }
        "53400" => {
            "all replication slots of the server are in use; drop one that nobody needs, or raise \
             max_replication_slots"
        }
        "55000" => {
            "the server can't stream from this slot: the log that it needs may be gone, wal_level \
             be below logical, or the slot be of another kind or database"
        }
        "55006" => "another session reads from the slot; end it, or wait until the server does",
        _ => return None,
    })
}

/// What goes wrong before the server speaks.
fn before_the_server(error: &(dyn StdError + 'static)) -> (ErrorKind, &'static str) {
    use ErrorKind::{Permanent, Transient};
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(inner) = cause {
        if let Some(io) = inner.downcast_ref::<io::Error>() {
            let tls = io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            return tls.map_or_else(|| unreachable_server(io.kind()), refused_tls);
        }
        cause = inner.source();
    }
    // The driver has no code for these; its texts are its own and in English.
    let text = error.to_string();
    if text == "error performing TLS handshake" {
        return (Permanent, NO_TLS);
    }
    if text == "authentication error" || text == "invalid configuration" {
        return (Permanent, LOGIN_AS_ASKED);
    }
    (Transient, "the connection failed; try again")
}

fn unreachable_server(kind: io::ErrorKind) -> (ErrorKind, &'static str) {
    let text = match kind {
        io::ErrorKind::ConnectionRefused => "nobody listens there; is the server running?",
        io::ErrorKind::NotFound => "there is no such socket; is the server running?",
        io::ErrorKind::TimedOut => "no answer in time; is a firewall in between?",
        io::ErrorKind::PermissionDenied => "the operating system forbids it",
        io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
            "the network has no way there"
        }
        _ => "the connection failed, or its name has no address; check the name and the network",
    };
    (ErrorKind::Transient, text)
}

fn refused_tls(error: &rustls::Error) -> (ErrorKind, &'static str) {
    use CertificateError as C;
    let text = match error {
        rustls::Error::InvalidCertificate(cause) => match cause {
            C::UnknownIssuer => {
                "no authority that is known here vouches for the server's certificate; name its \
                 authority's file by ca_file (sslrootcert in the url)"
            }
            C::Expired | C::ExpiredContext { .. } => {
                "the server's certificate has expired; renew it at the server (a new authority \
                 also goes into ca_file, sslrootcert)"
            }
            C::NotValidYet | C::NotValidYetContext { .. } => {
                "the server's certificate is not valid yet; check the clocks, then the file of \
                 ca_file (sslrootcert)"
            }
            C::NotValidForName | C::NotValidForNameContext { .. } => {
                "the server's certificate is for another name; write the host as the certificate \
                 has it, or check the authority alone by sslmode=verify-ca with ca_file \
                 (sslrootcert)"
            }
            C::Revoked => "the server's certificate was revoked; give the server a new one",
            C::Other(_) => {
                "the server's certificate is refused (an authority's own can't serve as a \
                 server's); give the server one of its own and its authority's to ca_file \
                 (sslrootcert)"
            }
            _ => "the server's certificate is refused; check it and ca_file (sslrootcert)",
        },
        rustls::Error::AlertReceived(_) => {
            "the server refused this client's TLS; does it want a client's certificate (sslcert \
             and sslkey in the url)?"
        }
        rustls::Error::InvalidMessage(_) => "what answers there speaks no TLS; check host and port",
        rustls::Error::PeerIncompatible(_) => {
            "server and client share no version of TLS; allow TLS 1.2 or newer at the server"
        }
        _ => "TLS failed; check the server's settings of `ssl`",
    };
    (ErrorKind::Permanent, text)
}

/// Whether the connection is of no more use after this error.
pub(crate) fn breaks_connection(error: &tokio_postgres::Error) -> bool {
    match error.as_db_error() {
        None => !error.to_string().starts_with("error serializing"),
        Some(cause) => {
            let code = cause.code().code();
            code.starts_with("57P") || code.starts_with("08") || code == "25006" || code == "25P03"
        }
    }
}

/// Whether other connections, made before, are likely to be of no use either.
pub(crate) fn breaks_all_connections(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        None => breaks_connection(error),
        Some(code) => *code == SqlState::READ_ONLY_SQL_TRANSACTION,
    }
}

/// The driver's error below one of ours.
pub(crate) fn driver_error(error: &Error) -> Option<&tokio_postgres::Error> {
    cause_of(error)
}

fn cause_of<T: StdError + 'static>(error: &Error) -> Option<&T> {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(found) = inner.downcast_ref() {
            return Some(found);
        }
        cause = inner.source();
    }
    None
}

/// The SQLSTATE below one of our errors.
pub(crate) fn code_of(error: &Error) -> Option<&str> {
    let of_driver = driver_error(error).and_then(tokio_postgres::Error::code).map(SqlState::code);
    of_driver.or_else(|| cause_of::<ServerError>(error).map(|error| error.code.as_str()))
}

/// What the caller's own transaction, or the values, have brought about. Nothing of the server's
/// error goes along: its details repeat the row that was refused, and rows hold payloads.
fn append_refusal(
    code: &str,
    message: &str,
    constraint: Option<&str>,
    routine: Option<&str>,
) -> Option<Error> {
    let place = crate::append::PLACE;
    match code {
        // A standby's refusal comes from another routine.
        "25006" if routine == Some("PreventCommandIfReadOnly") => Some(Error::permanent(format!(
            "{place}: the transaction is READ ONLY; begin it READ WRITE"
        ))),
        "25P02" => Some(Error::permanent(format!(
            "{place}: a statement before failed the transaction; roll it back and begin again"
        ))),
        // Also the server's answer to all others until the transactions that hold so many end.
        "53200" if routine == Some("LockAcquireExtended") => Some(Error::transient(format!(
            "{place}: the server's table of locks is full, because open transactions append under \
             too many keys; append all events of a transaction in one call, which takes one lock \
             for more than 1000 keys, or raise max_locks_per_transaction"
        ))),
        "54001" => Some(Error::permanent(format!(
            "{place}: the payload is nested deeper than the server can follow; use an outbox \
             with payloads of bytes"
        ))),
        _ if is_refusal(code) => Some(compose(place, code, message, constraint)),
        _ => None,
    }
}

/// [`own_error`] for statements that append.
pub(crate) fn append_error(error: tokio_postgres::Error) -> Error {
    let refusal = error
        .as_db_error()
        .and_then(|e| append_refusal(e.code().code(), e.message(), e.constraint(), e.routine()));
    refusal.unwrap_or_else(|| own_error(crate::append::PLACE, error))
}

/// [`own_error`] for the errors of `sqlx`.
#[cfg(feature = "sqlx")]
pub(crate) fn sqlx_error(place: &str, error: sqlx::Error) -> Error {
    let Some(cause) = sqlx_cause(&error) else {
        let context = format!("{place}: the connection failed; begin again");
        return Error::transient(context).with_source(error);
    };
    let composed = compose(place, cause.code(), cause.message(), cause.constraint());
    match is_refusal(cause.code()) {
        true => composed,
        false => composed.with_source(error),
    }
}

/// [`append_error`] for the errors of `sqlx`.
#[cfg(feature = "sqlx")]
pub(crate) fn append_sqlx_error(error: sqlx::Error) -> Error {
    let refusal = sqlx_cause(&error)
        .and_then(|e| append_refusal(e.code(), e.message(), e.constraint(), e.routine()));
    refusal.unwrap_or_else(|| sqlx_error(crate::append::PLACE, error))
}

#[cfg(feature = "sqlx")]
fn sqlx_cause(error: &sqlx::Error) -> Option<&sqlx::postgres::PgDatabaseError> {
    error.as_database_error().and_then(|error| error.try_downcast_ref())
}

/// [`own_error`] as the argument of `map_err`.
pub(crate) fn failed(place: &'static str) -> impl FnOnce(tokio_postgres::Error) -> Error {
    move |error| own_error(place, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row of the table; the ones that a server can be brought to say are also met for real
    /// in `tests/it`.
    #[test]
    fn codes_have_their_reactions_and_remedies() {
        use ErrorKind::{Corrupt, Permanent, Transient};
        for (code, kind, says) in [
            ("40001", Transient, "begin this one again"),
            ("40P01", Transient, "begin this one again"),
            ("40003", Transient, "is unknown"),
            ("40000", Transient, "rolled the transaction back"),
            ("55P03", Transient, "a lock was not free"),
            ("55006", Transient, "another session uses"),
            ("55000", Transient, "not ready"),
            ("57014", Transient, "time-out"),
            ("57P01", Transient, "ended the connection"),
            ("57P02", Transient, "ended the connection"),
            ("57P03", Transient, "starts or stops"),
            ("57P04", Permanent, "was dropped"),
            ("57P05", Transient, "ended the connection"),
            ("57000", Transient, "intervened"),
            ("25P02", Permanent, "roll it back"),
            ("25P03", Transient, "left open for too long"),
            ("25P04", Transient, "left open for too long"),
            ("25006", Transient, "read-only"),
            ("25000", Permanent, "the server's text"),
            ("26000", Permanent, "a pooler"),
            ("42P05", Permanent, "a pooler"),
            ("28P01", Permanent, "refused the password"),
            ("28000", Permanent, "pg_hba.conf"),
            ("28XXX", Permanent, "refused the login"),
            ("3D000", Permanent, "create it"),
            ("42501", Permanent, "lacks a privilege"),
            ("3F000", Permanent, "postrider init"),
            ("42P01", Permanent, "postrider init"),
            ("42883", Permanent, "postrider init"),
            ("42703", Permanent, "postrider init"),
            ("42P06", Permanent, "choose another"),
            ("42P07", Permanent, "choose another"),
            ("42710", Permanent, "choose another"),
            ("42723", Permanent, "choose another"),
            ("42701", Permanent, "choose another"),
            ("42601", Permanent, "refused the statement"),
            ("53100", Transient, "disk is full"),
            ("53200", Transient, "out of memory"),
            ("53300", Transient, "max_connections"),
            ("53400", Transient, "short of a resource"),
            ("54000", Permanent, "larger"),
            ("58030", Transient, "its system"),
            ("08006", Transient, "connection failed"),
            ("08P01", Transient, "connection failed"),
            ("0A000", ErrorKind::Unsupported, "lacks a feature"),
            ("22P02", Permanent, "the server's text"),
            ("23505", Permanent, "the server's text"),
            ("P0001", Permanent, "the server's text"),
            ("P0002", Corrupt, "restore a backup"),
            ("P0003", Corrupt, "restore a backup"),
            ("PR001", Permanent, "the server's text"),
            ("PR002", Permanent, "the server's text"),
            ("PR003", Permanent, "the server's text"),
            ("PR006", Permanent, "the server's text"),
            ("PR007", Permanent, "the server's text"),
            ("XX000", Transient, "its log"),
            ("XX001", Corrupt, "damaged"),
            ("XX002", Corrupt, "damaged"),
            ("", Permanent, "refused the statement"),
            ("é", Permanent, "refused the statement"),
        ] {
            let error = compose("read", code, "the server's text", None);
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.to_string().contains(says), "{code}: {error}");
        }
    }

    /// A remedy at Postrider's own tables would mislead whoever has misspelt a table of his own.
    #[test]
    fn statements_of_the_application_are_not_told_of_postriders_tables() {
        use ErrorKind::{Permanent, Transient, Unsupported};
        for (code, kind, says) in [
            ("42501", Permanent, "grant it"),
            ("3F000", Permanent, "search_path"),
            ("42P01", Permanent, "search_path"),
            ("42883", Permanent, "search_path"),
            ("42703", Permanent, "search_path"),
            ("42P06", Permanent, "there already"),
            ("42P07", Permanent, "there already"),
            ("42710", Permanent, "there already"),
            ("42723", Permanent, "there already"),
            ("42701", Permanent, "there already"),
            ("P0002", Permanent, "no row"),
            ("P0003", Permanent, "no row"),
            ("0A000", Unsupported, "the statement needs"),
            ("40001", Transient, "begin this one again"),
            ("57P01", Transient, "ended the connection"),
        ] {
            let (found, text) = classify_of_application(code);
            assert_eq!(found, kind, "{code}");
            assert!(text.contains(says) && !text.contains("ostrider"), "{code}: {text}");
        }
    }

    #[test]
    fn a_constraint_whose_name_is_a_sentence_says_it() {
        let text = |code, name| compose("append", code, "violates", Some(name)).to_string();
        assert_eq!(text("23514", "a key has 1 byte or more"), "append: a key has 1 byte or more");
        assert_eq!(text("23505", "outbox_given_pkey"), "append: violates");
        assert_eq!(text("40001", "a key has 1 byte or more"), compose_text("40001"));
    }

    fn compose_text(code: &str) -> String {
        compose("append", code, "violates", None).to_string()
    }

    /// Certificates that no test has a server for; the others are met in `tests/it/tls.rs`.
    #[test]
    fn certificates_are_refused_for_good_and_name_the_file_to_look_at() {
        use CertificateError as C;
        for (cause, says) in [
            (C::UnknownIssuer, "ca_file (sslrootcert"),
            (C::Expired, "has expired"),
            (C::NotValidYet, "clocks"),
            (C::NotValidForName, "another name"),
            (C::Revoked, "revoked"),
            (C::BadSignature, "ca_file (sslrootcert)"),
        ] {
            let (kind, text) = refused_tls(&rustls::Error::InvalidCertificate(cause));
            assert_eq!(kind, ErrorKind::Permanent);
            assert!(text.contains(says), "{text}");
        }
        let (kind, text) = refused_tls(&rustls::Error::DecryptError);
        assert!(kind == ErrorKind::Permanent && text.contains("TLS failed"));
    }
}
