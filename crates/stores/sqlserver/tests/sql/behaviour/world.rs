//! A schema of one's own on the server, and sessions in it.

use std::collections::BTreeSet;
use std::sync::Arc;

use tiberius::error::Error;
use tiberius::{AuthMethod, Client, Config, Row};
use tokio::net::TcpStream;
use tokio_util::compat::{Compat, TokioAsyncWriteCompatExt};

use crate::text::{FILES, batches};

/// An ADO connection string of a database in which tests may make schemas, logins and roles.
const SERVER: &str = "POSTRIDER_TEST_SQLSERVER";

/// The start of a feed.
pub(crate) const START: [u8; 16] = [0; 16];

/// What the texts of tests and pages call `changefeed` and `myservice`, on the server.
pub(crate) struct World {
    config: Config,
    schema: String,
    mine: String,
    babelfish: bool,
    /// Whether a reader sees committed versions instead of waiting for an open writer.
    pub(crate) snapshots: bool,
}

/// Runs a test in a schema of its own, and takes the schema away however the test ends.
pub(crate) fn run<F, R>(test: F)
where
    F: FnOnce(Arc<World>) -> R,
    R: Future<Output = ()> + Send + 'static,
{
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let world = Arc::new(World::new().await);
        world.migrate(FILES[0].1).await;
        let ended = tokio::spawn(test(world.clone())).await;
        world.clean_up().await;
        if let Err(panicked) = ended {
            std::panic::resume_unwind(panicked.into_panic());
        }
    });
}

/// [`run`] with a table `myservice.MyEvent` that is a feed by its outbox.
pub(crate) fn run_with_feed<F, R>(test: F)
where
    F: FnOnce(Arc<World>) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    run(|world| async move {
        world.make_feed().await;
        test(world).await;
    });
}

/// A server's refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) number: u32,
    pub(crate) text: String,
}

/// One connection.
pub(crate) struct Session {
    client: Client<Compat<TcpStream>>,
    world: Arc<World>,
}

/// A record of the feed of `myservice.MyEvent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) ulid: [u8; 16],
    pub(crate) aggregate: i64,
    pub(crate) version: i32,
}

impl Record {
    /// The milliseconds of its ULID.
    pub(crate) fn time_ms(&self) -> u64 {
        self.ulid[..6].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// The low half of its ULID.
    pub(crate) fn low(&self) -> u64 {
        u64::from_be_bytes(self.ulid[8..].try_into().expect("eight bytes"))
    }
}

/// Bytes as T-SQL writes them.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |text, byte| text + &format!("{byte:02X}"))
}

/// The 16 bytes of a column.
pub(crate) fn ulid(row: &Row, column: usize) -> [u8; 16] {
    let bytes: &[u8] = row.get(column).expect("a ULID");
    bytes.try_into().expect("16 bytes")
}

async fn connect(config: &Config) -> Result<Client<Compat<TcpStream>>, Error> {
    let mut config = config.clone();
    loop {
        let stream = TcpStream::connect(config.get_addr()).await?;
        stream.set_nodelay(true)?;
        match Client::connect(config.clone(), stream.compat_write()).await {
            Err(Error::Routing { host, port }) => {
                config.host(host);
                config.port(port);
            }
            other => return other,
        }
    }
}

