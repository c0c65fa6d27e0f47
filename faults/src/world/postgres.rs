//! The truth in PostgreSQL: tables beside the outbox's own.
//!
//! What lives here: making the database and asking it. What does not: the server and the ways to it
//! (`cluster.rs`).
//! Invariant: a row of truth is numbered while the append holds its key's lock, so a key's numbers
//! are the order of its commits. An event's place is the first tick whose snapshot saw its
//! transaction, and its seq: told by a copy of the ticks that a trigger makes, not by reading the
//! feed, so that it can be compared with checkpoints also when retention has forgotten it.

use std::cell::{RefCell, RefMut};
use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use postrider_conformance::sink::Delivered;
use postrider_core::{DeadLetterFilter, DeadLetters, EventId};
use postrider_servers::postgres::Server;
use postrider_store_postgres::tokio_postgres::types::{ToSql, Type};
use postrider_store_postgres::tokio_postgres::{Client, NoTls, Row};
use postrider_store_postgres::{PostgresOptions, PostgresStore, SchemaOnOpen};
use uuid::Uuid;

use super::wal::{self, Book, Written};
use super::{Committed, Covered, Past, Place, SINK, Takeover, WRITER_HEADER};
use crate::cluster::{Cluster, DATABASE, Templates, direct_url};
use crate::schedule::{Schedule, SourceKind};

/// Longest that the harness waits for any answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The truth, a copy of the ticks, the places of events, and the take-overs.
const TABLES: &str = "
    CREATE SCHEMA fault;
    CREATE SEQUENCE fault.commit_order;
    CREATE TABLE fault.truth (
        n            bigint PRIMARY KEY DEFAULT nextval('fault.commit_order'),
        id           uuid   NOT NULL UNIQUE,
        key          text   NOT NULL,
        topic        text   NOT NULL,
        type         text   NOT NULL,
        content_type text   NOT NULL,
        writer       text   NOT NULL,
        payload      bytea  NOT NULL,
        xid          xid8   NOT NULL,
        seq          bigint NOT NULL UNIQUE
    );
    CREATE TABLE fault.tick (
        stamp      bigint      PRIMARY KEY,
        seq_hi     bigint      NOT NULL,
        generation integer     NOT NULL,
        snap       pg_snapshot NOT NULL
    );
    CREATE TABLE fault.place (
        id         uuid    PRIMARY KEY,
        stamp      bigint  NOT NULL,
        generation integer NOT NULL
    );
    CREATE TABLE fault.takeover (
        n          bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        partition  text    NOT NULL,
        old_holder text    NOT NULL,
        released   boolean NOT NULL,
        position   bytea,
        letters    uuid[]  NOT NULL
    );
    CREATE FUNCTION fault.note_tick() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO fault.tick VALUES (NEW.stamp, NEW.seq_hi, NEW.generation, NEW.snap);
        RETURN NULL;
    END $$;
    CREATE TRIGGER fault_tick AFTER INSERT ON postrider.outbox_tick
        FOR EACH ROW EXECUTE FUNCTION fault.note_tick();
    CREATE FUNCTION fault.note_takeover() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO fault.takeover (partition, old_holder, released, position, letters)
        VALUES (NEW.partition, coalesce(OLD.holder, ''), coalesce(OLD.released, true),
            (SELECT position FROM postrider.checkpoint WHERE partition = NEW.partition),
            ARRAY(SELECT id FROM postrider.dead_letter
                WHERE partition = NEW.partition AND id IS NOT NULL));
        RETURN NULL;
    END $$;
    CREATE TRIGGER fault_takeover AFTER UPDATE OF epoch ON postrider.lease
        FOR EACH ROW WHEN (NEW.epoch <> OLD.epoch) EXECUTE FUNCTION fault.note_takeover();
    CREATE TRIGGER fault_first AFTER INSERT ON postrider.lease
        FOR EACH ROW EXECUTE FUNCTION fault.note_takeover();";

