//! The conditions under which a client wants an answer or a change (RFC 9110, section 13).
//!
//! What lives here: `If-Match`, `If-None-Match`, and the request header `ETag` that the original
//! sample of the article used for both. What does not: the current version, which the store knows.
//! Invariant: a header that cannot be read is refused, never taken for "no condition".

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, header};
use postrider::ETag;

use crate::config::Preconditions;
use crate::problem::Problem;
use crate::service::Service;

/// Most bytes of a condition's header: a client knows a handful of versions at most.
const MAX_CONDITION_BYTES: usize = 1_024;

/// A list of versions, or any.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Versions {
    Any,
    Listed(Vec<Version>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Version {
    weak: bool,
    /// With its quotes.
    opaque: String,
}

/// The versions under which a change is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct IfMatch(Option<Versions>);

impl IfMatch {
    /// Whether a change of this version is wanted. Weak versions never match (RFC 9110, 13.1.1).
    pub(crate) fn allows(&self, current: &ETag) -> bool {
        match &self.0 {
            None | Some(Versions::Any) => true,
            Some(Versions::Listed(list)) => {
                list.iter().any(|version| !version.weak && version.opaque == current.as_str())
            }
        }
    }
}

impl FromRequestParts<Service> for IfMatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &Service) -> Result<Self, Problem> {
        let condition = Self(read(&parts.headers, header::IF_MATCH)?);
        match (state.preconditions(), &condition.0) {
            (Preconditions::Required, None) => Err(Problem::precondition_required()),
            (Preconditions::Required, Some(_)) | (Preconditions::Optional, _) => Ok(condition),
        }
    }
}

/// The versions that the client has already.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct IfNoneMatch(Option<Versions>);

impl IfNoneMatch {
    /// Whether the client has this version already. Weakness does not matter here (13.1.2).
    pub(crate) fn has(&self, current: &ETag) -> bool {
        match &self.0 {
            None => false,
            Some(Versions::Any) => true,
            Some(Versions::Listed(list)) => {
                list.iter().any(|version| version.opaque == current.as_str())
            }
        }
    }
}

impl FromRequestParts<Service> for IfNoneMatch {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Service) -> Result<Self, Problem> {
        Ok(Self(read(&parts.headers, header::IF_NONE_MATCH)?))
    }
}

/// The standard header, else its alias.
fn read(headers: &HeaderMap, standard: HeaderName) -> Result<Option<Versions>, Problem> {
    let name = if headers.contains_key(&standard) { standard } else { header::ETAG };
    let mut text = String::new();
    for value in headers.get_all(&name) {
        let value = value.to_str().map_err(|_| malformed(&name))?;
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(value);
    }
    if text.len() > MAX_CONDITION_BYTES {
        return Err(Problem::bad_request(format!(
            "header {name} has {} bytes; {MAX_CONDITION_BYTES} are allowed",
            text.len()
        )));
    }
    if headers.contains_key(&name) {
        parse(&text).map(Some).ok_or_else(|| malformed(&name))
    } else {
        Ok(None)
    }
}

fn malformed(name: &HeaderName) -> Problem {
    Problem::bad_request(format!(
        "header {name} is not readable; send the ETag as it was received, with its quotes"
    ))
}

/// `*`, or entity tags separated by commas.
fn parse(text: &str) -> Option<Versions> {
    let mut rest = text.trim();
    if rest == "*" {
        return Some(Versions::Any);
    }
    let mut list = Vec::new();
    loop {
        let weak = rest.starts_with("W/");
        let quoted = if weak { &rest[2..] } else { rest };
        let end = quoted.strip_prefix('"')?.find('"')? + 2;
        list.push(Version { weak, opaque: quoted[..end].to_owned() });
        rest = quoted[end..].trim_start();
        match rest.strip_prefix(',') {
            Some(more) => rest = more.trim_start(),
            None if rest.is_empty() => return Some(Versions::Listed(list)),
            None => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(condition: &str, current: &str) -> Option<(bool, bool)> {
        let current = ETag::new(current);
        let versions = parse(condition)?;
        let strong = IfMatch(Some(versions.clone())).allows(&current);
        Some((strong, IfNoneMatch(Some(versions)).has(&current)))
    }

    #[test]
    fn conditions_compare_as_rfc_9110_says() {
        assert_eq!(matches("\"1\"", "\"1\""), Some((true, true)));
        assert_eq!(matches("\"2\"", "\"1\""), Some((false, false)));
        assert_eq!(matches("W/\"1\"", "\"1\""), Some((false, true)));
        assert_eq!(matches(" * ", "\"1\""), Some((true, true)));
        assert_eq!(matches("\"2\" , W/\"3\",\"1\"", "\"1\""), Some((true, true)));
        assert_eq!(matches("\"a,b\"", "\"a,b\""), Some((true, true)));
    }

    #[test]
    fn what_is_no_condition_is_refused() {
        for bad in ["", "1", "\"1", "\"1\" \"2\"", "\"1\",", ",\"1\"", "W/1", "*,\"1\"", "w/\"1\""]
        {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
