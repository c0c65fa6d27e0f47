-- Appending to one outbox inside the caller's own transaction.
--
-- Every way of appending locks the keys until the transaction ends, in a statement of its own, and
-- then inserts, which draws the transaction id and, after it, a seq. So a key's order by seq is the
-- order in which its transactions commit, and a row's transaction id is older than its seq. A bare
-- INSERT skips the key locks: where two transactions write the same key at the same time, the feed
-- may then show the later commit first.
--
-- One event costs little more than its INSERT only while a function evaluates few expressions: each
-- is made ready again in each transaction.

-- Keeps all other writers out until this transaction ends. Takes the one lock on the table that an
-- INSERT's own lock waits for and that readers don't meet; not on its segments, where the server's
-- housekeeping would meet it. Writers have no right to take it but by this function.
--
-- Waits for 30 s until no other transaction has written to the outbox, 25 ms at a time: whoever
-- comes to write meanwhile queues behind such a wait. Then fails, also where the one that is waited
-- for waits for this one, which the server can't see.
CREATE FUNCTION {schema}.{outbox_lock_all}() RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET lock_timeout = '25ms' AS $body$
DECLARE
    until timestamptz := clock_timestamp() + interval '30 seconds';
BEGIN
    LOOP
        BEGIN
            LOCK TABLE ONLY {schema}.{outbox} IN SHARE ROW EXCLUSIVE MODE;
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF clock_timestamp() > until THEN
                RAISE EXCEPTION 'outbox "%" was not free of other writers for 30 s', {outbox_text}
                    USING ERRCODE = 'lock_not_available', HINT = 'Append up to 1000 keys in a'
                        ' transaction, or look for one that stays open.';
            END IF;
        END;
        PERFORM pg_sleep(0.025 + random() * 0.05);
    END LOOP;
END
$body$;

