//! From the server's answers and the client's failures to error kinds.
//!
//! What lives here: the mappings. What does not: what follows, which the relay decides.
//! Invariant: what is wrong with *this event* is permanent. What is wrong with one stream, or with
//! the server's memory, is throttled: others may go on, and who is only transient is given up while
//! others go on. What is wrong with the server or the connection is transient, since then nothing
//! goes on. So an outage parks nothing.
//!
//! | the server says | kind |
//! |---|---|
//! | a text is longer than `proto-max-bulk-len`, an entry is too large | permanent |
//! | no such stream, and none may be made | throttled; by `unroutable` |
//! | the stream's key holds something else, the login may not use it | throttled |
//! | out of memory (`OOM`) | throttled |
//! | anything else: read-only, loading, busy, no replicas, refused, connection lost | transient |

use std::borrow::Cow;

use postrider_core::{Error, ErrorKind};
use redis::RedisError;

use crate::config::Unroutable;

/// Of an event whose stream does not exist.
pub(crate) fn unroutable(how: Unroutable, stream: &str) -> Error {
    let text = format!("the stream {stream} does not exist; make it, or let create_streams = true");
    match how {
        Unroutable::Retry => Error::new(THROTTLED, text),
        Unroutable::Park => Error::permanent(text),
    }
}

/// Of an event that is to wait, however long, while others may go on.
const THROTTLED: ErrorKind = ErrorKind::Throttled { retry_after: None };

/// Of an event whose text is longer than the server takes.
pub(crate) fn too_large(bytes: usize, limit: usize) -> Error {
    Error::permanent(format!(
        "the event has a text of {bytes} bytes; the server's proto-max-bulk-len allows {limit}"
    ))
}

/// Of events for which no place was free while their call may send.
pub(crate) fn no_place() -> Error {
    Error::new(
        THROTTLED,
        "the event was not sent: no free place in time among those that wait for their answers",
    )
}

/// Whether the login may not call the script with these streams; nothing of it was run.
pub(crate) fn is_forbidden(error: &RedisError) -> bool {
    error.code() == Some("NOPERM")
}

/// Whether the server refused a command because of its size, before it ran it.
pub(crate) fn is_too_large(error: &RedisError) -> bool {
    error.code() == Some("ERR") && error.detail().is_some_and(tells_size)
}

fn tells_size(detail: &str) -> bool {
    detail.contains("invalid bulk length") || detail.contains("too large")
}

/// Whether another connection may lead to a server that takes events. Only the code decides: a
/// text may repeat a stream's name.
fn tells_to_leave(code: &str, detail: &str) -> bool {
    match code {
        // It is a replica now, or cut off from its replicas or its disk, which is what fail-overs
        // begin with; or the login has changed.
        "READONLY" | "MASTERDOWN" | "NOREPLICAS" | "MISCONF" | "NOAUTH" => true,
        "ERR" => tells_stale(detail),
        _ => false,
    }
}

/// Older servers run a script while they have no primary, and refuse what it does.
fn tells_stale(detail: &str) -> bool {
    detail.contains("stale replica")
}

/// [`tells_to_leave`] of what the script tells of one event.
pub(crate) fn answer_tells_to_leave(text: &str) -> bool {
    let (code, detail) = code_of(text);
    tells_to_leave(code, detail)
}

/// [`tells_to_leave`] of the error of a call.
pub(crate) fn error_tells_to_leave(error: &RedisError) -> bool {
    error.code().is_some_and(|code| tells_to_leave(code, error.detail().unwrap_or_default()))
}

/// The error of an event that the script told of.
pub(crate) fn refused(text: &str, stream: &str) -> Error {
    let (code, detail) = code_of(text);
    from_server("append to a stream", code, detail, Some(stream))
}

/// A code, and the text after it. Older servers put the script's name and a dash before it.
fn code_of(text: &str) -> (&str, &str) {
    let is_code = |word: &str| word.len() >= 3 && word.bytes().all(|b| b.is_ascii_uppercase());
    for word in text.split(' ').take(4) {
        let code = word.trim_start_matches('-');
        if is_code(code) {
            let after = text.split_once(word).map_or("", |(_, after)| after);
            return (code, after.trim_start());
        }
    }
    ("ERR", text)
}

