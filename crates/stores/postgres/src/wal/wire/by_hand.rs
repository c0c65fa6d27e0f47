//! Replication against a server whose every byte is made here.
//!
//! What lives here: what no real server can be brought to do on demand: a peer that does not read,
//! one that hangs up in the middle. What does not: real servers (`tests.rs`).
//! Invariant: nothing waits for a time; what must not block is polled once.

use bytes::{Buf, BytesMut};
use futures_util::FutureExt;
use postrider_core::ErrorKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;
use crate::error::code_of;

const STATUS_BYTES: usize = 39;

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).expect("short");
    [&[tag][..], &length.to_be_bytes(), body].concat()
}

fn error(code: &str) -> Vec<u8> {
    message(frames::ERROR, format!("SFATAL\0C{code}\0Mas it says\0\0").as_bytes())
}

fn keepalive(end: u64) -> Vec<u8> {
    let body = [&b"k"[..], &end.to_be_bytes(), &[0; 9]].concat();
    message(frames::COPY_DATA, &body)
}

/// A stream that has begun, and the server's end of it.
async fn streaming(room: usize) -> (Wire<DuplexStream>, DuplexStream) {
    let (near, mut far) = duplex(room);
    let mut wire = Wire::new(Frames::new(near));
    let answer = message(frames::COPY_BOTH, &[0, 0, 0]);
    let begin = async {
        far.write_all(&answer).await.expect("room");
        let mut asked = vec![0; 10];
        far.read_exact(&mut asked).await.expect("a command");
    };
    let (started, ()) = tokio::join!(wire.start("START"), begin);
    started.expect("a stream");
    let mut rest = BytesMut::new();
    while far.read_buf(&mut rest).now_or_never().is_some() {}
    (wire, far)
}

/// The places that the statuses in these bytes tell, and whether they ask for an answer.
fn told(mut bytes: &[u8]) -> Vec<(u64, bool)> {
    let mut found = Vec::new();
    while bytes.has_remaining() {
        assert_eq!((bytes.get_u8(), bytes.get_u32(), bytes.get_u8()), (b'd', 38, b'r'));
        let (write, flush, apply) = (bytes.get_u64(), bytes.get_u64(), bytes.get_u64());
        assert!(write == flush && flush == apply);
        bytes.advance(8);
        found.push((flush, bytes.get_u8() == 1));
    }
    found
}

#[tokio::test]
async fn a_server_that_does_not_read_blocks_no_status_and_gets_the_newest() {
    let (mut wire, mut far) = streaming(16).await;
    for place in 1..=10_000 {
        wire.status(Lsn(place), place == 5_000)
            .now_or_never()
            .expect("it never waits")
            .expect("sent or kept");
        assert!(wire.frames.output().len() <= STATUS_BYTES, "one at a time");
    }
    let mut all = BytesMut::new();
    while all.len() < 2 * STATUS_BYTES {
        far.read_buf(&mut all).now_or_never().expect("more to read").expect("open");
        let sent = wire.status(Lsn(10_000), false).now_or_never().expect("it never waits");
        sent.expect("sent or kept");
    }
    let told = told(&all[..2 * STATUS_BYTES]);
    assert_eq!(told, [(1, false), (10_000, true)], "of those in between only the question stays");
}

#[tokio::test]
async fn waiting_for_the_next_also_sends() {
    let (mut wire, mut far) = streaming(16).await;
    wire.status(Lsn(7), false).await.expect("kept");
    let serve = async {
        let mut status = [0; STATUS_BYTES];
        far.read_exact(&mut status).await.expect("a status");
        assert_eq!(told(&status), [(7, false)]);
        far.write_all(&keepalive(9)).await.expect("open");
    };
    let (next, ()) = tokio::join!(wire.next(), serve);
    assert_eq!(next.expect("a frame"), Frame::Keepalive { end: Lsn(9), reply: false });
}

#[tokio::test]
async fn what_has_been_read_is_had_without_a_wait() {
    let (mut wire, mut far) = streaming(1 << 10).await;
    assert_eq!(wire.buffered().expect("nothing"), None);
    let notice = message(frames::NOTICE, b"Mhello\0\0");
    let all = [keepalive(1), notice.clone(), keepalive(2), notice].concat();
    far.write_all(&all).await.expect("room");
    let next = wire.next().await.expect("a frame");
    assert_eq!(next, Frame::Keepalive { end: Lsn(1), reply: false });
    let next = wire.buffered().expect("a frame");
    assert_eq!(next, Some(Frame::Keepalive { end: Lsn(2), reply: false }));
    assert_eq!(wire.buffered().expect("nothing"), None);
}

