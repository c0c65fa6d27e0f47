//! Reaching a server of the list: which comes next, its socket, TLS over it.
//!
//! What lives here: what both protocols do before the first byte of theirs. What does not: the
//! login's settings (`login.rs`), AMQP 0-9-1 (`connect.rs`), streams (`stream/connect.rs`).
//! Invariant: no connection is without its cutter, and none that should be encrypted is without
//! TLS.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use postrider_core::{Error, Result};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{sleep, timeout};

use crate::line::{Cutter, Line};
use crate::login::{Address, Login};
use crate::runtime::Stream;

/// By how much each address of a host begins before the next one: RFC 8305's delay.
const HEAD_START: Duration = Duration::from_millis(250);

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
    let found = lookup_host((address.host.as_str(), address.port)).await.map_err(unreachable)?;
    let socket = quickest(found).await.map_err(unreachable)?;
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

/// The first of a host's addresses that answers. One that swallows everything must not use up the
/// time of the others.
async fn quickest(addresses: impl Iterator<Item = SocketAddr>) -> io::Result<TcpStream> {
    let tries = addresses.zip(0_u32..).map(|(address, place)| async move {
        sleep(HEAD_START * place).await;
        TcpStream::connect(address).await
    });
    let mut tries: FuturesUnordered<_> = tries.collect();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    while let Some(tried) = tries.next().await {
        match tried {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    #[tokio::test]
    async fn an_address_that_swallows_everything_costs_a_moment() {
        let full = TcpSocket::new_v4().expect("a socket");
        full.bind("127.0.0.1:0".parse().expect("an address")).expect("bound");
        let full = full.listen(1).expect("listening");
        let silent = full.local_addr().expect("bound");
        // Nobody takes them from its queue; what comes when that is full has no answer.
        let (short, mut queue) = (Duration::from_millis(200), Vec::new());
        while let Ok(connected) = timeout(short, TcpStream::connect(silent)).await {
            queue.push(connected);
        }
        let good = TcpListener::bind("127.0.0.1:0").await.expect("listening");
        let good = good.local_addr().map(|address| (good, address)).expect("bound");
        let reached = timeout(Duration::from_secs(20), quickest([silent, good.1].into_iter()));
        let reached = reached.await.expect("in time").expect("connected");
        assert_eq!(reached.peer_addr().ok(), Some(good.1));
    }
}
