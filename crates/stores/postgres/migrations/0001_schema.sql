-- What all outboxes of this schema share: their list, what relays keep, documents and the inbox.
--
-- {schema} stands for the schema's name, quoted as an identifier; {schema_text} for the same as a
-- text literal.

CREATE TABLE {schema}.feed (
    outbox      text    NOT NULL PRIMARY KEY COLLATE "C",
    -- Names the data. A dump or a copy keeps it.
    identity    uuid    NOT NULL DEFAULT gen_random_uuid(),
    -- How payloads are stored: bytea, or json with its text as it was given.
    payload     text    NOT NULL CHECK (payload IN ('bytea', 'json')),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Partitions in force: each tick names the generation that its records belong to.
CREATE TABLE {schema}.generation (
    outbox      text    NOT NULL COLLATE "C" REFERENCES {schema}.feed ON DELETE CASCADE,
    number      integer NOT NULL,
    partitions  integer NOT NULL CHECK (partitions BETWEEN 1 AND 65536),
    -- The last tick of the generation before; 0 for the first one.
    after_stamp bigint  NOT NULL,
    PRIMARY KEY (outbox, number)
);

-- Which relay may work on a partition. Rows stay when released: epochs must never repeat.
CREATE TABLE {schema}.lease (
    outbox      text    NOT NULL COLLATE "C",
    group_name  text    NOT NULL COLLATE "C",
    partition   text    NOT NULL COLLATE "C",
    holder      text    NOT NULL COLLATE "C",
    epoch       bigint  NOT NULL,
    released    boolean NOT NULL,
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (outbox, group_name, partition)
) WITH (fillfactor = 50);

-- Live relays, by which partitions are shared out.
CREATE TABLE {schema}.relay (
    outbox      text    NOT NULL COLLATE "C",
    group_name  text    NOT NULL COLLATE "C",
    relay       text    NOT NULL COLLATE "C",
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (outbox, group_name, relay)
) WITH (fillfactor = 50);

CREATE TABLE {schema}.checkpoint (
    outbox      text    NOT NULL COLLATE "C",
    consumer    text    NOT NULL COLLATE "C",
    partition   text    NOT NULL COLLATE "C",
    -- NULL: only counted so far, no position yet. In the feed 16 bytes, in the log 22.
    position    bytea   CHECK (octet_length(position) IN (16, 22)),
    published   bigint  NOT NULL DEFAULT 0,
    dropped     bigint  NOT NULL DEFAULT 0,
    ended       boolean NOT NULL DEFAULT false,
    -- The group whose lease it was last advanced under.
    lease_group text    COLLATE "C",
    updated_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (outbox, consumer, partition)
) WITH (fillfactor = 50);

CREATE TABLE {schema}.dead_letter (
    number       bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    outbox       text    NOT NULL COLLATE "C",
    consumer     text    NOT NULL COLLATE "C",
    partition    text    NOT NULL COLLATE "C",
    position     bytea   NOT NULL,
    state        text    NOT NULL CHECK (state IN ('parked', 'waiting', 'requeued', 'skipped')),
    reason       text    NOT NULL,
    attempts     integer NOT NULL,
    parked_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When the event was appended, in milliseconds since 1970.
    appended_ms  bigint  NOT NULL,
    -- Not NULL when the event could not be read; payload then holds its bytes as found.
    malformed    text,
    id           uuid,
    key          text    COLLATE "C",
    topic        text    COLLATE "C",
    type         text    COLLATE "C",
    content_type text    COLLATE "C",
    -- A JSON object of texts, its order kept, or NULL.
    headers      json,
    payload      bytea   NOT NULL,
    UNIQUE (outbox, consumer, partition, position)
);
-- Each heartbeat of a relay asks whether there is one; mostly it is empty.
CREATE INDEX dead_letter_requeued ON {schema}.dead_letter (outbox) WHERE state = 'requeued';
CREATE INDEX dead_letter_key ON {schema}.dead_letter (outbox, consumer, partition, key, number);

CREATE TABLE {schema}.document (
    -- The order of creation: pages follow it.
    number        bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    partition_key text    NOT NULL COLLATE "C",
    id            text    NOT NULL COLLATE "C",
    type          text    NOT NULL COLLATE "C",
    data          bytea   NOT NULL,
    -- Seconds, or -1 for ever.
    ttl           bigint  NOT NULL CHECK (ttl = -1 OR ttl > 0),
    deleted       boolean NOT NULL,
    version       bigint  NOT NULL,
    written_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (partition_key, id)
);
-- What can run out at all.
CREATE INDEX document_mortal ON {schema}.document (written_at) WHERE ttl > 0;
CREATE INDEX document_type ON {schema}.document (type, number);
CREATE SEQUENCE {schema}.document_version;

CREATE TABLE {schema}.inbox (
    consumer text        NOT NULL COLLATE "C",
    id       uuid        NOT NULL,
    seen_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, id)
);
CREATE INDEX inbox_seen ON {schema}.inbox (consumer, seen_at);

-- The partition of a key: the first four bytes of its SHA-256 as a number, modulo the count.
CREATE FUNCTION {schema}.partition_of(key text, partitions integer) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (('x' || encode(substring(sha256(convert_to(key, 'UTF8')) FROM 1 FOR 4), 'hex'))
    ::bit(32)::bigint % partitions)::integer;

