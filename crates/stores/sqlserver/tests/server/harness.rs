//! A store in a schema of its own on the named server, and transactions of an application.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_conformance::store::{Prunes, StoreFeatures, StoreHarness, Supports, Times, Writers};
use postrider_core::{EventId, NewEvent, Result};
use postrider_store_sqlserver::{
    OnDuplicate, SqlServerClient, SqlServerOptions, SqlServerStore, sqlserver_error,
};
use uuid::Uuid;

pub(crate) struct SqlServerHarness {
    store: SqlServerStore,
    options: SqlServerOptions,
    schema: String,
}

/// What takes a schema away: its foreign keys are none, so that the order does not matter but for
/// what depends on the sequence.
fn teardown(schema: &str) -> String {
    format!(
        "declare @sql nvarchar(max) = N'';
        select @sql = @sql + N'drop procedure [{schema}].' + quotename(p.name) + N';'
        from sys.procedures as p where schema_name(p.schema_id) = N'{schema}';
        exec sp_executesql @sql;
        set @sql = N'';
        select @sql = @sql + N'drop table [{schema}].' + quotename(t.name) + N';'
        from sys.tables as t where schema_name(t.schema_id) = N'{schema}';
        exec sp_executesql @sql;
        declare @round int = 0;
        while @round < 6
        begin
            set @sql = N'';
            select @sql = @sql + N'begin try drop function [{schema}].' + quotename(o.name)
                + N'; end try begin catch end catch;'
            from sys.objects as o where schema_name(o.schema_id) = N'{schema}' and o.type = 'FN';
            exec sp_executesql @sql;
            set @round = @round + 1;
        end;
        drop sequence [{schema}].[sequence];
        set @sql = N'';
        select @sql = @sql + N'drop role ' + quotename(p.name) + N';'
        from sys.database_principals as p where p.type = 'R' and p.name like N'{schema}.%';
        exec sp_executesql @sql;
        exec (N'drop schema [{schema}]');"
    )
}

/// An application's transaction on a connection of its own; dropping it closes that, which rolls
/// back.
pub(crate) struct Open(SqlServerClient);

async fn say(client: &mut SqlServerClient, sql: &str) {
    let answer = client.simple_query(sql).await.expect("the server answers");
    answer.into_results().await.expect("the statement is good");
}

impl Drop for SqlServerHarness {
    fn drop(&mut self) {
        let (options, sql) = (self.options.clone(), teardown(&self.schema));
        // A test's own runtime is ending.
        let gone = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let store = SqlServerStore::open(options).await.expect("the store is there");
                let mut client = store.connect().await.expect("a connection");
                say(&mut client, &sql).await;
            });
        });
        if gone.join().is_err() {
            eprintln!("schema {} is left on the server", self.schema);
        }
    }
}

#[async_trait]
impl StoreHarness for SqlServerHarness {
    type Store = SqlServerStore;
    type Transaction = Open;

    async fn fresh(partitions: u32) -> Self {
        let connection = std::env::var("POSTRIDER_TEST_SQLSERVER").expect("it names a server");
        let unique = Uuid::now_v7().simple().to_string();
        let schema = format!("pt_{}", &unique[unique.len() - 16..]);
        let options =
            SqlServerOptions::new(connection).schema(&schema).partitions(partitions).connections(6);
        let store = SqlServerStore::open(options.clone()).await.expect("the store opens");
        let harness = Self { store, options, schema };
        let mut client = harness.store.connect().await.expect("a connection");
        let schema = &harness.schema;
        let table = format!(
            "create table [{schema}].application (id nvarchar(50) primary key, value nvarchar(50))"
        );
        say(&mut client, &table).await;
        harness
    }

    fn store(&self) -> Arc<SqlServerStore> {
        Arc::new(self.store.clone())
    }

    fn features(&self) -> StoreFeatures {
        StoreFeatures {
            writers: Writers::Concurrent,
            documents: Supports::Yes,
            raising: Supports::Yes,
            pruning: Prunes::Events,
            times: Times::OfTheLook,
        }
    }

    async fn begin(&self) -> Open {
        let mut client = self.store.connect().await.expect("a connection");
        say(&mut client, "begin transaction").await;
        Open(client)
    }

    async fn append(&self, open: &mut Open, events: &[NewEvent]) -> Result<Vec<EventId>> {
        self.store.outbox().append(&mut open.0, events).await
    }

    async fn append_ignoring_repeats(
        &self,
        open: &mut Open,
        events: &[NewEvent],
    ) -> Result<Vec<EventId>> {
        self.store.outbox().append_with(&mut open.0, events, OnDuplicate::Ignore).await
    }

    async fn write_row(&self, open: &mut Open, id: &str, value: &str) {
        let schema = &self.schema;
        let insert = format!("insert into [{schema}].application (id, value) values (@P1, @P2)");
        open.0.execute(insert, &[&id, &value]).await.expect("insert");
    }

    async fn read_row(&self, id: &str) -> Option<String> {
        let mut client = self.store.connect().await.expect("a connection");
        let schema = &self.schema;
        let select = format!("select value from [{schema}].application where id = @P1");
        let found = client.query(select, &[&id]).await.expect("select");
        let row = found.into_row().await.expect("an answer");
        row.and_then(|row| row.get::<&str, _>(0).map(str::to_owned))
    }

    async fn commit(&self, mut open: Open) -> Result<()> {
        let done = async { open.0.simple_query("commit transaction").await?.into_results().await };
        done.await.map(drop).map_err(|error| sqlserver_error("commit", error))
    }

    async fn rollback(&self, mut open: Open) {
        say(&mut open.0, "if @@trancount > 0 rollback transaction").await;
    }

    async fn pass_time(&self, duration: Duration) {
        tokio::time::sleep(duration).await;
    }

    async fn raise_partitions(&self, count: u32) -> Result<()> {
        self.store.raise_partitions(count).await
    }
}
