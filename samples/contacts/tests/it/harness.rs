//! A service on a port and a store of its own, and what tests ask of it.

use std::path::PathBuf;
use std::time::Duration;

use postrider::postgres::{PostgresOptions, PostgresStore};
use postrider::sqlite::rusqlite::Connection;
use postrider::sqlite::{SqliteOptions, SqliteStore};
use postrider::{BatchLimit, ConsumerName, Entry, Feed, Position, Record};
use postrider_sample_contacts::{Config, StoreConfig, serve};
use postrider_servers::postgres;
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// Longest wait for anything that must happen.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// Where a service keeps its contacts, and what a test looks up there.
pub(crate) trait Kept: Sized {
    fn fresh() -> Self;

    fn config(&self) -> StoreConfig;

    /// How many contacts are kept that were deleted.
    async fn deleted_documents(&self) -> u32;

    /// Everything in the outbox, in the order in which it was appended.
    async fn outbox(&self) -> Vec<Record>;
}

/// A SQLite file in a folder of its own.
pub(crate) struct SqliteFile(TempDir);

impl SqliteFile {
    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("contacts.db")
    }
}

impl Kept for SqliteFile {
    fn fresh() -> Self {
        Self(TempDir::new().expect("make a folder"))
    }

    fn config(&self) -> StoreConfig {
        StoreConfig::sqlite(self.path())
    }

    async fn deleted_documents(&self) -> u32 {
        let database = Connection::open(self.path()).expect("open the file");
        let sql = "SELECT count(*) FROM postrider_document WHERE deleted = 1";
        database.query_row(sql, [], |row| row.get(0)).expect("read the documents")
    }

    async fn outbox(&self) -> Vec<Record> {
        let store = SqliteStore::open(SqliteOptions::new(self.path())).await;
        sorted(&store.expect("open the store")).await
    }
}

/// A fresh database on a PostgreSQL server.
pub(crate) struct PostgresDatabase(postgres::Database);

impl PostgresDatabase {
    pub(crate) fn url(&self) -> String {
        self.0.url()
    }
}

impl Kept for PostgresDatabase {
    fn fresh() -> Self {
        Self(postgres::shared(postgres::Version::V15).expect("a server"))
    }

    fn config(&self) -> StoreConfig {
        StoreConfig::postgres(self.0.url())
    }

    async fn deleted_documents(&self) -> u32 {
        let sql = "SELECT count(*) FROM postrider.document WHERE deleted";
        self.0.psql(sql).expect("read the documents").parse().expect("a number")
    }

    async fn outbox(&self) -> Vec<Record> {
        let store = PostgresStore::open(PostgresOptions::new(self.0.url())).await;
        sorted(&store.expect("open the store")).await
    }
}

/// An account of Azure Cosmos DB, emulated, and a file for the receiver.
#[cfg(feature = "cosmos")]
pub(crate) struct CosmosContainer {
    pub(crate) account: postrider_servers::cosmos::Cosmos,
    folder: TempDir,
}

#[cfg(feature = "cosmos")]
impl CosmosContainer {
    pub(crate) async fn store(&self) -> postrider::cosmos::CosmosStore {
        use postrider::cosmos::{CosmosConfig, CosmosStore};

        let url = self.account.connection_string();
        let mut config = CosmosConfig::new(url, "contacts", "contacts");
        config.topic = "contacts".to_owned();
        CosmosStore::open(&config).await.expect("open the container")
    }
}

#[cfg(feature = "cosmos")]
impl Kept for CosmosContainer {
    fn fresh() -> Self {
        let account = postrider_servers::cosmos::Cosmos::start().expect("the emulator starts");
        Self { account, folder: TempDir::new().expect("make a folder") }
    }

    fn config(&self) -> StoreConfig {
        StoreConfig::Cosmos {
            url: postrider::Secret::new(self.account.connection_string()),
            database: "contacts".to_owned(),
            container: "contacts".to_owned(),
            journal: self.folder.path().join("journal.db"),
        }
    }

    async fn deleted_documents(&self) -> u32 {
        use futures_util::TryStreamExt;
        use postrider::cosmos::azure_data_cosmos::feed::FeedScope;

        let store = self.store().await;
        let sql = "SELECT * FROM c WHERE c.type = 'contact' AND c.data.deleted = true";
        let container = store.container();
        let found = container.query_items::<Value>(sql, FeedScope::full_container(), None);
        let found: Vec<Value> =
            found.await.expect("the query").try_collect().await.expect("the documents");
        u32::try_from(found.len()).expect("few documents")
    }

    async fn outbox(&self) -> Vec<Record> {
        records(&self.store().await).await
    }
}

