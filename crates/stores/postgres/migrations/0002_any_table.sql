-- Any table as a feed: its changes become events of an outbox, by key, joined back when read.
--
-- A trigger appends an event for each row that was inserted (updated, deleted) in the same
-- transaction: its topic is the table, its type says what happened, its payload is the row's
-- primary key as a JSON object or, if asked, the row as it was then. With keys only, a replay gives
-- each key's present row; with rows, what was at the time.

CREATE TABLE {schema}.table_feed (
    -- Quoted and with its schema.
    source      text   NOT NULL PRIMARY KEY COLLATE "C",
    outbox      text   NOT NULL COLLATE "C" REFERENCES {schema}.feed,
    topic       text   NOT NULL COLLATE "C",
    -- The columns whose values are the event's key.
    key_columns text[] NOT NULL,
    primary_key text[] NOT NULL,
    events      text[] NOT NULL,
    payload     text   NOT NULL CHECK (payload IN ('key', 'row'))
);

-- Appends an event for each of these rows, in their order, with the locks of their keys.
CREATE FUNCTION {schema}.append_rows(f {schema}.table_feed, type text, rows jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    keys     text[];
    payloads bytea[];
BEGIN
    SELECT array_agg(CASE cardinality(f.key_columns) WHEN 1 THEN r ->> f.key_columns[1]
            ELSE (SELECT json_agg(r ->> c ORDER BY n)::text
                FROM unnest(f.key_columns) WITH ORDINALITY AS k (c, n)) END ORDER BY i),
        array_agg(convert_to(CASE f.payload WHEN 'row' THEN r::text
            ELSE (SELECT json_object_agg(c, r -> c ORDER BY n)::text
                FROM unnest(f.primary_key) WITH ORDINALITY AS k (c, n)) END, 'UTF8') ORDER BY i)
        INTO keys, payloads FROM unnest(rows) WITH ORDINALITY AS u (r, i);
    IF array_position(keys, NULL) IS NOT NULL OR array_position(keys, '') IS NOT NULL THEN
        RAISE EXCEPTION '%: a row has no value in %, which is its event''s key', f.source,
            array_to_string(f.key_columns, ', ') USING ERRCODE = 'not_null_violation',
            HINT = 'Choose other key columns by setup_feed, or declare them NOT NULL.';
    END IF;
    EXECUTE format('SELECT %s.%I(NULL, NULL, $1, array_fill($2, ARRAY[cardinality($1)]),'
        ' array_fill($3, ARRAY[cardinality($1)]), array_fill($4, ARRAY[cardinality($1)]), NULL,'
        ' $5)', {schema_ident_text}, f.outbox || '_append_all')
        USING keys, f.topic, type, 'application/json'::text, payloads;
END
$body$;

-- Refuses a table with a type that somebody else's function makes JSON: the trigger would run it as
-- its owner. Looks at the types that the columns are made of only where there is such a function.
CREATE FUNCTION {schema}.check_casts(source regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    casts oid[] := ARRAY(SELECT c.castsource FROM pg_cast AS c
        JOIN pg_proc AS f ON f.oid = c.castfunc JOIN pg_roles AS r ON r.oid = f.proowner
        WHERE c.casttarget = 'json'::regtype AND NOT r.rolsuper AND r.rolname <> current_user);
    alien oid;
BEGIN
    IF casts = '{}' THEN
        RETURN;
    END IF;
    WITH RECURSIVE types (type) AS (
        SELECT a.atttypid FROM pg_attribute AS a
        WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped
        UNION
        SELECT p.part FROM types AS t JOIN pg_type AS y ON y.oid = t.type
        CROSS JOIN LATERAL (SELECT y.typbasetype UNION ALL SELECT y.typelem UNION ALL
            SELECT a.atttypid FROM pg_attribute AS a
            WHERE a.attrelid = y.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS p (part)
        WHERE p.part <> 0)
    SELECT t.type INTO alien FROM types AS t WHERE t.type = ANY (casts) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '%: its type % has a cast to json by a function of another role than that'
            ' of the feed, which would run with the feed''s rights', source, alien::regtype
            USING ERRCODE = 'insufficient_privilege',
                HINT = 'Drop the cast, or have a superuser own its function.';
    END IF;
END
$body$;

-- The trigger. For an ordinary table it runs once for each statement, and a bulk load locks the
-- outbox instead of thousands of keys; for a partitioned one it runs for each row, so that it holds
-- for partitions that are written directly or attached later. Runs as its owner: whoever may write
-- the table needs no right on the outbox.
CREATE FUNCTION {schema}.append_changes() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    f    {schema}.table_feed%ROWTYPE;
    rows jsonb[];
    type text := CASE TG_OP WHEN 'INSERT' THEN 'inserted' WHEN 'UPDATE' THEN 'updated'
        ELSE 'deleted' END;
BEGIN
    SELECT * INTO f FROM {schema}.table_feed t WHERE t.source = TG_ARGV[0];
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the feed of % is gone, its trigger is not', TG_ARGV[0]
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Call teardown_feed for the table, or setup_feed once more.';
    END IF;
    PERFORM {schema}.check_casts(TG_RELID::regclass);
    IF TG_LEVEL = 'ROW' THEN
        PERFORM {schema}.append_rows(f, type,
            ARRAY[CASE TG_OP WHEN 'DELETE' THEN to_jsonb(OLD) ELSE to_jsonb(NEW) END]);
        RETURN NULL;
    END IF;
    FOR rows IN
        SELECT array_agg(n.r ORDER BY n.i) FROM (
            SELECT to_jsonb(c) AS r, row_number() OVER () AS i FROM changed AS c) AS n
        GROUP BY (n.i - 1) / 10000 ORDER BY min(n.i)
    LOOP
        PERFORM {schema}.append_rows(f, type, rows);
    END LOOP;
    RETURN NULL;
END
$body$;

-- For a table whose feed has no trigger: says what happened to a row (as to_jsonb(row) has it, or
-- only its primary key and key columns), in the same transaction.
CREATE FUNCTION {schema}.append_change(source regclass, type text, changed jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM {schema}.append_rows({schema}.known_table_feed(source), type, ARRAY[changed]);
END
$body$;

CREATE FUNCTION {schema}.qualified_name(source regclass) RETURNS text
LANGUAGE sql STABLE AS $body$
    SELECT format('%I.%I', n.nspname, c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = source
$body$;

CREATE FUNCTION {schema}.known_table_feed(source regclass) RETURNS {schema}.table_feed
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    f {schema}.table_feed%ROWTYPE;
BEGIN
    SELECT * INTO f FROM {schema}.table_feed t
        WHERE t.source = {schema}.qualified_name(known_table_feed.source);
    IF NOT FOUND THEN
        RAISE EXCEPTION '% has no feed', source
            USING ERRCODE = 'undefined_object', HINT = 'setup_feed makes one.';
    END IF;
    RETURN f;
END
$body$;

CREATE FUNCTION {schema}.drop_feed_triggers(source regclass) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['inserted', 'updated', 'deleted'] LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS %I ON %s', 'postrider_' || name, source);
    END LOOP;
END
$body$;

-- Makes a table a feed in an outbox that exists, or changes how; a second call with the same
-- arguments changes nothing.
--
-- key_columns: whose values, in order, are the event's key; by default the primary key. events: any
-- of inserted, updated, deleted; none means that the application calls append_change itself.
-- payload: 'key' or 'row'. Takes the lock of CREATE TRIGGER, which writers of the table wait for.
CREATE FUNCTION {schema}.setup_feed(
    source regclass, key_columns text[] DEFAULT NULL, outbox text DEFAULT 'outbox',
    events text[] DEFAULT '{inserted}', payload text DEFAULT 'key', topic text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    f     {schema}.table_feed%ROWTYPE;
    kind  "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = setup_feed.source);
    event text;
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    IF kind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table', source USING ERRCODE = 'wrong_object_type';
    END IF;
    SELECT array_agg(a.attname::text ORDER BY k.n) INTO f.primary_key
        FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, n)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
        WHERE i.indrelid = setup_feed.source AND i.indisprimary;
    IF f.primary_key IS NULL THEN
        RAISE EXCEPTION '% has no primary key', source
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'An event names its row by the primary key; ALTER TABLE … ADD PRIMARY KEY.';
    END IF;
    f.key_columns := coalesce(key_columns, f.primary_key);
    IF f.key_columns = '{}' OR EXISTS (SELECT FROM unnest(f.key_columns) AS k (name)
        WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = setup_feed.source
            AND a.attname = k.name AND a.attnum > 0 AND NOT a.attisdropped))
    THEN
        RAISE EXCEPTION 'key_columns % are not columns of %', f.key_columns, source
            USING ERRCODE = 'undefined_column';
    END IF;
    IF NOT events <@ '{inserted,updated,deleted}' OR payload NOT IN ('key', 'row') THEN
        RAISE EXCEPTION 'events are of inserted, updated, deleted; payload is key or row'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    f.source := {schema}.qualified_name(source);
    f.outbox := outbox;
    f.events := events;
    f.payload := payload;
    SELECT coalesce(setup_feed.topic, n.nspname || '.' || c.relname) INTO STRICT f.topic
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = setup_feed.source;
    PERFORM {schema}.drop_feed_triggers(source);
    DELETE FROM {schema}.table_feed t WHERE t.source = f.source;
    INSERT INTO {schema}.table_feed VALUES (f.source, f.outbox, f.topic, f.key_columns,
        f.primary_key, f.events, f.payload);
    FOREACH event IN ARRAY events LOOP
        EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s %s EXECUTE FUNCTION %s.append_changes(%L)',
            'postrider_' || event, CASE event WHEN 'inserted' THEN 'INSERT'
                WHEN 'updated' THEN 'UPDATE' ELSE 'DELETE' END, source,
            CASE WHEN kind = 'p' THEN 'FOR EACH ROW' ELSE format(
                'REFERENCING %s TABLE AS changed FOR EACH STATEMENT',
                CASE event WHEN 'deleted' THEN 'OLD' ELSE 'NEW' END) END,
            {schema_ident_text}, f.source);
    END LOOP;
END
$body$;

-- Ends a table's feed. What was appended stays in the outbox.
CREATE FUNCTION {schema}.teardown_feed(source regclass) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    PERFORM {schema}.known_table_feed(source);
    PERFORM {schema}.drop_feed_triggers(source);
    DELETE FROM {schema}.table_feed t
        WHERE t.source = {schema}.qualified_name(teardown_feed.source);
END
$body$;

-- As read_feed, with each event joined back to its row as it is now: NULL where it is gone. Events
-- of other tables in the same outbox only move the position.
CREATE FUNCTION {schema}.read_table_feed(
    source regclass, partition integer, after text, max integer DEFAULT 100,
    partitions integer DEFAULT NULL
) RETURNS TABLE (
    "position" text, type text, key text, primary_key jsonb, "row" jsonb, appended_at timestamptz
) LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    f     {schema}.table_feed%ROWTYPE := {schema}.known_table_feed(source);
    match text;
    names text;
BEGIN
    SELECT string_agg(format('t.%1$I = (p.k).%1$I', c), ' AND '),
        string_agg(format('%L, p.j -> %1$L', c), ', ')
        INTO match, names FROM unnest(f.primary_key) AS c;
    RETURN QUERY EXECUTE format(
        'SELECT r.position, p.type, p.key, CASE WHEN p.j IS NOT NULL THEN'
        '     jsonb_build_object(%3$s) END, to_jsonb(t), p.appended_at'
        ' FROM %1$s.read_feed($1, $2, $3, $4, $5) AS r'
        ' LEFT JOIN LATERAL (SELECT r.type, r.key, r.appended_at, j, '
        '         jsonb_populate_record(NULL::%2$s, j) AS k'
        '     FROM CAST(convert_from(r.payload, ''UTF8'') AS jsonb) AS j'
        '     WHERE r.topic = $6 AND r.content_type = ''application/json'') AS p ON true'
        ' LEFT JOIN %2$s AS t ON %4$s ORDER BY r.position COLLATE "C"',
        {schema_ident_text}, f.source, names, match)
        USING f.outbox, partition, after, max, partitions, f.topic;
END
$body$;
