//! TLS by rustls: what is asked of the server's certificate.
//!
//! What lives here: the modes of `sslmode`, and the settings of a connection for each. What does
//! not: which mode a host gets by default (`address.rs`), and error texts (`error.rs`).
//! Invariant: no mode falls back to plain text, and only `require`, which must be asked for by
//! name, takes a certificate unseen.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use postrider_core::{Error, Result};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};

/// How a server's certificate is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TlsMode {
    /// Plain text.
    Disable,
    /// Encrypted; whoever answers is believed.
    Require,
    /// From a known authority, for any name.
    VerifyCa,
    /// From a known authority, for this host.
    VerifyFull,
}

impl TlsMode {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        match text {
            "disable" => Ok(Self::Disable),
            "require" => Ok(Self::Require),
            "verify-ca" => Ok(Self::VerifyCa),
            "verify-full" => Ok(Self::VerifyFull),
            "prefer" | "allow" => Err(Error::permanent(
                "url: sslmode prefer and allow would fall back to plain text unnoticed; write \
                 verify-full, verify-ca, require or disable",
            )),
            _ => Err(Error::permanent(
                "url: sslmode: give verify-full, verify-ca, require or disable",
            )),
        }
    }
}

/// The files that TLS needs, in PEM.
#[derive(Debug, Clone, Default)]
pub(crate) struct TlsFiles {
    /// Certificates of authorities; the system's own without it.
    pub(crate) authority: Option<PathBuf>,
    /// The client's certificate, with those in between.
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
}

/// The name of PostgreSQL's protocol. A server that is greeted by TLS at once
/// (`sslnegotiation=direct`) demands it; others take no notice.
const PROTOCOL: &[u8] = b"postgresql";

/// The settings of connections of this mode. Reads the files.
pub(crate) fn settings(mode: TlsMode, files: &TlsFiles) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::permanent("TLS: no protocol version").with_source(error))?;
    let builder = match mode {
        TlsMode::Disable => builder.with_root_certificates(RootCertStore::empty()),
        TlsMode::VerifyFull => builder.with_root_certificates(roots(files)?),
        TlsMode::Require => {
            let any = AnyCertificate { provider };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(any))
        }
        TlsMode::VerifyCa => {
            let chain = WebPkiServerVerifier::builder_with_provider(roots(files)?.into(), provider)
                .build()
                .map_err(|error| {
                    Error::permanent("TLS: no use of these authorities").with_source(error)
                })?;
            let any = AnyName { chain };
            builder.dangerous().with_custom_certificate_verifier(Arc::new(any))
        }
    };
    let mut config = match (&files.certificate, &files.key) {
        (Some(certificate), Some(key)) if mode != TlsMode::Disable => {
            let chain = certificates("sslcert", certificate)?;
            let key_der = PrivateKeyDer::from_pem_file(key).map_err(|error| {
                let place = format!("sslkey: {}: no private key to be read", key.display());
                Error::permanent(place).with_source(error)
            })?;
            builder.with_client_auth_cert(chain, key_der).map_err(|error| {
                Error::permanent("sslcert and sslkey do not fit together").with_source(error)
            })?
        }
        (Some(_) | None, Some(_) | None) => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok(config)
}

fn roots(files: &TlsFiles) -> Result<RootCertStore> {
    let mut store = RootCertStore::empty();
    let Some(file) = &files.authority else {
        let system = rustls_native_certs::load_native_certs();
        let (usable, _) = store.add_parsable_certificates(system.certs);
        return match usable {
            0 => Err(Error::permanent(
                "TLS: this system has no certificates of authorities (the package \
                 ca-certificates); install it, or name a file by ca_file",
            )),
            _ => Ok(store),
        };
    };
    for certificate in certificates("ca_file", file)? {
        store.add(certificate).map_err(|error| {
            let place = format!("ca_file: {}: no certificate of an authority", file.display());
            Error::permanent(place).with_source(error)
        })?;
    }
    Ok(store)
}

fn certificates(what: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let unreadable = |error| {
        let place = format!("{what}: {}: no certificates to be read", file.display());
        Error::permanent(place).with_source(error)
    };
    let found: Vec<_> =
        CertificateDer::pem_file_iter(file).and_then(Iterator::collect).map_err(unreadable)?;
    match found.is_empty() {
        true => Err(unreadable(rustls::pki_types::pem::Error::NoItemsFound)),
        false => Ok(found),
    }
}

/// `verify-ca`: the chain is checked, and the name is not.
#[derive(Debug)]
struct AnyName {
    chain: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = &self.chain;
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is looked at last, when all else was found good.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chain.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

/// `require`: any certificate, as long as the server has its key.
#[derive(Debug)]
struct AnyCertificate {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
