//! A small client of Service Bus in Rust, on `fe2o3-amqp` alone.
//!
//! What lives here: connecting, tokens, links, and why something was refused. What does not: what
//! is done with it (`steps.rs`), receiving (`inbox.rs`), requests (`management.rs`).
//! Invariant: it knows nothing of the emulator but its connection string, so that what it can do
//! here any client of AMQP 1.0 can.

mod inbox;
mod management;
mod post;
mod steps;
mod steps_trouble;

pub(crate) use inbox::Want;
pub(crate) use management::Shown;
pub(crate) use post::{Post, post};
pub(crate) use steps::run;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fe2o3_amqp::connection::ConnectionHandle;
use fe2o3_amqp::link::delivery::DeliveryFut;
use fe2o3_amqp::link::{ReceiverAttachError, SendError, SenderAttachError};
use fe2o3_amqp::sasl_profile::SaslProfile;
use fe2o3_amqp::session::SessionHandle;
use fe2o3_amqp::types::definitions::{self, ErrorCondition, SenderSettleMode};
use fe2o3_amqp::types::messaging::Outcome;
use fe2o3_amqp::types::primitives::Symbol;
use fe2o3_amqp::{Connection, Sender, Session};
use fe2o3_amqp_cbs::client::CbsClient;
use fe2o3_amqp_cbs::token::CbsToken;
use hmac::{Hmac, KeyInit, Mac};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sha2::Sha256;
use tokio::net::TcpStream;
use tokio::time::timeout;

use inbox::Inbox;
use management::Management;

/// Longer than anything takes that comes at all.
const WITHIN: Duration = Duration::from_secs(30);
/// Tokens last longer than the emulator's clock is moved.
const TOKEN_SECONDS: u64 = 24 * 3_600;

/// Why something could not be had.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The server says so, with this condition.
    Refused(String),
    /// Anything else: the connection, most likely.
    Lost(String),
}

impl Trouble {
    fn refused(error: &definitions::Error) -> Self {
        let symbol = match &error.condition {
            ErrorCondition::AmqpError(error) => Symbol::from(error),
            ErrorCondition::ConnectionError(error) => Symbol::from(error),
            ErrorCondition::SessionError(error) => Symbol::from(error),
            ErrorCondition::LinkError(error) => Symbol::from(error),
            ErrorCondition::Custom(symbol) => symbol.clone(),
        };
        Self::Refused(symbol.0)
    }

    fn lost(error: impl std::fmt::Debug) -> Self {
        Self::Lost(format!("{error:?}"))
    }
}

pub(crate) type Result<T, E = Trouble> = std::result::Result<T, E>;

/// Something was refused, and with this condition.
pub(crate) fn refused<T: std::fmt::Debug>(result: Result<T>, condition: &str) {
    let error = result.expect_err("it is refused");
    assert_eq!(error, Trouble::Refused(condition.to_owned()));
}

/// One connection with one session, and a token for all of the namespace.
pub(crate) struct Client {
    connection: ConnectionHandle<()>,
    session: SessionHandle<()>,
    _tokens: CbsClient,
    links: u32,
}

impl Client {
    /// Connects, and puts a token for everything.
    pub(crate) async fn open(connection_string: &str) -> Result<Self> {
        let part = |name: &str| {
            let found = connection_string.split(';').find_map(|part| part.strip_prefix(name));
            found.expect("the connection string is whole").to_owned()
        };
        let address = part("Endpoint=sb://");
        let stream = TcpStream::connect(&address).await.map_err(Trouble::lost)?;
        let mut connection = Connection::builder()
            .container_id("a-client-in-rust")
            .hostname(address.as_str())
            .sasl_profile(SaslProfile::Anonymous)
            .open_with_stream(stream)
            .await
            .map_err(Trouble::lost)?;
        let mut session = Session::begin(&mut connection).await.map_err(Trouble::lost)?;
        let tokens = CbsClient::builder().client_node_addr("my-tokens").attach(&mut session);
        let mut tokens = tokens.await.map_err(Trouble::lost)?;
        let audience = format!("sb://{address}/");
        let key = part("SharedAccessKey=");
        let token = token(&audience, &part("SharedAccessKeyName="), &key);
        let token = CbsToken::new(token, "servicebus.windows.net:sastoken", None);
        match tokens.put_token(audience.as_str(), token).await {
            Ok(()) => Ok(Self { connection, session, _tokens: tokens, links: 0 }),
            Err(fe2o3_amqp_management::error::Error::Status(status)) => {
                Err(Trouble::Refused(status.code.0.to_string()))
            }
            Err(error) => Err(Trouble::lost(error)),
        }
    }

