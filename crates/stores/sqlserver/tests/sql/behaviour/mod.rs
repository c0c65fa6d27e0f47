//! What the procedures do, on the server that `POSTRIDER_TEST_SQLSERVER` names. Each test makes a
//! schema of its own there and takes it away again. Where no server is named each of them is
//! counted as ignored, and the step `sqlserver` of `cargo xtask test` says so.

mod gate;
mod guide;
mod load;
mod misuse;
mod mutations;
mod names;
mod permissions;
mod power_off;
mod races;
mod ready_made;
mod retention;
mod scenarios;
mod serialised;
mod ulids;
mod world;
