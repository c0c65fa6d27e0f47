//! Where a request goes: the URL, constant or by template.
//!
//! What lives here: the check of the URL at start, and its rendering for one event. What does not:
//! resolving the host (`resolve.rs`).
//! Invariant: an event can choose path and query within its template, never scheme, host or port.

use std::fmt;
use std::net::IpAddr;

use postrider_core::{Error, Event, Result};
use postrider_encoding::{Escape, Template};
use reqwest::Url;

use crate::address::is_public;
use crate::config::WebhookConfig;

/// A checked URL or template of URLs.
#[derive(Clone)]
pub(crate) struct Target {
    template: Template,
    /// The URL itself, or the part of the template before its first placeholder.
    base: Url,
}

impl Target {
    /// Checks the URL of a configuration. Errors never repeat it: it may hold a secret.
    pub(crate) fn new(config: &WebhookConfig) -> Result<Self> {
        let template = Template::parse(config.url.expose())
            .map_err(|error| Error::new(error.kind(), format!("url: {error}")))?;
        let prefix = template.constant().unwrap_or(template.literal_prefix());
        if template.constant().is_none() && !has_whole_authority(prefix) {
            return Err(Error::permanent(
                "url has a placeholder before the end of its host; placeholders may stand in path \
                 and query only",
            ));
        }
        let base = Url::parse(prefix).map_err(|cause| {
            Error::permanent("url is no URL; give one such as https://example.com/hook")
                .with_source(cause)
        })?;
        let target = Self { template, base };
        target.check_scheme(config.allow_http)?;
        // A proxy does the connecting, and has rules of its own.
        if !config.allow_private && config.proxy.is_none() {
            target.check_address()?;
        }
        Ok(target)
    }

    fn check_scheme(&self, allow_http: bool) -> Result<()> {
        match self.base.scheme() {
            "https" => Ok(()),
            "http" if allow_http || self.is_loopback() => Ok(()),
            "http" => Err(Error::permanent(
                "url is http://, which anyone on the way can read; use https://, or say \
                 allow_http = true",
            )),
            scheme => Err(Error::permanent(format!("url has the scheme {scheme}; use https"))),
        }
    }

