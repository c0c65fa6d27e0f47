//! Connections: pooled, bounded in number, and every statement bounded in time.
//!
//! What lives here: the pool, and one statement or one transaction on it. What does not: any SQL.
//! Invariant: statements are unnamed and keep nothing in the session, so that a pooler in
//! transaction mode may stand in between; a connection whose call was cut short is not used again.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use futures_util::future::BoxFuture;
use postrider_core::{Error, Result};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Config, Row, Transaction};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::PostgresOptions;
use crate::error::failed;

/// A value and its type on the wire.
pub(crate) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

pub(crate) struct Connections {
    pool: Pool,
    timeout: Duration,
}

impl Connections {
    pub(crate) fn new(options: &PostgresOptions) -> Result<Self> {
        let mut config: Config = options.url.expose().parse().map_err(|error| {
            // The driver's text may repeat parts of the URL, which holds the password.
            let _: tokio_postgres::Error = error;
            Error::permanent(
                "url: not a PostgreSQL URL; write postgres://user:password@host:5432/database",
            )
        })?;
        if config.get_application_name().is_none() {
            config.application_name("postrider");
        }
        config.connect_timeout(options.statement_timeout.min(Duration::from_secs(10)));
        let milliseconds = options.statement_timeout.as_millis();
        config.options(format!(
            "-c statement_timeout={milliseconds} -c idle_in_transaction_session_timeout=\
             {milliseconds} -c lock_timeout={milliseconds}"
        ));
        let tls = rustls::ClientConfig::builder_with_provider(
            rustls::crypto::aws_lc_rs::default_provider().into(),
        )
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::permanent("TLS: no protocol version").with_source(error))?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(config, MakeRustlsConnect::new(tls), recycling);
        let pool = Pool::builder(manager)
            .max_size(options.connections)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(options.statement_timeout))
            .create_timeout(Some(options.statement_timeout))
            .build()
            .map_err(|error| Error::permanent("connections").with_source(error))?;
        Ok(Self { pool, timeout: options.statement_timeout })
    }

    async fn client(&self, place: &'static str) -> Result<Object> {
        use deadpool_postgres::PoolError;
        self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => failed(place)(error),
            PoolError::Timeout(_) => {
                Error::transient(format!("{place}: no connection in time")).with_source(error)
            }
            PoolError::Closed | PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_) => {
                Error::transient(format!("{place}: no connection")).with_source(error)
            }
        })
    }

    /// One statement in a transaction of its own: one round trip.
    pub(crate) async fn query(
        &self,
        place: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        let client = self.client(place).await?;
        let answer = tokio::time::timeout(self.timeout, client.query_typed(sql, params)).await;
        match answer {
            Ok(answer) => answer.map_err(failed(place)),
            Err(_) => {
                drop(Object::take(client));
                Err(Error::transient(format!("{place}: no answer in time; connecting again")))
            }
        }
    }

    /// Several statements without parameters, in one transaction.
    pub(crate) async fn run(&self, place: &'static str, sql: &str) -> Result<()> {
        let client = self.client(place).await?;
        client.batch_execute(sql).await.map_err(failed(place))
    }

    /// Runs `work` in one READ COMMITTED transaction and commits it when `work` succeeds. A call
    /// that is dropped rolls back.
    pub(crate) async fn transaction<T: Send>(
        &self,
        place: &'static str,
        work: impl for<'a> FnOnce(&'a Transaction<'_>) -> BoxFuture<'a, Result<T>> + Send,
    ) -> Result<T> {
        let mut client = self.client(place).await?;
        let whole = async {
            let tx = client.transaction().await.map_err(failed(place))?;
            let value = work(&tx).await?;
            tx.commit().await.map_err(failed(place))?;
            Ok(value)
        };
        match tokio::time::timeout(self.timeout, whole).await {
            Ok(answer) => answer,
            Err(_) => {
                drop(Object::take(client));
                Err(Error::transient(format!("{place}: no answer in time; connecting again")))
            }
        }
    }
}
