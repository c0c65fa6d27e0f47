//! Who the sink is: the server's address, the login, certificates.
//!
//! What lives here: turning settings into what the client library takes. What does not: the
//! connection (`connect.rs`).
//! Invariant: no connection without TLS leaves this machine unless the settings say so, and a
//! certificate is always verified.

use std::path::Path;
use std::time::Duration;

use postrider_core::{Error, Result};
use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion,
    TlsCertificates,
};

use crate::config::RedisConfig;

/// Where the sink connects to and as whom, checked.
pub(crate) struct Login {
    server: ConnectionInfo,
    config: RedisConfig,
}

impl Login {
    /// Checks the address and the login; connects to nothing and reads no file.
    pub(crate) fn new(config: &RedisConfig) -> Result<Self> {
        config.check()?;
        let server = server(config)?;
        if let ConnectionAddr::TcpTls { .. } = server.addr() {
            // The client library takes the process's; without one it would panic where a program
            // is built with two. It fails only if there is one.
            let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        }
        Ok(Self { server, config: config.clone() })
    }

    /// Time for connecting, with the login and the first look at the server.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.config.connect_timeout_ms)
    }

    /// What makes a connection. The files of certificates are read for each, so that a new
    /// certificate is taken without a restart.
    pub(crate) fn client(&self) -> Result<Client> {
        let ConnectionAddr::TcpTls { .. } = self.server.addr() else {
            return Client::open(self.server.clone()).map_err(unusable);
        };
        let config = &self.config;
        let client_tls = match (&config.client_certificate_file, &config.client_key_file) {
            (Some(certificate), Some(key)) => Some(ClientTlsConfig {
                client_cert: read("client_certificate_file", certificate)?,
                client_key: read("client_key_file", key)?,
            }),
            _ => None,
        };
        let root_cert = config.ca_file.as_deref().map(|file| read("ca_file", file)).transpose()?;
        let certificates = TlsCertificates { client_tls, root_cert };
        Client::build_with_tls(self.server.clone(), certificates).map_err(unusable)
    }
}

fn unusable(error: redis::RedisError) -> Error {
    Error::transient("connect to Redis: the certificates can't be used").with_source(error)
}

/// A file may be replaced at this very moment: it is looked for again.
fn read(key: &str, file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file).map_err(|cause| {
        Error::transient(format!("{key}: {} can't be read", file.display())).with_source(cause)
    })
}

/// The server of the URL, with the login of the settings if they have one.
fn server(config: &RedisConfig) -> Result<ConnectionInfo> {
    let text = config.url.expose();
    let refused = |why: &str| Error::permanent(format!("url: {why}"));
    if !text.starts_with("redis://") && !text.starts_with("rediss://") {
        return Err(refused("is no server's; give redis://host:6379/0 or rediss://host:6379/0"));
    }
    // The library's own text repeats a part of the URL.
    let server = text
        .into_connection_info()
        .map_err(|_| refused("is no server's; give redis://host:6379/0 or rediss://host:6379/0"))?;
    match server.addr() {
        ConnectionAddr::TcpTls { insecure: true, .. } => {
            return Err(refused("asks for certificates not to be verified; name a ca_file"));
        }
        ConnectionAddr::Tcp(host, _) if !config.allow_plain && !is_loopback(host) => {
            return Err(refused(
                "is not on this machine, so its connection has to be encrypted: write rediss://, \
                 or say allow_plain = true",
            ));
        }
        _ => {}
    }
    // The newer protocol tells when a connection has ended.
    let mut login = server.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    if let Some(password) = &config.password {
        login = login.set_password(password.expose());
        login = match &config.user {
            Some(user) => login.set_username(user),
            None => login,
        };
    }
    // The client library would log nobody in, and events would go under the user `default`.
    if login.username().is_some() && login.password().is_none() {
        return Err(refused("names a user without a password; give it, there or as `password`"));
    }
    Ok(server.set_redis_settings(login).set_tcp_settings(tcp(config)))
}

/// The server and database that a URL names, without who logs in; none if it is no server's.
pub(crate) fn place(url: &str) -> Option<(String, u16, i64)> {
    let server = url.into_connection_info().ok()?;
    let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) =
        server.addr()
    else {
        return None;
    };
    let host = host.to_ascii_lowercase();
    let host = if is_loopback(&host) { "localhost".to_owned() } else { host };
    Some((host, *port, server.redis_settings().db()))
}

/// What was given up with a connection must not be sent later by the operating system.
fn tcp(config: &RedisConfig) -> TcpSettings {
    let settings = TcpSettings::default().set_nodelay(true).set_linger_time(Duration::ZERO);
    let patience = Duration::from_millis(config.timeout_ms).saturating_mul(3);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(patience);
    #[cfg(not(target_os = "linux"))]
    let _ = patience;
    settings
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::Secret;

    fn error(url: &str) -> Option<String> {
        Login::new(&RedisConfig::new(Secret::new(url))).err().map(|e| e.chain())
    }

    #[test]
    fn distant_servers_need_tls() {
        for fine in [
            "redis://127.0.0.1",
            "redis://localhost:6380/2",
            "rediss://a.example",
            "redis://[::1]:6379",
        ] {
            assert_eq!(error(fine), None, "{fine}");
        }
        let text = error("redis://u:hunter2@a.example").expect("refused");
        assert!(text.contains("allow_plain") && !text.contains("hunter2"), "{text}");
        let text = error("rediss://u:hunter2@a.example/#insecure").expect("refused");
        assert!(text.contains("ca_file") && !text.contains("hunter2"), "{text}");
        for other in ["http://127.0.0.1", "unix:///run/redis", "redis://", "redis://h/x", ""] {
            assert!(error(other).expect("refused").contains("redis://"), "{other}");
        }
    }

    #[test]
    fn the_login_of_the_settings_comes_first() {
        let in_url = RedisConfig::new(Secret::new("redis://u:p%40ss@127.0.0.1/3"));
        let login = server(&in_url).expect("valid").redis_settings().clone();
        assert_eq!((login.username(), login.password()), (Some("u"), Some("p@ss")));
        assert_eq!(login.db(), 3);
        let config = RedisConfig { password: Some(Secret::new("new")), ..in_url.clone() };
        let login = server(&config).expect("valid").redis_settings().clone();
        assert_eq!((login.username(), login.password()), (Some("u"), Some("new")));
        let config = RedisConfig { user: Some("v".into()), ..config };
        let login = server(&config).expect("valid").redis_settings().clone();
        assert_eq!((login.username(), login.password()), (Some("v"), Some("new")));
    }

    #[test]
    fn a_user_without_a_password_is_refused() {
        for url in ["redis://app@127.0.0.1", "redis://app:@127.0.0.1", "rediss://app@a.example/1"] {
            let mut config = RedisConfig::new(Secret::new(url));
            let refused = Login::new(&config).err().expect(url);
            assert_eq!(refused.kind(), postrider_core::ErrorKind::Permanent);
            assert!(refused.chain().contains("without a password"), "{}", refused.chain());
            config.password = Some(Secret::new("p4ss"));
            assert!(Login::new(&config).is_ok(), "{url}");
        }
        assert_eq!(error("redis://:p4ss@127.0.0.1"), None);
    }
}
