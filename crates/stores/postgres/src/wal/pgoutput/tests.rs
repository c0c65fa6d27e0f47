//! Messages made by hand, and what becomes of them when they are cut or changed.
//!
//! What lives here: one sample of each kind, as the documentation of PostgreSQL lays them out; and
//! random changes of them. What does not: real servers (`wire/tests.rs`).
//! Invariant: bytes that are not as they should be are `Corrupt`, and never a panic.

use bytes::{BufMut, BytesMut};
use postrider_core::ErrorKind;
use proptest::prelude::*;

use super::*;
use crate::wal::fuzzing;
use crate::wal::tuple::Value;

struct Sample {
    streamed: bool,
    bytes: Bytes,
    means: Message,
}

fn bytes(put: impl FnOnce(&mut BytesMut)) -> Bytes {
    let mut made = BytesMut::new();
    put(&mut made);
    made.freeze()
}

/// One of each kind of column.
const ROW: &[u8] = b"\0\x05nut\0\0\0\x03one\
    b\0\0\0\x08\0\0\0\0\0\0\0\x07t\0\0\0\0";
const VALUES: [Value<'static>; 5] = [
    Value::Null,
    Value::Unchanged,
    Value::Text(b"one"),
    Value::Binary(b"\0\0\0\0\0\0\0\x07"),
    Value::Text(b""),
];

fn row() -> Tuple {
    Tuple::new(5, Bytes::from_static(ROW))
}

/// The changes, which are laid out in two ways.
fn changes(streamed: bool) -> Vec<Sample> {
    let xid = streamed.then_some(700);
    let sample = |tag: u8, means: Message, put: &dyn Fn(&mut BytesMut)| {
        let bytes = bytes(|made| {
            made.put_u8(tag);
            if streamed {
                made.put_u32(700);
            }
            put(made);
        });
        Sample { streamed, bytes, means }
    };
    let change = |kind: &'static [u8]| {
        move |made: &mut BytesMut| {
            made.put_u32(16_385);
            for part in kind {
                made.put_u8(*part);
                made.put_slice(ROW);
            }
        }
    };
    let (relation, new) = (16_385, row());
    let update = Message::Update { xid, relation, new: new.clone() };
    let columns = vec![
        Column { name: "id".to_owned(), type_id: 20, modifier: -1, key: true },
        Column { name: "größe".to_owned(), type_id: 1043, modifier: 84, key: false },
    ];
    let table = Relation {
        id: 16_385,
        namespace: "shop".to_owned(),
        name: "outbox".to_owned(),
        replica_identity: b'd',
        columns,
    };
    let logical = Message::Logical {
        xid,
        transactional: true,
        lsn: Lsn(77),
        prefix: "pre".to_owned(),
        content: Bytes::from_static(b"con\0tent"),
    };
    vec![
        sample(b'I', Message::Insert { xid, relation, new }, &change(b"N")),
        sample(b'U', update.clone(), &change(b"N")),
        sample(b'U', update.clone(), &change(b"KN")),
        sample(b'U', update, &change(b"ON")),
        sample(b'D', Message::Delete { xid, relation }, &change(b"K")),
        sample(b'D', Message::Delete { xid, relation }, &change(b"O")),
        sample(b'R', Message::Relation { xid, relation: table }, &|made| {
            made.put_u32(16_385);
            made.put_slice(b"shop\0outbox\0d\0\x02\x01id\0");
            made.put_slice(&[0, 0, 0, 20, 0xff, 0xff, 0xff, 0xff]);
            made.put_slice("\0größe\0".as_bytes());
            made.put_slice(&[0, 0, 4, 0x13, 0, 0, 0, 84]);
        }),
        sample(b'Y', Message::Type, &|made| made.put_slice(b"\0\0@\0public\0mood\0")),
        sample(b'T', Message::Truncate, &|made| {
            made.put_slice(b"\0\0\0\x02\x03\0\0@\x01\0\0@\x02")
        }),
        sample(b'M', logical, &|made| {
            made.put_u8(1);
            made.put_u64(77);
            made.put_slice(b"pre\0\0\0\0\x08con\0tent");
        }),
    ]
}