/// Positions of a change feed are no numbers: each range's records come in its own order.
async fn records(store: &impl Feed) -> Vec<Record> {
    let consumer = ConsumerName::new("test").expect("a valid name");
    let limit = BatchLimit { records: 10_000, bytes: usize::MAX };
    let mut records = Vec::new();
    for partition in store.partitions(&consumer).await.expect("list the partitions") {
        let mut after = Position::START;
        loop {
            let page = store.read(&partition, &after, limit).await.expect("read the partition");
            if page.entries.is_empty() {
                break;
            }
            after = page.position;
            for entry in page.entries {
                match entry {
                    Entry::Record(record) => records.push(record),
                    Entry::Malformed(bad) => panic!("malformed record: {}", bad.reason),
                }
            }
        }
    }
    records
}

/// Everything, in the order in which it was appended.
async fn sorted(store: &impl Feed) -> Vec<Record> {
    let mut records = records(store).await;
    records.sort_by(|a, b| a.position.as_bytes().cmp(b.position.as_bytes()));
    records
}

pub(crate) type Running = RunningOn<SqliteFile>;

pub(crate) struct RunningOn<K> {
    pub(crate) base: String,
    pub(crate) client: reqwest::Client,
    pub(crate) kept: K,
    stop: oneshot::Sender<()>,
    tasks: JoinSet<()>,
}

impl Running {
    pub(crate) fn database(&self) -> PathBuf {
        self.kept.path()
    }
}

impl<K: Kept> RunningOn<K> {
    pub(crate) async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::on(K::fresh(), change).await
    }

    pub(crate) async fn on(kept: K, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(kept.config());
        change(&mut config);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind a free port");
        let address = listener.local_addr().expect("a bound listener has an address");
        let (stop, stopped) = oneshot::channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let stop = async { stopped.await.unwrap_or(()) };
            serve(listener, config, stop).await.expect("the service opens its store");
        });
        let client = reqwest::Client::builder().no_proxy().timeout(DEADLINE);
        let client = client.build().expect("build a client");
        Self { base: format!("http://{address}"), client, kept, stop, tasks }
    }

    /// Stops the service and gives back what it keeps; fails if it does not drain.
    pub(crate) async fn stop(mut self) -> K {
        self.stop.send(()).expect("the service waits for its stop");
        let ended = tokio::time::timeout(DEADLINE, self.tasks.join_next()).await;
        ended.expect("the service drains").expect("one task").expect("it ends without a panic");
        self.kept
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.base))
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        Answer::of(self.request(Method::GET, path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        Answer::of(self.request(Method::POST, path).json(body)).await
    }

    pub(crate) async fn post_if(
        &self,
        path: &str,
        body: &Value,
        header: &str,
        condition: &str,
    ) -> Answer {
        let request = self.request(Method::POST, path).header(header, condition);
        Answer::of(request.json(body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        Answer::of(self.request(Method::DELETE, path)).await
    }

    /// A contact's path and ETag.
    pub(crate) async fn create(&self, first_name: &str) -> (String, String) {
        let answer = self.post("/api/contacts", &john(first_name)).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text);
        (answer.header("location"), answer.header("etag"))
    }

    /// Everything in the outbox, in the order in which it was appended.
    pub(crate) async fn outbox(&self) -> Vec<Record> {
        self.kept.outbox().await
    }

    /// The types of the events in the outbox.
    pub(crate) async fn event_types(&self) -> Vec<String> {
        let outbox = self.outbox().await;
        outbox.iter().map(|record| record.event.event_type().to_string()).collect()
    }
}

/// The article's contact, under another first name.
pub(crate) fn john(first_name: &str) -> Value {
    json!({
        "firstName": first_name, "lastName": "Doe", "email": "johndoe@contoso.com",
        "description": "This is a contact", "companyName": "Contoso",
    })
}

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) async fn of(request: RequestBuilder) -> Self {
        let response: Response = request.send().await.expect("the service answers");
        let status = response.status();
        let headers = response.headers().clone();
        let text = response.text().await.expect("the answer is text");
        Self { status, headers, text }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).expect("the answer is JSON")
    }

    pub(crate) fn has_header(&self, name: &str) -> bool {
        self.headers.contains_key(name)
    }

    pub(crate) fn header(&self, name: &str) -> String {
        let value = self.headers.get(name).unwrap_or_else(|| panic!("no {name}: {self:?}"));
        value.to_str().expect("a header of text").to_owned()
    }

    /// Checks that this is a whole problem document of a status, and gives it.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        assert_eq!(self.header("content-type"), "application/problem+json");
        let problem = self.json();
        assert_eq!(problem["status"], status);
        for member in ["type", "title", "detail", "instance", "traceId"] {
            let text = problem[member].as_str().unwrap_or_default();
            assert!(!text.is_empty(), "{member} is missing: {problem}");
        }
        problem
    }

    /// The fields that a validation problem names, in order.
    #[track_caller]
    pub(crate) fn invalid_fields(&self) -> Vec<String> {
        let problem = self.problem(400);
        let errors = problem["errors"].as_object();
        let errors = errors.unwrap_or_else(|| panic!("no errors by field: {problem}"));
        errors.keys().cloned().collect()
    }
}
