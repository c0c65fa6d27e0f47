-- Any table as a feed: its changes become events of an outbox, by key, joined back when read.
--
-- A trigger appends an event for each row that was inserted (updated, deleted) in the same
-- transaction: its topic is the table, its type says what happened, its payload is the row's
-- primary key as a JSON object or, if asked, the row as it was then. With keys only, a replay gives
-- each key's present row; with rows, what was at the time.

CREATE TABLE {schema}.table_feed (
    -- The table itself, whatever it is called by now. A dump writes its name and finds it again.
    source      regclass NOT NULL PRIMARY KEY,
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

-- The feed that a table's trigger appends to: its own, or that of the table that it is a partition
-- of.
CREATE FUNCTION {schema}.feed_of_trigger(fired regclass) RETURNS {schema}.table_feed
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    f {schema}.table_feed%ROWTYPE;
BEGIN
    SELECT * INTO f FROM {schema}.table_feed t WHERE t.source = fired;
    IF NOT FOUND THEN
        SELECT t.* INTO f FROM pg_partition_ancestors(fired) AS a
            JOIN {schema}.table_feed t ON t.source = a.relid;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the feed of % is gone, its trigger is not', fired
            USING ERRCODE = 'PR007',
                HINT = 'Call setup_feed for the table once more, and teardown_feed to end it.';
    END IF;
    RETURN f;
END
$body$;

-- The trigger. For an ordinary table it runs once for each statement, and a bulk load locks the
-- outbox instead of thousands of keys. It runs for each row where a statement that names another
-- table writes rows of this one, which fires no trigger for statements here: in a partitioned
-- table, a partition, and a table that inherits. Runs as its owner: whoever may write the table
-- needs no right on the outbox.
CREATE FUNCTION {schema}.append_changes() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    f    {schema}.table_feed%ROWTYPE := {schema}.feed_of_trigger(TG_RELID::regclass);
    rows jsonb[];
    type text := CASE TG_OP WHEN 'INSERT' THEN 'inserted' WHEN 'UPDATE' THEN 'updated'
        ELSE 'deleted' END;
BEGIN
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

CREATE FUNCTION {schema}.known_table_feed(source regclass) RETURNS {schema}.table_feed
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    f {schema}.table_feed%ROWTYPE;
BEGIN
    SELECT * INTO f FROM {schema}.table_feed t WHERE t.source = known_table_feed.source;
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

-- Forgets the feeds of tables that were dropped: nobody can name them any more.
CREATE FUNCTION {schema}.forget_dropped_feeds() RETURNS void
LANGUAGE sql VOLATILE AS $body$
    DELETE FROM {schema}.table_feed t
        WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = t.source)
$body$;

-- The tables that inherit from this one, at any remove, and have no feed. Partitions don't count.
CREATE FUNCTION {schema}.heirs_without_feed(source regclass) RETURNS SETOF regclass
LANGUAGE sql STABLE AS $body$
    WITH RECURSIVE heir (oid) AS (
        SELECT i.inhrelid FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent
            WHERE i.inhparent = source AND c.relkind = 'r'
        UNION
        SELECT i.inhrelid FROM heir h JOIN pg_inherits i ON i.inhparent = h.oid)
    SELECT h.oid::regclass FROM heir h
    WHERE NOT EXISTS (SELECT FROM {schema}.table_feed t WHERE t.source = h.oid) ORDER BY 1
$body$;

