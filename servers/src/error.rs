//! What can go wrong while a server is started, and what to do.
//!
//! What lives here: the one error type. What does not: a server's own errors, which are text here.
//! Invariant: whoever reads one knows which program it was and what to run next.

use std::io;

/// Why a server could not be started, stopped or asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program is not installed.
    #[error("{program} is missing; run `cargo xtask services install`{hint}")]
    Missing {
        /// Its name or where it was expected.
        program: String,
        /// What else would help.
        hint: String,
    },
    /// A program ended with a failure, or too late.
    #[error("{what} failed: {output}")]
    Failed {
        /// What was being done.
        what: String,
        /// What the program said.
        output: String,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it was refused.
        source: io::Error,
    },
}

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn failed(what: impl Into<String>, output: impl Into<String>) -> Self {
        Self::Failed { what: what.into(), output: output.into() }
    }

    pub(crate) fn missing(program: impl Into<String>) -> Self {
        Self::Missing { program: program.into(), hint: String::new() }
    }
}

/// Says what was being done when the operating system refused it.
pub(crate) trait While<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> While<T> for io::Result<T> {
    fn during(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { what: what(), source })
    }
}