fn others() -> Vec<Sample> {
    let (commit, end, at) = (Lsn(0x16_b374_d848), Lsn(0x16_b374_d878), -7);
    let sample = |means: Message, put: &dyn Fn(&mut BytesMut)| Sample {
        streamed: false,
        bytes: bytes(put),
        means,
    };
    let ends = |made: &mut BytesMut| {
        made.put_u8(0);
        made.put_u64(commit.0);
        made.put_u64(end.0);
        made.put_i64(at);
    };
    let abort = Message::StreamAbort { xid: 700, subxid: 701 };
    vec![
        sample(Message::Begin { commit, at, xid: 700 }, &|made| {
            made.put_u8(b'B');
            made.put_u64(commit.0);
            made.put_i64(at);
            made.put_u32(700);
        }),
        sample(Message::Commit { commit, end, at }, &|made| {
            made.put_u8(b'C');
            ends(made);
        }),
        sample(Message::Origin { commit, name: "far".to_owned() }, &|made| {
            made.put_u8(b'O');
            made.put_u64(commit.0);
            made.put_slice(b"far\0");
        }),
        sample(Message::StreamStart { xid: 700, first: true }, &|made| {
            made.put_slice(b"S\0\0\x02\xbc\x01");
        }),
        sample(Message::StreamStop, &|made| made.put_u8(b'E')),
        sample(Message::StreamCommit { xid: 700, commit, end, at }, &|made| {
            made.put_slice(b"c\0\0\x02\xbc");
            ends(made);
        }),
        sample(abort.clone(), &|made| made.put_slice(b"A\0\0\x02\xbc\0\0\x02\xbd")),
        sample(abort, &|made| {
            made.put_slice(b"A\0\0\x02\xbc\0\0\x02\xbd");
            made.put_u64(commit.0);
            made.put_i64(at);
        }),
    ]
}

fn samples() -> Vec<Sample> {
    [others(), changes(false), changes(true)].into_iter().flatten().collect()
}

#[test]
fn each_message_is_what_it_says() {
    for Sample { streamed, bytes, means } in samples() {
        assert_eq!(decode(bytes.clone(), streamed).expect("a message"), means, "{bytes:?}");
    }
    for tag in [b'b', b'P', b'K', b'r', b'p'] {
        let bytes = Bytes::from(vec![tag, 1, 2, 3]);
        assert_eq!(decode(bytes, false).expect("a message"), Message::TwoPhase(tag));
    }
    for tag in [0, b'X', b'i', 0xff] {
        let bytes = Bytes::from(vec![tag, 1, 2, 3]);
        assert_eq!(decode(bytes, true).expect("a message"), Message::Unknown(tag));
    }
}

#[test]
fn a_row_has_its_columns_without_a_copy() {
    for Sample { streamed, bytes, .. } in samples() {
        let message = decode(bytes.clone(), streamed).expect("a message");
        let (Message::Insert { new, .. } | Message::Update { new, .. }) = message else { continue };
        assert_eq!(new.values().collect::<Vec<_>>(), VALUES);
        assert_eq!(new.len(), VALUES.len());
        let Some(Value::Text(one)) = new.values().nth(2) else { panic!("a text") };
        let within = bytes.as_ptr_range();
        assert!(within.contains(&one.as_ptr()) && new.share(one).as_ptr() == one.as_ptr());
    }
}

#[test]
fn what_is_cut_short_or_too_long_is_corrupt_and_is_not_repeated() {
    // The short form of an abort is the long one's beginning; an abort may end there.
    let fits = |bytes: &[u8]| bytes[0] == b'A' && bytes.len() == 9;
    let refused = |bytes: Bytes, streamed| {
        let error = decode(bytes.clone(), streamed).expect_err("not a message");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{bytes:?}");
        let text = error.to_string();
        assert!(!text.contains("one") && !text.contains("tent"), "{text}");
        text
    };
    for Sample { streamed, bytes, .. } in samples() {
        for length in (1..bytes.len()).filter(|length| !fits(&bytes[..*length])) {
            let text = refused(bytes.slice(..length), streamed);
            let tag = bytes[0];
            assert!(text.contains(&format!("tag {tag:#04x} and {length} bytes")), "{text}");
            assert!(text.contains("at offset "), "{text}");
        }
        refused([&bytes[..], &[0]].concat().into(), streamed);
    }
    refused(Bytes::new(), false);
}

#[test]
fn announced_counts_and_lengths_are_not_believed() {
    for (start, says) in [
        (&b"I\0\0\0\x01N\xff\xff"[..], "offset 8"),
        (b"I\0\0\0\x01N\0\x01t\xff\xff\xff\xff", "offset 8"),
        (b"I\0\0\0\x01N\0\x02nx", "offset 9"),
        (b"I\0\0\0\x01O\0\0", "offset 6"),
        (b"T\xff\xff\xff\xff\0", "offset 6"),
        (b"M\x01\0\0\0\0\0\0\0\x01p\0\xff\xff\xff\xff", "offset 16"),
        (b"R\0\0\0\x01a\0b\0d\xff\xff", "offset 12"),
        (b"R\0\0\0\x01\xff\xfe\0b\0d\0\0", "offset 5"),
    ] {
        let error = decode(Bytes::from_static(start), false).expect_err("not a message");
        assert!(error.kind() == ErrorKind::Corrupt, "{error:?}");
        assert!(error.to_string().contains(says), "{start:?}: {error:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn random_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        fuzzing::pgoutput(&bytes);
        fuzzing::frames(&bytes);
    }

    #[test]
    fn changed_messages_do_no_harm(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let samples = samples();
        let sample = which.get(&samples);
        let mut bytes = [&[u8::from(sample.streamed)][..], &sample.bytes].concat();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if !whole {
            bytes.truncate(cut.index(bytes.len()));
        }
        fuzzing::pgoutput(&bytes);
    }
}
