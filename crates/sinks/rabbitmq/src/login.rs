//! Who the sink is and whom it trusts: servers' addresses, the login, certificates.
//!
//! What lives here: turning settings into what a connection needs. What does not: the connection
//! (`connect.rs`).
//! Invariant: a certificate is always verified; a distant server without TLS has to be allowed.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use lapin::auth::AuthProvider;
use lapin::types::{LongString, ShortString};
use lapin::uri::{AMQPScheme, AMQPUri};
use postrider_core::{Error, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

use crate::config::{Access, RabbitMqConfig, Scheme};

/// Where the sink connects to and as whom, checked.
pub(crate) struct Login {
    addresses: Vec<Address>,
    /// For the addresses that want it.
    tls: Option<TlsConnector>,
    allow_plain: bool,
}

/// One server of the list.
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Its name in its certificate, where it is spoken to by TLS.
    pub(crate) tls: Option<ServerName<'static>>,
    pub(crate) vhost: String,
    pub(crate) way: Way,
}

/// How one logs in.
#[derive(Clone)]
pub(crate) enum Way {
    Password {
        user: String,
        password: String,
    },
    /// As whom the client certificate names.
    External,
}

impl AuthProvider for Way {
    fn mechanism(&self) -> ShortString {
        match self {
            Self::Password { .. } => "PLAIN".into(),
            Self::External => "EXTERNAL".into(),
        }
    }

    fn auth_starter(&self) -> Result<LongString, String> {
        Ok(match self {
            Self::Password { user, password } => format!("\0{user}\0{password}").into(),
            Self::External => LongString::default(),
        })
    }
}

impl Login {
    /// Checks addresses and reads certificates; connects to nothing.
    pub(crate) fn new(config: &RabbitMqConfig) -> Result<Self> {
        config.check()?;
        Self::to(&config.access())
    }

    /// [`Self::new`] for settings that were checked.
    pub(crate) fn to(config: &Access<'_>) -> Result<Self> {
        let numbered = config.servers.iter().zip(1..);
        let addresses: Vec<Address> = numbered
            .map(|(server, number)| address(server.expose(), number, config))
            .collect::<Result<_>>()?;
        let encrypted = addresses.iter().any(|address| address.tls.is_some());
        let tls = encrypted.then(|| connector(config)).transpose()?;
        Ok(Self { addresses, tls, allow_plain: config.allow_plain })
    }

    pub(crate) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// A node that a server of the list names, as whom and where the list's first says. None if
    /// the password must not go there: without TLS only where that is allowed, or on this machine.
    pub(crate) fn beside(&self, host: &str, port: u16) -> Option<Address> {
        let Address { tls, vhost, way, .. } = self.addresses.first()?;
        let (host, vhost, way) = (host.to_owned(), vhost.clone(), way.clone());
        if tls.is_none() && !self.allow_plain && !is_loopback(&host) {
            return None;
        }
        let tls = match tls {
            Some(_) => Some(ServerName::try_from(host.clone()).ok()?),
            None => None,
        };
        Some(Address { host, port, tls, vhost, way })
    }

    pub(crate) fn tls(&self) -> Option<&TlsConnector> {
        self.tls.as_ref()
    }
}

/// One server of the list.
fn address(text: &str, number: usize, config: &Access<'_>) -> Result<Address> {
    let refused =
        |why: &str| Error::permanent(format!("servers: number {number} of the list {why}"));
    let Words { none, encrypt } = words(config.scheme);
    if text.contains('?') {
        return Err(refused("has parameters behind a ?; give the sink's own keys instead"));
    }
    let url = match config.scheme {
        Scheme::Amqp => text.parse().ok(),
        Scheme::Stream => stream_url(text),
    };
    let url: AMQPUri = url.ok_or_else(|| refused(none))?;
    let host = match in_brackets(text) {
        // The library that reads the URL takes these for localhost.
        Some(host) => host.to_owned(),
        None => url.authority.host,
    };
    let encrypted = match url.scheme {
        AMQPScheme::AMQPS => true,
        AMQPScheme::AMQP => false,
    };
    if !encrypted && !config.allow_plain && !is_loopback(&host) {
        return Err(refused(&format!(
            "is not on this machine, so its connection has to be encrypted: write {encrypt}, or \
             say allow_plain = true",
        )));
    }
    if config.external && !encrypted {
        return Err(refused(&format!("has no TLS, but external needs it: write {encrypt}")));
    }
    if url.vhost.len() > 255 {
        return Err(refused("has a virtual host of more than 255 bytes"));
    }
    let way = match (config.external, config.user, config.password) {
        (true, ..) => Way::External,
        (false, Some(user), Some(password)) => {
            Way::Password { user: user.to_owned(), password: password.expose().to_owned() }
        }
        (false, ..) => {
            let user = url.authority.userinfo;
            Way::Password { user: user.username, password: user.password }
        }
    };
    let name = ServerName::try_from(host.clone()).map_err(|_| refused(none));
    let tls = encrypted.then_some(name).transpose()?;
    Ok(Address { host, port: url.authority.port, tls, vhost: url.vhost, way })
}

