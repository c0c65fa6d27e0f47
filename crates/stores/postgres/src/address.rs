//! Where the server is: from a URL, or from libpq's `key=value` words, to one place for each host.
//!
//! What lives here: reading the text, its defaults, and refusing what can't work. What does not:
//! connecting, and what a certificate is checked for (`tls.rs`).
//! Invariant: no error repeats any part of the text but names of hosts and of known parameters, for
//! a password that was not encoded may stand anywhere in it.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use postrider_core::{Error, Result};
use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, SslMode, SslNegotiation, TargetSessionAttrs};

use crate::tls::{TlsFiles, TlsMode};

const PORT: u16 = 5432;
/// A dead peer is noticed after `idle + interval * retries`: half a minute, while nothing is sent.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 4;
/// The same while something was sent and nothing came back, not even the peer's kernel.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(20);

const KNOWN: &str = "host, hostaddr, port, dbname, user, password, sslmode, sslrootcert, sslcert, \
    sslkey, sslnegotiation, channel_binding, target_session_attrs, application_name, options, \
    connect_timeout, keepalives, keepalives_idle, keepalives_interval, keepalives_count, \
    tcp_user_timeout";

/// One host that may be asked.
#[derive(Clone)]
pub(crate) struct Place {
    /// For texts: `host:port`, or the folder of a socket.
    pub(crate) name: String,
    pub(crate) config: Config,
    pub(crate) tls: TlsMode,
}

/// All that the text says.
pub(crate) struct Address {
    /// In the order in which they are tried.
    pub(crate) places: Vec<Place>,
    /// Whether a server that takes no writes is passed over.
    pub(crate) writable: bool,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) files: TlsFiles,
}

/// The text's parameters as they are found.
struct Words {
    config: Config,
    hosts: Vec<String>,
    addresses: Vec<IpAddr>,
    ports: Vec<u16>,
    tls: Option<TlsMode>,
    files: TlsFiles,
    writable: bool,
    connect_timeout: Option<Duration>,
}

impl Address {
    pub(crate) fn parse(text: &str, ca_file: Option<&PathBuf>) -> Result<Self> {
        let mut words = Words::new();
        for (key, value) in pairs(text)? {
            words.take(&key, &value)?;
        }
        if let Some(file) = ca_file {
            if words.files.authority.as_ref().is_some_and(|other| other != file) {
                return Err(Error::permanent("ca_file and the url's sslrootcert differ; give one"));
            }
            words.files.authority = Some(file.clone());
        }
        words.finish()
    }
}

impl Words {
    fn new() -> Self {
        let mut config = Config::new();
        config
            .application_name("postrider")
            .keepalives(true)
            .keepalives_idle(KEEPALIVE_IDLE)
            .keepalives_interval(KEEPALIVE_INTERVAL)
            .keepalives_retries(KEEPALIVE_RETRIES)
            .tcp_user_timeout(TCP_USER_TIMEOUT);
        Self {
            config,
            hosts: Vec::new(),
            addresses: Vec::new(),
            ports: Vec::new(),
            tls: None,
            files: TlsFiles::default(),
            writable: true,
            connect_timeout: None,
        }
    }

