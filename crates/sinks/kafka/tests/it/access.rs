//! Logins and certificates.
//!
//! What lives here: who gets to the broker, and what is told of who does not. What does not: the
//! other side's handshakes (`guard.rs`).
//! Invariant: no password is part of what is told, and nothing is sent to whom the certificate does
//! not name.

use postrider_core::{ErrorKind, Secret, Sink};
use postrider_sink_kafka::{KafkaConfig, Sasl};

use crate::guard::Guard;
use crate::middle::{ELSEWHERE, Middle};
use crate::{blocking, broker, brokers, config, confirm, fail, one, sink, stored_ids};

const PASSWORD: &str = "s3cret,p=4ss";

#[tokio::test(flavor = "multi_thread")]
async fn every_login_gets_in_by_its_password_alone() {
    let broker = broker().await;
    let mut expected = Vec::new();
    for (sasl, mechanism) in [
        (Sasl::Plain, "PLAIN"),
        (Sasl::ScramSha256, "SCRAM-SHA-256"),
        (Sasl::ScramSha512, "SCRAM-SHA-512"),
    ] {
        let guard = Guard { user: Some((mechanism, "app", PASSWORD)), ..Guard::default() };
        let middle = Middle::guarding(broker.address(), guard).await;
        let login = |password: &str| KafkaConfig {
            sasl: Some(sasl),
            user: Some("app".into()),
            password: Some(Secret::new(password)),
            connect_timeout_ms: 3_000,
            ..config(middle.brokers())
        };
        let event = one("a", 1);
        confirm(&sink(&login(PASSWORD)), &event).await;
        expected.push(event.event.id());
        let wrong = fail(&sink(&login("wr0ng")), &one("a", 2)).await;
        assert_eq!(wrong.kind(), ErrorKind::Transient);
        let told = wrong.chain();
        assert!(told.contains("uthentication") && !told.contains("wr0ng"), "{told}");
        let nobody = fail(&sink(&config(middle.brokers())), &one("a", 3)).await;
        assert_eq!(nobody.kind(), ErrorKind::Transient, "{}", nobody.chain());
    }
    assert_eq!(stored_ids(&brokers(&broker)).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_verified_on_both_sides() {
    let broker = broker().await;
    let folder = broker.certificates().expect("openssl");
    let mut expected = Vec::new();
    for mutual in [false, true] {
        let (tls, made) = (folder.clone(), mutual);
        let tls = blocking(move || Guard::with_tls(&tls, made)).await;
        let user = Some(("SCRAM-SHA-512", "app", PASSWORD));
        let middle = Middle::guarding(broker.address(), Guard { tls: Some(tls), user }).await;
        let known = KafkaConfig {
            tls: Some(true),
            sasl: Some(Sasl::ScramSha512),
            user: Some("app".into()),
            password: Some(Secret::new(PASSWORD)),
            ca_file: Some(folder.join("authority.crt")),
            connect_timeout_ms: 3_000,
            ..config(middle.brokers())
        };
        let proven = KafkaConfig {
            client_certificate_file: Some(folder.join("server.crt")),
            client_key_file: Some(folder.join("server.key")),
            ..known.clone()
        };
        let stranger = KafkaConfig { ca_file: None, ..known.clone() };
        let (good, bad) = if mutual { (proven, known) } else { (known, stranger) };
        let event = one("a", 1);
        confirm(&sink(&good), &event).await;
        expected.push(event.event.id());
        let error = fail(&sink(&bad), &one("a", 2)).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().to_lowercase().contains("ssl") || mutual, "{}", error.chain());
        let missing = KafkaConfig { ca_file: Some(folder.join("none.crt")), ..good.clone() };
        let error = fail(&sink(&missing), &one("a", 3)).await;
        assert_eq!(error.kind(), ErrorKind::Transient);
        assert!(error.chain().contains("none.crt"), "{}", error.chain());
        // Without TLS nothing is said that the other side would understand.
        let plain = KafkaConfig { tls: None, ca_file: None, ..good };
        assert_eq!(fail(&sink(&plain), &one("a", 4)).await.kind(), ErrorKind::Transient);
    }
    assert_eq!(stored_ids(&brokers(&broker)).await, expected);
}

/// The connection to the first broker stays on this machine; the one it tells of would not.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_elsewhere_is_not_sent_to_in_the_clear() {
    let broker = broker().await;
    let middle = Middle::before(broker.address()).await;
    middle.orders().elsewhere = true;
    let settings = KafkaConfig { connect_timeout_ms: 1_000, ..config(middle.brokers()) };
    let silent = sink(&settings);
    for told in [fail(&silent, &one("a", 1)).await, silent.check().await.expect_err("elsewhere")] {
        assert_eq!(told.kind(), ErrorKind::Transient);
        assert!(told.chain().contains(ELSEWHERE) && told.chain().contains("tls"), "{told:?}");
    }
    let permitted = sink(&KafkaConfig { tls: Some(false), topic: "orders".into(), ..settings });
    permitted.check().await.expect("the settings say so");
}
