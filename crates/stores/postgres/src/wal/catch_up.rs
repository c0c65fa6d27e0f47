//! Reading from the table what the slot can no longer give.
//!
//! What lives here: a snapshot that meets the stream exactly, and the rows that it shows and a
//! consumer has not had. What does not: when that is needed (`reader.rs`), which rows a consumer
//! has had (`ledger.rs`).
//! Invariant: what is read here and what the stream sends from the seam on, together, is everything
//! once: the snapshot is imported before the slot that exported it sends anything.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::{FutureExt, TryStreamExt};
use postrider_core::{Entry, Error, Result, Timestamp};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{Client, Row, RowStream};

use super::Wal;
use super::hub::Borrowed;
use super::ledger::{Base, Delivered};
use super::lsn::Lsn;
use super::position::WalPlace;
use super::slot;
use super::vigil;
use super::wire::{Seam, SlotKind, Walsender};
use crate::connections::Param;
use crate::error::failed;
use crate::row::Decoder;
use crate::server::Connection;

/// Most rows, and bytes of payload, that are handed on at once; two such pages may wait.
const PAGE_ROWS: usize = 512;
const PAGE_BYTES: usize = 1024 * 1024;
/// Longest wait for the server to take the snapshot over.
const IMPORT_WITHIN: Duration = Duration::from_secs(10);

/// A wait is told of again after so many looks.
const TOLD_EVERY: u32 = 12;

/// A row that the consumer has not had.
pub(super) struct Missed {
    pub(super) place: WalPlace,
    pub(super) xid: Option<u64>,
    pub(super) seq: i64,
    pub(super) entry: Entry,
}

/// What a catch-up hands on, in this order.
pub(super) enum Page {
    /// The snapshot that is read, and where the stream goes on; the place before the first row.
    Begun(Base, WalPlace),
    Rows(Vec<Missed>),
    /// All was read.
    End,
}

/// What is read from the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// What the consumer has not had.
    Missing,
    /// All rows, because they have nothing to tell them apart by.
    Everything,
    /// Nothing: it begins with what the stream brings.
    Nothing,
}

/// A catch-up under way; dropping it ends it.
pub(super) struct CatchUp {
    pages: mpsc::Receiver<Result<Page>>,
    _task: JoinSet<()>,
}

impl CatchUp {
    /// Begins to read what `delivered` leaves out.
    pub(super) fn begin(wal: Arc<Wal>, delivered: Delivered, system: u64, wanted: Wanted) -> Self {
        wal.counts.caught_up();
        let (sender, pages) = mpsc::channel(2);
        let mut task = JoinSet::new();
        task.spawn(async move {
            if let Err(error) = run(&wal, &delivered, (system, wanted), &sender).await {
                // Nobody listens any more: then nobody needs to know.
                let _ = sender.send(Err(error)).await;
            }
        });
        Self { pages, _task: task }
    }

    /// Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Page> {
        self.pages.recv().await.unwrap_or_else(|| Err(Error::transient("the catch-up ended early")))
    }
}

/// Holds the snapshot until it is imported.
enum Exporter<'a> {
    Main(Borrowed<'a>),
    /// Its slot goes with the connection.
    Temporary {
        _walsender: Walsender,
        seam: Seam,
    },
}

impl Exporter<'_> {
    fn seam(&self) -> &Seam {
        match self {
            Self::Main(borrowed) => &borrowed.seam,
            Self::Temporary { seam, .. } => seam,
        }
    }
}

async fn exporter<'a>(wal: &'a Wal, delivered: &Delivered) -> Result<Exporter<'a>> {
    let stands = delivered.place.map(|place| place.lsn);
    if let Some(borrowed) = wal.hub.borrow_seam()
        // Otherwise that snapshot was read to its end already, and something came after it.
        && stands.is_none_or(|stands| stands < borrowed.seam.consistent)
    {
        return Ok(Exporter::Main(borrowed));
    }
    let mut walsender = Walsender::connect(wal.store.inner.connections.servers()).await?;
    let name = format!("{}_{:08x}", &wal.options.slot[..wal.options.slot.len().min(50)], {
        // Only so that two of them differ.
        uuid::Uuid::new_v4().as_fields().0
    });
    let seam = temporary(wal, &mut walsender, &name).await?;
    Ok(Exporter::Temporary { _walsender: walsender, seam })
}

