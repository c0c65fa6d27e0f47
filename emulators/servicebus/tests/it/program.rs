//! The program: its page's command, its file, its end.

use std::path::Path;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

pub(crate) const SOON: Duration = Duration::from_secs(30);

fn page() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    std::fs::read_to_string(page).expect("the page is there")
}

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_postrider-servicebus-emulator"));
    command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The program with files that can't grow beyond so many blocks of 512 bytes.
pub(crate) fn limited(blocks: u32, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    // Without the trap the signal would end it, where a full disk is only an error.
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_postrider-servicebus-emulator")]);
    command.args(arguments).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// Starts it, and returns its first line once clients can connect.
pub(crate) async fn start(arguments: &[&str]) -> (Child, String) {
    first_line(program(arguments)).await
}

pub(crate) async fn first_line(mut program: Command) -> (Child, String) {
    let mut child = program.spawn().expect("it starts");
    let mut output = BufReader::new(child.stdout.take().expect("it is piped"));
    let mut line = String::new();
    timeout(SOON, output.read_line(&mut line)).await.expect("in time").expect("it is text");
    (child, line.trim().to_owned())
}

fn port(line: &str) -> u16 {
    let address = line.strip_prefix("Endpoint=sb://").expect("a connection string comes first");
    let (address, _) = address.split_once(';').expect("the address ends");
    let (_, port) = address.rsplit_once(':').expect("it has a port");
    port.parse().expect("a port is a number")
}

async fn end(child: Child, signal: Signal) {
    let status = killed(child, signal).await;
    assert!(status.success(), "{status}");
}

/// Waits until a signal has ended it.
pub(crate) async fn killed(mut child: Child, signal: Signal) -> ExitStatus {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed())).expect("it runs");
    kill_process(pid, signal).expect("it runs");
    timeout(SOON, child.wait()).await.expect("it ends in time").expect("it ended")
}

async fn output(arguments: &[&str]) -> Output {
    timeout(SOON, program(arguments).output()).await.expect("in time").expect("it ran")
}

#[tokio::test]
async fn the_pages_command_starts_it_and_a_signal_ends_it() {
    let page = page();
    let name = "postrider-servicebus-emulator ";
    let command = page.lines().find_map(|line| line.strip_prefix(name)).expect("it is there");
    let arguments: Vec<&str> = command.split_whitespace().collect();
    for signal in [Signal::TERM, Signal::INT] {
        let (child, line) = start(&arguments).await;
        assert!(line.ends_with(";UseDevelopmentEmulator=true"), "{line}");
        // A client that says nothing must not hold it up.
        let client = TcpStream::connect(("127.0.0.1", port(&line))).await;
        let client = client.expect("clients can connect");
        end(child, signal).await;
        drop(client);
    }
}

#[tokio::test]
async fn the_file_beside_the_page_is_right() {
    let (child, line) = start(&["--config", "emulator.toml"]).await;
    assert!(port(&line) > 0);
    end(child, Signal::TERM).await;
}

#[tokio::test]
async fn what_is_wrong_is_told_on_standard_error() {
    let ran = output(&["--config", "no-such-file.toml"]).await;
    assert_eq!(ran.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("read no-such-file.toml"));
    let ran = output(&["--queue", "a//b", "--listen", "127.0.0.1:0"]).await;
    assert_eq!(ran.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("a//b"));
}

#[tokio::test]
async fn its_help_has_examples() {
    let ran = output(&["--help"]).await;
    let help = String::from_utf8_lossy(&ran.stdout).into_owned();
    for part in ["Examples:", "--session-queue", "--config emulator.toml", "--listen"] {
        assert!(help.contains(part), "{help}");
    }
}
