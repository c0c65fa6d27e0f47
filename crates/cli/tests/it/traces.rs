//! Traces by OTLP: a delivery is a span of the trace in which its event was appended.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;

use postrider_core::TraceContext;
use rustix::process::Signal;

use crate::harness::{DEADLINE, Home, append_traced, eventually};

/// A collector that keeps the bodies it gets.
fn collector() -> (std::net::SocketAddr, mpsc::Receiver<(String, Vec<u8>)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = listener.local_addr().expect("bound");
    let (sender, bodies) = mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(stream.try_clone().expect("cloned"));
            let (mut first, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                    break;
                }
                if first.is_empty() {
                    first.clone_from(&line);
                }
                let line = line.to_ascii_lowercase();
                if let Some(value) = line.strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a length");
                }
            }
            let mut body = vec![0; length];
            if reader.read_exact(&mut body).is_ok() && length > 0 {
                let _ = sender.send((first, body));
            }
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        }
    });
    (address, bodies)
}

fn wait_for_delivery(home: &Home) {
    eventually("the event is delivered", || {
        std::fs::read_to_string(home.path("events.jsonl")).ok().filter(|text| !text.is_empty())
    });
}

#[test]
fn a_delivery_continues_the_trace_of_its_event() {
    let (collector, bodies) = collector();
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"jsonl\"\n\
             path = \"events.jsonl\"\n\n[admin]\nlisten = \"off\"\n\n[trace]\n\
             otlp = \"http://{collector}/v1/traces\"\nservice_name = \"riders\"\n"
        ),
    );
    let trace_id = "4bf92f3577b34da6a3ce929d0e0e4736";
    let trace = TraceContext::new(format!("00-{trace_id}-00f067aa0ba902b7-01"), None);
    append_traced(&home.path("app.db"), &[("a", "First")], Some(&trace.expect("valid")));
    let relay = home.start(&["run"]);
    wait_for_delivery(&home);
    // What is left is sent at the end.
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
    let (request, body) = bodies.recv_timeout(DEADLINE).expect("spans");
    assert!(request.starts_with("POST /v1/traces "), "{request}");
    let has = |needle: &[u8]| body.windows(needle.len()).any(|window| window == needle);
    let id: Vec<u8> = (0..16)
        .map(|at| u8::from_str_radix(&trace_id[2 * at..2 * at + 2], 16).expect("hexadecimal"))
        .collect();
    assert!(has(&id), "the span belongs to the event's trace");
    assert!(has(b"riders") && has(b"send orders") && has(b"postrider.sink"));
    assert!(!has(b"{\"of\""), "no payload in a span");
}

#[test]
fn a_collector_that_is_gone_costs_no_delivery() {
    let home = Home::with_outbox();
    home.write(
        "postrider.toml",
        "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"jsonl\"\n\
         path = \"events.jsonl\"\n\n[admin]\nlisten = \"off\"\n\n[trace]\n\
         otlp = \"http://127.0.0.1:1/v1/traces\"\n",
    );
    let trace = TraceContext::new("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None);
    append_traced(&home.path("app.db"), &[("a", "First")], Some(&trace.expect("valid")));
    let relay = home.start(&["run"]);
    wait_for_delivery(&home);
    relay.signal(Signal::TERM);
    assert_eq!(relay.ended(), Some(0));
}