    fn take(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "host" => self.hosts.extend(value.split(',').map(str::to_owned)),
            "hostaddr" => {
                for one in value.split(',') {
                    let address = one.parse().map_err(|_| wrong(key, "an IP address"))?;
                    self.addresses.push(address);
                }
            }
            "port" => {
                for one in value.split(',') {
                    self.ports.push(match one {
                        "" => PORT,
                        _ => one.parse().map_err(|_| wrong(key, "a number up to 65535"))?,
                    });
                }
            }
            "sslmode" => self.tls = Some(TlsMode::parse(value)?),
            "sslrootcert" if value == "system" => self.files.authority = None,
            "sslrootcert" => self.files.authority = Some(value.into()),
            "sslcert" => self.files.certificate = Some(value.into()),
            "sslkey" => self.files.key = Some(value.into()),
            "target_session_attrs" => {
                self.writable = match value {
                    "read-write" | "primary" => true,
                    "any" => false,
                    _ => return Err(wrong(key, "read-write, primary or any")),
                };
            }
            "connect_timeout" => self.connect_timeout = seconds(key, value)?,
            _ => self.take_for_driver(key, value)?,
        }
        Ok(())
    }

    fn take_for_driver(&mut self, key: &str, value: &str) -> Result<()> {
        let config = &mut self.config;
        match key {
            "user" => _ = config.user(value),
            "password" => _ = config.password(value),
            "dbname" => _ = config.dbname(value),
            "options" => _ = config.options(value),
            "application_name" => _ = config.application_name(value),
            "channel_binding" => {
                _ = config.channel_binding(match value {
                    "disable" => ChannelBinding::Disable,
                    "prefer" => ChannelBinding::Prefer,
                    "require" => ChannelBinding::Require,
                    _ => return Err(wrong(key, "disable, prefer or require")),
                });
            }
            "sslnegotiation" => {
                _ = config.ssl_negotiation(match value {
                    "postgres" => SslNegotiation::Postgres,
                    "direct" => SslNegotiation::Direct,
                    _ => return Err(wrong(key, "postgres or direct")),
                });
            }
            "keepalives" => _ = config.keepalives(value != "0"),
            "keepalives_idle" => {
                _ = config.keepalives_idle(seconds(key, value)?.unwrap_or(KEEPALIVE_IDLE));
            }
            "keepalives_interval" => {
                _ = config.keepalives_interval(seconds(key, value)?.unwrap_or(KEEPALIVE_INTERVAL));
            }
            "keepalives_count" => {
                let count = value.parse().map_err(|_| wrong(key, "a number"))?;
                config.keepalives_retries(count);
            }
            "tcp_user_timeout" => {
                // In milliseconds, as libpq has it.
                let wait: u64 = value.parse().map_err(|_| wrong(key, "milliseconds"))?;
                config.tcp_user_timeout(Duration::from_millis(wait));
            }
            _ => {
                return Err(Error::permanent(format!(
                    "url: a parameter is unknown (known are {KNOWN}); write & as %26 inside a value"
                )));
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Address> {
        if self.hosts.is_empty() {
            self.hosts = self.addresses.iter().map(IpAddr::to_string).collect();
        }
        if self.hosts.is_empty() || self.hosts.iter().any(String::is_empty) {
            let text = "url: name the host: postgres://user:password@host:5432/database";
            return Err(Error::permanent(text));
        }
        let hosts = self.hosts.len();
        if !self.addresses.is_empty() && self.addresses.len() != hosts {
            return Err(wrong("hostaddr", "as many addresses as there are hosts"));
        }
        if self.ports.len() > 1 && self.ports.len() != hosts {
            return Err(wrong("port", "one port, or one for each host"));
        }
        if self.files.certificate.is_some() != self.files.key.is_some() {
            let text = "url: sslcert and sslkey belong together; give both or neither";
            return Err(Error::permanent(text));
        }
        if self.config.get_password().is_some_and(|password| password.contains(&0)) {
            return Err(Error::permanent("url: the password has a zero byte"));
        }
        // Which of the servers takes writes is asked once the connection stands.
        self.config.target_session_attrs(TargetSessionAttrs::Any);
        let places = (0..hosts).map(|number| self.place(number)).collect();
        Ok(Address {
            places,
            writable: self.writable,
            connect_timeout: self.connect_timeout,
            files: self.files,
        })
    }

    fn place(&self, number: usize) -> Place {
        let host = &self.hosts[number];
        let port = self.ports.get(number).or(self.ports.first()).copied().unwrap_or(PORT);
        let address = self.addresses.get(number).copied();
        let mut config = self.config.clone();
        config.host(host).port(port);
        if let Some(address) = address {
            config.hostaddr(address);
        }
        let socket = host.starts_with('/');
        let near = socket || address.map_or_else(|| is_loopback(host), |ip| ip.is_loopback());
        let tls = match self.tls {
            _ if socket => TlsMode::Disable,
            // Whoever names an authority asks for TLS.
            None if near && self.files.authority.is_none() => TlsMode::Disable,
            None => TlsMode::VerifyFull,
            Some(TlsMode::Require) if self.files.authority.is_some() => TlsMode::VerifyCa,
            Some(mode) => mode,
        };
        config.ssl_mode(match tls {
            TlsMode::Disable => SslMode::Disable,
            TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => SslMode::Require,
        });
        let name = match host.contains(':') {
            _ if socket => host.clone(),
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        Place { name, config, tls }
    }
}

fn is_loopback(host: &str) -> bool {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost"
        || name.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn wrong(key: &str, wanted: &str) -> Error {
    Error::permanent(format!("url: {key}: give {wanted}"))
}

/// Zero and below mean none, as in libpq.
fn seconds(key: &str, value: &str) -> Result<Option<Duration>> {
    let seconds: i64 = value.parse().map_err(|_| wrong(key, "whole seconds"))?;
    Ok(u64::try_from(seconds).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs))
}

fn pairs(text: &str) -> Result<Vec<(String, String)>> {
    let text = text.trim();
    let url = text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://"));
    match url {
        Some(rest) => of_url(rest),
        None if text.contains('=') && !text.contains("://") => of_words(text),
        None => Err(Error::permanent(
            "url: not a PostgreSQL URL; write postgres://user:password@host:5432/database",
        )),
    }
}

fn of_url(rest: &str) -> Result<Vec<(String, String)>> {
    let (head, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = head.split_once('/').unwrap_or((head, ""));
    let (login, hosts) = authority.split_once('@').unwrap_or(("", authority));
    if hosts.contains('@') || database.contains('@') || query.contains('@') {
        return Err(Error::permanent(
            "url: an @ stands where none can; in user and password write @ as %40, : as %3A, \
             / as %2F, ? as %3F, # as %23, % as %25",
        ));
    }
    let mut found = Vec::new();
    let mut add = |key: &str, value: &str| -> Result<()> {
        found.push((key.to_owned(), decoded(value)?));
        Ok(())
    };
    if !login.is_empty() {
        let (user, password) = login.split_once(':').map_or((login, None), |(u, p)| (u, Some(p)));
        add("user", user)?;
        if let Some(password) = password {
            add("password", password)?;
        }
    }
    for one in hosts.split(',').filter(|_| !hosts.is_empty()) {
        let (host, port) = match one.strip_prefix('[') {
            Some(inner) => inner.split_once(']').ok_or_else(|| wrong("host", "[IPv6]:port"))?,
            None => one.split_at(one.find(':').unwrap_or(one.len())),
        };
        add("host", host)?;
        add("port", port.trim_start_matches(':'))?;
    }
    if !database.is_empty() {
        add("dbname", database)?;
    }
    for one in query.split('&').filter(|one| !one.is_empty()) {
        let (key, value) = one.split_once('=').unwrap_or((one, ""));
        add(key, value)?;
    }
    Ok(found)
}

fn decoded(text: &str) -> Result<String> {
    let refused = || Error::permanent("url: a % is not followed by the code of a byte; write %25");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let code = rest.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let code = code.filter(|two| two.bytes().all(|byte| byte.is_ascii_hexdigit()));
        bytes.push(u8::from_str_radix(code.ok_or_else(refused)?, 16).map_err(|_| refused())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| Error::permanent("url: a value is not UTF-8"))
}

/// libpq's words: `key = value`, quoted by ' where there are spaces, \ before ' and \.
fn of_words(text: &str) -> Result<Vec<(String, String)>> {
    let refused =
        || Error::permanent("url: not a list of key=value words; quote values with spaces by '…'");
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (key, after) = rest.split_once('=').ok_or_else(refused)?;
        let key = key.trim_end();
        if key.is_empty() || key.contains(char::is_whitespace) {
            return Err(refused());
        }
        let after = after.trim_start();
        let quoted = after.starts_with('\'');
        let mut letters = after[usize::from(quoted)..].char_indices();
        let mut value = String::new();
        let end = loop {
            match letters.next() {
                Some((_, '\\')) => value.push(letters.next().ok_or_else(refused)?.1),
                Some((at, '\'')) if quoted => break at + 2,
                Some((at, letter)) if !quoted && letter.is_whitespace() => break at,
                Some((_, letter)) => value.push(letter),
                None if quoted => return Err(refused()),
                None => break after.len(),
            }
        };
        found.push((key.to_owned(), value));
        rest = after[end..].trim_start();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use tokio_postgres::config::Host;

    use super::*;

    fn parse(text: &str) -> Address {
        Address::parse(text, None).unwrap()
    }

    fn refusal(text: &str) -> String {
        Address::parse(text, None).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn all_forms_say_the_same() {
        for text in [
            "postgres://me:p%40%20'x@db.example:6432/app%20db?application_name=x&sslmode=verify-ca",
            "postgresql://db.example:6432/app%20db?user=me&password=p%40%20'x&sslmode=verify-ca\
             &application_name=x",
            "host=db.example port = 6432 user=me password='p@ \\'x' dbname='app db' \
             sslmode=verify-ca application_name=x",
        ] {
            let address = parse(text);
            let [place] = &address.places[..] else { panic!("one place: {text}") };
            assert_eq!(place.name, "db.example:6432", "{text}");
            assert_eq!(place.tls, TlsMode::VerifyCa, "{text}");
            assert_eq!(place.config.get_user(), Some("me"), "{text}");
            assert_eq!(place.config.get_password(), Some(&b"p@ 'x"[..]), "{text}");
            assert_eq!(place.config.get_dbname(), Some("app db"), "{text}");
            assert_eq!(place.config.get_application_name(), Some("x"), "{text}");
            assert_eq!(place.config.get_ssl_mode(), SslMode::Require, "{text}");
        }
    }

    #[test]
    fn several_hosts_each_have_a_place() {
        let address = parse("postgres://u@a,b:1,[::1]:2,%2Frun%2Fpg/d");
        let names: Vec<_> = address.places.iter().map(|place| place.name.as_str()).collect();
        assert_eq!(names, ["a:5432", "b:1", "[::1]:2", "/run/pg"]);
        let modes: Vec<_> = address.places.iter().map(|place| place.tls).collect();
        use TlsMode::{Disable, VerifyFull};
        assert_eq!(modes, [VerifyFull, VerifyFull, Disable, Disable]);
        assert!(matches!(address.places[3].config.get_hosts(), [Host::Unix(_)]));
        assert!(address.writable);
        assert!(!parse("host=a,b target_session_attrs=any").writable);
        assert_eq!(parse("host=a,b port=1,2").places[1].name, "b:2");
        assert_eq!(parse("host=a,b port=7").places[1].name, "b:7");
    }

    #[test]
    fn tls_is_verified_unless_the_host_is_near_or_told_otherwise() {
        for (text, mode) in [
            ("postgres://u@db/d", TlsMode::VerifyFull),
            ("postgres://u@10.0.0.1/d", TlsMode::VerifyFull),
            ("postgres://u@localhost.evil.example/d", TlsMode::VerifyFull),
            ("postgres://u@localhost/d", TlsMode::Disable),
            ("postgres://u@127.0.0.1/d", TlsMode::Disable),
            ("postgres://u@[::1]/d", TlsMode::Disable),
            ("postgres:///d?host=/run/postgresql", TlsMode::Disable),
            ("host=localhost hostaddr=10.0.0.1", TlsMode::VerifyFull),
            ("postgres://u@localhost/d?sslmode=require", TlsMode::Require),
            ("postgres://u@localhost/d?sslrootcert=/a.pem", TlsMode::VerifyFull),
            ("postgres://u@db/d?sslmode=require&sslrootcert=/a.pem", TlsMode::VerifyCa),
            ("postgres://u@db/d?sslmode=disable", TlsMode::Disable),
        ] {
            assert_eq!(parse(text).places[0].tls, mode, "{text}");
        }
    }

    #[test]
    fn timeouts_have_libpqs_units_and_safe_defaults() {
        let config = parse("postgres://u@db/d").places.remove(0).config;
        assert_eq!(config.get_tcp_user_timeout(), Some(&TCP_USER_TIMEOUT));
        assert_eq!(config.get_keepalives_idle(), KEEPALIVE_IDLE);
        let address = parse("host=db tcp_user_timeout=1500 connect_timeout=3 keepalives_count=9");
        let config = &address.places[0].config;
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_millis(1_500)));
        assert_eq!(config.get_keepalives_retries(), Some(9));
        assert_eq!(address.connect_timeout, Some(Duration::from_secs(3)));
    }

    #[test]
    fn refusals_name_the_place_and_never_the_password() {
        for (text, says) in [
            ("mysql://u:hunter2@h/d", "not a PostgreSQL URL"),
            ("hunter2", "not a PostgreSQL URL"),
            ("", "not a PostgreSQL URL"),
            ("postgres://u:hunter2@2@h/d", "write @ as %40"),
            ("postgres://u:hunter2/2@h/d", "write @ as %40"),
            ("postgres://u:hunter2?2@h/d", "write @ as %40"),
            ("postgres://u:hunter2%zz@h/d", "write %25"),
            ("postgres://u:hunter2%+1@h/d", "write %25"),
            ("postgres://u:hunter2%ff@h/d", "not UTF-8"),
            ("postgres://u:hunter2@/d", "name the host"),
            ("postgres://u:hunter2@h:x/d", "port: give a number"),
            ("postgres://u:hunter2@[::1/d", "host: give [IPv6]:port"),
            ("postgres://h/d?password=x&hunter2=1", "a parameter is unknown"),
            ("postgres://u:hunter2@h/d?sslmode=prefer", "sslmode"),
            ("postgres://u:hunter2@h/d?sslmode=hunter2", "verify-full"),
            ("postgres://u:hunter2@h/d?target_session_attrs=read-only", "read-write"),
            ("postgres://u:hunter2@h/d?sslcert=/a", "belong together"),
            ("host=h password='hunter2", "quote values"),
            ("host=a,b port=1,2,3 password=hunter2", "one for each host"),
            ("host=a hostaddr=1.1.1.1,1.1.1.2 password=hunter2", "as many addresses"),
        ] {
            let refusal = refusal(text);
            assert!(refusal.contains(says), "{text}: {refusal}");
            assert!(!refusal.contains("hunter2"), "{refusal}");
        }
        let both = Address::parse("host=a sslrootcert=/a", Some(&PathBuf::from("/b"))).map(|_| ());
        assert!(both.unwrap_err().to_string().contains("differ"));
    }
}
