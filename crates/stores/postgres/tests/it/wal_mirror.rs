//! A copy of the checkpoints outside of the source's database: kept up to date, taken over where
//! the database has lost its own, and refused where its transactions are not the database's.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use postrider_core::*;
use postrider_servers::postgres::{Database, Server, Version};
use postrider_store_postgres::{MirrorReport, PostgresOptions, PostgresWal, WalOptions};
use tokio::time::{Instant, sleep};
use tokio_postgres::Client;

use crate::support::*;
use crate::wal_support::*;

on_both_versions! {
    a_copy_is_kept_up_to_date_and_whole_at_a_clean_end
    what_the_database_lost_is_taken_from_the_copy
    a_catch_up_that_was_interrupted_goes_on_from_the_copy
    an_outbox_that_was_made_anew_is_read_from_its_beginning
    a_promoted_standby_that_has_the_place_goes_on_from_the_copy
    a_promoted_standby_without_the_place_refuses_the_copy
    a_promoted_standby_without_the_dead_letters_refuses_the_copy
    an_older_copy_of_the_files_refuses_the_copy
    an_older_copy_without_the_consumer_begins_at_the_oldest
    a_copy_that_can_not_be_written_holds_up_nothing
    a_removed_consumer_is_forgotten_in_the_copy
    a_copy_that_can_not_be_used_is_refused_before_anything_is_read
}

/// Where a copy is kept.
enum Place {
    File(tempfile::TempDir),
    Database(Box<Database>),
}

impl Place {
    fn file() -> Self {
        Self::File(tempfile::tempdir().expect("a folder"))
    }

    async fn database(version: Version) -> Self {
        Self::Database(Box::new(database(version).await))
    }

    fn path(&self) -> PathBuf {
        match self {
            Self::File(folder) => folder.path().join("copy.json"),
            Self::Database(_) => panic!("no file"),
        }
    }

    fn options(&self) -> WalOptions {
        match self {
            Self::File(_) => WalOptions::new().mirror_file(self.path()),
            Self::Database(database) => {
                WalOptions::new().mirror_database(PostgresOptions::new(database.url()))
            }
        }
    }
}

/// Both kinds, each with a cluster.
async fn both(version: Version) -> [(Cluster, Place); 2] {
    [
        (Cluster::new(version).await, Place::file()),
        (Cluster::new(version).await, Place::database(version).await),
    ]
}

async fn rider(cluster: &Cluster, place: &Place, from: StartFrom) -> Rider {
    let wal = cluster.wal(place.options()).await;
    wal.prepare().await.expect("the copy can be written");
    Rider::from(wal, "sink", from).await
}

/// Ends as a relay that is told to stop.
async fn ends(rider: Rider) {
    rider.wal.release(&rider.lease).await.expect("released");
}

async fn report(wal: &PostgresWal) -> MirrorReport {
    let report = wal.mirror().await.expect("there is one");
    assert_eq!(report.trouble, None);
    report
}

