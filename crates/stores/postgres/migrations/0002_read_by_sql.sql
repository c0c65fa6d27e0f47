-- Following a feed by SQL alone, in any language: tick, read_feed, and what names places.
--
-- They find the outbox by its name and call the functions of its own. A position is a ULID of 26
-- characters here; NULL is the start.

-- A row of what an outbox's own read function returns; see its comment.
CREATE TYPE {schema}.feed_row AS (
    stamp bigint, seq bigint, generation integer, at_ms bigint, id uuid, key text, topic text,
    type text, content_type text, headers text, payload bytea
);

-- What an outbox of that name is, or an error that says how to make one.
CREATE FUNCTION {schema}.known_outbox(outbox text) RETURNS void
LANGUAGE plpgsql STABLE AS $body$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.feed f WHERE f.outbox = known_outbox.outbox) THEN
        RAISE EXCEPTION 'there is no outbox "%"', left(outbox, 64)
            USING ERRCODE = 'undefined_object',
                HINT = 'See postrider.outboxes(); `postrider init` makes one.';
    END IF;
END
$body$;

-- The two halves of a position; NULL is the start.
CREATE FUNCTION {schema}.position_halves(ulid text, OUT stamp bigint, OUT seq bigint)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $body$
DECLARE
    bits bit varying := {schema}.position_bits(coalesce(ulid, repeat('0', 26)));
BEGIN
    stamp := substring(bits FROM 1 FOR 64)::bit(64)::bigint;
    seq := substring(bits FROM 65)::bit(64)::bigint;
    IF stamp < 0 OR seq < 0 THEN
        -- Above all that a tick can have; as signed numbers they would lie below.
        RAISE EXCEPTION 'position % is beyond the head', ulid USING ERRCODE = 'PR001';
    END IF;
END
$body$;

-- Cuts the feed, so that read_feed shows what was committed up to now. Call it on its own, on the
-- primary. outcome and wait_ms: as the outbox's own tick says.
CREATE FUNCTION {schema}.tick(
    outbox text DEFAULT 'outbox', min_interval_ms integer DEFAULT 20,
    OUT head text, OUT outcome text, OUT wait_ms integer
) LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    EXECUTE format('SELECT t.outcome, t.wait_ms FROM %s.%I($1) AS t',
            {schema_ident_text}, outbox || '_tick') INTO outcome, wait_ms USING min_interval_ms;
    head := {schema}.head(outbox);
END
$body$;

-- The newest position: a reader that begins here sees only what is cut from now on.
CREATE FUNCTION {schema}.head(outbox text DEFAULT 'outbox') RETURNS text
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    head text;
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    EXECUTE format('SELECT %1$s.position_text(stamp, seq_hi) FROM %1$s.%2$I'
        ' ORDER BY stamp DESC LIMIT 1', {schema_ident_text}, outbox || '_tick') INTO STRICT head;
    RETURN head;
END
$body$;

-- The position from which all records appended at or after a time follow. A time after the head is
-- the head; one below the retention horizon is refused (PR003).
CREATE FUNCTION {schema}.position_at(outbox text, at timestamptz) RETURNS text
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    head  text := {schema}.head(outbox);
    place text := {schema}.position_text(CASE WHEN at > 'epoch'
        THEN floor(extract(epoch FROM least(at, '6000-01-01'::timestamptz)) * 1000)::bigint << 16
        ELSE 0 END, 0);
BEGIN
    IF place > head COLLATE "C" THEN
        RETURN head;
    END IF;
    EXECUTE format('SELECT FROM %s.%I($1, $2)', {schema_ident_text}, outbox || '_place')
        USING ({schema}.position_halves(place)).stamp, 0::bigint;
    RETURN place;
END
$body$;