-- Refuses a table whose changes would be in two feeds, or in part in none.
CREATE FUNCTION {schema}.check_relatives(source regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    other regclass;
BEGIN
    SELECT a.relid INTO other FROM pg_partition_ancestors(source) AS a
        JOIN {schema}.table_feed t ON t.source = a.relid WHERE a.relid <> check_relatives.source;
    IF FOUND THEN
        RAISE EXCEPTION '% is a partition of %, whose feed has its changes', source, other
            USING ERRCODE = 'invalid_parameter_value',
                HINT = format('Read that one, or end it first: teardown_feed(%L).', other);
    END IF;
    SELECT p.relid INTO other FROM pg_partition_tree(source) AS p
        JOIN {schema}.table_feed t ON t.source = p.relid WHERE p.relid <> check_relatives.source
        LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% has a partition with a feed of its own, %', source, other
            USING ERRCODE = 'invalid_parameter_value',
                HINT = format('End that one first: teardown_feed(%L).', other);
    END IF;
    SELECT h INTO other FROM {schema}.heirs_without_feed(source) AS h LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% inherits from %: its rows would be in no feed', other, source
            USING ERRCODE = 'invalid_parameter_value',
                HINT = format('A feed has the rows of its own table alone; set one up for those'
                    ' that inherit first: setup_feed(%L).', other);
    END IF;
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
    f      {schema}.table_feed%ROWTYPE;
    kind   "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = setup_feed.source);
    by_row boolean := kind = 'p' OR EXISTS (SELECT FROM pg_inherits i
        WHERE i.inhrelid = setup_feed.source OR i.inhparent = setup_feed.source);
    event  text;
BEGIN
    PERFORM {schema}.known_outbox(outbox);
    IF EXISTS (SELECT FROM {schema}.adopted a WHERE a.outbox = setup_feed.outbox) THEN
        RAISE EXCEPTION 'outbox "%" is a table of the application''s own that was adopted: a'
            ' trigger can append nothing to it', outbox USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Give outbox => a name that `postrider init` has made, such as ''outbox''.';
    END IF;
    IF kind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table', source USING ERRCODE = 'wrong_object_type';
    END IF;
    SELECT array_agg(a.attname::text ORDER BY k.n) INTO f.primary_key
        FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, n)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
        WHERE i.indrelid = setup_feed.source AND i.indisprimary;
    IF f.primary_key IS NULL THEN
        RAISE EXCEPTION '% has no primary key', source
            USING ERRCODE = 'PR007',
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
    PERFORM {schema}.forget_dropped_feeds();
    IF events <> '{}' THEN
        PERFORM {schema}.check_relatives(source);
    END IF;
    f.source := source;
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
        EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s %s EXECUTE FUNCTION %s.append_changes()',
            'postrider_' || event, CASE event WHEN 'inserted' THEN 'INSERT'
                WHEN 'updated' THEN 'UPDATE' ELSE 'DELETE' END, source,
            CASE WHEN by_row THEN 'FOR EACH ROW' ELSE format(
                'REFERENCING %s TABLE AS changed FOR EACH STATEMENT',
                CASE event WHEN 'deleted' THEN 'OLD' ELSE 'NEW' END) END,
            {schema_ident_text});
    END LOOP;
END
$body$;

-- Ends a table's feed. What was appended stays in the outbox.
CREATE FUNCTION {schema}.teardown_feed(source regclass) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    PERFORM {schema}.known_table_feed(source);
    PERFORM {schema}.drop_feed_triggers(source);
    DELETE FROM {schema}.table_feed t WHERE t.source = teardown_feed.source;
    PERFORM {schema}.forget_dropped_feeds();
END
$body$;

