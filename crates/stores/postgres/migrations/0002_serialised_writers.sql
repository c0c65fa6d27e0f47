-- Serialised writers: ULIDs that are known at the time of writing.
--
-- A writer locks a partition of a feed, draws ULIDs and uses them as keys of its own table; readers
-- follow that table itself by "ulid > cursor order by ulid". The lock is held to the end of the
-- transaction, so a ULID never commits after a larger one of its partition. Different partitions
-- don't wait for each other.

-- One row for each partition of such a feed: from where its next ULIDs are drawn.
CREATE TABLE {schema}.serialised (
    feed       text    NOT NULL COLLATE "C",
    partition  integer NOT NULL CHECK (partition >= 0),
    -- Time and 16 bits after it of the last ULID, in one number; 0 before the first.
    high       bigint  NOT NULL DEFAULT 0,
    -- The low half that comes next, as a signed number. A fresh one has bit 62 cleared, so that no
    -- count in reach crosses the sign.
    next_low   bigint  NOT NULL DEFAULT 0,
    -- The transaction that locked it last, and when: its ULIDs have that time.
    locked_by  xid8,
    locked_ms  bigint,
    PRIMARY KEY (feed, partition)
) WITH (fillfactor = 20);

-- Makes a feed, or raises the number of its partitions; a second call changes nothing. The writer
-- chooses a key's partition, for example by partition_of(key, partitions).
CREATE FUNCTION {schema}.setup_serialised_feed(feed text, partitions integer) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    has integer := (SELECT count(*) FROM {schema}.serialised s
        WHERE s.feed = setup_serialised_feed.feed);
BEGIN
    IF feed IS NULL OR feed = '' OR octet_length(feed) > 255 THEN
        RAISE EXCEPTION 'a feed''s name has 1 to 255 bytes'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF partitions IS NULL OR partitions NOT BETWEEN 1 AND 1024 THEN
        RAISE EXCEPTION 'partitions: % is not between 1 and 1024', partitions
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF partitions < has THEN
        RAISE EXCEPTION 'feed "%" has % partitions; they can be raised, not lowered', feed, has
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO {schema}.serialised AS s (feed, partition)
    SELECT setup_serialised_feed.feed, p FROM generate_series(0, partitions - 1) AS p
    ON CONFLICT DO NOTHING;
END
$body$;

-- All such feeds.
CREATE FUNCTION {schema}.serialised_feeds() RETURNS TABLE (feed text, partitions integer)
LANGUAGE sql STABLE AS $body$
    SELECT s.feed, count(*)::integer FROM {schema}.serialised s GROUP BY 1 ORDER BY 1
$body$;

-- Forgets a feed. Set up again, it would draw ULIDs of the present time.
CREATE FUNCTION {schema}.teardown_serialised_feed(feed text) RETURNS void
LANGUAGE sql VOLATILE AS $body$
    DELETE FROM {schema}.serialised s WHERE s.feed = $1
$body$;

CREATE FUNCTION {schema}.no_serialised_partition(feed text, partition integer) RETURNS void
LANGUAGE plpgsql STABLE AS $body$
BEGIN
    RAISE EXCEPTION 'feed "%" has no partition % for serialised writers', left(feed, 64), partition
        USING ERRCODE = 'undefined_object',
            HINT = 'See serialised_feeds(); setup_serialised_feed(feed, partitions) makes one.';
END
$body$;

-- Lets no other writer into a partition until this transaction ends: call it before anything that
-- next_ulid is to number. Waits for the writer that is in it, for lock_timeout at most.
CREATE FUNCTION {schema}.lock_feed(feed text, partition integer) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM pg_advisory_xact_lock(
        hashtextextended({schema_text} || E'\x01' || feed COLLATE "C", partition));
    -- The time is read behind the lock, so that it is not older than that of the writer before.
    UPDATE {schema}.serialised AS s
    SET locked_by = pg_current_xact_id(),
        locked_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
    WHERE s.feed = lock_feed.feed AND s.partition = lock_feed.partition;
    IF NOT FOUND THEN
        PERFORM {schema}.no_serialised_partition(feed, partition);
    END IF;
END
$body$;

-- Where a range of ULIDs begins and what is left for the next one. A newer time begins at ten
-- random bytes; an equal or earlier one freezes the time and goes on counting. Bytewise order is
-- the order of allocation, whatever the clock does.
CREATE FUNCTION {schema}.ulid_range(
    INOUT high bigint, INOUT next_low bigint, time_ms bigint, count bigint, random bytea,
    OUT first uuid
) LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
    low bigint := next_low;
BEGIN
    IF octet_length(random) IS DISTINCT FROM 10 THEN
        RAISE EXCEPTION 'ten random bytes are needed' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF time_ms > high >> 16 THEN
        high := time_ms << 16
            | ('x' || encode(substring(random FROM 1 FOR 2), 'hex'))::bit(16)::integer;
        low := (('x' || encode(substring(random FROM 3), 'hex'))::bit(64)
            & x'BFFFFFFFFFFFFFFF')::bigint;
    END IF;
    next_low := low + count;
    IF low < 0 AND next_low >= 0 THEN
        RAISE EXCEPTION '2^62 ULIDs in one millisecond'
            USING ERRCODE = 'numeric_value_out_of_range';
    END IF;
    first := encode(int8send(high) || int8send(low), 'hex')::uuid;
END
$body$;

-- Draws count ULIDs of a partition that this transaction has locked and returns the first; the
-- others are ulid_plus(first, 1) and so on. As a uuid: 16 bytes, compared bytewise by PostgreSQL.
-- Those of one transaction have one time. A rollback gives them back together with all else.
CREATE FUNCTION {schema}.next_ulid(feed text, partition integer, count integer DEFAULT 1)
RETURNS uuid LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    place {schema}.serialised%ROWTYPE;
    range record;
