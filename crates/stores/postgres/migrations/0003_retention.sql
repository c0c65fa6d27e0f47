-- Retention: what every consumer has read and is old enough is forgotten, whole segments at once.
--
-- Two steps that do not trust each other. First the horizon, which is the oldest tick, moves: never
-- beyond what every consumer has passed, never beyond what must be kept. From then on nobody can
-- read a row of that tick or of an older one. Then a segment may be emptied once every row that is
-- in it is such a row, under a lock that excludes the segment's writers.
--
-- A writer that chose its segment long ago and inserts only now, into a sealed or an emptied one,
-- loses nothing. Its row is simply in there. While its transaction is open, the lock is not to be
-- had; and once it has ended, its row is visible in no tick that was made before.

-- The newest tick that every consumer has passed to its end, or the oldest one; NULL without any
-- consumer. A place within a tick, or a time, counts as the tick before. A consumer that is known
-- but has not begun in a partition pins all that is kept; in a raised one it begins where its
-- predecessor ends, so that one pins, at most up to there.
--
-- A consumer of the log has had all that its base's snapshot sees. A tick's transaction that the
-- snapshot sees was committed before it, and the tick's own snapshot is older still: all up to that
-- tick was delivered. Without a base it pins all that is kept. So does a base from the future, as
-- one from a dump is after the cluster was set back: its ids are drawn a second time.
CREATE FUNCTION {schema}.{outbox_passed}() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    at_stamp bigint;
    at_seq   bigint;
    passed   bigint;
    by_log   bigint;
    oldest   bigint := (SELECT t.stamp FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1);
BEGIN
    SELECT p.stamp, p.seq INTO at_stamp, at_seq
    FROM (SELECT DISTINCT consumer FROM {schema}.checkpoint
        WHERE outbox = {outbox_text} AND partition <> 'wal') AS k
    CROSS JOIN (SELECT number, partitions,
            lag(partitions) OVER w AS before, lead(after_stamp) OVER w AS ends_at
        FROM {schema}.generation WHERE outbox = {outbox_text} WINDOW w AS (ORDER BY number)) AS g
    CROSS JOIN LATERAL generate_series(0, g.partitions - 1) AS i
    LEFT JOIN {schema}.checkpoint AS c ON c.outbox = {outbox_text} AND c.consumer = k.consumer
        AND c.partition = i || '/' || g.partitions
    LEFT JOIN {schema}.checkpoint AS b ON b.outbox = {outbox_text} AND b.consumer = k.consumer
        AND b.partition = i % g.before || '/' || g.before
    CROSS JOIN LATERAL (SELECT
        ('x' || encode(substring(c.position FROM 1 FOR 8), 'hex'))::bit(64)::bigint AS stamp,
        ('x' || encode(substring(c.position FROM 9 FOR 8), 'hex'))::bit(64)::bigint AS seq) AS at
    CROSS JOIN LATERAL (SELECT CASE WHEN at.stamp IS NULL THEN 0
            WHEN at.stamp > g.ends_at THEN g.ends_at + 1 ELSE at.stamp END AS stamp,
        CASE WHEN at.stamp IS NULL OR at.stamp > g.ends_at THEN 0 ELSE at.seq END AS seq) AS p
    WHERE NOT coalesce(c.ended, false)
        AND (c.position IS NOT NULL OR g.before IS NULL OR coalesce(b.ended, false))
    ORDER BY p.stamp, p.seq LIMIT 1;
    -- Not found: no consumer of the feed. One that has finished a partition has begun in its
    -- successors.
    IF FOUND THEN
        SELECT t.stamp INTO passed FROM {schema}.{outbox_tick} AS t
            WHERE t.stamp <= at_stamp AND (t.stamp < at_stamp OR at_seq > 0 AND t.seq_hi = at_seq)
            ORDER BY t.stamp DESC LIMIT 1;
        passed := coalesce(passed, oldest);
    END IF;
    SELECT min(coalesce(t.stamp, oldest)) INTO by_log
    FROM {schema}.checkpoint AS c
    LEFT JOIN {schema}.wal_base AS b ON b.outbox = c.outbox AND b.consumer = c.consumer
        AND pg_snapshot_xmax(b.snapshot) <= pg_snapshot_xmax(pg_current_snapshot())
    LEFT JOIN LATERAL (SELECT t.stamp FROM {schema}.{outbox_tick} AS t
        WHERE t.system = b.system AND t.own < pg_snapshot_xmax(b.snapshot)
            AND pg_visible_in_snapshot(t.own, b.snapshot)
        ORDER BY t.own DESC LIMIT 1) AS t ON true
    WHERE c.outbox = {outbox_text} AND c.partition = 'wal';
    RETURN least(passed, by_log);
