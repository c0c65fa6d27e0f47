//! Who is let through to the broker: TLS and SASL as a broker speaks them.
//!
//! What lives here: the handshakes of PLAIN and SCRAM (RFC 5802), certificates. What does not: what
//! passes afterwards (`middle.rs`).
//! Invariant: nothing of a stranger reaches the broker.

use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest, Sha256, Sha512};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

const SASL_HANDSHAKE: i16 = 17;
const API_VERSIONS: i16 = 18;
const SASL_AUTHENTICATE: i16 = 36;
const SASL_AUTHENTICATION_FAILED: i16 = 58;
const SALT: &[u8] = b"of the sea";
const ROUNDS: u32 = 4_096;

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Whom he lets through; by default everybody.
#[derive(Clone, Default)]
pub(crate) struct Guard {
    pub(crate) tls: Option<TlsAcceptor>,
    /// Mechanism, user and password.
    pub(crate) user: Option<(&'static str, &'static str, &'static str)>,
}

impl Guard {
    /// Speaks TLS by the certificates of a folder; `mutual` asks for one of theirs.
    pub(crate) fn with_tls(folder: &Path, mutual: bool) -> TlsAcceptor {
        // Another test of this process may have done so.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let authority = CertificateDer::from_pem_file(folder.join("authority.crt"));
        let mut roots = RootCertStore::empty();
        roots.add(authority.expect("an authority")).expect("a certificate");
        let config = match mutual {
            true => {
                let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build();
                ServerConfig::builder().with_client_cert_verifier(verifier.expect("a verifier"))
            }
            false => ServerConfig::builder().with_no_client_auth(),
        };
        let chain = CertificateDer::from_pem_file(folder.join("server.crt")).expect("its own");
        let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).expect("its key");
        let config = config.with_single_cert(vec![chain], key).expect("they belong together");
        TlsAcceptor::from(Arc::new(config))
    }

    pub(crate) async fn admit(&self, client: TcpStream) -> Option<Box<dyn Stream>> {
        match &self.tls {
            Some(tls) => Some(Box::new(tls.accept(client).await.ok()?)),
            None => Some(Box::new(client)),
        }
    }

    /// The state of one connection's login.
    pub(crate) fn login(&self) -> Login {
        Login { user: self.user, first: None, is_known: self.user.is_none() }
    }
}

pub(crate) struct Login {
    user: Option<(&'static str, &'static str, &'static str)>,
    /// Both first messages of SCRAM.
    first: Option<(String, String)>,
    is_known: bool,
}

/// What a request is to him.
pub(crate) enum Heard {
    Answer(Vec<u8>),
    /// Somebody who has not proven who they are.
    Stranger,
    /// Nothing of his.
    Other,
}

impl Login {
    pub(crate) fn hear(&mut self, request: &[u8]) -> Heard {
        let Some((mechanism, user, password)) = self.user else { return Heard::Other };
        let key = i16::from_be_bytes([request[0], request[1]]);
        let version = i16::from_be_bytes([request[2], request[3]]);
        let name = usize::from(u16::from_be_bytes([request[8], request[9]]));
        let body = &request[10 + name..];
        let mut answer = request[4..8].to_vec();
        match key {
            SASL_HANDSHAKE => {
                let asked = &body[2..];
                let code: i16 = if asked == mechanism.as_bytes() { 0 } else { 33 };
                answer.extend(code.to_be_bytes());
                answer.extend(1_i32.to_be_bytes());
                answer.extend(u16::try_from(mechanism.len()).expect("short").to_be_bytes());
                answer.extend(mechanism.as_bytes());
                Heard::Answer(answer)
            }
            SASL_AUTHENTICATE => {
                assert!(version < 2, "the client's library speaks the long form");
                let said = self.answer(&String::from_utf8_lossy(&body[4..]), user, password);
                let (code, said) = match said {
                    Some(said) => (0, said),
                    None => (SASL_AUTHENTICATION_FAILED, String::new()),
                };
                answer.extend(code.to_be_bytes());
                // No text.
                answer.extend((-1_i16).to_be_bytes());
                answer.extend(u32::try_from(said.len()).expect("short").to_be_bytes());
                answer.extend(said.as_bytes());
                if version == 1 {
                    answer.extend(0_i64.to_be_bytes());
                }
                Heard::Answer(answer)
            }
            API_VERSIONS => Heard::Other,
            _ if self.is_known => Heard::Other,
            _ => Heard::Stranger,
        }
    }

    /// What he says to somebody who proves who they are; nothing to whom he does not believe.
    fn answer(&mut self, said: &str, user: &str, password: &str) -> Option<String> {
        let (mechanism, ..) = self.user?;
        if mechanism == "PLAIN" {
            self.is_known = said == format!("\0{user}\0{password}");
            return self.is_known.then(String::new);
        }
        let Some((client_first, server_first)) = self.first.take() else {
            let bare = said.strip_prefix("n,,")?;
            let nonce = bare.strip_prefix(&format!("n={user},r="))?;
            let salt = BASE64.encode(SALT);
            let server_first = format!("r={nonce}postrider,s={salt},i={ROUNDS}");
            self.first = Some((bare.to_owned(), server_first.clone()));
            return Some(server_first);
        };
        let (bare, proof) = said.rsplit_once(",p=")?;
        let whole = format!("{client_first},{server_first},{bare}");
        let (expected, signature) = scram(mechanism, password, whole.as_bytes());
        self.is_known = BASE64.decode(proof).is_ok_and(|proof| proof == expected);
        self.is_known.then(|| format!("v={}", BASE64.encode(signature)))
    }
}

/// The client's proof and the server's signature.
fn scram(mechanism: &str, password: &str, messages: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let sign = |key: &[u8], text: &[u8]| match mechanism {
        "SCRAM-SHA-512" => {
            let mac = Hmac::<Sha512>::new_from_slice(key).expect("any length");
            mac.chain_update(text).finalize().into_bytes().to_vec()
        }
        _ => {
            let mac = Hmac::<Sha256>::new_from_slice(key).expect("any length");
            mac.chain_update(text).finalize().into_bytes().to_vec()
        }
    };
    let hash = |text: &[u8]| match mechanism {
        "SCRAM-SHA-512" => Sha512::digest(text).to_vec(),
        _ => Sha256::digest(text).to_vec(),
    };
    let xor = |a: &[u8], b: &[u8]| a.iter().zip(b).map(|(a, b)| a ^ b).collect::<Vec<u8>>();
    let mut round = sign(password.as_bytes(), &[SALT, &1_u32.to_be_bytes()].concat());
    let mut salted = round.clone();
    for _ in 1..ROUNDS {
        round = sign(password.as_bytes(), &round);
        salted = xor(&salted, &round);
    }
    let client_key = sign(&salted, b"Client Key");
    let proof = xor(&client_key, &sign(&hash(&client_key), messages));
    (proof, sign(&sign(&salted, b"Server Key"), messages))
}
