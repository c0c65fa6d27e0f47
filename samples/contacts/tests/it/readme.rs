//! The commands that the sample's page shows do what it says, against the real program.

use std::process::Stdio;

use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::harness::DEADLINE;

const PAGE: &str = include_str!("../../README.md");
/// The address that the page uses, which the test replaces by a free one.
const ADDRESS: &str = "127.0.0.1:8080";

/// The texts of all blocks of one kind.
fn blocks(kind: &str) -> String {
    let fence = format!("```{kind}\n");
    let blocks = PAGE.split(&fence).skip(1);
    blocks.map(|rest| rest.split("```").next().expect("a block ends")).collect()
}

async fn start(folder: &TempDir) -> (Child, String) {
    let mut service = Command::new(env!("CARGO_BIN_EXE_contacts"))
        .args(["--listen", "127.0.0.1:0", "--database", "contacts.db"])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("start the service");
    let output = service.stdout.take().expect("its output is a pipe");
    let mut lines = BufReader::new(output).lines();
    let line = tokio::time::timeout(DEADLINE, lines.next_line()).await.expect("it starts");
    let line = line.expect("read a line").expect("it says its address");
    let address = line.rsplit_once("http://").expect("an address").1.to_owned();
    (service, address)
}

async fn shell(script: &str) -> std::process::Output {
    let running = Command::new("bash").args(["-euo", "pipefail", "-c", script]).output();
    let done = tokio::time::timeout(DEADLINE, running).await.expect("the commands end");
    done.expect("start bash")
}

#[tokio::test]
async fn the_commands_of_the_page_print_what_it_shows_and_a_signal_ends_the_service_with_0() {
    let curl = shell("command -v curl").await;
    assert!(curl.status.success(), "install the package curl (apt-get install curl)");
    for signal in ["INT", "TERM"] {
        let folder = TempDir::new().expect("make a folder");
        let (mut service, address) = start(&folder).await;
        let script = blocks("sh").replace(ADDRESS, &address);
        assert!(script.contains(&address), "{script}");
        let done = shell(&script).await;
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(String::from_utf8_lossy(&done.stdout), blocks("text"));
        let id = service.id().expect("it still runs");
        assert!(shell(&format!("kill -{signal} {id}")).await.status.success());
        let ended = tokio::time::timeout(DEADLINE, service.wait()).await.expect("it drains");
        assert_eq!(ended.expect("wait for it").code(), Some(0), "after SIG{signal}");
    }
}

#[tokio::test]
async fn a_service_that_cannot_start_says_why_and_ends_with_1() {
    let folder = TempDir::new().expect("make a folder");
    let garbage = folder.path().join("contacts.db");
    std::fs::write(&garbage, "no database, only text of some length".repeat(50)).expect("write");
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind a free port");
    let taken = taken.local_addr().expect("an address").to_string();
    for (arguments, says) in [
        (["--listen", "127.0.0.1:0", "--webhook-secret", ""], "contacts.db"),
        (["--listen", &taken, "--webhook-secret", ""], taken.as_str()),
        (["--listen", "127.0.0.1:0", "--webhook-secret", "no secret"], "secret"),
    ] {
        if says == "secret" {
            std::fs::remove_file(&garbage).expect("remove the garbage");
        }
        let running = Command::new(env!("CARGO_BIN_EXE_contacts"))
            .args(arguments)
            .current_dir(folder.path())
            .output();
        let done = tokio::time::timeout(DEADLINE, running).await.expect("it ends");
        let done = done.expect("start the service");
        let error = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{error}");
        assert!(error.contains(says), "{error}");
        assert!(!error.contains("no secret"), "a secret is shown: {error}");
    }
}
