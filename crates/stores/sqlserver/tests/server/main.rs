//! The shared suites on a real server: SQL Server, Azure SQL, or another that runs T-SQL.
//!
//! What lives here: the harness, on the database that `POSTRIDER_TEST_SQLSERVER` names by a
//! connection string; each store has a schema of its own there, which goes with it. What does not:
//! the procedures by themselves (`tests/sql`), the client's faults (`tests/it`).
//! Invariant: where no server is named, one test stands for all of these, counted as not run.

#[cfg(sqlserver_named)]
mod harness;

#[cfg(sqlserver_named)]
mod suites {
    use super::harness::SqlServerHarness;

    postrider_conformance::store_suite!(SqlServerHarness);
    postrider_conformance::source_suite!(
        postrider_conformance::source::FeedHarness<SqlServerHarness>
    );
}

#[cfg(not(sqlserver_named))]
#[test]
#[ignore = "POSTRIDER_TEST_SQLSERVER names no server: the suites of stores and sources are not run"]
fn the_suites_on_a_server() {
    panic!("set POSTRIDER_TEST_SQLSERVER to a connection string, and build again");
}
