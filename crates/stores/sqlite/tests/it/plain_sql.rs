//! Writers that use SQL alone.

use postrider_core::*;

use crate::support::*;

#[tokio::test]
async fn a_bare_insert_finds_the_same_partition_as_rust() {
    let world = World::new(64).await;
    let connection = world.connection();
    let long = "x".repeat(1_024);
    let near = "y".repeat(55);
    for key_text in ["a", "order-42", "Zoë", "日本", &near, &format!("{near}y"), &long] {
        connection
            .execute(
                "INSERT INTO postrider_append (key, topic, type, content_type, headers, payload)
                 VALUES (?1, 'orders', 'OrderPlaced', 'application/json', '{\"a\":\"b\"}', ?1)",
                [key_text],
            )
            .expect("insert");
        world.append(vec![event(key_text, key_text)]).await;
        let partition = p(key_hash(&key(key_text)) % 64, 64);
        let page = world.page(&partition, &Position::START).await;
        let same: Vec<_> = page
            .entries
            .iter()
            .map(record)
            .filter(|record| record.event.key().as_str() == key_text)
            .collect();
        assert_eq!(same.len(), 2, "{key_text}: both writers chose {partition}");
        let (by_sql, by_rust) = (&same[0].event, &same[1].event);
        assert_eq!(by_sql.payload(), by_rust.payload());
        assert_eq!(by_sql.headers().get("a"), Some("b"));
        assert_eq!(by_sql.id().as_uuid().get_version_num(), 4);
        assert_eq!(by_sql.id().as_uuid().get_variant(), uuid::Variant::RFC4122);
    }
}

#[tokio::test]
async fn what_rust_would_refuse_sql_refuses_too() {
    let world = World::new(1).await;
    let connection = world.connection();
    let insert = |columns: &str, values: &str| {
        connection
            .execute(&format!("INSERT INTO postrider_append ({columns}) VALUES ({values})"), [])
    };
    for (columns, values) in [
        ("key, topic, type", "NULL, 't', 'E'"),
        ("key, topic, type", "'', 't', 'E'"),
        ("key, topic, type", "'k', '', 'E'"),
        ("key, topic, type", "'k', 't', NULL"),
        ("key, topic, type", "'a' || char(10), 't', 'E'"),
        ("key, topic, type", "'a' || char(0) || 'b', 't', 'E'"),
        ("key, topic, type", "'a' || char(133), 't', 'E'"),
        ("key, topic, type", "'k', 't', 'E' || char(127)"),
        ("key, topic, type", "printf('%1025s', 'k'), 't', 'E'"),
        ("key, topic, type", "'k', printf('%256s', 't'), 'E'"),
        ("id, key, topic, type", "x'01', 'k', 't', 'E'"),
        ("key, topic, type, payload", "'k', 't', 'E', zeroblob(16777217)"),
        ("key, topic, type, headers", "'k', 't', 'E', '[]'"),
        ("key, topic, type, headers", "'k', 't', 'E', '{'"),
        ("key, topic, type, headers", "'k', 't', 'E', '{\"a\": 1}'"),
        ("key, topic, type, headers", "'k', 't', 'E', '{\"\": \"x\"}'"),
        ("key, topic, type, headers", "'k', 't', 'E', '{\"a b\": \"x\"}'"),
        ("key, topic, type, headers", "'k', 't', 'E', '{\"a\": \"x\\ny\"}'"),
        ("key, topic, type, headers", "'k', 't', 'E', '{\"a\": \"x\", \"A\": \"y\"}'"),
        (
            "key, topic, type, headers",
            "'k', 't', 'E', '{\"a\": \"' || printf('%8193s', '') || '\"}'",
        ),
    ] {
        assert!(insert(columns, values).is_err(), "({columns}) VALUES ({values}) was accepted");
    }
    insert("key, topic, type", "'k', 't', 'E'").expect("the least that is needed");
    let records = world.drain().await;
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].event.content_type().as_str(), "application/octet-stream");
}

/// A refusal names the column and what to do, in any language's driver.
#[tokio::test]
async fn a_refusal_says_what_is_wrong_and_what_to_do() {
    let world = World::new(1).await;
    let connection = world.connection();
    for (columns, values, says) in [
        ("key, topic, type", "NULL, 't', 'E'", "key is empty; give it at least one character"),
        ("key, topic, type", "'k', '', 'E'", "topic is empty; give it at least one character"),
        ("key, topic, type", "'k', 't' || char(10), 'E'", "topic has a control character"),
        ("key, topic, type", "printf('%1025s', 'k'), 't', 'E'", "key has more than 1,024 bytes"),
        ("id, key, topic, type", "x'01', 'k', 't', 'E'", "id is no UUID of 16 bytes"),
        ("key, topic, type, headers", "'k', 't', 'E', '{'", "headers are no JSON"),
        ("key, topic, type, headers", "'k', 't', 'E', '[]'", "headers are no JSON object"),
        (
            "key, topic, type, headers",
            "'k', 't', 'E', '{\"a\": \"x\\ny\"}'",
            "a header name or value is not allowed",
        ),
        (
            "key, topic, type, payload",
            "'k', 't', 'E', zeroblob(16777217)",
            "payload has more than 16,777,216 bytes; send a reference instead",
        ),
    ] {
        let insert = format!("INSERT INTO postrider_append ({columns}) VALUES ({values})");
        let error = connection.execute(&insert, []).expect_err("refused").to_string();
        assert!(error.contains(says), "{columns} = {values}: {error}");
    }
    assert!(world.drain().await.is_empty(), "nothing was appended");
}
