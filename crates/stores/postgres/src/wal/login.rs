//! From a host to a connection that the server has let in.
//!
//! What lives here: the socket, TLS, the password, and what the server says of itself. What does
//! not: which host (`server.rs`), what a certificate is checked for (`tls.rs`), and what is asked
//! afterwards (`wire.rs`).
//! Invariant: a password leaves this program in clear text only where nobody is in between, and no
//! error holds it. The driver does not speak of replication, so this is done here once more.

use std::io;
use std::net::SocketAddr;

use bytes::{Buf, Bytes, BytesMut};
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{
    ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256,
};
use postgres_protocol::message::frontend;
use postrider_core::{Error, ErrorKind, Result};
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding as Binding, Host as HostName, SslNegotiation};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::oid::db::rfc5912 as oid;

use super::frames::{self, Broken, Frames, Message};
use crate::error::{LOGIN_AS_ASKED, NO_TLS, ServerError, connect_io_error, replication_error};
use crate::server::Host;
use crate::tls::TlsMode;

/// What a session for replication starts with. The snapshot of a new slot lives in a transaction
/// that is idle for as long as it is used, and values are read by their text. A client that has
/// vanished is noticed; one that only does not read for a while stays, so there is no
/// `tcp_user_timeout`.
const SETTINGS: &str = "-c idle_in_transaction_session_timeout=0 -c statement_timeout=0 \
    -c lock_timeout=0 -c client_connection_check_interval=1000 -c tcp_keepalives_idle=10 \
    -c tcp_keepalives_interval=5 -c tcp_keepalives_count=4 -c datestyle=ISO \
    -c intervalstyle=postgres -c extra_float_digits=1 -c bytea_output=hex";

/// More messages than this before the first prompt are no greeting.
const GREETING_MESSAGES_MAX: u32 = 1_000;

/// Either kind of a socket, with or without TLS.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// A connection that was let in.
pub(crate) struct Login {
    pub(crate) frames: Frames<Box<dyn Stream>>,
    /// As `server_version_num` has it.
    pub(crate) version: u32,
    /// The server's process.
    pub(crate) pid: u32,
}

/// What the way to the server is like.
struct Way {
    stream: Box<dyn Stream>,
    /// Nobody is in between: this machine, or TLS.
    closed: bool,
    /// The hash of the server's certificate, where TLS has one that the standard names.
    certificate: Option<Vec<u8>>,
    tls: bool,
}

/// Connects, and is let in.
///
/// # Errors
/// By the same table as the driver's; `Permanent` behind a pooler that knows no replication.
pub(crate) async fn login(host: &Host) -> Result<Login> {
    let (name, config) = (host.place.name.as_str(), &host.place.config);
    let way = open(host).await?;
    let user = match config.get_user() {
        Some(user) => user.to_owned(),
        None => whoami::username().map_err(|error| {
            Error::permanent("url: name the user; this program's own has no name")
                .with_source(error)
        })?,
    };
    let options = format!("{} {SETTINGS}", config.get_options().unwrap_or_default());
    let mut words = vec![
        ("user", user.as_str()),
        ("client_encoding", "UTF8"),
        ("replication", "database"),
        ("options", options.as_str()),
    ];
    words.extend(config.get_dbname().map(|name| ("database", name)));
    words.extend(config.get_application_name().map(|name| ("application_name", name)));
    let Way { stream, closed, certificate, tls } = way;
    let mut session = Session {
        name,
        config,
        user: &user,
        closed,
        certificate,
        tls,
        frames: Frames::new(stream),
    };
    session.send(|output| frontend::startup_message(words, output)).await?;
    session.authenticate().await?;
    session.greeting().await
}

/// What stands in the way when replication is asked for behind a pooler.
pub(crate) fn behind_a_pooler(name: &str) -> Error {
    Error::permanent(format!(
        "connect to {name}: logical replication does not pass through this pooler (PgBouncer?); \
         give the server's own address"
    ))
}

