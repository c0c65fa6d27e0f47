-- Adopting an existing table as an outbox: a table of Debezium's event router (id, aggregatetype,
-- aggregateid, type, payload), or any other by a mapping of its columns.
--
-- A view named after the outbox shows the table's rows as an outbox's, and the functions of an
-- ordinary outbox are made for it from the same texts. Nothing is added to the table unasked.

CREATE TABLE {schema}.adopted (
    outbox   text  NOT NULL PRIMARY KEY COLLATE "C" REFERENCES {schema}.feed ON DELETE CASCADE,
    -- The table and the sequence of its numbers, quoted and with their schemas.
    source   text  NOT NULL,
    sequence text  NOT NULL,
    -- The number's column, quoted.
    number   text  NOT NULL,
    -- Whether it has columns for transaction ids and numbers that adopt_table added.
    columns  boolean NOT NULL,
    mapping  jsonb NOT NULL,
    -- The mappings of before, newest first: the log still has rows from when they fitted.
    earlier  jsonb NOT NULL
);

-- What an ordinary outbox is made from, with its placeholders.
CREATE FUNCTION {schema}.outbox_template(part text) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE part WHEN 'ticks' THEN {ticks_template_text}
    WHEN 'functions' THEN {functions_template_text}
    WHEN 'ripe' THEN {ripe_template_text}
    WHEN 'passed' THEN {passed_template_text}
    WHEN 'retention' THEN {adopted_retention_template_text} END;

-- The number under which an outbox takes advisory locks: FNV-1a of its name, as the library does.
CREATE FUNCTION {schema}.lock_class(outbox text) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE STRICT AS $body$
DECLARE
    name bytea := convert_to('postrider', 'UTF8') || '\x00' || convert_to({schema_text}, 'UTF8')
        || '\x00' || convert_to(outbox, 'UTF8');
    hash bigint := 2166136261;
