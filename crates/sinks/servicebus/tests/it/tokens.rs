//! Tokens: handed over, renewed, refused, expired.
//!
//! What lives here: renewal while events flow, and tokens from elsewhere. What does not: signatures
//! (`src/token.rs`).
//! Invariant: time is the emulator's and the sink's own; nothing here waits for a fixed time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use postrider_core::{Error, ErrorKind, Result, Secret, Sink, Timestamp};
use postrider_sink_servicebus::{JWT, ServiceBus, ServiceBusConfig, Token, TokenSource};

use crate::{Bus, QUEUE, Wall, confirm, confirm_in_the_end, fail, record, sink};

#[tokio::test]
async fn a_token_is_renewed_in_mid_stream_before_it_expires() {
    let bus = Bus::start().await;
    let config = ServiceBusConfig { token_ttl_ms: 3_000, ..bus.config() };
    let sink = sink(&config);
    let begin = Instant::now();
    let mut number = 0;
    // Three lives of a token: it is refused by then unless it was renewed.
    while begin.elapsed() < Duration::from_secs(9) {
        confirm(&sink, &[record(number, "k", b"{}")]).await;
        number += 1;
    }
    assert!(bus.tap.tokens() >= 4, "{} tokens", bus.tap.tokens());
    assert_eq!(bus.tap.connections(), 1, "nothing was interrupted by it");
    assert_eq!(bus.stored().len() as u128, number);
}

#[tokio::test]
async fn a_token_that_expires_in_mid_stream_costs_no_event() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    for number in 0..5 {
        confirm_in_the_end(&sink, record(number, "k", b"{}")).await;
        bus.emulator.faults().expire_tokens();
    }
    confirm_in_the_end(&sink, record(5, "k", b"{}")).await;
    let mut ids: Vec<_> = bus.session("k");
    ids.dedup();
    assert_eq!(ids.len(), 6);
}

#[tokio::test]
async fn a_refused_token_holds_everything_back_until_one_is_taken() {
    let bus = Bus::start().await;
    let sink = bus.sink();
    bus.emulator.faults().refuse_tokens(2);
    for _ in 0..2 {
        let error = fail(&sink, record(1, "k", b"{}")).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.to_string().contains("answered 401"), "{error}");
    }
    confirm(&sink, &[record(1, "k", b"{}")]).await;
}

/// What Entra ID would give: the emulator takes any such token for an hour.
struct Elsewhere {
    asked: AtomicUsize,
}

#[async_trait]
impl TokenSource for Elsewhere {
    async fn token(&self, audience: &str, now: Timestamp) -> Result<Token> {
        assert!(audience.starts_with("sb://127.0.0.1:") && audience.ends_with("/orders"));
        match self.asked.fetch_add(1, Ordering::SeqCst) {
            0 => Err(Error::transient("no token today")),
            _ => Ok(Token {
                text: Secret::new("eyJhdCI6ImEgdG9rZW4ifQ"),
                kind: JWT,
                expires_at: Some(now.plus(Duration::from_millis(600))),
            }),
        }
    }
}

#[tokio::test]
async fn tokens_may_come_from_elsewhere_and_are_asked_for_again() {
    let bus = Bus::start().await;
    let endpoint =
        format!("Endpoint=sb://127.0.0.1:{};UseDevelopmentEmulator=true", bus.tap.port());
    let config = ServiceBusConfig { connection_string: Secret::new(endpoint), ..bus.config() };
    let source = Arc::new(Elsewhere { asked: AtomicUsize::new(0) });
    let without = ServiceBus::new(&config, Arc::new(Wall)).expect_err("no credential");
    assert!(without.to_string().contains("SharedAccessKey are missing"), "{without}");
    let both = ServiceBus::with_tokens(&bus.config(), Arc::new(Wall), source.clone());
    assert!(both.expect_err("two of them").to_string().contains("Endpoint alone"));
    let sink = ServiceBus::with_tokens(&config, Arc::new(Wall), source.clone()).expect("valid");
    let error = fail(&sink, record(1, "k", b"{}")).await;
    assert!(error.to_string().contains("no token today"), "{error}");
    confirm(&sink, &[record(1, "k", b"{}")]).await;
    crate::until("it is renewed", || source.asked.load(Ordering::SeqCst) >= 4).await;
    sink.check().await.expect("still there");
    assert_eq!(bus.emulator.entity(QUEUE).counts().sender_links, 1);
}

/// Tokens for so long, after failures of any kind.
struct Troubled {
    failures: Vec<ErrorKind>,
    asked: AtomicUsize,
    valid: Duration,
}

#[async_trait]
impl TokenSource for Troubled {
    async fn token(&self, _: &str, now: Timestamp) -> Result<Token> {
        let text = Secret::new("eyJhdCI6ImEgdG9rZW4ifQ");
        match self.failures.get(self.asked.fetch_add(1, Ordering::SeqCst)) {
            Some(kind) => Err(Error::new(*kind, "the secret has expired")),
            None => Ok(Token { text, kind: JWT, expires_at: Some(now.plus(self.valid)) }),
        }
    }
}

fn with(bus: &Bus, source: Troubled, connect_timeout_ms: u64) -> (ServiceBus, Arc<Troubled>) {
    let text = format!("Endpoint=sb://127.0.0.1:{};UseDevelopmentEmulator=true", bus.tap.port());
    let connection_string = Secret::new(text);
    let config = ServiceBusConfig { connection_string, connect_timeout_ms, ..bus.config() };
    let source = Arc::new(source);
    let sink = ServiceBus::with_tokens(&config, Arc::new(Wall), source.clone()).expect("valid");
    (sink, source)
}

#[tokio::test]
async fn whatever_keeps_a_token_from_being_made_parks_no_event_and_stops_nothing() {
    let bus = Bus::start().await;
    let failures = vec![
        ErrorKind::Permanent,
        ErrorKind::Corrupt,
        ErrorKind::Fenced,
        ErrorKind::Unsupported,
        ErrorKind::Transient,
    ];
    let times = failures.len();
    let valid = Duration::from_secs(600);
    let source = Troubled { failures, asked: AtomicUsize::default(), valid };
    let (sink, _) = with(&bus, source, 10_000);
    for _ in 0..times {
        let error = fail(&sink, record(1, "k", b"{}")).await;
        assert_eq!(error.kind(), ErrorKind::Transient, "{error:?}");
        assert!(error.to_string().contains("the secret has expired"), "{error}");
    }
    confirm(&sink, &[record(1, "k", b"{}")]).await;
}

#[tokio::test]
async fn an_answer_to_a_token_that_comes_late_is_not_taken_for_the_next_one_s() {
    let bus = Bus::start().await;
    let valid = Duration::from_secs(3);
    let source = Troubled { failures: Vec::new(), asked: AtomicUsize::default(), valid };
    let (sink, source) = with(&bus, source, 400);
    confirm_in_the_end(&sink, record(0, "k", b"{}")).await;
    let before = bus.tap.connections();
    let asked = source.asked.load(Ordering::SeqCst);
    bus.emulator.faults().answer_tokens_late(1);
    let renewing = async {
        // The renewal stays without an answer, and the one after it is for another connection.
        while source.asked.load(Ordering::SeqCst) < asked + 2 {
            confirm_in_the_end(&sink, record(1, "k", b"{}")).await;
        }
    };
    tokio::time::timeout(crate::DEADLINE, renewing).await.expect("it is renewed");
    assert!(bus.tap.connections() > before, "the links for tokens are given up");
}