/// Waits until the copy has what the database has.
async fn copied(rider: &Rider) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let behind = rider.wal.mirror_behind();
        if behind.iter().all(|(_, behind)| behind.is_zero()) {
            return;
        }
        assert!(Instant::now() < deadline, "{behind:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// The place of the checkpoint in the database, as the server writes places.
async fn stands(session: &Client) -> String {
    let sql = "SELECT ('x' || encode(substring(position FROM 11 FOR 8), 'hex'))::bit(64)::bigint
        FROM postrider.checkpoint WHERE consumer = 'sink' AND partition = 'wal'";
    let place = one::<i64>(session, sql).await & 0x00ff_ffff_ffff_ffff;
    format!("{:X}/{:X}", place >> 32, place & 0xffff_ffff)
}

/// Everything that a checkpoint is, but the outbox.
async fn lose_checkpoints(session: &Client) {
    let sql = "DELETE FROM postrider.checkpoint; DELETE FROM postrider.wal_base;
        DELETE FROM postrider.wal_after; DELETE FROM postrider.wal_recovery";
    session.batch_execute(sql).await.expect("deleted");
}

async fn drop_slot(session: &Client) {
    crate::wal_taker::drop_slot(session).await;
}

async fn a_copy_is_kept_up_to_date_and_whole_at_a_clean_end(version: Version) {
    for (cluster, place) in both(version).await {
        let session = cluster.session().await;
        cluster.append(&[("a", "0"), ("b", "1")]).await;
        let mut rider = rider(&cluster, &place, StartFrom::Oldest).await;
        assert_eq!(rider.take(2).await, ["0", "1"]);
        copied(&rider).await;
        let first = report(&rider.wal).await;
        let one = &first.consumers[0];
        assert_eq!((one.consumer.as_str(), &one.place), ("sink", &stands(&session).await));
        assert!(one.age < Duration::from_secs(20), "{:?}", one.age);
        for number in 2..6 {
            cluster.append(&[("a", &number.to_string())]).await;
            rider.take(1).await;
        }
        let (wal, consumer) = (rider.wal.clone(), rider.consumer.clone());
        // What was confirmed just now is in the copy when the lease is given back.
        ends(rider).await;
        assert_eq!(wal.mirror_behind(), [(consumer, Duration::ZERO)]);
        assert_eq!(report(&wal).await.consumers[0].place, stands(&session).await);
    }
}

/// All of the checkpoint is gone, and so is the slot: exactly what was not confirmed comes,
/// although the sink was to begin now.
async fn what_the_database_lost_is_taken_from_the_copy(version: Version) {
    for ((cluster, place), slot) in both(version).await.into_iter().zip([false, true]) {
        let session = cluster.session().await;
        let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
        for number in 0..20 {
            cluster.append(&[("k", &number.to_string())]).await;
        }
        first.take(20).await;
        cluster.append(&[("k", "20"), ("k", "21")]).await;
        let batch = loop {
            let batch = first.next().await;
            if !batch.entries.is_empty() {
                break batch;
            }
        };
        first.confirm(batch.entries[0].position(), 1).await;
        copied(&first).await;
        let stood = stands(&session).await;
        drop(first);
        if slot {
            drop_slot(&session).await;
        }
        lose_checkpoints(&session).await;
        cluster.append(&[("k", "22")]).await;
        let mut second = rider(&cluster, &place, StartFrom::Now).await;
        let begin = second.next().await;
        assert!(begin.entries.is_empty(), "first it becomes durable");
        second.confirm(&begin.position, 0).await;
        assert_eq!(stands(&session).await, stood);
        assert_eq!(second.take(2).await, ["21", "22"]);
        second.nothing_within(Duration::from_millis(300)).await;
        // As exact as before: without the slot, too.
        ends(second).await;
        drop_slot(&session).await;
        cluster.append(&[("k", "23")]).await;
        let mut third = rider(&cluster, &place, StartFrom::Now).await;
        assert_eq!(third.take(1).await, ["23"]);
        third.nothing_within(Duration::from_millis(300)).await;
    }
}

/// Two catch-ups end early, each of them somewhere else; then the checkpoint is lost.
async fn a_catch_up_that_was_interrupted_goes_on_from_the_copy(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let session = cluster.session().await;
    let mut had = Vec::new();
    let mut number = 0;
    for life in 0..3 {
        for _ in 0..4 {
            cluster.append(&[("k", &number.to_string())]).await;
            number += 1;
        }
        let mut rider = rider(&cluster, &place, StartFrom::Oldest).await;
        let batch = loop {
            let batch = rider.next().await;
            match batch.entries.is_empty() {
                true => rider.confirm(&batch.position, 0).await,
                false => break batch,
            }
        };
        let part = &batch.entries[..2];
        had.extend(payloads(&part.iter().map(|entry| record(entry).clone()).collect::<Vec<_>>()));
        rider.confirm(part[1].position(), 2).await;
        copied(&rider).await;
        drop(rider);
        drop_slot(&session).await;
        if life == 2 {
            let sql = "SELECT count(*) FROM postrider.wal_recovery";
            assert!(one::<i64>(&session, sql).await > 0, "it was interrupted");
            lose_checkpoints(&session).await;
        }
    }
    let mut last = rider(&cluster, &place, StartFrom::Now).await;
    had.extend(last.take(6).await);
    last.nothing_within(Duration::from_millis(300)).await;
    had.sort_by_key(|payload| payload.parse::<u32>().expect("a number"));
    let all: Vec<String> = (0..number).map(|number| number.to_string()).collect();
    assert_eq!(had, all);
}

async fn an_outbox_that_was_made_anew_is_read_from_its_beginning(version: Version) {
    for (cluster, place) in both(version).await {
        let session = cluster.session().await;
        let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
        cluster.append(&[("k", "0"), ("k", "1")]).await;
        first.take(2).await;
        ends(first).await;
        drop_slot(&session).await;
        let sql = "DROP SCHEMA postrider CASCADE; DROP PUBLICATION postrider_outbox";
        session.batch_execute(sql).await.expect("dropped");
        let store = open_store(&cluster.database.url()).await;
        let events = [event("k", "2"), event("k", "3")];
        let outbox = store.outbox();
        let appended = store
            .transaction(move |tx| Box::pin(async move { outbox.append(tx, &events).await }))
            .await;
        appended.expect("append");
        let wal = PostgresWal::new(store, place.options()).expect("options");
        wal.prepare().await.expect("prepared");
        let mut second = Rider::from(wal, "sink", StartFrom::Now).await;
        assert_eq!(second.take(2).await, ["2", "3"]);
        second.nothing_within(Duration::from_millis(300)).await;
        copied(&second).await;
        assert_eq!(report(&second.wal).await.consumers[0].place, stands(&session).await);
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

/// A standby that has all that is written by now, and follows no more.
async fn cut_off(cluster: &Cluster) -> Arc<Server> {
    let server = Arc::clone(&cluster.server);
    let standby = Arc::new(blocking(move || server.standby().expect("a standby")).await);
    let written = cluster.server.psql("postgres", "select pg_current_wal_insert_lsn()");
    let replayed = format!("select pg_last_wal_replay_lsn() >= '{}'", written.expect("psql"));
    let deadline = Instant::now() + PATIENCE;
    while standby.psql("postgres", &replayed).expect("psql") != "t" {
        assert!(Instant::now() < deadline, "the standby is too slow");
        sleep(Duration::from_millis(20)).await;
    }
    standby.psql("postgres", "alter system set primary_conninfo = ''").expect("psql");
    standby.psql("postgres", "select pg_reload_conf()").expect("psql");
    let follows = "select count(*) from pg_stat_wal_receiver";
    while standby.psql("postgres", follows).expect("psql") != "0" {
        assert!(Instant::now() < deadline, "the standby still follows");
        sleep(Duration::from_millis(20)).await;
    }
    standby
}

async fn promoted(standby: &Arc<Server>) {
    let own = Arc::clone(standby);
    blocking(move || own.promote().expect("promote")).await;
}

/// The database of a cluster on another server, and what is appended there.
struct Elsewhere {
    url: String,
    session: Client,
}

impl Elsewhere {
    async fn new(cluster: &Cluster, server: &Server) -> Self {
        let url = server.url("postgres", cluster.database.name());
        let session = session(&url).await;
        Self { url, session }
    }

    async fn append(&self, payload: &str) {
        let sql = format!("SELECT postrider.append('k', 't', 'T', '{payload}'::bytea)");
        self.session.execute(&sql, &[]).await.expect("append");
    }

    async fn rider(&self, place: &Place, from: StartFrom) -> Rider {
        let store = open_store(&self.url).await;
        let wal = PostgresWal::new(store, place.options()).expect("options");
        wal.ready().await.expect("ready");
        Rider::from(wal, "sink", from).await
    }
}

/// The events are on the standby, and what was confirmed of them is not: only the copy tells.
async fn a_promoted_standby_that_has_the_place_goes_on_from_the_copy(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
    let standby = cut_off_behind(&cluster, &mut first).await;
    let last = five_more(&mut first).await;
    first.confirm(&last, 5).await;
    copied(&first).await;
    drop(first);
    promoted(&standby).await;
    let there = Elsewhere::new(&cluster, &standby).await;
    let mut second = there.rider(&place, StartFrom::Oldest).await;
    there.append("new").await;
    assert_eq!(second.take(1).await, ["new"]);
    second.nothing_within(Duration::from_millis(300)).await;
    copied(&second).await;
    let report = report(&second.wal).await;
    assert_eq!(report.consumers[0].timeline, 2, "the copy follows");
}

/// A standby that has one event whose checkpoint was copied, and five that nobody has had.
async fn cut_off_behind(cluster: &Cluster, first: &mut Rider) -> Arc<Server> {
    cluster.append(&[("k", "0")]).await;
    first.take(1).await;
    copied(first).await;
    for number in 1..6 {
        cluster.append(&[("k", &number.to_string())]).await;
    }
    cut_off(cluster).await
}

/// Reads five events, and returns the last one's position.
async fn five_more(rider: &mut Rider) -> Position {
    let mut last = None;
    let mut count = 0;
    while count < 5 {
        let batch = rider.next().await;
        count += batch.entries.len();
        last = batch.entries.last().map(|entry| entry.position().clone()).or(last);
    }
    last.expect("there were some")
}

/// The events are on the standby, and the letter that one of them became is not.
async fn a_promoted_standby_without_the_dead_letters_refuses_the_copy(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
    let standby = cut_off_behind(&cluster, &mut first).await;
    let last = five_more(&mut first).await;
    let tally = Tally { published: 4, parked: 1 };
    first.wal.advance(&first.lease, &first.consumer, &last, tally).await.expect("advanced");
    copied(&first).await;
    drop(first);
    promoted(&standby).await;
    let there = Elsewhere::new(&cluster, &standby).await;
    let mut second = there.rider(&place, StartFrom::Oldest).await;
    assert_eq!(second.take(5).await, ["1", "2", "3", "4", "5"]);
}

/// What was confirmed is not on the standby; events that are appended there have the same
/// transaction ids and numbers, and nobody has had them.
async fn a_promoted_standby_without_the_place_refuses_the_copy(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
    cluster.append(&[("k", "0")]).await;
    first.take(1).await;
    let standby = cut_off(&cluster).await;
    for number in 1..40 {
        cluster.append(&[("k", &number.to_string())]).await;
    }
    first.take(39).await;
    copied(&first).await;
    drop(first);
    promoted(&standby).await;
    let there = Elsewhere::new(&cluster, &standby).await;
    let new: Vec<String> = (0..20).map(|number| format!("new {number}")).collect();
    for payload in &new {
        there.append(payload).await;
    }
    let mut second = there.rider(&place, StartFrom::Oldest).await;
    let mut had = second.take(20).await;
    // What was confirmed last may not have reached the standby either.
    if had[0] == "0" {
        had.remove(0);
        had.extend(second.take(1).await);
    }
    assert_eq!(had, new);
    second.nothing_within(Duration::from_millis(300)).await;
    copied(&second).await;
    assert_eq!(report(&second.wal).await.consumers[0].timeline, 2, "the refused one is replaced");
}

/// The same on one timeline: a backup of the files goes on under the same number.
async fn an_older_copy_of_the_files_refuses_the_copy(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
    cluster.append(&[("k", "0")]).await;
    first.take(1).await;
    copied(&first).await;
    let server = Arc::clone(&cluster.server);
    let backup = Arc::new(blocking(move || server.restored_backup().expect("a copy")).await);
    for number in 1..40 {
        cluster.append(&[("k", &number.to_string())]).await;
    }
    first.take(39).await;
    copied(&first).await;
    drop(first);
    let there = Elsewhere::new(&cluster, &backup).await;
    let new: Vec<String> = (0..20).map(|number| format!("new {number}")).collect();
    for payload in &new {
        there.append(payload).await;
    }
    // So that its log goes beyond the copy's place.
    for _ in 0..2 {
        there.session.execute("SELECT pg_switch_wal()", &[]).await.expect("switch");
    }
    let mut second = there.rider(&place, StartFrom::Oldest).await;
    assert_eq!(second.take(20).await, new);
    second.nothing_within(Duration::from_millis(300)).await;
    // The refused one is replaced, though it was further.
    copied(&second).await;
    assert_eq!(report(&second.wal).await.consumers[0].place, stands(&there.session).await);
}

/// A backup of the files from before the consumer's first checkpoint.
async fn an_older_copy_without_the_consumer_begins_at_the_oldest(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let server = Arc::clone(&cluster.server);
    let backup = Arc::new(blocking(move || server.restored_backup().expect("a copy")).await);
    let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
    for number in 0..30 {
        cluster.append(&[("k", &number.to_string())]).await;
    }
    first.take(30).await;
    copied(&first).await;
    drop(first);
    let there = Elsewhere::new(&cluster, &backup).await;
    there.append("new 0").await;
    there.append("new 1").await;
    let publication = "CREATE PUBLICATION postrider_outbox FOR TABLE ONLY postrider.outbox
        WITH (publish = 'insert', publish_via_partition_root = true)";
    there.session.batch_execute(publication).await.expect("made");
    let mut second = there.rider(&place, StartFrom::Now).await;
    assert_eq!(second.take(2).await, ["new 0", "new 1"]);
    second.nothing_within(Duration::from_millis(300)).await;
}

async fn a_copy_that_can_not_be_written_holds_up_nothing(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let session = cluster.session().await;
    let Place::File(folder) = &place else { panic!("a file") };
    let home = folder.path().join("home");
    std::fs::create_dir(&home).expect("made");
    let options = WalOptions::new().mirror_file(home.join("copy.json"));
    let wal = cluster.wal(options).await;
    wal.prepare().await.expect("ready");
    let mut rider = Rider::from(wal, "sink", StartFrom::Oldest).await;
    cluster.append(&[("k", "0")]).await;
    rider.take(1).await;
    copied(&rider).await;
    let away = folder.path().join("away");
    std::fs::rename(&home, &away).expect("renamed");
    let began = Instant::now();
    let mut number = 0;
    // Long enough for a writing to have failed.
    while rider.wal.mirror_behind()[0].1 < Duration::from_millis(1_500) {
        number += 1;
        cluster.append(&[("k", &number.to_string())]).await;
        assert_eq!(rider.take(1).await, [number.to_string()]);
        assert!(began.elapsed() < PATIENCE, "it is not told to be behind");
    }
    assert!(!home.exists());
    std::fs::rename(&away, &home).expect("renamed");
    copied(&rider).await;
    assert_eq!(report(&rider.wal).await.consumers[0].place, stands(&session).await);
}

async fn a_removed_consumer_is_forgotten_in_the_copy(version: Version) {
    for (cluster, place) in both(version).await {
        let mut first = rider(&cluster, &place, StartFrom::Oldest).await;
        cluster.append(&[("k", "0")]).await;
        first.take(1).await;
        let (wal, consumer) = (first.wal.clone(), first.consumer.clone());
        ends(first).await;
        assert_eq!(report(&wal).await.consumers.len(), 1);
        let other = cluster.wal(place.options()).await;
        assert!(other.remove_consumer(&consumer).await.expect("removed"));
        assert_eq!(report(&wal).await.consumers, []);
        assert!(!other.remove_consumer(&consumer).await.expect("removed"));
        drop(wal);
        // It begins anew, where its `from` says.
        let mut second = rider(&cluster, &place, StartFrom::Now).await;
        let begin = second.next().await;
        second.confirm(&begin.position, 0).await;
        cluster.append(&[("k", "1")]).await;
        assert_eq!(second.take(1).await, ["1"]);
    }
}

async fn a_copy_that_can_not_be_used_is_refused_before_anything_is_read(version: Version) {
    let (cluster, place) = (Cluster::new(version).await, Place::file());
    let refused = async |options: WalOptions, says: &[&str]| {
        let error = cluster.wal(options).await.ready().await.expect_err("refused");
        let text = error.chain();
        for part in says {
            assert!(text.contains(part), "{part}: {text}");
        }
    };
    cluster.wal(WalOptions::new()).await.prepare().await.expect("a publication");
    std::fs::write(place.path(), "{\"format\": \"a diary\", \"version\": 1}").expect("written");
    refused(place.options(), &["copy.json", "\"a diary\"", "move it away"]).await;
    let nowhere = WalOptions::new().mirror_file("/nowhere/at/all/copy.json");
    refused(nowhere, &["/nowhere/at/all/copy.json", "take the mirror out"]).await;
    let own = PostgresOptions::new(cluster.database.url());
    refused(WalOptions::new().mirror_database(own), &["the source's own database"]).await;
    let silent = PostgresOptions::new("postgres://someone:hidden@127.0.0.1:1/shop");
    let options = WalOptions::new().mirror_database(silent);
    refused(options, &["the database at 127.0.0.1:1", "can't be used"]).await;
    // A role that may not make the table, and may not use it once it is there.
    let Place::Database(second) = Place::database(version).await else { panic!("a database") };
    let role = format!("plain_{}", second.name());
    second.psql(&format!("create role {role} login")).expect("psql");
    let plain = || {
        let options = PostgresOptions::new(second.url_as(&role, None));
        WalOptions::new().mirror_database(options)
    };
    refused(plain(), &["permission denied"]).await;
    let made = WalOptions::new().mirror_database(PostgresOptions::new(second.url()));
    cluster.wal(made).await.ready().await.expect("made");
    refused(plain(), &["GRANT SELECT, INSERT, UPDATE, DELETE"]).await;
    let granted = format!(
        "grant usage on schema postrider to {role};
         grant select, insert, update, delete on postrider.wal_checkpoint_mirror to {role}"
    );
    second.psql(&granted).expect("psql");
    cluster.wal(plain()).await.ready().await.expect("it may");
    second.psql(&format!("drop owned by {role}; drop role {role}")).expect("psql");
}
