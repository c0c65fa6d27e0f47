//! The shared sink suite, for a file and for a pipe.
//!
//! What lives here: the two harnesses. What does not: behaviours.
//! Invariant: what was delivered is parsed from the lines, not taken from the sink.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use async_trait::async_trait;
use postrider_conformance::sink::{Delivered, ReceiverFault, SinkHarness};
use postrider_core::{EventId, Sink};
use postrider_sink_jsonl::{JsonLines, JsonlConfig};
use tempfile::TempDir;

use crate::{Line, open};

fn parse(text: &[u8]) -> Vec<Delivered> {
    let text = std::str::from_utf8(text).expect("UTF-8");
    let lines = text.lines().map(|line| serde_json::from_str::<Line>(line).expect(line));
    lines.map(delivered).collect()
}

fn delivered(line: Line) -> Delivered {
    let payload = line.payload();
    let lower = |(name, value): (String, String)| (name.to_ascii_lowercase(), value);
    let headers: BTreeMap<String, String> = line.headers.into_iter().map(lower).collect();
    Delivered {
        id: EventId::from_uuid(line.id),
        key: line.key,
        topic: line.topic,
        event_type: line.r#type,
        content_type: line.content_type,
        headers: headers.into_iter().collect(),
        payload,
    }
}

struct FileHarness {
    folder: TempDir,
    config: JsonlConfig,
    sink: Arc<JsonLines>,
}

#[async_trait]
impl SinkHarness for FileHarness {
    async fn fresh() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = JsonlConfig::file(folder.path().join("events.jsonl"));
        let sink = Arc::new(open(&config));
        Self { folder, config, sink }
    }
    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }
    async fn delivered(&self) -> Vec<Delivered> {
        let path = self.folder.path().join("events.jsonl");
        if path.exists() { parse(&std::fs::read(path).expect("readable")) } else { Vec::new() }
    }
    /// A file has no receiver that answers; full disks are tried below the file.
    fn can(&self, _: ReceiverFault) -> bool {
        false
    }
    async fn fail_next(&self, _: u32, fault: ReceiverFault) {
        unreachable!("{fault:?} was denied");
    }
    async fn fail_event(&self, _: EventId, fault: ReceiverFault) {
        unreachable!("{fault:?} was denied");
    }
    fn can_hold(&self) -> bool {
        false
    }
    async fn hold(&self) {
        unreachable!("holding was denied");
    }
    async fn release(&self) {
        unreachable!("holding was denied");
    }
    async fn is_waiting(&self) -> bool {
        false
    }
    fn secrets(&self) -> Vec<String> {
        Vec::new()
    }
    fn printed(&self) -> String {
        format!("{:?} {:?}", self.sink, self.config)
    }
}

/// A pipe whose reader can be held and can go away.
#[derive(Default)]
struct Pipe {
    state: Mutex<PipeState>,
    released: Condvar,
}

#[derive(Default)]
struct PipeState {
    text: Vec<u8>,
    unreachable: u32,
    losing: u32,
    held: bool,
    waiting: bool,
}

impl Pipe {
    fn state(&self) -> MutexGuard<'_, PipeState> {
        self.state.lock().expect("not poisoned")
    }
}

struct PipeEnd(Arc<Pipe>);

impl Write for PipeEnd {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.state();
        while state.held {
            state.waiting = true;
            state = self.0.released.wait(state).expect("not poisoned");
        }
        if state.unreachable > 0 {
            state.unreachable -= 1;
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        state.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        let mut state = self.0.state();
        if state.losing > 0 {
            state.losing -= 1;
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    }
}

struct PipeHarness {
    pipe: Arc<Pipe>,
    sink: Arc<JsonLines>,
}

#[async_trait]
impl SinkHarness for PipeHarness {
    async fn fresh() -> Self {
        let pipe = Arc::new(Pipe::default());
        let sink = JsonLines::to_writer(PipeEnd(pipe.clone())).expect("started");
        Self { pipe, sink: Arc::new(sink) }
    }
    fn sink(&self) -> Arc<dyn Sink> {
        self.sink.clone()
    }
    async fn delivered(&self) -> Vec<Delivered> {
        parse(&self.pipe.state().text)
    }
    fn can(&self, fault: ReceiverFault) -> bool {
        matches!(fault, ReceiverFault::Unreachable | ReceiverFault::LosingConfirms)
    }
    async fn fail_next(&self, times: u32, fault: ReceiverFault) {
        let mut state = self.pipe.state();
        match fault {
            ReceiverFault::Unreachable => state.unreachable = times,
            ReceiverFault::LosingConfirms => state.losing = times,
            ReceiverFault::Refusing | ReceiverFault::Throttling { .. } => {
                unreachable!("{fault:?} was denied");
            }
        }
    }
    async fn fail_event(&self, _: EventId, fault: ReceiverFault) {
        unreachable!("the suite asks this for refusals only, not for {fault:?}");
    }
    fn can_hold(&self) -> bool {
        true
    }
    async fn hold(&self) {
        self.pipe.state().held = true;
    }
    async fn release(&self) {
        self.pipe.state().held = false;
        self.pipe.released.notify_all();
    }
    async fn is_waiting(&self) -> bool {
        self.pipe.state().waiting
    }
    fn secrets(&self) -> Vec<String> {
        Vec::new()
    }
    fn printed(&self) -> String {
        format!("{:?}", self.sink)
    }
}

mod file {
    use super::FileHarness;
    postrider_conformance::sink_suite!(FileHarness);
}

mod pipe {
    use super::PipeHarness;
    postrider_conformance::sink_suite!(PipeHarness);
}
