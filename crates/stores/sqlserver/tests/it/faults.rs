//! What becomes of every fault that a server or the network can show.
//!
//! Invariant: a fault that passes is `Transient` (or `Throttled`), and the store works again
//! without being opened anew; one that a person has to end is `Permanent`; no text holds a secret.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use postrider_core::*;
use postrider_store_sqlserver::{SqlServerOptions, SqlServerStore};

use crate::support::{asked, consumer, event, int, lease, opening, options, p, scripted};
use crate::tds::wire::Type;
use crate::tds::{Admission, Answer, Mock, Set};

/// A result set of 400 rows, in several packets.
fn long_set() -> Set {
    let columns = [("index_no", Type::Int), ("count_no", Type::Int)];
    (0..400).fold(Set::of(&columns), |set, index| set.row([int(index), int(400)]))
}

fn partitions_set() -> Set {
    Set::of(&[("index_no", Type::Int), ("count_no", Type::Int)]).row([int(0), int(1)])
}

async fn list(store: &SqlServerStore) -> Result<Vec<PartitionId>> {
    store.partitions(&consumer("sink")).await
}

fn assert_tells(error: &Error, kind: ErrorKind, says: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.chain().contains(says), "{} says {says}", error.chain());
    assert!(!error.chain().contains("s3;cret"), "{}", error.chain());
}

#[tokio::test]
async fn a_result_cut_in_its_middle_is_transient_and_the_next_call_works() {
    let answers = vec![Answer::Cut(vec![long_set()]), Answer::set(partitions_set())];
    let (mock, store) = scripted(answers).await;
    let error = list(&store).await.expect_err("it was cut");
    assert_tells(&error, ErrorKind::Transient, "the connection failed");
    assert_eq!(list(&store).await.expect("another connection"), [p(0, 1)]);
    assert_eq!(mock.logins().len(), 2, "the connection was not used again");
    assert_eq!(asked(&mock, "partitions_of_consumer").values(), [crate::support::text("sink")]);
}

#[tokio::test]
async fn a_deadlock_is_tried_again_and_told_when_it_does_not_end() {
    let lost = || Answer::Error(vec![], 1205, 13, "chosen as the deadlock victim");
    let mut answers = vec![lost(), lost(), Answer::set(partitions_set())];
    answers.extend([lost(), lost(), lost()]);
    let (mock, store) = scripted(answers).await;
    assert_eq!(list(&store).await.expect("the third time"), [p(0, 1)]);
    let error = list(&store).await.expect_err("it does not end");
    assert_tells(&error, ErrorKind::Transient, "1205");
    assert_eq!(mock.seen().len(), 2 + 3 + 3, "opening, and three tries each");
}

#[tokio::test]
async fn a_deadlock_in_the_callers_transaction_is_the_callers_to_begin_again() {
    let lost = Answer::Error(vec![], 1205, 13, "chosen as the deadlock victim");
    let (mock, store) = scripted(vec![lost]).await;
    let mut client = store.connect().await.expect("a connection");
    client.begin_transaction().await.expect("begun");
    let appended = store.outbox().append(&mut client, &[event("a", "1")]).await;
    assert_tells(&appended.expect_err("lost"), ErrorKind::Transient, "begin this one again");
    assert_eq!(mock.seen().len(), 3, "it was asked once");
}

#[tokio::test]
async fn a_statement_without_an_answer_ends_in_time() {
    let answers = vec![Answer::Silence, Answer::set(partitions_set())];
    let mut answers = answers.into_iter();
    let mock = Mock::start(move |request| {
        opening(request).unwrap_or_else(|| answers.next().expect("two calls"))
    })
    .await;
    let options = options(&mock).statement_timeout(Duration::from_millis(300));
    let store = SqlServerStore::open(options).await.expect("the store opens");
    let error = list(&store).await.expect_err("it has no answer");
    assert_tells(&error, ErrorKind::Transient, "no answer in time");
    assert_eq!(list(&store).await.expect("another connection"), [p(0, 1)]);
    assert_eq!(mock.logins().len(), 2, "the connection was not used again");
}

#[tokio::test]
async fn a_connection_that_the_server_closes_is_transient() {
    let (_mock, store) = scripted(vec![Answer::Close, Answer::set(partitions_set())]).await;
    let error = list(&store).await.expect_err("it is closed");
    assert_tells(&error, ErrorKind::Transient, "the connection failed");
    assert_eq!(list(&store).await.expect("another connection"), [p(0, 1)]);
}