/// The error of a call with events, and of which stream if it is the only one.
pub(crate) fn call_error(error: &RedisError, stream: Option<&str>) -> Error {
    match error.code() {
        Some(code) => {
            from_server("append to a stream", code, error.detail().unwrap_or_default(), stream)
        }
        None => redis_error("append to a stream", error),
    }
}

/// The error of a call, with what was done.
pub(crate) fn redis_error(what: &'static str, error: &RedisError) -> Error {
    if let Some(code) = error.code() {
        return from_server(what, code, error.detail().unwrap_or_default(), None);
    }
    Error::transient(what).with_source(shown(error))
}

/// The error of a connection that could not be made.
pub(crate) fn connect_error(error: RedisError) -> Error {
    let meaning = match error.kind() {
        redis::ErrorKind::AuthenticationFailed => "connect to Redis: the login is refused",
        redis::ErrorKind::RESP3NotSupported => {
            "connect to Redis: the server is older than version 6.2"
        }
        _ if matches!(error.code(), Some("WRONGPASS" | "NOAUTH" | "NOPERM")) => {
            "connect to Redis: the login is refused"
        }
        _ => return redis_error("connect to Redis", &error),
    };
    Error::transient(meaning).with_source(shown(&error))
}

fn from_server(what: &str, code: &str, detail: &str, stream: Option<&str>) -> Error {
    let (kind, meaning): (ErrorKind, Cow<'static, str>) = match code {
        "OOM" => (THROTTLED, "the server's memory is used up (maxmemory)".into()),
        "ERR" if tells_size(detail) => {
            (ErrorKind::Permanent, "the event is larger than the server takes".into())
        }
        "WRONGTYPE" => {
            let stream = stream.unwrap_or("of the settings");
            let text = format!(
                "the key {stream} holds something else than a stream; rename or delete it, or let \
                 `stream` name another"
            );
            (THROTTLED, text.into())
        }
        "READONLY" => (
            ErrorKind::Transient,
            "the server is a replica now, which takes no events; the primary is awaited".into(),
        ),
        "LOADING" => (ErrorKind::Transient, "the server is loading its data".into()),
        "BUSY" => (ErrorKind::Transient, "the server is busy with somebody's script".into()),
        "MASTERDOWN" => (ErrorKind::Transient, "the server is a replica without primary".into()),
        "ERR" if tells_stale(detail) => {
            (ErrorKind::Transient, "the server is a replica without primary".into())
        }
        "NOREPLICAS" => (ErrorKind::Transient, "the server lacks replicas".into()),
        "MISCONF" => (ErrorKind::Transient, "the server can't write to its disk".into()),
        "NOAUTH" | "WRONGPASS" => (ErrorKind::Transient, "the login is refused".into()),
        // Version 7.0 says so of what a script does.
        "ERR" if detail.contains("The user executing the script can't") => lacks_permission(stream),
        "NOPERM" => lacks_permission(stream),
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" | "TRYAGAIN" => (
            ErrorKind::Transient,
            "the server is a node of a Redis Cluster, which this sink can't use".into(),
        ),
        _ => (ErrorKind::Transient, what.to_owned().into()),
    };
    Error::new(kind, meaning).with_source(format!("{code} {}", without_arguments(detail)))
}

/// Of one stream, others may be permitted; of none in particular, nothing is.
fn lacks_permission(stream: Option<&str>) -> (ErrorKind, Cow<'static, str>) {
    match stream {
        Some(stream) => {
            let text = format!(
                "the login lacks a permission to append to the stream {stream}, or to set its \
                 seen keys"
            );
            (THROTTLED, text.into())
        }
        None => (ErrorKind::Transient, "the login lacks a permission".into()),
    }
}

/// The server's own text. It repeats the arguments of commands that it does not know.
fn without_arguments(detail: &str) -> &str {
    detail.split(", with args").next().unwrap_or_default()
}

