//! Every row of the endpoint table, and every rule of validation.

use postrider_sample_contacts::Preconditions;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::harness::{Answer, Kept as _, Running, john};

const MISSING: &str = "/api/contacts/00000000-0000-4000-8000-000000000000";

/// Path and a valid body of each update, and what a read shows after it.
fn updates() -> [(&'static str, Value, Value); 4] {
    let company = json!({
        "companyName": "Fabrikam", "street": "Street", "houseNumber": "1a",
        "postalCode": "092821", "city": "Palo Alto", "country": "US",
    });
    [
        (
            "update-name",
            json!({ "firstName": "Jane", "lastName": "Roe" }),
            json!({ "name": { "firstName": "Jane", "lastName": "Roe" } }),
        ),
        (
            "update-description",
            json!({ "description": "Met at the fair" }),
            json!({ "description": "Met at the fair" }),
        ),
        ("update-email", json!({ "email": "jane@x.org" }), json!({ "email": "jane@x.org" })),
        ("update-company", company.clone(), json!({ "company": company })),
    ]
}

#[tokio::test]
async fn create_answers_201_with_location_and_etag_and_the_contact_reads_back() {
    let service = Running::start().await;
    let created = service.post("/api/contacts", &john("John")).await;
    assert_eq!((created.status, created.text.as_str()), (StatusCode::CREATED, ""));
    let read = service.get(&created.header("location")).await;
    assert_eq!(read.status, StatusCode::OK);
    assert_eq!(read.header("etag"), created.header("etag"));
    let id = created.header("location").rsplit('/').next().unwrap().to_owned();
    let expected = json!({
        "id": id, "description": "This is a contact", "email": "johndoe@contoso.com",
        "name": { "firstName": "John", "lastName": "Doe" },
        "company": { "companyName": "Contoso", "street": "", "houseNumber": "",
            "postalCode": "", "city": "", "country": "" },
    });
    assert_eq!(read.json(), expected);
    service.stop().await;
}

#[tokio::test]
async fn email_and_description_may_be_absent_or_null() {
    let service = Running::start().await;
    for optional in [json!({}), json!({ "email": null, "description": null })] {
        let mut body = json!({ "firstName": "J", "lastName": "D", "companyName": "C" });
        body.as_object_mut().unwrap().extend(optional.as_object().unwrap().clone());
        let created = service.post("/api/contacts", &body).await;
        assert_eq!(created.status, StatusCode::CREATED, "{body}");
        let read = service.get(&created.header("location")).await.json();
        assert_eq!((&read["email"], &read["description"]), (&Value::Null, &Value::Null));
    }
    service.stop().await;
}

#[tokio::test]
async fn create_refuses_what_breaks_a_rule_and_names_the_field() {
    let service = Running::start().await;
    let long = |count: usize| Value::from("x".repeat(count));
    let rules = [
        ("firstName", Value::Null),
        ("firstName", json!("")),
        ("firstName", json!(" \t")),
        ("firstName", long(101)),
        ("lastName", Value::Null),
        ("lastName", json!(" ")),
        ("lastName", long(101)),
        ("companyName", Value::Null),
        ("companyName", json!("")),
        ("companyName", long(251)),
        ("email", json!("")),
        ("email", json!("no at sign")),
        ("email", json!("a@b@c")),
        ("description", long(501)),
    ];
    for (field, value) in rules {
        let mut body = john("John");
        body[field] = value;
        let answer = service.post("/api/contacts", &body).await;
        assert_eq!(answer.invalid_fields(), [field], "{body}");
    }
    let blank = json!({ "firstName": "", "lastName": "", "email": "", "companyName": "" });
    let fields = service.post("/api/contacts", &blank).await.invalid_fields();
    assert_eq!(fields, ["companyName", "email", "firstName", "lastName"]);
    assert_eq!(service.event_types().await, [""; 0]);
    service.stop().await;
}

#[tokio::test]
async fn values_at_their_limits_are_taken() {
    let service = Running::start().await;
    let long = |count: usize| "ü".repeat(count);
    let body = json!({
        "firstName": long(100), "lastName": long(100), "companyName": long(250),
        "description": long(500), "email": format!("{}@b", "a".repeat(252)),
    });
    let created = service.post("/api/contacts", &body).await;
    assert_eq!(created.status, StatusCode::CREATED, "{}", created.text);
    let company = json!({
        "companyName": long(250), "street": long(250), "houseNumber": long(10),
        "postalCode": long(25), "city": long(250), "country": long(250),
    });
    let path = format!("{}/update-company", created.header("location"));
    assert_eq!(service.post(&path, &company).await.status, StatusCode::NO_CONTENT);
    service.stop().await;
}

#[tokio::test]
async fn read_spares_the_body_of_a_version_that_the_client_has() {
    let service = Running::start().await;
    let (path, etag) = service.create("John").await;
    let read = async |header: &str, value: &str| {
        Answer::of(service.request(Method::GET, &path).header(header, value)).await
    };
    let known = [
        ("if-none-match", etag.clone()),
        ("etag", etag.clone()),
        ("if-none-match", format!("\"other\", W/{etag}")),
        ("if-none-match", "*".to_owned()),
    ];
    for (header, value) in &known {
        let answer = read(header, value).await;
        assert_eq!(answer.status, StatusCode::NOT_MODIFIED, "{header}: {value}");
        assert_eq!((answer.header("etag"), answer.text.as_str()), (etag.clone(), ""));
    }
    assert_eq!(read("if-none-match", "\"other\"").await.status, StatusCode::OK);
    read("if-none-match", "without quotes").await.problem(400);
    read("etag", &format!("\"{}\"", "x".repeat(2_000))).await.problem(400);
    service.stop().await;
}

#[tokio::test]
async fn read_answers_404_to_what_is_missing() {
    let service = Running::start().await;
    for path in [MISSING, "/api/contacts/17", "/api/contacts/%00", "/api/contacts/%ff"] {
        service.get(path).await.problem(404);
    }
    service.stop().await;
}

#[tokio::test]
async fn list_goes_page_by_page_through_all_that_are_not_deleted() {
    let service = Running::start().await;
    let mut expected = Vec::new();
    for number in 0..23 {
        expected.push(service.create(&format!("John {number}")).await.0);
    }
    service.delete(&expected.remove(5)).await;
    let mut found = Vec::new();
    let mut token: Option<String> = None;
    let mut sizes = Vec::new();
    loop {
        let mut request = service.request(Method::GET, "/api/contacts?pageSize=10");
        if let Some(token) = &token {
            request = request.header("x-continuation-token", token);
        }
        let answer = Answer::of(request).await;
        let page = answer.json();
        let items = page["items"].as_array().unwrap();
        sizes.push(items.len());
        found.extend(
            items.iter().map(|item| {
                format!("/api/contacts/{}", item["id"].as_str().expect("an id of text"))
            }),
        );
        assert_eq!(page["hasMore"], answer.has_header("x-continuation-token"));
        if page["hasMore"] == false {
            break;
        }
        token = Some(answer.header("x-continuation-token"));
    }
    found.sort();
    expected.sort();
    assert_eq!((found, sizes), (expected, vec![10, 10, 2]));
    service.stop().await;
}

#[tokio::test]
async fn list_shows_ten_summaries_when_not_asked_for_another_number() {
    let service = Running::start().await;
    for _ in 0..11 {
        service.create("John").await;
    }
    let page = service.get("/api/contacts").await.json();
    assert_eq!(page["items"].as_array().unwrap().len(), 10);
    let item = page["items"][0].as_object().unwrap();
    let members: Vec<_> = item.keys().collect();
    assert_eq!(members, ["companyName", "email", "fullName", "id"]);
    assert_eq!(item["fullName"], "John Doe");
    let all = service.get("/api/contacts?pageSize=100").await.json();
    assert_eq!((all["items"].as_array().unwrap().len(), &all["hasMore"]), (11, &json!(false)));
    service.stop().await;
}

#[tokio::test]
async fn list_refuses_page_sizes_and_tokens_that_are_none() {
    let service = Running::start().await;
    service.create("John").await;
    for size in ["0", "101", "-1", "ten", "", "4294967297"] {
        let answer = service.get(&format!("/api/contacts?pageSize={size}")).await;
        assert_eq!(answer.invalid_fields(), ["pageSize"], "{size:?}");
    }
    for token in ["garbage", "", "ünicode", "00", &"9".repeat(500)] {
        let request = service.request(Method::GET, "/api/contacts");
        let answer = Answer::of(request.header("x-continuation-token", token.as_bytes())).await;
        assert_eq!(answer.invalid_fields(), ["x-continuation-token"], "{token:?}");
    }
    service.stop().await;
}

#[tokio::test]
async fn updates_answer_204_with_the_new_etag_and_change_only_their_part() {
    let service = Running::start().await;
    let (path, mut etag) = service.create("John").await;
    let mut expected = service.get(&path).await.json();
    for (action, body, change) in updates() {
        let answer = service.post(&format!("{path}/{action}"), &body).await;
        assert_eq!((answer.status, answer.text.as_str()), (StatusCode::NO_CONTENT, ""));
        assert_ne!(answer.header("etag"), etag);
        etag = answer.header("etag");
        expected.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let read = service.get(&path).await;
        assert_eq!((read.json(), read.header("etag")), (expected.clone(), etag.clone()));
    }
    for (action, field) in [("update-email", "email"), ("update-description", "description")] {
        service.post(&format!("{path}/{action}"), &json!({})).await;
        assert_eq!(service.get(&path).await.json()[field], Value::Null);
    }
    service.stop().await;
}

#[tokio::test]
async fn updates_refuse_what_breaks_a_rule_and_name_the_field() {
    let service = Running::start().await;
    let (path, etag) = service.create("John").await;
    let company = |field: &str, count: usize| {
        let mut body = json!({ "companyName": "Contoso" });
        body[field] = Value::from("x".repeat(count));
        body
    };
    let rules = [
        ("update-name", json!({ "firstName": "Jane" }), "lastName"),
        ("update-name", json!({ "firstName": " ", "lastName": "Roe" }), "firstName"),
        ("update-name", json!({ "firstName": "x".repeat(101), "lastName": "Roe" }), "firstName"),
        ("update-name", json!({ "firstName": "Jane", "lastName": "x".repeat(101) }), "lastName"),
        ("update-description", json!({ "description": "x".repeat(501) }), "description"),
        ("update-email", json!({ "email": "" }), "email"),
        ("update-email", json!({ "email": "nobody" }), "email"),
        ("update-company", json!({ "street": "Street" }), "companyName"),
        ("update-company", company("companyName", 251), "companyName"),
        ("update-company", company("street", 251), "street"),
        ("update-company", company("houseNumber", 11), "houseNumber"),
        ("update-company", company("postalCode", 26), "postalCode"),
        ("update-company", company("city", 251), "city"),
        ("update-company", company("country", 251), "country"),
    ];
    for (action, body, field) in rules {
        let answer = service.post(&format!("{path}/{action}"), &body).await;
        assert_eq!(answer.invalid_fields(), [field], "{action}: {body}");
    }
    assert_eq!(service.get(&path).await.header("etag"), etag);
    assert_eq!(service.event_types().await, ["ContactCreatedEvent"]);
    service.stop().await;
}

#[tokio::test]
async fn updates_are_made_only_on_a_version_that_the_condition_allows() {
    let service = Running::start().await;
    for (action, body, _) in updates() {
        let (path, old) = service.create("John").await;
        let target = format!("{path}/{action}");
        let first = service.post_if(&target, &body, "if-match", &old).await;
        assert_eq!(first.status, StatusCode::NO_CONTENT);
        let current = first.header("etag");
        for (header, stale) in
            [("if-match", old.clone()), ("etag", old.clone()), ("if-match", format!("W/{current}"))]
        {
            let answer = service.post_if(&target, &body, header, &stale).await;
            assert_eq!(answer.problem(412)["title"], "Mid-Air Collision", "{header}: {stale}");
        }
        assert_eq!(service.get(&path).await.header("etag"), current);
        let listed = format!("{old}, {current}");
        let answer = service.post_if(&target, &body, "if-match", &listed).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        let answer = service.post_if(&target, &body, "etag", &answer.header("etag")).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        let answer = service.post_if(&target, &body, "if-match", "*").await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT);
        service.post_if(&target, &body, "if-match", "unquoted").await.problem(400);
    }
    service.stop().await;
}

