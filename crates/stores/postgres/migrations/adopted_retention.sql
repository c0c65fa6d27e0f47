-- Retention of an adopted table. The feed forgets what every consumer has passed and is old enough:
-- its ticks. Rows are the application's: they are deleted only where the mapping says "delete".
-- Placeholders as in 0001_outbox.sql; {passed_rows} is true for a row l up to tick h.

-- As an ordinary outbox's prune; segment 0 stands for rows that can be deleted.
CREATE OR REPLACE FUNCTION {schema}.{outbox_prune}(
    keep_ms bigint, most integer,
    OUT stamp bigint, OUT seq bigint, OUT more boolean, OUT segments integer[]
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    target {schema}.{outbox_tick}%ROWTYPE;
    h      {schema}.{outbox_tick}%ROWTYPE;
BEGIN
    more := false;
    segments := '{}';
    IF pg_try_advisory_xact_lock({retention_lock}) THEN
        target := {schema}.{outbox_forgettable}(keep_ms);
        -- The oldest first: what is left is a whole chain, whenever somebody looks.
        DELETE FROM {schema}.{outbox_tick} AS t WHERE t.stamp IN (
            SELECT n.stamp FROM {schema}.{outbox_tick} AS n
            WHERE n.stamp < target.stamp ORDER BY n.stamp LIMIT most);
        SELECT * INTO STRICT h FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
        more := h.stamp < target.stamp;
        IF {deletes} AND EXISTS (SELECT FROM {schema}.{outbox} AS l
            WHERE l.seq <= h.seq_hi AND ({passed_rows}))
        THEN
            segments := '{0}';
        END IF;
    ELSE
        SELECT * INTO STRICT h FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
    END IF;
    stamp := h.stamp;
    seq := h.seq_hi;
END
$body$;

-- Deletes up to 10,000 rows at or below the horizon, and returns how many; locks only those rows.
CREATE OR REPLACE FUNCTION {schema}.{outbox_empty}(segment integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    h       {schema}.{outbox_tick}%ROWTYPE;
    deleted bigint;
BEGIN
    IF NOT {deletes} THEN
        RETURN 0;
    END IF;
    SELECT * INTO STRICT h FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
    DELETE FROM {source} AS o WHERE o.{number} IN (
        SELECT l.seq FROM {schema}.{outbox} AS l
        WHERE l.seq <= h.seq_hi AND ({passed_rows}) ORDER BY l.seq LIMIT 10000);
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END
$body$;

-- How many rows the next calls would delete, and the present horizon.
CREATE OR REPLACE FUNCTION {schema}.{outbox_prunable}(
    keep_ms bigint, OUT events bigint, OUT stamp bigint, OUT seq bigint
) LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    h {schema}.{outbox_tick}%ROWTYPE := {schema}.{outbox_forgettable}(keep_ms);
BEGIN
    SELECT count(*) INTO events FROM {schema}.{outbox} AS l
        WHERE {deletes} AND l.seq <= h.seq_hi AND ({passed_rows});
    SELECT t.stamp, t.seq_hi INTO STRICT stamp, seq
        FROM {schema}.{outbox_tick} AS t ORDER BY t.stamp LIMIT 1;
END
$body$;
