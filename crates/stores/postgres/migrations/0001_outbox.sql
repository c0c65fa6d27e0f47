-- One outbox and its feed. {outbox} is the table's name, {outbox_tick} that of its ticks and so on,
-- each quoted as an identifier; {outbox_text} is the outbox's name as a text literal, {lock_class}
-- the number under which it takes advisory locks, {payload} bytea or json.
--
-- The order of the first three columns is what the feed rests on. PostgreSQL evaluates defaults in
-- column order, so a row's transaction id is drawn before its seq: whoever has read the sequence at
-- S and then draws an id of its own knows that every row up to S belongs to a smaller one. The
-- segment is chosen before the seq, too.

CREATE SEQUENCE {schema}.{outbox_segment} AS smallint MINVALUE 0 MAXVALUE 15 START 0 CYCLE;
SELECT setval({outbox_segment_text}::regclass, 0, true);

CREATE TABLE {schema}.{outbox} (
    xid          xid8        NOT NULL DEFAULT pg_current_xact_id(),
    segment      smallint    NOT NULL
                     DEFAULT pg_sequence_last_value({outbox_segment_text}::regclass),
    seq          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY
                     (SEQUENCE NAME {schema}.{outbox_seq} CACHE 1),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    id           uuid        NOT NULL DEFAULT {schema}.uuid7(),
    -- The limits stand in the columns' types.
    key          {schema}.event_key          NOT NULL,
    topic        {schema}.event_topic        NOT NULL,
    type         {schema}.event_type         NOT NULL,
    content_type {schema}.event_content_type NOT NULL DEFAULT {content_type_text},
    -- A JSON object of texts, its order kept, or NULL.
    headers      {schema}.event_headers,
    payload      {schema}.event_{payload}    NOT NULL
) PARTITION BY LIST (segment);

-- Retention empties whole segments, and the ring is used again: none is ever missing, with or
-- without a relay.
DO $body$
BEGIN
    FOR i IN 0..15 LOOP
        EXECUTE format('CREATE TABLE %s.%I PARTITION OF %s.%s FOR VALUES IN (%s)',
            {schema_ident_text}, {outbox_text} || '_s' || i, {schema_ident_text},
            {outbox_ident_text}, i);
        EXECUTE format('ALTER TABLE %s.%I ADD PRIMARY KEY (seq)',
            {schema_ident_text}, {outbox_text} || '_s' || i);
    END LOOP;
END
$body$;
CREATE INDEX ON {schema}.{outbox} (xid, seq);

-- When each segment was taken into use last, and what had been drawn from the sequence by then. A
-- row that chose it since then has a larger seq, because that is drawn later; one that chose it at
-- an earlier turn of the ring may still come.
CREATE TABLE {schema}.{outbox_ring} (
    segment    smallint    PRIMARY KEY,
    after_seq  bigint      NOT NULL,
    opened_at  timestamptz NOT NULL
);
INSERT INTO {schema}.{outbox_ring} VALUES (0, 0, clock_timestamp());