-- Locks the keys for this transaction, in the order of their lock numbers, so that two calls that
-- lock several keys don't wait for each other in a circle. Above 1,000 of them one lock on the
-- whole outbox replaces them, because the server's lock table has room for a few thousand
-- altogether. Call it with all keys at once, first, where a transaction appends in several calls.
CREATE FUNCTION {schema}.{outbox_lock_keys}(keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    locks  integer[] := ARRAY(SELECT DISTINCT hashtext(k COLLATE "C") FROM unnest(keys) AS k
        WHERE k IS NOT NULL ORDER BY 1);
    lock   integer;
    locked boolean;
BEGIN
    IF cardinality(locks) > 1000 THEN
        PERFORM {schema}.{outbox_lock_all}();
        RETURN;
    END IF;
    FOREACH lock IN ARRAY locks LOOP
        locked := pg_advisory_xact_lock({lock_class}, lock) IS NOT NULL;
    END LOOP;
END
$body$;

-- Remembers ids that the caller gave, and returns those that are new. Waits for an open transaction
-- that has claimed one of them; in ascending order, so that two calls don't wait in a circle.
CREATE FUNCTION {schema}.{outbox_claim}(ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    fresh uuid[];
BEGIN
    WITH claimed AS (
        INSERT INTO {schema}.{outbox_given} AS g (id)
        SELECT DISTINCT i FROM unnest(ids) AS i ORDER BY i
        ON CONFLICT DO NOTHING
        RETURNING g.id
    )
    SELECT array_agg(c.id) INTO fresh FROM claimed AS c;
    RETURN coalesce(fresh, '{}');
END
$body$;

-- Whether an id that the caller gave is new, and the event is to be inserted.
CREATE FUNCTION {schema}.{outbox_claim_one}(id uuid, on_duplicate text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    IF on_duplicate IS NULL OR on_duplicate NOT IN ('fail', 'ignore') THEN
        RAISE EXCEPTION 'on_duplicate is "%"; give "fail" or "ignore"', on_duplicate
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF {schema}.{outbox_claim}(ARRAY[id]) <> '{}' THEN
        RETURN true;
    END IF;
    IF on_duplicate = 'fail' THEN
        RAISE EXCEPTION 'event % was appended before; give each event an id of its own', id
            USING ERRCODE = 'unique_violation';
    END IF;
    RETURN false;
END
$body$;

-- One event. `given`: whether the id is the caller's own and must not have been appended before;
-- an id made for this call can't repeat and costs no look-up.
CREATE FUNCTION {schema}.{outbox_append_one}(
    id uuid, given boolean, key text, topic text, type text, content_type text, headers json,
    payload {payload}, on_duplicate text
) RETURNS uuid LANGUAGE plpgsql VOLATILE AS $body$
BEGIN
    -- Evaluated in this order, and in place; PERFORM would run the executor.
    IF (CASE WHEN pg_advisory_xact_lock({lock_class}, hashtext(key COLLATE "C")) IS NOT NULL
        THEN given AND NOT {schema}.{outbox_claim_one}(id, on_duplicate) END)
    THEN
        RETURN id;
    END IF;
    INSERT INTO {schema}.{outbox} (id, key, topic, type, content_type, headers, payload)
    VALUES (id, key, topic, type, content_type, headers, payload);
    RETURN id;
END
$body$;

-- Up to 100,000 events in the order given; returns their ids in that order. ids: NULL, or NULL in a
-- place, asks for a new one. given: which ids are the caller's own; NULL means all that are not
-- NULL. on_duplicate: what happens to an event whose id was appended before or comes twice: 'fail',
-- or 'ignore', which keeps the first one.
CREATE FUNCTION {schema}.{outbox_append_all}(
    ids uuid[], given boolean[], keys text[], topics text[], types text[], content_types text[],
    headers text[], payloads bytea[], on_duplicate text DEFAULT 'fail'
) RETURNS uuid[] LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    keep  boolean[];
    twice uuid;
BEGIN
    IF on_duplicate IS NULL OR on_duplicate NOT IN ('fail', 'ignore') THEN
        RAISE EXCEPTION 'on_duplicate is "%"; give "fail" or "ignore"', on_duplicate
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cardinality(keys) > 100000 THEN
        RAISE EXCEPTION '% events in one append; 100000 are allowed: append in parts',
            cardinality(keys) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_current_xact_id();
    PERFORM {schema}.{outbox_lock_keys}(keys);
    given := ARRAY(SELECT e.id IS NOT NULL AND coalesce(e.given, true)
        FROM unnest(ids, given, keys) AS e (id, given, key));
    ids := ARRAY(SELECT coalesce(e.id, {schema}.uuid7()) FROM unnest(ids, keys) AS e (id, key));
    IF true = ANY (given) THEN
        -- An event stays where its id is fresh, or is new and comes here first.
        WITH claimed AS (
            SELECT c.id FROM unnest({schema}.{outbox_claim}(ARRAY(
                SELECT e.id FROM unnest(ids, given) AS e (id, given) WHERE e.given))) AS c (id)
        ), numbered AS (
            SELECT e.id, e.given, e.n,
                row_number() OVER (PARTITION BY e.id, e.given ORDER BY e.n) AS nth
            FROM unnest(ids, given) WITH ORDINALITY AS e (id, given, n)
        )
        SELECT array_agg(NOT e.given OR c.id IS NOT NULL AND e.nth = 1 ORDER BY e.n) INTO keep
        FROM numbered AS e LEFT JOIN claimed AS c ON c.id = e.id;
        IF on_duplicate = 'fail' AND false = ANY (keep) THEN
            twice := ids[array_position(keep, false)];
            RAISE EXCEPTION 'event % was appended before; give each event an id of its own', twice
                USING ERRCODE = 'unique_violation';
        END IF;
    END IF;
    -- A scan of unnest, with nothing beside it, yields the arrays' own order.
    INSERT INTO {schema}.{outbox} (id, key, topic, type, content_type, headers, payload)
    SELECT e.id, e.key, e.topic, e.type, coalesce(e.content_type, {content_type_text}),
        e.headers::json, {payload_in}
    FROM unnest(ids, keys, topics, types, content_types, headers, payloads, keep)
        AS e (id, key, topic, type, content_type, headers, payload, keep)
    WHERE e.keep IS NOT false;
    RETURN ids;
END
$body$;

-- {outbox_append}(key, topic, type, payload, content_type, headers, id, on_duplicate), for people:
-- the payload may be text, bytea, json or jsonb, and an untyped literal is text. It returns the
-- event's id. The outbox named "outbox" has it under the name "append", too. Each variant is a
-- function of its own, because one that calls another costs half as much again.
DO $do$
DECLARE
    name    text;
    variant record;
BEGIN
    FOREACH name IN ARRAY ARRAY[{outbox_text} || '_append']
        || CASE WHEN {outbox_text} = 'outbox' THEN ARRAY['append'] ELSE '{}' END
    LOOP
        FOR variant IN
            SELECT v.type, v.content_type,
                CASE {payload_type_text} WHEN 'json' THEN v.to_json ELSE v.to_bytea END
                    AS expression
            FROM (VALUES
                ('bytea', 'payload', 'convert_from(payload, ''UTF8'')::json',
                    {content_type_text}),
                ('text', 'convert_to(payload, ''UTF8'')', 'payload::json',
                    CASE {payload_type_text} WHEN 'json' THEN 'application/json'
                        ELSE 'text/plain; charset=utf-8' END),
                ('json', 'convert_to(payload::text, ''UTF8'')', 'payload', 'application/json'),
                ('jsonb', 'convert_to(payload::text, ''UTF8'')', 'payload::json',
                    'application/json')
            ) AS v (type, to_bytea, to_json, content_type)
        LOOP
            -- Joined, not formatted: the outbox's own name may hold a percent sign.
            EXECUTE 'CREATE FUNCTION ' || {schema_ident_text} || '.' || quote_ident(name)
                || '(key text, topic text, type text, payload ' || variant.type
                || ', content_type text DEFAULT ' || quote_literal(variant.content_type) || $text$,
                    headers json DEFAULT NULL, id uuid DEFAULT NULL,
                    on_duplicate text DEFAULT 'fail'
                ) RETURNS uuid LANGUAGE plpgsql VOLATILE AS $body$
                BEGIN
                    IF id IS NULL THEN
                        id := CASE WHEN pg_advisory_xact_lock({lock_class},
                            hashtext(key COLLATE "C")) IS NOT NULL THEN {schema}.uuid7() END;
                    ELSIF (CASE WHEN pg_advisory_xact_lock({lock_class},
                            hashtext(key COLLATE "C")) IS NOT NULL
                        THEN NOT {schema}.{outbox_claim_one}(id, on_duplicate) END)
                    THEN
                        RETURN id;
                    END IF;
                    INSERT INTO {schema}.{outbox}
                        (id, key, topic, type, content_type, headers, payload)
                    VALUES (id, key, topic, type, content_type, headers,
                        $text$ || variant.expression || $text$);
                    RETURN id;
                END
                $body$
                $text$;
        END LOOP;
    END LOOP;
    IF {payload_type_text} = 'json' THEN
        -- The library hands over bytes, whatever the outbox stores.
        EXECUTE $text$
            CREATE FUNCTION {schema}.{outbox_append_one}(id uuid, given boolean, key text,
                topic text, type text, content_type text, headers json, payload bytea,
                on_duplicate text
            ) RETURNS uuid LANGUAGE sql VOLATILE
            RETURN {schema}.{outbox_append_one}(id, given, key, topic, type, content_type, headers,
                convert_from(payload, 'UTF8')::json, on_duplicate)
            $text$;
    END IF;
END
$do$;
