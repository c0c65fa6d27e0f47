//! Runs a script with one of the clients.
//!
//! What lives here: where a script lies so that it finds its client, what it is told, and its
//! output. What does not: scripts.
//! Invariant: a script that ends with a failure, or hangs, fails the test with what it printed.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use postrider_servers::cosmos_sdk::Sdk;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::world::World;

/// More than any script takes on a machine that does something else besides.
const WITHIN: Duration = Duration::from_secs(120);

pub(crate) struct Script {
    sdk: Sdk,
    file: PathBuf,
    /// Removes the script in the end.
    _folder: TempDir,
}

impl Script {
    pub(crate) fn new(sdk: Sdk, name: &str, text: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        let file = folder.path().join(name);
        std::fs::write(&file, text).expect("the script is written");
        if sdk == Sdk::JavaScript {
            // Node.js looks for packages beside the script.
            let packages = sdk.folder().join("node_modules");
            std::os::unix::fs::symlink(packages, folder.path().join("node_modules"))
                .expect("a link");
        }
        Self { sdk, file, _folder: folder }
    }

    /// Runs it to its end, and returns what it printed before "done". It may ask for a split.
    pub(crate) async fn run(&self, world: &World) -> Vec<String> {
        let program = self.sdk.program();
        let program = program.expect("`cargo xtask services install` has installed the client");
        let mut child = Command::new(program)
            .arg(&self.file)
            .env("COSMOS_ENDPOINT", world.account.endpoint())
            .env("COSMOS_KEY", world.account.key())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the script starts");
        let mut input = child.stdin.take().expect("it is piped");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let talk = async {
            let mut printed = Vec::new();
            while let Some(line) = lines.next_line().await.expect("the output is text") {
                if line == "split" {
                    for range in 0..4 {
                        world.account.split("shop", "contacts", range).expect("a split");
                    }
                    input.write_all(b"ok\n").await.expect("the script waits for it");
                } else {
                    printed.push(line);
                }
            }
            printed
        };
        let mut printed = timeout(WITHIN, talk).await.expect("the script ends");
        let status = child.wait().await.expect("it ends");
        assert!(status.success(), "{status}\n{}", printed.join("\n"));
        assert_eq!(printed.pop().as_deref(), Some("done"));
        printed
    }
}
