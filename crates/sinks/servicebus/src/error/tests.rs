//! The table of codes, row by row.
//!
//! What lives here: each condition, outcome and answer with its kind. What does not: the same over
//! a connection, which is `tests/it/failures.rs`.
//! Invariant: every row of the table in the head of `error.rs` is named here.

use super::*;
use fe2o3_amqp::types::messaging::{Accepted, Modified, Rejected, Released};
use fe2o3_amqp_management::error::StatusError;
use fe2o3_amqp_management::status::StatusCode;

fn error(condition: &str, description: &str) -> definitions::Error {
    let condition = ErrorCondition::Custom(Symbol::from(condition));
    definitions::Error::new(condition, description.to_owned(), None)
}

fn both(condition: &str) -> [ErrorKind; 2] {
    let delivery = kind(condition, "", About::Delivery);
    [delivery, kind(condition, "", About::Link)]
}

#[test]
fn every_row_of_the_table() {
    for condition in [
        "amqp:link:message-size-exceeded",
        "amqp:not-allowed",
        "amqp:not-implemented",
        "amqp:invalid-field",
        "amqp:decode-error",
        "amqp:precondition-failed",
        "com.microsoft:argument-error",
        "com.microsoft:argument-out-of-range",
    ] {
        let expected = [ErrorKind::Permanent, ErrorKind::Transient];
        assert_eq!(both(condition), expected, "{condition}");
    }
    for condition in [
        "amqp:unauthorized-access",
        "com.microsoft:auth-failed",
        "amqp:not-found",
        "amqp:resource-deleted",
        "com.microsoft:entity-disabled",
        "com.microsoft:timeout",
        "amqp:internal-error",
        "amqp:link:detach-forced",
        "amqp:link:stolen",
        "amqp:link:redirect",
        "amqp:connection:forced",
        "com.microsoft:operation-cancelled",
        "anything-else",
        "",
    ] {
        assert_eq!(both(condition), [ErrorKind::Transient; 2], "{condition}");
    }
    for condition in ["com.microsoft:server-busy", "amqp:resource-limit-exceeded"] {
        let wait = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(10)) };
        assert_eq!(both(condition), [wait; 2], "{condition}");
    }
}

#[test]
fn known_conditions_of_the_library_keep_their_names() {
    for name in [
        "amqp:not-found",
        "amqp:link:message-size-exceeded",
        "amqp:connection:forced",
        "amqp:session:window-violation",
        "com.microsoft:server-busy",
    ] {
        let encoded = serde_amqp::to_vec(&Symbol::from(name)).expect("encodes");
        let read: ErrorCondition = serde_amqp::from_slice(&encoded).expect("a condition");
        assert_eq!(condition(&read), name);
    }
}

#[test]
fn the_wait_that_is_named_is_kept() {
    let busy = |text: &str| kind("com.microsoft:server-busy", text, About::Delivery);
    let wait = |seconds| ErrorKind::Throttled { retry_after: Some(Duration::from_secs(seconds)) };
    let text = "The request was terminated because the entity is being throttled. \
                Error code : 50009. Please wait 2 seconds and try again.";
    assert_eq!(busy(text), wait(2));
    assert_eq!(busy("wait 1 second"), wait(1));
    for nonsense in ["", "wait", "wait a second", "please wait 5 minutes", "wait -1 seconds"] {
        assert_eq!(busy(nonsense), wait(10), "{nonsense}");
    }
}

#[test]
fn outcomes_other_than_accepted_confirm_nothing() {
    assert_eq!(of_outcome(&Outcome::Accepted(Accepted {})), Fate::Accepted);
    let rejected = |error| of_outcome(&Outcome::Rejected(Rejected { error }));
    assert!(
        matches!(rejected(None), Fate::Failed(failure) if failure.kind == ErrorKind::Transient)
    );
    let refused = rejected(Some(error("amqp:not-allowed", "sessions are required")));
    let Fate::Refused(failure) = refused else { panic!("{refused:?}") };
    let text = failure.error().to_string();
    assert!(text.contains("amqp:not-allowed: sessions are required"), "{text}");
    assert!(matches!(of_outcome(&Outcome::Released(Released {})), Fate::Failed(_)));
    let modified = |undeliverable_here| {
        of_outcome(&Outcome::Modified(Modified {
            delivery_failed: Some(true),
            undeliverable_here,
            message_annotations: None,
        }))
    };
    assert!(matches!(modified(None), Fate::Failed(_)));
    assert!(matches!(modified(Some(true)), Fate::Refused(_)));
}

#[test]
fn the_answer_to_a_token_is_told_by_its_code() {
    let answer = |code: u16| {
        let code = StatusCode(code.try_into().expect("not zero"));
        let description = Some("sig=hunter2".to_owned());
        let answered = of_put_token(&ManagementError::Status(StatusError { code, description }))?;
        assert!(answered.may_ask_again, "the answer is here");
        let failure = answered.failure;
        assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
        Some(failure.kind)
    };
    for code in [200, 202] {
        assert_eq!(answer(code), None, "{code}");
    }
    for code in [400, 401, 403, 404, 408, 410, 500] {
        assert_eq!(answer(code), Some(ErrorKind::Transient), "{code}");
    }
    let wait = ErrorKind::Throttled { retry_after: Some(BUSY_WAIT) };
    assert_eq!((answer(429), answer(503)), (Some(wait), Some(wait)));
}

#[test]
fn texts_of_the_service_are_bounded_and_on_one_line() {
    let long = format!("a\nb\u{1b}{}", "x".repeat(1_000));
    let failure = of_condition(&error("c", &long), About::Link, "w");
    assert!(failure.text.len() < 400 && !failure.text.contains(['\n', '\u{1b}']));
    let secret = of_condition(&error("c", "SharedAccessSignature sig=a"), About::Link, "w");
    assert!(!secret.text.contains("sig="), "{secret:?}");
}

#[test]
fn whoever_makes_no_token_parks_and_stops_nothing() {
    let kind = |kind| Failure::of_tokens(&Error::new(kind, "the secret has expired")).kind;
    for of_source in [
        ErrorKind::Transient,
        ErrorKind::Permanent,
        ErrorKind::Fenced,
        ErrorKind::Unsupported,
        ErrorKind::Corrupt,
    ] {
        assert_eq!(kind(of_source), ErrorKind::Transient, "{of_source}");
    }
    let wait = ErrorKind::Throttled { retry_after: Some(Duration::from_secs(7)) };
    assert_eq!(kind(wait), wait);
}
