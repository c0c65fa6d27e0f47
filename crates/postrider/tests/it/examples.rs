//! Every example is run and its output read.
//!
//! What lives here: the examples that end by themselves. What does not: `hello_outbox`, which runs
//! until it is stopped (`hello.rs`).
//! Invariant: each run has a folder of its own, which is also its working directory.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Far longer than any example takes, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// An example's program, which cargo builds beside the tests.
pub(crate) fn example(name: &str, folder: &TempDir) -> Command {
    let test = std::env::current_exe().unwrap();
    let built: PathBuf = test.parent().unwrap().parent().unwrap().join("examples");
    let program = built.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    assert!(program.is_file(), "{name} is not built; run `cargo build -p postrider --examples`");
    let mut command = Command::new(program);
    command.current_dir(folder.path()).stdin(Stdio::null());
    command
}

/// Waits for the end, and kills a program that does not come to it.
pub(crate) fn exit_in_time(child: &mut Child) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begun.elapsed() > DEADLINE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("the example did not end within {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs an example to its end and returns what it wrote.
fn output(name: &str, folder: &TempDir) -> String {
    let mut child =
        example(name, folder).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The outputs are short enough for the pipes' buffers, so that nothing waits for a reader.
    let status = exit_in_time(&mut child);
    let output = child.wait_with_output().unwrap();
    assert!(status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn unit_of_work() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        output("unit_of_work", &folder),
        "created with 1 event\n\
         about to save the name Janet\n\
         renamed with 1 event\n\
         about to save the name Joan\n\
         refused: document c1 was changed by somebody else; read it again\n"
    );
}

#[test]
fn subscription() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        output("subscription", &folder),
        "kitchen {\"room\":\"kitchen\",\"celsius\":19}\n\
         kitchen {\"room\":\"kitchen\",\"celsius\":20}\n\
         kitchen {\"room\":\"kitchen\",\"celsius\":21}\n"
    );
    let lines = output("subscription", &folder).lines().count();
    assert_eq!(lines, 3, "the checkpoint stands after the first run's events");
}

#[test]
fn inbox() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        output("inbox", &folder),
        "delivery 1: reserved\ndelivery 2: seen before\nreservations: 1\nevents: 1\n"
    );
}

#[test]
fn relay_embedded() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        output("relay_embedded", &folder),
        "first: 20 published, 0 parked\nsecond: 20 published, 0 parked\n"
    );
    for file in ["first.jsonl", "second.jsonl"] {
        let text = std::fs::read_to_string(folder.path().join(file)).unwrap();
        for parcel in 1..=5 {
            let key = serde_json::Value::from(parcel.to_string());
            let steps: Vec<u64> = text
                .lines()
                .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
                .filter(|line| line["key"] == key)
                .map(|line| line["data"]["step"].as_u64().unwrap())
                .collect();
            assert_eq!(steps, [1, 2, 3, 4], "parcel {parcel} in {file}");
        }
    }
}
