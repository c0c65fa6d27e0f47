//! A database in which nothing happens.

use crate::support::on_both_versions;
use postrider_servers::postgres::{Version, shared};

/// The sequence of a fresh outbox was never drawn from; that is no news.
async fn a_fresh_outbox_makes_no_ticks_while_nothing_happens(version: Version) {
    let database = shared(version).expect("a server");
    let options = postrider_store_postgres::PostgresOptions::new(database.url());
    drop(postrider_store_postgres::PostgresStore::open(options).await.expect("open"));
    let tick = "select outcome from postrider.tick('outbox', min_interval_ms => 0)";
    for _ in 0..3 {
        assert_eq!(database.psql(tick).expect("called"), "quiet");
    }
    database.psql("select postrider.append('k', 't', 'T', '{}')").expect("appended");
    assert_eq!(database.psql(tick).expect("called"), "made");
    assert_eq!(database.psql(tick).expect("called"), "quiet");
}

on_both_versions! { a_fresh_outbox_makes_no_ticks_while_nothing_happens }
