//! Being let in by servers that are made here.
//!
//! What lives here: servers that ask for what they should not get, prove nothing, or are none; and
//! TLS from the first byte, for which no server of the tests is new enough. What does not: real
//! logins (`wire/tests.rs`).
//! Invariant: what was sent is looked at, not only what was answered.

use std::sync::Arc;

use futures_util::FutureExt;
use postrider_servers::postgres::{Options, Version};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{DuplexStream, duplex};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::PostgresOptions;
use crate::error::code_of;
use crate::server::Servers;
use crate::wal::wire::Walsender;

const PASSWORD: &str = "s3cret";

fn config() -> Config {
    let mut config = Config::new();
    config.user("me").password(PASSWORD);
    config
}

fn session(config: &Config, closed: bool) -> (Session<'_>, DuplexStream) {
    let (near, far) = duplex(1 << 16);
    let frames: Frames<Box<dyn Stream>> = Frames::new(Box::new(near));
    let (name, user, certificate) = ("db:5432", "me", None);
    (Session { name, config, user, closed, certificate, tls: false, frames }, far)
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).expect("short");
    [&[tag][..], &length.to_be_bytes(), body].concat()
}

/// A demand of this number.
fn demand(number: u32, more: &[u8]) -> Vec<u8> {
    message(b'R', &[&number.to_be_bytes(), more].concat())
}

/// All that was sent so far.
fn sent(far: &mut DuplexStream) -> BytesMut {
    let mut found = BytesMut::new();
    while let Some(Ok(1..)) = far.read_buf(&mut found).now_or_never() {}
    found
}

fn shows(error: &Error, says: &str) {
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
    assert!(error.to_string().contains(says), "{says}: {error:?}");
    assert!(!error.chain().contains(PASSWORD), "{error:?}");
}

#[test]
fn versions_are_numbers() {
    for (text, number) in [
        ("15.18 (Debian 15.18-0+deb12u1)", Some(150_018)),
        ("14.0", Some(140_000)),
        ("18beta1", Some(180_000)),
        ("19devel", Some(190_000)),
        ("", None),
        ("x", None),
        ("15.", None),
        ("99999999999", None),
    ] {
        assert_eq!(version_number(text), number, "{text}");
    }
}

#[tokio::test]
async fn a_password_goes_out_in_clear_text_only_where_nobody_listens() {
    for closed in [false, true] {
        let config = config();
        let (mut session, mut far) = session(&config, closed);
        far.write_all(&[demand(3, b""), demand(0, b"")].concat()).await.expect("room");
        let let_in = session.authenticate().await;
        let found = sent(&mut far);
        if closed {
            let_in.expect("let in");
            assert_eq!(&found[..], message(b'p', b"s3cret\0"));
        } else {
            shows(&let_in.expect_err("refused"), "clear text");
            assert!(found.is_empty(), "nothing was sent");
        }
    }
}

#[tokio::test]
async fn a_password_that_is_asked_for_in_an_unknown_way_is_not_given() {
    for number in [2, 6, 7, 9, 99] {
        let config = config();
        let (mut session, mut far) = session(&config, true);
        far.write_all(&demand(number, b"")).await.expect("room");
        shows(&session.authenticate().await.expect_err("refused"), "lacks what the url demands");
        assert!(sent(&mut far).is_empty());
    }
    let config = config();
    let (mut session, mut far) = session(&config, true);
    far.write_all(&demand(10, b"SCRAM-SHA-1\0\0")).await.expect("room");
    shows(&session.authenticate().await.expect_err("refused"), "lacks what the url demands");
    assert!(sent(&mut far).is_empty());
}

