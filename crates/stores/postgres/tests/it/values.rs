//! Payloads, keys and headers: what is appended is what the feed hands on, byte for byte, or it is
//! refused at append with the reason.

use postrider_core::*;
use postrider_servers::postgres::Version;
use postrider_store_postgres::{OnDuplicate, Outbox, PayloadType};
use tokio_postgres::Client;

use crate::support::{World, builder, on_both_versions, p};

on_both_versions! {
    w61_json_in_an_outbox_of_bytes_is_handed_on_byte_for_byte
    w61_json_in_an_outbox_of_json_is_handed_on_byte_for_byte
    w61_what_is_no_json_is_refused_with_the_reason
    w63_extreme_values_in_keys_headers_and_payloads
}

const VALUES: &[&str] = &[
    "9007199254740993",
    "-9007199254740993",
    "1e400",
    "-1E+400",
    "1e-400",
    "0.1000000000000000055511151231257827",
    "123456789012345678901234567890123456789012345678901234567890",
    "-0",
    "-0.0e0",
    "1.0",
    "1.00",
    "true",
    "null",
    r#""""#,
    r#""\u0000""#,
    r#""\ud800""#,
    r#""\udc00\ud800x""#,
    r#""\ud83d\ude00""#,
    r#""\/\b\f\n\r\t\"\\""#,
    r#""\u00e9é""#,
    "\"e\u{301}\"",
    "\"😀\u{200d}🔥\u{feff}\"",
    "\"\u{7f}\u{85}\u{2028}\"",
    r#""NaN""#,
    r#""-Infinity""#,
    r#""4713-01-01 BC""#,
    r#""\\xdeadbeef""#,
    r#""0001-01-01T00:00:00Z""#,
];

/// Every value in many forms: 504 documents.
fn corpus() -> Vec<String> {
    let deep =
        |value: &str, depth: usize| format!("{}{value}{}", "[".repeat(depth), "]".repeat(depth));
    let forms = |v: &str| {
        vec![
            v.to_owned(),
            format!("{v}   "),
            format!("\r\n\t {v}\n"),
            format!("[{v}]"),
            format!("[ {v} ,{v}\t, {v} ] "),
            format!("{{\"a\":{v}}}"),
            format!("{{\"a\":{v},\"a\":1,\"a\":{v}}}"),
            format!("{{ \"z\" : {v} , \"a\":{v}, \"\":0 }}"),
            format!("{{\"😀\":{v},\"\\u0000\":[]}}"),
            format!("{{\"1e400\":{v},\"a\\u0041\":{v}}}\n\n"),
            format!("[[],{{}},{{}} , [{v}]]"),
            format!("[{}]", vec![v; 200].join(",")),
            format!("{{\"{}\":{v}}}", "k".repeat(3_000)),
            format!("[{v},\"{}\"]", "é\\n".repeat(1_000)),
            deep(v, 100),
            deep(v, 1_000),
            format!("{}{v}{}", "{\"a\":".repeat(500), "}".repeat(500)),
            format!("{}{v}", " ".repeat(5_000)),
        ]
    };
    let all: Vec<String> = VALUES.iter().flat_map(|value| forms(value)).collect();
    assert_eq!(all.len(), 504);
    all
}

fn json_event(payload: &str) -> NewEvent {
    let json = ContentType::new("application/json").expect("valid");
    builder("k").payload(json, payload.to_owned()).build().expect("within the limits")
}

/// Appends all documents in each of the ways there are; returns how many ways.
async fn append_in_all_ways(client: &mut Client, documents: &[String], insert_as: &str) -> usize {
    let events: Vec<NewEvent> = documents.iter().map(|text| json_event(text)).collect();
    let outbox = Outbox::default();
    let tx = client.transaction().await.expect("begin");
    outbox.append(&tx, &events).await.expect("append all");
    for event in &events {
        outbox.append(&tx, std::slice::from_ref(event)).await.expect("append one");
    }
    let sql = "SELECT postrider.append('k', 't', 'T', $1::text)";
    let function = tx.prepare(sql).await.expect("prepare");
    for text in documents {
        tx.query(&function, &[text]).await.expect("append by SQL");
    }
    let sql = "SELECT postrider.append('k', 't', 'T', $1::text::json)";
    let function = tx.prepare(sql).await.expect("prepare");
    for text in documents {
        tx.query(&function, &[text]).await.expect("append json by SQL");
    }
    let sql = format!(
        "INSERT INTO postrider.outbox (key, topic, type, payload)
         VALUES ('k', 't', 'T', {insert_as})"
    );
    let insert = tx.prepare(&sql).await.expect("prepare");
    for text in documents {
        tx.execute(&insert, &[text]).await.expect("insert");
    }
    tx.commit().await.expect("commit");
    5
}

/// The feed holds the documents, once for each way.
async fn assert_handed_on(world: &World, documents: &[String], ways: usize) {
    let records = world.records(&p(0, 1)).await;
    assert_eq!(records.len(), documents.len() * ways);
    for (n, record) in records.iter().enumerate() {
        let text = &documents[n % documents.len()];
        assert!(
            record.event.payload().as_ref() == text.as_bytes(),
            "way {}: {text:?} became {:?}",
            n / documents.len(),
            String::from_utf8_lossy(record.event.payload())
        );
    }
}

#[cfg(feature = "sqlx")]
async fn append_by_sqlx(world: &World, documents: &[String]) -> usize {
    use sqlx::{Connection as _, PgConnection};
    let events: Vec<NewEvent> = documents.iter().map(|text| json_event(text)).collect();
    let mut connection = PgConnection::connect(&world.database.url()).await.expect("connect");
    let outbox = Outbox::default();
    let mut tx = connection.begin().await.expect("begin");
    outbox.append_sqlx(&mut tx, &events).await.expect("append all");
    for event in &events {
        outbox.append_sqlx(&mut tx, std::slice::from_ref(event)).await.expect("append one");
    }
    tx.commit().await.expect("commit");
    2
}

