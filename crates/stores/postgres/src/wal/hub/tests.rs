//! The hub by hand.
//!
//! What lives here: who holds the slot and the buffer, and who is left behind. What does not: a
//! server, or the task that reads from one. Invariant: every wait is on paused time or bounded.

use postrider_core::ConsumerName;

use super::*;

const SYSTEM: System = System { system: 7, timeline: 1, flushed: Lsn(100) };

/// An application deletes its rows as it likes.
const NOT_LASTING: Table = Table { exact: true, lasting: false };

fn consumer(name: &str) -> ConsumerName {
    ConsumerName::new(name).expect("valid")
}

fn place(lsn: u64) -> WalPlace {
    WalPlace { system: 7, timeline: 1, lsn: Lsn(lsn), ordinal: 0 }
}

fn chunk(end: u64, bytes: usize) -> Chunk {
    Chunk { events: Vec::new(), end: (Lsn(end), 0), bytes }
}

fn opened(start: u64) -> Hub {
    let hub = Hub::new(Some(HELD_FOR));
    assert!(!hub.met(&SYSTEM));
    hub.open(SYSTEM, Lsn(start), "p".to_owned(), Table::OWN, None);
    hub
}

/// Enters the stream, which begins with that.
fn entered(hub: &Hub, name: &str, at: u64) -> SeatView {
    let seat = hub.sit(&consumer(name), Lsn(at));
    assert_eq!(hub.enter(&seat, &place(at), true), Entrance::Stream);
    seat
}

#[test]
fn the_lowest_durable_place_of_all_is_acknowledged_and_nothing_beyond_what_was_sent() {
    let hub = opened(100);
    let (first, second) = (entered(&hub, "first", 100), entered(&hub, "second", 150));
    hub.received(Lsn(200));
    assert_eq!(hub.acknowledged(), Lsn(100));
    hub.acknowledge(&first, place(180));
    assert_eq!(hub.acknowledged(), Lsn(150));
    hub.acknowledge(&second, place(900));
    assert_eq!(hub.acknowledged(), Lsn(180));
    hub.acknowledge(&first, place(900));
    assert_eq!(hub.acknowledged(), Lsn(200), "this server has sent no more");
    hub.acknowledge(&first, place(120));
    assert_eq!(hub.acknowledged(), Lsn(200), "never back");
}

#[tokio::test(start_paused = true)]
async fn the_slot_is_held_for_one_that_went_away_but_not_for_ever() {
    let hub = opened(100);
    let (here, gone) = (entered(&hub, "here", 100), entered(&hub, "gone", 100));
    hub.expect(consumer("expected"), Lsn(130));
    hub.received(Lsn(500));
    hub.acknowledge(&here, place(400));
    hub.leave(&gone);
    assert_eq!(hub.acknowledged(), Lsn(100));
    tokio::time::advance(HELD_FOR).await;
    assert_eq!(hub.acknowledged(), Lsn(400));
}

/// Whoever came back too late would be given what the application has left in the table.
#[tokio::test(start_paused = true)]
async fn the_slot_is_held_for_ever_where_rows_need_not_stay() {
    let hub = Hub::new(Some(HELD_FOR));
    hub.open(SYSTEM, Lsn(100), "p".to_owned(), NOT_LASTING, None);
    let (here, gone) = (entered(&hub, "here", 100), entered(&hub, "gone", 100));
    hub.received(Lsn(500));
    hub.acknowledge(&here, place(400));
    hub.leave(&gone);
    tokio::time::advance(HELD_FOR * 2).await;
    assert_eq!(hub.acknowledged(), Lsn(100));
}

#[test]
fn a_later_reader_of_the_same_consumer_is_not_shown_out_by_the_earlier_one() {
    let hub = opened(100);
    let earlier = entered(&hub, "one", 100);
    let _later = entered(&hub, "one", 100);
    hub.leave(&earlier);
    hub.acknowledge(&earlier, place(300));
    assert!(hub.is_wanted());
    hub.received(Lsn(500));
    assert_eq!(hub.acknowledged(), Lsn(100));
}

