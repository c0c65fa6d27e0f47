-- Writes the letters of @P6 (JSON; their payloads in @P7, their places in @P8, 16 bytes each) for
-- consumer @P5 under the lease of @P1 to @P4; one that is there already is left as it is. From its
-- first letter on the consumer is known and pins retention. The fence as in
-- checkpoint_advance.sql; the unique place of a letter keeps two of one apart.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @letters table (
    n int not null primary key,
    [position] binary(16) not null,
    state varchar(8) not null,
    reason nvarchar(max) not null,
    attempts bigint not null,
    appended_ms bigint not null,
    malformed nvarchar(max) null,
    key_hash bigint null,
    id nvarchar(36) null,
    [key] nvarchar(1024) null,
    topic nvarchar(255) null,
    [type] nvarchar(255) null,
    content_type nvarchar(255) null,
    headers nvarchar(max) null,
    payload_at int not null,
    payload_bytes int not null);
insert into @letters (n, [position], state, reason, attempts, appended_ms, malformed, key_hash, id,
    [key], topic, [type], content_type, headers, payload_at, payload_bytes)
select n, convert(binary(16), substring(@P8, n * 16 + 1, 16)), s, r, a, m, w, h, i, k, t, e, c, d,
    o, l
from openjson(@P6) with (
    n int '$.n',
    s varchar(8) '$.s',
    r nvarchar(max) '$.r',
    a bigint '$.a',
    m bigint '$.m',
    w nvarchar(max) '$.w',
    h bigint '$.h',
    i nvarchar(36) '$.i',
    k nvarchar(1024) '$.k',
    t nvarchar(255) '$.t',
    e nvarchar(255) '$.e',
    c nvarchar(255) '$.c',
    d nvarchar(max) '$.d',
    o int '$.o',
    l int '$.l');
declare @added int;
begin transaction;
exec [changefeed].[fence] @P1, @P2, @P3, @P4;
insert into [changefeed].[checkpoint]
    (consumer, [partition], [position], published, dropped, ended, lease_group, updated_at)
select @P5, @P2, null, 0, 0, 0, null, @now
where not exists (
    select 1 from [changefeed].[checkpoint] where consumer = @P5 and [partition] = @P2);
insert into [changefeed].[dead_letter]
    (consumer, [partition], [position], state, reason, attempts, parked_at, updated_at, appended_ms,
    malformed, key_hash, id, [key], topic, [type], content_type, headers, payload)
select @P5, @P2, n.[position], n.state, n.reason, n.attempts, @now, @now, n.appended_ms,
    n.malformed, n.key_hash, convert(uniqueidentifier, n.id), n.[key], n.topic, n.[type],
    n.content_type, n.headers, substring(@P7, n.payload_at + 1, n.payload_bytes)
from @letters as n
where not exists (select 1 from [changefeed].[dead_letter] as d
    where d.consumer = @P5 and d.[partition] = @P2 and d.[position] = n.[position])
order by n.n;
set @added = @@rowcount;
commit transaction;
select @added as added;