BEGIN
    IF count IS NULL OR count < 1 THEN
        RAISE EXCEPTION 'count is %; at least 1 is needed', count
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT * INTO place FROM {schema}.serialised AS s
        WHERE s.feed = next_ulid.feed AND s.partition = next_ulid.partition;
    IF NOT FOUND THEN
        PERFORM {schema}.no_serialised_partition(feed, partition);
    END IF;
    IF place.locked_by IS NULL
        OR place.locked_by IS DISTINCT FROM pg_current_xact_id_if_assigned()
    THEN
        RAISE EXCEPTION 'partition % of feed "%" is not locked by this transaction', partition, feed
            USING ERRCODE = 'PR007',
                HINT = 'Call lock_feed(feed, partition) first, in the same transaction.';
    END IF;
    -- Two such UUIDs hold 20 bytes of which at least ten are random from end to end.
    range := {schema}.ulid_range(place.high, place.next_low, place.locked_ms, count,
        substring(uuid_send(gen_random_uuid()) FROM 1 FOR 6)
            || substring(uuid_send(gen_random_uuid()) FROM 11 FOR 4));
    UPDATE {schema}.serialised AS s SET high = range.high, next_low = range.next_low
        WHERE s.feed = next_ulid.feed AND s.partition = next_ulid.partition;
    RETURN range.first;
END
$body$;

-- The ULID n places after one, within a range that next_ulid gave.
CREATE FUNCTION {schema}.ulid_plus(ulid uuid, n bigint) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN encode(substring(uuid_send(ulid) FROM 1 FOR 8)
    || int8send(('x' || encode(substring(uuid_send(ulid) FROM 9), 'hex'))::bit(64)::bigint + n),
    'hex')::uuid;

-- A ULID's 26 characters, and back, and its time.
CREATE FUNCTION {schema}.ulid_text(ulid uuid) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN {schema}.position_text(
    ('x' || encode(substring(uuid_send(ulid) FROM 1 FOR 8), 'hex'))::bit(64)::bigint,
    ('x' || encode(substring(uuid_send(ulid) FROM 9), 'hex'))::bit(64)::bigint);

CREATE FUNCTION {schema}.ulid_of_text(ulid text) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN encode(int8send(substring({schema}.position_bits(ulid) FROM 1 FOR 64)::bit(64)::bigint)
    || int8send(substring({schema}.position_bits(ulid) FROM 65)::bit(64)::bigint), 'hex')::uuid;

CREATE FUNCTION {schema}.ulid_time(ulid uuid) RETURNS timestamptz
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN to_timestamp(
    ('x' || encode(substring(uuid_send(ulid) FROM 1 FOR 6), 'hex'))::bit(48)::bigint / 1000.0);

-- A setting's text as milliseconds; 0 where it is off.
CREATE FUNCTION {schema}.setting_ms(value text, unit text) RETURNS numeric
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN substring(value FROM '^\s*([0-9.]+)')::numeric
    * CASE coalesce(substring(value FROM '[a-z]+'), unit)
        WHEN 'us' THEN 0.001 WHEN 's' THEN 1000 WHEN 'min' THEN 60000 WHEN 'h' THEN 3600000
        WHEN 'd' THEN 86400000 ELSE 1 END;

-- Bounds that are missing on how long a client that vanished can hold its locks: those of its keys,
-- and its partition of a feed with serialised writers. No row: all are set. `role` is the role that
-- writes. Judged are the settings of role and database, then the server's; where this connection
-- has one of its own, the server's can't be seen, and that is said.
CREATE FUNCTION {schema}.check_settings(role name DEFAULT current_user)
RETURNS TABLE (setting text, value text, advice text) LANGUAGE sql STABLE AS $body$
    WITH wanted (name, most_ms, advice) AS (VALUES
        ('idle_in_transaction_session_timeout', 60000,
            'a client that vanishes within a transaction keeps its locks until the server notices;'
            ' set it to 30s for the roles that write'),
        ('tcp_user_timeout', 120000,
            'an answer to a client that vanished is sent again for many minutes; set it to 30s'),
        ('tcp_keepalives_idle', 120000,
            'a silent connection is first tested after this time; set it to 30s'),
        ('client_connection_check_interval', 60000,
            'a long statement of a client that vanished runs to its end; set it to 10s')
    ), own AS (
        -- The most special one wins: role in database, role, database.
        SELECT DISTINCT ON (n) split_part(c, '=', 1) AS n, substr(c, strpos(c, '=') + 1) AS v
        FROM pg_db_role_setting AS s
        CROSS JOIN LATERAL unnest(s.setconfig) AS c
        CROSS JOIN LATERAL split_part(c, '=', 1) AS n
        WHERE s.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = $1))
            AND s.setdatabase IN (0, (SELECT oid FROM pg_database
                WHERE datname = current_database()))
        ORDER BY n, s.setrole = 0, s.setdatabase = 0
    ), found AS (
        SELECT w.*, s.unit, CASE
            WHEN o.v IS NOT NULL THEN o.v
            WHEN s.source IN ('client', 'session', 'interactive', 'user', 'database user') THEN NULL
            ELSE s.setting END AS v
        FROM wanted w JOIN pg_settings s ON s.name = w.name LEFT JOIN own o ON o.n = w.name
    )
    SELECT f.name::text, coalesce(f.v, 'not to be seen from this connection'), f.advice::text
    FROM found f
    WHERE f.v IS NULL OR {schema}.setting_ms(f.v, f.unit) NOT BETWEEN 1 AND f.most_ms
    ORDER BY f.name
$body$;