END
$body$;

-- Where the horizon may move to: a tick that every consumer has passed and that is as old as asked.
-- Records come before their tick, so all up to it are that old, too.
CREATE FUNCTION {schema}.{outbox_forgettable}(keep_ms bigint) RETURNS {schema}.{outbox_tick}
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    passed bigint := {schema}.{outbox_passed}();
    old_ms bigint := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - keep_ms;
    target {schema}.{outbox_tick}%ROWTYPE;
BEGIN
    SELECT * INTO target FROM {schema}.{outbox_tick} AS t
        WHERE t.stamp <= passed AND t.stamp < (greatest(old_ms, 0) + 1) << 16
        ORDER BY t.stamp DESC LIMIT 1;
    IF NOT FOUND THEN
        SELECT * INTO STRICT target FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
    END IF;
    RETURN target;
END
$body$;

-- The table that holds a segment, quoted.
CREATE FUNCTION {schema}.{outbox_leaf}(segment integer) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN format('%s.%I', {schema_ident_text}::text, {outbox_text}::text || '_s' || segment);

-- Whether a segment has a row.
CREATE FUNCTION {schema}.{outbox_occupied}(segment integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    occupied boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s)', {schema}.{outbox_leaf}(segment))
        INTO occupied;
    RETURN occupied;
END
$body$;

-- Whether every committed row of a segment was visible in tick t, so that it is a record of that
-- tick or of an older one. Exact under a lock that no writer of the segment holds: then none of its
-- rows belongs to an open transaction, and no row is missing from what this sees. Reads by index.
CREATE FUNCTION {schema}.{outbox_settled}(segment integer, t {schema}.{outbox_tick})
RETURNS boolean LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $body$
DECLARE
    leaf    text := {schema}.{outbox_leaf}(segment);
    lowest  bigint;
    highest bigint;
    newest  xid8;
    settled boolean;
BEGIN
    EXECUTE format('SELECT min(seq), max(seq) FROM ONLY %s', leaf) INTO lowest, highest;
    IF highest IS NULL THEN
        RETURN true;
    END IF;
    IF highest > t.seq_hi THEN
        -- Drawn after that tick, which can't have seen it, whatever its snapshot says of the row's
        -- id: the tick may be of another cluster, or of a copy of this one whose ids were ahead.
        RETURN false;
    END IF;
    IF highest <= t.floor THEN
        RETURN true;
    END IF;
    IF lowest <= t.floor THEN
        -- Rows of another cluster among them; their ids mean nothing.
        EXECUTE format('SELECT NOT EXISTS (SELECT FROM ONLY %s WHERE seq > $1
            AND NOT pg_visible_in_snapshot(xid, $2))', leaf) INTO settled USING t.floor, t.snap;
        RETURN settled;
    END IF;
    -- All below the snapshot's end, and none of those that were open in it.
    EXECUTE format('SELECT xid FROM ONLY %s ORDER BY xid DESC, seq DESC LIMIT 1', leaf) INTO newest;
    IF newest >= pg_snapshot_xmax(t.snap) THEN
        RETURN false;
    END IF;
    EXECUTE format('SELECT NOT EXISTS (SELECT FROM pg_snapshot_xip($1) AS e (x)
        CROSS JOIN LATERAL (SELECT FROM ONLY %s AS l WHERE (l.xid, l.seq) > (e.x, 0)
            AND (l.xid, l.seq) <= (e.x, $2) ORDER BY l.xid, l.seq LIMIT 1) AS l)', leaf)
        INTO settled USING t.snap, highest;
    RETURN settled;
END
$body$;