impl World {
    async fn new() -> Self {
        let text = std::env::var(SERVER)
            .unwrap_or_else(|_| panic!("{SERVER} names no server: these tests need one"));
        let config = Config::from_ado_string(&text).expect("an ADO connection string");
        let random = uuid::Uuid::new_v4().simple().to_string();
        let mut world = Self {
            config,
            schema: format!("cf_{}", &random[..12]),
            mine: format!("my_{}", &random[..12]),
            babelfish: false,
            snapshots: true,
        };
        let mut client = connect(&world.config).await.expect("the server answers");
        let asked =
            "select case when serverproperty(N'BabelfishVersion') is null then 0 else 1 end, \
             (select convert(int, is_read_committed_snapshot_on) from sys.databases
              where name = db_name())";
        let row = client.simple_query(asked).await.expect("an answer").into_row().await;
        let row = row.expect("an answer").expect("a row");
        world.babelfish = row.get::<i32, _>(0) == Some(1);
        world.snapshots = world.babelfish || row.get::<i32, _>(1) == Some(1);
        world
    }

    /// Whether the server is Babelfish: numbers of its own errors and permissions differ there.
    pub(crate) fn babelfish(&self) -> bool {
        self.babelfish
    }

    /// A text with this world's schemas in it.
    pub(crate) fn text(&self, text: &str) -> String {
        text.replace("[changefeed", &format!("[{}", self.schema))
            .replace("changefeed.", &format!("{}.", self.schema))
            .replace("myservice", &self.mine)
    }

    /// A new connection as the user of the connection string.
    pub(crate) async fn session(self: &Arc<Self>) -> Session {
        let client = connect(&self.config).await.expect("a connection");
        Session { client, world: self.clone() }
    }

    /// A new connection as somebody else.
    pub(crate) async fn session_as(self: &Arc<Self>, user: &str, password: &str) -> Session {
        let mut config = self.config.clone();
        config.authentication(AuthMethod::sql_server(user, password));
        let client = connect(&config).await.expect("a connection");
        Session { client, world: self.clone() }
    }

    /// Runs a file of batches.
    pub(crate) async fn migrate(self: &Arc<Self>, file: &str) {
        let mut session = self.session().await;
        if self.babelfish {
            // A rowversion is accepted there only by this setting of the session.
            let hatch =
                "exec sp_babelfish_configure 'babelfishpg_tsql.escape_hatch_rowversion', 'ignore'";
            session.run(hatch).await;
        }
        for batch in batches(file) {
            session.run(&batch).await;
        }
    }

    pub(crate) async fn make_feed(self: &Arc<Self>) {
        let mut session = self.session().await;
        session.run("create schema myservice").await;
        let table = "create table myservice.MyEvent (AggregateID bigint not null, \
             Version int not null, ChosenShoeSize int not null, \
             primary key (AggregateID, Version))";
        session.run(table).await;
        session.run("exec changefeed.setup_feed @table = N'myservice.MyEvent', @outbox = 1").await;
    }

    /// Takes everything away; what is not there is left out.
    async fn clean_up(self: &Arc<Self>) {
        let mut session = self.session().await;
        let feeds = "select f.table_name from changefeed.feed as f where f.name like N'%.%'";
        let feeds = session.try_run(feeds).await.unwrap_or_default();
        for row in feeds.into_iter().flatten() {
            let table = row.get::<&str, _>(0).unwrap_or_default().replace('\'', "''");
            let down = format!("exec changefeed.teardown_feed N'{table}', @drop_unread = 1");
            let _ = session.try_run(&down).await;
        }
        let mut drops = BTreeSet::new();
        for (_, file) in FILES {
            drops.extend(file.lines().filter(|line| line.starts_with("drop ")));
        }
        let mut drops: Vec<String> = drops.into_iter().map(str::to_owned).collect();
        for table in ["[feed:outbox]", "[state:outbox]"] {
            drops.push(format!("drop table if exists [changefeed].{table}"));
        }
        for object in ["lock_shard", "update_state", "seed_state", "move_outbox", "check_cursor"]
            .iter()
            .chain(&["fill_read", "read_feed", "read_page", "position_at", "prune_feed"])
        {
            drops.push(format!("drop procedure if exists [changefeed].[{object}:outbox]"));
        }
        for table in [
            "template",
            "feed",
            "migration",
            "outbox",
            "event_id",
            "store",
            "partition",
            "lease",
            "relay",
            "checkpoint",
            "dead_letter",
            "document",
            "inbox",
        ] {
            drops.push(format!("drop table if exists [changefeed].[{table}]"));
        }
        for role in ["writers:outbox", "readers:outbox", "relay", "documents", "inbox"] {
            drops.push(format!("drop role if exists [changefeed.{role}]"));
        }
        drops.push("drop sequence [changefeed].[sequence]".into());
        drops.push("drop schema [changefeed]".into());
        let tables = "select quotename(s.name) + N'.' + quotename(t.name) from sys.tables as t \
             inner join sys.schemas as s on s.schema_id = t.schema_id where s.name = N'myservice'";
        for row in session.try_run(tables).await.unwrap_or_default().into_iter().flatten() {
            drops.push(format!("drop table {}", row.get::<&str, _>(0).unwrap_or_default()));
        }
        drops.push("drop schema myservice".into());
        for drop in drops {
            let _ = session.try_run(&drop).await;
        }
    }
}

