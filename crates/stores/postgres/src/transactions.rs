//! One statement, or one transaction, on the store's connections.
//!
//! What lives here: filling a statement's names in, and a transaction whose work has an error of
//! its own. What does not: connections and their bounds.
//! Invariant: work that failed has left nothing.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use postrider_core::{Error, HeldLease, Result};
use tokio_postgres::{Row, Transaction};

use crate::PostgresStore;
use crate::connections::Param;

impl PostgresStore {
    /// One statement in a transaction of its own.
    pub(crate) async fn query(
        &self,
        place: &'static str,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        let inner = &*self.inner;
        inner.connections.query(place, &inner.names.fill(sql), params).await
    }

    /// [`Self::query`] under a lease: the statement has its fence, and is `Fenced` also when
    /// another copy of the database answers than the one that granted the lease.
    pub(crate) async fn query_under(
        &self,
        place: &'static str,
        lease: &HeldLease,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        let inner = &*self.inner;
        inner.connections.query_under(place, lease, &inner.names.fill(sql), params).await
    }

    /// [`Self::query_under`] for one that comes many times a second.
    pub(crate) async fn query_often_under(
        &self,
        place: &'static str,
        lease: &HeldLease,
        sql: &str,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        let inner = &*self.inner;
        let sql = inner.names.fill(sql);
        inner.connections.query_often_under(place, lease, &sql, params).await
    }

    /// Runs `work` in one transaction on a connection of the store's own, commits it when `work`
    /// succeeds and wakes this process's readers: the place for a business row and its event. The
    /// store's `statement_timeout` bounds it as a whole.
    ///
    /// ```no_run
    /// # use postrider_core::{NewEvent, Result};
    /// # use postrider_store_postgres::{OnDuplicate, PostgresStore, postgres_error};
    /// # async fn f(store: &PostgresStore, placed: NewEvent) -> Result<()> {
    /// let outbox = store.outbox();
    /// store
    ///     .transaction(move |tx| {
    ///         Box::pin(async move {
    ///             tx.batch_execute("INSERT INTO orders VALUES (42)")
    ///                 .await
    ///                 .map_err(|error| postgres_error("place the order", error))?;
    ///             outbox.append(tx, &[placed]).await
    ///         })
    ///     })
    ///     .await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of `work`, after which nothing is left, and the store's own. When the connection is
    /// lost during the commit, whether it was committed is unknown.
    ///
    /// # Cancellation
    /// A dropped call rolls back, unless the commit was sent.
    pub async fn transaction<T, E, F>(&self, work: F) -> Result<T, E>
    where
        T: Send,
        E: From<Error> + Send + 'static,
        F: for<'a> FnOnce(&'a Transaction<'_>) -> BoxFuture<'a, Result<T, E>> + Send + 'static,
    {
        // The pool's errors are core's; the work's own goes around it.
        let failure: Arc<Mutex<Option<E>>> = Arc::default();
        let failure_here = Arc::clone(&failure);
        let done = self.inner.connections.transaction("run a transaction", move |tx| {
            Box::pin(async move {
                work(tx).await.map_err(|error| {
                    *failure_here.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    Error::permanent("the work failed and was rolled back")
                })
            })
        });
        match done.await {
            Ok(value) => {
                self.ring();
                Ok(value)
            }
            Err(error) => {
                let own = failure.lock().unwrap_or_else(PoisonError::into_inner).take();
                Err(own.unwrap_or_else(|| error.into()))
            }
        }
    }
}
