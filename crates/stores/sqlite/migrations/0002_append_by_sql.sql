-- Appending by plain SQL, from any language:
--
--     INSERT INTO postrider_append (key, topic, type, content_type, payload)
--     VALUES ('order-42', 'orders', 'OrderPlaced', 'application/json', '{"total": 7}');
--
-- inside the transaction of the business row. `id` (16 bytes) and `headers` (a JSON object of
-- texts) may be given too; whatever is left out gets its default. The statement takes the write
-- lock before it chooses the event's place.

-- The round constants of SHA-256 (FIPS 180-4): a key's partition comes from its hash, and SQLite
-- has none of its own.
CREATE TABLE postrider_sha256 (t INTEGER PRIMARY KEY, k INTEGER NOT NULL) STRICT;
INSERT INTO postrider_sha256 (t, k) VALUES
    (0, 1116352408), (1, 1899447441), (2, 3049323471), (3, 3921009573), (4, 961987163), (5,
    1508970993), (6, 2453635748), (7, 2870763221), (8, 3624381080), (9, 310598401), (10,
    607225278), (11, 1426881987), (12, 1925078388), (13, 2162078206), (14, 2614888103), (15,
    3248222580), (16, 3835390401), (17, 4022224774), (18, 264347078), (19, 604807628), (20,
    770255983), (21, 1249150122), (22, 1555081692), (23, 1996064986), (24, 2554220882), (25,
    2821834349), (26, 2952996808), (27, 3210313671), (28, 3336571891), (29, 3584528711), (30,
    113926993), (31, 338241895), (32, 666307205), (33, 773529912), (34, 1294757372), (35,
    1396182291), (36, 1695183700), (37, 1986661051), (38, 2177026350), (39, 2456956037), (40,
    2730485921), (41, 2820302411), (42, 3259730800), (43, 3345764771), (44, 3516065817), (45,
    3600352804), (46, 4094571909), (47, 275423344), (48, 430227734), (49, 506948616), (50,
    659060556), (51, 883997877), (52, 958139571), (53, 1322822218), (54, 1537002063), (55,
    1747873779), (56, 1955562222), (57, 2024104815), (58, 2227730452), (59, 2361852424), (60,
    2428436474), (61, 2756734187), (62, 3204031479), (63, 3329325298);

CREATE VIEW postrider_append AS
    SELECT id, key, topic, type, content_type, headers, payload FROM postrider_outbox;