#[tokio::test]
async fn a_dropped_call_costs_its_connection_and_nothing_else() {
    let late = Answer::After(Duration::from_secs(60), Box::new(Answer::set(long_set())));
    let (mock, store) = scripted(vec![late, Answer::set(partitions_set())]).await;
    let given_up = tokio::time::timeout(Duration::from_millis(200), list(&store)).await;
    assert!(given_up.is_err(), "there was no answer yet");
    assert_eq!(list(&store).await.expect("another connection"), [p(0, 1)]);
    assert_eq!(mock.logins().len(), 2);
}

#[tokio::test]
async fn a_refused_login_is_permanent_and_shows_no_password() {
    for (number, says) in [
        (18456, "refused the login"),
        (4060, "no database of that name"),
        (18488, "expired"),
        (40615, "firewall"),
    ] {
        let refuse = move |_: &_| Admission::Error(number, "Login failed for user 'relay'.");
        let mock = Mock::with(|_| Answer::nothing(), refuse, None).await;
        let error = SqlServerStore::open(options(&mock)).await.expect_err("refused");
        assert_tells(&error, ErrorKind::Permanent, says);
        let login = mock.logins().remove(0);
        assert_eq!((login.user.as_str(), login.password.as_str()), ("relay", "s3;cret"));
        assert_eq!((login.database.as_str(), login.application.as_str()), ("shop", "postrider"));
    }
}

#[tokio::test]
async fn a_server_that_restarts_is_transient_until_it_is_there_again() {
    let logins = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&logins);
    // The first login is the store's; the second and third meet a server that is not ready.
    let admit = move |_: &_| match counted.fetch_add(1, Ordering::SeqCst) {
        1 => Admission::Error(17187, "SQL Server is not ready to accept new client connections."),
        2 => Admission::Close,
        _ => Admission::Welcome,
    };
    let mut closed = false;
    let respond = move |request: &_| {
        opening(request).unwrap_or_else(|| match std::mem::replace(&mut closed, true) {
            false => Answer::Error(vec![], 6005, 20, "SHUTDOWN is in progress."),
            true => Answer::set(partitions_set()),
        })
    };
    let mock = Mock::with(respond, admit, None).await;
    let store = SqlServerStore::open(options(&mock)).await.expect("the store opens");
    for says in ["ended the session", "starts or stops", "the connection failed"] {
        let error = list(&store).await.expect_err("it restarts");
        assert_tells(&error, ErrorKind::Transient, says);
    }
    assert_eq!(list(&store).await.expect("it is there again"), [p(0, 1)]);
    assert_eq!(logins.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn nobody_who_listens_is_transient_and_named() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.local_addr().expect("it is bound").port()
    };
    let text = format!("Server=127.0.0.1,{port};User ID=relay;Password='s3;cret'");
    let error = SqlServerStore::open(SqlServerOptions::new(text)).await.expect_err("nobody");
    let says = format!("connect to 127.0.0.1:{port}: nobody listens there");
    assert_tells(&error, ErrorKind::Transient, &says);
}

#[tokio::test]
async fn a_server_that_says_nothing_to_a_login_is_given_up_in_time() {
    let mock = Mock::with(|_| Answer::nothing(), |_| Admission::Silence, None).await;
    let options = options(&mock).connect_timeout(Duration::from_millis(300));
    let error = SqlServerStore::open(options).await.expect_err("no answer");
    assert_tells(&error, ErrorKind::Transient, "no answer in time");
}

#[tokio::test]
async fn a_gateway_that_sends_the_connection_elsewhere_is_followed() {
    let behind = Mock::start(|request| opening(request).expect("it opens")).await;
    let to = behind.address();
    let admit = move |_: &_| Admission::Elsewhere(to);
    let gateway = Mock::with(|_| Answer::nothing(), admit, None).await;
    SqlServerStore::open(options(&gateway)).await.expect("behind the gateway");
    assert_eq!(behind.logins().len(), 1);
    assert!(gateway.seen().is_empty());
    let to = gateway.address();
    let circle = Mock::with(|_| Answer::nothing(), move |_| Admission::Elsewhere(to), None).await;
    drop(behind);
    let error = SqlServerStore::open(options(&circle)).await.expect_err("it goes nowhere");
    assert_eq!(error.kind(), ErrorKind::Transient);
}

