//! TLS, and logging in by a token.
//!
//! Invariant: what is not verified is not spoken to: no user, password or token leaves this machine
//! before the server's certificate has been believed.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use async_trait::async_trait;
use postrider_core::{ErrorKind, Result, Secret};
use postrider_store_sqlserver::{AccessTokens, SchemaOnOpen, SqlServerOptions, SqlServerStore};
use tempfile::TempDir;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto, version};

use crate::support::opening;
use crate::tds::{Admission, Mock, tls};

fn openssl(folder: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    let output = command.args(arguments.split(' ')).current_dir(folder).output().expect("openssl");
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority, `ca.pem`, and a server's certificate by it for `localhost`.
fn certificates() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    let authority = "-subj /CN=authority -addext keyUsage=critical,keyCertSign";
    let place = folder.path();
    openssl(place, &format!("req -x509 -days 2 {authority} {key} -keyout ca.key -out ca.pem"));
    openssl(place, &format!("req -new -subj /CN=localhost {key} -keyout key.pem -out own.csr"));
    std::fs::write(place.join("ext"), "subjectAltName=DNS:localhost").expect("written");
    openssl(
        place,
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile ext -days 2 \
         -out cert.pem",
    );
    folder
}

/// A server that speaks TLS 1.2, as SQL Server does below version 8 of its protocol.
async fn sealed(folder: &Path) -> Mock {
    let chain: Vec<CertificateDer<'static>> =
        CertificateDer::pem_file_iter(folder.join("cert.pem"))
            .and_then(Iterator::collect)
            .expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(folder.join("key.pem")).expect("a key");
    let provider = Arc::new(crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS12])
        .expect("a version")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("they fit");
    let respond = |request: &_| opening(request).expect("nothing but opening");
    Mock::with(respond, |_| Admission::Welcome, Some(tls::Acceptor::new(config))).await
}

async fn open(mock: &Mock, host: &str, more: &str) -> Result<SqlServerStore> {
    let port = mock.address().port();
    let text = format!("Server={host},{port};User ID=relay;Password='s3;cret';{more}");
    SqlServerStore::open(SqlServerOptions::new(text).on_open(SchemaOnOpen::Require)).await
}

#[tokio::test]
async fn a_certificate_is_verified_unless_the_string_says_otherwise() {
    let folder = certificates();
    let mock = sealed(folder.path()).await;
    let authority = format!("ServerCertificate='{}'", folder.path().join("ca.pem").display());
    for (host, more, says) in [
        ("localhost", "", "certificate is refused"),
        ("localhost", "Encrypt=false", "certificate is refused"),
        ("127.0.0.1", authority.as_str(), "certificate is refused"),
    ] {
        let error = open(&mock, host, more).await.expect_err("it is not believed");
        assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
        assert!(error.chain().contains(says), "{}", error.chain());
    }
    assert!(mock.logins().is_empty(), "nobody logged in");
    let other_name = format!("{authority};HostNameInCertificate=localhost");
    for (host, more) in [
        ("localhost", authority.as_str()),
        ("127.0.0.1", other_name.as_str()),
        ("127.0.0.1", "TrustServerCertificate=true"),
        // The login alone is encrypted.
        ("127.0.0.1", "TrustServerCertificate=true;Encrypt=false"),
    ] {
        open(&mock, host, more).await.expect("it is believed");
    }
    assert_eq!(mock.logins().len(), 4);
    assert!(mock.logins().iter().all(|login| login.password == "s3;cret"));
    let port = mock.address().port();
    let text = format!("Server=localhost,{port};User ID=relay;Password=p");
    let options = SqlServerOptions::new(text).ca_file(folder.path().join("ca.pem"));
    SqlServerStore::open(options).await.expect("by the option");
}

#[tokio::test]
async fn a_server_without_tls_is_refused_before_the_login() {
    let mock = Mock::start(|request| opening(request).expect("opening")).await;
    let error = open(&mock, "127.0.0.1", "").await.expect_err("no TLS");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.chain().contains("offers no TLS"), "{}", error.chain());
    assert!(mock.logins().is_empty());
}

#[derive(Debug)]
struct Tokens(Result<&'static str, ErrorKind>);

#[async_trait]
impl AccessTokens for Tokens {
    async fn token(&self) -> Result<Secret> {
        self.0.map(Secret::new).map_err(|kind| postrider_core::Error::new(kind, "no token"))
    }
}

#[tokio::test]
async fn a_token_is_sent_instead_of_a_password() {
    let mock = Mock::start(|request| opening(request).expect("opening")).await;
    let port = mock.address().port();
    let text = format!("Server=127.0.0.1,{port};Database=shop;Encrypt=DANGER_PLAINTEXT");
    let by = |tokens| {
        SqlServerOptions::new(text.clone())
            .on_open(SchemaOnOpen::Require)
            .access_tokens(Arc::new(Tokens(tokens)))
    };
    SqlServerStore::open(by(Ok("ey.a.token"))).await.expect("let in");
    let login = mock.logins().remove(0);
    assert_eq!(login.token.as_deref(), Some("ey.a.token"));
    assert_eq!((login.user.as_str(), login.password.as_str()), ("", ""));
    for kind in [ErrorKind::Transient, ErrorKind::Permanent] {
        let error = SqlServerStore::open(by(Err(kind))).await.expect_err("no token");
        assert_eq!(error.kind(), kind);
    }
    assert_eq!(mock.logins().len(), 1);
}

#[tokio::test]
async fn a_refused_token_is_permanent_and_not_shown() {
    let refuse = |_: &_| Admission::Error(18456, "Login failed for user '<token-identified>'.");
    let mock = Mock::with(|_| unreachable!("nobody is let in"), refuse, None).await;
    let port = mock.address().port();
    let text = format!("Server=127.0.0.1,{port};Encrypt=DANGER_PLAINTEXT");
    let tokens = Arc::new(Tokens(Ok("ey.a.token")));
    let refused = SqlServerStore::open(SqlServerOptions::new(text).access_tokens(tokens)).await;
    let error = refused.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(!format!("{error:?}").contains("ey.a.token"), "{error:?}");
}
