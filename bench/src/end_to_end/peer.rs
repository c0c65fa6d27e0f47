//! mq-bridge, the fastest other way from PostgreSQL's log into a broker that was measured.
//!
//! What lives here: finding it, and the process that it runs in. What does not: what is measured of
//! it.
//! Invariant: it runs as it comes: a route from `postgres_cdc` to the broker, batches of 512, each
//! message acknowledged before the slot moves. It drops no repetitions.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;

const ROUTE: &str = "import json, sys\nfrom mq_bridge import Route\n\
                     Route.from_config(json.loads(sys.argv[1])).run()\n";
const VERSION: &str = "from importlib.metadata import version\n\
                       import mq_bridge\nassert version('mq-bridge') == '1.2.0'\n";
/// What is told where it is missing.
pub(super) const NOT_INSTALLED: &str = "mq-bridge 1.2.0 is not installed: \
     nothing is measured against it. To install it:\n  \
     python3 -m venv peer && peer/bin/pip install mq-bridge==1.2.0\n\
     and give --peer peer/bin/python";

/// A Python that has it.
pub(super) struct Peer(PathBuf);

impl Peer {
    /// The given Python, or that of the folder `PEERS`, if it has mq-bridge of that version.
    pub(super) fn find(given: Option<PathBuf>) -> Option<Self> {
        let folder = || std::env::var_os("PEERS").filter(|folder| !folder.is_empty());
        let of_folder = || folder().map(|at| Path::new(&at).join("venv/mqbridge/bin/python"));
        let python = given.or_else(of_folder)?;
        let mut command = Command::new(&python);
        command.args(["-c", VERSION]).stdin(Stdio::null()).stderr(Stdio::null());
        let has_it = command.status().is_ok_and(|status| status.success());
        has_it.then_some(Self(python))
    }

    /// A process that sends what a slot gives, until it is ended.
    pub(super) fn route(&self, url: &str, slot: &str, output: &serde_json::Value) -> Command {
        let input = json!({"postgres_cdc": {
            "url": url, "publication": "postrider_outbox", "slot_name": slot,
            "create_slot": false, "create_publication": false, "consume": "capture_new",
            "status_interval_ms": 500,
        }});
        let route = json!({"input": input, "output": output, "batch_size": 512});
        let mut command = Command::new(&self.0);
        command.args(["-c", ROUTE, &route.to_string()]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}