/// Only what has none yet: a place never changes.
const FIND_PLACES: &str = "INSERT INTO fault.place (id, stamp, generation)
    SELECT t.id, k.stamp, k.generation FROM fault.truth AS t
    CROSS JOIN LATERAL (SELECT k.stamp, k.generation FROM fault.tick AS k
        WHERE k.seq_hi >= t.seq AND pg_visible_in_snapshot(t.xid, k.snap)
        ORDER BY k.stamp LIMIT 1) AS k
    WHERE NOT EXISTS (SELECT FROM fault.place AS p WHERE p.id = t.id)";

const TRUTH: &str = "SELECT t.id, t.key, t.topic, t.type, t.content_type, t.writer, t.payload,
        postrider.partition_of(t.key, g.partitions) || '/' || g.partitions, p.stamp, t.seq
    FROM fault.truth AS t LEFT JOIN fault.place AS p USING (id)
    LEFT JOIN postrider.generation AS g ON g.number = p.generation
    ORDER BY t.n";

/// In the log, a place is where an event stands in the order of appends: enough to tell what was
/// there at a moment.
const TRUTH_OF_LOG: &str = "SELECT t.id, t.key, t.topic, t.type, t.content_type, t.writer,
        t.payload, 'wal', 0::bigint, t.seq
    FROM fault.truth AS t ORDER BY t.n";

const WRITTEN: &str = "SELECT t.xid::text, t.seq, t.id FROM fault.truth AS t";

const UNSETTLED: &str = "SELECT (SELECT count(*) FROM postrider.dead_letter) + count(*)
    FROM fault.truth AS t LEFT JOIN fault.place AS p USING (id)
    LEFT JOIN postrider.generation AS g ON g.number = p.generation
    LEFT JOIN postrider.checkpoint AS c
        ON c.partition = postrider.partition_of(t.key, g.partitions) || '/' || g.partitions
    WHERE NOT coalesce(c.ended OR c.position >= int8send(p.stamp) || int8send(t.seq), false)";

/// Each checkpoint for itself: there is one for each partition and consumer.
const MAY_BE_SETTLED: &str = "SELECT (SELECT count(*) FROM fault.truth)
        * (SELECT count(DISTINCT consumer) FROM postrider.checkpoint)
        <= (SELECT coalesce(sum(published), 0) FROM postrider.checkpoint)
    AND NOT EXISTS (SELECT FROM postrider.dead_letter)";

const EVENTS_ALONE: &str = "SELECT count(*) FROM postrider.outbox AS o WHERE NOT EXISTS
    (SELECT FROM fault.truth AS t WHERE t.id = o.id AND t.seq = o.seq AND t.xid = o.xid)";

/// What the oldest tick has, retention may have emptied.
const ROWS_ALONE: &str =
    "SELECT count(*) FROM fault.truth AS t LEFT JOIN fault.place AS p USING (id)
    WHERE (p.id IS NULL OR p.stamp > (SELECT min(stamp) FROM postrider.outbox_tick))
        AND NOT EXISTS (SELECT FROM postrider.outbox AS o WHERE o.seq = t.seq AND o.id = t.id)";

/// The database of one schedule.
pub struct PostgresData {
    session: RefCell<Option<Client>>,
    store: RefCell<Option<PostgresStore>>,
    runtime: tokio::runtime::Runtime,
    /// Whether it is read from its log.
    wal: bool,
    // Dropped last: fields drop in this order.
    cluster: RefCell<Cluster>,
}