-- Below: the first four bytes of the key's SHA-256. `m` is the padded message in hexadecimal; each
-- row of `step` is the state after one round, and after 64 of them the block is added to h0..h7.
-- SQLite has no XOR: (x | y) - (x & y). A rotation shifts the word written twice.
CREATE TRIGGER postrider_append_by_sql INSTEAD OF INSERT ON postrider_append
BEGIN
    -- In words, before the table's own checks refuse the same without any.
    SELECT CASE
        WHEN ifnull(NEW.key, '') = ''
            THEN RAISE(ABORT, 'key is empty; give it at least one character')
        WHEN length(CAST(NEW.key AS BLOB)) > 1024
            THEN RAISE(ABORT, 'key has more than 1,024 bytes')
        WHEN instr(CAST(NEW.key AS BLOB), x'00') > 0
            OR NEW.key GLOB
                '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'
            THEN RAISE(ABORT, 'key has a control character; remove it')
        WHEN ifnull(NEW.topic, '') = ''
            THEN RAISE(ABORT, 'topic is empty; give it at least one character')
        WHEN length(CAST(NEW.topic AS BLOB)) > 255
            THEN RAISE(ABORT, 'topic has more than 255 bytes')
        WHEN instr(CAST(NEW.topic AS BLOB), x'00') > 0
            OR NEW.topic GLOB
                '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'
            THEN RAISE(ABORT, 'topic has a control character; remove it')
        WHEN ifnull(NEW.type, '') = ''
            THEN RAISE(ABORT, 'type is empty; give it at least one character')
        WHEN length(CAST(NEW.type AS BLOB)) > 255
            THEN RAISE(ABORT, 'type has more than 255 bytes')
        WHEN instr(CAST(NEW.type AS BLOB), x'00') > 0
            OR NEW.type GLOB
                '*[' || char(1) || '-' || char(31) || char(127) || '-' || char(159) || ']*'
            THEN RAISE(ABORT, 'type has a control character; remove it')
        WHEN length(CAST(NEW.payload AS BLOB)) > 16777216
            THEN RAISE(ABORT, 'payload has more than 16,777,216 bytes; send a reference instead')
        WHEN NEW.id IS NOT NULL AND (typeof(NEW.id) <> 'blob' OR length(NEW.id) <> 16)
            THEN RAISE(ABORT, 'id is no UUID of 16 bytes; leave it out, or give a blob')
        WHEN NEW.headers IS NOT NULL AND NOT json_valid(NEW.headers)
            THEN RAISE(ABORT, 'headers are no JSON; give an object of texts')
        WHEN NEW.headers IS NOT NULL AND json_type(NEW.headers) <> 'object'
            THEN RAISE(ABORT, 'headers are no JSON object; give an object of texts')
    END;
    INSERT INTO postrider_outbox
        (partition, id, key, topic, type, content_type, headers, payload, at_ms)
    SELECT s.first_partition + ifnull(
        (WITH RECURSIVE
        digit(n) AS (VALUES (1), (2), (3), (4), (5), (6), (7), (8)),
        bytes(n) AS (SELECT length(CAST(NEW.key AS BLOB))),
        m(text, blocks) AS (
            SELECT hex(CAST(NEW.key AS BLOB)) || '80'
                || hex(zeroblob(((n + 8) / 64 + 1) * 64 - n - 9)) || printf('%016X', 8 * n),
                (n + 8) / 64 + 1 FROM bytes),
        step(b, t, h0, h1, h2, h3, h4, h5, h6, h7,
            sa, sb, sc, sd, se, sf, sg, sh,
            w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, w16) AS (
            SELECT
                0, 0, 1779033703, 3144134277, 1013904242, 2773480762, 1359893119, 2600822924,
                528734635, 1541459225, 1779033703, 3144134277, 1013904242, 2773480762,
                1359893119, 2600822924, 528734635, 1541459225, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                0, 0, 0, 0, (SELECT sum((instr('0123456789ABCDEF', substr(m.text, 8*(0) + d.n,
                1))-1) << (32-4*d.n)) FROM digit d)
            FROM m
            UNION ALL SELECT
                b + (t = 64), (t + 1)%65, iif(t < 64, h0, h0 + sa & 4294967295), iif(t < 64, h1,
                h1 + sb & 4294967295), iif(t < 64, h2, h2 + sc & 4294967295), iif(t < 64, h3, h3
                + sd & 4294967295), iif(t < 64, h4, h4 + se & 4294967295), iif(t < 64, h5, h5 +
                sf & 4294967295), iif(t < 64, h6, h6 + sg & 4294967295), iif(t < 64, h7, h7 + sh
                & 4294967295), iif(t < 64, (sh + (((((((se << 32 | se) >> 6) | ((se << 32 | se)
                >> 11)) - (((se << 32 | se) >> 6) & ((se << 32 | se) >> 11))) | ((se << 32 | se)
                >> 25)) - (((((se << 32 | se) >> 6) | ((se << 32 | se) >> 11)) - (((se << 32 |
                se) >> 6) & ((se << 32 | se) >> 11))) & ((se << 32 | se) >> 25))) & 4294967295)
                + ((se & sf) | ((~se & 4294967295) & sg)) + (SELECT k FROM postrider_sha256
                WHERE t = step.t) + w16 + (((((((sa << 32 | sa) >> 2) | ((sa << 32 | sa) >> 13))
                - (((sa << 32 | sa) >> 2) & ((sa << 32 | sa) >> 13))) | ((sa << 32 | sa) >> 22))
                - (((((sa << 32 | sa) >> 2) | ((sa << 32 | sa) >> 13)) - (((sa << 32 | sa) >> 2)
                & ((sa << 32 | sa) >> 13))) & ((sa << 32 | sa) >> 22))) & 4294967295) + ((sa &
                sb) | (sc & (sa | sb)))) & 4294967295, h0 + sa & 4294967295), iif(t < 64, sa, h1
                + sb & 4294967295), iif(t < 64, sb, h2 + sc & 4294967295), iif(t < 64, sc, h3 +
                sd & 4294967295), iif(t < 64, (sd + sh + (((((((se << 32 | se) >> 6) | ((se <<
                32 | se) >> 11)) - (((se << 32 | se) >> 6) & ((se << 32 | se) >> 11))) | ((se <<
                32 | se) >> 25)) - (((((se << 32 | se) >> 6) | ((se << 32 | se) >> 11)) - (((se
                << 32 | se) >> 6) & ((se << 32 | se) >> 11))) & ((se << 32 | se) >> 25))) &
                4294967295) + ((se & sf) | ((~se & 4294967295) & sg)) + (SELECT k FROM
                postrider_sha256 WHERE t = step.t) + w16) & 4294967295, h4 + se & 4294967295),
                iif(t < 64, se, h5 + sf & 4294967295), iif(t < 64, sf, h6 + sg & 4294967295),
                iif(t < 64, sg, h7 + sh & 4294967295), w2, w3, w4, w5, w6, w7, w8, w9, w10, w11,
                w12, w13, w14, w15, w16, CASE WHEN t = 64 THEN (SELECT
                sum((instr('0123456789ABCDEF', substr(m.text, 8*(16*(b + 1)) + d.n, 1))-1) <<
                (32-4*d.n)) FROM digit d) WHEN t < 15 THEN (SELECT
                sum((instr('0123456789ABCDEF', substr(m.text, 8*(16*b + t + 1) + d.n, 1))-1) <<
                (32-4*d.n)) FROM digit d) ELSE ((((((((w15 << 32 | w15) >> 17) | ((w15 << 32 |
                w15) >> 19)) - (((w15 << 32 | w15) >> 17) & ((w15 << 32 | w15) >> 19))) | (w15
                >> 10)) - (((((w15 << 32 | w15) >> 17) | ((w15 << 32 | w15) >> 19)) - (((w15 <<
                32 | w15) >> 17) & ((w15 << 32 | w15) >> 19))) & (w15 >> 10))) & 4294967295) +
                w10 + (((((((w2 << 32 | w2) >> 7) | ((w2 << 32 | w2) >> 18)) - (((w2 << 32 | w2)
                >> 7) & ((w2 << 32 | w2) >> 18))) | (w2 >> 3)) - (((((w2 << 32 | w2) >> 7) |
                ((w2 << 32 | w2) >> 18)) - (((w2 << 32 | w2) >> 7) & ((w2 << 32 | w2) >> 18))) &
                (w2 >> 3))) & 4294967295) + w1) & 4294967295 END
            FROM step, m WHERE b < m.blocks)
        SELECT h0 FROM step, m WHERE b = m.blocks), 0) % s.partition_count,
        ifnull(NEW.id, CAST(randomblob(6) || substr(
            x'404142434445464748494a4b4c4d4e4f', 1 + abs(random() % 16), 1) || randomblob(1)
            || substr(x'808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f'
                || x'a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf',
                1 + abs(random() % 64), 1) || randomblob(7) AS BLOB)),
        NEW.key, NEW.topic, NEW.type, ifnull(NEW.content_type, 'application/octet-stream'),
        NEW.headers, CAST(ifnull(NEW.payload, x'') AS BLOB),
        max(CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER),
            ifnull((SELECT at_ms FROM postrider_outbox ORDER BY seq DESC LIMIT 1), 0))
    FROM postrider_state s;
END;