fn shown(error: &RedisError) -> String {
    without_arguments(&error.to_string()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As version 7.0.15 and 6.0 say it.
    #[test]
    fn each_answer_has_its_kind() {
        for (text, kind, part) in [
            ("OOM command not allowed when used memory > 'maxmemory'.", THROTTLED, "maxmemory"),
            ("@user_script: 15: -OOM command not allowed", THROTTLED, "maxmemory"),
            ("READONLY You can't write against a read only replica.", ErrorKind::Transient, "prim"),
            ("-READONLY You can't write", ErrorKind::Transient, "replica"),
            ("LOADING Redis is loading the dataset in memory", ErrorKind::Transient, "loading"),
            ("BUSY Redis is busy running a script.", ErrorKind::Transient, "busy"),
            ("MASTERDOWN Link with MASTER is down", ErrorKind::Transient, "without primary"),
            ("Can not execute the command on a stale replica", ErrorKind::Transient, "without pr"),
            ("NOREPLICAS Not enough good replicas", ErrorKind::Transient, "lacks replicas"),
            ("MISCONF Errors writing to the AOF file", ErrorKind::Transient, "disk"),
            ("NOAUTH Authentication required.", ErrorKind::Transient, "login"),
            ("WRONGPASS invalid username-password pair", ErrorKind::Transient, "login"),
            ("NOPERM ACL failure in script", THROTTLED, "permission"),
            ("ERR The user executing the script can't run", THROTTLED, "permission"),
            ("WRONGTYPE Operation against a key", THROTTLED, "the key orders holds"),
            ("MOVED 866 10.0.0.1:6379", ErrorKind::Transient, "Redis Cluster"),
            ("CROSSSLOT Keys in request don't hash", ErrorKind::Transient, "Redis Cluster"),
            ("CLUSTERDOWN Hash slot not served", ErrorKind::Transient, "Redis Cluster"),
            ("TRYAGAIN Multiple keys request", ErrorKind::Transient, "Redis Cluster"),
            ("ERR Protocol error: invalid bulk length", ErrorKind::Permanent, "larger"),
            ("ERR Elements are too large to be stored", ErrorKind::Permanent, "larger"),
            ("ERR The stream has exhausted the last possible ID", ErrorKind::Transient, "last"),
            ("anything", ErrorKind::Transient, "append to a stream: ERR anything"),
        ] {
            let error = refused(text, "orders");
            assert_eq!(error.kind(), kind, "{text}");
            assert!(error.chain().contains(part), "{text}: {}", error.chain());
        }
    }

    #[test]
    fn the_code_alone_tells_to_leave_a_server() {
        for (text, leaves) in [
            ("READONLY You can't write against a read only replica.", true),
            ("@user_script: 15: -READONLY You can't write", true),
            ("MASTERDOWN Link with MASTER is down", true),
            ("@user_script: 10: Can not execute the command on a stale replica", true),
            ("NOREPLICAS Not enough good replicas to write.", true),
            ("MISCONF Errors writing to the AOF file", true),
            ("NOAUTH Authentication required.", true),
            ("OOM command not allowed", false),
            ("LOADING Redis is loading the dataset in memory", false),
            ("ERR The READONLY stream has exhausted the last possible ID", false),
            ("WRONGTYPE Operation against READONLY", false),
        ] {
            assert_eq!(answer_tells_to_leave(text), leaves, "{text}");
        }
    }

    #[test]
    fn a_missing_stream_is_waited_for_or_parks() {
        let of = |how| unroutable(how, "orders").kind();
        assert_eq!(of(Unroutable::Retry), THROTTLED);
        assert_eq!(of(Unroutable::Park), ErrorKind::Permanent);
    }

    #[test]
    fn a_login_without_permission_for_no_stream_in_particular_is_an_outage() {
        let error = from_server("look at the stream", "NOPERM", "no", None);
        assert_eq!(error.kind(), ErrorKind::Transient);
    }

    #[test]
    fn no_argument_of_a_command_is_repeated() {
        let text = "ERR unknown command 'EVALSHA', with args beginning with: '9f1' 'hunter2'";
        let shown = refused(text, "orders").chain();
        assert!(shown.contains("EVALSHA") && !shown.contains("hunter2"), "{shown}");
    }
}
