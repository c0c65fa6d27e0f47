//! What can go wrong with the emulator itself.
//!
//! What lives here: errors of its configuration and its start. What does not: what clients are
//! told (`refusal.rs`).
//! Invariant: no message holds a key or a payload.

/// Why an emulator was not started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration can't be read.
    #[error("the configuration can't be read")]
    Syntax(#[source] Box<toml::de::Error>),
    /// The configuration asks for what can't be.
    #[error("{name}: {problem}")]
    Config {
        /// The entity, or the setting.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The address can't be bound.
    #[error("listen at {address}")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The file of the entities can't be used.
    #[error("data {}: {problem}", .path.display())]
    Data {
        /// The file.
        path: std::path::PathBuf,
        /// What was wanted of it, or what is wrong with it.
        problem: &'static str,
        /// Why not.
        #[source]
        source: Option<rusqlite::Error>,
    },
}

/// The result of starting.
pub type Result<T, E = Error> = std::result::Result<T, E>;
