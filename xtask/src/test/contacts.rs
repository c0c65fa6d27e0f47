//! `cargo xtask contacts`, from its start to its end, as a person uses it.
//!
//! What lives here: creating a contact, receiving its event with Microsoft's own client, stopping.
//! What does not: the command (`../contacts.rs`).
//! Invariant: after the stop there is no folder, and nobody listens where the programs did.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use postrider_servers::servicebus_sdk::Sdk;

use super::tally::Tally;
use super::{Outcome, steps};
use crate::contacts::RECEIVER;
use crate::process;
use crate::services::terminate;
use crate::workspace::Workspace;

/// For each wait, on a machine that does much else.
const DEADLINE: Duration = Duration::from_secs(60);
/// How often an end is looked for.
const POLL: Duration = Duration::from_millis(20);
/// What the command says last when it has started everything.
const READY: &str = "Ctrl-C ends all of it";
const CONTACT: &str = r#"{"firstName": "Ada", "lastName": "Lovelace", "email": "ada@example.com",
    "companyName": "Analytical Engines"}"#;

/// The whole way, on the programs of the tests' own build.
pub(super) fn run(workspace: &Workspace) -> Result<Outcome> {
    let built = match steps::test_binaries(workspace)? {
        Ok(folder) => folder,
        Err(output) => return Ok(Outcome::Failed(Tally::default(), output)),
    };
    Ok(match travel(workspace, &built) {
        Ok(()) => Outcome::Passed(Tally { passed: 1, ..Tally::default() }),
        Err(error) => {
            Outcome::Failed(Tally { failed: 1, ..Tally::default() }, format!("{error:#}\n"))
        }
    })
}

fn travel(workspace: &Workspace, built: &Path) -> Result<()> {
    let folder = tempfile::tempdir().context("make a temporary folder")?;
    // This process's own file may have been replaced by that build.
    let mut command = Command::new(built.join("xtask"));
    command.args(["contacts", "--built"]).arg(built).env("TMPDIR", folder.path());
    let mut running = Talking::start(command.current_dir(&workspace.root))?;
    let passed = arrive(&mut running, workspace);
    if passed.is_ok() {
        let entries = std::fs::read_dir(folder.path()).context("look into the folder")?;
        let left: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        ensure!(left.is_empty(), "the command left behind: {left:?}");
    }
    passed.with_context(|| format!("the command said:\n{}", running.errors()))
}

fn arrive(running: &mut Talking, workspace: &Workspace) -> Result<()> {
    let said = running.lines_until(READY)?;
    let value = |name: &str| {
        let mut found = said.iter().filter_map(|line| line.trim().strip_prefix(name));
        found.next().map(str::trim).with_context(|| format!("find {name} in {said:?}"))
    };
    let (page, account, bus) = (value("page")?, value("Cosmos DB")?, value("bus")?);
    let contact = create(address(page)?)?;

    let mut receiver = Command::new(Sdk::Python.program()?);
    receiver.arg(workspace.root.join(RECEIVER)).env("CONNECTION_STRING", bus);
    let receiver = Talking::start(receiver.env("PYTHONDONTWRITEBYTECODE", "1"))?;
    let line = receiver.line().with_context(|| format!("receive: {}", receiver.errors()))?;
    let event = line.strip_prefix(&format!("{contact}  ContactCreatedEvent  "));
    let event = event.with_context(|| format!("look for {contact}'s session in {line}"))?;
    let event: serde_json::Value = serde_json::from_str(event).context("read the event")?;
    ensure!(event["contactId"] == contact.as_str(), "another contact's: {event}");
    drop(receiver);

    let status = running.stop()?;
    ensure!(status.success(), "the command ended with {status}");
    for place in [page, account, bus] {
        let place = address(place)?;
        ensure!(TcpStream::connect(place).is_err(), "somebody still listens on {place}");
    }
    Ok(())
}

/// Host and port of the first URL in a text.
fn address(text: &str) -> Result<&str> {
    let (_, rest) = text.split_once("://").with_context(|| format!("find an address in {text}"))?;
    Ok(rest.split(['/', ';']).next().unwrap_or(rest))
}

/// Creates a contact; returns its id.
fn create(address: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).context("connect to the service")?;
    stream.set_read_timeout(Some(DEADLINE)).context("set a deadline")?;
    let length = CONTACT.len();
    let request = format!(
        "POST /api/contacts HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{CONTACT}"
    );
    stream.write_all(request.as_bytes()).context("create a contact")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("read the answer")?;
    ensure!(answer.starts_with("HTTP/1.1 201"), "no contact was created: {answer}");
    let location = answer.lines().find_map(|line| line.strip_prefix("location: "));
    let id = location.and_then(|path| path.rsplit('/').next());
    Ok(id.with_context(|| format!("find the contact's address in {answer}"))?.to_owned())
}

/// A program that is listened to. It ends with this value.
struct Talking {
    process: Child,
    output: Receiver<String>,
    errors: Receiver<String>,
}

impl Talking {
    fn start(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().with_context(|| format!("start {command:?}"))?;
        let ((to_output, output), (to_errors, errors)) = (channel(), channel());
        process::forward(process.stdout.take(), to_output);
        process::forward(process.stderr.take(), to_errors);
        Ok(Self { process, output, errors })
    }

    fn line(&self) -> Result<String> {
        self.output.recv_timeout(DEADLINE).context("wait for a line of its output")
    }

    fn lines_until(&self, last: &str) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        while !lines.last().is_some_and(|line: &String| line.starts_with(last)) {
            lines.push(self.line()?);
        }
        Ok(lines)
    }

    fn errors(&self) -> String {
        self.errors.try_iter().map(|line| line + "\n").collect()
    }

    /// Asks it to end, and waits for that.
    fn stop(&mut self) -> Result<ExitStatus> {
        terminate(&self.process);
        let started = Instant::now();
        while started.elapsed() < DEADLINE {
            if let Some(status) = self.process.try_wait().context("wait for its end")? {
                return Ok(status);
            }
            std::thread::sleep(POLL);
        }
        bail!("it did not end within {} s of SIGTERM", DEADLINE.as_secs())
    }
}

impl Drop for Talking {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_in_urls_and_connection_strings() {
        for text in ["http://a:1/", "AccountEndpoint=http://a:1/;AccountKey=b", "sb://a:1;Key=c"] {
            assert_eq!(address(text).expect("there is one"), "a:1");
        }
        assert!(address("nothing").is_err());
    }
}
