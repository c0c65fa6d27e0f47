//! Microsoft's own clients of Azure Cosmos DB, for tests that drive them.
//!
//! What lives here: which versions, where they are kept, what runs them. What does not: installing
//! them (`cargo xtask services install`), and the scripts that use them.
//! Invariant: a version is in its folder's name, so that a new one never meets an old installation.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::programs;

/// A client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sdk {
    /// For Python, from PyPI.
    Python,
    /// For Node.js, from npm.
    JavaScript,
}

impl Sdk {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Python, Self::JavaScript];

    /// Its name and version, as its own installer takes it.
    pub fn package(self) -> &'static str {
        match self {
            Self::Python => "azure-cosmos==4.17.1",
            Self::JavaScript => "@azure/cosmos@4.10.1",
        }
    }

    /// The packages of PyPI that it is made of; those of npm stand in a lock file.
    pub fn python_packages(self) -> &'static [&'static str] {
        match self {
            Self::Python => &[
                "azure-cosmos==4.17.1",
                "azure-core==1.41.0",
                "certifi==2026.10.19.post1",
                "charset-normalizer==3.5.3",
                "idna==3.20",
                "requests==2.34.2",
                "typing-extensions==4.16.0",
                "urllib3==2.8.0",
            ],
            Self::JavaScript => &[],
        }
    }

    /// Where it is kept: a virtual environment, or a folder with `node_modules`.
    pub fn folder(self) -> PathBuf {
        programs::environment(match self {
            Self::Python => "azure-cosmos-4.17.1",
            Self::JavaScript => "azure-cosmos-js-4.10.1",
        })
    }

    /// Whether it is there whole: the last thing that its installation makes.
    fn is_installed(self) -> bool {
        match self {
            Self::Python => programs::python_packages(&self.folder())
                .any(|packages| packages.join("azure/cosmos/__init__.py").is_file()),
            Self::JavaScript => {
                self.folder().join("node_modules/@azure/cosmos/package.json").is_file()
            }
        }
    }

    /// The program that runs a script which uses it.
    ///
    /// # Errors
    ///
    /// If the client or the program is not installed; the text says how to install it.
    pub fn program(self) -> Result<PathBuf> {
        if !self.is_installed() {
            return Err(Error::missing(self.package()));
        }
        match self {
            Self::Python => Ok(self.folder().join("bin/python3")),
            Self::JavaScript => programs::find("node"),
        }
    }
}
