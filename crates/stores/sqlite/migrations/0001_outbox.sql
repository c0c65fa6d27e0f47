-- Postrider's tables. Append-only: a released migration is never edited.

CREATE TABLE postrider_state (
    only_row        INTEGER PRIMARY KEY CHECK (only_row = 1),
    identity        TEXT    NOT NULL,
    -- The generation of partitions that new events go to.
    generation      INTEGER NOT NULL,
    first_partition INTEGER NOT NULL,
    partition_count INTEGER NOT NULL CHECK (partition_count BETWEEN 1 AND 1024),
    -- The last version that a document was given.
    last_version    INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE postrider_partition (
    number     INTEGER PRIMARY KEY,
    index_no   INTEGER NOT NULL,
    count_no   INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    -- The head when the generation ended; both NULL while it takes events.
    ended_ms   INTEGER,
    ended_seq  INTEGER,
    -- The newest of its events that retention has deleted.
    horizon_ms  INTEGER,
    horizon_seq INTEGER,
    UNIQUE (count_no, index_no),
    CHECK (index_no BETWEEN 0 AND count_no - 1)
) STRICT;

CREATE TABLE postrider_outbox (
    seq          INTEGER PRIMARY KEY,
    partition    INTEGER NOT NULL REFERENCES postrider_partition (number),
    at_ms        INTEGER NOT NULL CHECK (at_ms BETWEEN 0 AND 281474976710655),
    id           BLOB    NOT NULL UNIQUE CHECK (length(id) = 16),
    key          TEXT    NOT NULL CHECK (
        length(CAST(key AS BLOB)) BETWEEN 1 AND 1024
        AND instr(CAST(key AS BLOB), x'00') = 0
        AND key NOT GLOB
            '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'),
    topic        TEXT    NOT NULL CHECK (
        length(CAST(topic AS BLOB)) BETWEEN 1 AND 255
        AND instr(CAST(topic AS BLOB), x'00') = 0
        AND topic NOT GLOB
            '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'),
    type         TEXT    NOT NULL CHECK (
        length(CAST(type AS BLOB)) BETWEEN 1 AND 255
        AND instr(CAST(type AS BLOB), x'00') = 0
        AND type NOT GLOB
            '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'),
    content_type TEXT    NOT NULL CHECK (
        length(CAST(content_type AS BLOB)) BETWEEN 1 AND 255
        AND instr(CAST(content_type AS BLOB), x'00') = 0
        AND content_type NOT GLOB
            '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'),
    -- A JSON object of texts, or NULL.
    headers      TEXT    CHECK (headers IS NULL OR json_type(headers) = 'object'),
    payload      BLOB    NOT NULL CHECK (length(payload) <= 16777216)
) STRICT;

-- The row id is part of every index: this one is (partition, seq).
CREATE INDEX postrider_outbox_feed ON postrider_outbox (partition);

CREATE TRIGGER postrider_outbox_headers
BEFORE INSERT ON postrider_outbox WHEN NEW.headers IS NOT NULL
BEGIN
    SELECT RAISE(ABORT, 'a header name or value is not allowed, or there are more than 64')
    WHERE (SELECT count(*) > 64 OR count(*) <> count(DISTINCT lower(key))
           FROM json_each(NEW.headers))
       OR EXISTS (
        SELECT 1 FROM json_each(NEW.headers)
        WHERE type <> 'text'
           OR length(key) NOT BETWEEN 1 AND 128
           OR key GLOB '*[^-!#$%&''*+.^_`|~0-9A-Za-z]*'
           OR length(CAST(value AS BLOB)) > 8192
           OR instr(CAST(value AS BLOB), x'00') > 0
           OR value GLOB '*[' || char(1) || '-' || char(8) || char(10) || '-' || char(31)
                || char(127) || '-' || char(159) || ']*');
END;

CREATE TABLE postrider_lease (
    group_name TEXT    NOT NULL,
    partition  TEXT    NOT NULL,
    holder     TEXT    NOT NULL,
    epoch      INTEGER NOT NULL,
    released   INTEGER NOT NULL,
    -- Milliseconds of the time that never goes back, since the boot named beside it.
    expires_ms INTEGER NOT NULL,
    boot_id    TEXT    NOT NULL,
    PRIMARY KEY (group_name, partition)
) STRICT, WITHOUT ROWID;

CREATE TABLE postrider_relay (
    group_name TEXT    NOT NULL,
    relay      TEXT    NOT NULL,
    expires_ms INTEGER NOT NULL,
    boot_id    TEXT    NOT NULL,
    PRIMARY KEY (group_name, relay)
) STRICT, WITHOUT ROWID;

CREATE TABLE postrider_checkpoint (
    consumer    TEXT    NOT NULL,
    partition   TEXT    NOT NULL,
    -- NULL: only counted so far, no position yet.
    position    BLOB    CHECK (position IS NULL OR length(position) = 16),
    published   INTEGER NOT NULL DEFAULT 0,
    dropped     INTEGER NOT NULL DEFAULT 0,
    ended       INTEGER NOT NULL DEFAULT 0,
    lease_group TEXT,
    updated_ms  INTEGER NOT NULL,
    PRIMARY KEY (consumer, partition)
) STRICT, WITHOUT ROWID;

CREATE TABLE postrider_dead_letter (
    number       INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer     TEXT    NOT NULL,
    partition    TEXT    NOT NULL,
    position     BLOB    NOT NULL,
    state        TEXT    NOT NULL CHECK (state IN ('parked', 'waiting', 'requeued', 'skipped')),
    reason       TEXT    NOT NULL,
    attempts     INTEGER NOT NULL,
    parked_ms    INTEGER NOT NULL,
    updated_ms   INTEGER NOT NULL,
    at_ms        INTEGER NOT NULL,
    -- Not NULL when the event could not be read; payload then holds its bytes as found.
    malformed    TEXT,
    id           BLOB,
    key          TEXT,
    topic        TEXT,
    type         TEXT,
    content_type TEXT,
    headers      TEXT,
    payload      BLOB    NOT NULL,
    UNIQUE (consumer, partition, position)
) STRICT;

CREATE INDEX postrider_dead_letter_key
    ON postrider_dead_letter (consumer, partition, key, state);
CREATE INDEX postrider_dead_letter_state
    ON postrider_dead_letter (consumer, partition, state);

CREATE TABLE postrider_document (
    -- The version it was created with: pages follow the order of creation.
    number        INTEGER PRIMARY KEY,
    partition_key TEXT    NOT NULL,
    id            TEXT    NOT NULL,
    type          TEXT    NOT NULL,
    data          BLOB    NOT NULL,
    -- Seconds, or -1 for ever.
    ttl           INTEGER NOT NULL CHECK (ttl = -1 OR ttl > 0),
    deleted       INTEGER NOT NULL,
    version       INTEGER NOT NULL,
    written_ms    INTEGER NOT NULL,
    UNIQUE (partition_key, id)
) STRICT;

CREATE INDEX postrider_document_type ON postrider_document (type);
CREATE INDEX postrider_document_ttl
    ON postrider_document (written_ms + ttl * 1000) WHERE ttl > 0;

CREATE TABLE postrider_inbox (
    consumer TEXT    NOT NULL,
    id       BLOB    NOT NULL CHECK (length(id) = 16),
    seen_ms  INTEGER NOT NULL,
    PRIMARY KEY (consumer, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX postrider_inbox_seen ON postrider_inbox (consumer, seen_ms);