impl Session {
    /// Runs one batch; every result set of it.
    pub(crate) async fn try_run(&mut self, batch: &str) -> Result<Vec<Vec<Row>>, Refusal> {
        let text = self.world.text(batch);
        let ran = match self.client.simple_query(text).await {
            Ok(stream) => stream.into_results().await,
            Err(error) => Err(error),
        };
        ran.map_err(|error| match error {
            Error::Server(token) => {
                Refusal { number: token.code(), text: token.message().to_owned() }
            }
            other => panic!("the connection is broken: {other}\n{batch}"),
        })
    }

    /// Runs one batch that has to succeed.
    pub(crate) async fn run(&mut self, batch: &str) -> Vec<Vec<Row>> {
        let ran = self.try_run(batch).await;
        ran.unwrap_or_else(|refusal| panic!("{refusal:?}\n{}", self.world.text(batch)))
    }

    /// Runs one batch that has to be refused with this number, or on Babelfish, where the server's
    /// own numbers differ, with any.
    pub(crate) async fn refused(&mut self, batch: &str, number: u32) -> Refusal {
        let refusal = match self.try_run(batch).await {
            Ok(_) => panic!("not refused with {number}: {}", self.world.text(batch)),
            Err(refusal) => refusal,
        };
        let ours = (50_000..78_000).contains(&number);
        let differs = self.world.babelfish && !ours;
        assert!(refusal.number == number || differs, "{number}: {refusal:?}\n{batch}");
        if differs || !ours { refusal } else { self.remedy(refusal) }
    }

    fn remedy(&self, refusal: Refusal) -> Refusal {
        assert!(refusal.text.contains("changefeed: "), "{refusal:?}");
        refusal
    }

    /// The only number that a query returns.
    pub(crate) async fn number(&mut self, query: &str) -> i64 {
        let sets = self.run(&format!("select convert(bigint, ({query}))")).await;
        sets[0][0].get::<i64, _>(0).expect("a number")
    }

    /// Puts an event into the outbox and its table, in a transaction of its own.
    pub(crate) async fn enqueue(&mut self, shard: i32, aggregate: i64, version: i32, time: &str) {
        let batch = enqueue(shard, aggregate, version, time);
        self.run(&format!("begin transaction; {batch} commit transaction;")).await;
    }

    /// A page, by the procedure and a table of the session's own.
    pub(crate) async fn try_read(
        &mut self,
        shard: i32,
        after: [u8; 16],
        most: i32,
    ) -> Result<Vec<Record>, Refusal> {
        let batch = format!(
            "drop table if exists #read;
             create table #read (ulid binary(16) not null, AggregateID bigint not null,
                 Version int not null);
             exec changefeed.[read_feed:myservice.MyEvent] {shard}, {}, {most};
             select ulid, AggregateID, Version from #read order by ulid;
             drop table #read;",
            hex(&after)
        );
        let sets = self.try_run(&batch).await?;
        let rows = sets.into_iter().flatten();
        let records = rows.map(|row| Record {
            ulid: ulid(&row, 0),
            aggregate: row.get(1).expect("a key"),
            version: row.get(2).expect("a version"),
        });
        Ok(records.collect())
    }

    /// [`try_read`](Self::try_read) that has to succeed.
    pub(crate) async fn read(&mut self, shard: i32, after: [u8; 16], most: i32) -> Vec<Record> {
        let page = self.try_read(shard, after, most).await;
        page.unwrap_or_else(|refusal| panic!("{refusal:?}"))
    }

    /// All records after a cursor, page by page until an empty one.
    pub(crate) async fn read_all(&mut self, shard: i32, after: [u8; 16]) -> Vec<Record> {
        let mut all: Vec<Record> = Vec::new();
        loop {
            let after = all.last().map_or(after, |record| record.ulid);
            let page = self.read(shard, after, 10).await;
            if page.is_empty() {
                return all;
            }
            all.extend(page);
        }
    }
}

/// The statements that write an event: its row and its place in the outbox.
pub(crate) fn enqueue(shard: i32, aggregate: i64, version: i32, time: &str) -> String {
    format!(
        "insert into myservice.MyEvent (AggregateID, Version, ChosenShoeSize)
         values ({aggregate}, {version}, 38);
         insert into changefeed.[outbox:myservice.MyEvent]
             (shard_id, time_hint, AggregateID, Version)
         values ({shard}, '{time}', {aggregate}, {version});"
    )
}
