//! Signatures against the specification's vectors and another implementation.
//!
//! What lives here: signing and verifying. What does not: sending.
//! Invariant: no verification ever panics, and none accepts what was changed.

use std::time::Duration;

use postrider_core::{Secret, Timestamp};
use postrider_sink_webhook::SigningKey;
use postrider_sink_webhook::verify::{SignedRequest, Verifier, VerifyError};
use proptest::prelude::*;

use crate::{KEY, OTHER_KEY};

const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
const SIGNED_AT: u64 = 1_614_265_330;
const BODY: &[u8] = br#"{"test": 2432232314}"#;
const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

fn key(text: &str) -> SigningKey {
    SigningKey::parse(&Secret::new(text)).expect("a valid key")
}

fn verifier(keys: &[&str]) -> Verifier {
    let keys: Vec<Secret> = keys.iter().map(|key| Secret::new(*key)).collect();
    Verifier::new(&keys).expect("valid keys")
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(seconds * 1_000)
}

fn request<'a>(timestamp: &'a str, signature: &'a str) -> SignedRequest<'a> {
    SignedRequest { id: ID, timestamp, signature, body: BODY }
}

#[test]
fn the_published_vector() {
    assert_eq!(key(KEY).sign(ID, SIGNED_AT, BODY), SIGNATURE);
    let timestamp = SIGNED_AT.to_string();
    assert_eq!(verifier(&[KEY]).verify(&request(&timestamp, SIGNATURE), at(SIGNED_AT)), Ok(()));
}

#[test]
fn during_a_rotation_old_and_new_keys_are_accepted() {
    let timestamp = SIGNED_AT.to_string();
    let (old, new) = (key(KEY), key(OTHER_KEY));
    let both = [old.sign(ID, SIGNED_AT, BODY), new.sign(ID, SIGNED_AT, BODY)].join(" ");
    let now = at(SIGNED_AT);
    for keys in [&[KEY][..], &[OTHER_KEY], &[OTHER_KEY, KEY]] {
        assert_eq!(verifier(keys).verify(&request(&timestamp, &both), now), Ok(()));
    }
    let only_old = old.sign(ID, SIGNED_AT, BODY);
    let refused = verifier(&[OTHER_KEY]).verify(&request(&timestamp, &only_old), now);
    assert_eq!(refused, Err(VerifyError::NoMatch));
}

/// Key and signature of RFC 8032, 7.1, TEST 1, as a key text; the signed text is our own.
#[test]
fn ed25519_signatures_verify_by_the_public_key() {
    let secret = "whsk_nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=";
    let public = "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";
    let signature = key(secret).sign(ID, SIGNED_AT, BODY);
    assert!(signature.starts_with("v1a,"));
    let timestamp = SIGNED_AT.to_string();
    let now = at(SIGNED_AT);
    let both = [SIGNATURE, &signature].join(" ");
    assert_eq!(verifier(&[public]).verify(&request(&timestamp, &both), now), Ok(()));
    assert_eq!(verifier(&[KEY]).verify(&request(&timestamp, &both), now), Ok(()));
    // A version says how to check, and a public key is no HMAC key.
    let relabelled = signature.replace("v1a,", "v1,");
    let refused = verifier(&[public, KEY]).verify(&request(&timestamp, &relabelled), now);
    assert_eq!(refused, Err(VerifyError::NoMatch));
}

#[test]
fn changed_requests_are_refused() {
    let timestamp = SIGNED_AT.to_string();
    let later = (SIGNED_AT + 1).to_string();
    let now = at(SIGNED_AT);
    let check = |request: SignedRequest<'_>| verifier(&[KEY]).verify(&request, now);
    let good = request(&timestamp, SIGNATURE);
    assert_eq!(check(good), Ok(()));
    assert_eq!(check(SignedRequest { body: b"{}", ..good }), Err(VerifyError::NoMatch));
    assert_eq!(check(SignedRequest { id: "other", ..good }), Err(VerifyError::NoMatch));
    assert_eq!(check(SignedRequest { timestamp: &later, ..good }), Err(VerifyError::NoMatch));
    assert_eq!(check(SignedRequest { signature: "", ..good }), Err(VerifyError::NoMatch));
    assert_eq!(check(SignedRequest { signature: "v1,", ..good }), Err(VerifyError::NoMatch));
    assert_eq!(check(SignedRequest { id: "", ..good }), Err(VerifyError::MalformedId));
    // The full stop would let text move from the body's front into the id.
    assert_eq!(check(SignedRequest { id: "a.1", ..good }), Err(VerifyError::MalformedId));
    for text in ["", "x", "-1", "+1614265330", "1614265330.0", " 1614265330"] {
        let refused = check(SignedRequest { timestamp: text, ..good });
        assert_eq!(refused, Err(VerifyError::MalformedTimestamp), "{text:?}");
    }
}