    /// Ends it; what was written before has been read by then.
    pub(crate) async fn close(mut self) {
        self.session.end().await.expect("it ends in order");
        self.connection.close().await.expect("it ends in order");
    }

    fn name(&mut self, what: &str) -> String {
        self.links += 1;
        format!("{what}-{}", self.links)
    }

    pub(crate) async fn sender(&mut self, path: &str) -> Result<Sender> {
        let name = self.name("sender");
        let attached = Sender::builder()
            .name(name)
            .target(path)
            .sender_settle_mode(SenderSettleMode::Unsettled)
            .attach(&mut self.session)
            .await;
        attached.map_err(|error| match error {
            SenderAttachError::RemoteClosedWithError(error) => Trouble::refused(&error),
            error => Trouble::lost(error),
        })
    }

    pub(crate) async fn inbox(&mut self, path: &str, want: Want<'_>) -> Result<Inbox> {
        let name = self.name("receiver");
        let attached = timeout(WITHIN, Inbox::attach(&mut self.session, &name, path, want)).await;
        attached.expect("an attach is answered").map_err(|error| match error {
            ReceiverAttachError::RemoteClosedWithError(error) => Trouble::refused(&error),
            error => Trouble::lost(error),
        })
    }

    pub(crate) async fn management(&mut self, path: &str) -> Result<Management> {
        let name = self.name("management");
        Management::attach(&mut self.session, &name, path).await
    }

    /// Sends messages one after the other, over a link of their own.
    pub(crate) async fn send<'a>(
        &mut self,
        path: &str,
        posts: impl IntoIterator<Item = Post<'a>>,
    ) -> Result<()> {
        let mut sender = self.sender(path).await?;
        for post in posts {
            send(&mut sender, &post).await?;
        }
        sender.close().await.map_err(Trouble::lost)
    }
}

/// Sends one message, and waits for what becomes of it.
pub(crate) async fn send(sender: &mut Sender, post: &Post<'_>) -> Result<()> {
    let settlement = sender.send_batchable(post.message()).await.map_err(Trouble::lost)?;
    settled(sender, settlement).await
}

/// Sends messages as one batch.
pub(crate) async fn send_batch(sender: &mut Sender, posts: &[Post<'_>]) -> Result<()> {
    let settlement = sender.send_batchable(post::batch(posts)).await.map_err(Trouble::lost)?;
    settled(sender, settlement).await
}

/// What became of a transfer. The end of its link is looked at besides: the library leaves some
/// settlements open when a link ends.
async fn settled(
    sender: &mut Sender,
    settlement: DeliveryFut<Result<Outcome, SendError>>,
) -> Result<()> {
    tokio::select! {
        biased;
        outcome = settlement => accepted(outcome.map_err(Trouble::lost)?),
        error = sender.on_detach() => Err(Trouble::lost(error)),
    }
}

fn accepted(outcome: Outcome) -> Result<()> {
    match outcome {
        Outcome::Accepted(_) => Ok(()),
        Outcome::Rejected(rejected) => {
            Err(Trouble::refused(&rejected.error.expect("a rejection says why")))
        }
        other => Err(Trouble::lost(other)),
    }
}

/// A shared access signature, as Microsoft describes it.
fn token(audience: &str, name: &str, key: &str) -> String {
    #[expect(clippy::disallowed_methods, reason = "a token expires by the wall clock")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs();
    let encode = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let (resource, expiry) = (encode(audience), now + TOKEN_SECONDS);
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("any key will do");
    mac.update(format!("{resource}\n{expiry}").as_bytes());
    let signature = encode(&STANDARD.encode(mac.finalize().into_bytes()));
    format!("SharedAccessSignature sr={resource}&sig={signature}&se={expiry}&skn={name}")
}