-- Ids that callers gave, so that the same one is appended once. Fresh ones can't repeat.
CREATE TABLE {schema}.{outbox_given} (
    id         uuid        PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX ON {schema}.{outbox_given} (created_at);

-- One cut of the feed each. Its records are the rows visible in its snapshot and not in the one of
-- the tick before, by seq.
CREATE TABLE {schema}.{outbox_tick} (
    -- The upper half of the ULIDs of its records: milliseconds << 16 | number within them.
    stamp      bigint      PRIMARY KEY,
    -- The sequence's last value before the snapshot, and after it.
    seq_lo     bigint      NOT NULL,
    seq_hi     bigint      NOT NULL,
    -- Up to here all is settled by the last anchor: ids of transactions mean nothing there.
    floor      bigint      NOT NULL,
    -- The cluster that its transaction ids belong to.
    system     bigint      NOT NULL,
    -- This transaction's own id, drawn after all of the above was read.
    own        xid8        NOT NULL DEFAULT pg_current_xact_id(),
    timeline   integer     NOT NULL,
    generation integer     NOT NULL,
    anchor     boolean     NOT NULL,
    snap       pg_snapshot NOT NULL
)
-- Whoever looks for the oldest steps over those that were deleted and not yet vacuumed. By shares
-- of the table, millions of them would gather.
WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
-- How far a snapshot's ticks go, for retention.
CREATE INDEX ON {schema}.{outbox_tick} (system, own);
INSERT INTO {schema}.{outbox_tick}
    (stamp, seq_lo, seq_hi, floor, system, timeline, generation, anchor, snap)
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint << 16, 0, 0, 0,
    s.system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer,
    0, false, pg_current_snapshot()
FROM pg_control_system() AS s;

-- Cuts the feed where it stands now, if anything may have come since the newest tick.
--
-- Takes an advisory lock (one tick at a time) and nothing that a writer would wait for. It must not
-- have a transaction id before its last statement: each number below is read in a statement of its
-- own, in this order, and `own` is drawn after all of them, so that every transaction that had
-- drawn a seq up to seq_hi has a smaller id than `own`.
--
-- outcome: 'made' a tick; 'quiet', nothing may have come; 'early', something may have, and the next
-- tick is due in wait_ms; 'busy', another session makes one at this moment.
CREATE FUNCTION {schema}.{outbox_tick}(
    min_interval_ms integer DEFAULT 20,
    OUT newest bigint, OUT outcome text, OUT wait_ms integer
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    p        {schema}.{outbox_tick}%ROWTYPE;
    seq_lo   bigint;
    seq_hi   bigint;
    snap     pg_snapshot;
    system   bigint;
    timeline integer;
    now_ms   bigint;
    gen      integer;
    settled  boolean := false;
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'a standby makes no ticks'
            USING ERRCODE = 'read_only_sql_transaction', HINT = 'Call tick on the primary.';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'tick needs a READ COMMITTED transaction, this one is %',
            upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Call tick on its own.';
    END IF;
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'tick was called after a write of the same transaction'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Call tick on its own.';
    END IF;
    wait_ms := 0;
    SELECT * INTO STRICT p FROM {schema}.{outbox_tick} ORDER BY stamp DESC LIMIT 1;
    newest := p.stamp;
    IF coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0) < p.seq_hi THEN
        -- By hand, for example TRUNCATE … RESTART IDENTITY. No crash, copy or dump does it.
        RAISE EXCEPTION 'the numbers of outbox "%" were set back from %: what was appended since is'
            ' in no tick; set the sequence % to that number or above and append those events again',
            {outbox_text}, p.seq_hi, {outbox_seq_text} USING ERRCODE = 'PR006';
    END IF;
    IF NOT {schema}.{outbox_due}(p) THEN
        outcome := 'quiet';
        RETURN;
    END IF;
    IF NOT pg_try_advisory_xact_lock({tick_lock}) THEN
        outcome := 'busy';
        RETURN;
    END IF;
    -- Whoever held the lock has committed a tick since.
    SELECT * INTO STRICT p FROM {schema}.{outbox_tick} ORDER BY stamp DESC LIMIT 1;
    newest := p.stamp;
    now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000);
    IF now_ms >= p.stamp >> 16 AND now_ms < (p.stamp >> 16) + min_interval_ms THEN
        outcome := 'early';
        wait_ms := (p.stamp >> 16) + min_interval_ms - now_ms;
        RETURN;
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        -- A record must not be handed out at a position that a crash takes back.
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    SELECT max(number) INTO gen FROM {schema}.generation WHERE outbox = {outbox_text};
    SELECT system_identifier INTO system FROM pg_control_system();
    timeline := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;
    IF system <> p.system OR p.own >= pg_snapshot_xmax(pg_current_snapshot()) THEN
        -- Restored into another cluster: the ids of the rows mean nothing here. Once no writer is
        -- open, all of them are settled, and the new tick takes in whatever the last one had not.
        -- SHARE waits for open writers and draws no transaction id.
        PERFORM set_config('lock_timeout', '500ms', true);
        LOCK TABLE {schema}.{outbox} IN SHARE MODE;
        settled := true;
    END IF;
    seq_lo := coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0);
    snap := pg_current_snapshot();
    seq_hi := coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0);
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RAISE EXCEPTION 'tick has a transaction id before its cut; records would be lost'
            USING ERRCODE = 'internal_error';
    END IF;
    -- Never behind the tick before; the number within a millisecond overflows into the next one.
    newest := greatest(p.stamp + 1, now_ms << 16);
    INSERT INTO {schema}.{outbox_tick} AS t
        (stamp, seq_lo, seq_hi, floor, system, timeline, generation, anchor, snap)
    VALUES (newest, seq_lo, seq_hi, CASE WHEN settled THEN seq_hi ELSE p.floor END, system,
        timeline, gen, settled, snap);
    outcome := 'made';
