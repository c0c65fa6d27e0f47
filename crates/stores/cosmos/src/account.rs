//! What an account must be for relays to be told apart.
//!
//! What lives here: one look at the account's own settings, and what is refused. What does not: its
//! containers' settings (`connect.rs`).
//! Invariant: an account is refused for what it says, never because it could not be asked: what can
//! reach its containers may not be let at the account itself.
//!
//! The SDK reads the same document and does not hand it on.

use std::time::Duration;

use azure_core::credentials::Secret as AzureSecret;
use azure_core::hmac::hmac_sha256;
use azure_core::http::{Method, Request, Url, new_http_client};
use azure_core::time::{OffsetDateTime, to_rfc7231};
use postrider_core::{Error, Result};
use serde_json::Value;

use crate::config::{Auth, CosmosConfig};

/// The interface's version, as the service names it; the document has been the same for years.
const API_VERSION: &str = "2018-12-31";
/// Longest time for the look.
const LOOK_WITHIN: Duration = Duration::from_secs(5);
/// Consistency under which a relay that has taken over would not see what the last one wrote.
const TOO_WEAK: [&str; 2] = ["Eventual", "ConsistentPrefix"];

/// Refuses an account in which two relays could both hold a lease, or one not see what another did.
///
/// # Errors
/// `Permanent`, with the remedy.
pub(crate) async fn check(config: &CosmosConfig) -> Result<()> {
    match tokio::time::timeout(LOOK_WITHIN, read(config)).await {
        Ok(Some(account)) => judge(&account),
        Ok(None) | Err(_) => {
            tracing::debug!("the account's settings could not be read, and were not checked");
            Ok(())
        }
    }
}

fn judge(account: &Value) -> Result<()> {
    if account["enableMultipleWriteLocations"] == true {
        return Err(Error::permanent(
            "the account takes writes in several regions: two relays could both hold a lease, and \
             of two writes of one document the service drops one; switch multi-region writes off, \
             and keep as many read regions as you like",
        ));
    }
    let level = account["userConsistencyPolicy"]["defaultConsistencyLevel"].as_str();
    match level.filter(|level| TOO_WEAK.contains(level)) {
        Some(level) => Err(Error::permanent(format!(
            "the account's default consistency is {level}: a relay that takes a range over would \
             not see how far the last one came, nor which keys wait; set it to Session, the \
             default, or stronger"
        ))),
        None => Ok(()),
    }
}

/// The account's settings, if they can be read.
async fn read(config: &CosmosConfig) -> Option<Value> {
    let account = config.account().ok()?;
    let date = to_rfc7231(&OffsetDateTime::now_utc());
    let proof = match config.auth {
        Auth::Key => {
            let key = AzureSecret::new(account.key?.expose().to_owned());
            let text = format!("get\n\n\n{}\n\n", date.to_ascii_lowercase());
            format!("type=master&ver=1.0&sig={}", hmac_sha256(&text, &key).ok()?)
        }
        #[cfg(feature = "entra")]
        Auth::Entra => {
            let credential = crate::entra::credential(config).ok()?;
            let scope = "https://cosmos.azure.com/.default";
            let token = credential.get_token(&[scope], None).await.ok()?;
            format!("type=aad&ver=1.0&sig={}", token.token.secret())
        }
        #[cfg(not(feature = "entra"))]
        Auth::Entra => return None,
    };
    let mut request = Request::new(Url::parse(&account.endpoint).ok()?, Method::Get);
    let headers = [
        ("x-ms-date", date),
        ("x-ms-version", API_VERSION.to_owned()),
        ("authorization", encoded(&proof)),
    ];
    for (name, value) in headers {
        request.headers_mut().insert(name, value);
    }
    let answer = new_http_client(None).execute_request(&request).await.ok()?;
    let answer = answer.try_into_raw_response().await.ok()?;
    (u16::from(answer.status()) == 200)
        .then(|| serde_json::from_slice(answer.body().as_ref()).ok())?
}

/// As a part of a URL, which is how the service wants it.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes().fold(String::new(), |mut encoded, byte| {
        match plain(byte) {
            true => encoded.push(char::from(byte)),
            false => encoded.push_str(&format!("%{byte:02X}")),
        }
        encoded
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_would_break_the_fence_is_refused() {
        let account = |several: bool, level: &str| {
            judge(&json!({
                "enableMultipleWriteLocations": several,
                "userConsistencyPolicy": { "defaultConsistencyLevel": level },
            }))
        };
        for level in ["Session", "BoundedStaleness", "Strong"] {
            assert!(account(false, level).is_ok(), "{level}");
            let error = account(true, level).expect_err("several regions");
            assert!(error.to_string().contains("multi-region writes"), "{error}");
        }
        for level in TOO_WEAK {
            let error = account(false, level).expect_err(level);
            assert!(error.to_string().contains(level), "{error}");
        }
        assert!(judge(&json!({})).is_ok());
    }

    #[test]
    fn a_signature_is_encoded() {
        assert_eq!(encoded("type=master&sig=a+/b=="), "type%3Dmaster%26sig%3Da%2B%2Fb%3D%3D");
    }
}