/// Makes a slot for its snapshot alone, which waits for every transaction that writes.
async fn temporary(wal: &Wal, walsender: &mut Walsender, name: &str) -> Result<Seam> {
    let pid = i32::try_from(walsender.pid()).unwrap_or_default();
    let making = walsender.create_slot(name, SlotKind::Temporary);
    let mut making = pin!(vigil::over(wal, pid, making));
    let mut waits = 0u32;
    loop {
        if let Ok(made) = timeout(vigil::SILENCE, &mut making).await {
            return made;
        }
        if waits.is_multiple_of(TOLD_EVERY) {
            // Without it the sentence still says what is the matter.
            let who = vigil::oldest_writer(&wal.store.inner.connections).await.unwrap_or_default();
            tracing::warn!(
                "a catch-up waits for the transactions that were writing when it began{who}"
            );
        }
        waits = waits.wrapping_add(1);
    }
}

/// A transaction's id, as the server sends it.
struct Xid(u64);

impl<'a> FromSql<'a> for Xid {
    fn from_sql(
        _: &Type,
        raw: &'a [u8],
    ) -> std::result::Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(u64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::XID8
    }
}

/// An adopted table may have neither id nor number, and no time: then it has that of the reading.
const COLUMNS: &str = "SELECT l.xid, coalesce(l.seq, 0), coalesce(l.created_at, now()), l.id,
        l.key, l.topic, l.type, l.content_type, l.headers::text, {payload_out}
    FROM {schema}.{outbox} AS l";
/// Rows of transactions that the base did not see, written before it was taken.
const LATE: &str = " WHERE l.seq <= $1 AND (l.xid >= $2::text::xid8
        OR l.xid = ANY ($3::text[]::xid8[])) ORDER BY l.seq";
/// Rows written since. All of them are of transactions that the base did not see.
const SINCE: &str = " WHERE l.seq > $1 ORDER BY l.seq";
/// What has no number comes last.
const EVERYTHING: &str = " ORDER BY l.seq";

async fn run(
    wal: &Wal,
    delivered: &Delivered,
    (system, wanted): (u64, Wanted),
    pages: &mpsc::Sender<Result<Page>>,
) -> Result<()> {
    if delivered.base.as_ref().is_some_and(|base| base.system != system) {
        // A tick of this cluster tells which rows came with the dump.
        wal.store.look().await?;
    }
    let exporter = exporter(wal, delivered).await?;
    let seam = exporter.seam().clone();
    let connection = wal.store.inner.connections.alone().await?;
    let names = &wal.store.inner.names;
    let imported = timeout(IMPORT_WITHIN, async {
        import(&connection, &seam).await?;
        look(&connection, wal).await
    });
    let (base, pid) = imported.await.unwrap_or_else(|_| {
        Err(Error::transient("import the snapshot: no answer in time; connecting again"))
    })?;
    let Some(base) = base else {
        return Err(Error::transient("the publication passes rows over; see the warning about it"));
    };
    let base = Base { lsn: seam.consistent, ..base };
    drop(exporter);
    let (system, timeline) = (base.system, base.timeline);
    let place = beginning(delivered, WalPlace { system, timeline, lsn: base.lsn, ordinal: 0 });
    if pages.send(Ok(Page::Begun(base, place))).await.is_err() {
        return Ok(());
    }
    let mut reading = Reading { wal, pid, delivered, pages, decoder: Decoder::default(), place };
    let client = &connection.client;
    match wanted {
        Wanted::Missing => reading.missing(client, system).await?,
        Wanted::Everything => {
            let sql = names.fill(&format!("{COLUMNS}{EVERYTHING}"));
            let all = client.query_typed_raw::<&str, _>(&sql, []).await;
            reading.read(all.map_err(failed("catch up"))?).await?;
        }
        Wanted::Nothing => {}
    }
    // Nobody listens any more: then nobody needs to know.
    let _ = pages.send(Ok(Page::End)).await;
    Ok(())
}
/// The place before the first row of a catch-up that ends at `end`. The same snapshot may be read a
/// second time, after a failure: then the checkpoint stands there already, and goes on from there.
fn beginning(delivered: &Delivered, end: WalPlace) -> WalPlace {
    let start = WalPlace { lsn: Lsn(end.lsn.0 - 1), ..end };
    let stands =
        delivered.place.filter(|place| (place.system, place.lsn) == (end.system, start.lsn));
    WalPlace { ordinal: stands.map_or(0, |place| place.ordinal), ..start }
}

/// Begins a transaction that sees what the exporter saw; texts are as the log has them. It may
/// last: nothing bounds it but its reader, and rows are read in the order of their index, so that
/// the first ones come at once.
async fn import(connection: &Connection, seam: &Seam) -> Result<()> {
    let sql = format!(
        "SET statement_timeout = 0; SET idle_in_transaction_session_timeout = 0; \
         SET datestyle = 'ISO'; SET intervalstyle = 'postgres'; SET extra_float_digits = 1; \
         SET bytea_output = 'hex'; \
         SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off; \
         SET jit = off; SET max_parallel_workers_per_gather = 0; \
         BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}",
        crate::names::literal(&seam.snapshot)
    );
    let imported = connection.client.batch_execute(&sql).await;
    imported.map_err(|error| match error.code().map(SqlState::code) {
        // It went with the connection that held it: not found, or not there to be found.
        Some("42704" | "22023") => Error::transient(
            "the snapshot to read from is gone with its connection; taking another",
        )
        .with_source(error),
        _ => failed("import the snapshot")(error),
    })
}

