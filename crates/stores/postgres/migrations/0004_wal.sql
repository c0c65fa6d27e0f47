-- What each consumer of the write-ahead log has had, row by row, so that it can go on without its
-- slot: delivered is what the base's snapshot sees, what a transaction in wal_after has written,
-- what the partial transaction has written up to its seq, and what an interrupted catch-up has read
-- up to its own. The place in the log stands in checkpoint, under the partition 'wal', and is
-- written together with these.

CREATE TABLE {schema}.wal_base (
    outbox      text        NOT NULL COLLATE "C",
    consumer    text        NOT NULL COLLATE "C",
    snapshot    pg_snapshot NOT NULL,
    -- Read after the snapshot, as is seq: what it sees was committed below.
    lsn         pg_lsn      NOT NULL,
    seq         bigint      NOT NULL,
    -- Up to this number all is settled, whatever the ids: it came with a dump of another cluster.
    floor       bigint      NOT NULL,
    -- The cluster that the ids belong to.
    system      bigint      NOT NULL,
    timeline    integer     NOT NULL,
    -- What was published then.
    publication text        NOT NULL,
    partial_xid xid8,
    partial_seq bigint,
    CHECK ((partial_xid IS NULL) = (partial_seq IS NULL)),
    PRIMARY KEY (outbox, consumer)
) WITH (fillfactor = 50);

-- Transactions delivered whole that the base does not see, by blocks of 65,536 ids.
CREATE TABLE {schema}.wal_after (
    outbox   text   NOT NULL COLLATE "C",
    consumer text   NOT NULL COLLATE "C",
    -- The id without its lowest 16 bits.
    block    bigint NOT NULL,
    xids     bytea  NOT NULL CHECK (octet_length(xids) BETWEEN 3 AND 8193),
    PRIMARY KEY (outbox, consumer, block)
) WITH (fillfactor = 50);

-- Catch-ups that have not come to their end, in their order.
CREATE TABLE {schema}.wal_recovery (
    outbox   text        NOT NULL COLLATE "C",
    consumer text        NOT NULL COLLATE "C",
    number   integer     NOT NULL,
    snapshot pg_snapshot NOT NULL,
    floor    bigint      NOT NULL,
    seq      bigint      NOT NULL,
    PRIMARY KEY (outbox, consumer, number)
) WITH (fillfactor = 50);

-- An event that was parked is not parked a second time when it is read again from another place.
CREATE INDEX dead_letter_event ON {schema}.dead_letter (outbox, consumer, id)
    WHERE partition = 'wal';

-- The table whose rows the log has: the outbox itself, or the application's own that was adopted as
-- it. NULL if that is gone. Its schema may be one that a relay's role must not look into.
CREATE FUNCTION {schema}.log_table(outbox text) RETURNS oid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT to_regclass(coalesce(
        (SELECT a.source FROM {schema}.adopted AS a WHERE a.outbox = log_table.outbox),
        format('%I.%I', {schema_text}::text, outbox)))::oid
$body$;

-- The last number that was drawn for such a row, or 0.
CREATE FUNCTION {schema}.log_numbers(outbox text) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT coalesce(pg_sequence_last_value(to_regclass(coalesce(
        (SELECT a.sequence FROM {schema}.adopted AS a WHERE a.outbox = log_numbers.outbox),
        format('%I.%I', {schema_text}::text, outbox || '_seq')))), 0)
$body$;
