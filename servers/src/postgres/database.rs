//! A fresh database for one test, on a server that many tests may share.
//!
//! What lives here: making and dropping the database, asking it by `psql`. What does not: the
//! server and which one it is (`shared.rs`).
//! Invariant: no two values have the same name, whatever process made them, so tests may run in any
//! number at once; a database is dropped with its value, open sessions or not.

use std::fs::File;
use std::process::Command;

use super::version::Version;
use crate::address::Address;
use crate::error::{Result, While};
use crate::programs;

/// A fresh, empty database. It is dropped with this value.
pub struct Database {
    version: Version,
    /// Of the superuser, in this database.
    address: Address,
    /// The database from which this one is made and dropped.
    home: Address,
}

impl Database {
    pub(super) fn create(version: Version, home: &Address) -> Result<Self> {
        let name = format!("test_{}_{:016x}", std::process::id(), programs::random());
        psql(version, home, &format!("create database {name}"))?;
        Ok(Self { version, address: home.with_database(&name), home: home.clone() })
    }

    /// Its address, as superuser.
    pub fn url(&self) -> String {
        self.address.to_string()
    }

    /// Its address for a role that the test made. Roles belong to the server, so their names should
    /// begin with the database's, and the test drops them.
    pub fn url_as(&self, user: &str, password: Option<&str>) -> String {
        let password = password.map(str::to_owned);
        Address { user: user.to_owned(), password, ..self.address.clone() }.to_string()
    }

    /// Its name: lower-case letters, digits and `_`.
    pub fn name(&self) -> &str {
        &self.address.database
    }

    /// The server's version, for [`Version::program`].
    pub fn version(&self) -> Version {
        self.version
    }

    /// Runs SQL as superuser and returns the rows, one a line, columns separated by `|`. Up to
    /// 100,000 bytes are one transaction; a longer script says for itself.
    ///
    /// # Errors
    ///
    /// If a statement fails.
    pub fn psql(&self, sql: &str) -> Result<String> {
        psql(self.version, &self.address, sql)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let drop = format!("drop database if exists {} with (force)", self.name());
        // The server may be stopped or gone, and then so is the database.
        let _ = psql(self.version, &self.home, &drop);
    }
}

/// A longer text is handed over as a file; Linux takes arguments of up to 128 KiB.
const MOST_ARGUMENT_BYTES: usize = 100_000;

/// A file that has this text and no name any more, to be read from its beginning.
fn unnamed_file(text: &str) -> Result<File> {
    let name = format!("postrider-{}-{:016x}.sql", std::process::id(), programs::random());
    let path = std::env::temp_dir().join(name);
    let write = || {
        std::fs::write(&path, text)?;
        let file = File::open(&path)?;
        std::fs::remove_file(&path).map(|()| file)
    };
    write().during(|| "write a script for psql".to_owned())
}

pub(super) fn psql(version: Version, address: &Address, sql: &str) -> Result<String> {
    let mut command = Command::new(version.program("psql")?);
    command.args(["--no-psqlrc", "--quiet", "--no-align", "--tuples-only"]);
    command.args(["-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", "-d"]);
    // A password can come from the address alone.
    command.arg(address.to_string()).arg("--no-password");
    let rows = if sql.len() <= MOST_ARGUMENT_BYTES {
        programs::finish("psql", command.args(["-c", sql]))?
    } else {
        programs::finish_with("psql", command.args(["-f", "-"]), unnamed_file(sql)?.into())?
    };
    Ok(rows.trim_end_matches('\n').to_owned())
}
