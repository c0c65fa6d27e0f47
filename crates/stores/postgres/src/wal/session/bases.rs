//! Bases while the stream flows, and what else shows that it can go on as it began.
//!
//! What lives here: asking for them, and judging the answers. What does not: what a base is for
//! (`../ledger.rs`).
//! Invariant: a base is offered only if nothing was passed over since the stream began.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use postrider_core::{Error, ErrorKind, Result};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{MAX_FAILED_BASES, Stream};
use crate::error::failed;
use crate::server::Connection;
use crate::wal::Wal;
use crate::wal::ledger::Base;
use crate::wal::slot;

/// What the database says of itself at one moment.
pub(super) struct Seen {
    /// None while the publication passes rows over.
    pub(super) base: Option<Base>,
    /// Names the mapping of an adopted table.
    pub(super) mapping: Option<String>,
}

impl Seen {
    fn of(rows: &[Row]) -> Result<Self> {
        let row =
            rows.first().ok_or_else(|| Error::corrupt("the server says nothing of itself"))?;
        Ok(Self { base: slot::base(row)?, mapping: slot::mapping(row) })
    }
}

/// Looks by the stream's own connection.
pub(super) async fn seen(wal: &Wal, control: &Connection) -> Result<Seen> {
    let sql = wal.base_sql();
    let params = [(&wal.options.publication.as_str() as _, Type::TEXT)];
    let rows = control.client.query_typed(&sql, &params).await.map_err(failed("take a base"))?;
    Seen::of(&rows)
}

/// Looks by any connection.
pub(super) fn ask(wal: &Wal) -> BoxFuture<'_, Result<Seen>> {
    async move {
        let sql = wal.base_sql();
        let params = [(&wal.options.publication.as_str() as _, Type::TEXT)];
        let rows = wal.store.inner.connections.query("take a base", &sql, &params).await?;
        Seen::of(&rows)
    }
    .boxed()
}

impl Stream<'_> {
    /// Offers a base, if nothing was passed over since the stream began.
    pub(super) fn judge(&mut self, seen: Result<Seen>) -> Result<()> {
        let seen = match seen {
            Ok(seen) => seen,
            // The next one will do: the stream itself is in order.
            Err(error)
                if error.kind() == ErrorKind::Transient && self.failed_bases < MAX_FAILED_BASES =>
            {
                self.failed_bases += 1;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.failed_bases = 0;
        let base = self.unchanged(seen)?;
        if std::mem::take(&mut self.news) {
            self.wal.hub.offer(base);
        }
        Ok(())
    }

    /// A base that was taken while the publication was as the stream found it: nothing was passed
    /// over until then. What comes next is to be read by the mapping that is in force.
    pub(super) fn unchanged(&self, seen: Seen) -> Result<Base> {
        let base = seen.base.filter(|base| base.publication == self.publication);
        let base = base.ok_or_else(|| {
            Error::transient(
                "the publication was changed while it was read; what it passed over is read from \
                 the table",
            )
        })?;
        match seen.mapping == self.mapping {
            true => Ok(base),
            false => Err(Error::transient(
                "the mapping of the adopted table was changed; reading on by the new one",
            )),
        }
    }
}
