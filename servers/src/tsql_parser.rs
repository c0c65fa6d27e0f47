//! Microsoft's own parser of T-SQL, by which tests check texts where no SQL Server is to be had.
//!
//! What lives here: finding the program and asking it about one text. What does not: which texts
//! are checked, and what they do: a parser knows no table and no type.
//! Invariant: a text is accepted only if every batch of it parses in the grammar asked for.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result, While};
use crate::programs;

/// The package of PyPI that has the program, a formatter built on Microsoft's ScriptDom.
pub const PYTHON_PACKAGES: &[&str] = &["maxdop==0.1.3"];

/// A version of SQL Server, whose grammar is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grammar {
    /// SQL Server 2016, the oldest that is supported.
    V2016,
    /// SQL Server 2022.
    V2022,
}

impl Grammar {
    /// Both that texts have to pass.
    pub const ALL: [Self; 2] = [Self::V2016, Self::V2022];

    fn name(self) -> &'static str {
        match self {
            Self::V2016 => "2016",
            Self::V2022 => "2022",
        }
    }
}

/// The virtual environment in which [`PYTHON_PACKAGES`] are installed.
pub fn virtual_environment() -> PathBuf {
    programs::environment("maxdop-0.1.3")
}

/// Where the parser's program is.
///
/// # Errors
///
/// If it is not installed; the text says how to install it.
pub fn program() -> Result<PathBuf> {
    let program = virtual_environment().join("bin").join("maxdop");
    if program.is_file() { Ok(program) } else { programs::find("maxdop") }
}

/// What the parser says about a file: nothing if all of it parses, else line, column and remark of
/// the first mistake in each batch that does not.
///
/// # Errors
///
/// If the program is missing or can't be started.
pub fn complaint(file: &Path, grammar: Grammar) -> Result<Option<String>> {
    let mut command = Command::new(program()?);
    command.arg("--parser-version").arg(grammar.name()).arg(file).stdin(Stdio::null());
    let ran = command.output().during(|| "start maxdop".to_owned())?;
    if ran.status.success() {
        return Ok(None);
    }
    let said = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
    if said.contains("(error ") {
        return Ok(Some(said));
    }
    Err(Error::failed("maxdop", said))
}
