-- Least privilege: which role may do what in this schema, remembered, so that outboxes and
-- functions that come later are covered, too.
--
-- There are five parts to play. A writer appends and reads nothing. A reader follows feeds. A relay
-- reads, keeps its own books and empties segments through functions of the owner. Two are for an
-- application that keeps documents here, or an inbox. What is named nowhere below is the owner's.
-- Nothing here makes a role or logs it in.

CREATE TABLE {schema}.role_grant (
    role text NOT NULL,
    part text NOT NULL CHECK (part IN ('writer', 'reader', 'relay', 'documents', 'inbox')),
    -- Whether others had let the role into the schema before: then it stays in.
    let_in boolean NOT NULL,
    PRIMARY KEY (role, part)
);

-- Our own routines, each as regprocedure shows it with its schema. Others may keep routines in the
-- same schema, of the same names even: those are none of our business.
CREATE TABLE {schema}.routine (
    signature text NOT NULL PRIMARY KEY COLLATE "C"
);

CREATE FUNCTION {schema}.own_routines() RETURNS TABLE (oid oid, name text)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $body$
    SELECT p.oid, p.proname::text FROM pg_proc AS p
    JOIN {schema}.routine AS r ON r.signature = p.oid::regprocedure::text
    WHERE p.pronamespace = to_regnamespace({schema_ident_text})
$body$;

-- Forgets what was dropped: something else may come under the same signature.
CREATE FUNCTION {schema}.forget_routines() RETURNS void
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
    DELETE FROM {schema}.routine AS r WHERE NOT EXISTS (SELECT FROM pg_proc AS p
        WHERE p.pronamespace = to_regnamespace({schema_ident_text})
            AND p.oid::regprocedure::text = r.signature)
$body$;

