//! Whether a process of the server still works for us, asked on another connection.
//!
//! What lives here: the question, waiting under its watch, and ending what was left. What does not:
//! what is waited for.
//! Invariant: a server that works is never given up, however long that takes; one that is gone, or
//! waits for us while we wait for it, is given up within seconds, whatever TCP says of the way.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use postrider_core::{Error, Result};
use tokio::time::{sleep, timeout};
use tokio_postgres::types::Type;

use super::Wal;
use crate::connections::{Connections, Param};

/// How long nothing may come before the server is looked at.
pub(super) const SILENCE: Duration = Duration::from_secs(4);
/// Longest wait for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// What the server sent just before it was looked at is here by then.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// So often, and in such distances, it is looked whether a process has ended: a second in all.
const END_LOOKS: u32 = 50;
const END_LOOK_EVERY: Duration = Duration::from_millis(20);

/// Whether a process waits for its client, or for more log to send. Takes no locks.
const LOOK: &str = "SELECT coalesce(a.wait_event_type, '') IN ('Client', 'Activity')
    FROM pg_stat_activity AS a WHERE a.pid = $1";

/// Looks at process `pid`, from which something is to come.
///
/// # Errors
/// `Transient` when nothing can come from it any more, or nothing at all is heard of the server.
pub(super) async fn look(wal: &Wal, pid: i32) -> Result<()> {
    let lost = || Error::transient("nothing comes from the server any more; connecting again");
    let connections = &wal.store.inner.connections;
    let mut outcome = Err(lost());
    for is_last in [false, true] {
        let params = [(&pid as _, Type::INT4)];
        let asked = connections.query("look at a process of the server", LOOK, &params);
        outcome = match timeout(ANSWER_WITHIN, asked).await {
            Err(_) => return Err(lost()),
            Ok(Ok(rows)) => match rows.first().map(|row| row.get::<_, bool>(0)) {
                Some(false) => return Ok(()),
                Some(true) | None => Err(lost()),
            },
            Ok(Err(error)) => Err(error),
        };
        if !is_last {
            sleep(AGAIN_AFTER).await;
        }
    }
    outcome
}

/// Waits for what process `pid` is to bring, for as long as it is at work.
///
/// # Errors
/// Those of `work`; as [`look`].
pub(super) async fn over<T>(
    wal: &Wal,
    pid: i32,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    let mut work = pin!(work);
    loop {
        if let Ok(done) = timeout(SILENCE, &mut work).await {
            return done;
        }
        tokio::select! {
            biased;
            done = &mut work => return done,
            looked = look(wal, pid) => looked?,
        }
    }
}

/// Ends the server's process that reads the slot, if it is this one, and waits a moment until it is
/// gone. The role may always end what is its own.
pub(super) async fn end_reader(connections: &Connections, slot: &str, pid: i32) -> Result<()> {
    let sql = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
        WHERE slot_name = $1 AND active_pid = $2";
    let params: [Param<'_>; 2] = [(&slot, Type::TEXT), (&pid, Type::INT4)];
    for _ in 0..END_LOOKS {
        if connections.query("end a lost connection", sql, &params).await?.is_empty() {
            break;
        }
        tokio::time::sleep(END_LOOK_EVERY).await;
    }
    Ok(())
}

/// Says which transaction that writes is the oldest, for a sentence that ends there.
pub(super) async fn oldest_writer(connections: &Connections) -> Result<String> {
    let sql =
        "SELECT format('; the oldest is that of process %s, begun at %s', a.pid, a.xact_start)
        FROM pg_stat_activity AS a WHERE a.backend_xid IS NOT NULL
        UNION ALL SELECT format('; one is prepared: %s, at %s', p.gid, p.prepared)
        FROM pg_prepared_xacts AS p LIMIT 1";
    let sql = format!("SELECT * FROM ({sql}) AS w");
    let rows = connections.query("look for open transactions", &sql, &[]).await?;
    Ok(rows.first().map_or_else(String::new, |row| row.get(0)))
}
