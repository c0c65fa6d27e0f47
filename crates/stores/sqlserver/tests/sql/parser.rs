//! Every text, shipped or generated, through Microsoft's own parser, in the grammars of SQL Server
//! 2016 and 2022. A parser knows no table, no type and no permission: it shows mistakes of syntax.

use std::path::Path;

use postrider_servers::tsql_parser::{Grammar, complaint};

use crate::text::{FILES, Feed, batches, blocks, literals, template, templates};

/// What the parser says about a text, in the grammar in which it has to complain first.
fn refused(text: &str) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("text.sql");
    std::fs::write(&file, text).expect("a file");
    Grammar::ALL.iter().find_map(|grammar| {
        let said =
            complaint(&file, *grammar).expect("`cargo xtask services install` has the parser");
        said.map(|said| format!("{grammar:?}: {said}"))
    })
}

#[track_caller]
fn accepted(name: &str, text: &str) {
    assert_eq!(refused(text), None, "{name}:\n{text}");
}

/// Texts become one file: a process for each would take longer than all of their parsing.
#[track_caller]
fn all_accepted(name: &str, texts: impl IntoIterator<Item = String>) {
    let texts: Vec<String> = texts.into_iter().collect();
    assert!(!texts.is_empty(), "{name}: nothing to check");
    let joined: Vec<String> = texts.iter().map(|text| format!("{text}\ngo\n")).collect();
    if refused(&joined.concat()).is_some() {
        texts.iter().for_each(|text| accepted(name, text));
    }
    accepted(name, &joined.concat());
}

#[test]
fn every_migration_parses() {
    for (name, text) in FILES {
        accepted(name, text);
    }
}

/// Those that a migration runs by `exec (N'…')`, where the parser sees a literal only.
#[test]
fn every_function_that_is_made_for_one_engine_parses() {
    let mut made = Vec::new();
    for (_, file) in FILES {
        for batch in batches(file).iter().filter(|batch| batch.contains("exec (N'create function"))
        {
            made.extend(literals(batch).into_iter().filter(|text| text.starts_with("create ")));
        }
    }
    assert_eq!(made.len(), 11, "three functions for each engine, and five for the relay");
    all_accepted("made for one engine", made);
}

/// Statements of the client, and fixtures of these tests.
#[test]
fn every_text_of_the_client_and_every_fixture_parses() {
    for folder in ["src/sql", "tests/sql/mutations"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let mut texts = Vec::new();
        for entry in std::fs::read_dir(folder).expect("the folder is there") {
            let path = entry.expect("an entry").path();
            let text = std::fs::read_to_string(path).expect("a text");
            texts.push(sample().render(&crate::text::Template { text, ..template("read_feed") }));
        }
        all_accepted("texts in files", texts);
    }
}

/// The blocks of the guide, one by one; `behaviour/guide.rs` runs them.
#[test]
fn every_block_of_the_guide_parses() {
    let page = include_str!("../../../../../docs/stores/sqlserver.md");
    let texts: Vec<String> = blocks(page).into_iter().map(|(_, text)| text).collect();
    assert!(texts.len() > 10, "{} blocks", texts.len());
    all_accepted("docs/stores/sqlserver.md", texts);
}

fn sample() -> Feed {
    feed("myservice", "MyEvent", &[("AggregateID", "bigint"), ("Version", "int")])
}

fn feed(schema: &str, table: &str, key: &[(&str, &str)]) -> Feed {
    Feed {
        schema: schema.to_owned(),
        table: table.to_owned(),
        shard_key_type: "int",
        outbox: true,
        key: key.iter().map(|(name, of)| ((*name).to_owned(), (*of).to_owned())).collect(),
    }
}

/// Types that a key column may have: those that `describe_key` lets through.
const KEY_TYPES: &[&str] = &[
    "bit",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "decimal(38, 10)",
    "numeric(9, 0)",
    "money",
    "smallmoney",
    "real",
    "float",
    "date",
    "time(7)",
    "smalldatetime",
    "datetime",
    "datetime2(3)",
    "datetimeoffset(0)",
    "char(10)",
    "varchar(900)",
    "nchar(20) collate Latin1_General_BIN2",
    "nvarchar(450) collate Finnish_Swedish_CI_AS",
    "binary(8)",
    "varbinary(64)",
    "uniqueidentifier",
];

/// Each of them is in the list above and in the text of `describe_key`, under its bare name.
#[test]
fn the_list_of_key_types_is_that_of_describe_key() {
    let all = batches(FILES[0].1);
    let describe =
        all.iter().find(|batch| batch.contains("[describe_key]\n")).expect("describe_key is there");
    let bare = |text: &str| text.split(['(', ' ']).next().unwrap_or_default().to_owned();
    let list =
        describe.split("@type = case").nth(1).and_then(|rest| rest.split("else null").next());
    let mut known: Vec<String> = literals(list.expect("the list of types"))
        .into_iter()
        .filter(|name| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric()))
        .filter(|name| !["timestamp", "rowversion"].contains(&name.as_str()))
        .collect();
    known.sort();
    let mut listed: Vec<String> = KEY_TYPES.iter().map(|text| bare(text)).collect();
    listed.sort();
    assert_eq!(known, listed);
}

