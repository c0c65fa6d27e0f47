//! Pruning, the horizon, and where reading begins at a time.

use super::world::{START, Session, hex, run_with_feed, ulid};

const NOON: &str = "2023-05-31T12:00:00";

async fn prune(session: &mut Session, arguments: &str) -> (i32, Option<[u8; 16]>) {
    let sets = session
        .run(&format!(
            "declare @deleted int, @horizon binary(16);
             exec changefeed.[prune_feed:myservice.MyEvent] {arguments},
                 @deleted = @deleted output, @horizon = @horizon output;
             select @deleted as deleted, @horizon as horizon;"
        ))
        .await;
    let rows: Vec<_> = sets.into_iter().flatten().collect();
    let row = rows.last().expect("a row");
    let horizon = row.get::<&[u8], _>(1).map(|_| ulid(row, 1));
    (row.get(0).expect("a number"), horizon)
}

async fn position_at(session: &mut Session, time: &str) -> [u8; 16] {
    let sets = session
        .run(&format!(
            "declare @c binary(16);
             exec changefeed.[position_at:myservice.MyEvent] 0, {time}, @c output; select @c;"
        ))
        .await;
    let rows: Vec<_> = sets.into_iter().flatten().collect();
    ulid(rows.last().expect("a row"), 0)
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn what_is_pruned_is_refused_by_name_and_the_start_is_the_oldest_left() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        for version in 1..=6 {
            session.enqueue(0, 1, version, &format!("2023-05-31T12:00:{version:02}")).await;
        }
        session.enqueue(1, 1, 100, NOON).await;
        let all = session.read_all(0, START).await;
        let other = session.read_all(1, START).await;

        // Not beyond the slowest consumer, and not what is young.
        let upto = hex(&all[3].ulid);
        let young = format!("0, {upto}, '2023-05-31T12:00:03'");
        assert_eq!(prune(&mut session, &young).await, (2, Some(all[1].ulid)));
        assert_eq!(
            prune(&mut session, &format!("0, {upto}, null, 1")).await,
            (1, Some(all[2].ulid))
        );
        assert_eq!(prune(&mut session, &format!("0, {upto}")).await, (1, Some(all[3].ulid)));
        assert_eq!(prune(&mut session, &format!("0, {upto}")).await, (0, Some(all[3].ulid)));

        assert_eq!(session.read_all(0, START).await, all[4..]);
        assert_eq!(session.read_all(0, all[3].ulid).await, all[4..], "the horizon itself");
        let refusal = session.try_read(0, all[1].ulid, 10).await.expect_err("below the horizon");
        assert_eq!(refusal.number, 77112);
        let named = "select [changefeed].[ulid_text](horizon)
            from changefeed.[state:myservice.MyEvent] where shard_id = 0";
        let rows = session.run(named).await;
        let horizon: &str = rows[0][0].get(0).expect("a horizon");
        assert!(refusal.text.contains(horizon), "{refusal:?}");
        assert_eq!(session.read_all(1, START).await, other, "another shard is untouched");

        // All of it gone: the head is the horizon, and what comes lies behind it.
        prune(&mut session, &format!("0, {}", hex(&all[5].ulid))).await;
        assert!(session.read(0, all[5].ulid, 10).await.is_empty());
        session.enqueue(0, 1, 7, NOON).await;
        let next = session.read(0, all[5].ulid, 10).await;
        assert!(next.len() == 1 && next[0].ulid > all[5].ulid);
    });
}

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn reading_begins_at_a_time() {
    run_with_feed(|world| async move {
        let mut session = world.session().await;
        assert_eq!(position_at(&mut session, "null").await, START);
        for version in 1..=4 {
            session.enqueue(0, 1, version, &format!("2023-05-31T12:00:{version:02}")).await;
        }
        let all = session.read_all(0, START).await;
        let third = position_at(&mut session, "'2023-05-31T12:00:03'").await;
        assert_eq!(session.read_all(0, third).await, all[2..]);
        assert_eq!(position_at(&mut session, "null").await, all[3].ulid);
        assert_eq!(position_at(&mut session, "'2100-01-01'").await, all[3].ulid);
        prune(&mut session, &format!("0, {}", hex(&all[1].ulid))).await;
        let early = "declare @c binary(16);
            exec changefeed.[position_at:myservice.MyEvent] 0, '2023-05-31T12:00:01', @c output;";
        session.refused(early, 77112).await;
    });
}
