//! The settings of `kind = "servicebus"` in a `[[sink]]` table.
//!
//! What lives here: the keys, their defaults and bounds. What does not: the parts of a connection
//! string (`connection_string.rs`); `env:` and `file:` texts are replaced before they come here.
//! Invariant: the connection string becomes a `Secret` while it is read.

use std::path::PathBuf;
use std::time::Duration;

use postrider_core::{Error, Result, Secret};
use postrider_encoding::Encoding;
use serde::{Deserialize, Deserializer};

/// Longest time that may be waited for one answer; the relay's byte budget waits for it meanwhile.
const MAX_TIMEOUT_MS: u64 = 600_000;
/// Most transfers at a time: above what namespaces give credit for.
const MAX_IN_FLIGHT: usize = 2_048;
/// Longest life of a token of ours: a day, so that a stolen one is soon worth nothing.
const MAX_TOKEN_TTL_MS: u64 = 86_400_000;
/// The longest window that a namespace offers: seven days.
const MAX_DEDUP_WINDOW_MS: u64 = 7 * 86_400_000;
/// Longest name of an entity: 260 characters, and a subscription's path is no target.
const MAX_ENTITY_BYTES: usize = 260;

/// What is said of a setting that is missing for Entra ID.
const ENTRA_NEEDS: &str = "auth = \"entra\" needs a credential (managed-identity, \
    workload-identity, client-secret or azure-cli), and client-secret a tenant_id, a client_id and \
    a client_secret";

/// What becomes of an event whose key is longer than a session id may be (128 characters).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LongKeys {
    /// It is parked, with the reason.
    #[default]
    Refuse,
    /// Its session id is `sha256:` and the key's hash; the key travels as a property.
    Hash,
}

/// What a namespace believes the sink by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Auth {
    /// The key or the signature in the connection string.
    #[default]
    ConnectionString,
    /// Tokens of Microsoft Entra ID. Needs the feature `entra`.
    Entra,
}

/// As whom to sign in at Microsoft Entra ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EntraCredential {
    /// The identity of the virtual machine or of the App Service that this runs on.
    ManagedIdentity,
    /// The identity of a pod in Kubernetes.
    WorkloadIdentity,
    /// An application and its secret.
    ClientSecret,
    /// Whoever is signed in at the Azure CLI of this machine.
    AzureCli,
}

/// Settings of a [`ServiceBus`](crate::ServiceBus) sink.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceBusConfig {
    /// As the portal shows it: `Endpoint=sb://…;SharedAccessKeyName=…;SharedAccessKey=…`. With
    /// tokens from elsewhere the endpoint alone, or nothing beside a `namespace`.
    #[serde(default = "no_secret", deserialize_with = "secret")]
    pub connection_string: Secret,
    /// By what the namespace believes the sink.
    #[serde(default)]
    pub auth: Auth,
    /// The namespace's host, such as `shop.servicebus.windows.net`, for `auth = "entra"`.
    pub namespace: Option<String>,
    /// As whom to sign in, for `auth = "entra"`.
    pub credential: Option<EntraCredential>,
    /// The directory's id, for `auth = "entra"`.
    pub tenant_id: Option<String>,
    /// The application's or the identity's id, for `auth = "entra"`.
    pub client_id: Option<String>,
    /// The application's secret, for `credential = "client-secret"`.
    #[serde(default, deserialize_with = "optional_secret")]
    pub client_secret: Option<Secret>,
    /// Where to sign in; without it `AZURE_AUTHORITY_HOST` of the environment, or else the public
    /// cloud's.
    pub authority: Option<String>,
    /// The queue or topic; may be left out where the connection string has an `EntityPath`.
    pub entity: Option<String>,
    /// `plain`, `cloudevents-binary` or `cloudevents-structured`.
    #[serde(default)]
    pub encoding: Encoding,
    /// `source` of CloudEvents; `/postrider` without it.
    pub source: Option<String>,
    /// What becomes of keys longer than 128 characters.
    #[serde(default)]
    pub long_keys: LongKeys,
    /// The entity's duplicate detection window, in milliseconds, if it has one. Nothing is
    /// configured by it at the entity: it is what others are told.
    pub dedup_window_ms: Option<u64>,
    /// Transfers at a time, over all keys.
    #[serde(default = "default_in_flight")]
    pub in_flight: usize,
    /// Time until a transfer has been settled, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
    /// Time for connecting, from the first packet to the open link, in milliseconds.
    #[serde(default = "default_connect_timeout_ms")]
    pub connect_timeout_ms: u64,
    /// How long a token made of the key is valid, in milliseconds. It is renewed before.
    #[serde(default = "default_token_ttl_ms")]
    pub token_ttl_ms: u64,
    /// PEM file with further certificate authorities to trust.
    pub ca_file: Option<PathBuf>,
}

