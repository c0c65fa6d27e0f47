//! The settings of `kind = "cosmos"`.
//!
//! What lives here: the keys, their defaults and bounds. What does not: connecting (`connect.rs`);
//! `env:` and `file:` texts are replaced before they come here.
//! Invariant: a key becomes a `Secret` while it is read, and the account is reached without TLS on
//! this machine alone.

use std::time::Duration;

use postrider_core::{Error, Result, Secret, Topic};
use serde::{Deserialize, Deserializer};

/// The topic of events whose documents name none.
const DEFAULT_TOPIC: &str = "events";
/// Of the article: all components involved then have time to process what waits.
const DEFAULT_EVENT_TTL: Duration = Duration::from_secs(10 * 86_400);
/// The service counts seconds in 31 bits.
const MAX_EVENT_TTL: Duration = Duration::from_secs(i32::MAX as u64);
/// A place within a page names the events of it that were handed out, and a position holds no more.
const MAX_ITEMS: u32 = 50;
/// Longest name of a database or container.
const MAX_NAME_BYTES: usize = 255;

const ENTRA_NEEDS: &str = "auth = \"entra\" needs a credential (managed-identity, \
    workload-identity, client-secret or azure-cli), and client-secret a tenant_id, a client_id and \
    a client_secret";

/// What the account believes the store by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Auth {
    /// The account's key.
    #[default]
    Key,
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

/// Settings of a [`CosmosStore`](crate::CosmosStore).
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CosmosConfig {
    /// The account's address, such as `https://shop.documents.azure.com/`, or the portal's whole
    /// connection string, `AccountEndpoint=…;AccountKey=…;`.
    #[serde(default = "no_secret", deserialize_with = "secret")]
    pub url: Secret,
    /// The account's key, unless the connection string has it.
    #[serde(default, deserialize_with = "optional_secret")]
    pub key: Option<Secret>,
    /// By what the account believes the store.
    #[serde(default)]
    pub auth: Auth,
    /// As whom to sign in, for `auth = "entra"`.
    pub credential: Option<EntraCredential>,
    /// The directory's id, for `auth = "entra"`.
    pub tenant_id: Option<String>,
    /// The application's or the identity's id, for `auth = "entra"`.
    pub client_id: Option<String>,
    /// The application's secret, for `credential = "client-secret"`.
    #[serde(default, deserialize_with = "optional_secret")]
    pub client_secret: Option<Secret>,
    /// The database.
    pub database: String,
    /// The container with documents and events. Its partition key is `/partitionKey`.
    pub container: String,
    /// The container with leases, checkpoints and dead letters. Its partition key is
    /// `/partitionKey`, too.
    #[serde(default = "default_lease_container")]
    pub lease_container: String,
    /// Regions in the order in which they are tried, such as `West Europe`; without any the
    /// account's own order.
    #[serde(default)]
    pub preferred_regions: Vec<String>,
    /// How long an event's document lives, in milliseconds; whole seconds count. It has to outlast
    /// every outage of relay and sink.
    #[serde(default = "default_event_ttl_ms")]
    pub event_ttl_ms: u64,
    /// The topic of events whose documents name none.
    #[serde(default = "default_topic")]
    pub topic: String,
    /// Most documents in one page of the change feed.
    #[serde(default = "default_max_items")]
    pub max_items: u32,
}

/// Where the account is, and its key.
pub(crate) struct Account {
    pub(crate) endpoint: String,
    pub(crate) key: Option<Secret>,
}

impl CosmosConfig {
    /// The defaults for an address or connection string, a database and a container.
    pub fn new(
        url: impl Into<String>,
        database: impl Into<String>,
        container: impl Into<String>,
    ) -> Self {
        Self {
            url: Secret::new(url),
            key: None,
            auth: Auth::Key,
            credential: None,
            tenant_id: None,
            client_id: None,
            client_secret: None,
            database: database.into(),
            container: container.into(),
            lease_container: default_lease_container(),
            preferred_regions: Vec::new(),
            event_ttl_ms: default_event_ttl_ms(),
            topic: default_topic(),
            max_items: default_max_items(),
        }
    }

