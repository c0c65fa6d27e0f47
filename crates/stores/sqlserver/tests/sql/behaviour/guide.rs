//! The guide, block by block, as a reader runs it.

use super::world::run;
use crate::text::{FILES, blocks};

#[test]
#[cfg_attr(not(sqlserver_named), ignore = "POSTRIDER_TEST_SQLSERVER names no server")]
fn every_block_of_the_guide_runs_in_its_order() {
    run(|world| async move {
        let page = include_str!("../../../../../../docs/stores/sqlserver.md");
        let mut session = world.session().await;
        let mut relay = false;
        for (tag, block) in blocks(page) {
            if tag == "not-on-babelfish" && world.babelfish() {
                continue;
            }
            if tag == "relay" && !relay {
                world.migrate(FILES[1].1).await;
                relay = true;
            }
            session.run(&block).await;
        }
        let read = "select count(*) from changefeed.[feed:myservice.MyEvent]";
        assert_eq!(session.number(read).await, 1, "two were read, and the old one pruned");
        let outbox = "select count(*) from changefeed.[outbox] ";
        let feed = "select count(*) from changefeed.[feed:outbox]";
        assert_eq!(session.number(outbox).await + session.number(feed).await, 1);
        session.run("drop role myservice_app").await;
    });
}
