//! From an address to a link that takes transfers.
//!
//! What lives here: socket, TLS, SASL, AMQP, token and attach, in this order, and reading the
//! link's limits. What does not: when to do it again (`worker.rs`).
//! Invariant: a link that is handed out has a token that was accepted; the socket of one that is
//! dropped, or was never finished, is cut.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use fe2o3_amqp::connection::ConnectionHandle;
use fe2o3_amqp::sasl_profile::SaslProfile;
use fe2o3_amqp::session::SessionHandle;
use fe2o3_amqp::types::definitions::{Fields, SenderSettleMode};
use fe2o3_amqp::types::primitives::{Symbol, Timestamp as AmqpTimestamp, Value};
use fe2o3_amqp::{Connection, Sender, Session};
use fe2o3_amqp_cbs::client::CbsClient;
use fe2o3_amqp_cbs::token::CbsToken;
use postrider_core::{Clock, Timestamp};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use uuid::Uuid;

use crate::batch::Limits;
use crate::connection_string::ConnectionString;
use crate::error::{self, Failure};
use crate::frames::Frames;
use crate::line::{CutOnDrop, Line};
use crate::token::TokenSource;

/// Silence after which the other side counts as gone; it has to say something in half of it.
const IDLE_TIMEOUT_MS: u32 = 60_000;
/// Link property with the most bytes of a batch.
const BATCH_SIZE_PROPERTY: &str = "com.microsoft:max-message-batch-size";

/// All that a connection is made of.
pub(crate) struct Dialer {
    pub(crate) address: ConnectionString,
    pub(crate) entity: String,
    pub(crate) tokens: Arc<dyn TokenSource>,
    /// None: in the clear, to an emulator.
    pub(crate) tls: Option<TlsConnector>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) timeout: Duration,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{}", self.address, self.entity)
    }
}

/// An open link, and what it hangs on.
pub(crate) struct Link {
    // First, since fields are dropped in this order: nothing more is written by the others.
    pub(crate) cut: CutOnDrop,
    pub(crate) sender: Sender,
    pub(crate) tokens: TokenLink,
    pub(crate) limits: Limits,
    // Dropping one of these ends it, and the link with it.
    _session: SessionHandle<()>,
    pub(crate) connection: ConnectionHandle<()>,
}

/// The pair of links that takes tokens.
pub(crate) struct TokenLink {
    client: CbsClient,
    /// When the last one that was accepted expires; none, if it can't be renewed.
    pub(crate) expires_at: Option<Timestamp>,
}

/// Why a token was not accepted.
pub(crate) struct NotTaken {
    pub(crate) failure: Failure,
    /// No answer is under way that could be taken for the next one's: the links for tokens compare
    /// no numbers, and hand out answers in the order in which they come.
    pub(crate) may_ask_again: bool,
}

impl Dialer {
    /// Connects within the time that is allowed.
    pub(crate) async fn connect(&self) -> Result<Link, Failure> {
        let connected = timeout(self.timeout, self.connect_inner()).await;
        connected.unwrap_or_else(|_| Err(error::no_link(self.timeout)))
    }

    async fn connect_inner(&self) -> Result<Link, Failure> {
        // A peer ends the older of two links that have one name in containers of one name, and
        // another relay, or this one's last connection, may be there still.
        let name = format!("postrider-{}-{}", self.entity, Uuid::new_v4().simple());
        let (mut connection, cut) = self.open(&name).await?;
        let mut session =
            Session::begin(&mut connection).await.map_err(|error| error::of_begin(&error))?;
        let client = CbsClient::builder().client_node_addr(format!("{name}-tokens"));
        let client = client.attach(&mut session).await;
        let client = client.map_err(|error| error::of_token_link(&error))?;
        let mut tokens = TokenLink { client, expires_at: None };
        self.put_token(&mut tokens).await.map_err(|not_taken| not_taken.failure)?;
        let sender = Sender::builder()
            .name(name)
            .target(self.entity.as_str())
            .sender_settle_mode(SenderSettleMode::Unsettled)
            .attach(&mut session)
            .await
            .map_err(|error| error::of_attach(&error))?;
        let batch = sender.properties(|properties| number(properties, BATCH_SIZE_PROPERTY));
        let limits = Limits::new(sender.max_message_size(), batch);
        Ok(Link { cut, sender, tokens, limits, _session: session, connection })
    }

    async fn open(&self, name: &str) -> Result<(ConnectionHandle<()>, CutOnDrop), Failure> {
        let address = (self.address.host.as_str(), self.address.port);
        let stream =
            TcpStream::connect(address).await.map_err(|cause| error::of_io(&cause, "connect"))?;
        // A batch is written in one piece; waiting for more would only add latency.
        stream.set_nodelay(true).map_err(|cause| error::of_io(&cause, "connect"))?;
        // Below TLS, which has a buffer of its own.
        let (line, cut) = Line::new(stream);
        let Some(tls) = &self.tls else { return Ok((self.open_on(line, name).await?, cut)) };
        let host = ServerName::try_from(self.address.host.clone()).map_err(|_| {
            Failure::transient("connect: the host's name can't be in a certificate")
        })?;
        let stream =
            tls.connect(host, line).await.map_err(|cause| error::of_io(&cause, "connect"))?;
        Ok((self.open_on(stream, name).await?, cut))
    }

    async fn open_on<Io>(&self, stream: Io, name: &str) -> Result<ConnectionHandle<()>, Failure>
    where
        Io: AsyncRead + AsyncWrite + fmt::Debug + Send + Unpin + 'static,
    {
        Connection::builder()
            .container_id(name)
            .hostname(self.address.host.as_str())
            .sasl_profile(SaslProfile::Anonymous)
            .idle_time_out(IDLE_TIMEOUT_MS)
            .open_with_stream(Frames::new(stream))
            .await
            .map_err(|error| error::of_open(&error))
    }

    /// Hands over a fresh token and waits until it is accepted, all within the time that connecting
    /// may take.
    pub(crate) async fn put_token(&self, link: &mut TokenLink) -> Result<(), NotTaken> {
        let until = Instant::now() + self.timeout;
        let audience = self.address.audience(&self.entity);
        let token = timeout_at(until, self.tokens.token(&audience, self.clock.now())).await;
        let token = token
            .map_err(|_| Failure::transient(format!("no token could be had in {:?}", self.timeout)))
            .and_then(|token| token.map_err(|error| Failure::of_tokens(&error)))
            .map_err(|failure| NotTaken { failure, may_ask_again: true })?;
        let expires = token.expires_at.map(|at| {
            AmqpTimestamp::from_milliseconds(i64::try_from(at.as_millis()).unwrap_or(i64::MAX))
        });
        let offered = CbsToken::new(token.text.expose(), token.kind, expires);
        let answer = timeout_at(until, link.client.put_token(audience.as_str(), offered)).await;
        let Ok(answer) = answer else {
            let failure = Failure::transient("the service did not answer to the token in time");
            return Err(NotTaken { failure, may_ask_again: false });
        };
        match answer.err().and_then(|error| error::of_put_token(&error)) {
            Some(not_taken) => Err(not_taken),
            None => {
                link.expires_at = token.expires_at;
                Ok(())
            }
        }
    }
}

/// A number among the link's properties, of whatever width.
fn number(properties: &Option<Fields>, name: &str) -> Option<u64> {
    match properties.as_ref()?.get(&Symbol::from(name))? {
        Value::Ulong(number) => Some(*number),
        Value::Uint(number) => Some(u64::from(*number)),
        Value::Long(number) => u64::try_from(*number).ok(),
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}