-- The text of a payload, or NULL where it is not UTF-8.
CREATE FUNCTION {schema}.payload_text(payload bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $body$
BEGIN
    RETURN convert_from(payload, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
    RETURN NULL;
END
$body$;

-- Which generation a reader of partitions many reads: the only one, unless their number was raised.
CREATE FUNCTION {schema}.generation_of(outbox text, INOUT partitions integer, OUT number integer)
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    asked  integer := partitions;
    counts text;
BEGIN
    SELECT string_agg(g.partitions::text, ', ' ORDER BY g.number) INTO counts
        FROM {schema}.generation g WHERE g.outbox = generation_of.outbox;
    IF partitions IS NULL AND counts LIKE '%, %' THEN
        RAISE EXCEPTION 'the partitions of "%" were raised (%): say of how many yours is one',
                outbox, counts
            USING ERRCODE = 'PR004',
                HINT = 'Give read_feed the number that was in force when you began, as its last'
                    ' argument; at its end it names the partitions that follow.';
    END IF;
    SELECT g.number, g.partitions INTO number, partitions FROM {schema}.generation g
        WHERE g.outbox = generation_of.outbox
            AND g.partitions = coalesce(generation_of.partitions, g.partitions);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'outbox "%" never had % partitions, only %', outbox, asked, counts
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$body$;

-- The partitions that take over from one: all that its keys can be in after the next raise.
CREATE FUNCTION {schema}.successors(outbox text, partition integer, partitions integer)
RETURNS TABLE (successor integer, successors integer) LANGUAGE sql STABLE AS $body$
    SELECT s, later.partitions
    FROM {schema}.generation AS own
    JOIN {schema}.generation AS later
        ON later.outbox = own.outbox AND later.number = own.number + 1
    CROSS JOIN LATERAL generate_series($2, later.partitions - 1, own.partitions) AS s
    WHERE own.outbox = $1 AND own.partitions = $3
    ORDER BY s
$body$;

-- Records of one partition after a position, oldest first; NULL begins at the oldest that is kept.
-- Reads committed ticks only, writes nothing and takes no lock, so it works on a standby, too.
--
-- A row whose appended_at is NULL is no record: it comes last and moves the position over what
-- other partitions have. Store it like any other. No row at all: at the head now; call tick. A page
-- may be short. When the partition has ended because their number was raised, the call that has
-- nothing more to give fails with PR005 and names the partitions that follow.
CREATE FUNCTION {schema}.read_feed(
    outbox text, partition integer, after text, max integer DEFAULT 100,
    partitions integer DEFAULT NULL
) RETURNS TABLE (
    "position" text, id uuid, key text, topic text, type text, content_type text, headers json,
    payload bytea, appended_at timestamptz
) LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_column
DECLARE
    -- One call reads at most so many records of all partitions, and about so many bytes.
    most_rows  constant integer := 10000;
    most_bytes constant bigint := 8388608;
    g      record;
    r      record;
    origin record;
    -- How far this call has read, and where the tick ends that it reads.
    stamp  bigint;
    seq    bigint;
    opened record;
    first  boolean := true;
    given  integer := 0;
    ended  boolean := false;
    tick   text := format('%s.%I', {schema_ident_text}, outbox || '_tick');
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    g := {schema}.generation_of(outbox, read_feed.partitions);
    IF partition IS NULL OR partition NOT BETWEEN 0 AND g.partitions - 1 THEN
        RAISE EXCEPTION 'outbox "%" has the partitions 0 to %, no %', outbox, g.partitions - 1,
            partition USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF max IS NULL OR max < 1 THEN
        RAISE EXCEPTION 'max is %; at least 1 is needed', max
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    origin := {schema}.position_halves(after);
    stamp := origin.stamp;
    seq := origin.seq;
    EXECUTE format('SELECT generation FROM %s WHERE stamp > $1 ORDER BY stamp LIMIT 1', tick)
        INTO r USING stamp;
    IF r.generation < g.number THEN
        -- All before its own generation belongs to other partitions.
        EXECUTE format('SELECT stamp, seq_hi FROM %s WHERE generation < $1'
            ' ORDER BY stamp DESC LIMIT 1', tick) INTO r USING g.number;
        stamp := r.stamp;
        seq := r.seq_hi;
    END IF;
    FOR r IN EXECUTE format('SELECT * FROM %s.%I($1, $2, $3, $4)', {schema_ident_text},
            outbox || '_read')
        USING stamp, seq, least(max::bigint * g.partitions, most_rows)::integer, most_bytes
    LOOP
        IF r.at_ms IS NULL AND r.generation IS NOT NULL THEN
            -- Opens a tick: the one before is done.
            IF NOT first THEN
                stamp := opened.stamp;
                seq := opened.seq;
            END IF;
            IF r.generation > g.number THEN
                ended := true;
                EXIT;
            END IF;
            opened := r;
            first := false;
            CONTINUE;
        END IF;
        IF (r.stamp, r.seq) > (stamp, seq) THEN
            stamp := r.stamp;
            seq := r.seq;
        END IF;
        CONTINUE WHEN r.at_ms IS NULL OR partition <> CASE
            -- One that has no legal key is nobody's: the first partition has it.
            WHEN r.key IS NULL OR r.key = '' THEN 0
            ELSE {schema}.partition_of(r.key, g.partitions) END;
        given := given + 1;
        "position" := {schema}.position_text(r.stamp, r.seq);
        id := r.id; key := r.key; topic := r.topic; type := r.type; payload := r.payload;
        content_type := r.content_type; appended_at := to_timestamp(r.at_ms / 1000.0);
        headers := NULL;
        IF r.headers IS NOT NULL THEN
            BEGIN
                headers := r.headers::json;
            EXCEPTION WHEN data_exception THEN
                -- Of an adopted table. The record is handed over without them.
                headers := NULL;
            END;
        END IF;
        RETURN NEXT;
        IF given >= max THEN
            RETURN;
        END IF;
        origin.stamp := r.stamp;
        origin.seq := r.seq;
    END LOOP;
    IF (stamp, seq) > (origin.stamp, origin.seq) THEN
        "position" := {schema}.position_text(stamp, seq);
        id := NULL; key := NULL; topic := NULL; type := NULL; payload := NULL; headers := NULL;
        content_type := NULL; appended_at := NULL;
        RETURN NEXT;
    ELSIF ended AND given = 0 THEN
        RAISE EXCEPTION 'partition % of % has ended', partition, g.partitions
            USING ERRCODE = 'PR005', HINT = (
                SELECT format('Go on from position %s in %s of %s.',
                    {schema}.position_text(stamp, seq), string_agg(s.successor::text, ', '),
                    min(s.successors))
                FROM {schema}.successors(outbox, partition, g.partitions) AS s);
    END IF;
END
$body$;

-- Every partition that an outbox has or had, and the positions between which its records lie:
-- NULL where it begins at the oldest, or has not ended. One that was raised again before a tick
-- ends where it begins. Those that no tick belongs to yet are left out.
CREATE FUNCTION {schema}.partitions(outbox text DEFAULT 'outbox')
RETURNS TABLE (partition integer, partitions integer, begins text, ends text)
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    RETURN QUERY EXECUTE format(
        'WITH last AS (SELECT DISTINCT ON (generation) generation,'
        '         %1$s.position_text(stamp, seq_hi) AS place'
        '     FROM %1$s.%2$I ORDER BY generation, stamp DESC),'
        ' spans AS (SELECT g.number, g.partitions,'
        '         (SELECT l.place FROM last AS l WHERE l.generation < g.number'
        '             ORDER BY l.generation DESC LIMIT 1) AS begins,'
        '         (SELECT l.place FROM last AS l WHERE l.generation <= g.number'
        '             ORDER BY l.generation DESC LIMIT 1) AS ends,'
        '         EXISTS (SELECT FROM last AS l WHERE l.generation = g.number) AS begun,'
        '         EXISTS (SELECT FROM last AS l WHERE l.generation > g.number) AS ended'
        '     FROM %1$s.generation AS g WHERE g.outbox = $1)'
        ' SELECT p, s.partitions, s.begins, CASE WHEN s.ended THEN s.ends END'
        ' FROM spans AS s CROSS JOIN generate_series(0, s.partitions - 1) AS p'
        ' WHERE s.begun OR s.ended AND s.ends IS NOT NULL'
        ' ORDER BY s.number, p',
        {schema_ident_text}, outbox || '_tick') USING outbox;
END
$body$;

-- All outboxes, with the number of partitions in force and the newest position.
CREATE FUNCTION {schema}.outboxes()
RETURNS TABLE (outbox text, payload text, partitions integer, head text, created_at timestamptz)
LANGUAGE sql VOLATILE AS $body$
    SELECT f.outbox, f.payload,
        (SELECT g.partitions FROM {schema}.generation g
            WHERE g.outbox = f.outbox ORDER BY g.number DESC LIMIT 1),
        {schema}.head(f.outbox), f.created_at
    FROM {schema}.feed f ORDER BY f.outbox
$body$;

-- Raises the number of partitions to a multiple of the present one, from the next tick on.
CREATE FUNCTION {schema}.raise_partitions(outbox text, partitions integer) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    EXECUTE format('SELECT %s.%I($1)', {schema_ident_text}, outbox || '_raise') USING partitions;
END
$body$;
