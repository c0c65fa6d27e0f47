//! Whether the suites of a real server are compiled.
//!
//! What lives here: one flag for tests, set where `POSTRIDER_TEST_SQLSERVER` names a server. What
//! does not: anything that the library is built by.
//! Invariant: where no server is named, one ignored test stands for the suites, so that a report
//! counts them as not run.

fn main() {
    println!("cargo::rerun-if-env-changed=POSTRIDER_TEST_SQLSERVER");
    println!("cargo::rustc-check-cfg=cfg(sqlserver_named)");
    if std::env::var_os("POSTRIDER_TEST_SQLSERVER").is_some_and(|text| !text.is_empty()) {
        println!("cargo::rustc-cfg=sqlserver_named");
    }
}