/// What the imported snapshot says of itself, and which process of the server reads it.
async fn look(connection: &Connection, wal: &Wal) -> Result<(Option<Base>, i32)> {
    let publication: [Param<'_>; 1] = [(&wal.options.publication, Type::TEXT)];
    let sql = wal.base_sql();
    let place = "read the imported snapshot";
    let found = connection.client.query_typed(&sql, &publication).await;
    let rows = found.map_err(failed(place))?;
    let base = rows.first().map(slot::base).transpose()?.flatten();
    let found = connection.client.query_typed("SELECT pg_backend_pid()", &[]).await;
    let pid = found.map_err(failed(place))?.first().map(|row| row.get(0));
    Ok((base, pid.ok_or_else(|| Error::corrupt("the server says nothing of itself"))?))
}

struct Reading<'a> {
    wal: &'a Wal,
    pid: i32,
    delivered: &'a Delivered,
    pages: &'a mpsc::Sender<Result<Page>>,
    decoder: Decoder,
    place: WalPlace,
}

impl Reading<'_> {
    /// Reads what the consumer has not had; `system` is the cluster that answers.
    async fn missing(&mut self, client: &Client, system: u64) -> Result<()> {
        let names = &self.wal.store.inner.names;
        let mut floor = i64::MIN;
        if let Some(base) = self.delivered.base.as_ref() {
            floor = base.seq;
            let ids = |ids: &[u64]| ids.iter().map(u64::to_string).collect::<Vec<_>>();
            let (end, open) = (base.snapshot.xmax().to_string(), ids(base.snapshot.open()));
            // Of another system, ids say nothing: all rows of before are looked at.
            let (end, open) =
                if base.system == system { (end, open) } else { ("0".into(), vec![]) };
            let params: [(&(dyn ToSql + Sync), Type); 3] =
                [(&floor, Type::INT8), (&end, Type::TEXT), (&open, Type::TEXT_ARRAY)];
            let sql = names.fill(&format!("{COLUMNS}{LATE}"));
            let late = client.query_typed_raw(&sql, params).await;
            self.read(late.map_err(failed("catch up"))?).await?;
        }
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&floor, Type::INT8)];
        let sql = names.fill(&format!("{COLUMNS}{SINCE}"));
        let since = client.query_typed_raw(&sql, params).await;
        self.read(since.map_err(failed("catch up"))?).await
    }

    async fn read(&mut self, rows: RowStream) -> Result<()> {
        let mut rows = pin!(rows);
        let (mut page, mut bytes) = (Vec::new(), 0);
        loop {
            let row = match rows.try_next().now_or_never() {
                Some(row) => row.map_err(failed("catch up"))?,
                None => {
                    let row = async { rows.try_next().await.map_err(failed("catch up")) };
                    vigil::over(self.wal, self.pid, row).await?
                }
            };
            let Some(row) = row else { break };
            let (xid, seq) = (row.get::<_, Option<Xid>>(0).map(|xid| xid.0), row.get(1));
            if self.delivered.has(self.place.system, xid, seq) {
                continue;
            }
            let row = self.row(&row, xid, seq)?;
            bytes += row.entry.cost_bytes();
            page.push(row);
            if page.len() >= PAGE_ROWS || bytes >= PAGE_BYTES {
                bytes = 0;
                if self.pages.send(Ok(Page::Rows(std::mem::take(&mut page)))).await.is_err() {
                    return Ok(());
                }
            }
        }
        if !page.is_empty() {
            // Nobody listens any more: the next call finds the same.
            let _ = self.pages.send(Ok(Page::Rows(page))).await;
        }
        Ok(())
    }

    fn row(&mut self, row: &Row, xid: Option<u64>, seq: i64) -> Result<Missed> {
        self.place.ordinal = self.place.ordinal.checked_add(1).ok_or_else(|| {
            Error::permanent("more rows than one catch-up can number; prune the outbox")
        })?;
        let at: SystemTime = row.get(2);
        let millis = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
        let at = Timestamp::from_millis(u64::try_from(millis).unwrap_or(u64::MAX));
        let position = self.place.position()?;
        let entry = self.decoder.entry(row, 3, position, at).map_err(failed("catch up"))?;
        Ok(Missed { place: self.place, xid, seq, entry })
    }
}
