//! From SQL Server's error numbers, and from what goes wrong before there is one, to reactions;
//! nowhere else in this crate.
//!
//! What lives here: the mapping, with a remedy for each row. What does not: what is refused before
//! the server is asked. Invariant: matched by number, never by the server's text, which is in its
//! own language; no error holds the connection string, nor the values that a constraint refused.

use std::fmt;

use postrider_core::{Error, ErrorKind};
use tiberius::error::{Error as DriverError, IoErrorKind, TokenError};

/// A key is there already: in a primary key or constraint, or in a unique index.
const DUPLICATE: [u32; 2] = [2627, 2601];
/// Two transactions waited for each other, and this one was rolled back.
const DEADLOCK: u32 = 1205;
/// What Babelfish says instead of several numbers of SQL Server's.
const BABELFISH: u32 = 33_557_097;
/// From here on numbers are those of `throw`: the text is Postrider's own.
const OWN: u32 = 50_000;
/// Errors of this class and above end the connection.
const FATAL_CLASS: u8 = 20;
/// Errors of this class and above say that the server is short of something.
const RESOURCE_CLASS: u8 = 17;

/// The kind of an error number, and what a person should do about it.
fn classify(number: u32) -> Option<(ErrorKind, &'static str)> {
    transient(number).or_else(|| refused(number)).or_else(|| damaged(number))
}

/// What passes by itself.
fn transient(number: u32) -> Option<(ErrorKind, &'static str)> {
    use ErrorKind::{Throttled, Transient};
    let throttled = Throttled { retry_after: None };
    Some(match number {
        DEADLOCK => {
            (Transient, "another transaction was in the way; begin this one again from its start")
        }
        1222 => (Transient, "a lock was not free in time; try again"),
        3960 | 3961 => (Transient, "the row was changed by another transaction; begin again"),
        1204 => (Transient, "the server has no lock left; try again later"),
        701 | 802 | 8645 | 8651 | 8657 => {
            (Transient, "the server is out of memory; try again later")
        }
        1101 | 1105 | 9002 | 40544 => {
            (Transient, "the database or its log is full; make room: nothing was saved")
        }
        9001 => (Transient, "the database's log is not available; look at the server"),
        596 | 10054 | 6005 | 6006 => (Transient, "the server ended the session; try again"),
        17142 | 17187 | 17188 | 17197 => (Transient, "the server starts or stops; try again"),
        17809 | 17810 | 17830 => {
            (Transient, "the server takes no more connections; lower the option `connections`")
        }
        921 | 922 | 927 | 942 | 952 => {
            (Transient, "the database is being recovered, restored or set offline; try again")
        }
        924 => (Transient, "the database is in single-user mode; try again"),
        976 | 978 | 979 | 982 | 983 | 3906 => (
            Transient,
            "the database takes no writes here (a secondary replica?); wait for the fail-over, or \
             name the primary or a listener",
        ),
        40197 | 40143 | 40540 | 4221 => {
            (Transient, "the service met an error or a fail-over; try again")
        }
        40613 => (Transient, "the database is not available at this moment; try again"),
        40549..=40553 => {
            (Transient, "the service ended the session, which held too much for too long")
        }
        42108 | 42109 => (Transient, "the database is paused, or is being resumed; try again"),
        40501 | 10928 | 10929 | 49918 | 49919 | 49920 => (
            throttled,
            "the service is busy, or the database's limit is reached; it is tried again",
        ),
        _ => return None,
    })
}

/// What a person has to change.
fn refused(number: u32) -> Option<(ErrorKind, &'static str)> {
    use ErrorKind::{Permanent, Unsupported};
    Some(match number {
        18456 | 40532 | 18452 | 18470 | 18486 => (
            Permanent,
            "the server refused the login; check user, password (or token) and database",
        ),
        18487 | 18488 => (Permanent, "the login's password has expired; change it"),
        40615 | 40914 => (Permanent, "the service's firewall refuses this address; let it in"),
        4060 | 911 => (
            Permanent,
            "there is no database of that name, or the login may not use it; create it, or make \
             the login a user of it",
        ),
        229 | 230 | 262 | 297 | 300 | 916 | 2760 | 15247 | 15151 => (
            Permanent,
            "the login lacks a permission; a relay needs the role of docs/stores/sqlserver.md, \
             init the right to create a schema with tables",
        ),
        208 | 207 | 2812 => {
            (Permanent, "Postrider's tables or procedures are missing; run `postrider init`")
        }
        2714 | 2759 => (
            Permanent,
            "something of that name is there already and is not Postrider's; choose another schema",
        ),
        2627 | 2601 => (Permanent, "a value that must be unique is there already"),
        515 | 547 | 8152 | 2628 | 8115 | 245 | 8114 | 1946 => {
            (Permanent, "the server refused the value")
        }
        266 | 3902 | 3903 | 3930 => (
            Permanent,
            "the transaction has failed or was ended before; roll it back and begin again",
        ),
        195 | 10308 => (Unsupported, "this server lacks a feature that Postrider needs"),
        _ => return None,
    })
}