#[test]
fn every_generated_text_parses_whatever_the_table_is_called() {
    let long = "n".repeat(120);
    let three = [("a", "int"), ("b", "nvarchar(20)"), ("c", "datetime2(3)")];
    let last = [("Version", "int"), ("AggregateID", "bigint")];
    let names: &[(&str, &str)] = &[
        ("myservice", "MyEvent"),
        ("my.service", "My.Event"),
        ("it's", "a 'table'"),
        ("a\"b", "c\"\"d"),
        ("a[b]", "]c[]]"),
        (" a", "b c  d"),
        ("{T}", "{K}{~}"),
        ("dbo", &long),
        ("Zoë", "日本🦀"),
    ];
    let mut texts = Vec::new();
    for (schema, table) in names {
        for key in [&three[..], &last[..]] {
            texts.extend(feed(schema, table, key).texts());
        }
        let odd = [("it's]", "int"), ("a.b c", "bigint"), ("{O}\"", "date"), (&*long, "int")];
        texts.extend(feed(schema, table, &odd).texts());
    }
    let types: Vec<(String, &str)> =
        KEY_TYPES.iter().enumerate().map(|(at, of)| (format!("k{at}"), *of)).collect();
    let types: Vec<(&str, &str)> = types.iter().map(|(name, of)| (name.as_str(), *of)).collect();
    texts.extend(feed("myservice", "MyEvent", &types).texts());
    for of in ["tinyint", "smallint", "int", "bigint", "uniqueidentifier"] {
        for outbox in [true, false] {
            texts.extend(Feed { shard_key_type: of, outbox, ..sample() }.texts());
        }
    }
    let count = texts.len();
    all_accepted("generated", texts.into_iter().map(|(_, text)| text));
    let all = templates().len();
    assert!(count > 27 * (all - 3), "{count} texts from {all} templates");
}

#[test]
fn names_are_never_longer_than_the_server_allows() {
    for length in [1, 90, 96, 97, 120, 128] {
        let name = feed("dbo", &"x".repeat(length), &[("a", "int")]).name();
        assert!(name.encode_utf16().count() <= 100, "{name}");
        for prefix in ["changefeed.writers:", "aschemaof19letters_.readers:", "update_state:"] {
            assert!(format!("{prefix}{name}").len() <= 128, "{prefix}{name}");
        }
    }
    // The number is that of `convert(bigint, …)` of the first eight bytes, without its sign.
    let name = feed("dbo", &"n".repeat(120), &[("a", "int")]).name();
    let (front, number) = name.split_once('~').expect("it was shortened");
    assert_eq!((front.len(), number.len()), (80, 19));
}

/// So that the check can fail: each is wrong in a way in which texts of this kind go wrong.
#[test]
fn broken_texts_are_refused() {
    let broken = [
        "select 1 from a where;",
        "insert into #read (ulid) select top (@n ulid from [changefeed].[feed:a];",
        "create procedure [changefeed].[read_feed:a]b] @shard_id int as select 1;",
        "exec [changefeed].setup_feed @table = N'it's', @outbox = 1;",
        "alter role [changefeed].[role:myservice.MyEvent] add member myservice_user;",
        "begin try select 1; end try select 2;",
        "if 1 = 1 begin throw 77100, N'a', 1; ",
        "delete o from @page as p inner join [outbox] as o option (loop join, force order);",
        "create table t (a int not null, primary key a);",
        "select ulid from [feed] where shard_id = 1 order by ulid limit 10;",
        "create function f(@n bigint) returns binary(16) as begin return (@n; end;",
        "select a from t where b is not distinct from c and a = ;",
    ];
    assert!(broken.len() >= 10);
    for text in broken {
        assert!(refused(text).is_some(), "accepted: {text}");
    }
    let good = template("move_outbox");
    accepted("move_outbox", &sample().render(&good));
    for (place, worse) in [("select @count", "selct @count"), ("as q;", "q as;"), ("begin", "bgin")]
    {
        let text = sample().render(&good);
        assert!(text.contains(place), "{place}");
        assert!(refused(&text.replacen(place, worse, 1)).is_some(), "accepted {worse}");
    }
    // The grammar counts: this one came with 2022.
    assert!(refused("select a from t where b is not distinct from c;").is_some());
}

/// For the one form that SQL Server alone has, which a reader finds in the guide.
#[test]
fn numbers_in_order_parse() {
    accepted(
        "next value over",
        "insert into t (Shard, ULID) select 0, changefeed.ulid(next value for changefeed.sequence \
         over (order by i.Time)) from @inputtable as i;",
    );
}