async fn open(host: &Host) -> Result<Way> {
    let (name, config) = (host.place.name.as_str(), &host.place.config);
    let port = config.get_ports().first().copied().unwrap_or_default();
    let host_name = match config.get_hosts() {
        [HostName::Tcp(host)] => host.as_str(),
        #[cfg(unix)]
        [HostName::Unix(folder)] => {
            let socket = tokio::net::UnixStream::connect(folder.join(format!(".s.PGSQL.{port}")));
            let socket = socket.await.map_err(|error| connect_io_error(name, error))?;
            let stream = Box::new(socket);
            return Ok(Way { stream, closed: true, certificate: None, tls: false });
        }
        _ => return Err(Error::permanent("url: name the host")),
    };
    let socket = match config.get_hostaddrs() {
        [address] => TcpStream::connect((*address, port)).await,
        _ => TcpStream::connect((host_name, port)).await,
    };
    let ready = socket.and_then(|socket| set(&socket, config).map(|peer| (socket, peer)));
    let (socket, peer) = ready.map_err(|error| connect_io_error(name, error))?;
    if host.place.tls == TlsMode::Disable {
        let closed = peer.ip().is_loopback();
        return Ok(Way { stream: Box::new(socket), closed, certificate: None, tls: false });
    }
    let stream = encrypted(host, host_name, socket).await?;
    let certificate = end_point(&stream);
    Ok(Way { stream: Box::new(stream), closed: true, certificate, tls: true })
}

/// Sets what the address asks of a socket.
fn set(socket: &TcpStream, config: &Config) -> io::Result<SocketAddr> {
    socket.set_nodelay(true)?;
    let reference = SockRef::from(socket);
    #[cfg(target_os = "linux")]
    if let Some(time) = config.get_tcp_user_timeout() {
        reference.set_tcp_user_timeout(Some(*time))?;
    }
    if config.get_keepalives() {
        let mut keepalive = TcpKeepalive::new().with_time(config.get_keepalives_idle());
        if let Some(interval) = config.get_keepalives_interval() {
            keepalive = keepalive.with_interval(interval);
        }
        if let Some(retries) = config.get_keepalives_retries() {
            keepalive = keepalive.with_retries(retries);
        }
        reference.set_tcp_keepalive(&keepalive)?;
    }
    socket.peer_addr()
}

async fn encrypted(
    host: &Host,
    host_name: &str,
    mut socket: TcpStream,
) -> Result<TlsStream<TcpStream>> {
    let name = host.place.name.as_str();
    let failed = |error| connect_io_error(name, error);
    if host.place.config.get_ssl_negotiation() == SslNegotiation::Postgres {
        let mut request = BytesMut::new();
        frontend::ssl_request(&mut request);
        socket.write_all(&request).await.map_err(failed)?;
        // Not a byte more: what follows a refusal in plain text is not the server's to say.
        if socket.read_u8().await.map_err(failed)? != b'S' {
            return Err(Error::permanent(format!("connect to {name}: {NO_TLS}")));
        }
    }
    let server = ServerName::try_from(host_name.to_owned()).map_err(|error| {
        Error::permanent(format!("connect to {name}: TLS needs a host's name")).with_source(error)
    })?;
    let connector = TlsConnector::from(std::sync::Arc::clone(&host.tls));
    connector.connect(server, socket).await.map_err(failed)
}

