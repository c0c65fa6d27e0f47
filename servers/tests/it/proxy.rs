//! The proxy misbehaves as told.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use postrider_servers::proxy::{Direction, Proxy};

/// Long enough to be sure that nothing comes.
const SILENCE: Duration = Duration::from_millis(100);

/// A server that sends everything back, with its mark before each connection's first byte.
fn echo(mark: u8) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let _ = stream.write_all(&[mark]);
                let mut other = stream.try_clone().expect("a socket can be shared");
                let _ = std::io::copy(&mut stream, &mut other);
            });
        }
    });
    address
}

/// A server that says `s` and then only listens; what it got from a connection, once that ended.
fn sink() -> (SocketAddr, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut received = Vec::new();
            let _ = stream.write_all(b"s");
            let _ = stream.read_to_end(&mut received);
            let _ = sender.send(received);
        }
    });
    (address, receiver)
}

fn connect(proxy: &Proxy, mark: u8) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("the proxy listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("the time is not zero");
    assert_eq!(read(&mut stream, 1), [mark]);
    stream
}

fn read(stream: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0; bytes];
    stream.read_exact(&mut buffer).expect("bytes arrive in time");
    buffer
}

fn is_silent(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(SILENCE)).expect("the time is not zero");
    let read = stream.read(&mut [0]);
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("the time is not zero");
    read.is_err_and(|error| [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()))
}

#[test]
fn frozen_bytes_come_later_and_swallowed_ones_never() {
    let proxy = Proxy::start(echo(b'a')).unwrap();
    let mut stream = connect(&proxy, b'a');
    proxy.freeze();
    stream.write_all(b"later").unwrap();
    assert!(is_silent(&mut stream));
    proxy.thaw();
    assert_eq!(read(&mut stream, 5), b"later");
    proxy.black_hole();
    stream.write_all(b"never").unwrap();
    assert!(is_silent(&mut stream));
    proxy.thaw();
    stream.write_all(b"again").unwrap();
    assert_eq!(read(&mut stream, 5), b"again");
}

#[test]
fn a_lost_way_stays_lost_and_new_connections_pass() {
    for direction in [Direction::ToServer, Direction::ToClient] {
        let proxy = Proxy::start(echo(b'a')).unwrap();
        let mut stream = connect(&proxy, b'a');
        proxy.lose_all(direction);
        stream.write_all(b"never").unwrap();
        assert!(is_silent(&mut stream), "{direction:?}");
        let mut other = connect(&proxy, b'a');
        other.write_all(b"new").unwrap();
        assert_eq!(read(&mut other, 3), b"new");
    }
    let (address, received) = sink();
    let proxy = Proxy::start(address).unwrap();
    let mut stream = connect(&proxy, b's');
    proxy.lose_all(Direction::ToClient);
    stream.write_all(b"still heard").unwrap();
    drop(stream);
    assert_eq!(received.recv_timeout(Duration::from_secs(20)).unwrap(), b"still heard");
}

#[test]
fn a_delay_holds_each_way() {
    let proxy = Proxy::start(echo(b'a')).unwrap();
    let mut stream = connect(&proxy, b'a');
    proxy.delay(Duration::from_millis(60));
    let sent = Instant::now();
    stream.write_all(b"x").unwrap();
    assert_eq!(read(&mut stream, 1), b"x");
    assert!(sent.elapsed() >= Duration::from_millis(120));
}

#[test]
fn connections_are_closed_reset_and_half_closed() {
    let proxy = Proxy::start(echo(b'a')).unwrap();
    let mut stream = connect(&proxy, b'a');
    proxy.close_all();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);

    let mut stream = connect(&proxy, b'a');
    proxy.reset_all();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);

    let (address, received) = sink();
    proxy.switch_upstream(address);
    let mut stream = connect(&proxy, b's');
    proxy.half_close_all();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    stream.write_all(b"still open").unwrap();
    drop(stream);
    assert_eq!(received.recv_timeout(Duration::from_secs(20)).unwrap(), b"still open");
}

#[test]
fn a_connection_to_nobody_is_reset_and_a_frozen_one_waits() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = Proxy::start(nobody).unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    proxy.switch_upstream(echo(b'a'));
    proxy.freeze();
    let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    assert!(is_silent(&mut stream));
    proxy.thaw();
    assert_eq!(read(&mut stream, 1), b"a");
}

#[test]
fn a_connection_is_cut_after_so_many_bytes() {
    let proxy = Proxy::start(echo(b'a')).unwrap();
    proxy.cut_after(Some((Direction::ToClient, 4)));
    let mut stream = connect(&proxy, b'a');
    stream.write_all(b"hello").unwrap();
    let mut received = Vec::new();
    let _ = stream.read_to_end(&mut received);
    assert_eq!(received, b"hel");
    proxy.cut_after(None);
    let mut stream = connect(&proxy, b'a');
    stream.write_all(b"hello").unwrap();
    assert_eq!(read(&mut stream, 5), b"hello");
}

#[test]
fn another_upstream_gets_the_next_connection() {
    let proxy = Proxy::start(echo(b'a')).unwrap();
    let mut first = connect(&proxy, b'a');
    proxy.switch_upstream(echo(b'b'));
    connect(&proxy, b'b');
    first.write_all(b"x").unwrap();
    assert_eq!(read(&mut first, 1), b"x");
    let port = proxy.port();
    drop(proxy);
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
}