#[tokio::test]
async fn if_match_wins_over_its_alias() {
    let service = Running::start().await;
    let (path, etag) = service.create("John").await;
    let request = service
        .request(Method::POST, &format!("{path}/update-email"))
        .header("if-match", &etag)
        .header("etag", "\"stale\"")
        .json(&json!({}));
    assert_eq!(Answer::of(request).await.status, StatusCode::NO_CONTENT);
    service.stop().await;
}

#[tokio::test]
async fn updates_answer_404_to_what_is_missing_or_deleted() {
    let service = Running::start().await;
    let (deleted, _) = service.create("John").await;
    service.delete(&deleted).await;
    for (action, body, _) in updates() {
        for path in [MISSING, &deleted, "/api/contacts/17"] {
            service.post(&format!("{path}/{action}"), &body).await.problem(404);
        }
    }
    service.stop().await;
}

#[tokio::test]
async fn changes_need_if_match_where_that_is_configured() {
    let service = Running::with(|config| config.preconditions = Preconditions::Required).await;
    let (path, etag) = service.create("John").await;
    for (action, body, _) in updates() {
        service.post(&format!("{path}/{action}"), &body).await.problem(428);
    }
    service.delete(&path).await.problem(428);
    assert_eq!(service.get(&path).await.header("etag"), etag);
    let body = json!({ "email": "jane@x.org" });
    let target = format!("{path}/update-email");
    let answer = service.post_if(&target, &body, "if-match", &etag).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT);
    let request = service.request(Method::DELETE, &path).header("etag", answer.header("etag"));
    assert_eq!(Answer::of(request).await.status, StatusCode::OK);
    service.stop().await;
}

#[tokio::test]
async fn delete_hides_the_contact_and_a_second_one_finds_none() {
    let service = Running::start().await;
    let (path, old) = service.create("John").await;
    service.post(&format!("{path}/update-email"), &json!({})).await;
    let stale = service.request(Method::DELETE, &path).header("if-match", &old);
    Answer::of(stale).await.problem(412);
    let deleted = service.delete(&path).await;
    assert_eq!((deleted.status, deleted.text.as_str()), (StatusCode::OK, ""));
    let etag = deleted.header("etag");
    assert_ne!(etag, old);
    service.delete(&path).await.problem(404);
    service.get(&path).await.problem(404);
    let known = service.request(Method::GET, &path).header("if-none-match", &etag);
    Answer::of(known).await.problem(404);
    service.delete(MISSING).await.problem(404);
    assert_eq!(service.get("/api/contacts").await.json()["items"], json!([]));
    assert_eq!(service.kept.deleted_documents().await, 1);
    let types = ["ContactCreatedEvent", "ContactEmailUpdatedEvent", "ContactDeletedEvent"];
    assert_eq!(service.event_types().await, types);
    service.stop().await;
}
