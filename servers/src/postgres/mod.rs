//! PostgreSQL: private servers, and fresh databases on a shared one.
//!
//! What lives here: the public names. What does not: how they work, one idea a file.
//! Invariant: a test that only needs a database asks [`shared`]; one that stops, breaks or
//! configures a server starts its own by [`Options`].
//!
//! ```no_run
//! use postrider_servers::postgres::{self, Options, Shutdown, Version};
//!
//! # fn main() -> postrider_servers::Result<()> {
//! let database = postgres::shared(Version::V15)?; // fresh, dropped with the value
//! let _connect_to = database.url();
//!
//! let server = Options::new(Version::V18).setting("wal_level = logical").launch()?;
//! let database = server.create_database()?;
//! server.restart(Shutdown::Immediate)?;
//! assert_eq!(database.psql("select 1")?, "1");
//! # Ok(())
//! # }
//! ```

mod database;
mod options;
mod server;
mod shared;
mod version;

pub use database::Database;
pub use options::Options;
pub use server::{Server, Shutdown};
pub use shared::{SharedServers, shared};
pub use version::Version;