impl PostgresData {
    /// Starts the server and makes the database.
    ///
    /// # Errors
    /// When a server or the store refuses.
    pub fn create(schedule: &Schedule, templates: &Templates) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start the runtime")?;
        let cluster = Cluster::start(schedule, templates)?;
        let options = PostgresOptions::new(cluster.direct_url()).partitions(schedule.partitions);
        // Its connections end with it, before the server is disturbed.
        drop(runtime.block_on(PostgresStore::open(options)).context("open the store")?);
        let data = Self {
            session: RefCell::default(),
            store: RefCell::default(),
            runtime,
            wal: schedule.source == SourceKind::PostgresWal,
            cluster: RefCell::new(cluster),
        };
        let session = data.connect(&data.cluster().direct_url())?;
        let made = data.runtime.block_on(session.batch_execute(TABLES));
        made.context("make the truth's tables")?;
        if data.wal {
            let made = data.runtime.block_on(session.batch_execute(wal::TABLES));
            made.context("make the log's tables")?;
            data.cluster().watch(schedule)?;
        }
        let sql = "INSERT INTO fault.tick
            SELECT stamp, seq_hi, generation, snap FROM postrider.outbox_tick";
        data.runtime.block_on(session.batch_execute(sql)).context("copy the first tick")?;
        *data.session.borrow_mut() = Some(session);
        Ok(data)
    }

    /// The server and the ways to it.
    pub fn cluster(&self) -> RefMut<'_, Cluster> {
        self.cluster.borrow_mut()
    }

    /// Where each relay finds the outbox.
    pub fn relay_urls(&self) -> Vec<String> {
        self.cluster().relay_urls()
    }

    /// Where writers find it.
    pub fn writer_url(&self) -> String {
        self.cluster().writer_url()
    }

    fn connect(&self, url: &str) -> Result<Client> {
        let connecting = postrider_store_postgres::tokio_postgres::connect(url, NoTls);
        let (client, connection) = self.runtime.block_on(connecting).context("connect")?;
        // It ends with the client, and is driven whenever that is asked something.
        self.runtime.spawn(async move {
            // Whoever asks is told.
            let _ = connection.await;
        });
        Ok(client)
    }

    fn answer(&self, client: &Client, sql: &str) -> Result<Vec<Row>> {
        let none: [(&(dyn ToSql + Sync), Type); 0] = [];
        let answer = self.runtime.block_on(async {
            // Its timer needs the runtime.
            tokio::time::timeout(ANSWER_WITHIN, client.query_typed(sql, &none)).await
        });
        answer.context("wait for the database")?.context("ask the database")
    }

    /// Asks once; on a new connection if the old one is gone.
    fn ask(&self, sql: &str) -> Result<Vec<Row>> {
        let mut session = self.session.borrow_mut();
        if let Some(client) = session.as_ref() {
            match self.answer(client, sql) {
                Err(_) if client.is_closed() => *session = None,
                answer => return answer,
            }
        }
        let client = session.insert(self.connect(&self.cluster().direct_url())?);
        self.answer(client, sql)
    }

    fn number(&self, sql: &str) -> Result<i64> {
        Ok(self.ask(sql)?.first().context("an answer has a row")?.get(0))
    }

    /// Numbers of all take-overs that are committed by now.
    ///
    /// # Errors
    /// The database's.
    pub fn takeover_numbers(&self) -> Result<Vec<i64>> {
        let rows = self.ask("SELECT n FROM fault.takeover")?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The last place that the newest tick may have.
    ///
    /// # Errors
    /// The database's.
    pub fn newest_place(&self) -> Result<Place> {
        if self.wal {
            let seq = self.number("SELECT coalesce(max(seq), 0) FROM fault.truth")?;
            return Ok(place(0, seq));
        }
        let stamp = self.number("SELECT max(stamp) FROM postrider.outbox_tick")?;
        Ok(place(stamp, i64::MAX))
    }

    /// Asks for every parked event to be sent again.
    ///
    /// # Errors
    /// The store's.
    pub fn requeue_all(&self) -> Result<u64> {
        let mut open = self.store.borrow_mut();
        self.runtime.block_on(async {
            if open.is_none() {
                let options = PostgresOptions::new(self.cluster().direct_url())
                    .on_open(SchemaOnOpen::Require)
                    .connections(1)
                    .statement_timeout(Duration::from_secs(2));
                *open = Some(PostgresStore::open(options).await.context("open the store")?);
            }
            let store = open.as_ref().context("the store is open")?;
            let requeued = store.requeue(&DeadLetterFilter::default()).await;
            requeued.context("requeue the dead letters")
        })
    }

    /// Whether the counts say that all may be settled.
    ///
    /// # Errors
    /// The database's.
    pub fn may_be_settled(&self) -> Result<bool> {
        Ok(self.ask(MAY_BE_SETTLED)?.first().is_some_and(|row| row.get(0)))
    }

    /// How many events are pending or dead letters of a consumer.
    ///
    /// # Errors
    /// The database's.
    pub fn unsettled(&self, consumer: &str) -> Result<i64> {
        if !self.wal {
            self.ask(FIND_PLACES)?;
            return self.number(UNSETTLED);
        }
        let sql =
            format!("SELECT {} FROM fault.standing WHERE consumer = '{consumer}'", wal::COLUMNS);
        let book = self.ask(&sql)?.first().map(|row| Book::of(row, 0)).transpose()?;
        let book = book.unwrap_or_default();
        let written = self.written()?;
        let open = written.len() - book.covered(&written).len() + book.letters.len();
        Ok(i64::try_from(open)?)
    }

    /// Every committed event by its transaction.
    fn written(&self) -> Result<Vec<Written>> {
        let written = |row: &Row| {
            let xid = row.get::<_, &str>(0).parse().context("a transaction has a number")?;
            Ok((xid, row.get(1), EventId::from_uuid(row.get(2))))
        };
        self.ask(WRITTEN)?.iter().map(written).collect()
    }

    /// How many events a consumer's checkpoints count as published.
    ///
    /// # Errors
    /// The database's.
    pub fn published(&self, consumer: &str) -> Result<i64> {
        self.number(&format!(
            "SELECT coalesce(sum(published), 0)::bigint FROM postrider.checkpoint
                WHERE consumer = '{consumer}'"
        ))
    }

    /// Every committed event, in the order of commits for each key.
    ///
    /// # Errors
    /// The database's.
    pub fn truth(&self) -> Result<Vec<Committed>> {
        if self.wal {
            return Ok(self.ask(TRUTH_OF_LOG)?.iter().map(committed).collect());
        }
        self.ask(FIND_PLACES)?;
        Ok(self.ask(TRUTH)?.iter().map(committed).collect())
    }

    /// Events without a row of truth, and rows of truth whose event is gone without leave.
    ///
    /// # Errors
    /// The database's.
    pub fn torn_transactions(&self) -> Result<(i64, i64)> {
        self.ask(FIND_PLACES)?;
        Ok((self.number(EVENTS_ALONE)?, self.number(ROWS_ALONE)?))
    }

    /// Rolls back what was prepared long ago: whoever prepared it lost the answer, or has committed
    /// it in a database that this one, an older copy, replaced. Its locks would stay for ever.
    ///
    /// # Errors
    /// The database's.
    pub fn roll_back_orphans(&self) -> Result<()> {
        let orphans = "SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts
            WHERE database = current_database()
                AND prepared < clock_timestamp() - interval '4 seconds'";
        for row in self.ask(orphans)? {
            // Its owner may come first.
            let _ = self.ask(row.get(0));
        }
        Ok(())
    }

    /// Every take-over, in order, as it was for a consumer.
    ///
    /// # Errors
    /// The database's.
    pub fn takeovers(&self, consumer: &str) -> Result<Vec<Takeover>> {
        let sql = "SELECT n, partition, old_holder, released, position, letters
            FROM fault.takeover ORDER BY n";
        let mut takeovers: Vec<Takeover> =
            self.ask(sql)?.iter().map(takeover).collect::<Result<_>>()?;
        if self.wal {
            let written = self.written()?;
            for takeover in &mut takeovers {
                let sql = format!(
                    "SELECT {} FROM fault.book WHERE n = {} AND consumer = '{consumer}'",
                    wal::COLUMNS,
                    takeover.number
                );
                let book = self.ask(&sql)?.first().map(|row| Book::of(row, 0)).transpose()?;
                let book = book.unwrap_or_default();
                takeover.covered = Covered::Events(book.covered(&written));
                takeover.letters = book.letters;
            }
        }
        Ok(takeovers)
    }

    /// Puts the promoted copy in the server's place, and says what the server had until then.
    ///
    /// # Errors
    /// When the copy could not be made, or a server can't be asked.
    pub fn replace(&self) -> Result<Past> {
        let copy = self.cluster().take_copy()?;
        let (shared, shared_takeover) = self.held_by(&copy)?;
        *self.session.borrow_mut() = None;
        *self.store.borrow_mut() = None;
        let old = self.cluster().replace(copy)?;
        // From here on nothing is added to it.
        *self.session.borrow_mut() = Some(self.connect(&direct_url(&old))?);
        let past = Past {
            committed: self.truth()?,
            takeovers: self.takeovers(SINK)?,
            shared_takeover,
            shared,
        };
        *self.session.borrow_mut() = None;
        Ok(past)
    }

    /// The events and the newest take-over of a server that nobody works on yet.
    fn held_by(&self, server: &Server) -> Result<(HashSet<EventId>, i64)> {
        let client = self.connect(&direct_url(server))?;
        let rows = self.answer(&client, "SELECT id FROM fault.truth")?;
        let ids = rows.iter().map(|row| EventId::from_uuid(row.get(0))).collect();
        let newest = self.answer(&client, "SELECT coalesce(max(n), 0) FROM fault.takeover")?;
        Ok((ids, newest.first().context("an answer has a row")?.get(0)))
    }

    /// Leaves what the server logged and what the database holds in a folder.
    ///
    /// # Errors
    /// The file system's.
    pub fn keep(&self, folder: &Path) -> Result<()> {
        let server = self.cluster().server();
        std::fs::copy(server.data().with_file_name("log"), folder.join("server.log"))
            .context("keep the server's log")?;
        let mut dump = std::process::Command::new(server.version().program("pg_dump")?);
        dump.args(["--no-password", "-d"]).arg(server.url("postgres", DATABASE));
        // A server that is down has nothing to say.
        let _ = dump.arg("-f").arg(folder.join("database.sql")).status();
        Ok(())
    }
}