/// What a person has to look at.
fn damaged(number: u32) -> Option<(ErrorKind, &'static str)> {
    Some(match number {
        605 | 823 | 824 | 829 | 3414 => (
            ErrorKind::Corrupt,
            "the database reports damaged data; stop, check its disks, restore a backup",
        ),
        _ => return None,
    })
}

/// The kind of an error that a procedure of `migrations/` throws; docs/design/sqlserver-feed.md has
/// the whole table.
fn thrown(number: u32) -> ErrorKind {
    match number {
        // A lock that was not free, a deadlock over one, rows that somebody else changed.
        77_103 | 77_104 | 77_110 => ErrorKind::Transient,
        77_200 => ErrorKind::Fenced,
        _ => ErrorKind::Permanent,
    }
}

/// Babelfish has one number for many things, and texts in English.
fn classify_babelfish(text: &str) -> (ErrorKind, &'static str) {
    let says = |part: &str| text.contains(part);
    let number = match () {
        () if says("lock timeout") => 1222,
        () if says("could not serialize") => 3960,
        () if says("permission denied") => 229,
        () if says("does not exist") || says("not found") => 208,
        () => return (ErrorKind::Permanent, "the server refused the statement"),
    };
    classify(number).expect("rows of the tables above")
}

/// The kind of an error of the server, and what a person should do about it.
fn reaction(number: u32, class: u8, text: &str) -> (ErrorKind, &'static str) {
    if number == BABELFISH {
        return classify_babelfish(text);
    }
    classify(number).unwrap_or(match class {
        FATAL_CLASS.. => (ErrorKind::Transient, "the server ended the connection; try again"),
        RESOURCE_CLASS.. => (ErrorKind::Transient, "the server is short of a resource; try again"),
        _ => (ErrorKind::Permanent, "the server refused the statement"),
    })
}

/// Texts of these repeat values of rows, and rows hold payloads and keys.
fn repeats_values(number: u32) -> bool {
    DUPLICATE.contains(&number)
        || matches!(number, 515 | 547 | 8152 | 2628 | 8115 | 245 | 8114 | 241 | 1946 | BABELFISH)
}

