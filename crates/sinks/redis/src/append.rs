//! One call of the script that appends the events of some keys.
//!
//! What lives here: its arguments and its answers. What does not: when it is called (`publish.rs`),
//! and what an error means (`error.rs`).
//! Invariant: the script is one step of the server: of each key's events the first ones are
//! appended, in order, and nothing of the others; what is wrong with one key keeps back no other.

use bytes::Bytes;
use postrider_core::EventId;
use redis::aio::MultiplexedConnection;
use redis::{RedisError, RedisResult, Script, ScriptInvocation};

const SCRIPT: &str = include_str!("append.lua");
/// Before what the server remembers of an event.
const SEEN_PREFIX: &str = "postrider:seen:";
const NEW: &[u8] = b"new";
const DUPLICATE: &[u8] = b"duplicate";
const NO_STREAM: &[u8] = b"no stream";
const HELD_BACK: &[u8] = b"held back";
/// Marks a key's first event.
const FIRST: &str = "+";

/// What the server says of one event.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    New,
    Duplicate,
    NoStream,
    /// An earlier event of its key failed.
    HeldBack,
    /// The text of an error, with its code first.
    Refused(String),
}

impl From<Vec<u8>> for Answer {
    fn from(text: Vec<u8>) -> Self {
        match text.as_slice() {
            NEW => Self::New,
            DUPLICATE => Self::Duplicate,
            NO_STREAM => Self::NoStream,
            HELD_BACK => Self::HeldBack,
            _ => Self::Refused(String::from_utf8_lossy(&text).into_owned()),
        }
    }
}

/// The script, and what is the same in each of its calls.
pub(crate) struct Append {
    script: Script,
    seen_for_ms: u64,
    creates: bool,
}

impl Append {
    pub(crate) fn new(seen_for_ms: u64, creates: bool) -> Self {
        Self { script: Script::new(SCRIPT), seen_for_ms, creates }
    }

    /// Gives the script to the server, which forgets it when it starts anew.
    pub(crate) async fn load(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        self.script.load_async(connection).await.map(|_| ())
    }

    /// A call without an event.
    pub(crate) fn call(&self) -> Call<'_> {
        let mut invocation = self.script.prepare_invoke();
        invocation.arg(self.seen_for_ms).arg(u8::from(self.creates));
        Call { invocation, remembers: self.seen_for_ms > 0, bytes: 0 }
    }
}

/// Events on their way to the server.
pub(crate) struct Call<'a> {
    invocation: ScriptInvocation<'a>,
    remembers: bool,
    bytes: usize,
}

impl Call<'_> {
    /// Adds an event with the fields of its entry; `first` is its key's first in this call.
    pub(crate) fn add(&mut self, stream: &str, id: EventId, fields: &[Bytes], first: bool) {
        self.invocation.key(stream);
        if self.remembers {
            self.invocation.key(format!("{SEEN_PREFIX}{stream}:{id}"));
        }
        let mark = if first { FIRST } else { "" };
        self.invocation.arg(format!("{mark}{}", fields.len()));
        self.bytes += stream.len();
        for field in fields {
            self.bytes += field.len();
            self.invocation.arg(field.as_ref());
        }
    }

    /// Bytes of its events: names and values of their entries.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sends it; there is an answer for each event.
    pub(crate) async fn send(
        &self,
        connection: &mut MultiplexedConnection,
    ) -> Result<Vec<Answer>, RedisError> {
        let answers: Vec<Vec<u8>> = self.invocation.invoke_async(connection).await?;
        Ok(answers.into_iter().map(Answer::from).collect())
    }
}
