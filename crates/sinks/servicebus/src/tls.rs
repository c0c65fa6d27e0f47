//! TLS by rustls: a namespace's certificate is always verified.
//!
//! What lives here: whom is trusted. What does not: the connection itself (`connect.rs`).
//! Invariant: there is no way to take a certificate unseen; only an emulator is spoken to without
//! TLS, and the connection string has to say that it is one.

use std::path::Path;
use std::sync::Arc;

use postrider_core::{Error, Result};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_rustls::TlsConnector;

/// What connects by TLS, trusting this system's authorities and those of a file.
///
/// # Errors
/// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) if there is none to trust.
pub(crate) fn connector(ca_file: Option<&Path>) -> Result<TlsConnector> {
    Ok(TlsConnector::from(Arc::new(client_config(ca_file)?)))
}

/// The same for whoever connects by other means.
pub(crate) fn client_config(ca_file: Option<&Path>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    let (mut usable, _) = roots.add_parsable_certificates(system.certs);
    if let Some(file) = ca_file {
        usable += add_file(&mut roots, file)?;
    }
    if usable == 0 {
        return Err(Error::permanent(
            "TLS: this system has no certificates of authorities (the package ca-certificates); \
             install it, or name a file by ca_file",
        ));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::permanent("TLS: no protocol version").with_source(error))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

fn add_file(roots: &mut RootCertStore, file: &Path) -> Result<usize> {
    let unreadable = |cause: Box<dyn std::error::Error + Send + Sync>| {
        Error::permanent("ca_file: give a readable PEM file").with_source(cause)
    };
    let found: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .map_err(|cause| unreadable(cause.into()))?;
    if found.is_empty() {
        return Err(Error::permanent("ca_file: there is no certificate in it"));
    }
    let count = found.len();
    for certificate in found {
        roots.add(certificate).map_err(|cause| unreadable(cause.into()))?;
    }
    Ok(count)
}