#[test]
fn old_and_future_requests_are_refused_beyond_the_tolerance() {
    let timestamp = SIGNED_AT.to_string();
    let check = |now| verifier(&[KEY]).verify(&request(&timestamp, SIGNATURE), at(now));
    assert_eq!(check(SIGNED_AT + 300), Ok(()));
    assert_eq!(check(SIGNED_AT + 301), Err(VerifyError::TooOld));
    assert_eq!(check(SIGNED_AT - 300), Ok(()));
    assert_eq!(check(SIGNED_AT - 301), Err(VerifyError::TooNew));
    let strict = verifier(&[KEY]).tolerance(Duration::from_secs(1));
    let refused = strict.verify(&request(&timestamp, SIGNATURE), at(SIGNED_AT + 2));
    assert_eq!(refused, Err(VerifyError::TooOld));
}

#[test]
fn malformed_keys_are_refused_and_none_is_shown() {
    for text in [
        "",
        "hunter2",
        "whsec_",
        "whsec_hunter2",
        "whsec_aHVudGVyMg==",
        "whsk_",
        "whsk_aHVudGVyMg==",
        "whpk_aHVudGVyMg==",
    ] {
        let error = SigningKey::parse(&Secret::new(text)).expect_err(text).chain();
        assert!(!error.contains("hunter2") && !error.contains("aHVudGVyMg"), "{error}");
        let error = Verifier::new(&[Secret::new(text)]).expect_err(text).chain();
        assert!(!error.contains("hunter2") && !error.contains("aHVudGVyMg"), "{error}");
    }
    assert!(Verifier::new(&[]).is_err());
    assert_eq!(format!("{:?}", key(KEY)), "SigningKey(HMAC)");
}

proptest! {
    #[test]
    fn signatures_agree_with_another_implementation(
        bytes in prop::collection::vec(any::<u8>(), 24..=64),
        id in "[a-zA-Z0-9_-]{1,40}",
        timestamp in 0..i64::MAX as u64,
        body in any::<String>(),
    ) {
        use base64::Engine;
        let encoded = base64::engine::general_purpose::STANDARD.encode(&bytes);
        let text = format!("whsec_{encoded}");
        let other = standardwebhooks::Webhook::new(&text).expect("a valid key");
        let expected = other.sign(&id, timestamp as i64, body.as_bytes()).expect("signed");
        prop_assert_eq!(key(&text).sign(&id, timestamp, body.as_bytes()), expected);
    }

    #[test]
    fn what_is_signed_verifies_and_one_changed_byte_does_not(
        body in prop::collection::vec(any::<u8>(), 1..200),
        change in any::<prop::sample::Index>(),
    ) {
        let timestamp = SIGNED_AT.to_string();
        let signature = key(KEY).sign(ID, SIGNED_AT, &body);
        let good = SignedRequest { body: &body, ..request(&timestamp, &signature) };
        prop_assert_eq!(verifier(&[KEY]).verify(&good, at(SIGNED_AT)), Ok(()));
        let mut changed = body.clone();
        let place = change.index(changed.len());
        changed[place] ^= 1;
        let bad = SignedRequest { body: &changed, ..good };
        prop_assert_eq!(verifier(&[KEY]).verify(&bad, at(SIGNED_AT)), Err(VerifyError::NoMatch));
    }

    #[test]
    fn verification_never_panics(
        id in ".{0,20}",
        timestamp in "[0-9 +-]{0,22}|.{0,9}",
        signature in "(v1a?,[A-Za-z0-9+/=]{0,90} ?){0,4}|.{0,80}",
        body in prop::collection::vec(any::<u8>(), 0..50),
        now: u64,
        keys in prop::collection::vec(".{0,30}", 0..3),
    ) {
        let request =
            SignedRequest { id: &id, timestamp: &timestamp, signature: &signature, body: &body };
        let public = "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";
        let accepted = verifier(&[KEY, public]).verify(&request, Timestamp::from_millis(now));
        prop_assert!(accepted.is_err());
        let keys: Vec<Secret> = keys.into_iter().map(Secret::new).collect();
        let _ = Verifier::new(&keys);
        let _ = keys.iter().map(SigningKey::parse).count();
    }
}