    /// Refuses impossible values, naming the key and the remedy.
    ///
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent).
    pub fn check(&self) -> Result<()> {
        let names = [
            ("database", &self.database),
            ("container", &self.container),
            ("lease_container", &self.lease_container),
        ];
        for (key, name) in names {
            check_name(key, name)?;
        }
        if self.lease_container == self.container {
            return Err(Error::permanent(
                "lease_container is the container itself; what a relay writes there would come \
                 back in the change feed: name another one",
            ));
        }
        let ttl = Duration::from_millis(self.event_ttl_ms);
        if ttl < Duration::from_secs(1) || ttl > MAX_EVENT_TTL {
            return Err(Error::permanent(format!(
                "event_ttl is {} ms; give a second to {} s",
                self.event_ttl_ms,
                MAX_EVENT_TTL.as_secs()
            )));
        }
        if !(1..=MAX_ITEMS).contains(&self.max_items) {
            return Err(Error::permanent(format!(
                "max_items is {}; give 1 to {MAX_ITEMS}",
                self.max_items
            )));
        }
        self.topic()?;
        self.check_auth()?;
        self.account().map(drop)
    }

    fn check_auth(&self) -> Result<()> {
        let entra = [
            ("credential", self.credential.is_some()),
            ("tenant_id", self.tenant_id.is_some()),
            ("client_id", self.client_id.is_some()),
            ("client_secret", self.client_secret.is_some()),
        ];
        if self.auth == Auth::Key {
            return match entra.iter().find(|(_, given)| *given) {
                Some((key, _)) => {
                    Err(Error::permanent(format!("{key} means nothing without auth = \"entra\"")))
                }
                None => Ok(()),
            };
        }
        let missing =
            |key: &str| Err(Error::permanent(format!("{key}: is missing; {ENTRA_NEEDS}")));
        match self.credential {
            None => missing("credential"),
            Some(EntraCredential::ClientSecret) => match entra.iter().find(|(_, given)| !*given) {
                Some((key, _)) => missing(key),
                None => Ok(()),
            },
            Some(_) if self.client_secret.is_some() => Err(Error::permanent(
                "client_secret means nothing without credential = \"client-secret\"",
            )),
            Some(_) => Ok(()),
        }
    }

    /// The account's address and key, out of `url` and `key`.
    pub(crate) fn account(&self) -> Result<Account> {
        let url = self.url.expose().trim();
        let (endpoint, inner) = match url.contains("AccountEndpoint=") {
            true => connection_string(url)?,
            false => (url.to_owned(), None),
        };
        check_endpoint(&endpoint)?;
        let key = match (inner, self.key.clone()) {
            (Some(_), Some(_)) => {
                return Err(Error::permanent(
                    "key: url has an AccountKey already; remove one of them",
                ));
            }
            (Some(key), None) | (None, Some(key)) => Some(key),
            (None, None) => None,
        };
        match (self.auth, &key) {
            (Auth::Key, None) => Err(Error::permanent(
                "key: is missing; give it, a connection string as url, or auth = \"entra\"",
            )),
            (Auth::Entra, Some(_)) => {
                Err(Error::permanent("key means nothing with auth = \"entra\"; remove it"))
            }
            (Auth::Key, Some(_)) | (Auth::Entra, None) => Ok(Account { endpoint, key }),
        }
    }

    pub(crate) fn topic(&self) -> Result<Topic> {
        Topic::new(self.topic.as_str())
    }

    pub(crate) fn event_ttl_seconds(&self) -> i64 {
        i64::try_from(self.event_ttl_ms / 1_000).unwrap_or(i64::MAX)
    }
}

fn check_name(key: &str, name: &str) -> Result<()> {
    let illegal = |c: char| c.is_control() || "/\\?#".contains(c);
    if name.is_empty()
        || name.len() > MAX_NAME_BYTES
        || name.ends_with(' ')
        || name.chars().any(illegal)
    {
        return Err(Error::permanent(format!(
            "{key} is no name: give 1 to {MAX_NAME_BYTES} bytes without / \\ ? # and without a \
             space at the end"
        )));
    }
    Ok(())
}

/// Without TLS the key's signatures could be replayed by whoever listens.
fn check_endpoint(endpoint: &str) -> Result<()> {
    if endpoint.is_empty() {
        return Err(Error::permanent(
            "url: is missing; give the account's address or its connection string",
        ));
    }
    let url = azure_core::http::Url::parse(endpoint).map_err(|error| {
        Error::permanent(
            "url is no address; give one such as https://shop.documents.azure.com/, or the \
             account's connection string",
        )
        .with_source(error)
    })?;
    let host = url.host_str().unwrap_or_default();
    let local = ["localhost", "127.0.0.1", "[::1]"].contains(&host);
    match url.scheme() {
        "https" => Ok(()),
        "http" if local => Ok(()),
        _ => Err(Error::permanent(
            "url has to begin with https://; http:// is for an emulator on this machine alone",
        )),
    }
}

