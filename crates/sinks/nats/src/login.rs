//! Who the sink is: servers' addresses, the login, certificates.
//!
//! What lives here: turning settings into what the client library takes. What does not: the
//! connection (`connect.rs`).
//! Invariant: once a client was connected, it is refused its login for another connection. A
//! client that has lost its connection can therefore never make one and send what it still holds,
//! long after its events were given up.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::{Auth, AuthError, ConnectOptions, ServerAddr};
use nkeys::KeyPair;
use percent_encoding::percent_decode_str;
use postrider_core::{Error, Result, Secret};

use crate::config::NatsConfig;

/// A server may lag so long behind its pings.
const MIN_PING_INTERVAL: Duration = Duration::from_secs(1);

/// Where the sink connects to and as whom, checked.
pub(crate) struct Login {
    addresses: Vec<ServerAddr>,
    way: Way,
    config: NatsConfig,
}

#[derive(Clone, PartialEq, Eq)]
enum Way {
    Nobody,
    User { name: String, password: String },
    Token(String),
    Nkey { public: String, seed: String },
    Jwt { jwt: String, seed: String },
}

impl Login {
    /// Checks addresses, keys and files' presence; connects to nothing.
    pub(crate) fn new(config: &NatsConfig) -> Result<Self> {
        config.check()?;
        let mut found: Option<Way> = None;
        let mut addresses = Vec::new();
        for (index, server) in config.servers.iter().enumerate() {
            let (address, way) = address(server.expose(), index + 1, config)?;
            addresses.push(address);
            if found.is_some() && way.is_some() && found != way {
                return Err(Error::permanent(format!(
                    "servers: number {} of the list has another login than one before it, and the \
                     sink has one for all; write the same, or leave it out and give user and \
                     password",
                    index + 1
                )));
            }
            found = found.or(way);
        }
        let way = way(config)?.or(found).unwrap_or(Way::Nobody);
        Ok(Self { addresses, way, config: config.clone() })
    }

    pub(crate) fn addresses(&self) -> Vec<ServerAddr> {
        self.addresses.clone()
    }

    /// Options for one connection; `connected` is set when it is made, before anything is sent.
    /// A connection on which nothing comes back ends after three times `patience`: what it still
    /// holds is gone long before the stream forgets ids.
    pub(crate) fn options(&self, connected: Arc<AtomicBool>, patience: Duration) -> ConnectOptions {
        let way = self.way.clone();
        let timeout = Duration::from_millis(self.config.connect_timeout_ms);
        let mut options = ConnectOptions::with_auth_callback(move |nonce| {
            std::future::ready(match connected.load(Ordering::Acquire) {
                false => way.auth(&nonce),
                true => Err(AuthError::new("a connection is not made again by its client")),
            })
        })
        .name("postrider")
        .max_reconnects(Some(self.addresses.len()))
        .connection_timeout(timeout)
        .ping_interval(patience.max(MIN_PING_INTERVAL))
        .request_timeout(Some(timeout));
        if let Some(file) = &self.config.ca_file {
            options = options.add_root_certificates(file.clone());
        }
        if let (Some(certificate), Some(key)) =
            (&self.config.client_certificate_file, &self.config.client_key_file)
        {
            options = options.add_client_certificate(certificate.clone(), key.clone());
        }
        options
    }
}

impl Way {
    fn auth(&self, nonce: &[u8]) -> Result<Auth, AuthError> {
        let mut auth = Auth::new();
        let sign = |seed: &str| {
            let pair = KeyPair::from_seed(seed).map_err(AuthError::new)?;
            pair.sign(nonce).map_err(AuthError::new)
        };
        match self {
            Self::Nobody => {}
            Self::User { name, password } => {
                auth.username = Some(name.clone());
                auth.password = Some(password.clone());
            }
            Self::Token(token) => auth.token = Some(token.clone()),
            Self::Nkey { public, seed } => {
                auth.nkey = Some(public.clone());
                auth.signature = Some(sign(seed)?);
            }
            Self::Jwt { jwt, seed } => {
                auth.jwt = Some(jwt.clone());
                auth.signature = Some(sign(seed)?);
            }
        }
        Ok(auth)
    }
}

/// Host and port of each server that can be read, to tell whether two lists have one in common.
pub(crate) fn places(servers: &[Secret]) -> Vec<(String, u16)> {
    let read = servers.iter().filter_map(|server| server.expose().parse::<ServerAddr>().ok());
    read.map(|address| (address.host().to_ascii_lowercase(), address.port())).collect()
}

/// One server of the list, and the login that stands in its URL.
fn address(text: &str, number: usize, config: &NatsConfig) -> Result<(ServerAddr, Option<Way>)> {
    let refused =
        |why: &str| Error::permanent(format!("servers: number {number} of the list {why}"));
    let address: ServerAddr = text
        .parse()
        .map_err(|_| refused("is no address; give nats://host:4222 or tls://host:4222"))?;
    if !matches!(address.scheme(), "nats" | "tls") {
        return Err(refused("has another scheme than nats:// and tls://"));
    }
    if !address.tls_required() && !config.allow_plain && !is_loopback(address.host()) {
        return Err(refused(
            "is not on this machine, so its connection has to be encrypted: write tls://, or say \
             allow_plain = true",
        ));
    }
    let decoded = |part: &str| {
        let text = percent_decode_str(part).decode_utf8();
        text.map(Cow::into_owned).map_err(|_| refused("has a login that is no text once decoded"))
    };
    let way = match (address.username(), address.password()) {
        (Some(name), Some(password)) => {
            Some(Way::User { name: decoded(name)?, password: decoded(password)? })
        }
        (Some(token), None) => Some(Way::Token(decoded(token)?)),
        _ => None,
    };
    // The library writes addresses to its log.
    let address = without_login(text).parse().map_err(|_| refused("is no address"))?;
    Ok((address, way))
}