END
$body$;

-- The transactions that were open when tick p was cut and had ended at the cut `later`: those in
-- its snapshot's list, and those that had an id already but lay beyond its end. (xmax is "latest
-- completed id + 1", not the next id to be drawn: leaving the second half out loses events.) Each
-- costs one look-up afterwards, and those still open cost nothing, however much they have written.
CREATE FUNCTION {schema}.{outbox_ended}(p {schema}.{outbox_tick}, later pg_snapshot) RETURNS xid8[]
LANGUAGE plpgsql STABLE AS $body$
BEGIN
    RETURN (SELECT array_agg(e.x) FROM (
        SELECT x FROM pg_snapshot_xip(p.snap) AS x
        UNION ALL
        SELECT x::text::xid8 FROM generate_series(pg_snapshot_xmax(p.snap)::text::bigint,
            p.own::text::bigint - 1) AS x
    ) AS e (x) WHERE pg_visible_in_snapshot(e.x, later));
END
$body$;

-- Whether there may be something after tick p: the sequence has moved on, the partitions were
-- raised, the cluster is another one, or a transaction that was open at p has ended and has rows.
-- Open transactions cost nothing here: only ended ones are looked up, as pairs (xid, seq), which no
-- other index has: after a bulk load the planner believes that every row is of the transaction that
-- it looks for, and would find it by reading all of them.
CREATE FUNCTION {schema}.{outbox_due}(p {schema}.{outbox_tick}) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET jit = off AS $body$
BEGIN
    -- Where events come all the time this is all that is asked; the rest opens every segment.
    IF coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0) > p.seq_hi THEN
        RETURN true;
    END IF;
    RETURN (SELECT max(number) FROM {schema}.generation WHERE outbox = {outbox_text}) > p.generation
        OR (SELECT system_identifier FROM pg_control_system()) <> p.system
        -- A dump of a later time than the cluster has come to, after that was set back.
        OR p.own >= pg_snapshot_xmax(pg_current_snapshot())
        OR EXISTS (SELECT FROM unnest({schema}.{outbox_ended}(p, pg_current_snapshot())) AS e (x)
            JOIN LATERAL (SELECT FROM {schema}.{outbox} o
                WHERE (o.xid, o.seq) > (e.x, p.floor)
                    AND (o.xid, o.seq) <= (e.x, 9223372036854775807)
                ORDER BY o.xid, o.seq LIMIT 1) AS o ON true);
END
$body$;

