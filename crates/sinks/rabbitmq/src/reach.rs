//! Reaching a server of the list: which comes next, its socket, TLS over it.
//!
//! What lives here: what both protocols do before the first byte of theirs. What does not: the
//! login's settings (`login.rs`), AMQP 0-9-1 (`connect.rs`), streams (`stream/connect.rs`).
//! Invariant: no connection is without its cutter, and none that should be encrypted is without
//! TLS.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use postrider_core::{Error, Result};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::line::{Cutter, Line};
use crate::login::{Address, Login};
use crate::runtime::Stream;

/// What the first server of the list gives that can be had, from its place `next` on. That moves
/// on with each attempt, also with one that is given up halfway: whoever comes back does not wait
/// for the same dead server again. Each has the time `within`.
///
/// # Errors
/// `Transient`, the last server's.
pub(crate) async fn first<'a, T, F: Future<Output = Result<T>>>(
    login: &'a Login,
    next: &AtomicUsize,
    within: Duration,
    to: impl Fn(&'a Address) -> F,
) -> Result<T> {
    let mut last = Error::transient("connect to RabbitMQ: there is no server in the list");
    let addresses = login.addresses();
    for _ in addresses {
        let place = next.fetch_add(1, Ordering::Relaxed) % addresses.len();
        let Some(address) = addresses.get(place) else { continue };
        match in_time(within, to(address)).await {
            Ok(made) => return Ok(made),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// What one server gives within its time.
///
/// # Errors
/// Its own, or `Transient` when the time is over.
pub(crate) async fn in_time<T>(
    within: Duration,
    made: impl Future<Output = Result<T>>,
) -> Result<T> {
    let late = |_| Error::transient("connect to RabbitMQ: there was no answer in time");
    timeout(within, made).await.map_err(late)?
}

/// A connection to one server, encrypted if its address says so, and what cuts it.
///
/// # Errors
/// `Transient`.
pub(crate) async fn line(address: &Address, login: &Login) -> Result<(Stream, Cutter)> {
    let unreachable = |cause| Error::transient("connect to RabbitMQ: its host").with_source(cause);
    let socket = TcpStream::connect((address.host.as_str(), address.port)).await;
    let socket = socket.map_err(unreachable)?;
    socket.set_nodelay(true).map_err(unreachable)?;
    let (line, cutter) = Line::new(socket);
    let Some(name) = &address.tls else { return Ok((Stream::Plain(line), cutter)) };
    // Made for every list that has an address with TLS.
    let none = || Error::transient("connect to RabbitMQ: TLS is not set up");
    let made = login.tls().ok_or_else(none)?.connect(name.clone(), line).await;
    let made = made.map_err(|cause| {
        Error::transient("connect to RabbitMQ: no TLS connection could be made").with_source(cause)
    })?;
    Ok((Stream::Tls(Box::new(made)), cutter))
}
