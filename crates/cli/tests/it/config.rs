//! Bad configuration: each refused before anything is opened, with place, key and remedy.

use crate::harness::Home;

const GOOD: &str = "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n\
                    [[sink]]\nkind = \"jsonl\"\npath = \"events.jsonl\"\n";

/// Runs `run` on the text: it must refuse with code 2 and create nothing.
#[track_caller]
fn refused(text: &str, parts: &[&str]) {
    let home = Home::new();
    home.write("postrider.toml", text);
    for command in [&["run"][..], &["config", "check"]] {
        home.postrider(command).expect(2).err_has(parts);
    }
    let names: Vec<_> = std::fs::read_dir(home.path("")).expect("read").collect();
    assert_eq!(names.len(), 1, "nothing but the configuration may be there: {names:?}");
}

#[test]
fn a_good_file_is_said_to_be_good() {
    let home = Home::new();
    home.write("postrider.toml", GOOD);
    let done = home.postrider(&["config", "check"]).expect(0);
    assert!(done.out.contains("usable; source sqlite, sinks jsonl"), "{}", done.out);
    let done = home.postrider(&["config", "check", "--json"]).expect(0);
    assert_eq!(done.json()["ok"], true);
}

#[test]
fn an_unknown_key_is_named_with_the_nearest_valid_one() {
    refused(
        &GOOD.replace("path", "paht"),
        &["postrider.toml:7:1: sink[0].paht: unknown key; did you mean \"path\"?"],
    );
    refused(
        &format!("{GOOD}[relya]\n"),
        &["postrider.toml:8:2: relya: unknown section; did you mean [relay]?"],
    );
    refused(
        &format!("{GOOD}[relay]\nlease_tll = \"5s\"\n"),
        &["postrider.toml:9:1: relay.lease_tll: unknown key; did you mean \"lease_ttl\"?"],
    );
    refused(
        &GOOD.replace("jsonl\"\n", "jsonll\"\n"),
        &["postrider.toml:6:8: sink[0].kind: \"jsonll\" is unknown", "did you mean \"jsonl\"?"],
    );
}

#[test]
fn a_wrong_type_is_named_with_what_to_write() {
    refused(
        &format!("{GOOD}[relay]\nlease_ttl = 5\n"),
        &["postrider.toml:9:13: relay.lease_ttl: found a whole number; write a length of time"],
    );
    refused(
        &format!("{GOOD}fsync = \"yes\"\n"),
        &["postrider.toml:8:9: sink[0].fsync: found a text; write true or false"],
    );
    refused(
        "[source]\nkind = \"sqlite\"\nurl = 7\n",
        &["postrider.toml:3:7: source.url: found a whole number; write a text in quotes"],
    );
    refused(
        &GOOD.replace("[[sink]]", "[sink]"),
        &["postrider.toml:5:2: sink: is one table; write [[sink]]"],
    );
}

/// An answer that comes after the call is forgotten would be sent again.
#[cfg(feature = "webhook")]
#[test]
fn a_time_out_that_outlasts_its_call_is_refused_with_both_keys() {
    let sink = |times: &str| {
        format!(
            "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"webhook\"\n\
             url = \"https://example.com/\"\nunsigned = true\n{times}"
        )
    };
    let home = Home::new();
    let fits = ["", "timeout_ms = 20000\n", "publish_timeout = \"15s\"\n"];
    for times in fits {
        home.write("postrider.toml", sink(times));
        home.postrider(&["config", "check"]).expect(0);
    }
    refused(
        &sink("timeout_ms = 20001\n"),
        &["postrider.toml:9:14: sink[0].timeout_ms: ", "publish_timeout (30s)", "30002ms", "20000"],
    );
    // The default of the one does not fit the other.
    refused(
        &sink("publish_timeout = \"12s\"\n"),
        &["postrider.toml:9:19: sink[0].timeout_ms: 10000 ms", "publish_timeout = \"15s\""],
    );
}