/// The binding `tls-server-end-point` of RFC 5929: the certificate's hash by its own algorithm, by
/// SHA-256 where that is weaker, and none where it has no hash of its own.
fn end_point(stream: &TlsStream<TcpStream>) -> Option<Vec<u8>> {
    use sha2::Digest;
    let (_, session) = stream.get_ref();
    let bytes = session.peer_certificates()?.first()?;
    let certificate = Certificate::from_der(bytes).ok()?;
    match certificate.signature_algorithm.oid {
        oid::ID_SHA_1
        | oid::ID_SHA_256
        | oid::SHA_1_WITH_RSA_ENCRYPTION
        | oid::SHA_256_WITH_RSA_ENCRYPTION
        | oid::ECDSA_WITH_SHA_256 => Some(sha2::Sha256::digest(bytes).to_vec()),
        oid::ID_SHA_384 | oid::SHA_384_WITH_RSA_ENCRYPTION | oid::ECDSA_WITH_SHA_384 => {
            Some(sha2::Sha384::digest(bytes).to_vec())
        }
        oid::ID_SHA_512 | oid::SHA_512_WITH_RSA_ENCRYPTION | oid::ECDSA_WITH_SHA_512 => {
            Some(sha2::Sha512::digest(bytes).to_vec())
        }
        _ => None,
    }
}

/// A connection on its way in.
struct Session<'a> {
    name: &'a str,
    config: &'a Config,
    user: &'a str,
    closed: bool,
    certificate: Option<Vec<u8>>,
    tls: bool,
    frames: Frames<Box<dyn Stream>>,
}

