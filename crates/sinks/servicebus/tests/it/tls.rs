//! TLS: a namespace's certificate is verified, and nothing goes in the clear.
//!
//! What lives here: the sink against an emulator behind TLS, with a certificate of an authority of
//! its own. What does not: the emulator's own, plain way.
//! Invariant: certificates are made for each test by `openssl`, and gone afterwards.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use postrider_core::{ErrorKind, Secret, Sink};
use postrider_sink_servicebus::ServiceBusConfig;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::{Bus, confirm, record, sink};

fn openssl(folder: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    let output = command.args(arguments.split(' ')).current_dir(folder).output().expect("openssl");
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority, `ca.pem`, and its certificate for `localhost`.
pub(crate) fn certificates(folder: &Path) {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    let authority = "-subj /CN=authority -addext keyUsage=critical,keyCertSign";
    openssl(folder, &format!("req -x509 -days 2 {authority} {key} -keyout ca.key -out ca.pem"));
    openssl(folder, &format!("req -new -subj /CN=localhost {key} -keyout key.pem -out own.csr"));
    std::fs::write(folder.join("ext"), "subjectAltName=DNS:localhost").expect("written");
    openssl(
        folder,
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -days 2 \
         -out cert.pem",
    );
}

/// What ends TLS as `localhost`.
pub(crate) fn acceptor(folder: &Path) -> TlsAcceptor {
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_file_iter(folder.join("cert.pem"))
            .and_then(Iterator::collect)
            .expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(folder.join("key.pem")).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("fits");
    TlsAcceptor::from(Arc::new(config))
}

/// Ends TLS and passes everything on.
async fn terminator(folder: &Path, upstream: SocketAddr) -> (u16, JoinSet<()>) {
    let acceptor = acceptor(folder);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            connections.spawn(async move {
                let Ok(mut tls) = acceptor.accept(stream).await else { return };
                let Ok(mut server) = TcpStream::connect(upstream).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut tls, &mut server).await;
            });
        }
    });
    (port, tasks)
}

fn config_of(bus: &Bus, host: &str, port: u16) -> ServiceBusConfig {
    let text = format!(
        "Endpoint=sb://{host}:{port};SharedAccessKeyName=RootManageSharedAccessKey;\
         SharedAccessKey=SAS_KEY_VALUE"
    );
    ServiceBusConfig { connection_string: Secret::new(text), ..bus.config() }
}

#[tokio::test]
async fn a_namespace_is_spoken_to_by_tls_with_its_certificate_verified() {
    let bus = Bus::start().await;
    let folder = tempfile::tempdir().expect("a folder");
    certificates(folder.path());
    let (port, _tasks) = terminator(folder.path(), bus.emulator.address()).await;
    let mut config = config_of(&bus, "localhost", port);
    // An authority that this system does not know.
    let error = sink(&config).check().await.expect_err("unknown authority");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert!(error.to_string().contains("TLS"), "{error}");
    config.ca_file = Some(folder.path().join("ca.pem"));
    let trusting = sink(&config);
    trusting.check().await.expect("trusted");
    confirm(&trusting, &[record(1, "k", b"{}")]).await;
    assert_eq!(bus.stored().len(), 1);
    // The same certificate for another name.
    let mut other = config_of(&bus, "127.0.0.1", port);
    other.ca_file = config.ca_file.clone();
    let error = sink(&other).check().await.expect_err("another name");
    assert!(error.to_string().contains("TLS"), "{error}");
}

#[tokio::test]
async fn a_server_without_tls_gets_nothing_in_the_clear() {
    let bus = Bus::start().await;
    let config = config_of(&bus, "localhost", bus.emulator.address().port());
    let config = ServiceBusConfig { connect_timeout_ms: 1_000, ..config };
    let error = sink(&config).check().await.expect_err("no TLS there");
    assert_eq!(error.kind(), ErrorKind::Transient);
    assert_eq!(bus.emulator.put_tokens(), 0);
    let config = ServiceBusConfig { ca_file: Some("/nowhere/ca.pem".into()), ..config };
    let clock = Arc::new(crate::Wall);
    let error = postrider_sink_servicebus::ServiceBus::new(&config, clock).expect_err("no file");
    assert!(error.to_string().contains("ca_file"), "{error}");
}
