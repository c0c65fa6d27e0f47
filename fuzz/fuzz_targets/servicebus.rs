//! Anything at all where Azure Service Bus should answer the sink.
//!
//! What lives here: a service on a socket that is right up to some frame and wrong from there on,
//! in one of four ways; here, since only this workspace may see both the sink and the emulator.
//! What does not: the right answers, which the emulator gives.
//! Invariant: whatever the service says, the sink gives one outcome for each event, in time, and
//! never panics.

#![no_main]

use std::sync::Arc;
use std::time::Duration;

use postrider_core::{
    Clock, ContentType, EventId, EventType, Key, NewEvent, PartitionId, Position, Publish, Record,
    Secret, Sink, Timestamp, Topic,
};
use postrider_servicebus_emulator::fuzzing::{Refused, Service, refusal};
use postrider_sink_servicebus::{ServiceBus, ServiceBusConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// What the sink waits for, in milliseconds: an answer that never comes ends an input.
const WAIT_MS: u64 = 60;
/// More than a call and a close may take with these waits.
const IN_TIME: Duration = Duration::from_secs(8);
/// The frames of a client from its first header to its first transfers.
const FRAMES: u8 = 16;

struct Still;

#[async_trait::async_trait]
impl Clock for Still {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(4_000_000_000_000)
    }
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }
    async fn sleep(&self, _: Duration) {}
}

/// How the service is wrong.
enum Wrong<'a> {
    /// It says this instead.
    Instead(&'a [u8]),
    /// It gives the right answer with some bytes changed: places and what stands there.
    Changed(&'a [u8]),
    /// It refuses something.
    Refuses(Refused, &'a str, &'a str),
    /// It gives the right answer and says this besides.
    Besides(&'a [u8]),
}

impl<'a> Wrong<'a> {
    fn of(how: u8, what: u8, rest: &'a [u8]) -> Self {
        let refused = match what % 4 {
            0 => Refused::Transfers(u32::from(what / 4)),
            1 => Refused::Link(u32::from(what / 4 % 4)),
            2 => Refused::Session,
            _ => Refused::Connection,
        };
        match how % 4 {
            0 => Self::Instead(rest),
            1 => Self::Changed(rest),
            2 => Self::Besides(rest),
            _ => {
                let text = match std::str::from_utf8(rest) {
                    Ok(text) => text,
                    Err(error) => std::str::from_utf8(&rest[..error.valid_up_to()]).unwrap_or(""),
                };
                let (condition, description) = text.split_once(' ').unwrap_or((text, ""));
                Self::Refuses(refused, condition, description)
            }
        }
    }

    fn answer(&self, mut right: Vec<u8>) -> Vec<u8> {
        match self {
            Self::Instead(bytes) => bytes.to_vec(),
            Self::Besides(bytes) => [right.as_slice(), bytes].concat(),
            Self::Refuses(refused, condition, description) => {
                refusal(*refused, condition, description).to_vec()
            }
            Self::Changed(changes) => {
                for change in changes.chunks_exact(3) {
                    let place = usize::from(u16::from_be_bytes([change[0], change[1]]));
                    let length = right.len().max(1);
                    if let Some(byte) = right.get_mut(place % length) {
                        *byte = change[2];
                    }
                }
                right
            }
        }
    }
}

/// Answers rightly to so many frames, wrongly to the next, and no more.
async fn serve(mut socket: TcpStream, right: u8, wrong: Wrong<'_>) {
    let (mut service, mut input, mut frames) = (Service::new(), Vec::new(), 0);
    let mut buffer = [0; 16 * 1024];
    while let Ok(read @ 1..) = socket.read(&mut buffer).await {
        input.extend_from_slice(&buffer[..read]);
        while let Some(length) = frame_length(&input).filter(|length| *length <= input.len()) {
            let frame: Vec<u8> = input.drain(..length).collect();
            let answer = service.answer(&frame);
            if frames == right {
                let _ = socket.write_all(&wrong.answer(answer)).await;
                let _ = socket.shutdown().await;
                // What the sink still says is nobody's business, but it may say it.
                while let Ok(1..) = socket.read(&mut buffer).await {}
                return;
            }
            frames += 1;
            if socket.write_all(&answer).await.is_err() {
                return;
            }
        }
    }
}

/// A header is as long as its frame's head would be.
fn frame_length(input: &[u8]) -> Option<usize> {
    let head = input.first_chunk::<8>()?;
    match head {
        [b'A', b'M', b'Q', b'P', ..] => Some(8),
        [s0, s1, s2, s3, ..] => Some(u32::from_be_bytes([*s0, *s1, *s2, *s3]) as usize),
    }
}

fn record(number: u128, key: &str) -> Record {
    let event = NewEvent::builder(
        Key::new(key).expect("valid"),
        Topic::new("orders").expect("valid"),
        EventType::new("OrderPlaced").expect("valid"),
    )
    .payload(ContentType::new("application/json").expect("valid"), b"{}".to_vec())
    .build()
    .expect("valid")
    .identified(|| EventId::from_uuid(uuid::Uuid::from_u128(number)));
    Record { position: Position::START, appended_at: Timestamp::from_millis(1), event }
}

async fn play(right: u8, wrong: Wrong<'_>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("it is bound").port();
    let mut config = ServiceBusConfig::new(Secret::new(format!(
        "Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=RootManageSharedAccessKey;\
         SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;EntityPath=orders"
    )));
    (config.timeout_ms, config.connect_timeout_ms) = (WAIT_MS, WAIT_MS);
    let sink = ServiceBus::new(&config, Arc::new(Still)).expect("the settings are right");
    let service = async {
        if let Ok((socket, _)) = listener.accept().await {
            drop(listener);
            serve(socket, right, wrong).await;
        }
    };
    let client = async {
        // One key: what fails ends its chain, and nothing is tried on another connection.
        let records = [record(1, "a"), record(2, "a"), record(3, "a")];
        let partition = PartitionId::numbered(0, 1);
        let outcomes = sink.publish(Publish::new(&partition, &records)).await;
        assert_eq!(outcomes.len(), records.len());
        let _ = sink.close().await;
    };
    let mut service = std::pin::pin!(service);
    let mut client = std::pin::pin!(client);
    tokio::select! {
        () = &mut client => {}
        () = &mut service => client.await,
    }
}

thread_local! {
    static RUNTIME: Runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let [frames, how, what, rest @ ..] = bytes else { return };
    let wrong = Wrong::of(*how, *what, rest);
    RUNTIME.with(|runtime| {
        let play = play(frames % FRAMES, wrong);
        let played = runtime.block_on(async { timeout(IN_TIME, play).await });
        played.expect("the sink answers in time");
    });
});