-- Remembers as ours what this role has made here since, in this transaction.
CREATE FUNCTION {schema}.note_routines(before oid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    PERFORM {schema}.forget_routines();
    INSERT INTO {schema}.routine SELECT p.oid::regprocedure::text FROM pg_proc AS p
        WHERE p.pronamespace = to_regnamespace({schema_ident_text}) AND p.oid <> ALL (before)
            AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
        ON CONFLICT DO NOTHING;
END
$body$;

-- The functions of a part by their names; those of an outbox by what follows its name.
CREATE FUNCTION {schema}.functions_of(part text, OUT shared text[], OUT of_outbox text[])
LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE part
        WHEN 'writer' THEN ARRAY['append', 'emit', 'uuid7', 'headers_allowed', 'append_change',
            'lock_feed', 'next_ulid', 'ulid_plus', 'ulid_text', 'ulid_of_text', 'ulid_time',
            'partition_of', 'check_settings', 'setting_ms']
        WHEN 'reader' THEN ARRAY['tick', 'head', 'position_at', 'read_feed', 'partitions',
            'outboxes', 'successors', 'generation_of', 'known_outbox', 'position_halves',
            'position_bits', 'position_text', 'payload_text', 'partition_of', 'adopted_warnings',
            'check_settings', 'setting_ms', 'ulid_text', 'ulid_of_text', 'ulid_time',
            'read_table_feed', 'known_table_feed', 'primary_key_of', 'row_with_key',
            'table_feed_warnings', 'heirs_without_feed']
        WHEN 'relay' THEN ARRAY['log_table', 'log_numbers']
        ELSE '{}' END,
    CASE part
        WHEN 'writer' THEN ARRAY['_append', '_append_one', '_append_all', '_lock_keys', '_lock_all',
            '_claim', '_claim_one']
        WHEN 'reader' THEN ARRAY['_tick', '_due', '_ended', '_read', '_place', '_drawing']
        WHEN 'relay' THEN ARRAY['_passed', '_forgettable', '_leaf', '_occupied', '_settled',
            '_count', '_next_segment', '_rotate', '_prune', '_empty', '_prunable']
        ELSE '{}' END
$body$;

-- What a part may do, each as GRANT and REVOKE take it. A relay is a reader, too.
CREATE FUNCTION {schema}.privileges_of(part text) RETURNS SETOF text
LANGUAGE sql STABLE AS $body$
    SELECT 'USAGE ON SCHEMA ' || {schema_ident_text}
    UNION ALL
    SELECT 'EXECUTE ON FUNCTION ' || p.oid::regprocedure
    FROM unnest(CASE part WHEN 'relay' THEN ARRAY['reader', 'relay'] ELSE ARRAY[part] END)
        AS n (part)
    CROSS JOIN LATERAL {schema}.functions_of(n.part) AS f
    JOIN {schema}.own_routines() AS p ON p.name = ANY (f.shared)
        OR EXISTS (SELECT FROM {schema}.feed AS o, unnest(f.of_outbox) AS s (suffix)
            WHERE p.name = o.outbox || s.suffix)
    UNION ALL
    SELECT g.privilege || ' ON ' || CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END
        || c.oid::regclass
    FROM (
        SELECT g.parts, g.privilege, o.outbox || g.suffix AS name
        FROM {schema}.feed AS o, (VALUES
            -- No xid, segment or seq: a row's transaction id must be older than its seq. No
            -- created_at: it tells when, whoever wrote.
            ('{writer}'::text[], '',
                'INSERT (id, key, topic, type, content_type, headers, payload)'),
            -- Only to look at: whoever could move it would choose a segment that is being emptied.
            ('{writer}', '_segment', 'SELECT'),
            ('{reader,relay}', '', 'SELECT'),
            ('{reader,relay}', '_tick', 'SELECT'),
            ('{reader,relay}', '_seq', 'SELECT'),
            ('{relay}', '_ring', 'SELECT'),
            ('{relay}', '_segment', 'SELECT'),
            ('{documents}', '_given', 'SELECT')
        ) AS g (parts, suffix, privilege)
        WHERE NOT (g.privilege LIKE 'INSERT%' AND EXISTS (SELECT FROM pg_class AS v
            WHERE v.relnamespace = to_regnamespace({schema_ident_text}) AND v.relkind = 'v'
                AND v.relname = o.outbox))
        UNION ALL VALUES
            ('{reader,relay}'::text[], 'SELECT', 'feed'),
            ('{reader,relay}', 'SELECT', 'generation'),
            ('{reader,relay}', 'SELECT', 'migration'),
            ('{reader,relay}', 'SELECT', 'adopted'),
            ('{reader,relay}', 'SELECT', 'table_feed'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'lease'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'relay'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'checkpoint'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'dead_letter'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'wal_base'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'wal_after'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'wal_recovery'),
            ('{relay}', 'SELECT, INSERT, UPDATE, DELETE', 'wal_seal'),
            -- To remove expired ones, unseen. Locking a row asks for the right to update a column;
            -- this one is the server's own, and can't be given a value.
            ('{relay}', 'SELECT (number, ttl, written_at), UPDATE (number), DELETE', 'document'),
            ('{documents}', 'SELECT, INSERT, UPDATE, DELETE', 'document'),
            ('{documents}', 'USAGE, SELECT', 'document_version'),
            ('{inbox}', 'SELECT, INSERT, DELETE', 'inbox')
    ) AS g (parts, privilege, name)
    JOIN pg_class AS c ON c.relnamespace = to_regnamespace({schema_ident_text})
        AND c.relname = g.name AND c.relkind IN ('r', 'p', 'v', 'S')
    WHERE part = ANY (g.parts)
$body$;

-- Gives all roles what they were granted, also of what has come since, and takes from PUBLIC what
-- PostgreSQL gives it with every new function of ours. Runs at the end of each migration and
-- adoption.
CREATE FUNCTION {schema}.apply_grants() RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    g         {schema}.role_grant%ROWTYPE;
    privilege text;
BEGIN
    FOR privilege IN SELECT p.oid::regprocedure FROM {schema}.own_routines() AS p
        WHERE has_function_privilege('public', p.oid, 'EXECUTE')
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', privilege);
    END LOOP;
    -- A role that was dropped, and one that is made under its name later, has nothing.
    DELETE FROM {schema}.role_grant AS r
        WHERE NOT EXISTS (SELECT FROM pg_roles AS p WHERE p.rolname = r.role);
    FOR g IN SELECT * FROM {schema}.role_grant LOOP
        FOR privilege IN SELECT * FROM {schema}.privileges_of(g.part) LOOP
            EXECUTE format('GRANT %s TO %I', privilege, g.role);
        END LOOP;
    END LOOP;
END
$body$;

CREATE FUNCTION {schema}.grant_part(role text, part text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = role) THEN
        RAISE EXCEPTION 'there is no role "%"', role USING ERRCODE = 'undefined_object',
            HINT = 'Make it first: CREATE ROLE … LOGIN. The name is taken as it is, its case too.';
    END IF;
    INSERT INTO {schema}.role_grant AS g VALUES (role, part, coalesce(
            (SELECT bool_and(o.let_in) FROM {schema}.role_grant AS o
                WHERE o.role = grant_part.role),
            EXISTS (SELECT FROM pg_namespace AS n, aclexplode(n.nspacl) AS a, pg_roles AS r
                WHERE n.oid = to_regnamespace({schema_ident_text}) AND r.rolname = grant_part.role
                    AND a.grantee = r.oid AND a.privilege_type = 'USAGE')))
        ON CONFLICT DO NOTHING;
    PERFORM {schema}.apply_grants();
END
$body$;

-- Takes a part back; what other parts of the role need stays.
CREATE FUNCTION {schema}.revoke_part(role text, part text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    privilege text;
    let_in    boolean;
BEGIN
    DELETE FROM {schema}.role_grant AS g WHERE g.role = revoke_part.role
        AND g.part = revoke_part.part RETURNING g.let_in INTO let_in;
    IF EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = revoke_part.role) THEN
        FOR privilege IN SELECT p FROM {schema}.privileges_of(part) AS p
            WHERE NOT (let_in AND p LIKE 'USAGE ON SCHEMA %')
        LOOP
            EXECUTE format('REVOKE %s FROM %I', privilege, role);
        END LOOP;
    END IF;
    PERFORM {schema}.apply_grants();
END
$body$;

DO $do$
DECLARE
    part text;
BEGIN
    FOREACH part IN ARRAY ARRAY['writer', 'reader', 'relay', 'documents', 'inbox'] LOOP
        EXECUTE 'CREATE FUNCTION ' || {schema_ident_text} || '.grant_' || part
            || '(role text) RETURNS void LANGUAGE sql VOLATILE AS $body$ SELECT '
            || {schema_ident_text} || '.grant_part(role, ' || quote_literal(part) || ') $body$';
        EXECUTE 'CREATE FUNCTION ' || {schema_ident_text} || '.revoke_' || part
            || '(role text) RETURNS void LANGUAGE sql VOLATILE AS $body$ SELECT '
            || {schema_ident_text} || '.revoke_part(role, ' || quote_literal(part) || ') $body$';
    END LOOP;
END
$do$;
