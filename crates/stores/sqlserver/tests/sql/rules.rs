//! Rules of the T-SQL that a parser does not know: what other engines do otherwise in silence, what
//! SQL Server 2016 does not have, and that every error is in the table of the design page.

use std::collections::BTreeSet;

use crate::text::{FILES, templates};

/// A text without its comments, in lower case.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("--").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n").to_lowercase()
}

#[test]
fn nothing_is_used_that_an_engine_lacks_or_does_otherwise() {
    let shunned = [
        ("create or alter", "2016 before its first service pack, and Babelfish, refuse it"),
        ("merge ", "it has races of its own, and Babelfish refuses it"),
        ("string_agg", "2017 brought it"),
        ("trim(", "2017 brought it"),
        ("readpast", "it reorders: locks are released row by row"),
        ("updlock", "a hint takes no lock on Babelfish: the application lock comes first"),
        ("max(p.ulid", "the largest of binaries is nothing on Babelfish: top (1) … order by"),
        ("max(ulid", "the same"),
        ("output deleted", "Babelfish refuses it for a table of another schema"),
        ("waitfor", "Babelfish lacks it"),
        ("add signature", "ownership chaining does without"),
        (
            "datalength(@text)",
            "half of it is no number of characters on Babelfish: len(@x + N'.') - 1",
        ),
        ("datalength(@full)", "the same"),
        ("\n    alter table", "Babelfish refuses lock_escalation: only by exec, on SQL Server"),
        ("\nalter table", "the same"),
    ];
    for (name, file) in FILES {
        let code = code(file).replace("ltrim(", "");
        for (word, why) in shunned {
            assert!(!code.contains(word), "{name} has {word:?}: {why}");
        }
    }
}

/// `@variable = column = expression` takes another value on another engine.
#[test]
fn no_update_assigns_a_variable() {
    for (name, file) in FILES {
        for statement in code(file).split(';') {
            let Some(set) = statement.split("update ").nth(1) else { continue };
            let Some(set) = set.split_once(" set ") else { continue };
            assert!(!set.1.trim_start().starts_with('@'), "{name}: {statement}");
        }
    }
}

/// A writer must never wait for the lock of a reader, nor a reader decide anything without it.
#[test]
fn whoever_changes_the_state_takes_the_shards_lock_first() {
    for template in templates() {
        let text = code(&template.text);
        let lock = text.find("[lock_shard:{t}] @shard_id");
        let change = [
            "[update_state:{t}] @shard_id",
            "[move_outbox:{t}] @shard_id",
            "delete from [changefeed]",
        ]
        .iter()
        .filter_map(|change| {
            text.find(&format!("exec [changefeed].{change}")).or(text.find(change))
        })
        .min();
        let internal = ["update_state", "move_outbox", "lock_shard"].contains(&&*template.name);
        if let (Some(change), false) = (change, internal) {
            assert!(lock.is_some_and(|lock| lock < change), "{}: lock first", template.name);
        }
    }
}

/// Calls that renew leases wait for whoever holds a lease's row, and a partition's lock may have to
/// be waited for: never the second behind the first, and no transaction around several.
#[test]
fn pruning_locks_a_partition_before_the_lease_and_each_by_itself() {
    let text = code(include_str!("../../src/sql/retention_prune.sql"));
    let steps = ["begin transaction", "[lock_shard:outbox]", "[fence]", "[prune_feed:outbox]"];
    let steps = steps.iter().chain(&["commit transaction", "begin transaction", "[fence]"]);
    let mut rest = text.as_str();
    for step in steps.chain(&["delete top", "commit transaction"]) {
        let at = rest.find(step).unwrap_or_else(|| panic!("{step} comes later, or never"));
        rest = &rest[at + step.len()..];
    }
    let looping = text.find("while 1 = 1").expect("a loop over the partitions");
    assert!(!text[..looping].contains("begin transaction"), "one around all partitions");
}

/// What the first file makes anew loses its rights when it is run again; it has to give them.
#[test]
fn the_second_file_grants_what_it_makes_itself() {
    let (first, second) = (FILES[0].1, FILES[1].1);
    let granted: Vec<&str> =
        second.split("N'execute', N'").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
    assert!(granted.contains(&"append"), "{granted:?}");
    for object in granted {
        let made = format!("create procedure [changefeed].[{object}]");
        assert!(second.contains(&made), "{object} is not made in the second file");
        assert!(!first.contains(&format!("drop procedure if exists [changefeed].[{object}]")));
    }
    for template in ["read_feed", "read_page", "position_at", "prune_feed", "lock_shard"] {
        assert!(
            first.contains(&format!("N'{template}:outbox'")),
            "{template} is granted to relays"
        );
    }
}

fn numbers(text: &str, before: &str) -> BTreeSet<u32> {
    let found = text.split(before).skip(1).filter_map(|rest| rest.get(..5)?.parse().ok());
    found.collect()
}

#[test]
fn every_error_is_in_the_table_of_the_design_page_and_no_other_is() {
    let mut thrown: BTreeSet<u32> = BTreeSet::new();
    for (_, file) in FILES {
        thrown.extend(numbers(&code(file), "throw "));
    }
    let page = include_str!("../../../../../docs/design/sqlserver-feed.md");
    let listed = numbers(page, "\n| ");
    assert_eq!(thrown, listed);
}

/// A text without a remedy leaves a reader alone; all of them name their origin.
#[test]
fn every_text_of_an_error_says_where_it_comes_from() {
    for (name, file) in FILES {
        for rest in file.split("throw ").skip(1) {
            let Some((number, rest)) = rest.split_once(", ") else { continue };
            if number.len() != 5 || !number.bytes().all(|b| b.is_ascii_digit()) {
                continue;
            }
            let said = rest.starts_with("N'changefeed: ") || rest.starts_with("N''changefeed: ");
            assert!(
                said || rest.starts_with("@message") || rest.starts_with("@problem"),
                "{name}: {number} says {}",
                rest.lines().next().unwrap_or_default()
            );
        }
    }
}
