//! Whether a request is signed by the account's key.
//!
//! What lives here: the master key's signature over verb, resource and date. What does not: tokens
//! of Entra ID, which only the service can judge.
//! Invariant: what the service would refuse for its signature is refused here.

use azure_core::credentials::Secret;
use azure_core::hmac::hmac_sha256;
use azure_core::http::Request;

use crate::request::{header, segments};

/// Why a request is refused, or nothing.
pub(crate) fn refusal(request: &Request, key: &Secret) -> Option<&'static str> {
    let Some(authorization) = header(request, "authorization") else {
        return Some("the authorization header is missing");
    };
    let Some(date) = header(request, "x-ms-date").or_else(|| header(request, "date")) else {
        return Some("the x-ms-date header is missing");
    };
    let decoded = percent_encoding::percent_decode_str(authorization).decode_utf8_lossy();
    let Some(signature) = decoded.strip_prefix("type=master&ver=1.0&sig=") else {
        return Some("only signatures by the account's key are judged here");
    };
    let (kind, link) = resource(request.url().path());
    let verb = request.method().as_ref().to_ascii_lowercase();
    // A link by resource ids is signed in lower case, one by names as it is.
    let signed = [link.clone(), link.to_ascii_lowercase()].iter().any(|link| {
        let text = format!("{verb}\n{kind}\n{link}\n{}\n\n", date.to_ascii_lowercase());
        hmac_sha256(&text, key).is_ok_and(|own| own == signature)
    });
    (!signed).then_some("the signature is not by the account's key")
}

/// A resource's type, and the link that is signed: a feed's parent, or the resource itself.
fn resource(path: &str) -> (String, String) {
    let parts = segments(path);
    let Some(last) = parts.last() else { return (String::new(), String::new()) };
    if parts.len() % 2 == 1 {
        return (last.clone(), parts[..parts.len() - 1].join("/"));
    }
    (parts[parts.len() - 2].clone(), parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_feed_is_signed_by_its_parent_and_a_resource_by_itself() {
        let of = |path| resource(path);
        let text = |kind: &str, link: &str| (kind.to_owned(), link.to_owned());
        assert_eq!(of("/"), text("", ""));
        assert_eq!(of("/dbs"), text("dbs", ""));
        assert_eq!(of("/dbs/d/colls/C%20c"), text("colls", "dbs/d/colls/C c"));
        assert_eq!(of("/dbs/d/colls/c/docs/"), text("docs", "dbs/d/colls/c"));
        assert_eq!(of("/dbs/d/colls/c/docs/1"), text("docs", "dbs/d/colls/c/docs/1"));
    }

    #[test]
    fn only_the_accounts_key_signs() {
        let url = url::Url::parse("http://127.0.0.1/dbs/d").expect("a URL");
        let key = Secret::new("a2V5");
        let mut request = Request::new(url, azure_core::http::Method::Get);
        assert!(refusal(&request, &key).is_some());
        let date = "Mon, 01 Jan 2024 01:00:00 GMT";
        let text = "get\ndbs\ndbs/d\nmon, 01 jan 2024 01:00:00 gmt\n\n";
        let signature = hmac_sha256(text, &key).expect("a signature");
        let signature = format!("type=master&ver=1.0&sig={signature}");
        request.headers_mut().insert("x-ms-date", date);
        request.headers_mut().insert("authorization", signature);
        assert_eq!(refusal(&request, &key), None);
        assert!(refusal(&request, &Secret::new("b3RoZXI=")).is_some());
    }
}
