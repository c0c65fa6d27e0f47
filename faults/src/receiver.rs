//! The sink's end of `webhook`: an HTTP receiver that verifies, remembers and misbehaves.
//!
//! What lives here: listening, and the life of a connection. What does not: reading a request
//! (`request.rs`) and choosing an answer (`answer.rs`).
//! Invariant: an event counts as delivered from the moment at which the receiver decided to take
//! it, also when it then answers nothing; what it refuses is never counted.
//!
//! It speaks HTTP/1.1 on plain sockets, because resetting a connection between two bytes is what a
//! server library is made to avoid.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_core::EventId;
use postrider_sink_webhook::verify::Verifier;

use crate::answer::{Answer, Answers};
use crate::deliveries::{Arrived, Delivery, Mark, Place};
use crate::request::{Head, read_head};
use crate::schedule::Outage;

/// How long a connection may stay silent: longer than any relay waits for an answer.
const SILENCE: Duration = Duration::from_secs(20);

/// A running receiver.
pub struct Receiver {
    address: SocketAddr,
    desk: Arc<Desk>,
    listening: Option<JoinHandle<()>>,
}

struct Desk {
    state: Mutex<State>,
    verifier: Verifier,
    stopping: AtomicBool,
}

struct State {
    arrived: Arrived,
    count: u64,
    answers: Answers,
}

impl Desk {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Receiver {
    /// Listens on a free port of the loopback interface.
    ///
    /// # Errors
    /// When there is none.
    pub fn start(verifier: Verifier, answers: Answers) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("bind the receiver")?;
        let address = listener.local_addr().context("bind the receiver")?;
        let state = State { arrived: Arrived::default(), count: 0, answers };
        let desk =
            Arc::new(Desk { state: Mutex::new(state), verifier, stopping: AtomicBool::new(false) });
        let for_listener = Arc::clone(&desk);
        let listening = std::thread::spawn(move || listen(&listener, &for_listener));
        Ok(Self { address, desk, listening: Some(listening) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Begins or ends an outage.
    pub fn set_outage(&self, outage: Option<Outage>) {
        self.desk.state().answers.outage = outage;
    }

    /// From now on everything is taken and confirmed.
    pub fn heal(&self) {
        self.desk.state().answers.heal();
    }

    /// This moment.
    pub fn mark(&self) -> Mark {
        Mark::Count(self.desk.state().count)
    }

    /// Everything that arrived until now.
    pub fn arrived(&self) -> Arrived {
        self.desk.state().arrived.clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.desk.stopping.store(true, Ordering::SeqCst);
        // Wakes the listener; a failure means that it has ended already.
        let _ = TcpStream::connect(self.address);
        if let Some(listening) = self.listening.take() {
            let _ = listening.join();
        }
    }
}

fn listen(listener: &TcpListener, desk: &Arc<Desk>) {
    for stream in listener.incoming() {
        if desk.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        let desk = Arc::clone(desk);
        // Ends by itself when the peer closes, or by its time-out.
        std::thread::spawn(move || {
            // A broken connection is the peer's business: it sends again.
            let _ = serve(&stream, &desk);
        });
    }
}

/// Serves one connection until either side ends it.
fn serve(stream: &TcpStream, desk: &Desk) -> std::io::Result<()> {
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream.try_clone()?);
    if desk.state().answers.outage == Some(Outage::Refused) {
        return reset(stream);
    }
    while let Some(head) = read_head(&mut reader)? {
        let (begun, cut) = {
            let mut state = desk.state();
            state.count += 1;
            (state.count - 1, state.answers.cuts_before_the_body())
        };
        if cut {
            return reset(stream);
        }
        let mut body = vec![0; head.length];
        reader.read_exact(&mut body)?;
        let Some((id, answer)) = take(desk, head, body, begun) else {
            give(stream, desk, None, UNTRUSTED)?;
            continue;
        };
        if !give(stream, desk, Some(id), answer)? {
            return Ok(());
        }
    }
    Ok(())
}

/// Verifies a request, chooses the answer and remembers what was taken.
fn take(desk: &Desk, head: Head, body: Vec<u8>, begun: u64) -> Option<(EventId, Answer)> {
    if head.is_of_a_stranger() {
        return None;
    }
    let verified = head.verify(&desk.verifier, &body);
    let mut state = desk.state();
    let (id, relay) = match verified {
        Ok(found) => found,
        Err(error) => {
            state.arrived.unreadable.push(format!("{error:#}"));
            return None;
        }
    };
    let answer = state.answers.choose(*id.as_uuid());
    if answer.takes() {
        state.count += 1;
        let place = Place::Request { begun, relay };
        let message = head.into_message(id, body);
        state.arrived.deliveries.push(Delivery { message, place });
        if answer.withholds() {
            state.arrived.withheld.push(id);
        }
    }
    Some((id, answer))
}

/// Gives the answer; says whether the connection goes on.
fn give(
    stream: &TcpStream,
    desk: &Desk,
    id: Option<EventId>,
    answer: Answer,
) -> std::io::Result<bool> {
    let mut writer = stream;
    match answer {
        Answer::Confirm => writer.write_all(CONFIRMED).map(|()| true),
        Answer::ConfirmAndClose => writer.write_all(CONFIRMED).map(|()| false),
        Answer::Late(delay) => {
            std::thread::sleep(delay);
            let gone = peer_is_gone(stream)?;
            let sent = writer.write_all(CONFIRMED);
            if gone || sent.is_err() {
                desk.state().arrived.withheld.extend(id);
            }
            sent.map(|()| !gone)
        }
        Answer::Status(status, more) => {
            let text = format!("HTTP/1.1 {status} Refused\r\n{more}content-length: 0\r\n\r\n");
            writer.write_all(text.as_bytes()).map(|()| true)
        }
        Answer::TakeAndReset => reset(stream).map(|()| false),
        Answer::TakeAndSaySilence => {
            // Held until the peer gives up.
            let mut reader = stream;
            let _ = reader.read(&mut [0; 1]);
            Ok(false)
        }
    }
}

const UNTRUSTED: Answer = Answer::Status(401, "");
const CONFIRMED: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";

/// Closes with a reset instead of a proper end.
fn reset(stream: &TcpStream) -> std::io::Result<()> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    // Both handles of the socket are dropped by the caller's return.
    Ok(())
}

/// Whether the other side has closed the connection.
fn peer_is_gone(stream: &TcpStream) -> std::io::Result<bool> {
    stream.set_nonblocking(true)?;
    let peeked = stream.peek(&mut [0; 1]);
    stream.set_nonblocking(false)?;
    match peeked {
        Ok(bytes) => Ok(bytes == 0),
        Err(error) => Ok(error.kind() != std::io::ErrorKind::WouldBlock),
    }
}