#[cfg(not(feature = "sqlx"))]
async fn append_by_sqlx(_: &World, _: &[String]) -> usize {
    0
}

async fn w61_json_in_an_outbox_of_bytes_is_handed_on_byte_for_byte(version: Version) {
    let world = World::new(version, 1).await;
    let documents = corpus();
    let mut client = world.session().await;
    let as_bytes = "convert_to($1::text, 'UTF8')";
    let mut ways = append_in_all_ways(&mut client, &documents, as_bytes).await;
    ways += append_by_sqlx(&world, &documents).await;
    assert_handed_on(&world, &documents, ways).await;
}

async fn w61_json_in_an_outbox_of_json_is_handed_on_byte_for_byte(version: Version) {
    let world = World::with(version, |o| o.partitions(1).payload(PayloadType::Json)).await;
    let documents = corpus();
    let mut client = world.session().await;
    let mut ways = append_in_all_ways(&mut client, &documents, "$1::text::json").await;
    ways += append_by_sqlx(&world, &documents).await;
    assert_handed_on(&world, &documents, ways).await;
}

async fn w61_what_is_no_json_is_refused_with_the_reason(version: Version) {
    let world = World::with(version, |o| o.partitions(1).payload(PayloadType::Json)).await;
    let mut client = world.session().await;
    let json = ContentType::new("application/json").expect("valid");
    let syntax = "invalid input syntax for type json";
    let encoding = "invalid byte sequence for encoding";
    let deep = "[".repeat(500_000);
    let cases: [(&[u8], &str); 16] = [
        (b"", syntax),
        (b"   ", syntax),
        (b"{", syntax),
        (b"[1,]", syntax),
        (b"{'a':1}", syntax),
        (b"NaN", syntax),
        (b"-Infinity", syntax),
        (b"01", syntax),
        (b"1 2", syntax),
        (b"1 // c", syntax),
        (b"\"\\x\"", syntax),
        (b"\"\\u12g4\"", syntax),
        (b"\"\n\"", syntax),
        (b"\xef\xbb\xbf{}", syntax),
        (b"\"\x00\"", encoding),
        (b"\"\xff\"", encoding),
    ];
    for (payload, says) in cases {
        let event = builder("k").payload(json.clone(), payload.to_vec()).build().expect("valid");
        for events in [vec![event.clone()], vec![json_event("1"), event]] {
            let tx = client.transaction().await.expect("begin");
            let error = world.store.append(&tx, &events, OnDuplicate::Fail).await;
            let error = error.expect_err("no JSON");
            assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
            assert!(error.to_string().contains(says), "{payload:?}: {error:?}");
        }
    }
    let tx = client.transaction().await.expect("begin");
    let error = world.store.append(&tx, &[json_event(&deep)], OnDuplicate::Fail).await;
    let error = error.expect_err("too deep");
    assert_eq!(error.kind(), ErrorKind::Permanent, "{error:?}");
    assert!(error.to_string().contains("nested deeper than the server can follow"), "{error:?}");
    drop(tx);
    assert!(world.records(&p(0, 1)).await.is_empty(), "nothing of a refused call stays");
}

async fn w63_extreme_values_in_keys_headers_and_payloads(version: Version) {
    let world = World::new(version, 1).await;
    let mut client = world.session().await;
    let octets = ContentType::new("application/octet-stream").expect("valid");
    let every_byte: Vec<u8> = (0..=u8::MAX).cycle().take(1 << 20).collect();
    let mut events = Vec::new();
    for key_text in
        ["😀🔥", "é", "e\u{301}", "'; drop table x; --", "\\", "$1", "%s", " a ", "\u{a0}"]
    {
        let mut headers = Headers::new();
        for (name, value) in [
            ("at", "infinity"),
            ("before", "-infinity"),
            ("nan", "NaN"),
            ("bc", "4713-01-01 00:00:00+00 BC"),
            ("quotes", "\"'\\ \t {} null"),
            ("emoji", "👩‍👩‍👧"),
            ("empty", ""),
            ("z", "order"),
            ("a", "kept"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ] {
            headers.insert(name, value).expect("valid");
        }
        headers.insert("long", &"é".repeat(4_096)).expect("valid");
        let payload = every_byte.clone();
        let event = builder(key_text).headers(headers).payload(octets.clone(), payload).build();
        events.push(event.expect("valid"));
    }
    let long = "k".repeat(1_024);
    let most = vec![0_u8; limits::MAX_PAYLOAD_BYTES];
    events.push(builder(&long).payload(octets, most).build().expect("valid"));
    events.push(builder("nothing").build().expect("valid"));
    let tx = client.transaction().await.expect("begin");
    world.store.append(&tx, &events, OnDuplicate::Fail).await.expect("append all");
    for event in &events {
        let one = std::slice::from_ref(event);
        world.store.append(&tx, one, OnDuplicate::Fail).await.expect("append one");
    }
    tx.commit().await.expect("commit");
    let records = world.records(&p(0, 1)).await;
    assert_eq!(records.len(), 2 * events.len());
    for (n, record) in records.iter().enumerate() {
        let expected = events[n % events.len()].clone().identified(|| record.event.id());
        assert_eq!(record.event.key(), expected.key());
        assert_eq!(record.event.content_type(), expected.content_type());
        assert_eq!(record.event.headers(), expected.headers());
        assert!(record.event.payload() == expected.payload(), "{n}: the payload differs");
    }
}
