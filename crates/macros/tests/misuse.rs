//! Mistakes that must not compile, with messages that name the remedy.
//!
//! What lives here: the run over `tests/misuse`; the programs name the façade alone, as users do.
//! They stand beside the derives and not beside the façade, so that they are always compiled with
//! its default features. What does not: programs that compile.
//! Invariant: each program fails for the one reason that its file's name gives.

/// Case O9: an append that outlives its transaction is among them (`append_after_commit`,
/// `append_borrows_for_later`, `append_outlives_its_transaction`).
#[test]
fn mistakes_do_not_compile_and_name_the_remedy() {
    trybuild::TestCases::new().compile_fail("tests/misuse/*.rs");
}
