//! Starts one step of an SDK's script and talks to it.

use std::process::Stdio;
use std::time::Duration;

use postrider_servers::servicebus_sdk::Sdk;
use postrider_servicebus_emulator::{Config, Emulator, Entity, Topic, condition};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

/// More than any step takes on a machine that does something else besides.
const STEP_WITHIN: Duration = Duration::from_secs(90);

/// An emulator with what the scripts use.
pub(crate) async fn emulator() -> Emulator {
    let entity = Entity::default;
    let plain =
        Entity { max_delivery_count: 3, lock_duration: Duration::from_secs(30), ..entity() };
    let window = Some(Duration::from_secs(20));
    let sessions = Entity { requires_session: true, ..entity() };
    let topic = Topic::default()
        .with_subscription("all", entity())
        .with_subscription("by-session", sessions.clone());
    let config = Config::default()
        .with_queue("plain", plain)
        .with_queue("sessions", sessions)
        .with_queue("detecting", Entity { duplicate_detection_window: window, ..entity() })
        .with_queue("burying", Entity { dead_letter_on_expiration: true, ..entity() })
        .with_queue("large", Entity { max_message_bytes: 1024 * 1024, ..entity() })
        .with_topic("events", topic);
    Emulator::start(config).await.expect("the emulator starts on a free port")
}

/// What steps ask for by name.
pub(crate) fn go_wrong(emulator: &Emulator, name: &str) {
    let faults = emulator.faults();
    match name {
        "detach" => faults.detach_links("plain", condition::DETACH_FORCED),
        "expire" => faults.expire_tokens(),
        "drop" => faults.drop_connections(),
        "close" => faults.close_connections(condition::CONNECTION_FORCED),
        _ => panic!("an unknown fault: {name}"),
    }
}

/// Runs a step to its end, and returns what it printed before "done".
pub(crate) async fn run(sdk: Sdk, emulator: &Emulator, step: &str) -> Vec<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk");
    let script = match sdk {
        Sdk::Python => "steps.py",
        Sdk::JavaScript => "steps.mjs",
    };
    let program = sdk.program().expect("`cargo xtask services install` has installed the SDK");
    let mut child = Command::new(program)
        .arg(folder.join(script))
        .arg(step)
        .env("CONNECTION_STRING", emulator.connection_string())
        .env("SDK_FOLDER", sdk.folder())
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
            match line.split_once(' ') {
                Some(("advance", seconds)) => {
                    let seconds = seconds.parse().expect("it is a number of seconds");
                    emulator.advance(Duration::from_secs(seconds));
                }
                Some(("fault", name)) => go_wrong(emulator, name),
                _ => {
                    printed.push(line);
                    continue;
                }
            }
            input.write_all(b"ok\n").await.expect("the script waits for it");
        }
        printed
    };
    let mut printed = timeout(STEP_WITHIN, talk).await.unwrap_or_else(|_| panic!("{step} hangs"));
    let status = child.wait().await.expect("it ends");
    assert!(status.success(), "{step}: {status}\n{}", printed.join("\n"));
    assert_eq!(printed.pop().as_deref(), Some("done"), "{step}");
    printed
}
