//! Tokens of Microsoft Entra ID, by Microsoft's own library.
//!
//! What lives here: as whom to sign in, and over which HTTP client. What does not: handing tokens
//! to the namespace (`connect.rs`), and what a failure means (`error.rs`).
//! Invariant: a token, a secret and an answer's body are in no error: only the service's own
//! sentence is.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use azure_core::cloud::{CloudConfiguration, CustomConfiguration};
use azure_core::credentials::{Secret as AzureSecret, TokenCredential};
use azure_core::http::{ClientOptions, RetryOptions, StatusCode, Transport};
use azure_identity::{
    AzureCliCredential, AzureCliCredentialOptions, ClientAssertionCredentialOptions,
    ClientSecretCredential, ClientSecretCredentialOptions, ManagedIdentityCredential,
    ManagedIdentityCredentialOptions, UserAssignedId, WorkloadIdentityCredential,
    WorkloadIdentityCredentialOptions,
};
use postrider_core::{Error, ErrorKind, Result, Secret, Timestamp};

use crate::config::{EntraCredential, ServiceBusConfig};
use crate::error::clean;
use crate::tls;
use crate::token::{JWT, Token, TokenSource};

/// What a token for Service Bus is for, in every cloud.
const SCOPE: &str = "https://servicebus.azure.net/.default";
/// What is waited when the service asks to wait and its words are not passed on by the library.
const BUSY_WAIT: Duration = Duration::from_secs(10);

/// Signs in as one credential. The library keeps a token until five minutes before its end.
struct Entra {
    credential: Arc<dyn TokenCredential>,
}

/// The source of tokens that the settings ask for.
///
/// # Errors
/// [`ErrorKind::Permanent`] for settings, or variables of the environment, that can't be.
pub(crate) fn tokens(config: &ServiceBusConfig) -> Result<Arc<dyn TokenSource>> {
    let options = options(config)?;
    let made = match config.credential {
        Some(EntraCredential::ManagedIdentity) => managed_identity(config, options),
        Some(EntraCredential::WorkloadIdentity) => workload_identity(config, options),
        Some(EntraCredential::ClientSecret) => client_secret(config, options),
        Some(EntraCredential::AzureCli) => azure_cli(config),
        None => return Err(Error::permanent("credential: is missing")),
    };
    let credential = made
        .map_err(|error| Error::permanent(format!("credential: {}", clean(&error.to_string()))))?;
    Ok(Arc::new(Entra { credential }))
}

type Made = azure_core::Result<Arc<dyn TokenCredential>>;

fn managed_identity(config: &ServiceBusConfig, client_options: ClientOptions) -> Made {
    let user_assigned_id = config.client_id.clone().map(UserAssignedId::ClientId);
    let options = ManagedIdentityCredentialOptions { user_assigned_id, client_options };
    Ok(ManagedIdentityCredential::new(Some(options))?)
}

fn workload_identity(config: &ServiceBusConfig, client_options: ClientOptions) -> Made {
    let options = WorkloadIdentityCredentialOptions {
        credential_options: ClientAssertionCredentialOptions { client_options },
        client_id: config.client_id.clone(),
        tenant_id: config.tenant_id.clone(),
        ..WorkloadIdentityCredentialOptions::default()
    };
    Ok(WorkloadIdentityCredential::new(Some(options))?)
}

fn client_secret(config: &ServiceBusConfig, client_options: ClientOptions) -> Made {
    let text = |given: &Option<String>| given.clone().unwrap_or_default();
    let secret = config.client_secret.as_ref().map_or("", Secret::expose).to_owned();
    let options = ClientSecretCredentialOptions { client_options };
    let (tenant, client) = (text(&config.tenant_id), text(&config.client_id));
    Ok(ClientSecretCredential::new(&tenant, client, AzureSecret::new(secret), Some(options))?)
}

fn azure_cli(config: &ServiceBusConfig) -> Made {
    let tenant_id = config.tenant_id.clone();
    let options = AzureCliCredentialOptions { tenant_id, ..AzureCliCredentialOptions::default() };
    Ok(AzureCliCredential::new(Some(options))?)
}

/// An HTTP client that trusts whom the sink trusts, and is led nowhere else.
fn options(config: &ServiceBusConfig) -> Result<ClientOptions> {
    let client = reqwest::Client::builder()
        .tls_backend_preconfigured(tls::client_config(config.ca_file.as_deref())?)
        .timeout(Duration::from_millis(config.connect_timeout_ms))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .build()
        .map_err(|error| Error::permanent("no HTTP client for Entra ID").with_source(error))?;
    let cloud = config.authority.as_ref().map(|authority| {
        let mut cloud = CustomConfiguration::default();
        cloud.authority_host.clone_from(authority);
        Arc::new(CloudConfiguration::Custom(cloud))
    });
    Ok(ClientOptions {
        // The relay tries again by itself, and the library would for longer than a link may take.
        retry: RetryOptions::none(),
        transport: Some(Transport::new(Arc::new(client))),
        cloud,
        ..ClientOptions::default()
    })
}

#[async_trait]
impl TokenSource for Entra {
    async fn token(&self, _audience: &str, _now: Timestamp) -> Result<Token> {
        let token =
            self.credential.get_token(&[SCOPE], None).await.map_err(|error| refused(&error))?;
        let expires_at = u64::try_from(token.expires_on.unix_timestamp()).unwrap_or_default();
        Ok(Token {
            text: Secret::new(token.token.secret()),
            kind: JWT,
            expires_at: Some(Timestamp::from_millis(expires_at.saturating_mul(1_000))),
        })
    }
}

/// The library's errors hold whole answers: their own sentence is taken, and nothing below.
fn refused(error: &azure_core::Error) -> Error {
    let busy =
        matches!(status(error), Some(StatusCode::TooManyRequests | StatusCode::ServiceUnavailable));
    let kind = match busy {
        true => ErrorKind::Throttled { retry_after: Some(BUSY_WAIT) },
        false => ErrorKind::Transient,
    };
    Error::new(kind, format!("Entra ID: {}", clean(&error.to_string())))
}

/// The status of the answer that is to blame, which a credential wraps.
fn status(error: &azure_core::Error) -> Option<StatusCode> {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = next {
        let here = error.downcast_ref::<azure_core::Error>();
        if let Some(status) = here.and_then(azure_core::Error::http_status) {
            return Some(status);
        }
        next = error.source();
    }
    None
}
