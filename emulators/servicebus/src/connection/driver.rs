//! Runs a connection on a socket.
//!
//! What lives here: reading, writing, time-outs, heartbeats, the emulator's end. What does not:
//! what any byte means.
//! Invariant: what the connection holds in the broker is given back however the socket ends.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::Connection;
use crate::faults::Command;
use crate::refusal::{Refusal, condition};
use crate::shared::Shared;

/// A peer that does not open the connection within this time is nobody.
const OPEN_WITHIN: Duration = Duration::from_secs(20);
/// How long a last frame may take to leave.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);
/// How much is read at once.
const READ_BYTES: usize = 64 * 1024;
/// Never, for a timer.
const FAR: Duration = Duration::from_secs(24 * 60 * 60);

/// Serves one client until it or the emulator ends.
pub(crate) async fn serve(mut socket: TcpStream, shared: Arc<Shared>, stop: CancellationToken) {
    // Answers are small and awaited.
    let _ = socket.set_nodelay(true);
    let mut connection = Connection::new(Arc::clone(&shared));
    let ended = run(&mut socket, &mut connection, &shared, &stop).await;
    connection.release();
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection broke");
    } else if !connection.is_dropped() {
        // The peer may have stopped reading: then its close is not worth waiting for.
        let _ = timeout(CLOSE_WITHIN, finish(&mut socket, &mut connection)).await;
    }
}

async fn run(
    socket: &mut TcpStream,
    connection: &mut Connection,
    shared: &Shared,
    stop: &CancellationToken,
) -> std::io::Result<()> {
    let mut input = BytesMut::new();
    let mut changes = shared.broker.changes();
    let mut commands = shared.faults.commands();
    let opened_by = Instant::now() + OPEN_WITHIN;
    let mut last_write = Instant::now();
    let mut tick_ms: Option<i64> = None;
    loop {
        // The clock may have been moved past it.
        if tick_ms.is_some_and(|at_ms| at_ms <= shared.broker.clock.now_ms()) {
            connection.tick();
        }
        if write_due(socket, connection).await? {
            last_write = Instant::now();
            connection.pump();
        }
        if connection.is_over() {
            return Ok(());
        }
        let beat = connection.heartbeat().map(|beat| last_write + beat);
        tick_ms = connection.next_tick_ms();
        let due = [connection.out().next_due(), beat, next_tick(tick_ms, shared)];
        let mut wake = due.into_iter().flatten().min().unwrap_or(Instant::now() + FAR);
        if !connection.is_running() {
            wake = wake.min(opened_by);
        }
        input.reserve(READ_BYTES);
        let reads = !connection.out().is_full();
        tokio::select! {
            read = socket.read_buf(&mut input), if reads => {
                if read? == 0 {
                    return Ok(());
                }
                connection.receive(&mut input);
            }
            changed = changes.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
                connection.pump();
            }
            command = commands.recv() => match command {
                Ok(command) => connection.obey(&command),
                // Too slow to hear them all: the safe reaction to an unknown wish is to go.
                Err(RecvError::Lagged(_)) => connection.obey(&Command::Drop),
                Err(RecvError::Closed) => return Ok(()),
            },
            () = sleep_until(wake) => {
                if !connection.is_running() && Instant::now() >= opened_by {
                    return Ok(());
                }
                if connection.heartbeat().is_some_and(|beat| last_write.elapsed() >= beat) {
                    connection.out().heartbeat();
                }
                connection.tick();
            }
            () = stop.cancelled() => {
                let text = "The emulator is stopping.";
                let refusal = Refusal::new(condition::CONNECTION_FORCED, text);
                connection.obey(&Command::Close(refusal));
            }
        }
    }
}

/// The moment of the connection's next appointment.
fn next_tick(at_ms: Option<i64>, shared: &Shared) -> Option<Instant> {
    let at_ms = at_ms?;
    let left = at_ms.saturating_sub(shared.broker.clock.now_ms()).max(1);
    Some(Instant::now() + Duration::from_millis(left.unsigned_abs()).min(FAR))
}

/// Writes what may leave; whether there was anything.
async fn write_due(socket: &mut TcpStream, connection: &mut Connection) -> std::io::Result<bool> {
    let mut output = BytesMut::new();
    while let Some(frame) = connection.pop_due(Instant::now()) {
        output.extend_from_slice(&frame);
    }
    if output.is_empty() {
        return Ok(false);
    }
    socket.write_all(&output).await?;
    Ok(true)
}

/// Writes what is left, each frame at its time.
async fn finish(socket: &mut TcpStream, connection: &mut Connection) -> std::io::Result<()> {
    while !connection.out().is_empty() {
        if let Some(due) = connection.out().next_due() {
            sleep_until(due).await;
        }
        write_due(socket, connection).await?;
    }
    socket.shutdown().await?;
    // A reset could take the last frame from a peer that is still sending: hear it out.
    let mut rest = [0; 4096];
    while socket.read(&mut rest).await? > 0 {}
    Ok(())
}