/// A server: host, port and virtual host.
pub(crate) type Place = (String, u16, String);

/// Which server a URL of the stream protocol names. All names of this machine are one.
pub(crate) fn stream_place(text: &str) -> Option<Place> {
    let url = stream_url(text)?;
    let host = in_brackets(text).map_or(url.authority.host, str::to_owned);
    let host = if is_loopback(&host) { "localhost".to_owned() } else { host.to_ascii_lowercase() };
    Some((host, url.authority.port, url.vhost))
}

/// The host of a URL if it is an address of IP version 6.
fn in_brackets(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("://")?;
    let authority = rest.split('/').next()?;
    let host = authority.rsplit('@').next()?;
    Some(host.strip_prefix('[')?.split_once(']')?.0)
}

/// What a refusal says of a scheme.
struct Words {
    none: &'static str,
    encrypt: &'static str,
}

fn words(scheme: Scheme) -> Words {
    match scheme {
        Scheme::Amqp => Words {
            none: "is no address; give amqps://host:5671/vhost, or amqp://host:5672/vhost",
            encrypt: "amqps://",
        },
        Scheme::Stream => Words {
            none: "is no address of the stream protocol; give \
                   rabbitmq-stream+tls://host:5551/vhost, or rabbitmq-stream://host:5552/vhost",
            encrypt: "rabbitmq-stream+tls://",
        },
    }
}

/// The URL of a stream listener. It is read as one of AMQP, but for its port where it names none.
fn stream_url(text: &str) -> Option<AMQPUri> {
    let (scheme, rest, port) = match text.strip_prefix("rabbitmq-stream+tls://") {
        Some(rest) => ("amqps", rest, 5_551),
        None => ("amqp", text.strip_prefix("rabbitmq-stream://")?, 5_552),
    };
    let mut url: AMQPUri = format!("{scheme}://{rest}").parse().ok()?;
    let authority = rest.split('/').next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let behind = host.rsplit(']').next().unwrap_or_default();
    if host.is_empty() || host.starts_with(':') {
        return None;
    }
    if !behind.contains(':') {
        url.authority.port = port;
    }
    Some(url)
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// What connects by TLS, trusting this system's authorities and those of a file.
fn connector(config: &Access<'_>) -> Result<TlsConnector> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(system.certs);
    if let Some(file) = config.ca_file {
        for certificate in certificates(file, "ca_file")? {
            roots.add(certificate).map_err(|cause| unreadable("ca_file", cause))?;
        }
    }
    if roots.is_empty() {
        return Err(Error::permanent(
            "TLS: this system has no certificates of authorities (the package ca-certificates); \
             install it, or name a file by ca_file",
        ));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::permanent("TLS: no protocol version").with_source(error))?
        .with_root_certificates(roots);
    let config = match (config.client_certificate_file, config.client_key_file) {
        (Some(certificate), Some(key)) => {
            let chain = certificates(certificate, "client_certificate_file")?;
            let key = PrivateKeyDer::from_pem_file(key)
                .map_err(|cause| unreadable("client_key_file", cause))?;
            let made = builder.with_client_auth_cert(chain, key);
            made.map_err(|cause| unreadable("client_certificate_file", cause))?
        }
        _ => builder.with_no_client_auth(),
    };
    Ok(TlsConnector::from(Arc::new(config)))
}

fn certificates(file: &Path, key: &str) -> Result<Vec<CertificateDer<'static>>> {
    let found: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .map_err(|cause| unreadable(key, cause))?;
    if found.is_empty() {
        return Err(Error::permanent(format!("{key}: there is no certificate in it")));
    }
    Ok(found)
}