#[tokio::test]
async fn where_a_binding_is_demanded_nothing_less_will_do() {
    let mut config = config();
    config.channel_binding(Binding::Require);
    for asked in
        [demand(0, b""), demand(3, b""), demand(5, b"salt"), demand(10, b"SCRAM-SHA-256\0\0")]
    {
        let (mut session, mut far) = session(&config, true);
        far.write_all(&asked).await.expect("room");
        shows(&session.authenticate().await.expect_err("refused"), "lacks what the url demands");
        assert!(sent(&mut far).is_empty(), "{asked:?}");
    }
}

#[tokio::test]
async fn a_server_that_does_not_know_the_password_is_not_believed() {
    let config = config();
    let (mut session, mut far) = session(&config, true);
    far.write_all(&demand(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0")).await.expect("room");
    let serve = async {
        let mut first = BytesMut::new();
        far.read_buf(&mut first).await.expect("a beginning");
        let text = String::from_utf8_lossy(&first).into_owned();
        assert!(text.contains("SCRAM-SHA-256\0") && text.contains("n,,n=,r="), "{text}");
        let nonce = text.split_once(",r=").expect("a nonce").1;
        let challenge = format!("r={nonce}more,s=c2FsdA==,i=4096");
        far.write_all(&demand(11, challenge.as_bytes())).await.expect("room");
        far.read_buf(&mut first).await.expect("a proof");
        let lie = demand(12, b"v=AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=");
        far.write_all(&[lie, demand(0, b"")].concat()).await.expect("room");
    };
    let (let_in, ()) = tokio::join!(session.authenticate(), serve);
    shows(&let_in.expect_err("refused"), "does not prove");
}

#[tokio::test]
async fn what_is_no_postgresql_is_told() {
    let config = config();
    for answer in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], &message(b'Z', b"I"), b"R\0\0\0\x05\0"]
    {
        let (mut session, mut far) = session(&config, true);
        far.write_all(answer).await.expect("room");
        shows(&session.authenticate().await.expect_err("refused"), "no PostgreSQL");
    }
}

/// A server that speaks TLS alone and wants the protocol's name, as PostgreSQL 17 does with
/// `sslnegotiation=direct`.
#[tokio::test(flavor = "multi_thread")]
async fn tls_from_the_first_byte_names_the_protocol() {
    let real = Options::new(Version::V15).tls().launch().expect("a server");
    let files = real.data();
    let certificate = CertificateDer::from_pem_file(files.join("server.crt")).expect("a file");
    let key = PrivateKeyDer::from_pem_file(files.join("server.key")).expect("a file");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().expect("versions");
    let mut tls =
        builder.with_no_client_auth().with_single_cert(vec![certificate], key).expect("a pair");
    tls.alpn_protocols = vec![b"postgresql".to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let serve = async {
        let (socket, _) = listener.accept().await.expect("a client");
        let mut stream = TlsAcceptor::from(Arc::new(tls)).accept(socket).await.expect("TLS");
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"postgresql"[..]));
        let mut startup =
            vec![
                0;
                usize::try_from(stream.read_u32().await.expect("a length")).expect("short") - 4
            ];
        stream.read_exact(&mut startup).await.expect("words");
        stream.write_all(&message(b'E', b"C57P03\0Mnot now\0\0")).await.expect("open");
        stream.shutdown().await.expect("open");
        String::from_utf8_lossy(&startup).into_owned()
    };
    let authority = real.certificate_authority().expect("TLS");
    let url = format!(
        "postgres://me:{PASSWORD}@127.0.0.1:{port}/shop?sslnegotiation=direct&sslrootcert={}",
        authority.display()
    );
    let servers = Servers::new(&PostgresOptions::new(url), Arc::default()).expect("options");
    let (refused, words) = tokio::join!(Walsender::connect(&servers), serve);
    let error = refused.map(|_| ()).expect_err("refused");
    assert_eq!(code_of(&error), Some("57P03"), "{error:?}");
    for word in ["user\0me\0", "database\0shop\0", "replication\0database\0"] {
        assert!(words.contains(word), "{word}: {words}");
    }
    assert!(!words.contains(PASSWORD));
}