BEGIN
    FOR i IN 0..length(name) - 1 LOOP
        hash := ((hash # get_byte(name, i)) * 16777619) & 4294967295;
    END LOOP;
    RETURN CASE WHEN hash > 2147483647 THEN hash - 4294967296 ELSE hash END;
END
$body$;

-- Fills a template's placeholders for an adopted table.
CREATE FUNCTION {schema}.fill_template(template text, a {schema}.adopted) RETURNS text
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    base bigint := {schema}.lock_class(a.outbox) << 32;
    name text;
BEGIN
    template := replace(template, 'CREATE FUNCTION', 'CREATE OR REPLACE FUNCTION');
    -- The table may have no column for the time, or NULL in it: then its tick's time stands in.
    template := replace(template, 'l.created_at',
        'coalesce(l.created_at, to_timestamp((t.stamp >> 16) / 1000.0))');
    FOR name IN SELECT DISTINCT m[1] FROM regexp_matches(template, '\{([a-z_]+)\}', 'g') AS m LOOP
        template := replace(template, '{' || name || '}', CASE
            WHEN name = 'schema' THEN quote_ident({schema_text})
            WHEN name = 'outbox_text' THEN quote_literal(a.outbox)
            WHEN name = 'outbox_seq_text' THEN quote_literal(a.sequence)
            WHEN name = 'payload_out' THEN 'l.payload'
            WHEN name = 'record_bytes' THEN '{record_bytes}'
            WHEN name = 'tick_lock' THEN (base | 2)::text
            WHEN name = 'retention_lock' THEN (base | 3)::text
            WHEN name = 'source' THEN a.source
            WHEN name = 'number' THEN a.number
            WHEN name = 'deletes' THEN coalesce((a.mapping->'delete')::boolean, false)::text
            WHEN name = 'passed_rows' THEN CASE WHEN a.columns
                THEN 'l.seq <= h.floor OR pg_visible_in_snapshot(l.xid, h.snap)' ELSE 'true' END
            ELSE quote_ident(a.outbox || substr(name, length('outbox') + 1)) END);
    END LOOP;
    RETURN template;
END
$body$;

-- The SQL of one field of an event, and its type, from the mapping: a column's name, or an object
-- {"value": "a constant"}. Without an entry, the first of `usual` that is a column; else NULL.
CREATE FUNCTION {schema}.mapped_field(
    source regclass, mapping jsonb, field text, usual text[], OUT expression text, OUT type oid
) LANGUAGE plpgsql STABLE AS $body$
DECLARE
    wanted jsonb := mapping->field;
    name   text := wanted #>> '{}';
BEGIN
    IF jsonb_typeof(wanted) = 'object' AND jsonb_typeof(wanted->'value') = 'string' THEN
        expression := quote_literal(wanted->>'value') || '::text';
        type := 'text'::regtype;
        RETURN;
    END IF;
    IF wanted IS NULL THEN
        SELECT u INTO name FROM unnest(usual) WITH ORDINALITY AS u (u, n)
            JOIN pg_attribute a ON a.attrelid = source AND a.attname = u AND a.attnum > 0
                AND NOT a.attisdropped ORDER BY n LIMIT 1;
        IF name IS NULL THEN
            RETURN;
        END IF;
    END IF;
    SELECT 'o.' || quote_ident(a.attname), a.atttypid INTO expression, type FROM pg_attribute a
        WHERE a.attrelid = source AND a.attname = name AND a.attnum > 0 AND NOT a.attisdropped;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'mapping: "%" is "%", which is no column of %', field, name, source
            USING ERRCODE = 'undefined_column', HINT = 'Its columns: ' || (
                SELECT string_agg(a.attname, ', ' ORDER BY a.attnum) FROM pg_attribute a
                WHERE a.attrelid = source AND a.attnum > 0 AND NOT a.attisdropped);
    END IF;
END
$body$;

-- The view's columns. What can't be read must not fail here: it becomes NULL or stays as it is, and
-- the reader parks it.
CREATE FUNCTION {schema}.mapped_columns(a {schema}.adopted) RETURNS text
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    source   regclass := a.source::regclass;
    identity text := (SELECT f.identity FROM {schema}.feed f WHERE f.outbox = a.outbox);
    f        record;
    id       text;
    at       text;
    payload  text;
    headers  text := 'NULL::text';
    texts    text := '';
    field    text;
BEGIN
    FOREACH field IN ARRAY ARRAY['id', 'key', 'topic', 'type', 'payload'] LOOP
        f := {schema}.mapped_field(source, a.mapping, field, CASE field
            WHEN 'key' THEN ARRAY['aggregateid', 'aggregate_id', 'key']
            WHEN 'topic' THEN ARRAY['aggregatetype', 'aggregate_type', 'topic']
            ELSE ARRAY[field] END);
        IF f.expression IS NULL THEN
            RAISE EXCEPTION 'mapping: no column for "%" is known in %', field, source
                USING ERRCODE = 'undefined_column', HINT = format('Give {"%s": "a_column"}, or'
                    ' {"%s": {"value": "a constant"}}.', field, field);
        END IF;
        IF field = 'id' THEN
            id := CASE WHEN f.type = 'uuid'::regtype THEN f.expression
                -- Numbers are unique in this table only; as a UUID, everywhere.
                WHEN f.type IN ('smallint'::regtype, 'integer'::regtype, 'bigint'::regtype)
                    THEN format('md5(%L || %s::text)::uuid', identity || '/', f.expression)
                ELSE format('CASE WHEN %1$s::text ~* %2$L THEN (%1$s::text)::uuid END',
                    f.expression, '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$') END;
        ELSIF field = 'payload' THEN
            payload := CASE WHEN f.type = 'bytea'::regtype THEN f.expression
                ELSE format('convert_to(%s::text, %L)', f.expression, 'UTF8') END;
            texts := texts || format(', coalesce(%s, %L) COLLATE "C" AS content_type',
                coalesce(({schema}.mapped_field(source, a.mapping, 'content_type',
                    ARRAY['content_type'])).expression || '::text', 'NULL::text'),
                CASE WHEN f.type = 'bytea'::regtype THEN 'application/octet-stream'
                    WHEN f.type IN ('json'::regtype, 'jsonb'::regtype) THEN 'application/json'
                    ELSE 'text/plain; charset=utf-8' END);
        ELSE
            texts := texts || format(', %s::text COLLATE "C" AS %I', f.expression, field);
        END IF;
    END LOOP;
    f := {schema}.mapped_field(source, a.mapping, 'created_at', ARRAY['created_at']);
    -- Infinity, BC and what lies beyond the year 9999 stand for no time, and would not fit in an
    -- event either. The bounds are those of what reads the log.
    at := CASE WHEN f.expression IS NULL THEN 'NULL::timestamptz'
        WHEN f.type = 'timestamptz'::regtype
            THEN format('CASE WHEN %1$s >= %2$L AND %1$s < %3$L THEN %1$s END', f.expression,
                '0001-01-01 00:00:00+00', '9999-12-30 22:00:01+00')
        WHEN f.type = 'timestamp'::regtype
            THEN format('CASE WHEN %1$s >= %3$L AND %1$s < %4$L THEN %1$s AT TIME ZONE %2$L END',
                f.expression, 'UTC', '0001-01-01 00:00:00', '9999-12-30 22:00:01')
        WHEN f.type = 'bigint'::regtype
            THEN format('CASE WHEN %1$s BETWEEN 0 AND 100000000000000'
                ' THEN to_timestamp(%1$s / 1000.0) END', f.expression) END;
    IF at IS NULL THEN
        RAISE EXCEPTION 'mapping: "created_at" is of type %', f.type::regtype
            USING ERRCODE = 'datatype_mismatch',
                HINT = 'It needs a timestamp, or milliseconds since 1970 as bigint.';
    END IF;
    IF jsonb_typeof(a.mapping #> '{headers,columns}') = 'object' THEN
        SELECT format('nullif(json_strip_nulls(json_build_object(%s))::text, %L)', string_agg(
                format('%L, %s::text', h.key, ({schema}.mapped_field(source,
                    jsonb_build_object('headers', h.value), 'headers', '{}')).expression), ', '),
                '{}')
            INTO headers FROM jsonb_each(a.mapping #> '{headers,columns}') AS h;
    ELSE
        f := {schema}.mapped_field(source, a.mapping, 'headers', ARRAY['headers']);
        headers := CASE WHEN f.expression IS NULL THEN headers
            -- A text that can't be unescaped stays as it is.
            WHEN f.type IN ('json'::regtype, 'jsonb'::regtype) THEN format(
                'CASE WHEN %3$s_typeof(%1$s) <> %2$L THEN NULL WHEN %1$s::text ~* %4$L'
                ' THEN %1$s::text ELSE (SELECT json_object_agg(h.key, h.value)::text'
                ' FROM %3$s_each_text(%1$s) AS h) END', f.expression, 'object', f.type::regtype,
                '\\u(0000|d[89a-f])')
            ELSE format('nullif(%s::text, %L)', f.expression, '') END;
    END IF;
    RETURN format('%s AS xid, o.%s::bigint AS seq, %s AS created_at, %s AS id%s, %s AS headers,'
        ' %s AS payload', CASE WHEN a.columns THEN 'o.postrider_xid' ELSE 'NULL::xid8' END,
        a.number, at, id, texts, headers, payload);
END
$body$;

-- The sequence from which a column's numbers are drawn; NULL where there is none, or no such
-- column.
CREATE FUNCTION {schema}.sequence_of(source regclass, number name) RETURNS regclass
LANGUAGE sql STABLE AS $body$
    SELECT coalesce((SELECT pg_get_serial_sequence(source::text, number)::regclass
        FROM pg_attribute a WHERE a.attrelid = source AND a.attname = number), (
        SELECT d.refobjid::regclass FROM pg_attribute a
        JOIN pg_attrdef e ON e.adrelid = a.attrelid AND e.adnum = a.attnum
        JOIN pg_depend d ON d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid
        JOIN pg_class c ON c.oid = d.refobjid AND c.relkind = 'S'
        WHERE d.refclassid = 'pg_class'::regclass AND a.attrelid = source AND a.attname = number
        LIMIT 1))
$body$;

-- Adds the two columns, in this order, because defaults are evaluated in the order of columns: a
-- row's transaction id is drawn before its number. Rows that are there are numbered by their time,
-- else as they lie. Locks the table to the end of the transaction.
CREATE FUNCTION {schema}.add_feed_columns(source regclass, created_at text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    fired record;
    last  bigint;
BEGIN
    EXECUTE format('ALTER TABLE %s ADD COLUMN postrider_xid xid8, ADD COLUMN postrider_seq bigint',
        source);
    EXECUTE format('ALTER TABLE %s ALTER COLUMN postrider_xid SET DEFAULT pg_current_xact_id()',
        source);
    -- The application's triggers have nothing to do with this.
    CREATE TEMP TABLE postrider_fired ON COMMIT DROP AS
        SELECT t.tgname, t.tgenabled FROM pg_trigger t
        WHERE t.tgrelid = source AND NOT t.tgisinternal AND t.tgenabled <> 'D';
    FOR fired IN SELECT * FROM pg_temp.postrider_fired LOOP
        EXECUTE format('ALTER TABLE %s DISABLE TRIGGER %I', source, fired.tgname);
    END LOOP;
    EXECUTE format('UPDATE %1$s AS o SET postrider_xid = pg_current_xact_id(), postrider_seq = n.n'
        ' FROM (SELECT r.ctid, row_number() OVER (ORDER BY %2$s r.ctid) AS n FROM %1$s AS r) AS n'
        ' WHERE o.ctid = n.ctid', source,
        CASE WHEN created_at IS NULL THEN '' ELSE 'r.' || created_at || ',' END);
    GET DIAGNOSTICS last = ROW_COUNT;
    FOR fired IN SELECT * FROM pg_temp.postrider_fired LOOP
        EXECUTE format('ALTER TABLE %s ENABLE %s TRIGGER %I', source, CASE fired.tgenabled
            WHEN 'A' THEN 'ALWAYS' WHEN 'R' THEN 'REPLICA' ELSE '' END, fired.tgname);
    END LOOP;
    DROP TABLE pg_temp.postrider_fired;
    EXECUTE format('ALTER TABLE %s ALTER COLUMN postrider_xid SET NOT NULL,'
        ' ALTER COLUMN postrider_seq SET NOT NULL,'
        ' ALTER COLUMN postrider_seq ADD GENERATED ALWAYS AS IDENTITY (CACHE 1)', source);
    IF last > 0 THEN
        PERFORM setval({schema}.sequence_of(source, 'postrider_seq'), last, true);
    END IF;
    EXECUTE format('CREATE UNIQUE INDEX ON %s (postrider_seq)', source);
    EXECUTE format('CREATE INDEX ON %s (postrider_xid, postrider_seq)', source);
END
$body$;

-- Why a table can't be adopted.
CREATE FUNCTION {schema}.check_adoptable(source regclass, columns boolean) RETURNS void
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    kind "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = source);
BEGIN
    IF kind <> 'r' AND NOT (kind = 'p' AND NOT columns) THEN
        RAISE EXCEPTION '% is no table that can be adopted', source
            USING ERRCODE = 'wrong_object_type', HINT = CASE kind WHEN 'p' THEN 'Columns are not'
                ' added to a partitioned table; name its sequence-drawn number instead.'
                ELSE 'Give an ordinary table.' END;
    END IF;
END
$body$;

-- Why the numbers of a sequence can't carry a feed.
CREATE FUNCTION {schema}.check_sequence(source text, number text, sequence regclass) RETURNS void
LANGUAGE plpgsql STABLE AS $body$
DECLARE
    s pg_sequence%ROWTYPE;
BEGIN
    IF sequence IS NULL THEN
        RAISE EXCEPTION '%.% is not drawn from a sequence', source, number
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give add_columns => true, which adds'
                ' postrider_xid and postrider_seq; or, which is weaker, {"number": "a_column"}'
                ' whose default draws from a sequence.';
    END IF;
    SELECT * INTO STRICT s FROM pg_sequence q WHERE q.seqrelid = sequence;
    IF s.seqcache <> 1 OR s.seqincrement <> 1 OR s.seqcycle THEN
        RAISE EXCEPTION '% has CACHE % INCREMENT %: numbers would be drawn ahead of their'
            ' transactions, and events would be lost', sequence, s.seqcache, s.seqincrement
            USING ERRCODE = 'invalid_parameter_value',
                HINT = format('ALTER SEQUENCE %s CACHE 1 INCREMENT 1 NO CYCLE', sequence);
    END IF;
END
$body$;

-- The first ticks: nothing, and then all that was there, so that it is read once. Every row there
-- is settled, because the table is locked; those to come have larger numbers.
CREATE FUNCTION {schema}.first_ticks(a {schema}.adopted) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    EXECUTE {schema}.fill_template({schema}.outbox_template('ticks'), a);
    IF a.columns AND pg_sequence_last_value(a.sequence::regclass) > 0 THEN
        EXECUTE format('INSERT INTO %1$s.%2$I (stamp, seq_lo, seq_hi, floor, system, timeline,'
            ' generation, anchor, snap) SELECT stamp + 1, $1, $1, $1, system, timeline, generation,'
            ' true, pg_current_snapshot() FROM %1$s.%2$I', {schema_ident_text},
            a.outbox || '_tick') USING pg_sequence_last_value(a.sequence::regclass);
    END IF;
END
$body$;

-- Refuses what would be passed over: a field that is written wrongly, most of all.
CREATE FUNCTION {schema}.check_mapping(mapping jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
    fields  text[] := ARRAY['id', 'key', 'topic', 'type', 'payload', 'created_at', 'content_type',
        'headers', 'number', 'delete'];
    unknown text;
BEGIN
    IF jsonb_typeof(mapping) <> 'object' THEN
        RAISE EXCEPTION 'mapping: a JSON object is needed'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give {"key": "a_column"}.';
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(mapping) AS k
        WHERE k <> ALL (fields) ORDER BY k LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'mapping: there is no field "%"', left(unknown, 64)
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'The fields: ' || array_to_string(fields, ', ');
    END IF;
END
$body$;

-- Makes a table an outbox, which is then followed like any other, by read_feed and by the relay;
-- returns its name, by default the table's. A second call takes a changed mapping and renews the
-- functions. mapping: see mapped_field, with the fields id, key, topic, type, payload, created_at,
-- content_type, headers, number, and "delete": true, which lets retention delete rows.
--
-- add_columns: adds postrider_xid and postrider_seq with an index each, after which all of an
-- outbox's guarantees hold but the order per key, which needs writers that lock the key. Without it
-- the mapping's "number" must be drawn from a sequence, and less holds: see adopted_warnings.
CREATE FUNCTION {schema}.adopt_table(
    source regclass, mapping jsonb DEFAULT '{}', add_columns boolean DEFAULT false,
    outbox text DEFAULT NULL, partitions integer DEFAULT 8
) RETURNS text LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    a     {schema}.adopted%ROWTYPE;
    known {schema}.adopted%ROWTYPE;
    name  name;
    at    text;
    -- The routines that are here before, others' among them.
    there oid[] := ARRAY(SELECT p.oid FROM pg_proc p
        WHERE p.pronamespace = to_regnamespace({schema_ident_text}));
BEGIN
    SELECT format('%I.%I', n.nspname, c.relname), coalesce(adopt_table.outbox, c.relname)
        INTO STRICT a.source, a.outbox
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = adopt_table.source;
    IF octet_length(a.outbox) NOT BETWEEN 1 AND 48 OR partitions NOT BETWEEN 1 AND 1024 THEN
        RAISE EXCEPTION 'an outbox''s name has 1 to 48 bytes, and it has 1 to 1024 partitions'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give outbox => ''a_name''.';
    END IF;
    SELECT * INTO known FROM {schema}.adopted k WHERE k.outbox = a.outbox;
    IF known.source <> a.source OR known.columns <> add_columns OR known.source IS NULL
        AND EXISTS (SELECT FROM {schema}.feed f WHERE f.outbox = a.outbox)
    THEN
        RAISE EXCEPTION 'outbox "%" exists already and is another one', a.outbox
            USING ERRCODE = 'duplicate_object',
                HINT = CASE WHEN known.source IS NULL
                    THEN 'It is one of Postrider''s own tables. Give outbox => ''another_name'','
                        ' and that name to the relay.'
                    ELSE 'Give outbox => ''another_name'', or call release_table first.' END;
    END IF;
    IF known.source IS NULL AND EXISTS (SELECT FROM pg_class c WHERE c.relname = a.outbox
        AND c.relnamespace = to_regnamespace({schema_ident_text}))
    THEN
        -- Most of all the table itself, in a schema that is shared.
        RAISE EXCEPTION '%.% is there already, and an outbox needs a view of its name',
            {schema_text}, a.outbox USING ERRCODE = 'duplicate_object',
                HINT = 'Give outbox => ''another_name'', and that name to the relay.';
    END IF;
    PERFORM {schema}.check_adoptable(source, add_columns);
    a.mapping := coalesce(mapping, '{}');
    PERFORM {schema}.check_mapping(a.mapping);
    a.columns := add_columns;
    name := CASE WHEN add_columns THEN 'postrider_seq' ELSE coalesce(mapping->>'number', 'id') END;
    IF known.source IS NULL THEN
        INSERT INTO {schema}.feed AS f (outbox, payload) VALUES (a.outbox, 'bytea');
        INSERT INTO {schema}.generation AS g (outbox, number, partitions, after_stamp)
            VALUES (a.outbox, 0, adopt_table.partitions, 0);
        IF add_columns THEN
            -- No writer is open once this is held: what is there is settled.
            EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', a.source);
            IF {schema}.sequence_of(source, name) IS NULL THEN
                at := ({schema}.mapped_field(source, a.mapping, 'created_at',
                    ARRAY['created_at'])).expression;
                PERFORM {schema}.add_feed_columns(source, substring(at FROM '^o\.(.*)'));
            END IF;
        END IF;
    END IF;
    a.number := quote_ident(name);
    PERFORM {schema}.check_sequence(a.source, name, {schema}.sequence_of(source, name));
    SELECT format('%I.%I', n.nspname, c.relname) INTO STRICT a.sequence
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = {schema}.sequence_of(source, name);
    a.earlier := CASE WHEN known.source IS NULL THEN '[]' WHEN known.mapping = a.mapping
        THEN known.earlier ELSE jsonb_path_query_array(jsonb_build_array(known.mapping)
            || known.earlier, '$[0 to 15]') END;
    INSERT INTO {schema}.adopted AS k VALUES (a.*)
        ON CONFLICT ON CONSTRAINT adopted_pkey DO UPDATE SET source = excluded.source,
            sequence = excluded.sequence, number = excluded.number, mapping = excluded.mapping,
            earlier = excluded.earlier;
    EXECUTE format('CREATE OR REPLACE VIEW %s.%I AS SELECT %s FROM %s AS o', {schema_ident_text},
        a.outbox, {schema}.mapped_columns(a), a.source);
    IF known.source IS NULL THEN
        PERFORM {schema}.first_ticks(a);
    END IF;
    EXECUTE {schema}.fill_template({schema}.outbox_template('functions'), a);
    EXECUTE {schema}.fill_template({schema}.outbox_template('passed'), a);
    EXECUTE {schema}.fill_template({schema}.outbox_template('retention'), a);
    IF NOT a.columns THEN
        EXECUTE {schema}.fill_template({schema}.outbox_template('ripe'), a);
    END IF;
    PERFORM {schema}.note_routines(there);
    PERFORM {schema}.apply_grants();
    RETURN a.outbox;
END
$body$;

-- Ends the adoption: the feed, its ticks and its consumers' checkpoints. The table stays as it is,
-- with the columns that were added. Refused while there are dead letters.
CREATE FUNCTION {schema}.release_table(outbox text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    name text;
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.adopted a WHERE a.outbox = release_table.outbox) THEN
        RAISE EXCEPTION 'no table was adopted as outbox "%"', left(outbox, 64)
            USING ERRCODE = 'undefined_object';
    END IF;
    IF EXISTS (SELECT FROM {schema}.dead_letter d WHERE d.outbox = release_table.outbox) THEN
        RAISE EXCEPTION 'outbox "%" has dead letters', outbox
            USING ERRCODE = 'object_in_use',
                HINT = 'Requeue them and let them be delivered, or drop them.';
    END IF;
    EXECUTE format('DROP VIEW %s.%I', {schema_ident_text}, outbox);
    FOR name IN SELECT p.oid::regprocedure::text FROM {schema}.own_routines() AS p
        WHERE p.name IN (SELECT release_table.outbox || '_' || x FROM unnest(ARRAY['tick',
                'read', 'raise', 'passed', 'prune', 'empty', 'prunable', 'drawing']) AS x)
    LOOP
        EXECUTE 'DROP FUNCTION ' || name;
    END LOOP;
    -- With the functions that take or return a tick.
    EXECUTE format('DROP TABLE %1$s.%2$I CASCADE; DROP TABLE IF EXISTS %1$s.%3$I',
        {schema_ident_text}, outbox || '_tick', outbox || '_candidate');
    DELETE FROM {schema}.lease l WHERE l.outbox = release_table.outbox;
    DELETE FROM {schema}.relay r WHERE r.outbox = release_table.outbox;
    DELETE FROM {schema}.checkpoint c WHERE c.outbox = release_table.outbox;
    DELETE FROM {schema}.wal_base b WHERE b.outbox = release_table.outbox;
    DELETE FROM {schema}.wal_after w WHERE w.outbox = release_table.outbox;
    DELETE FROM {schema}.wal_recovery w WHERE w.outbox = release_table.outbox;
    DELETE FROM {schema}.wal_seal s WHERE s.outbox = release_table.outbox;
    DELETE FROM {schema}.feed f WHERE f.outbox = release_table.outbox;
    PERFORM {schema}.forget_routines();
END
$body$;

-- What an adopted table does not give, in words, for status and for the start of a relay; by_log:
-- where it is read from the write-ahead log.
CREATE FUNCTION {schema}.adopted_warnings(outbox text, by_log boolean DEFAULT false)
RETURNS SETOF text LANGUAGE plpgsql STABLE AS $body$
DECLARE
    a {schema}.adopted%ROWTYPE;
BEGIN
    SELECT * INTO a FROM {schema}.adopted k WHERE k.outbox = adopted_warnings.outbox;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF by_log THEN
        RETURN NEXT a.source || CASE WHEN a.columns THEN ': when its slot is lost, what the slot'
                ' had not sent is read from the table' ELSE ' has no transaction ids: when its slot'
                ' is lost, all rows that are in it are delivered again, with the same ids (adopt it'
                ' with add_columns => true, and only what is missing comes)' END
            || '; rows that the application has deleted by then are lost';
    ELSE
        RETURN NEXT a.source || ': events of one key come in the order in which their transactions'
            ' commit only where writers lock the key first, for example the row of its aggregate;'
            ' Postrider''s append, which does so, is not in use here';
    END IF;
    IF a.columns AND NOT EXISTS (SELECT FROM pg_attribute x
        JOIN pg_attrdef d ON d.adrelid = x.attrelid AND d.adnum = x.attnum
        JOIN pg_attribute s ON s.attrelid = x.attrelid AND s.attname = 'postrider_seq'
        WHERE x.attrelid = to_regclass(a.source) AND x.attname = 'postrider_xid'
            AND pg_get_expr(d.adbin, d.adrelid) = 'pg_current_xact_id()' AND x.attnotnull
            AND x.attnum < s.attnum AND s.attidentity = 'a')
    THEN
        RETURN NEXT a.source || ': the columns postrider_xid and postrider_seq were changed, and'
            ' events may be lost; release the table, drop both columns and adopt it again';
    ELSIF NOT a.columns AND NOT by_log THEN
        RETURN NEXT a.source || ' has no transaction ids: an open transaction that has written to'
            ' it holds up all its later events until it ends';
        RETURN NEXT a.source || ': an event whose ' || a.number || ' was drawn by another'
            ' transaction than the one that inserts it, or was set by hand, may be lost: let the'
            ' column''s default draw it (no pool of numbers in the application), or adopt the'
            ' table with add_columns => true';
        IF NOT EXISTS (SELECT FROM pg_index i JOIN pg_attribute c ON c.attrelid = i.indrelid
            AND c.attnum = i.indkey[0] WHERE i.indrelid = to_regclass(a.source) AND i.indisvalid
                AND quote_ident(c.attname) = a.number)
        THEN
            RETURN NEXT a.source || ' has no index on ' || a.number || ': each read scans it whole';
        END IF;
    END IF;
    IF NOT coalesce((a.mapping->'delete')::boolean, false) THEN
        RETURN NEXT a.source || ': Postrider deletes no rows from it; delete those that are older'
            ' than the retention yourself, or map "delete": true';
    END IF;
END
$body$;