#[test]
fn impossible_values_are_refused_with_what_is_possible() {
    refused(
        &format!("{GOOD}[relay]\nlease_ttl = \"0s\"\n"),
        &["postrider.toml:9:13: relay.lease_ttl: \"0s\" is out of range; give 200ms to 10m"],
    );
    refused(
        &format!("{GOOD}[relay]\nlease_ttl = \"1s\"\ncheckpoint_every = \"2s\"\n"),
        &["postrider.toml:10:20: relay.checkpoint_every: 2s is not shorter than lease_ttl (1s)"],
    );
    refused(
        &format!("{GOOD}base_delay = \"1m\"\n"),
        &["postrider.toml:8:14: sink[0].base_delay: 1m is longer than max_delay (30s)"],
    );
    refused(
        &format!("{GOOD}on_failure = \"prak\"\n"),
        &["postrider.toml:8:14", "did you mean \"park\"?"],
    );
    refused(&format!("{GOOD}keep = 3\n"), &["postrider.toml:8:8: sink[0].keep: "]);
    refused(
        &GOOD.replace("url = \"app.db\"", "url = \"app.db\"\npartitions = 0"),
        &["postrider.toml:4:14: source.partitions: 0 is out of range; give 1 to 1024"],
    );
    refused(
        &format!("{GOOD}[log]\nlevel = \"loud=very\"\n"),
        &["postrider.toml:9:9: log.level:", "write error, warn, info, debug or trace"],
    );
}

#[cfg(feature = "webhook")]
#[test]
fn a_sink_s_own_rules_are_told_at_the_key_that_they_name() {
    let head = "[source]\nkind = \"sqlite\"\nurl = \"app.db\"\n\n[[sink]]\nkind = \"webhook\"\n";
    refused(
        &format!("{head}url = \"https://example.com/\"\n"),
        &["postrider.toml:5:1: sink[0].signing_keys: signing_keys is missing"],
    );
    refused(
        &format!("{head}unsigned = true\nurl = \"https://{{topic}}.example.com/\"\n"),
        &["postrider.toml:8:7: sink[0].url: "],
    );
    refused(
        &format!("{head}unsigned = true\nurl = \"https://example.com/{{tpic}}\"\n"),
        &["postrider.toml:8:7: sink[0].url: template has no placeholder {tpic}", "{topic}"],
    );
    refused(
        &format!(
            "{head}unsigned = true\nurl = \"https://e.com/\"\nheaders = {{ \"a\\nb\" = \"c\" }}\n"
        ),
        &["postrider.toml:9:11: sink[0].headers: \"a\\nb\" is no name of a HTTP header"],
    );
    let short = "signing_keys = [\"whsec_aHVudGVyMg==\"]\n";
    refused(
        &format!("{head}url = \"https://example.com/\"\n{short}"),
        &["postrider.toml:8:16: sink[0].signing_keys: ", "has 7 bytes", "/dev/urandom"],
    );
    refused(
        &format!("{head}url = \"https://example.com/\"\nsigning_keys = [\"env:\"]\n"),
        &["postrider.toml:8:16: sink[0].signing_keys: env: has no name of a variable"],
    );
}

#[cfg(not(feature = "otlp"))]
#[test]
fn what_this_build_lacks_is_named_with_the_feature_that_has_it() {
    refused(
        &format!("{GOOD}[trace]\notlp = \"http://127.0.0.1:4318/v1/traces\"\n"),
        &["postrider.toml:9:8: trace.otlp: OTLP is not in this build; build with --features otlp"],
    );
}

#[test]
fn two_sinks_of_one_name_are_refused_with_both_places() {
    refused(
        &format!("{GOOD}\n[[sink]]\nkind = \"jsonl\"\npath = \"other.jsonl\"\n"),
        &["postrider.toml:9:1: sink[1].name: \"jsonl\" is also the name of sink[0] (line 5)"],
    );
}

