//! Scenario 1: ULIDs, byte for byte.

use super::world::{Session, hex, run, ulid};

/// Allocates, from a state that may be none; the first ULID, its text and the next counter.
async fn allocate(
    session: &mut Session,
    time: &str,
    count: i64,
    random: &str,
    state: Option<(i64, i64)>,
) -> ([u8; 16], String, (i64, i64)) {
    let (high, low) = match state {
        Some((high, low)) => (high.to_string(), low.to_string()),
        None => ("null".to_owned(), "null".to_owned()),
    };
    let batch = format!(
        "declare @time bigint = [changefeed].[time_ms]('{time}'), @random binary(10) = {random};
         declare @old_high bigint = {high}, @old_low bigint = {low}, @high bigint, @low bigint;
         exec [changefeed].[allocate_ulids] @time, {count}, @random, @old_high, @old_low,
             @high output, @low output;
         select [changefeed].[join_ulid](@high, @low) as ulid,
             [changefeed].[ulid_text]([changefeed].[join_ulid](@high, @low)) as text,
             @high as high, @low + {count} as low;"
    );
    let sets = session.run(&batch).await;
    let row = &sets[0][0];
    let text: &str = row.get(1).expect("a text");
    let state = (row.get(2).expect("a number"), row.get(3).expect("a number"));
    (ulid(row, 0), text.to_owned(), state)
}

const ONES: &str = "0xFFFFFFFFFFFFFFFFFFFF";
const ZEROS: &str = "0x00000000000000000000";
const TIME: &str = "2023-01-02T15:04:05";

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn the_vectors_come_out_byte_for_byte() {
    run(|world| async move {
        let mut session = world.session().await;
        let (first, text, state) = allocate(&mut session, TIME, 100, ONES, None).await;
        assert_eq!(hex(&first), "0x01857302DA88FFFFBFFFFFFFFFFFFFFF");
        assert_eq!(text, "01GNSG5PM8ZZZVZZZZZZZZZZZZ");
        let (_, text, _) = allocate(&mut session, TIME, 1, ZEROS, Some(state)).await;
        assert_eq!(text, "01GNSG5PM8ZZZW000000000033");
        let sets = session
            .run(&format!(
                "select [changefeed].[ulid_text]([changefeed].[ulid_from_time]('{TIME}')),
                 convert(varchar(30), [changefeed].[ulid_time](
                     [changefeed].[ulid_from_time]('{TIME}')), 126)"
            ))
            .await;
        assert_eq!(sets[0][0].get::<&str, _>(0), Some("01GNSG5PM80000000000000000"));
        assert!(sets[0][0].get::<&str, _>(1).is_some_and(|time| time.starts_with(TIME)));
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn an_equal_or_earlier_time_goes_on_counting_and_a_newer_one_begins_anew() {
    run(|world| async move {
        let mut session = world.session().await;
        let random = "0x0102030405060708090A";
        let (first, _, state) = allocate(&mut session, TIME, 5, random, None).await;
        assert_eq!(hex(&first), "0x01857302DA880102030405060708090A");
        for time in [TIME, "2022-01-01T00:00:00"] {
            let (next, _, _) = allocate(&mut session, time, 1, ONES, Some(state)).await;
            assert_eq!(hex(&next), "0x01857302DA880102030405060708090F");
        }
        let newer = "2023-01-02T15:04:05.001";
        let (next, _, _) = allocate(&mut session, newer, 1, ONES, Some(state)).await;
        assert_eq!(hex(&next), "0x01857302DA89FFFFBFFFFFFFFFFFFFFF");
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn a_counter_near_its_limit_is_refused_and_negative_ones_come_after_positive_ones() {
    run(|world| async move {
        let mut session = world.session().await;
        let high = 0x0185_7302_DA88_FFFF_i64;
        for low in [i64::MAX, -1] {
            let batch = format!(
                "declare @high bigint, @low bigint, @time bigint = 1;
                 exec [changefeed].[allocate_ulids] @time, 2, {ZEROS}, {high}, {low},
                     @high output, @low output;"
            );
            session.refused(&batch, 77109).await;
            let newer = batch.replace("@time bigint = 1", "@time bigint = 99999999999999");
            session.run(&newer).await;
        }
        let order = format!(
            "select x.n from (
                 select 1 as n, [changefeed].[join_ulid]({high}, 0) as u union all
                 select 2, [changefeed].[join_ulid]({high}, 9223372036854775807) union all
                 select 3, [changefeed].[join_ulid]({high}, -9223372036854775808) union all
                 select 4, [changefeed].[join_ulid]({high}, -1) union all
                 select 5, [changefeed].[join_ulid]({high} + 1, 0)) as x order by x.u"
        );
        let sets = session.run(&order).await;
        let numbers: Vec<i32> = sets[0].iter().filter_map(|row| row.get(0)).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5]);
    });
}
