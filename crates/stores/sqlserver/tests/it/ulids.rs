//! The vectors of ULIDs, byte for byte, through the client: what goes into a parameter and what
//! comes out of a column is what `docs/design/sqlserver-feed.md` says that the procedures make.

use postrider_core::ulid::{Ulid, UlidAllocator};
use postrider_core::{Feed, Position, Timestamp};

use crate::support::{LIMIT, bytes, int, p, scripted};
use crate::tds::wire::{Type, Value};
use crate::tds::{Answer, Set};

/// 2023-01-02T15:04:05Z.
const TIME: Timestamp = Timestamp::from_millis(1_672_671_845_000);
const FIRST: u128 = 0x0185_7302_DA88_FFFF_BFFF_FFFF_FFFF_FFFF;

/// The two halves as `[state:T]` keeps them, joined as `join_ulid` does.
fn joined(high: i64, low: i64) -> [u8; 16] {
    let mut whole = [0; 16];
    whole[..8].copy_from_slice(&high.to_be_bytes());
    whole[8..].copy_from_slice(&low.to_be_bytes());
    whole
}

#[test]
fn the_first_allocation_and_the_hundredth_have_the_vectors_bytes() {
    let mut state = UlidAllocator::default();
    let first = state.allocate(TIME, 100, [0xff; 10]);
    assert_eq!(first.to_bytes(), FIRST.to_be_bytes());
    assert_eq!(first.to_string(), "01GNSG5PM8ZZZVZZZZZZZZZZZZ");
    let next = state.allocate(TIME, 1, [0; 10]);
    assert_eq!(next.to_string(), "01GNSG5PM8ZZZW000000000033");
    // As T-SQL counts: in a signed 64-bit number, from ten random bytes with bit 62 of the low half
    // cleared.
    let high = i64::try_from(TIME.as_millis()).expect("a time") * 65_536 + 0xffff;
    let low = i64::from_be_bytes([0xff; 8]) & 0xBFFF_FFFF_FFFF_FFFF_u64.cast_signed();
    assert_eq!(joined(high, low), first.to_bytes());
    assert_eq!(joined(high, low + 100), next.to_bytes());
}

/// The counter begins with bit 62 cleared and never passes from negative to positive, for 77109
/// comes first.
#[test]
fn bytes_grow_with_the_signed_counter() {
    for start in [i64::MIN, i64::MIN / 2 - 1_000, 0, i64::MAX / 2 - 1_000] {
        let lows: Vec<[u8; 16]> = (0..1_000).map(|n| joined(7, start + n)).collect();
        assert!(lows.is_sorted_by(|a, b| a < b), "{start}");
    }
    assert!(joined(7, i64::MAX) < joined(7, i64::MIN), "a negative low half is the larger one");
    assert!(joined(7, -1) < joined(8, 0), "and the high half beats it");
}

#[tokio::test]
async fn a_position_goes_there_and_comes_back_byte_for_byte() {
    let place = |ulid: [u8; 16]| {
        let set = Set::of(&[("number", Type::Int), ("position", Type::Binary(16))]);
        Answer::set(set.row([int(0), bytes(&ulid)]))
    };
    let vectors = [
        FIRST.to_be_bytes(),
        Ulid::from_time(TIME).to_bytes(),
        [0; 16],
        [0xff; 16],
        joined(1 << 40, -5),
    ];
    let (_mock, store) = scripted(vectors.map(place).to_vec()).await;
    for vector in vectors {
        let head = store.head(&p(0, 1)).await.expect("a head");
        assert_eq!(head.as_bytes(), vector);
        assert_eq!(Position::parse(&head.to_string()).expect("its text"), head);
    }
    let refused = "changefeed: refused";
    let answers = vectors.map(|_| Answer::Error(vec![], 77_111, 16, refused)).to_vec();
    let (mock, store) = scripted(answers).await;
    for vector in vectors {
        let after = Position::from_bytes(&vector).expect("short");
        let read = Feed::read(&store, &p(0, 1), &after, LIMIT).await;
        assert!(read.is_err());
        let sent = mock.seen().last().expect("asked").values()[2].clone();
        assert_eq!(sent, Value::Bytes(vector.to_vec()));
    }
}