-- Which changes of this outbox's tables are lost as things are, in words, with the remedy: of a
-- table that has become a partition or inherits since, or has got heirs, or lost a trigger. Reads
-- the catalogue.
CREATE FUNCTION {schema}.table_feed_warnings(outbox text) RETURNS SETOF text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
    WITH fed AS (
        SELECT t.source, t.events, format('SELECT %s.setup_feed(%L, %L, %L, %L, %L, %L)',
            {schema_ident_text}::text, t.source, t.key_columns, t.outbox, t.events, t.payload,
            t.topic) AS anew
        FROM {schema}.table_feed t JOIN pg_class c ON c.oid = t.source
        WHERE t.outbox = $1 AND t.events <> '{}'
    ), firing AS (
        SELECT g.tgrelid AS source, g.tgname::text AS name, g.tgtype & 1 = 1 AS by_row
        FROM pg_trigger g
        WHERE g.tgfoid = to_regprocedure({schema_ident_text} || '.append_changes()')
            AND g.tgenabled IN ('O', 'A')
    )
    SELECT format('table %s: its trigger postrider_%s is missing or disabled, and such changes are'
        ' lost; enable it, or make it anew: %s', f.source, e, f.anew)
    FROM fed f CROSS JOIN LATERAL unnest(f.events) AS e
    WHERE NOT EXISTS (SELECT FROM firing g WHERE g.source = f.source AND g.name = 'postrider_' || e)
    UNION ALL
    SELECT format('table %s has become %s, and changes that are made through the other table are'
        ' lost: its triggers are for statements; make them anew: %s', f.source,
        CASE WHEN EXISTS (SELECT FROM pg_class c WHERE c.oid = f.source AND c.relispartition)
            THEN 'a partition' ELSE 'part of an inheritance' END, f.anew)
    FROM fed f
    WHERE EXISTS (SELECT FROM firing g WHERE g.source = f.source AND NOT g.by_row)
        AND EXISTS (SELECT FROM pg_inherits i
            WHERE i.inhrelid = f.source OR i.inhparent = f.source)
    UNION ALL
    SELECT format('table %s inherits from %s, and its rows are in no feed: SELECT'
        ' %s.setup_feed(%L)', h, f.source, {schema_ident_text}::text, h)
    FROM fed f CROSS JOIN LATERAL {schema}.heirs_without_feed(f.source) AS h
$body$;

-- The primary key that an event holds, as an object of its columns; NULL for what is no such event.
CREATE FUNCTION {schema}.primary_key_of(payload bytea, primary_key text[]) RETURNS jsonb
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    held jsonb;
BEGIN
    held := convert_from(payload, 'UTF8')::jsonb;
    RETURN CASE jsonb_typeof(held) WHEN 'object' THEN (SELECT jsonb_object_agg(c, held -> c)
        FROM unnest(primary_key) AS c) END;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN NULL;
END
$body$;

-- The same as values of the table's columns; NULL where they do not fit, so that no row is like it.
CREATE FUNCTION {schema}.row_with_key(of anyelement, primary_key jsonb) RETURNS anyelement
LANGUAGE plpgsql STABLE AS $body$
BEGIN
    RETURN jsonb_populate_record(of, primary_key);
EXCEPTION WHEN data_exception OR integrity_constraint_violation THEN
    RETURN NULL;
END
$body$;

-- As read_feed, with each event joined back to its row as it is now: NULL where it is gone. Events
-- of other tables in the same outbox, and what else is appended to it, only move the position: they
-- are not looked into, and under the table's own topic nothing that is found may fail.
CREATE FUNCTION {schema}.read_table_feed(
    source regclass, partition integer, after text, max integer DEFAULT 100,
    partitions integer DEFAULT NULL
) RETURNS TABLE (
    "position" text, type text, key text, primary_key jsonb, "row" jsonb, appended_at timestamptz
) LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    f     {schema}.table_feed%ROWTYPE := {schema}.known_table_feed(source);
    match text;
BEGIN
    SELECT string_agg(format('t.%1$I = (p.k).%1$I', c), ' AND ') INTO match
        FROM unnest(f.primary_key) AS c;
    RETURN QUERY EXECUTE format(
        'SELECT r.position, CASE WHEN p.j IS NOT NULL THEN r.type END,'
        '     CASE WHEN p.j IS NOT NULL THEN r.key END, p.j, to_jsonb(t),'
        '     CASE WHEN p.j IS NOT NULL THEN r.appended_at END'
        ' FROM %1$s.read_feed($1, $2, $3, $4, $5) AS r'
        ' CROSS JOIN LATERAL (SELECT o.j, CASE WHEN o.j IS NOT NULL THEN'
        '         %1$s.row_with_key(NULL::%2$s, o.j) END AS k'
        '     FROM (SELECT CASE WHEN r.topic = $6 AND r.content_type = ''application/json'''
        '         THEN %1$s.primary_key_of(r.payload, $7) END AS j OFFSET 0) AS o) AS p'
        ' LEFT JOIN %2$s AS t ON %3$s ORDER BY r.position COLLATE "C"',
        {schema_ident_text}, f.source, match)
        USING f.outbox, partition, after, max, partitions, f.topic, f.primary_key;
END
$body$;