/// What the server said, as far as it may be shown.
#[derive(Debug)]
struct Said {
    number: u32,
    state: u8,
    line: u32,
    procedure: String,
    text: Option<String>,
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error {} (state {})", self.number, self.state)?;
        if !self.procedure.is_empty() {
            write!(f, " in {} at line {}", self.procedure, self.line)?;
        }
        match &self.text {
            Some(text) => write!(f, ": {text}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Said {}

impl Said {
    fn new(token: &TokenError) -> Self {
        let text = (!repeats_values(token.code())).then(|| token.message().to_owned());
        Self {
            number: token.code(),
            state: token.state(),
            line: token.line(),
            procedure: token.procedure().to_owned(),
            text,
        }
    }
}

/// Turns the driver's error into a reaction; `place` is a verb and an object.
pub fn sqlserver_error(place: &str, error: DriverError) -> Error {
    let (kind, remedy) = match &error {
        DriverError::Server(token) if token.code() >= OWN && token.code() != BABELFISH => {
            // Our procedures raised it: the text says what is wrong, and what to do.
            let text = token.message().strip_prefix("changefeed: ").unwrap_or(token.message());
            return Error::new(thrown(token.code()), format!("{place}: {text}"));
        }
        DriverError::Server(token) => {
            let (kind, remedy) = reaction(token.code(), token.class(), token.message());
            return Error::new(kind, format!("{place}: {remedy}")).with_source(Said::new(token));
        }
        DriverError::Io { kind, message } => before_the_server(*kind, message),
        DriverError::Tls(_) => (ErrorKind::Permanent, REFUSED_TLS),
        DriverError::Protocol(text) if text.contains("encryption level") => (
            ErrorKind::Permanent,
            "the server offers no TLS; give it a certificate, or allow plain text by Encrypt=false",
        ),
        DriverError::Protocol(_) | DriverError::Routing { .. } => {
            (ErrorKind::Transient, "the connection failed; try again")
        }
        DriverError::Encoding(_)
        | DriverError::Conversion(_)
        | DriverError::Utf8
        | DriverError::Utf16
        | DriverError::ParseInt(_) => {
            (ErrorKind::Corrupt, "a stored value is not what Postrider writes; look at it")
        }
        _ => (ErrorKind::Permanent, "the client refused the value"),
    };
    let context = format!("{place}: {remedy}");
    // Of a value that could not be read the driver repeats what it is.
    match kind {
        ErrorKind::Corrupt => Error::corrupt(context),
        _ => Error::new(kind, context).with_source(error),
    }
}

const REFUSED_TLS: &str = "the server's certificate is refused; name its authority's file by \
    ca_file, or the name that it has by HostNameInCertificate";

/// What goes wrong before the server speaks, or while it does.
fn before_the_server(kind: IoErrorKind, message: &str) -> (ErrorKind, &'static str) {
    use ErrorKind::{Permanent, Transient};
    match kind {
        IoErrorKind::ConnectionRefused => {
            (Transient, "nobody listens there; is the server running?")
        }
        IoErrorKind::TimedOut => (Transient, "no answer in time; is a firewall in between?"),
        IoErrorKind::HostUnreachable | IoErrorKind::NetworkUnreachable => {
            (Transient, "the network has no way there")
        }
        IoErrorKind::PermissionDenied => (Transient, "the operating system forbids it"),
        // The driver makes a text of what TLS says, in English.
        IoErrorKind::InvalidData if message.contains("certificate") => (Permanent, REFUSED_TLS),
        _ => (Transient, "the connection failed; try again"),
    }
}

/// [`sqlserver_error`] as the argument of `map_err`.
pub(crate) fn failed(place: &'static str) -> impl FnOnce(DriverError) -> Error {
    move |error| sqlserver_error(place, error)
}

/// Whether the error says that a value which must be unique exists already.
pub(crate) fn is_duplicate(error: &DriverError) -> bool {
    error.code().is_some_and(|number| DUPLICATE.contains(&number))
}

/// Whether the same call may be made again at once: the server rolled it back whole.
pub(crate) fn is_deadlock(error: &DriverError) -> bool {
    error.code() == Some(DEADLOCK)
}

/// Whether the connection is of no more use after this error.
pub(crate) fn breaks_connection(error: &DriverError) -> bool {
    match error {
        DriverError::Server(token) => token.class() >= FATAL_CLASS || token.code() == 3906,
        DriverError::Conversion(_) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_its_reaction() {
        use ErrorKind::{Corrupt, Permanent, Throttled, Transient, Unsupported};
        let throttled = Throttled { retry_after: None };
        for (number, kind) in [
            (1205, Transient),
            (1222, Transient),
            (3960, Transient),
            (701, Transient),
            (9002, Transient),
            (596, Transient),
            (17142, Transient),
            (922, Transient),
            (983, Transient),
            (3906, Transient),
            (40613, Transient),
            (40197, Transient),
            (40550, Transient),
            (40501, throttled),
            (10928, throttled),
            (49918, throttled),
            (49919, throttled),
            (49920, throttled),
            (18456, Permanent),
            (4060, Permanent),
            (911, Permanent),
            (40615, Permanent),
            (229, Permanent),
            (208, Permanent),
            (2812, Permanent),
            (2627, Permanent),
            (2601, Permanent),
            (8152, Permanent),
            (3930, Permanent),
            (195, Unsupported),
            (824, Corrupt),
            (102, Permanent),
        ] {
            assert_eq!(reaction(number, 16, "").0, kind, "{number}");
        }
        assert_eq!(reaction(4014, 20, "").0, Transient, "a class that ends the connection");
        assert_eq!(reaction(1, 17, "").0, Transient, "a class that says what is short");
    }

    #[test]
    fn what_our_procedures_throw_has_its_reaction() {
        for (number, kind) in [
            (77_100, ErrorKind::Permanent),
            (77_101, ErrorKind::Permanent),
            (77_103, ErrorKind::Transient),
            (77_104, ErrorKind::Transient),
            (77_110, ErrorKind::Transient),
            (77_111, ErrorKind::Permanent),
            (77_112, ErrorKind::Permanent),
            (77_113, ErrorKind::Permanent),
            (77_200, ErrorKind::Fenced),
            (77_202, ErrorKind::Permanent),
        ] {
            assert_eq!(thrown(number), kind, "{number}");
        }
    }

    #[test]
    fn babelfishs_one_number_is_told_apart() {
        for (text, kind) in [
            ("canceling statement due to lock timeout", ErrorKind::Transient),
            ("could not serialize access due to concurrent update", ErrorKind::Transient),
            ("relation \"a.b\" does not exist", ErrorKind::Permanent),
            ("permission denied for table b", ErrorKind::Permanent),
            ("anything else", ErrorKind::Permanent),
        ] {
            assert_eq!(reaction(BABELFISH, 16, text).0, kind, "{text}");
        }
    }

    #[test]
    fn a_connection_that_fails_may_be_tried_again_and_a_certificate_not() {
        let io = |kind, message: &str| DriverError::Io { kind, message: message.to_owned() };
        for (error, kind) in [
            (io(IoErrorKind::UnexpectedEof, "eof"), ErrorKind::Transient),
            (io(IoErrorKind::ConnectionReset, "reset"), ErrorKind::Transient),
            (io(IoErrorKind::TimedOut, "late"), ErrorKind::Transient),
            (
                io(IoErrorKind::InvalidData, "invalid peer certificate: UnknownIssuer"),
                ErrorKind::Permanent,
            ),
            (DriverError::Protocol("invalid token type 7".into()), ErrorKind::Transient),
            (
                DriverError::Protocol(
                    "Server does not allow the requested encryption level.".into(),
                ),
                ErrorKind::Permanent,
            ),
            (DriverError::Conversion("no String: \"hunter2\"".into()), ErrorKind::Corrupt),
        ] {
            let error = sqlserver_error("do it", error);
            assert_eq!(error.kind(), kind, "{error:?}");
            assert!(!error.chain().contains("hunter2"), "{}", error.chain());
        }
    }
}