-- A UUID of version 7 (RFC 9562). Servers before 18 have none: 48 bits of milliseconds and the
-- version replace the front of a random UUID's text, whose last 76 bits stay.
DO $do$
BEGIN
    EXECUTE 'CREATE FUNCTION ' || {schema_ident_text}
        || '.uuid7() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE RETURN '
        || CASE WHEN current_setting('server_version_num')::integer >= 180000 THEN 'uuidv7()'
            ELSE $sql$overlay(gen_random_uuid()::text PLACING lpad(to_hex(
                (date_part('epoch', clock_timestamp()) * 1000)::bigint * 16 + 7), 13, '0')
                FROM 1 FOR 15)::uuid$sql$ END;
END
$do$;

-- Whether a JSON value is an object of at most 64 texts under distinct, legal names; refuses it in
-- words if not.
CREATE FUNCTION {schema}.headers_allowed(headers json) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $body$
DECLARE
    allowed boolean := false;
BEGIN
    BEGIN
        allowed := json_typeof(headers) = 'object' AND (
            SELECT count(*) <= 64 AND count(*) = count(DISTINCT lower(h.key))
                AND coalesce(bool_and(json_typeof(h.value) = 'string'
                    AND h.key ~ '^[-!#$%&''*+.^_`|~0-9A-Za-z]{1,128}$'
                    AND octet_length(h.value #>> '{}') <= 8192
                    AND (h.value #>> '{}') !~ '[\x01-\x08\x0a-\x1f\x7f-\x9f]'), true)
            FROM json_each(headers) AS h);
    EXCEPTION WHEN data_exception OR character_not_in_repertoire THEN
        -- An escape that stands for no character.
        NULL;
    END;
    IF NOT allowed THEN
        RAISE EXCEPTION 'headers must be a JSON object of at most 64 texts; names have up to 128 '
            'letters, digits and !#$%%&''*+-.^_`|~ and differ in more than case, texts have up to '
            '8192 bytes and no control character' USING ERRCODE = 'check_violation';
    END IF;
    RETURN true;
END
$body$;

-- What an event's columns hold. Types, not constraints of the table: those the server would parse
-- anew for each statement, which costs more than the insert itself. A NULL is refused here, too:
-- the table's own NOT NULL would show the whole row, in the error and in the server's log. A check
-- is named by what a refusal should say. It calls as few functions as it can, because each of them
-- is made ready again for each append.
CREATE DOMAIN {schema}.event_key AS text COLLATE "C" NOT NULL
    CONSTRAINT "key must have 1 to 1024 bytes and no control character" CHECK (
        octet_length(VALUE) <= 1024 AND VALUE ~ '^[^\x01-\x1f\x7f-\x9f]+$');
CREATE DOMAIN {schema}.event_topic AS text COLLATE "C" NOT NULL
    CONSTRAINT "topic must have 1 to 255 bytes and no control character" CHECK (
        octet_length(VALUE) <= 255 AND VALUE ~ '^[^\x01-\x1f\x7f-\x9f]+$');
CREATE DOMAIN {schema}.event_type AS text COLLATE "C" NOT NULL
    CONSTRAINT "type must have 1 to 255 bytes and no control character" CHECK (
        octet_length(VALUE) <= 255 AND VALUE ~ '^[^\x01-\x1f\x7f-\x9f]+$');
CREATE DOMAIN {schema}.event_content_type AS text COLLATE "C" NOT NULL
    CONSTRAINT "content type must have 1 to 255 bytes and no control character" CHECK (
        octet_length(VALUE) <= 255 AND VALUE ~ '^[^\x01-\x1f\x7f-\x9f]+$');
CREATE DOMAIN {schema}.event_headers AS json CHECK ({schema}.headers_allowed(VALUE));
CREATE DOMAIN {schema}.event_bytea AS bytea NOT NULL
    CONSTRAINT "payload has more than 16777216 bytes: send a reference instead" CHECK (
        octet_length(VALUE) <= 16777216);
CREATE DOMAIN {schema}.event_json AS json NOT NULL
    CONSTRAINT "payload has more than 16777216 bytes: send a reference instead" CHECK (
        octet_length(VALUE::text) <= 16777216);

-- A position as its 26 characters (Crockford's base 32 over 128 bits), and back.
CREATE FUNCTION {schema}.position_text(stamp bigint, seq bigint) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (SELECT string_agg(substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ',
        (substring('00'::bit(2) || stamp::bit(64) || seq::bit(64) FROM 5 * i + 1 FOR 5)
            ::bit(5)::integer) + 1, 1), '' ORDER BY i)
    FROM generate_series(0, 25) AS i);

CREATE FUNCTION {schema}.position_bits(ulid text) RETURNS bit varying
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $body$
DECLARE
    bits bit varying := B'';
    place integer;
BEGIN
    IF ulid !~* '^[0-7][0-9A-HJKMNP-TV-Z]{25}$' THEN
        RAISE EXCEPTION 'position "%" is no ULID of 26 characters', left(ulid, 64)
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Give one that read_feed returned, or NULL for the oldest.';
    END IF;
    FOR i IN 1..26 LOOP
        place := strpos('0123456789ABCDEFGHJKMNPQRSTVWXYZ', upper(substr(ulid, i, 1))) - 1;
        bits := bits || place::bit(5);
    END LOOP;
    RETURN substring(bits FROM 3);
END
$body$;