fn connection_string(text: &str) -> Result<(String, Option<Secret>)> {
    let (mut endpoint, mut key) = (None, None);
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        match part.split_once('=') {
            Some(("AccountEndpoint", value)) => endpoint = Some(value.to_owned()),
            Some(("AccountKey", value)) => key = Some(Secret::new(value)),
            Some(("Database", _)) => {}
            _ => {
                return Err(Error::permanent(
                    "url: the connection string has a part other than AccountEndpoint and \
                     AccountKey; copy it anew from the portal",
                ));
            }
        }
    }
    Ok((endpoint.unwrap_or_default(), key))
}

fn default_lease_container() -> String {
    "leases".to_owned()
}

fn default_topic() -> String {
    DEFAULT_TOPIC.to_owned()
}

fn default_event_ttl_ms() -> u64 {
    u64::try_from(DEFAULT_EVENT_TTL.as_millis()).expect("ten days are few milliseconds")
}

/// Enough for a page to be worth its request; a page's bytes are bounded by the service.
fn default_max_items() -> u32 {
    MAX_ITEMS
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

    const MINIMAL: &str = "database = 'shop'\ncontainer = 'contacts'\n";
    const URL: &str = "url = 'AccountEndpoint=https://h.example/;AccountKey=aHVudGVyMg==;'\n";

    fn given(text: &str) -> Result<(), String> {
        let config: CosmosConfig =
            toml::from_str(&format!("{MINIMAL}{text}")).map_err(|error| error.to_string())?;
        assert!(!format!("{config:?}").contains("aHVudGVyMg"), "{config:?}");
        config.check().map_err(|error| error.to_string())
    }

    #[test]
    fn an_address_and_a_key_come_in_one_text_or_in_two() {
        assert_eq!(given(URL), Ok(()));
        assert_eq!(given("url = 'https://h.example:443/'\nkey = 'aHVudGVyMg=='"), Ok(()));
        let whole: CosmosConfig = toml::from_str(&format!("{MINIMAL}{URL}")).expect("valid");
        let account = whole.account().expect("valid");
        assert_eq!(account.endpoint, "https://h.example/");
        assert_eq!(account.key.as_ref().map(Secret::expose), Some("aHVudGVyMg=="));
    }

    #[test]
    fn without_tls_the_account_is_on_this_machine() {
        for url in ["http://127.0.0.1:8081/", "http://localhost:8081", "http://[::1]:8081/"] {
            assert_eq!(given(&format!("url = '{url}'\nkey = 'aHVudGVyMg=='")), Ok(()), "{url}");
        }
        for url in ["http://h.example/", "http://127.0.0.1.example/", "ftp://localhost/"] {
            let error = given(&format!("url = '{url}'\nkey = 'aHVudGVyMg=='")).expect_err(url);
            assert!(error.contains("https://"), "{error}");
        }
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        for (more, says) in [
            ("", "url: is missing"),
            ("url = 'nonsense'\nkey = 'k'", "url is no address"),
            ("url = 'https://h.example/'", "key: is missing"),
            ("url = 'AccountEndpoint=https://h/;AccountKey=a;Nonsense=1'", "connection string"),
        ] {
            let error = given(more).expect_err(more);
            assert!(error.contains(says), "{more}: {error}");
        }
        for (more, says) in [
            ("key = 'k'", "remove one of them"),
            ("lease_container = 'contacts'", "lease_container is the container itself"),
            ("lease_container = 'a/b'", "lease_container is no name"),
            ("event_ttl_ms = 999", "event_ttl"),
            ("event_ttl_ms = 9999999999999", "event_ttl"),
            ("max_items = 0", "max_items"),
            ("topic = ''", "topic"),
            ("tenant_id = 'a'", "tenant_id means nothing"),
            ("auth = 'entra'\ncredential = 'azure-cli'", "key means nothing"),
            ("nonsense = 1", "nonsense"),
        ] {
            let error = given(&format!("{URL}{more}")).expect_err(more);
            assert!(error.contains(says), "{more}: {error}");
        }
    }

    #[test]
    fn entra_needs_a_credential_and_no_key() {
        let entra = "url = 'https://h.example/'\nauth = 'entra'\n";
        let secret = "credential = 'client-secret'\nclient_secret = 'aHVudGVyMg=='\n";
        for (more, says) in [
            (String::new(), "credential: is missing"),
            (format!("{secret}client_id = 'a'"), "tenant_id: is missing"),
            ("credential = 'azure-cli'\nclient_secret = 's'".to_owned(), "means nothing"),
        ] {
            let error = given(&format!("{entra}{more}")).expect_err(says);
            assert!(error.contains(says), "{more}: {error}");
        }
        assert_eq!(given(&format!("{entra}{secret}tenant_id = 'a'\nclient_id = 'b'")), Ok(()));
        assert_eq!(given(&format!("{entra}credential = 'managed-identity'")), Ok(()));
    }
}
