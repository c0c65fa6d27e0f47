//! Events as JSON lines, to a file or standard output.
//!
//! What lives here: the sink `JsonLines`, its configuration, the line format and the log file with
//! its rotation. What does not: retries and order across calls, which are the relay's.
//! Invariant: an event is confirmed only after its whole line was written and flushed (and synced
//! to disk, by default), and no reader ever sees two lines merged into one.

mod config;
mod encode;
mod error;
mod log_file;
mod publish;
mod rotation;
mod writer;

pub use config::JsonlConfig;
pub use publish::JsonLines;