-- How many events a segment holds: counted up to 100,000, beyond that estimated by the planner's
-- statistics, or by the numbers drawn where there are none.
CREATE FUNCTION {schema}.{outbox_count}(segment integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    leaf   text := {schema}.{outbox_leaf}(segment);
    events bigint;
    drawn  bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM (SELECT FROM ONLY %s LIMIT 100001) AS l', leaf)
        INTO events;
    IF events <= 100000 THEN
        RETURN events;
    END IF;
    EXECUTE format('SELECT max(seq) - min(seq) + 1 FROM ONLY %s', leaf) INTO drawn;
    SELECT least(drawn, greatest(events, CASE WHEN c.reltuples > 0 AND c.relpages > 0
            THEN (c.reltuples / c.relpages * (pg_relation_size(c.oid)
                / current_setting('block_size')::integer))::bigint
            ELSE drawn END))
        INTO events FROM pg_class AS c WHERE c.oid = leaf::regclass;
    RETURN events;
END
$body$;

-- The segment to take into use next: the first empty one in the ring after the present one, once
-- that has rows and the oldest of them is old enough, or came with a dump. NULL while the present
-- one stays, also for want of an empty one: appends go on in it.
CREATE FUNCTION {schema}.{outbox_next_segment}(keep_ms bigint) RETURNS integer
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    present integer := pg_sequence_last_value({outbox_segment_text}::regclass);
    due     boolean;
BEGIN
    -- An eighth of the time: about eight segments are in use, and half the ring is free.
    EXECUTE format('SELECT created_at <= clock_timestamp() - $1 * interval ''1 millisecond''
            OR seq <= $2 FROM ONLY %s ORDER BY seq LIMIT 1', {schema}.{outbox_leaf}(present))
        INTO due USING least(keep_ms / 8, 1000000000000),
            (SELECT t.floor FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp DESC LIMIT 1);
    IF NOT coalesce(due, false) THEN
        RETURN NULL;
    END IF;
    FOR i IN 1..15 LOOP
        IF NOT {schema}.{outbox_occupied}((present + i) % 16) THEN
            RETURN (present + i) % 16;
        END IF;
    END LOOP;
    RETURN NULL;
END
$body$;

-- Takes the next segment into use if it is time. Waits for nobody: writers under way go on in the
-- one that they chose.
CREATE FUNCTION {schema}.{outbox_rotate}(keep_ms bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    next  integer;
    drawn bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock({retention_lock}) THEN
        RETURN false;
    END IF;
    next := {schema}.{outbox_next_segment}(keep_ms);
    IF next IS NULL THEN
        RETURN false;
    END IF;
    drawn := coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0);
    INSERT INTO {schema}.{outbox_ring} AS r (segment, after_seq, opened_at)
        VALUES (next, drawn, clock_timestamp())
        ON CONFLICT (segment) DO UPDATE
            SET after_seq = excluded.after_seq, opened_at = excluded.opened_at;
    PERFORM setval({outbox_segment_text}::regclass, next, true);
    RETURN true;
END
$body$;

-- Takes the next segment into use if it is time, moves the horizon by at most so many ticks, and
-- forgets as many ids that callers gave. Takes no lock that a writer or a reader would meet.
-- Returns the horizon, whether there is more to do, and the segments that can be emptied, the one
-- taken into use longest ago first: a caller that empties one at a time would else empty those that
-- have just been filled again, and never come to the others.
CREATE FUNCTION {schema}.{outbox_prune}(
    keep_ms bigint, most integer,
    OUT stamp bigint, OUT seq bigint, OUT more boolean, OUT segments integer[]
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    target  {schema}.{outbox_tick}%ROWTYPE;
    horizon {schema}.{outbox_tick}%ROWTYPE;
    old     timestamptz;
    ids     integer := 0;
BEGIN
    more := false;
    segments := '{}';
    IF pg_try_advisory_xact_lock({retention_lock}) THEN
        PERFORM {schema}.{outbox_rotate}(keep_ms);
        target := {schema}.{outbox_forgettable}(keep_ms);
        -- The oldest first: what is left is a whole chain, whenever somebody looks.
        DELETE FROM {schema}.{outbox_tick} AS t WHERE t.stamp IN (
            SELECT n.stamp FROM {schema}.{outbox_tick} AS n
            WHERE n.stamp < target.stamp ORDER BY n.stamp LIMIT most);
        SELECT * INTO STRICT horizon FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
        more := horizon.stamp < target.stamp;
        -- An id is remembered for as long as its event, and at least as long as events are kept.
        old := to_timestamp((horizon.stamp >> 16) / 1000.0);
        IF horizon.seq_hi > 0 THEN
            DELETE FROM {schema}.{outbox_given} AS g WHERE g.id IN (
                SELECT n.id FROM {schema}.{outbox_given} AS n
                WHERE n.created_at < old ORDER BY n.created_at LIMIT most);
            GET DIAGNOSTICS ids = ROW_COUNT;
            more := more OR ids >= most;
        END IF;
        segments := ARRAY(SELECT i FROM generate_series(0, 15) AS i
            LEFT JOIN {schema}.{outbox_ring} AS r ON r.segment = i
            WHERE i <> pg_sequence_last_value({outbox_segment_text}::regclass)
                AND {schema}.{outbox_occupied}(i) AND {schema}.{outbox_settled}(i, horizon)
            ORDER BY r.after_seq NULLS FIRST, i);
    ELSE
        SELECT * INTO STRICT horizon FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
    END IF;
    stamp := horizon.stamp;
    seq := horizon.seq_hi;
END
$body$;

-- Empties a segment all of whose rows lie at or below the horizon. Returns how many events that
-- were, 0 if it may not be emptied, NULL if somebody was at work in it.
--
-- ACCESS EXCLUSIVE on this one leaf, waited for briefly, so that nobody queues behind the wait for
-- longer. It means that no transaction which has written to the leaf, prepared ones among them, is
-- still open: the look at its rows under the lock is complete. The parent and the other leaves are
-- not locked, and writers do not choose this one.
CREATE FUNCTION {schema}.{outbox_empty}(segment integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '25ms' AS $body$
DECLARE
    leaf    text := {schema}.{outbox_leaf}(segment);
    horizon {schema}.{outbox_tick}%ROWTYPE;
    events  bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock({retention_lock}) THEN
        RETURN NULL;
    END IF;
    -- Writers would wait for the lock.
    IF segment = pg_sequence_last_value({outbox_segment_text}::regclass) THEN
        RETURN 0;
    END IF;
    SELECT * INTO STRICT horizon FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
    IF NOT {schema}.{outbox_settled}(segment, horizon) THEN
        RETURN 0;
    END IF;
    -- A row that is committed from here on is not visible in that tick: the count stays right.
    events := {schema}.{outbox_count}(segment);
    BEGIN
        EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE', leaf);
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    END;
    IF NOT {schema}.{outbox_settled}(segment, horizon) THEN
        RETURN 0;
    END IF;
    EXECUTE format('TRUNCATE ONLY %s', leaf);
    RETURN events;
END
$body$;

-- How many events the next calls would forget, and the present horizon.
CREATE FUNCTION {schema}.{outbox_prunable}(
    keep_ms bigint, OUT events bigint, OUT stamp bigint, OUT seq bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    target  {schema}.{outbox_tick}%ROWTYPE := {schema}.{outbox_forgettable}(keep_ms);
    present integer := pg_sequence_last_value({outbox_segment_text}::regclass);
BEGIN
    events := 0;
    FOR i IN 0..15 LOOP
        IF (i <> present OR {schema}.{outbox_next_segment}(keep_ms) IS NOT NULL)
            AND {schema}.{outbox_settled}(i, target)
        THEN
            events := events + {schema}.{outbox_count}(i);
        END IF;
    END LOOP;
    SELECT t.stamp, t.seq_hi INTO STRICT stamp, seq
        FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
END
$body$;

-- What a relay may call is granted to it by name.
DO $body$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['passed()', 'forgettable(bigint)', 'leaf(integer)',
        'occupied(integer)', 'settled(integer, ' || {outbox_tick_text} || ')', 'count(integer)',
        'next_segment(bigint)', 'rotate(bigint)', 'prune(bigint, integer)', 'empty(integer)',
        'prunable(bigint)']
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s.%I%s FROM PUBLIC', {schema_ident_text},
            {outbox_text} || '_' || split_part(name, '(', 1),
            substring(name FROM position('(' IN name)));
    END LOOP;
END
$body$;
