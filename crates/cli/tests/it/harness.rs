//! A folder, a database in it, and the binary started there.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use postrider_core::{
    ContentType, EventType, Headers, Key, NewEvent, TRACEPARENT, Topic, TraceContext,
};
use postrider_store_sqlite::rusqlite::{Connection, TransactionBehavior};

/// Longer than anything here takes on a loaded machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A folder in which the binary is started.
pub(crate) struct Home {
    folder: tempfile::TempDir,
}

/// What a finished process left.
pub(crate) struct Done {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Done {
    /// Fails the test unless the process ended with `code`; shows what it said.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "out: {}\nerr: {}", self.out, self.err);
        self
    }

    /// Fails the test unless standard error has all of `parts`.
    #[track_caller]
    pub(crate) fn err_has(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in:\n{}", self.err);
        }
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).expect("one JSON document")
    }

    /// Standard output as JSON lines.
    #[track_caller]
    pub(crate) fn json_lines(&self) -> Vec<serde_json::Value> {
        self.out.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
    }
}

impl Home {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), text).expect("written");
    }

    /// The binary with nothing of this test run's environment that it would read.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        command.args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("POSTRIDER_") {
                command.env_remove(name);
            }
        }
        command
    }

    /// Runs the binary to its end.
    pub(crate) fn postrider(&self, args: &[&str]) -> Done {
        let output = self.command(args).output().expect("started");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Done { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// An initialised outbox in `app.db`.
    pub(crate) fn with_outbox() -> Self {
        let home = Self::new();
        home.postrider(&["init", "--source", "app.db"]).expect(0);
        home
    }

    /// Appends one event for each `(key, type)` in one transaction.
    pub(crate) fn append(&self, events: &[(&str, &str)]) {
        append(&self.path("app.db"), events);
    }

    /// Starts the binary and goes on; its lines are collected.
    pub(crate) fn start(&self, args: &[&str]) -> Running {
        let mut child = self
            .command(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        let (sender, lines) = mpsc::channel();
        let out = child.stdout.take().expect("piped");
        let err = child.stderr.take().expect("piped");
        let seen = Arc::new(Mutex::new(String::new()));
        for stream in [Box::new(out) as Box<dyn Read + Send>, Box::new(err)] {
            let (sender, seen) = (sender.clone(), Arc::clone(&seen));
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let mut seen = seen.lock().expect("not poisoned");
                    let _ = writeln!(seen, "{line}");
                    let _ = sender.send(line);
                }
            });
        }
        Running { child, lines, seen }
    }
}

/// Appends one event for each `(key, type)` in one transaction.
pub(crate) fn append(database: &Path, events: &[(&str, &str)]) {
    append_traced(database, events, None);
}

/// The same, within the caller's trace.
pub(crate) fn append_traced(
    database: &Path,
    events: &[(&str, &str)],
    trace: Option<&TraceContext>,
) {
    let mut connection = Connection::open(database).expect("opened");
    connection.busy_timeout(Duration::from_secs(30)).expect("set");
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).expect("begun");
    let mut headers = Headers::new();
    if let Some(trace) = trace {
        headers.insert(TRACEPARENT, &trace.traceparent).expect("valid");
    }
    let events: Vec<NewEvent> = events
        .iter()
        .map(|(key, event_type)| {
            NewEvent::builder(
                Key::new(*key).expect("valid"),
                Topic::new("orders").expect("valid"),
                EventType::new(*event_type).expect("valid"),
            )
            .payload(
                ContentType::new("application/json").expect("valid"),
                format!("{{\"of\":\"{event_type}\"}}"),
            )
            .headers(headers.clone())
            .build()
            .expect("valid")
        })
        .collect();
    postrider_store_sqlite::append(&tx, &events).expect("appended");
    tx.commit().expect("committed");
}

/// A process that goes on; killed when dropped.
pub(crate) struct Running {
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Arc<Mutex<String>>,
}

impl Running {
    /// Waits for a line that has `part`.
    #[track_caller]
    pub(crate) fn line_with(&self, part: &str) -> String {
        let until = Instant::now() + DEADLINE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(part) => return line,
                Ok(_) => {}
                Err(_) => panic!("no line with {part:?}; seen:\n{}", self.seen()),
            }
        }
    }

    /// Everything it said until now.
    pub(crate) fn seen(&self) -> String {
        self.seen.lock().expect("not poisoned").clone()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a process id"), signal).expect("told");
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn ended(mut self) -> Option<i32> {
        let code = eventually("the process ends", || {
            self.child.try_wait().expect("waited").map(|status| status.code())
        });
        if code != Some(0) {
            eprintln!("{}", self.seen());
        }
        code
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the process said:\n{}", self.seen());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tries until there is an answer.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(Instant::now() < until, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A plain HTTP request; the answer's status and body.
pub(crate) fn http(address: SocketAddr, request: &str, body: &str) -> (u16, String) {
    let answer = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        write!(
            stream,
            "{request} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = answer().expect("an answer");
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
    (status, body)
}

/// The socket address within an `http://…` URL of a line.
#[track_caller]
pub(crate) fn address_in(line: &str) -> SocketAddr {
    let after = line.split("http://").nth(1).expect("a URL");
    let end = after.find(|c: char| !(c.is_ascii_alphanumeric() || ".:[]".contains(c)));
    after[..end.unwrap_or(after.len())].parse().expect("an address")
}

/// What a webhook receiver got: one delivery.
#[derive(Debug, Clone)]
pub(crate) struct Delivery {
    pub(crate) id: String,
    pub(crate) body: String,
}

/// A webhook receiver that answers as told.
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    accepted: Arc<Mutex<Vec<Delivery>>>,
    refuse: Arc<Mutex<Option<String>>>,
}

impl Receiver {
    /// Takes everything, until told to refuse bodies that contain a text.
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("bound");
        let accepted: Arc<Mutex<Vec<Delivery>>> = Arc::default();
        let refuse: Arc<Mutex<Option<String>>> = Arc::default();
        let (got, refused) = (Arc::clone(&accepted), Arc::clone(&refuse));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (got, refused) = (Arc::clone(&got), Arc::clone(&refused));
                std::thread::spawn(move || {
                    let _ = receive(stream, &got, &refused);
                });
            }
        });
        Self { address, accepted, refuse }
    }

    pub(crate) fn refuse_bodies_with(&self, text: Option<&str>) {
        *self.refuse.lock().expect("not poisoned") = text.map(str::to_owned);
    }

    pub(crate) fn accepted(&self) -> Vec<Delivery> {
        self.accepted.lock().expect("not poisoned").clone()
    }
}

fn receive(
    mut stream: TcpStream,
    accepted: &Mutex<Vec<Delivery>>,
    refuse: &Mutex<Option<String>>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut id, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            // Only looked whether somebody is here.
            return Ok(());
        }
        if line == "\r\n" {
            break;
        }
        let (name, value) = line.split_once(':').unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "webhook-id" => id = value.trim().to_owned(),
            "content-length" => length = value.trim().parse().unwrap_or_default(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body = String::from_utf8(body).unwrap_or_default();
    let refused = refuse.lock().expect("not poisoned").as_ref().is_some_and(|t| body.contains(t));
    if refused {
        return stream.write_all(
            b"HTTP/1.1 422 Unprocessable Entity\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        );
    }
    accepted.lock().expect("not poisoned").push(Delivery { id, body });
    stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
}
