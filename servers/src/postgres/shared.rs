//! Which server ordinary tests share.
//!
//! What lives here: the choice between a server that the environment names and one of this process,
//! and the servers that a whole test run shares. What does not: databases.
//! Invariant: without a server there is an error, never a skipped test.

use std::sync::{Mutex, PoisonError};

use super::database::Database;
use super::options::Options;
use super::server::Server;
use super::version::Version;
use crate::address::Address;
use crate::error::Result;

/// Servers of this process, for when the environment names none. They are never dropped: when the
/// process ends, their keepers end them.
static OWN: Mutex<Vec<Server>> = Mutex::new(Vec::new());

/// A fresh database on the server that the environment names ([`Version::shared_variable`]), else
/// on one that this process starts for itself and keeps.
///
/// Transaction ids, roles, slots and settings belong to a server, not to a database: a test of the
/// oldest open transaction, of `pg_stat_activity` as a whole or of the log launches its own server.
///
/// # Errors
///
/// If there is no server and none can be started.
pub fn shared(version: Version) -> Result<Database> {
    if let Ok(url) = std::env::var(version.shared_variable()) {
        return Database::create(version, &Address::parse(&url)?);
    }
    let mut own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(server) = own.iter().find(|server| server.version() == version) {
        return server.create_database();
    }
    let server = Options::new(version).launch()?;
    let database = server.create_database();
    own.push(server);
    database
}

/// One server of each version, for a whole test run. They end with this value.
pub struct SharedServers(Vec<Server>);

impl SharedServers {
    /// Starts a server of each version that the environment does not name already.
    ///
    /// # Errors
    ///
    /// If one can't be started.
    pub fn start() -> Result<Self> {
        let wanted = |version: &Version| std::env::var_os(version.shared_variable()).is_none();
        let launches: Vec<_> = Version::ALL
            .into_iter()
            .filter(wanted)
            .map(|version| {
                // Many test processes at once, each with a pool.
                let options = Options::new(version).setting("max_connections = 500");
                std::thread::spawn(|| options.launch())
            })
            .collect();
        let launched = launches
            .into_iter()
            .map(|launch| launch.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok(Self(launched.collect::<Result<_>>()?))
    }

    /// What a test process needs in its environment to find them.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let variable = |server: &Server| {
            (server.version().shared_variable(), server.url("postgres", "postgres"))
        };
        self.0.iter().map(variable).collect()
    }
}