#[cfg(feature = "kafka")]
#[test]
fn two_sinks_with_the_same_transactions_are_refused() {
    let sink = |name: &str| {
        format!(
            "\n[[sink]]\nname = \"{name}\"\nkind = \"kafka\"\nbrokers = \"127.0.0.1:9092\"\n\
             transactions = \"orders\"\n"
        )
    };
    refused(
        &format!("{GOOD}{}{}", sink("a"), sink("b")),
        &["postrider.toml:19:16: sink[2].transactions: \"orders\" is that of sink[1] as well"],
    );
}

#[cfg(feature = "rabbitmq")]
#[test]
fn two_sinks_that_are_one_producer_of_a_stream_are_refused() {
    let sink = |name: &str, server: &str, stream: &str| {
        format!(
            "\n[[sink]]\nname = \"{name}\"\nkind = \"rabbitmq-stream\"\n\
             servers = [\"rabbitmq-stream://{server}\"]\nstream = \"{stream}\"\n\
             producer = \"shop\"\n"
        )
    };
    let here = "127.0.0.1";
    let [a, b, c] = [sink("a", here, "s"), sink("b", here, "t"), sink("c", here, "s")];
    refused(
        &format!("{GOOD}{a}{b}{c}"),
        &["postrider.toml:28:12: sink[3].producer: \"shop\" is that of sink[1] as well, for the \
           same stream; give another"],
    );
    // On another server it is another stream; a super stream has its parts.
    let elsewhere = sink("d", "localhost:5553", "s");
    let whole = format!("{}super_stream = true\n", sink("e", here, "s"));
    let part = sink("f", here, "s-0");
    refused(
        &format!("{GOOD}{elsewhere}{whole}{part}"),
        &["postrider.toml:29:12: sink[3].producer: \"shop\" is that of sink[2] as well, for the \
           same stream; give another"],
    );
    // Each partition is a producer, of which RabbitMQ remembers 255.
    refused(
        &format!("{}{a}", GOOD.replacen("[source]\n", "[source]\npartitions = 256\n", 1)),
        &["sink[1].producer: each of the source's 256 partitions is a producer of its own"],
    );
}

#[test]
fn a_missing_variable_is_named_with_key_and_line() {
    refused(
        &GOOD.replace("\"app.db\"", "\"env:POSTRIDER_TEST_ABSENT\""),
        &["postrider.toml:3:7: source.url: environment variable POSTRIDER_TEST_ABSENT is not set"],
    );
    refused(
        &GOOD.replace("\"app.db\"", "\"file:absent\""),
        &["postrider.toml:3:7: source.url: can't read absent"],
    );
}

#[test]
fn references_need_not_be_there_when_only_the_file_is_checked() {
    let home = Home::new();
    home.write("postrider.toml", GOOD.replace("\"app.db\"", "\"env:POSTRIDER_TEST_ABSENT\""));
    home.postrider(&["config", "check", "--skip-references"]).expect(0);
}

#[test]
fn what_is_missing_is_named() {
    refused("", &["postrider.toml:1:1: source: is missing"]);
    refused("[source]\nkind = \"sqlite\"\n", &["postrider.toml:1:2: source.url: is missing"]);
    refused("[source]\nurl = \"a\"\n", &["source.kind: is missing; write kind = \"sqlite\""]);
    refused("[source]\nkind = \"sqlite\"\nurl = \"a\"\n", &["sink: is missing; add [[sink]]"]);
    refused(&GOOD.replace("\"app.db\"", "\"\""), &["postrider.toml:3:7: source.url: is empty"]);
}

