//! Microsoft's in-memory emulator of Azure Cosmos DB, behind an HTTP port.
//!
//! What lives here: finding the program, starting it, and asking it for containers, splits, regions
//! and faults. What does not: the emulator itself (`emulators/cosmos`), and clients of the service.
//! Invariant: it ends when its standard input does, and so with the process that started it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::error::{Error, Result, While};

/// Names the program, if it is not where `cargo xtask services install` builds it.
pub const VARIABLE: &str = "POSTRIDER_COSMOS_EMULATOR";
/// Under the target folder; its first part is the target folder of its own workspace.
pub const PLACE: &str = "cosmos-emulator/debug/postrider-cosmos-emulator";
/// Longest time for one command.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the program is: beside the tests' own build.
///
/// # Errors
///
/// If it was not built; the text says how to build it.
pub fn program() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE) {
        return Ok(named.into());
    }
    let own = std::env::current_exe().during(|| "see where this program is".to_owned())?;
    let built = own.ancestors().map(|folder| folder.join(PLACE)).find(|file| file.is_file());
    built.ok_or_else(|| Error::missing(PLACE))
}

/// An emulated account. It ends with this value.
///
/// ```no_run
/// # use postrider_servers::cosmos::Cosmos;
/// # fn main() -> postrider_servers::Result<()> {
/// let account = Cosmos::start()?;
/// account.create_container("shop", "orders", 4)?;
/// let _connect_to = account.connection_string();
/// // The next batch is carried out, and its answer lost.
/// account.fault(r#"{"operation": "batch", "carriedOut": true}"#)?;
/// # Ok(())
/// # }
/// ```
pub struct Cosmos {
    process: Child,
    connection_string: String,
}

impl Cosmos {
    /// Starts an account with one region.
    ///
    /// # Errors
    ///
    /// If the program is missing or does not start.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// [`Self::start`] with more arguments, such as `--region`.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn start_with(arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(program()?);
        command.args(arguments).arg("--with-parent");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut process = command.spawn().during(|| "start the Cosmos DB emulator".to_owned())?;
        let mut line = String::new();
        if let Some(output) = process.stdout.take() {
            let read = BufReader::new(output).read_line(&mut line);
            read.during(|| "read the emulator's first line".to_owned())?;
        }
        let started = Self { process, connection_string: line.trim().to_owned() };
        if started.part("AccountEndpoint=").is_empty() {
            return Err(Error::failed("starting the Cosmos DB emulator", line));
        }
        Ok(started)
    }

    /// What clients connect by: `AccountEndpoint=…;AccountKey=…;`.
    pub fn connection_string(&self) -> &str {
        &self.connection_string
    }

    /// The account's address, such as `http://127.0.0.1:8081/`; with several regions each has one of
    /// its own besides, which clients learn from the account.
    pub fn endpoint(&self) -> &str {
        self.part("AccountEndpoint=")
    }

    /// The account's key.
    pub fn key(&self) -> &str {
        self.part("AccountKey=")
    }

    fn part(&self, name: &str) -> &str {
        let mut parts = self.connection_string.split(';');
        parts.find_map(|part| part.strip_prefix(name)).unwrap_or_default()
    }

    /// Makes a container with the partition key `/partitionKey` and with documents' time to live
    /// switched on, and its database if that is missing.
    ///
    /// # Errors
    ///
    /// If it is there already.
    pub fn create_container(&self, database: &str, container: &str, ranges: u32) -> Result<()> {
        let asked = format!(
            r#"{{"database": "{database}", "container": "{container}", "ranges": {ranges}}}"#
        );
        self.ask("POST", "containers", &asked).map(drop)
    }

    /// Splits a range in its middle and waits until that has happened; returns the answer, which
    /// names its two successors.
    ///
    /// # Errors
    ///
    /// If there is no such range.
    pub fn split(&self, database: &str, container: &str, range: u32) -> Result<String> {
        let asked = format!(
            r#"{{"database": "{database}", "container": "{container}", "ranges": [{range}]}}"#
        );
        self.ask("POST", "split", &asked)
    }

    /// Merges two neighbouring ranges and waits until that has happened; returns the answer, which
    /// names the successor.
    ///
    /// # Errors
    ///
    /// If there are no such ranges, or they are no neighbours.
    pub fn merge(&self, database: &str, container: &str, ranges: [u32; 2]) -> Result<String> {
        let [one, other] = ranges;
        let asked = format!(
            r#"{{"database": "{database}", "container": "{container}",
                 "ranges": [{one}, {other}]}}"#
        );
        self.ask("POST", "merge", &asked)
    }

    /// Lets another region take writes, as a fail-over that was asked for does.
    ///
    /// # Errors
    ///
    /// If there is no such region.
    pub fn write_region(&self, name: &str) -> Result<()> {
        self.ask("POST", "regions/write", &format!(r#"{{"name": "{name}"}}"#)).map(drop)
    }

    /// Makes a region impossible to reach; the next one takes writes then.
    ///
    /// # Errors
    ///
    /// If there is no such region, or it is the last one.
    pub fn region_offline(&self, name: &str) -> Result<()> {
        self.ask("POST", "regions/offline", &format!(r#"{{"name": "{name}"}}"#)).map(drop)
    }

    /// Brings a region back.
    ///
    /// # Errors
    ///
    /// If there is no such region.
    pub fn region_online(&self, name: &str) -> Result<()> {
        self.ask("POST", "regions/online", &format!(r#"{{"name": "{name}"}}"#)).map(drop)
    }

    /// Adds a fault; `emulators/cosmos/README.md` has its members.
    ///
    /// # Errors
    ///
    /// If it is no fault; the text says why.
    pub fn fault(&self, fault: &str) -> Result<()> {
        self.ask("POST", "faults", fault).map(drop)
    }

    /// Takes all faults back that have met no request yet.
    ///
    /// # Errors
    ///
    /// If the emulator does not answer.
    pub fn clear_faults(&self) -> Result<()> {
        self.ask("DELETE", "faults", "").map(drop)
    }

    /// The counters of requests, as JSON.
    ///
    /// # Errors
    ///
    /// If the emulator does not answer.
    pub fn requests(&self) -> Result<String> {
        self.ask("GET", "requests", "")
    }

    /// One command under `/_emu/`; returns its answer's content.
    ///
    /// # Errors
    ///
    /// If it is refused; the text says why.
    pub fn ask(&self, method: &str, path: &str, content: &str) -> Result<String> {
        let address = self.endpoint().trim_start_matches("http://").trim_end_matches('/');
        let what = || format!("ask the Cosmos DB emulator for {path}");
        let mut stream = TcpStream::connect(address).during(what)?;
        stream.set_read_timeout(Some(PATIENCE)).during(what)?;
        let length = content.len();
        let request = format!(
            "{method} /_emu/{path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{content}"
        );
        stream.write_all(request.as_bytes()).during(what)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).during(what)?;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        if head.starts_with("HTTP/1.1 200") {
            return Ok(body.to_owned());
        }
        Err(Error::failed(what(), answer))
    }
}

impl Drop for Cosmos {
    fn drop(&mut self) {
        // It keeps nothing that would need an orderly end; both fail only if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
