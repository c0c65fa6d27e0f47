//! Connection strings, as the portal and the emulator print them.
//!
//! What lives here: their parts, and what is said of one that is missing or contradicts another.
//! What does not: tokens (`token.rs`), connecting (`connect.rs`).
//! Invariant: an error names the part and never repeats a value: any of them may be the secret.

use std::fmt;

use postrider_core::{Error, Result, Secret};

/// AMQP over TLS; plain AMQP (IANA).
const TLS_PORT: u16 = 5_671;
const PLAIN_PORT: u16 = 5_672;

/// Where to connect to, and as whom.
#[derive(Clone)]
pub(crate) struct ConnectionString {
    /// The namespace's host, without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// A local emulator: plain TCP, and the port belongs to its name.
    pub(crate) emulator: bool,
    /// `EntityPath`.
    pub(crate) entity: Option<String>,
    /// None, where tokens come from elsewhere.
    pub(crate) credential: Option<Credential>,
}

/// What a token is made of.
#[derive(Clone)]
pub(crate) enum Credential {
    /// A rule of the entity or the namespace, and its key.
    Key { name: String, key: Secret },
    /// A token that somebody else signed; it can't be renewed.
    Signature(Secret),
}

impl ConnectionString {
    /// # Errors
    /// [`ErrorKind::Permanent`](postrider_core::ErrorKind::Permanent) that names the part.
    pub(crate) fn parse(text: &Secret) -> Result<Self> {
        let mut parts = Parts::default();
        for part in text.expose().split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                bad("a part is not of the form Name=Value; copy the whole string anew")
            })?;
            parts.set(name.trim(), value.trim())?;
        }
        let endpoint = parts.endpoint.ok_or_else(|| {
            bad("Endpoint is missing; it begins with Endpoint=sb://NAMESPACE.servicebus.windows.net")
        })?;
        let (host, port) = address(&endpoint)?;
        let default = if parts.emulator { PLAIN_PORT } else { TLS_PORT };
        Ok(Self {
            host,
            port: port.unwrap_or(default),
            emulator: parts.emulator,
            entity: parts.entity,
            credential: credential(parts.name, parts.key, parts.signature)?,
        })
    }

    /// What tokens are for: the entity, by the name that the namespace has for it.
    pub(crate) fn audience(&self, entity: &str) -> String {
        match self.emulator {
            true => format!("sb://{}:{}/{entity}", self.bracketed(), self.port),
            false => format!("sb://{}/{entity}", self.host.to_ascii_lowercase()),
        }
    }

    fn bracketed(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() }
    }
}

impl fmt::Debug for ConnectionString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.bracketed(), self.port)
    }
}

#[derive(Default)]
struct Parts {
    endpoint: Option<String>,
    name: Option<String>,
    key: Option<Secret>,
    signature: Option<Secret>,
    entity: Option<String>,
    emulator: bool,
}