#[test]
fn text_that_is_no_toml_is_refused_at_its_place() {
    refused("[source\nkind = 1\n", &["postrider.toml:1:8: not TOML:"]);
    refused(&format!("{GOOD}\u{0}"), &["postrider.toml:8:1: not TOML:"]);
    let home = Home::new();
    home.write("postrider.toml", b"[source]\nkind = \"\xff\"\n");
    home.postrider(&["run"]).expect(2).err_has(&["postrider.toml:2:9: not UTF-8"]);
    home.postrider(&["run", "--config", "absent.toml"])
        .expect(2)
        .err_has(&["absent.toml: there is no such file; create it"]);
    home.postrider(&["run", "--config", "."]).expect(2).err_has(&["can't be read"]);
}

#[test]
fn all_problems_are_told_at_once_in_the_order_of_the_file() {
    let home = Home::new();
    home.write(
        "postrider.toml",
        "[source]\nkind = \"sqlite\"\nulr = \"app.db\"\n\n[[sink]]\nkind = \"jsonl\"\n\
         path = \"a\"\nfsync = 1\n\n[admin]\nlisten = \"nowhere\"\n",
    );
    let done = home.postrider(&["config", "check", "--json"]).expect(2);
    let answer = done.json();
    let keys: Vec<_> = answer["problems"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|problem| problem["key"].as_str().expect("a key"))
        .collect();
    assert_eq!(keys, ["source.url", "source.ulr", "sink[0].fsync", "admin.listen"]);
    assert_eq!(answer["problems"][2]["line"], 8);
    assert_eq!(answer["problems"][2]["column"], 9);
}

#[test]
fn a_secret_never_stands_in_an_error() {
    let home = Home::new();
    home.write("secret", "postgres://user:hunter2@db/app\n");
    home.write("postrider.toml", GOOD.replace("\"app.db\"", "\"file:secret\""));
    for command in [&["run"][..], &["config", "check"], &["status"]] {
        let done = home.postrider(command).expect(2).err_has(&["another kind of database"]);
        assert!(!done.err.contains("hunter2"), "{}", done.err);
    }
}

#[test]
fn the_schema_knows_every_key_that_the_parser_takes() {
    let home = Home::new();
    let schema = home.postrider(&["config", "schema"]).expect(0).json();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    for section in ["relay", "admin", "log", "trace"] {
        let properties = schema["properties"][section]["properties"].as_object().expect("a table");
        for (name, property) in properties {
            let Some(default) = property.get("default") else { continue };
            // Every default of the schema is taken by the parser.
            home.write("postrider.toml", format!("{GOOD}[{section}]\n{name} = {default}\n"));
            home.postrider(&["config", "check"]).expect(0);
        }
    }
}

#[test]
fn a_log_level_that_is_none_is_refused_before_everything_falls_silent() {
    let with = |level: &str| format!("{GOOD}[log]\nlevel = \"{level}\"\n");
    refused(&with("wran"), &["log.level", "\"wran\" is no log level", "did you mean \"warn\"?"]);
    refused(&with("info,lod"), &["\"lod\" is no log level", "info,postrider_relay=debug"]);
    let home = Home::new();
    home.write("postrider.toml", with("info,postrider_relay=debug"));
    home.postrider(&["config", "check"]).expect(0);
    let mut status = home.command(&["status"]);
    let output = status.env("POSTRIDER_LOG", "verbose").output().expect("started");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("POSTRIDER_LOG: \"verbose\" is no log level"), "{err}");
}

#[test]
fn a_file_that_is_too_large_is_refused_without_being_read_to_its_end() {
    let home = Home::new();
    home.postrider(&["config", "check", "/dev/zero"])
        .expect(2)
        .err_has(&["/dev/zero: can't be read", "more than the 1048576 bytes"]);
}

#[test]
fn a_wrong_source_on_the_command_line_is_told_without_a_line_that_nobody_wrote() {
    let done = Home::new().postrider(&["status", "--source", "postgres://u:hunter2@db/app"]);
    let done = done.expect(2).err_has(&["\n  --source: names another kind of database"]);
    assert!(!done.err.contains("hunter2"), "{}", done.err);
}