#[tokio::test]
async fn a_stream_ends_once_and_for_all() {
    for last in [message(frames::COPY_DONE, b""), message(frames::COMMAND_COMPLETE, b"COPY 0\0")] {
        let (mut wire, mut far) = streaming(1 << 10).await;
        far.write_all(&[keepalive(1), last].concat()).await.expect("room");
        wire.next().await.expect("a frame");
        for _ in 0..2 {
            assert_eq!(wire.next().await.expect("an end"), Frame::End);
        }
        assert!(wire.query("SELECT 1").await.is_err(), "nothing is asked any more");
        wire.finish(Lsn(1)).await.expect("there is nothing to end");
    }
}

#[tokio::test]
async fn a_servers_last_word_counts_and_not_that_it_hung_up() {
    let (mut wire, mut far) = streaming(1 << 10).await;
    far.write_all(&error("57P01")).await.expect("room");
    drop(far);
    let said = wire.next().await.expect_err("an error");
    assert_eq!((said.kind(), code_of(&said)), (ErrorKind::Transient, Some("57P01")));

    let (near, mut far) = duplex(1 << 10);
    let mut wire = Wire::new(Frames::new(near));
    far.write_all(&error("57P03")).await.expect("room");
    let mut asked = [0; 14];
    let ask = wire.query("SELECT 1");
    let (said, _) = tokio::join!(ask, async {
        far.read_exact(&mut asked).await.expect("a statement");
        drop(far);
    });
    assert_eq!(code_of(&said.expect_err("an error")), Some("57P03"));
}

#[tokio::test]
async fn a_connection_that_fails_is_transient_and_nonsense_is_corrupt() {
    let (mut wire, far) = streaming(1 << 10).await;
    drop(far);
    assert_eq!(wire.next().await.expect_err("an error").kind(), ErrorKind::Transient);
    for nonsense in [message(b'?', b""), message(frames::COPY_DATA, b"?"), vec![b'd'; 9]] {
        let (mut wire, mut far) = streaming(1 << 10).await;
        far.write_all(&nonsense).await.expect("room");
        assert_eq!(wire.next().await.expect_err("an error").kind(), ErrorKind::Corrupt);
    }
}

/// What was under way is read to its end, and the last status comes before the end of the copy.
#[tokio::test]
async fn an_end_is_said_and_heard() {
    let (mut wire, mut far) = streaming(64).await;
    wire.status(Lsn(1), false).await.expect("sent");
    let serve = async {
        for place in 0..100 {
            far.write_all(&keepalive(place)).await.expect("read");
        }
        let mut statuses = [0; 2 * STATUS_BYTES];
        far.read_exact(&mut statuses).await.expect("statuses");
        assert_eq!(told(&statuses), [(1, false), (5, false)]);
        let mut done = [0; 5];
        far.read_exact(&mut done).await.expect("an end of the copy");
        assert_eq!(done, [b'c', 0, 0, 0, 4]);
        for last in [(b'c', &b""[..]), (b'C', b"COPY 0\0"), (b'Z', b"I")] {
            far.write_all(&message(last.0, last.1)).await.expect("read");
        }
        far.read_exact(&mut done).await.expect("a farewell");
        assert_eq!(done, [b'X', 0, 0, 0, 4]);
    };
    let (ended, ()) = tokio::join!(wire.finish(Lsn(5)), serve);
    ended.expect("an end");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_an_end_is_left() {
    let (wire, far) = streaming(64).await;
    let error = wire.finish(Lsn(5)).await.expect_err("nobody answers");
    assert!(error.kind() == ErrorKind::Transient && error.to_string().contains("in time"));
    drop(far);
}

#[test]
fn commands_quote_names_and_know_versions() {
    let kept = SlotKind::Permanent { failover: true };
    for (kind, version, says) in [
        (kept, 140_005, "\"a\"\"b\" LOGICAL \"pgoutput\" EXPORT_SNAPSHOT"),
        (SlotKind::Temporary, 140_005, "\"a\"\"b\" TEMPORARY LOGICAL \"pgoutput\" EXPORT_SNAPSHOT"),
        (kept, 160_000, "\"a\"\"b\" LOGICAL \"pgoutput\" (SNAPSHOT 'export')"),
        (kept, 170_000, "\"a\"\"b\" LOGICAL \"pgoutput\" (SNAPSHOT 'export', FAILOVER)"),
        (SlotKind::Permanent { failover: false }, 180_000, "\"pgoutput\" (SNAPSHOT 'export')"),
        (SlotKind::Temporary, 180_000, "TEMPORARY LOGICAL \"pgoutput\" (SNAPSHOT 'export')"),
    ] {
        let command = creation("a\"b", kind, version);
        assert!(command.ends_with(says), "{command}");
    }
    let options = [("proto_version", "1".to_owned()), ("publication_names", "\"it's\"".to_owned())];
    assert_eq!(
        beginning("slot", Lsn(0x16_b374_d848), &options),
        "START_REPLICATION SLOT \"slot\" LOGICAL 16/B374D848 (\"proto_version\" '1', \
         \"publication_names\" '\"it''s\"')"
    );
}