impl Parts {
    /// Parts of other names are for other clients.
    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let text = || (!value.is_empty()).then(|| value.to_owned());
        match name.to_ascii_lowercase().as_str() {
            "endpoint" => self.endpoint = text(),
            "sharedaccesskeyname" => self.name = text(),
            "sharedaccesskey" => self.key = text().map(Secret::new),
            "sharedaccesssignature" => self.signature = text().map(Secret::new),
            "entitypath" => self.entity = text(),
            "usedevelopmentemulator" => {
                self.emulator = match value.to_ascii_lowercase().as_str() {
                    "true" => true,
                    "false" => false,
                    _ => return Err(bad("UseDevelopmentEmulator is neither true nor false")),
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn credential(
    name: Option<String>,
    key: Option<Secret>,
    signature: Option<Secret>,
) -> Result<Option<Credential>> {
    match (name, key, signature) {
        (None, None, None) => Ok(None),
        (Some(name), Some(key), None) => Ok(Some(Credential::Key { name, key })),
        (None, None, Some(signature)) => {
            let form = signature.expose().starts_with("SharedAccessSignature ");
            form.then_some(Some(Credential::Signature(signature))).ok_or_else(|| {
                bad("SharedAccessSignature has not the form SharedAccessSignature sr=…&sig=…&se=…")
            })
        }
        (Some(_), None, None) => Err(bad("SharedAccessKey is missing beside SharedAccessKeyName")),
        (None, Some(_), None) => Err(bad("SharedAccessKeyName is missing beside SharedAccessKey")),
        (_, _, Some(_)) => {
            Err(bad("SharedAccessSignature stands beside a SharedAccessKey; remove one of them"))
        }
    }
}

/// Host and port of `sb://host[:port][/]`.
fn address(endpoint: &str) -> Result<(String, Option<u16>)> {
    let (scheme, rest) = endpoint
        .split_once("://")
        .ok_or_else(|| bad("Endpoint has no scheme; it begins with sb://"))?;
    if !["sb", "amqp", "amqps"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) {
        return Err(bad("Endpoint has a foreign scheme; it begins with sb://"));
    }
    let rest = rest.trim_end_matches('/');
    if rest.is_empty() || rest.contains(['/', '@', '?', '#']) {
        return Err(bad(
            "Endpoint has to be a host, such as sb://NAMESPACE.servicebus.windows.net",
        ));
    }
    let (host, port) = match rest.strip_prefix('[') {
        Some(rest) => {
            let (host, after) =
                rest.split_once(']').ok_or_else(|| bad("Endpoint has a [ without its ]"))?;
            (host, after.strip_prefix(':'))
        }
        None => match rest.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (rest, None),
        },
    };
    let port = port
        .map(|port| port.parse().ok().filter(|port| *port != 0))
        .map(|port| port.ok_or_else(|| bad("Endpoint has a port that is none")))
        .transpose()?;
    if host.is_empty() {
        return Err(bad("Endpoint has no host"));
    }
    Ok((host.to_owned(), port))
}

fn bad(what: &str) -> Error {
    Error::permanent(format!("connection_string: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ConnectionString> {
        ConnectionString::parse(&Secret::new(text))
    }

    #[test]
    fn a_namespace_is_reached_by_tls_and_an_emulator_in_the_clear() {
        let azure = parse(
            "Endpoint=sb://Shop.servicebus.windows.net/;SharedAccessKeyName=send;\
             SharedAccessKey=aGVsbG8=;EntityPath=orders",
        )
        .expect("valid");
        assert_eq!((azure.host.as_str(), azure.port), ("Shop.servicebus.windows.net", 5_671));
        assert!(!azure.emulator);
        assert_eq!(azure.entity.as_deref(), Some("orders"));
        assert_eq!(azure.audience("orders"), "sb://shop.servicebus.windows.net/orders");
        let Some(Credential::Key { name, key }) = &azure.credential else { panic!("a key") };
        assert_eq!((name.as_str(), key.expose()), ("send", "aGVsbG8="));
        let local = parse(
            "Endpoint=sb://127.0.0.1:9000;SharedAccessKeyName=x;SharedAccessKey=y;\
             UseDevelopmentEmulator=true;",
        )
        .expect("valid");
        assert_eq!((local.port, local.emulator, &local.entity), (9_000, true, &None));
        assert_eq!(local.audience("q"), "sb://127.0.0.1:9000/q");
        let default = parse("Endpoint=sb://[::1];UseDevelopmentEmulator=True").expect("valid");
        assert_eq!((default.port, default.audience("q")), (5_672, "sb://[::1]:5672/q".into()));
        assert!(default.credential.is_none());
        let private = parse("endpoint=amqps://sb.internal:1234/").expect("valid");
        assert_eq!((private.port, private.emulator), (1_234, false));
    }

    #[test]
    fn a_signed_token_stands_for_a_key() {
        let text = "Endpoint=sb://h;SharedAccessSignature=SharedAccessSignature sr=a&sig=b%3d&se=1";
        let parsed = parse(text).expect("valid");
        let Some(Credential::Signature(token)) = &parsed.credential else { panic!("a token") };
        assert_eq!(token.expose(), "SharedAccessSignature sr=a&sig=b%3d&se=1");
    }

    #[test]
    fn what_is_missing_is_named_and_no_value_repeated() {
        for (text, expected) in [
            ("", "Endpoint is missing"),
            ("SharedAccessKeyName=hunter2;SharedAccessKey=hunter2", "Endpoint is missing"),
            ("hunter2", "Name=Value"),
            ("Endpoint=hunter2", "no scheme"),
            ("Endpoint=https://hunter2", "foreign scheme"),
            ("Endpoint=sb://", "has to be a host"),
            ("Endpoint=sb://u:hunter2@h", "has to be a host"),
            ("Endpoint=sb://h/hunter2", "has to be a host"),
            ("Endpoint=sb://:1", "no host"),
            ("Endpoint=sb://h:hunter2", "port"),
            ("Endpoint=sb://h:0", "port"),
            ("Endpoint=sb://[::1", "without its ]"),
            ("Endpoint=sb://h;SharedAccessKeyName=hunter2", "SharedAccessKey is missing"),
            ("Endpoint=sb://h;SharedAccessKey=hunter2", "SharedAccessKeyName is missing"),
            ("Endpoint=sb://h;SharedAccessSignature=hunter2", "has not the form"),
            (
                "Endpoint=sb://h;SharedAccessKeyName=a;SharedAccessKey=hunter2;\
                 SharedAccessSignature=SharedAccessSignature sr=hunter2",
                "remove one",
            ),
            ("Endpoint=sb://h;UseDevelopmentEmulator=hunter2", "neither true nor false"),
        ] {
            let error = parse(text).expect_err(text).chain();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        let shown = parse("Endpoint=sb://h;SharedAccessKeyName=hunter2;SharedAccessKey=hunter2");
        assert_eq!(format!("{:?}", shown.expect("valid")), "h:5671");
    }
}