impl ServiceBusConfig {
    /// The defaults for a connection string that names its entity.
    pub fn new(connection_string: Secret) -> Self {
        Self {
            connection_string,
            auth: Auth::ConnectionString,
            namespace: None,
            credential: None,
            tenant_id: None,
            client_id: None,
            client_secret: None,
            authority: None,
            entity: None,
            encoding: Encoding::Plain,
            source: None,
            long_keys: LongKeys::Refuse,
            dedup_window_ms: None,
            in_flight: default_in_flight(),
            timeout_ms: default_timeout_ms(),
            connect_timeout_ms: default_connect_timeout_ms(),
            token_ttl_ms: default_token_ttl_ms(),
            ca_file: None,
        }
    }

    /// Refuses impossible values, naming the key and the remedy.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent).
    pub fn check(&self) -> Result<()> {
        let within = |key: &str, value: u64, most: u64| match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(Error::permanent(format!("{key} is {value}; give 1 to {most}"))),
        };
        within("timeout_ms", self.timeout_ms, MAX_TIMEOUT_MS)?;
        within("connect_timeout_ms", self.connect_timeout_ms, MAX_TIMEOUT_MS)?;
        within("in_flight", self.in_flight as u64, MAX_IN_FLIGHT as u64)?;
        if !(1_000..=MAX_TOKEN_TTL_MS).contains(&self.token_ttl_ms) {
            return Err(Error::permanent(format!(
                "token_ttl is {} ms; give a second to a day",
                self.token_ttl_ms
            )));
        }
        if let Some(window) = self.dedup_window_ms {
            within("dedup_window", window, MAX_DEDUP_WINDOW_MS)?;
        }
        match self.auth {
            Auth::ConnectionString => self.check_without_entra(),
            Auth::Entra => self.check_entra(),
        }
    }

    fn check_without_entra(&self) -> Result<()> {
        for (key, given) in [
            ("namespace", self.namespace.is_some()),
            ("credential", self.credential.is_some()),
            ("tenant_id", self.tenant_id.is_some()),
            ("client_id", self.client_id.is_some()),
            ("client_secret", self.client_secret.is_some()),
            ("authority", self.authority.is_some()),
        ] {
            if given {
                return Err(Error::permanent(format!(
                    "{key} means nothing without auth = \"entra\""
                )));
            }
        }
        match self.connection_string.expose().is_empty() {
            true => Err(Error::permanent(
                "connection_string: is missing; give it, or a namespace and auth = \"entra\"",
            )),
            false => Ok(()),
        }
    }

    fn check_entra(&self) -> Result<()> {
        let needs = |key: &str, given: bool| match given {
            true => Ok(()),
            false => Err(Error::permanent(format!("{key}: is missing; {ENTRA_NEEDS}"))),
        };
        if self.namespace.is_some() != self.connection_string.expose().is_empty() {
            return Err(Error::permanent(
                "namespace: give it for auth = \"entra\", or a connection_string of the Endpoint \
                 alone",
            ));
        }
        needs("credential", self.credential.is_some())?;
        if self.credential == Some(EntraCredential::ClientSecret) {
            needs("tenant_id", self.tenant_id.is_some())?;
            needs("client_id", self.client_id.is_some())?;
            return needs("client_secret", self.client_secret.is_some());
        }
        match self.client_secret {
            Some(_) => Err(Error::permanent(
                "client_secret means nothing without credential = \"client-secret\"",
            )),
            None => Ok(()),
        }
    }

    /// The connection string, or what stands for it.
    pub(crate) fn address(&self) -> Secret {
        match &self.namespace {
            Some(host) => Secret::new(format!("Endpoint=sb://{host}")),
            None => self.connection_string.clone(),
        }
    }

    /// The entity to send to, of the setting and the connection string's `EntityPath`.
    pub(crate) fn entity(&self, path: Option<&str>) -> Result<String> {
        let entity = match (self.entity.as_deref(), path) {
            (Some(entity), Some(path)) if !entity.eq_ignore_ascii_case(path) => {
                return Err(Error::permanent(
                    "entity contradicts the EntityPath of connection_string; remove one of them",
                ));
            }
            (Some(entity), _) | (None, Some(entity)) => entity.trim_matches('/'),
            (None, None) => {
                return Err(Error::permanent(
                    "entity is missing: name the queue or topic, which the connection_string does \
                     not (it has no EntityPath)",
                ));
            }
        };
        let legal = |c: char| !c.is_control() && !c.is_whitespace() && !"?#@*\\".contains(c);
        if entity.is_empty() || entity.len() > MAX_ENTITY_BYTES || !entity.chars().all(legal) {
            return Err(Error::permanent(format!(
                "entity is no name of a queue or topic: 1 to {MAX_ENTITY_BYTES} characters without \
                 spaces"
            )));
        }
        Ok(entity.to_owned())
    }

    pub(crate) fn dedup_window(&self) -> Option<Duration> {
        self.dedup_window_ms.map(Duration::from_millis)
    }
}