fn unreadable(key: &str, cause: impl Display) -> Error {
    Error::permanent(format!("{key}: give a readable PEM file that fits"))
        .with_source(cause.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::Secret;

    fn login(server: &str) -> Result<Login> {
        Login::new(&RabbitMqConfig::new(vec![Secret::new(server)], "e"))
    }

    fn error(server: &str) -> Option<String> {
        login(server).err().map(|error| error.chain())
    }

    #[test]
    fn distant_servers_need_tls() {
        for fine in ["amqp://127.0.0.1", "amqp://localhost:5673/%2F", "amqp://[::1]/a"] {
            assert_eq!(error(fine), None, "{fine}");
        }
        let text = error("amqp://u:hunter2@a.example").expect("refused");
        assert!(text.contains("allow_plain") && !text.contains("hunter2"), "{text}");
        let text = error("amqp://u:hunter2@[2001:db8::1]:5672/v").expect("refused");
        assert!(text.contains("allow_plain"), "{text}");
        for other in ["http://127.0.0.1", "127.0.0.1", "amqp://127.0.0.1?heartbeat=1"] {
            assert!(error(other).expect("refused").contains("number 1"), "{other}");
        }
    }

    /// Where a server sends a client, its password goes by the same rules.
    #[test]
    fn nodes_that_a_server_names_need_tls_as_well() {
        let distant = |server: &str| login(server).expect("valid").beside("b.example", 5_552);
        assert!(distant("amqp://127.0.0.1").is_none());
        let encrypted = distant("amqps://u:p@127.0.0.1/v").expect("allowed");
        assert!(encrypted.tls.is_some() && encrypted.vhost == "v");
        let here = login("amqp://127.0.0.1").expect("valid").beside("localhost", 5_552);
        assert_eq!(here.expect("allowed").port, 5_552);
    }

    #[test]
    fn urls_of_streams_have_their_own_schemes_and_ports() {
        let read = |text: &str| {
            let url = stream_url(text)?;
            let host = in_brackets(text).map_or(url.authority.host, str::to_owned);
            Some((url.scheme, host, url.authority.port, url.vhost))
        };
        for (text, scheme, host, port, vhost) in [
            ("rabbitmq-stream://a", AMQPScheme::AMQP, "a", 5_552, "/"),
            ("rabbitmq-stream://u:p@a:5672/v", AMQPScheme::AMQP, "a", 5_672, "v"),
            ("rabbitmq-stream+tls://u:p@a", AMQPScheme::AMQPS, "a", 5_551, "/"),
            ("rabbitmq-stream://[::1]/v", AMQPScheme::AMQP, "::1", 5_552, "v"),
        ] {
            assert_eq!(read(text), Some((scheme, host.into(), port, vhost.into())), "{text}");
        }
        assert!(read("amqp://a").is_none() && read("rabbitmq-stream://").is_none());
    }

    #[test]
    fn the_keys_come_before_the_url_and_the_url_before_guest() {
        let way = |config: &RabbitMqConfig| {
            let login = Login::new(config).expect("valid");
            login.addresses()[0].way.auth_starter().expect("made").to_string()
        };
        let mut config = RabbitMqConfig::new(vec![Secret::new("amqp://127.0.0.1")], "e");
        assert_eq!(way(&config), "\0guest\0guest");
        config.servers = vec![Secret::new("amqp://me:p%40ss@127.0.0.1/orders%2Fnew")];
        assert_eq!(way(&config), "\0me\0p@ss");
        assert_eq!(Login::new(&config).expect("valid").addresses()[0].vhost, "orders/new");
        (config.user, config.password) = (Some("you".into()), Some(Secret::new("word")));
        assert_eq!(way(&config), "\0you\0word");
    }

    #[test]
    fn files_that_are_no_certificates_are_named_by_their_key() {
        let folder = tempfile::tempdir().expect("a folder");
        let empty = folder.path().join("empty.pem");
        std::fs::write(&empty, "").expect("written");
        let mut config = RabbitMqConfig::new(vec![Secret::new("amqps://a.example")], "e");
        config.ca_file = Some(empty.clone());
        let refused = |config: &RabbitMqConfig| Login::new(config).err().expect("refused").chain();
        assert!(refused(&config).starts_with("ca_file: "));
        config.ca_file = Some(folder.path().join("none.pem"));
        assert!(refused(&config).starts_with("ca_file: "));
        config.ca_file = None;
        config.client_certificate_file = Some(empty.clone());
        config.client_key_file = Some(empty);
        assert!(refused(&config).contains("client_certificate_file: "));
        config.external = true;
        config.servers = vec![Secret::new("amqp://127.0.0.1")];
        assert!(refused(&config).contains("amqps://"));
    }
}