-- The feed after a place, over as many ticks as fit. Takes no lock that a writer or another reader
-- would meet: every cut is a fixed snapshot, so nothing can appear behind the reader.
--
-- after_stamp and after_seq are the two halves of a position: (0, 0) is the start, (T << 16, 0) a
-- time. A row with an id is a record. A row without one, with a generation, opens a tick; its seq
-- is where the tick ends. The last row has neither, and is the place up to which this call has
-- read: where it equals where the tick ends, the tick is done.
--
-- Retention deletes ticks, oldest first, before it empties a segment of their records. So while the
-- tick that reading began at is still there at the end, nothing was missing in between. That look
-- must not be made in an older snapshot: TRUNCATE shows through those.
--
-- One call reads up to 1,000 ticks: thousands in a row can have no record at all, after a long
-- transaction that kept inserting, and each costs two queries.
--
-- Each row passes through one variable of the returned type, as a whole: column by column it cost
-- half as much again. The casts make the columns' types those of the variable; without them each
-- row would be converted.
--
-- Its queries are planned once in a session: left to itself the server plans them anew in each
-- call, for all segments, which costs as much as reading a tick. One plan must then fit segments of
-- any size, also those that were empty when it was made, so it may only go by the indexes.
CREATE FUNCTION {schema}.{outbox_read}(
    after_stamp bigint, after_seq bigint, max_rows integer, max_bytes bigint
) RETURNS SETOF {schema}.feed_row LANGUAGE plpgsql VOLATILE SET jit = off
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
DECLARE
    r     {schema}.feed_row;
    p     {schema}.{outbox_tick}%ROWTYPE;
    t     {schema}.{outbox_tick}%ROWTYPE;
    ended xid8[];
    ticks integer := 0;
    rows  integer := 0;
    bytes bigint := 0;
    place bigint;
    base  bigint;
    stamp bigint;
    seq   bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'reading the feed needs a READ COMMITTED transaction, this one is %',
            upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'invalid_transaction_state',
                HINT = 'Its pages agree with each other without any more isolation.';
    END IF;
    p := {schema}.{outbox_place}(after_stamp, after_seq);
    base := p.stamp;
    place := after_seq;
    IF after_seq = 0 OR after_seq >= p.seq_hi AND after_stamp = p.stamp THEN
        -- At the end of a tick: the next one begins.
        place := 0;
    END IF;
    LOOP
        SELECT * INTO t FROM {schema}.{outbox_tick} AS n
            WHERE n.stamp > p.stamp ORDER BY n.stamp LIMIT 1;
        EXIT WHEN NOT FOUND;
        stamp := t.stamp;
        seq := t.seq_hi;
        r := ROW(stamp, seq, t.generation, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
        RETURN NEXT r;
        -- Late ones first: all of them have a smaller seq than the others.
        -- At an anchor all have ended, and their ids are those of p's cluster.
        ended := {schema}.{outbox_ended}(p, CASE WHEN t.anchor
            THEN '9223372036854775807:9223372036854775807:' ELSE t.snap END);
        IF ended IS NOT NULL THEN
            FOR r IN
                SELECT t.stamp, l.seq, NULL::integer,
                    (date_part('epoch', l.created_at) * 1000000)::bigint / 1000, l.id, l.key::text,
                    l.topic::text, l.type::text, l.content_type::text, l.headers::text,
                    {payload_out}::bytea
                FROM unnest(ended) AS e (x)
                CROSS JOIN LATERAL (SELECT * FROM {schema}.{outbox} o
                    WHERE (o.xid, o.seq) > (e.x, greatest(place,
                            CASE WHEN t.anchor THEN p.floor ELSE t.floor END))
                        AND (o.xid, o.seq) <= (e.x, p.seq_lo)
                    ORDER BY o.xid, o.seq LIMIT max_rows - rows) AS l
                ORDER BY l.seq LIMIT max_rows - rows
            LOOP
                RETURN NEXT r;
                rows := rows + 1;
                bytes := bytes + {record_bytes} + coalesce(octet_length(r.payload), 0);
                EXIT WHEN bytes >= max_bytes;
            END LOOP;
            IF FOUND THEN seq := r.seq; END IF;
        END IF;
        IF rows >= max_rows OR bytes >= max_bytes THEN EXIT; END IF;
        FOR r IN
            SELECT t.stamp, l.seq, NULL::integer,
                (date_part('epoch', l.created_at) * 1000000)::bigint / 1000, l.id, l.key::text,
                l.topic::text, l.type::text, l.content_type::text, l.headers::text,
                {payload_out}::bytea
            FROM {schema}.{outbox} AS l
            WHERE l.seq > greatest(place, p.seq_lo) AND l.seq <= t.seq_hi
                AND CASE WHEN t.anchor
                    THEN l.seq > p.seq_hi OR NOT pg_visible_in_snapshot(l.xid, p.snap)
                    ELSE pg_visible_in_snapshot(l.xid, t.snap)
                        AND NOT pg_visible_in_snapshot(l.xid, p.snap) END
            ORDER BY l.seq LIMIT max_rows - rows
        LOOP
            RETURN NEXT r;
            rows := rows + 1;
            bytes := bytes + {record_bytes} + coalesce(octet_length(r.payload), 0);
            EXIT WHEN bytes >= max_bytes;
        END LOOP;
        IF FOUND THEN seq := r.seq; END IF;
        IF rows >= max_rows OR bytes >= max_bytes THEN EXIT; END IF;
        -- All of tick t was read.
        seq := t.seq_hi;
        place := 0;
        p := t;
        ticks := ticks + 1;
        EXIT WHEN ticks >= 1000;
    END LOOP;
    IF NOT EXISTS (SELECT FROM {schema}.{outbox_tick} AS b WHERE b.stamp = base) THEN
        -- The start means the oldest that is kept, so there it is only to be read again.
        RAISE EXCEPTION 'position % fell below the retention horizon while it was read',
            {schema}.position_text(after_stamp, after_seq)
            USING ERRCODE = CASE WHEN after_stamp = 0 AND after_seq = 0
                THEN 'serialization_failure' ELSE 'PR003' END;
    END IF;
    IF stamp IS NULL THEN
        stamp := p.stamp;
        seq := p.seq_hi;
    END IF;
    r := ROW(stamp, seq, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    RETURN NEXT r;
END
$body$;

-- The tick after which a place reads on, once the place is known to be one: the tick before the one
-- it lies within, or the one it ends. Refuses a place beyond the head (PR001), one that names no
-- tick and is no time (PR002), and one below the retention horizon (PR003).
CREATE FUNCTION {schema}.{outbox_place}(after_stamp bigint, after_seq bigint)
RETURNS {schema}.{outbox_tick} LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    named  {schema}.{outbox_tick}%ROWTYPE;
    oldest {schema}.{outbox_tick}%ROWTYPE;
    newest {schema}.{outbox_tick}%ROWTYPE;
    now_ms bigint := floor(extract(epoch FROM clock_timestamp()) * 1000);
BEGIN
    IF after_seq <> 0 THEN
        SELECT * INTO named FROM {schema}.{outbox_tick} AS t WHERE t.stamp = after_stamp;
        IF FOUND AND after_seq = named.seq_hi THEN
            RETURN named;
        END IF;
        IF FOUND AND after_seq < named.seq_hi THEN
            SELECT * INTO oldest FROM {schema}.{outbox_tick} AS t
                WHERE t.stamp < after_stamp ORDER BY t.stamp DESC LIMIT 1;
            IF FOUND THEN
                RETURN oldest;
            END IF;
        END IF;
    END IF;
    SELECT * INTO STRICT oldest FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
    IF after_stamp = 0 AND after_seq = 0 THEN
        RETURN oldest;
    END IF;
    SELECT * INTO STRICT newest FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp DESC LIMIT 1;
    IF after_stamp > (CASE WHEN after_seq = 0 THEN greatest(newest.stamp, now_ms << 16)
            ELSE newest.stamp END)
    THEN
        RAISE EXCEPTION 'position % is beyond the head, %',
            {schema}.position_text(after_stamp, after_seq),
            {schema}.position_text(newest.stamp, newest.seq_hi)
            USING ERRCODE = 'PR001', HINT = 'It comes from another database, or this one was'
                ' restored to an earlier state.';
    END IF;
    -- A time that equals the oldest tick's would be before its records.
    IF after_stamp <= oldest.stamp THEN
        IF after_seq = 0 AND oldest.seq_hi = 0 THEN
            -- Before the outbox was made, and nothing was ever deleted.
            RETURN oldest;
        END IF;
        RAISE EXCEPTION 'position % lies below the retention horizon %',
            {schema}.position_text(after_stamp, after_seq),
            {schema}.position_text(oldest.stamp, oldest.seq_hi)
            USING ERRCODE = 'PR003', HINT = 'Events there were deleted; start at the oldest.';
    END IF;
    IF after_seq <> 0 AND (named.stamp IS NULL OR after_seq > named.seq_hi) THEN
        RAISE EXCEPTION 'position % names no event of this outbox and no time',
            {schema}.position_text(after_stamp, after_seq)
            USING ERRCODE = 'PR002', HINT = 'Give one that was read from it, or a time.';
    END IF;
    SELECT * INTO named FROM {schema}.{outbox_tick} AS t
        WHERE t.stamp < after_stamp ORDER BY t.stamp DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN oldest;
    END IF;
    RETURN named;
END
$body$;

-- Raises the number of partitions to a multiple of the present one, from the next tick on: ticks
-- made so far keep theirs. No writer is involved, because the reader computes a key's partition.
-- Waits for a tick under way, and holds the next one back until it has committed.
CREATE FUNCTION {schema}.{outbox_raise}(count integer) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    old {schema}.generation%ROWTYPE;
BEGIN
    PERFORM pg_advisory_xact_lock({tick_lock});
    SELECT * INTO STRICT old FROM {schema}.generation AS g
        WHERE g.outbox = {outbox_text} ORDER BY g.number DESC LIMIT 1;
    IF count <= old.partitions OR count % old.partitions <> 0 OR count > 65536 THEN
        RAISE EXCEPTION '% partitions cannot become %; give a larger multiple of % up to 65536, so '
            'that every key moves as a whole', old.partitions, count, old.partitions
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO {schema}.generation (outbox, number, partitions, after_stamp)
    SELECT old.outbox, old.number + 1, count, max(t.stamp) FROM {schema}.{outbox_tick} AS t;
END
$body$;
