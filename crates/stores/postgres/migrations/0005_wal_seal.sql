-- What the copies of a checkpoint outside of this database were sealed with, the newest first. Each
-- seal is drawn at random and written here after the checkpoint and before the copy: whoever has it
-- shares the history of transactions up to the copy's place.
CREATE TABLE {schema}.wal_seal (
    outbox   text   NOT NULL COLLATE "C",
    consumer text   NOT NULL COLLATE "C",
    seals    uuid[] NOT NULL,
    PRIMARY KEY (outbox, consumer)
) WITH (fillfactor = 50);