    /// Names are checked when they are resolved, each time.
    fn check_address(&self) -> Result<()> {
        match self.address() {
            Some(address) if !is_public(address) => Err(Error::permanent(format!(
                "url leads to {address}, no public address; if that is meant, say \
                 allow_private = true"
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// The URL for one event.
    pub(crate) fn url(&self, event: &Event) -> Result<Url> {
        if self.template.constant().is_some() {
            return Ok(self.base.clone());
        }
        let text = self.template.render(event, Escape::Url)?;
        let path = text.split(['?', '#']).next().unwrap_or_default();
        if path.split('/').any(|segment| segment == "." || segment == "..") {
            return Err(Error::permanent(
                "the event's values make a part of the url's path \".\" or \"..\", which would \
                 lead elsewhere",
            ));
        }
        let url = Url::parse(&text).map_err(|cause| {
            Error::permanent("the event's values make no URL").with_source(cause)
        })?;
        if url.origin() != self.base.origin() {
            return Err(Error::permanent("the event's values would change the url's host"));
        }
        Ok(url)
    }

    /// The host, without brackets.
    pub(crate) fn host(&self) -> &str {
        self.base.host_str().unwrap_or_default().trim_matches(['[', ']'])
    }

    /// The port, the scheme's own if none is given.
    pub(crate) fn port(&self) -> u16 {
        self.base.port_or_known_default().unwrap_or_default()
    }

    /// Whether no request will need TLS.
    pub(crate) fn is_plain_http(&self) -> bool {
        self.base.scheme() == "http"
    }

    /// The address that the URL names itself, if it does.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.host().parse().ok()
    }

    fn is_loopback(&self) -> bool {
        match self.address() {
            Some(address) => address.to_canonical().is_loopback(),
            None => self.host() == "localhost",
        }
    }
}

impl fmt::Debug for Target {
    /// Scheme, host and port only: path, query and user may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.base.scheme(), self.host(), self.port())
    }
}

fn has_whole_authority(prefix: &str) -> bool {
    prefix.split_once("://").is_some_and(|(_, rest)| rest.contains(['/', '?']))
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_core::{EventId, EventType, Key, NewEvent, Secret, Topic};
    use proptest::prelude::*;

    fn target(url: &str, change: impl FnOnce(&mut WebhookConfig)) -> Result<Target> {
        let mut config = WebhookConfig::new(Secret::new(url), Vec::new());
        change(&mut config);
        Target::new(&config)
    }

    fn event(key: &str) -> Event {
        NewEvent::builder(
            Key::new(key).expect("valid"),
            Topic::new("orders").expect("valid"),
            EventType::new("Placed").expect("valid"),
        )
        .build()
        .expect("valid")
        .identified(|| EventId::from_uuid(uuid::Uuid::nil()))
    }

    #[test]
    fn private_addresses_in_the_url_are_refused_unless_allowed() {
        for url in [
            "https://127.0.0.1/",
            "https://[::1]/",
            "https://0x7f.1/",
            "https://2130706433/",
            "https://[::ffff:10.0.0.1]/",
            "https://169.254.169.254/latest",
            "https://10.0.0.1:8443/{key}",
        ] {
            let error = target(url, |_| {}).expect_err(url).to_string();
            assert!(error.contains("allow_private"), "{url}: {error}");
            target(url, |config| config.allow_private = true).expect(url);
        }
        target("https://1.1.1.1/", |_| {}).expect("public");
    }

    #[test]
    fn plain_http_needs_loopback_or_permission() {
        let allow = |config: &mut WebhookConfig| config.allow_private = true;
        target("http://127.0.0.1:1/", allow).expect("loopback");
        target("http://[::1]:1/", allow).expect("loopback");
        assert!(target("http://10.0.0.1/", allow).is_err());
        assert!(target("http://example.com/", |_| {}).is_err());
        target("http://example.com/", |config| config.allow_http = true).expect("permitted");
        assert!(target("ftp://example.com/", |_| {}).is_err());
    }

    #[test]
    fn errors_and_debug_never_repeat_the_url() {
        for url in ["hunter2", "https://hunter2@{key}/", "ftp://h/hunter2", "https:// hunter2/"] {
            let error = target(url, |_| {}).expect_err(url);
            assert!(!error.chain().contains("hunter2"), "{error:?}");
        }
        let shown = target("https://u:hunter2@example.com/hunter2?hunter2", |_| {}).expect("valid");
        assert_eq!(format!("{shown:?}"), "https://example.com:443");
    }

    #[test]
    fn placeholders_stand_after_the_host_only() {
        for url in ["https://{key}/", "https://example.com{key}", "{key}", "https://{topic}.com/"] {
            let error = target(url, |_| {}).expect_err(url).to_string();
            assert!(error.contains("path and query only"), "{url}: {error}");
        }
        let hook = target("https://example.com/{topic}/{key}?t={type}", |_| {}).expect("valid");
        let url = hook.url(&event("a/b?c#d é")).expect("rendered");
        assert_eq!(url.as_str(), "https://example.com/orders/a%2Fb%3Fc%23d%20%C3%A9?t=Placed");
        for key in [".", ".."] {
            assert!(hook.url(&event(key)).is_err(), "{key}");
        }
        let dotted = target("https://example.com/.{key}", |_| {}).expect("valid");
        assert!(dotted.url(&event(".")).is_err());
    }

    proptest! {
        #[test]
        fn no_key_leads_to_another_host_or_folder(key in "[^\\p{Cc}]{1,30}") {
            let hook = target("https://example.com/hooks/{key}", |_| {}).expect("valid");
            if let Ok(url) = hook.url(&event(&key)) {
                prop_assert_eq!(url.host_str(), Some("example.com"));
                prop_assert!(url.path().starts_with("/hooks/"));
                prop_assert_eq!(url.path().matches('/').count(), 2);
            }
        }
    }
}