/// A URL without what stands before its host.
fn without_login(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
            format!("{scheme}://{host}{path}")
        }
        None => url.to_owned(),
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The login that the settings name, if they do.
fn way(config: &NatsConfig) -> Result<Option<Way>> {
    if let (Some(name), Some(password)) = (&config.user, &config.password) {
        let (name, password) = (name.clone(), password.expose().to_owned());
        return Ok(Some(Way::User { name, password }));
    }
    if let Some(token) = &config.token {
        return Ok(Some(Way::Token(token.expose().to_owned())));
    }
    if let Some(seed) = &config.nkey {
        let seed = seed.expose().trim().to_owned();
        let pair = KeyPair::from_seed(&seed)
            .map_err(|_| Error::permanent("nkey is no seed of an NKEY; a user's begins with SU"))?;
        return Ok(Some(Way::Nkey { public: pair.public_key(), seed }));
    }
    config.credentials.as_ref().map(|text| credentials(text.expose())).transpose()
}

/// A JWT and a seed between their marking lines.
fn credentials(text: &str) -> Result<Way> {
    let block = |name: &str| {
        let begin = text.lines().position(|line| line.contains(&format!("BEGIN {name}")))?;
        let inside = text.lines().skip(begin + 1).map(str::trim);
        inside.take_while(|line| !line.contains("END ")).find(|line| !line.is_empty())
    };
    let missing = |what: &str| Error::permanent(format!("credentials has no {what} block"));
    let jwt = block("NATS USER JWT").ok_or_else(|| missing("NATS USER JWT"))?;
    let seed = block("USER NKEY SEED").ok_or_else(|| missing("USER NKEY SEED"))?;
    KeyPair::from_seed(seed)
        .map_err(|_| Error::permanent("credentials has a seed that is none of an NKEY"))?;
    Ok(Way::Jwt { jwt: jwt.to_owned(), seed: seed.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(server: &str) -> Option<String> {
        Login::new(&NatsConfig::new(vec![Secret::new(server)])).err().map(|e| e.chain())
    }

    #[test]
    fn distant_servers_need_tls() {
        for fine in ["nats://127.0.0.1", "nats://localhost:4333", "tls://a.example", "nats://[::1]"]
        {
            assert_eq!(error(fine), None, "{fine}");
        }
        let text = error("nats://u:hunter2@a.example").expect("refused");
        assert!(text.contains("allow_plain") && !text.contains("hunter2"), "{text}");
        for other in ["http://127.0.0.1", "ws://127.0.0.1"] {
            assert!(error(other).expect("refused").contains("nats://"));
        }
    }

    #[test]
    fn an_address_has_no_login() {
        assert_eq!(without_login("nats://u:hunt@r2@h:1/x"), "nats://h:1/x");
        assert_eq!(without_login("tls://h"), "tls://h");
        let login = Login::new(&NatsConfig::new(vec![Secret::new("nats://u:hunter2@127.0.0.1")]));
        let login = login.expect("valid");
        assert!(!format!("{:?}", login.addresses()).contains("hunter2"));
        assert!(matches!(&login.way, Way::User { password, .. } if password == "hunter2"));
    }

    /// What has a meaning in a URL stands in it percent-encoded.
    #[test]
    fn a_login_in_an_address_is_decoded() {
        let way = |servers: &[&str]| {
            let servers = servers.iter().map(|text| Secret::new(*text)).collect();
            Login::new(&NatsConfig::new(servers)).map(|login| login.way)
        };
        let user = way(&["nats://d%40m:p%40s%3a%2F%25@127.0.0.1"]).expect("valid");
        assert!(matches!(&user, Way::User { name, password }
            if name == "d@m" && password == "p@s:/%"));
        let token = way(&["nats://t%40ken@127.0.0.1"]).expect("valid");
        assert!(matches!(&token, Way::Token(token) if token == "t@ken"));
        assert!(error("nats://u:%ff@127.0.0.1").expect("refused").contains("number 1"));
        let same = ["nats://u:p%40@127.0.0.1", "nats://localhost", "nats://u:p%40@[::1]"];
        assert!(matches!(way(&same), Ok(Way::User { .. })));
        let other = way(&["nats://u:hunter2@127.0.0.1", "nats://u:hunter3@localhost"]);
        let text = other.err().expect("refused").chain();
        assert!(text.starts_with("servers: number 2") && !text.contains("hunter"), "{text}");
    }

    #[test]
    fn credentials_are_read_as_their_files_are_written() {
        let pair = KeyPair::new_user();
        let seed = pair.seed().expect("made just now");
        let text = format!(
            "-----BEGIN NATS USER JWT-----\neyJ0.a.b\n------END NATS USER JWT------\n\nNote.\n\n\
             -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        );
        let way = credentials(&text).expect("whole");
        assert!(matches!(&way, Way::Jwt { jwt, .. } if jwt == "eyJ0.a.b"));
        let auth = way.auth(b"nonce").expect("signed");
        pair.verify(b"nonce", &auth.signature.expect("signed")).expect("its own");
        for broken in [text.replace("JWT", "ID"), text.replace(&seed, "SUAB")] {
            let error = credentials(&broken).err().expect("refused").chain();
            assert!(error.starts_with("credentials") && !error.contains(&seed), "{error}");
        }
    }
}
