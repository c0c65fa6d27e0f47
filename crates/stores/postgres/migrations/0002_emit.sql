-- Events that are written to the server's log alone, without a table: read by a relay of kind
-- "postgres-wal" with its option `messages`. They cost no row and need no retention. What a lost
-- slot took along is gone: no table has it.

-- One event, within this transaction: it goes out with the commit, and not at all without it.
-- transactional => false sends it at once, whatever becomes of the transaction. The content is the
-- length of its description (four bytes), the description (a JSON object), then the payload.
CREATE FUNCTION {schema}.emit(
    key text, topic text, type text, payload bytea,
    content_type text DEFAULT 'application/octet-stream', headers json DEFAULT NULL,
    id uuid DEFAULT NULL, prefix text DEFAULT 'postrider', transactional boolean DEFAULT true
) RETURNS uuid LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    head bytea;
BEGIN
    id := coalesce(id, {schema}.uuid7());
    -- The limits of an outbox's columns; a value beyond them is refused here.
    head := convert_to(json_build_object('id', id, 'key', key::{schema}.event_key,
        'topic', topic::{schema}.event_topic, 'type', type::{schema}.event_type,
        'content_type', content_type::{schema}.event_content_type,
        'headers', headers::{schema}.event_headers,
        'at', floor(date_part('epoch', clock_timestamp()) * 1000)::bigint)::text, 'UTF8');
    PERFORM pg_logical_emit_message(transactional, prefix,
        int4send(octet_length(head)) || head || payload::{schema}.event_bytea);
    RETURN id;
END
$body$;

-- The same with a payload of text, or of JSON.
CREATE FUNCTION {schema}.emit(
    key text, topic text, type text, payload text,
    content_type text DEFAULT 'text/plain; charset=utf-8', headers json DEFAULT NULL,
    id uuid DEFAULT NULL, prefix text DEFAULT 'postrider', transactional boolean DEFAULT true
) RETURNS uuid LANGUAGE sql VOLATILE
RETURN {schema}.emit(key, topic, type, convert_to(payload, 'UTF8'), content_type, headers, id,
    prefix, transactional);

CREATE FUNCTION {schema}.emit(
    key text, topic text, type text, payload json,
    content_type text DEFAULT 'application/json', headers json DEFAULT NULL,
    id uuid DEFAULT NULL, prefix text DEFAULT 'postrider', transactional boolean DEFAULT true
) RETURNS uuid LANGUAGE sql VOLATILE
RETURN {schema}.emit(key, topic, type, convert_to(payload::text, 'UTF8'), content_type, headers, id,
    prefix, transactional);
