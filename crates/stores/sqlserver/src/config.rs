//! How to open the store.
//!
//! What lives here: the options, their defaults and their checks. What does not: connecting, and
//! reading the connection string (`address.rs`).
//! Invariant: every default is safe; impossible values are refused before any connection.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_core::limits::MAX_PARTITIONS;
use postrider_core::{Error, Result, Secret};

use crate::address::Address;

/// Longest name of a schema, in characters: the names of its objects and locks are built from it.
pub const MAX_SCHEMA_NAME_CHARS: usize = 19;
/// Shortest of the time-outs.
const LEAST_TIMEOUT: Duration = Duration::from_millis(100);

/// What opening does when the tables are missing or of an older version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchemaOnOpen {
    /// Create or upgrade them.
    #[default]
    Migrate,
    /// Refuse.
    Require,
}

/// Gives the tokens of Microsoft Entra ID by which a login is believed; asked for each connection.
#[async_trait]
pub trait AccessTokens: Send + Sync + std::fmt::Debug {
    /// A token for `https://database.windows.net/`.
    ///
    /// # Errors
    /// `Transient` if the directory can't be reached, `Permanent` if it refuses.
    async fn token(&self) -> Result<Secret>;
}

/// Which outbox of which database, and how to reach it.
#[derive(Debug, Clone)]
pub struct SqlServerOptions {
    pub(crate) connection: Secret,
    pub(crate) schema: String,
    pub(crate) partitions: u32,
    pub(crate) on_open: SchemaOnOpen,
    pub(crate) connections: usize,
    pub(crate) statement_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) ca_file: Option<PathBuf>,
    pub(crate) tokens: Option<Arc<dyn AccessTokens>>,
}

impl SqlServerOptions {
    /// The outbox of schema `postrider` in the database that a connection string in ADO.NET's form
    /// names: `Server=host,1433;Database=name;User ID=…;Password=…`.
    ///
    /// The connection is encrypted and the certificate checked unless the string says otherwise:
    /// `TrustServerCertificate=true` believes any, `Encrypt=false` encrypts the login alone.
    pub fn new(connection: impl Into<String>) -> Self {
        Self {
            connection: Secret::new(connection.into()),
            schema: "postrider".to_owned(),
            partitions: 8,
            on_open: SchemaOnOpen::default(),
            connections: 8,
            statement_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(15),
            ca_file: None,
            tokens: None,
        }
    }

    /// The schema that holds all of Postrider's tables; any name, it is always quoted.
    #[must_use]
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// Partitions of an outbox that opening creates; an existing one keeps its number.
    #[must_use]
    pub fn partitions(mut self, count: u32) -> Self {
        self.partitions = count;
        self
    }

    /// What to do about missing or older tables.
    #[must_use]
    pub fn on_open(mut self, what: SchemaOnOpen) -> Self {
        self.on_open = what;
        self
    }

    /// Most connections held at a time.
    #[must_use]
    pub fn connections(mut self, count: usize) -> Self {
        self.connections = count;
        self
    }

    /// Longest time for one statement, for a lock, and for a connection to be free. The
    /// connection string's own `Command Timeout` wins.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = timeout;
        self
    }

    /// Longest time to connect, login included. The connection string's own `Connect Timeout`
    /// wins.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// A file of certificates (PEM) of authorities that may vouch for the server, besides the
    /// system's own.
    #[must_use]
    pub fn ca_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(file.into());
        self
    }

    /// Logs in by tokens of Microsoft Entra ID instead of a user and a password.
    #[must_use]
    pub fn access_tokens(mut self, tokens: Arc<dyn AccessTokens>) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// Refuses what can't work, before anything is connected to.
    ///
    /// # Errors
    /// `Permanent`, naming the option.
    pub fn check(&self) -> Result<()> {
        check_schema(&self.schema)?;
        if self.partitions == 0 || self.partitions > MAX_PARTITIONS {
            return Err(Error::permanent(format!(
                "partitions: {} is not between 1 and {MAX_PARTITIONS}",
                self.partitions
            )));
        }
        if self.connections == 0 {
            return Err(Error::permanent("connections: at least 1 is needed"));
        }
        if self.statement_timeout < LEAST_TIMEOUT {
            return Err(Error::permanent("statement_timeout: give at least 100 ms"));
        }
        if self.connect_timeout < LEAST_TIMEOUT {
            return Err(Error::permanent("connect_timeout: give at least 100 ms"));
        }
        self.address().map(drop)
    }

    pub(crate) fn address(&self) -> Result<Address> {
        let mut address = Address::parse(self.connection.expose())?;
        if let Some(file) = &self.ca_file {
            if address.any_certificate {
                return Err(Error::permanent(
                    "ca_file: TrustServerCertificate believes any certificate; leave one out",
                ));
            }
            address.authority = Some(file.clone());
        }
        let has_login = address.user.is_some() || address.password.is_some();
        if self.tokens.is_some() && has_login {
            return Err(Error::permanent(
                "url: User ID and Password are of no use beside auth = \"entra\"; leave them out",
            ));
        }
        if self.tokens.is_none() && address.user.is_none() {
            return Err(Error::permanent(
                "url: name the login: User ID=…;Password=…, or set auth = \"entra\"",
            ));
        }
        Ok(address)
    }
}

pub(crate) fn check_schema(name: &str) -> Result<()> {
    let chars = name.encode_utf16().count();
    if chars == 0 || chars > MAX_SCHEMA_NAME_CHARS {
        return Err(Error::permanent(format!(
            "schema: the name has {chars} characters; 1 to {MAX_SCHEMA_NAME_CHARS} are allowed"
        )));
    }
    if name.chars().any(char::is_control) {
        return Err(Error::permanent("schema: the name has a control character"));
    }
    if name.contains('\'') {
        return Err(Error::permanent("schema: the name has a quotation mark (')"));
    }
    let reserved = ["sys", "information_schema", "guest"];
    if reserved.iter().any(|taken| name.eq_ignore_ascii_case(taken)) {
        return Err(Error::permanent("schema: SQL Server keeps that name for itself"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_options_are_refused_before_any_connection() {
        let good = || SqlServerOptions::new("Server=db;User ID=a;Password=b");
        good().check().expect("well formed");
        for (options, says) in [
            (good().schema(""), "schema"),
            (good().schema("s".repeat(20)), "schema"),
            (good().schema("it's"), "schema"),
            (good().schema("a\nb"), "schema"),
            (good().schema("SYS"), "schema"),
            (good().partitions(0), "partitions"),
            (good().partitions(MAX_PARTITIONS + 1), "partitions"),
            (good().connections(0), "connections"),
            (good().statement_timeout(Duration::from_millis(1)), "statement_timeout"),
            (good().connect_timeout(Duration::ZERO), "connect_timeout"),
            (SqlServerOptions::new("Server=db"), "name the login"),
            (SqlServerOptions::new("Database=db"), "name the server"),
        ] {
            let error = options.check().expect_err("impossible");
            assert!(error.to_string().contains(says), "{error}");
        }
        assert!(!format!("{:?}", good()).contains("Password=b"));
    }
}
