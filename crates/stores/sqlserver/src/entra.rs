//! Signing in at Microsoft Entra ID, by Microsoft's own library.
//!
//! What lives here: as whom, and asking for tokens. What does not: when a token is needed: at each
//! new connection.
//! Invariant: nothing is asked of anybody before the first token is needed; no error holds an
//! answer of the directory.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use azure_core::credentials::{Secret as AzureSecret, TokenCredential};
use azure_identity::{
    AzureCliCredential, AzureCliCredentialOptions, ClientSecretCredential,
    ManagedIdentityCredential, ManagedIdentityCredentialOptions, UserAssignedId,
    WorkloadIdentityCredential, WorkloadIdentityCredentialOptions,
};
use postrider_core::{Error, Result, Secret};

use crate::config::AccessTokens;

/// Azure SQL's own name at the directory.
const SCOPE: &str = "https://database.windows.net/.default";

/// As whom to sign in at Microsoft Entra ID.
#[derive(Debug, Clone)]
pub enum EntraCredential {
    /// The identity of the virtual machine or of the App Service that this runs on; a user-assigned
    /// one by its client id.
    ManagedIdentity {
        /// The identity's client id, unless it is the machine's own.
        client_id: Option<String>,
    },
    /// The identity of a pod in Kubernetes.
    WorkloadIdentity {
        /// The application's id, unless the environment names it.
        client_id: Option<String>,
    },
    /// An application and its secret.
    ClientSecret {
        /// The directory's id.
        tenant_id: String,
        /// The application's id.
        client_id: String,
        /// Its secret.
        client_secret: Secret,
    },
    /// Whoever is signed in at the Azure CLI of this machine.
    AzureCli {
        /// The directory's id, unless it is the CLI's own.
        tenant_id: Option<String>,
    },
}

struct Tokens(Arc<dyn TokenCredential>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tokens")
    }
}

#[async_trait]
impl AccessTokens for Tokens {
    async fn token(&self) -> Result<Secret> {
        // The library keeps a token until shortly before it expires.
        let token = self.0.get_token(&[SCOPE], None).await.map_err(|error| {
            let remedy = match error.kind() {
                azure_core::error::ErrorKind::Io | azure_core::error::ErrorKind::Connection => {
                    return Error::transient("get a token of Entra ID: it could not be reached");
                }
                _ => "get a token of Entra ID: it was refused; check credential, tenant and client",
            };
            Error::permanent(remedy)
        })?;
        Ok(Secret::new(token.token.secret()))
    }
}

/// The tokens of that identity.
///
/// # Errors
/// `Permanent` for settings, or variables of the environment, that can't be.
pub fn entra_tokens(credential: &EntraCredential) -> Result<Arc<dyn AccessTokens>> {
    // The library's errors may hold whole answers: their own sentence is taken alone.
    let made = make(credential).map_err(|error| Error::permanent(format!("credential: {error}")));
    Ok(Arc::new(Tokens(made?)))
}

fn make(credential: &EntraCredential) -> azure_core::Result<Arc<dyn TokenCredential>> {
    Ok(match credential {
        EntraCredential::ManagedIdentity { client_id } => {
            let user_assigned_id = client_id.clone().map(UserAssignedId::ClientId);
            let options = ManagedIdentityCredentialOptions {
                user_assigned_id,
                ..ManagedIdentityCredentialOptions::default()
            };
            ManagedIdentityCredential::new(Some(options))?
        }
        EntraCredential::WorkloadIdentity { client_id } => {
            let options = WorkloadIdentityCredentialOptions {
                client_id: client_id.clone(),
                ..WorkloadIdentityCredentialOptions::default()
            };
            WorkloadIdentityCredential::new(Some(options))?
        }
        EntraCredential::ClientSecret { tenant_id, client_id, client_secret } => {
            let secret = AzureSecret::new(client_secret.expose().to_owned());
            ClientSecretCredential::new(tenant_id, client_id.clone(), secret, None)?
        }
        EntraCredential::AzureCli { tenant_id } => {
            let options = AzureCliCredentialOptions {
                tenant_id: tenant_id.clone(),
                ..AzureCliCredentialOptions::default()
            };
            AzureCliCredential::new(Some(options))?
        }
    })
}
