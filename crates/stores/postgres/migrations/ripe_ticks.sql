-- The feed of a table that was adopted with a number of its own and no column for transaction ids:
-- what differs from an ordinary outbox. Placeholders as in 0001_outbox.sql.
--
-- A cut is a number S. Whoever has drawn a number of this sequence holds a lock on the sequence
-- until its transaction ends, so once all that held it when S was read have ended, every row up to
-- S is committed or never will be: S is ripe, and becomes a tick. Readers wait for those
-- transactions. A number that is drawn in one transaction and inserted by a later one is not seen
-- coming.

-- The S that is not ripe yet and the transactions that it waits for. Forgotten at a crash, which
-- ends them all.
CREATE UNLOGGED TABLE IF NOT EXISTS {schema}.{outbox_candidate} (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    seq      bigint  NOT NULL,
    waits    text[]  NOT NULL,
    -- Whether it waits for prepared transactions only: those that others may have become meanwhile.
    prepared boolean NOT NULL
);

-- Transactions that have drawn a number and are open, other than this one.
CREATE OR REPLACE FUNCTION {schema}.{outbox_drawing}() RETURNS text[]
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT coalesce(array_agg(l.virtualtransaction), '{}') FROM pg_locks AS l
    WHERE l.locktype = 'relation' AND l.relation = {outbox_seq_text}::regclass
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
$body$;

-- As an ordinary outbox's tick, with "quiet" also while a cut is not ripe.
CREATE OR REPLACE FUNCTION {schema}.{outbox_tick}(
    min_interval_ms integer DEFAULT 20,
    OUT newest bigint, OUT outcome text, OUT wait_ms integer
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    p       {schema}.{outbox_tick}%ROWTYPE;
    c       {schema}.{outbox_candidate}%ROWTYPE;
    now_ms  bigint;
    drawing text[];
    gen     integer;
    stale   boolean;
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
        -- Its own rows would be cut as if they were committed.
        RAISE EXCEPTION 'tick was called after a write of the same transaction'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Call tick on its own.';
    END IF;
    wait_ms := 0;
    IF NOT pg_try_advisory_xact_lock({tick_lock}) THEN
        SELECT t.stamp INTO STRICT newest FROM {schema}.{outbox_tick} AS t
            ORDER BY t.stamp DESC LIMIT 1;
        outcome := 'busy';
        RETURN;
    END IF;
    SELECT * INTO STRICT p FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp DESC LIMIT 1;
    newest := p.stamp;
    IF coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0) < p.seq_hi THEN
        -- By hand, for example TRUNCATE … RESTART IDENTITY. No crash, copy or dump does it.
        RAISE EXCEPTION 'the numbers of outbox "%" were set back from %: what was appended since is'
            ' in no tick; set the sequence % to that number or above and append those events again',
            {outbox_text}, p.seq_hi, {outbox_seq_text} USING ERRCODE = 'PR006';
    END IF;
    now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000);
    SELECT max(g.number) INTO gen FROM {schema}.generation AS g WHERE g.outbox = {outbox_text};
    SELECT * INTO c FROM {schema}.{outbox_candidate};
    stale := c.seq IS NULL OR c.seq <= p.seq_hi;
    IF stale THEN
        c.seq := coalesce(pg_sequence_last_value({outbox_seq_text}::regclass), 0);
        IF c.seq <= p.seq_hi AND gen <= p.generation THEN
            outcome := 'quiet';
            RETURN;
        END IF;
        c.seq := greatest(c.seq, p.seq_hi);
    END IF;
    IF now_ms >= p.stamp >> 16 AND now_ms < (p.stamp >> 16) + min_interval_ms THEN
        outcome := 'early';
        wait_ms := (p.stamp >> 16) + min_interval_ms - now_ms;
        RETURN;
    END IF;
    -- After the sequence was read: whoever had drawn by then is among them, or has ended.
    drawing := {schema}.{outbox_drawing}();
    IF stale THEN
        c := ROW(true, c.seq, drawing, false);
    ELSE
        c.waits := ARRAY(SELECT unnest(c.waits) INTERSECT SELECT unnest(drawing));
        IF c.waits = '{}' AND NOT c.prepared THEN
            c.waits := ARRAY(SELECT x FROM unnest(drawing) AS x WHERE x LIKE '-1/%');
            c.prepared := true;
        END IF;
    END IF;
    IF c.waits <> '{}' THEN
        INSERT INTO {schema}.{outbox_candidate} VALUES (c.*) ON CONFLICT (only_row) DO UPDATE
            SET seq = excluded.seq, waits = excluded.waits, prepared = excluded.prepared;
        outcome := 'quiet';
        RETURN;
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    newest := greatest(p.stamp + 1, now_ms << 16);
    INSERT INTO {schema}.{outbox_tick} AS t
        (stamp, seq_lo, seq_hi, floor, system, timeline, generation, anchor, snap)
    SELECT newest, c.seq, c.seq, c.seq, s.system_identifier, p.timeline, gen, false,
        pg_current_snapshot()
    FROM pg_control_system() AS s;
    outcome := 'made';
END
$body$;

-- As an ordinary outbox's read: a tick's records are the rows between two cuts, by their numbers.
CREATE OR REPLACE FUNCTION {schema}.{outbox_read}(
    after_stamp bigint, after_seq bigint, max_rows integer, max_bytes bigint
) RETURNS SETOF {schema}.feed_row LANGUAGE plpgsql VOLATILE SET jit = off
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
DECLARE
    r     {schema}.feed_row;
    p     {schema}.{outbox_tick}%ROWTYPE;
    t     {schema}.{outbox_tick}%ROWTYPE;
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
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
    p := {schema}.{outbox_place}(after_stamp, after_seq);
    base := p.stamp;
    place := after_seq;
    IF after_seq = 0 OR after_seq >= p.seq_hi AND after_stamp = p.stamp THEN
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
        FOR r IN
            SELECT t.stamp, l.seq, NULL::integer,
                (date_part('epoch', l.created_at) * 1000)::bigint, l.id, l.key::text,
                l.topic::text, l.type::text, l.content_type::text, l.headers::text,
                {payload_out}::bytea
            FROM {schema}.{outbox} AS l
            WHERE l.seq > greatest(place, p.seq_hi) AND l.seq <= t.seq_hi
            ORDER BY l.seq LIMIT max_rows - rows
        LOOP
            RETURN NEXT r;
            rows := rows + 1;
            bytes := bytes + {record_bytes} + coalesce(octet_length(r.payload), 0);
            EXIT WHEN bytes >= max_bytes;
        END LOOP;
        IF FOUND THEN seq := r.seq; END IF;
        IF rows >= max_rows OR bytes >= max_bytes THEN EXIT; END IF;
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
