//! Signing in at Microsoft Entra ID, by Microsoft's own library.
//!
//! What lives here: as whom. What does not: asking for tokens, which the SDK does.
//! Invariant: nothing is asked of anybody before the first token is needed.

use std::sync::Arc;

use azure_core::credentials::{Secret as AzureSecret, TokenCredential};
use azure_identity::{
    AzureCliCredential, AzureCliCredentialOptions, ClientSecretCredential,
    ManagedIdentityCredential, ManagedIdentityCredentialOptions, UserAssignedId,
    WorkloadIdentityCredential, WorkloadIdentityCredentialOptions,
};
use postrider_core::{Error, Result, Secret};

use crate::config::{CosmosConfig, EntraCredential};

type Made = azure_core::Result<Arc<dyn TokenCredential>>;

/// The credential that the settings ask for.
///
/// # Errors
/// `Permanent` for settings, or variables of the environment, that can't be.
pub(crate) fn credential(config: &CosmosConfig) -> Result<Arc<dyn TokenCredential>> {
    let made = match config.credential {
        Some(EntraCredential::ManagedIdentity) => managed_identity(config),
        Some(EntraCredential::WorkloadIdentity) => workload_identity(config),
        Some(EntraCredential::ClientSecret) => client_secret(config),
        Some(EntraCredential::AzureCli) => azure_cli(config),
        None => return Err(Error::permanent("credential: is missing")),
    };
    // The library's errors may hold whole answers: their own sentence is taken alone.
    made.map_err(|error| Error::permanent(format!("credential: {error}")))
}

fn managed_identity(config: &CosmosConfig) -> Made {
    let user_assigned_id = config.client_id.clone().map(UserAssignedId::ClientId);
    let options = ManagedIdentityCredentialOptions {
        user_assigned_id,
        ..ManagedIdentityCredentialOptions::default()
    };
    Ok(ManagedIdentityCredential::new(Some(options))?)
}

fn workload_identity(config: &CosmosConfig) -> Made {
    let options = WorkloadIdentityCredentialOptions {
        client_id: config.client_id.clone(),
        tenant_id: config.tenant_id.clone(),
        ..WorkloadIdentityCredentialOptions::default()
    };
    Ok(WorkloadIdentityCredential::new(Some(options))?)
}

fn client_secret(config: &CosmosConfig) -> Made {
    let text = |given: &Option<String>| given.clone().unwrap_or_default();
    let secret = config.client_secret.as_ref().map_or("", Secret::expose).to_owned();
    let (tenant, client) = (text(&config.tenant_id), text(&config.client_id));
    Ok(ClientSecretCredential::new(&tenant, client, AzureSecret::new(secret), None)?)
}

fn azure_cli(config: &CosmosConfig) -> Made {
    let tenant_id = config.tenant_id.clone();
    let options = AzureCliCredentialOptions { tenant_id, ..AzureCliCredentialOptions::default() };
    Ok(AzureCliCredential::new(Some(options))?)
}