#[tokio::test]
async fn every_error_of_the_server_has_its_kind() {
    let throttled = ErrorKind::Throttled { retry_after: None };
    for (number, class, kind, says) in [
        (1222, 16, ErrorKind::Transient, "a lock was not free"),
        (40613, 17, ErrorKind::Transient, "not available"),
        (40197, 17, ErrorKind::Transient, "fail-over"),
        (49918, 16, throttled, "busy"),
        (229, 14, ErrorKind::Permanent, "lacks a permission"),
        (208, 16, ErrorKind::Permanent, "postrider init"),
        (2812, 16, ErrorKind::Permanent, "postrider init"),
        (824, 24, ErrorKind::Corrupt, "damaged"),
        (77_103, 16, ErrorKind::Transient, "what the procedure says"),
        (77_111, 16, ErrorKind::Permanent, "what the procedure says"),
        (77_200, 16, ErrorKind::Fenced, "what the procedure says"),
    ] {
        let text = "changefeed: what the procedure says";
        let (_mock, store) = scripted(vec![Answer::Error(vec![], number, class, text)]).await;
        assert_tells(&list(&store).await.expect_err("it failed"), kind, says);
    }
}

#[tokio::test]
async fn an_error_behind_a_result_set_is_no_success() {
    let late = Answer::Error(vec![partitions_set()], 1222, 16, "Lock request time out");
    let (_mock, store) = scripted(vec![late]).await;
    assert_tells(&list(&store).await.expect_err("late"), ErrorKind::Transient, "a lock was not");
}

#[tokio::test]
async fn a_text_that_repeats_values_of_a_row_is_not_shown() {
    let duplicate = || {
        let text = "Violation of PRIMARY KEY constraint. The duplicate key value is (hunter2).";
        Answer::Error(vec![], 2627, 14, text)
    };
    let (_mock, store) = scripted(vec![duplicate(), duplicate(), duplicate()]).await;
    let error = list(&store).await.expect_err("it failed");
    assert_tells(&error, ErrorKind::Permanent, "2627");
    assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
}

#[tokio::test]
async fn a_stale_lease_is_fenced_and_an_event_twice_is_refused() {
    let taken = "changefeed: the lease of partition 0/8 under epoch 7 was taken over or released";
    let (_mock, store) = scripted(vec![Answer::Error(vec![], 77_200, 16, taken)]).await;
    let to = Position::START;
    let moved = store.advance(&lease(), &consumer("sink"), &to, Tally::default()).await;
    assert_tells(&moved.expect_err("stale"), ErrorKind::Fenced, "was taken over or released");
    let twice = Answer::Error(vec![], 2627, 14, "The duplicate key value is (…).");
    let (_mock, store) = scripted(vec![twice]).await;
    let mut client = store.connect().await.expect("a connection");
    let appended = store.outbox().append(&mut client, &[event("a", "1")]).await;
    assert_tells(&appended.expect_err("twice"), ErrorKind::Permanent, "appended before");
}

#[tokio::test]
async fn an_answer_of_another_shape_is_corrupt_and_no_panic() {
    let wrong = Set::of(&[("index_no", Type::NVarChar(10))]).row([crate::support::text("x")]);
    for set in [wrong, Set::numbers(&[3]), Set::numbers(&[5, 2]), Set::numbers(&[-1, 2])] {
        let (_mock, store) = scripted(vec![Answer::set(set)]).await;
        assert_eq!(list(&store).await.map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
    }
}

#[tokio::test]
async fn tables_of_another_version_are_refused_before_anything_is_done() {
    for (version, kind, says) in [
        (0, ErrorKind::Permanent, "run `postrider init` first"),
        (1, ErrorKind::Permanent, "run `postrider init` first"),
        (3, ErrorKind::Corrupt, "install the newer program"),
    ] {
        let mock = Mock::start(move |_| Answer::set(Set::numbers(&[version]))).await;
        let error = SqlServerStore::open(options(&mock)).await.expect_err("another version");
        assert_tells(&error, kind, says);
        assert_eq!(mock.seen().len(), 1);
    }
}

#[tokio::test]
async fn all_connections_busy_is_told_with_the_option_to_raise() {
    let mock = Mock::start(|request| opening(request).unwrap_or(Answer::Silence)).await;
    let options = options(&mock).connections(1).statement_timeout(Duration::from_millis(300));
    let store = SqlServerStore::open(options).await.expect("the store opens");
    let (first, second) = tokio::join!(list(&store), list(&store));
    assert_tells(&first.expect_err("no answer"), ErrorKind::Transient, "no answer in time");
    let says = "all 1 connections were busy; raise the option `connections`";
    assert_tells(&second.expect_err("it waited in vain"), ErrorKind::Transient, says);
}