impl Session<'_> {
    async fn send(&mut self, put: impl FnOnce(&mut BytesMut) -> io::Result<()>) -> Result<()> {
        // The one thing that can't be written is a text with a zero byte inside.
        let unwritable = |error| {
            let text = format!("connect to {}: a value of the url has a zero byte", self.name);
            Error::permanent(text).with_source(error)
        };
        put(self.frames.output()).map_err(unwritable)?;
        self.frames.flush().await.map_err(|error| connect_io_error(self.name, error))
    }

    /// The next message but notices; the server's errors as errors.
    async fn message(&mut self) -> Result<Message> {
        loop {
            let (tag, body) = self.frames.message().await.map_err(|broken| match broken {
                Broken::Io(error) => connect_io_error(self.name, error),
                Broken::Corrupt(error) => self.stranger().with_source(error),
            })?;
            match tag {
                frames::NOTICE => {}
                frames::ERROR => return Err(self.refused(frames::server_error(&body)?)),
                _ => return Ok((tag, body)),
            }
        }
    }

    fn refused(&self, error: ServerError) -> Error {
        match error.code.as_str() {
            // PgBouncer's answer to words that it does not know.
            "08P01" => behind_a_pooler(self.name).with_source(error),
            _ => replication_error(&format!("connect to {}", self.name), error),
        }
    }

    fn stranger(&self) -> Error {
        Error::permanent(format!(
            "connect to {}: what answers there is no PostgreSQL that this program knows; check \
             host and port",
            self.name
        ))
    }

    fn not_as_asked(&self) -> Error {
        Error::permanent(format!("connect to {}: {LOGIN_AS_ASKED}", self.name))
    }

    async fn authenticate(&mut self) -> Result<()> {
        let (kind, mut body) = self.demand().await?;
        if kind == 0 {
            return self.unbound();
        }
        let password = self.config.get_password().ok_or_else(|| self.not_as_asked())?.to_vec();
        match kind {
            3 => {
                self.unbound()?;
                if !self.closed {
                    return Err(Error::permanent(format!(
                        "connect to {}: the server asks for the password in clear text, and the \
                         connection is not encrypted; ask for TLS (sslmode=verify-full), or let \
                         pg_hba.conf say scram-sha-256",
                        self.name
                    )));
                }
                self.send(|output| frontend::password_message(&password, output)).await?;
            }
            5 if body.len() == 4 => {
                self.unbound()?;
                let salt = body.get_u32().to_be_bytes();
                let hash = md5_hash(self.user.as_bytes(), &password, salt);
                self.send(|output| frontend::password_message(hash.as_bytes(), output)).await?;
            }
            10 => self.scram(&password, &body).await?,
            _ => return Err(self.not_as_asked()),
        }
        match self.demand().await? {
            (0, _) => Ok(()),
            _ => Err(self.stranger()),
        }
    }

    /// What the server asks for to let us in, by its number.
    async fn demand(&mut self) -> Result<(u32, Bytes)> {
        match self.message().await? {
            (b'R', mut body) if body.len() >= 4 => Ok((body.get_u32(), body)),
            _ => Err(self.stranger()),
        }
    }

    /// Refuses to be let in without a binding to the channel where the address demands one.
    fn unbound(&self) -> Result<()> {
        match self.config.get_channel_binding() {
            Binding::Require => Err(self.not_as_asked()),
            _ => Ok(()),
        }
    }

    async fn scram(&mut self, password: &[u8], body: &[u8]) -> Result<()> {
        let offered: Vec<_> = body.split(|byte| *byte == 0).collect();
        let offers = |mechanism: &str| offered.contains(&mechanism.as_bytes());
        let wanted = self.config.get_channel_binding() != Binding::Disable;
        let certificate = self.certificate.take().filter(|_| wanted && self.tls);
        let (mechanism, binding) = match certificate {
            Some(hash) if offers(SCRAM_SHA_256_PLUS) => {
                (SCRAM_SHA_256_PLUS, ChannelBinding::tls_server_end_point(hash))
            }
            // Tells the server, under the proof, that we would have: nobody took the offer away.
            Some(_) => (SCRAM_SHA_256, ChannelBinding::unrequested()),
            None => (SCRAM_SHA_256, ChannelBinding::unsupported()),
        };
        if !offers(mechanism) {
            return Err(self.not_as_asked());
        }
        if mechanism == SCRAM_SHA_256 {
            self.unbound()?;
        }
        let mut scram = ScramSha256::new(password, binding);
        let first = scram.message().to_vec();
        self.send(|output| frontend::sasl_initial_response(mechanism, &first, output)).await?;
        let (11, challenge) = self.demand().await? else { return Err(self.stranger()) };
        scram.update(&challenge).map_err(|error| self.unproven(error))?;
        let proof = scram.message().to_vec();
        self.send(|output| frontend::sasl_response(&proof, output)).await?;
        let (12, verdict) = self.demand().await? else { return Err(self.stranger()) };
        scram.finish(&verdict).map_err(|error| self.unproven(error))
    }

    fn unproven(&self, error: io::Error) -> Error {
        Error::permanent(format!(
            "connect to {}: the server does not prove that it knows the password; is it the \
             right one?",
            self.name
        ))
        .with_source(error)
    }

    async fn greeting(mut self) -> Result<Login> {
        let (mut version, mut pid) = (None, 0);
        for _ in 0..GREETING_MESSAGES_MAX {
            let (tag, body) = self.message().await?;
            match tag {
                frames::PARAMETER => {
                    let (name, rest) = frames::text(&body)?;
                    if name == "server_version" {
                        version = version_number(&frames::text(rest)?.0);
                    }
                }
                frames::KEY_DATA => {
                    pid = body.first_chunk().map_or(0, |number| u32::from_be_bytes(*number));
                }
                frames::READY => {
                    let version = version.ok_or_else(|| self.stranger())?;
                    return Ok(Login { frames: self.frames, version, pid });
                }
                _ => {}
            }
        }
        Err(self.stranger())
    }
}

/// `15.18 (Debian 15.18-0+deb12u1)` is 150018, `18beta1` is 180000.
fn version_number(text: &str) -> Option<u32> {
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit());
    let major: u32 = numbers.next()?.parse().ok()?;
    let minor = match text.trim_start_matches(|letter: char| letter.is_ascii_digit()) {
        rest if rest.starts_with('.') => numbers.next()?.parse().ok()?,
        _ => 0,
    };
    (major < 10_000 && minor < 10_000).then_some(major * 10_000 + minor)
}

/// Whether a login was refused because no replication is spoken there.
pub(crate) fn speaks_no_replication(error: &Error) -> bool {
    // A pooler that drops the word hands the command on as a statement.
    error.kind() == ErrorKind::Permanent && crate::error::code_of(error) == Some("42601")
}

#[cfg(test)]
mod tests;
