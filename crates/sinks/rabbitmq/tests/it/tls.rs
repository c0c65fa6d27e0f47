//! Certificates on both sides, and logging in by one.
//!
//! What lives here: TLS against a server that wants a client's certificate. What does not: plain
//! logins (`failures.rs`).
//! Invariant: no connection is made to a server whose certificate is not by a known authority.

use lapin::types::FieldTable;
use postrider_core::{ErrorKind, Secret};
use postrider_servers::rabbitmq::Tls;
use postrider_sink_rabbitmq::RabbitMqConfig;

use crate::{Broker, confirm, fail, one, server, sink};

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_verified_on_both_sides_and_may_be_the_login() {
    let server = server("", Tls::Mutual).await;
    let broker = Broker::on(server.url(), FieldTable::default()).await;
    broker.bind("orders").await;
    let (certificate, key) = server.certificate();
    let proven = RabbitMqConfig {
        servers: vec![Secret::new(server.tls_url())],
        ca_file: Some(server.authority()),
        client_certificate_file: Some(certificate),
        client_key_file: Some(key),
        ..broker.config()
    };
    let by_certificate = RabbitMqConfig { external: true, ..proven.clone() };
    let by_password = RabbitMqConfig {
        user: Some("localhost".into()),
        password: Some(Secret::new("p4ss")),
        ..proven.clone()
    };
    for (n, good) in [&by_certificate, &by_password].into_iter().enumerate() {
        confirm(&sink(good), &one("a", n as u64)).await;
    }
    // Without external, the certificate logs nobody in: the guest is unknown here.
    let error = fail(&sink(&proven), &one("a", 3)).await;
    assert!(error.chain().contains("login is refused"), "{}", error.chain());
    let unproven = RabbitMqConfig {
        client_certificate_file: None,
        client_key_file: None,
        ..by_password.clone()
    };
    assert_eq!(fail(&sink(&unproven), &one("a", 4)).await.kind(), ErrorKind::Transient);
    let unknown = RabbitMqConfig { ca_file: None, ..by_certificate };
    let error = fail(&sink(&unknown), &one("a", 5)).await;
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.chain().contains("certificate"), "{}", error.chain());
    assert_eq!(broker.stored().await.len(), 2);
}