/// Enough to hide the latency of a distant namespace, and well within the credit that it gives.
fn default_in_flight() -> usize {
    256
}

/// Half of the relay's own time-out for a call, so that a slow batch fails alone.
fn default_timeout_ms() -> u64 {
    15_000
}

fn default_connect_timeout_ms() -> u64 {
    10_000
}

/// As long as the official clients' tokens.
fn default_token_ttl_ms() -> u64 {
    20 * 60 * 1_000
}

fn no_secret() -> Secret {
    Secret::new("")
}

fn optional_secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Secret>, D::Error> {
    secret(deserializer).map(Some)
}

fn secret<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
    String::deserialize(deserializer).map(Secret::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "connection_string = 'Endpoint=sb://h;SharedAccessKey=hunter2'\n";

    fn read(more: &str) -> Result<ServiceBusConfig, String> {
        toml::from_str(&format!("{MINIMAL}{more}")).map_err(|error| error.to_string())
    }

    #[test]
    fn no_secret_shows_in_debug() {
        let text = format!("{:?}", read("entity = 'orders'").expect("valid"));
        assert!(!text.contains("hunter2") && text.contains("orders"), "{text}");
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        assert!(read("enttiy = 'q'").is_err());
        assert!(read("encoding = 'cloudevents'").expect_err("unknown").contains("plain"));
        assert!(read("long_keys = 'cut'").expect_err("unknown").contains("refuse"));
        for (more, key) in [
            ("timeout_ms = 0", "timeout_ms"),
            ("connect_timeout_ms = 999999999", "connect_timeout_ms"),
            ("in_flight = 0", "in_flight"),
            ("token_ttl_ms = 999", "token_ttl"),
            ("dedup_window_ms = 604800001", "dedup_window"),
        ] {
            let error = read(more).expect("well-formed").check().expect_err(more).to_string();
            assert!(error.contains(key), "{more}: {error}");
        }
        assert!(read("long_keys = 'hash'").expect("well-formed").check().is_ok());
    }

    #[test]
    fn entra_needs_a_credential_and_no_key() {
        let given = |text: &str| {
            let config: ServiceBusConfig = toml::from_str(text).expect("well-formed");
            assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
            config.check().map_err(|error| error.to_string())
        };
        let namespace = "auth = 'entra'\nnamespace = 'shop.servicebus.windows.net'\n";
        let secret = "credential = 'client-secret'\nclient_secret = 'hunter2'\n";
        for (text, missing) in [
            (namespace.to_owned(), "credential: is missing"),
            ("auth = 'entra'\ncredential = 'azure-cli'".into(), "namespace: give it"),
            (format!("{namespace}{MINIMAL}"), "namespace: give it"),
            (format!("{namespace}{secret}client_id = 'a'"), "tenant_id: is missing"),
            (format!("{namespace}{secret}tenant_id = 'a'"), "client_id: is missing"),
            (
                format!("{namespace}credential = 'azure-cli'\nclient_secret = 'hunter2'"),
                "client_secret means nothing",
            ),
            (format!("{MINIMAL}tenant_id = 'a'"), "tenant_id means nothing"),
            ("entity = 'q'".into(), "connection_string: is missing"),
        ] {
            let error = given(&text).expect_err(missing);
            assert!(error.contains(missing), "{text}: {error}");
        }
        let whole = format!("{namespace}{secret}tenant_id = 'a'\nclient_id = 'b'");
        assert_eq!(given(&whole), Ok(()));
        for name in ["managed-identity", "workload-identity", "azure-cli"] {
            assert_eq!(given(&format!("{namespace}credential = '{name}'")), Ok(()), "{name}");
        }
        let config: ServiceBusConfig = toml::from_str(&whole).expect("well-formed");
        assert_eq!(config.address().expose(), "Endpoint=sb://shop.servicebus.windows.net");
    }

    #[test]
    fn the_entity_is_named_once() {
        let named = read("entity = '/orders/'").expect("valid");
        assert_eq!(named.entity(None).expect("named"), "orders");
        let unnamed = read("").expect("valid");
        assert_eq!(unnamed.entity(Some("events")).expect("in the path"), "events");
        for (config, path, expected) in [
            (&unnamed, None, "entity is missing"),
            (&named, Some("events"), "contradicts"),
            (&read("entity = 'a b'").expect("valid"), None, "no name"),
            (&read("entity = '/'").expect("valid"), None, "no name"),
        ] {
            let error = config.entity(path).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