#[tokio::test]
async fn a_chunk_is_kept_until_everybody_has_it() {
    let hub = opened(100);
    let (mut first, mut second) = (entered(&hub, "first", 100), entered(&hub, "second", 100));
    assert!(hub.may_stream());
    hub.push(chunk(110, 1));
    hub.push(chunk(120, 1));
    for end in [110, 120] {
        let chunk = hub.chunk(&mut first).await.expect("no trouble").expect("in the stream");
        assert_eq!(chunk.end.0, Lsn(end));
        hub.consumed(&first);
    }
    let third = hub.sit(&consumer("third"), Lsn(100));
    assert_eq!(hub.enter(&third, &place(100), true), Entrance::Stream, "all is still there");
    hub.leave(&third);
    let kept = hub.chunk(&mut second).await.expect("no trouble").expect("in the stream");
    assert_eq!(kept.end.0, Lsn(110));
    hub.consumed(&second);
    let third = hub.sit(&consumer("third"), Lsn(100));
    assert_eq!(hub.enter(&third, &place(100), true), Entrance::Again, "the first chunk is gone");
    assert!(hub.is_rewound());
}

#[tokio::test(start_paused = true)]
async fn who_holds_a_full_buffer_against_one_that_waits_is_left_behind() {
    let hub = opened(100);
    let (mut quick, mut slow) = (entered(&hub, "quick", 100), entered(&hub, "slow", 100));
    assert!(hub.may_stream());
    hub.push(chunk(110, BUFFER_BYTES));
    assert!(!hub.has_room());
    let _ = hub.chunk(&mut quick).await.expect("no trouble");
    hub.consumed(&quick);
    assert!(!hub.has_room(), "nobody waits yet");
    let waits = tokio::time::timeout(STARVED_AFTER * 2, hub.chunk(&mut quick)).await;
    assert!(waits.is_err());
    assert!(hub.has_room(), "the slow one holds it no more");
    let next = hub.chunk(&mut slow).await.expect("no trouble");
    assert!(next.is_none(), "it has to enter again");
    hub.push(chunk(110 + REWIND_BYTES, 1));
    assert_eq!(hub.enter(&slow, &place(100), true), Entrance::Behind, "others would wait long");
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_alone_is_waited_for() {
    let hub = opened(100);
    let _slow = entered(&hub, "slow", 100);
    assert!(hub.may_stream());
    hub.push(chunk(110, BUFFER_BYTES));
    tokio::time::advance(STARVED_AFTER * 10).await;
    assert!(!hub.has_room());
}

/// Its last wait is over with the chunk that came, though it was given up before that.
#[tokio::test(start_paused = true)]
async fn a_reader_that_waited_and_then_stays_away_keeps_its_place() {
    let hub = opened(100);
    let mut only = entered(&hub, "only", 100);
    assert!(hub.may_stream());
    let waits = tokio::time::timeout(STARVED_AFTER * 2, hub.chunk(&mut only)).await;
    assert!(waits.is_err());
    hub.push(chunk(110, BUFFER_BYTES));
    tokio::time::advance(STARVED_AFTER * 10).await;
    assert!(!hub.has_room());
    let next = hub.chunk(&mut only).await.expect("no trouble");
    assert!(next.is_some_and(|chunk| chunk.end.0 == Lsn(110)));
}

#[test]
fn a_place_that_the_slot_has_passed_is_behind() {
    let hub = opened(100);
    let seat = hub.sit(&consumer("one"), Lsn(99));
    assert_eq!(hub.enter(&seat, &place(99), true), Entrance::Behind);
}

#[tokio::test]
async fn the_stream_waits_while_the_snapshot_is_imported() {
    let hub = Hub::new(Some(HELD_FOR));
    let seam = Seam { consistent: Lsn(100), snapshot: "s".to_owned() };
    hub.open(SYSTEM, Lsn(100), "p".to_owned(), Table::OWN, Some(seam));
    let borrowed = hub.borrow_seam().expect("a new slot's");
    let _seat = entered(&hub, "one", 100);
    assert!(!hub.may_stream());
    drop(borrowed);
    assert!(hub.may_stream());
    assert!(hub.borrow_seam().is_none(), "gone with the stream's beginning");
}

#[tokio::test]
async fn readers_of_another_copy_are_fenced_and_new_ones_are_not() {
    let hub = opened(100);
    let mut old = entered(&hub, "one", 100);
    hub.received(Lsn(500));
    hub.close(None);
    assert!(hub.met(&System { flushed: Lsn(499), ..SYSTEM }), "an older state");
    let error = hub.footing(&mut old).await.expect_err("fenced");
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(hub.met(&System { timeline: 2, flushed: Lsn(499), ..SYSTEM }), "a promotion");
    assert!(!hub.met(&System { timeline: 2, flushed: Lsn(600), ..SYSTEM }));
    hub.open(SYSTEM, Lsn(100), "p".to_owned(), Table::OWN, None);
    let mut new = hub.sit(&consumer("one"), Lsn(100));
    assert!(hub.footing(&mut new).await.is_ok());
}

#[tokio::test]
async fn each_trouble_is_told_once_to_each_reader() {
    let hub = Hub::new(Some(HELD_FOR));
    let mut seat = hub.sit(&consumer("one"), Lsn(0));
    hub.close(Some(&Error::transient("first")));
    assert_eq!(hub.footing(&mut seat).await.expect_err("told").to_string(), "first");
    let next = tokio::time::timeout(Duration::from_millis(20), hub.footing(&mut seat)).await;
    assert!(next.is_err(), "it waits for news");
    hub.close(Some(&Error::transient("second")));
    assert_eq!(hub.footing(&mut seat).await.expect_err("told").to_string(), "second");
    hub.open(SYSTEM, Lsn(100), "p".to_owned(), Table::OWN, None);
    assert!(hub.footing(&mut seat).await.is_ok());
}

#[test]
fn a_checkpoint_written_while_the_database_was_asked_tells_of_no_other_copy() {
    let hub = opened(100);
    let seat = entered(&hub, "one", 100);
    hub.acknowledge(&seat, place(150));
    let heard = hub.durable();
    // The answer is on its way.
    hub.acknowledge(&seat, place(180));
    assert!(!hub.compare(&heard, &[(consumer("one"), place(150))]));
}

#[tokio::test(start_paused = true)]
async fn where_no_table_stands_in_the_slot_is_held_for_ever() {
    let hub = Hub::new(None);
    hub.open(SYSTEM, Lsn(100), "p".to_owned(), Table::OWN, None);
    let (here, gone) = (entered(&hub, "here", 100), entered(&hub, "gone", 100));
    hub.received(Lsn(500));
    hub.acknowledge(&here, place(400));
    hub.leave(&gone);
    tokio::time::advance(HELD_FOR * 100).await;
    assert_eq!(hub.acknowledged(), Lsn(100));
}

#[test]
fn a_checkpoint_that_is_gone_or_went_back_tells_of_another_copy() {
    let found = |at: u64| vec![(consumer("one"), place(at))];
    for copy in [found(150), Vec::new()] {
        let hub = opened(100);
        let mut seat = entered(&hub, "one", 100);
        assert!(!hub.compare(&hub.durable(), &[]), "nothing was heard to be durable");
        hub.acknowledge(&seat, place(180));
        assert!(!hub.compare(&hub.durable(), &found(180)));
        assert!(!hub.compare(&hub.durable(), &found(190)), "another one may have read on");
        assert!(hub.compare(&hub.durable(), &copy));
        let error = hub.state().check(&mut seat).expect_err("another copy");
        assert_eq!(error.kind(), ErrorKind::Fenced);
    }
}

#[test]
fn a_reader_whose_seat_was_taken_is_told() {
    let hub = opened(100);
    let mut earlier = entered(&hub, "one", 100);
    let mut later = entered(&hub, "one", 100);
    let error = hub.state().check(&mut earlier).expect_err("taken");
    assert_eq!(error.kind(), ErrorKind::Fenced);
    hub.state().check(&mut later).expect("in order");
}
