//! TLS against a server with a certificate of a private authority.
//!
//! What lives here: each mode of `sslmode` against a right and a wrong certificate, and what the
//! refusals say. What does not: which mode a host gets, which needs no server (`address.rs`).
//! Invariant: nothing but a named `require` or `disable` lets a stranger's certificate pass.

use std::path::Path;
use std::process::Command;

use postrider_core::ErrorKind;
use postrider_servers::postgres::{Options, Server, Shutdown, Version};
use postrider_store_postgres::{PostgresOptions, PostgresStore};
use tempfile::TempDir;

use crate::connections::{ask, open, refusal};

const ENCRYPTED: &str = "select ssl::text from pg_stat_ssl where pid = pg_backend_pid()";

fn launch() -> Server {
    Options::new(Version::V15).tls().password("s3cret").launch().expect("a server")
}

fn authority(server: &Server) -> String {
    let file = server.certificate_authority().expect("started with TLS");
    file.to_str().expect("a path of ASCII").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_mode_takes_what_it_says_and_nothing_else() {
    let (server, stranger) = (launch(), launch());
    let database = server.create_database().expect("a database");
    let (port, name) = (server.port(), database.name());
    let known = format!("sslrootcert={}", authority(&server));
    let strange = format!("sslrootcert={}", authority(&stranger));
    let near = format!("postgres://postgres:s3cret@127.0.0.1:{port}/{name}");
    // The certificate is for localhost and 127.0.0.1.
    let far = format!("postgres://postgres:s3cret@db.example:{port}/{name}?hostaddr=127.0.0.1");
    for (url, encrypted) in [
        (near.clone(), "false"),
        (format!("{near}?{known}"), "true"),
        (format!("{near}?{known}&sslmode=verify-full"), "true"),
        (format!("{near}?{known}&channel_binding=require"), "true"),
        (format!("{near}?{known}&sslmode=verify-ca"), "true"),
        (format!("{far}&{known}&sslmode=verify-ca"), "true"),
        (format!("{far}&{known}&sslmode=require"), "true"),
        (format!("{far}&sslmode=require"), "true"),
        (format!("{far}&sslmode=disable"), "false"),
        (near.replace("127.0.0.1", "localhost") + "?sslmode=verify-full&" + &known, "true"),
    ] {
        let store = open(&url).await;
        let found = ask(&store, ENCRYPTED).await.expect("connected");
        assert_eq!(found, encrypted, "{url}");
    }
    for (url, says) in [
        (format!("{near}?sslmode=verify-full"), "ca_file"),
        (format!("{near}?sslmode=verify-ca"), "ca_file"),
        (format!("{near}?{strange}"), "ca_file"),
        (format!("{near}?{strange}&sslmode=require"), "ca_file"),
        (format!("{far}&{known}"), "for another name"),
        (format!("{far}&{known}&sslmode=verify-full"), "for another name"),
        (format!("{far}&{strange}&sslmode=verify-ca"), "ca_file"),
        (format!("{far}&sslmode=verify-full"), "ca_file"),
        (format!("{near}?channel_binding=require"), "lacks what the url demands"),
        (format!("{near}?sslrootcert=/no/such.pem"), "/no/such.pem"),
        (format!("{near}?sslrootcert=/dev/null"), "/dev/null"),
    ] {
        let error = refusal(PostgresOptions::new(&url)).await;
        assert_eq!(error.kind(), ErrorKind::Permanent, "{url}: {error:?}");
        assert!(error.to_string().contains(says), "{url}: {error:?}");
        assert!(!error.chain().contains("s3cret"), "{error:?}");
    }
    let file = authority(&server);
    let store = PostgresStore::open(PostgresOptions::new(&near).ca_file(file)).await.expect("open");
    assert_eq!(ask(&store, ENCRYPTED).await.expect("connected"), "true");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_tls_is_not_talked_to_in_plain_text() {
    let server = Options::new(Version::V18).launch().expect("a server");
    let url = format!("{}?sslmode=require", server.url("postgres", "postgres"));
    let error = refusal(PostgresOptions::new(&url)).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("offers no TLS"), "{error:?}");
}

/// Runs `openssl` in a folder.
fn openssl(folder: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    let output = command.args(arguments.split(' ')).current_dir(folder).output().expect("openssl");
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

const KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

/// An authority in a folder of its own.
fn own_authority() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let subject = "-subj /CN=authority -addext keyUsage=critical,keyCertSign";
    openssl(
        folder.path(),
        &format!("req -x509 -days 2 {subject} {KEY} -keyout ca.key -out ca.crt"),
    );
    folder
}

/// A certificate by it, `name.crt` and `name.key`.
fn certificate(folder: &Path, name: &str, days: i32) {
    let request = format!("req -new -subj /CN={name} {KEY} -keyout {name}.key -out {name}.csr");
    openssl(folder, &request);
    std::fs::write(folder.join("ext"), "subjectAltName=DNS:localhost,IP:127.0.0.1").expect("write");
    openssl(
        folder,
        &format!(
            "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile ext \
             -days {days} -out {name}.crt"
        ),
    );
}

/// Puts files over the server's own, whose owner and rights stay.
fn replace(server: &Server, files: &[(&Path, &str)]) {
    for (file, name) in files {
        let text = std::fs::read(file).expect("read");
        std::fs::write(server.data().join(name), text).expect("write");
    }
    server.restart(Shutdown::Fast).expect("restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_is_refused() {
    let server = launch();
    let folder = own_authority();
    certificate(folder.path(), "server", -1);
    let (certificate, key) = (folder.path().join("server.crt"), folder.path().join("server.key"));
    replace(&server, &[(&certificate, "server.crt"), (&key, "server.key")]);
    let url = server.url("postgres", "postgres");
    let options = PostgresOptions::new(url).ca_file(folder.path().join("ca.crt"));
    let error = refusal(options).await;
    assert_eq!(error.kind(), ErrorKind::Permanent);
    assert!(error.to_string().contains("has expired"), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_the_login() {
    let server = launch();
    let folder = own_authority();
    certificate(folder.path(), "postgres", 2);
    let hba = folder.path().join("hba");
    std::fs::write(&hba, "hostssl all all 127.0.0.1/32 cert\n").expect("write");
    let authority_of_clients = folder.path().join("ca.crt");
    server.psql("postgres", "alter system set ssl_ca_file = 'clients.crt'").expect("psql");
    replace(&server, &[(&hba, "pg_hba.conf"), (&authority_of_clients, "clients.crt")]);
    let port = server.port();
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let known = authority(&server);
    let place = folder.path().display();
    let with = format!("{url}?sslcert={place}/postgres.crt&sslkey={place}/postgres.key");
    let options = |url: &str| PostgresOptions::new(url).ca_file(&known);
    let store = PostgresStore::open(options(&with)).await.expect("open");
    assert_eq!(ask(&store, ENCRYPTED).await.expect("connected"), "true");
    let error = refusal(options(&url)).await;
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
    let error = refusal(options(&with.replace("postgres.key", "none.key"))).await;
    assert!(error.to_string().contains("sslkey: "), "{error:?}");
}