fn place(stamp: i64, seq: i64) -> Place {
    Place::from(stamp.unsigned_abs()) << 64 | Place::from(seq.unsigned_abs())
}

fn committed(row: &Row) -> Committed {
    let message = Delivered {
        id: EventId::from_uuid(row.get(0)),
        key: row.get(1),
        topic: row.get(2),
        event_type: row.get(3),
        content_type: row.get(4),
        headers: vec![(WRITER_HEADER.to_owned(), row.get(5))],
        payload: row.get(6),
    };
    let stamp: Option<i64> = row.get(8);
    Committed {
        message,
        partition: row.get::<_, Option<String>>(7).unwrap_or_default(),
        place: stamp.map_or(Place::MAX, |stamp| place(stamp, row.get(9))),
    }
}

fn takeover(row: &Row) -> Result<Takeover> {
    let covered = match row.get::<_, Option<&[u8]>>(4) {
        Some(bytes) => Place::from_be_bytes(bytes.try_into().context("a checkpoint has 16 bytes")?),
        None => 0,
    };
    let letters: Vec<Uuid> = row.get(5);
    Ok(Takeover {
        number: row.get(0),
        partition: row.get(1),
        old_holder: row.get(2),
        released: row.get(3),
        covered: Covered::UpTo(covered),
        letters: letters.into_iter().map(EventId::from_uuid).collect(),
    })
}
