-- Appends events in the caller's transaction. @P1: the events as JSON, without their payloads.
-- @P2: the payloads, one after the other. @P3: 1 leaves out events whose ids were appended before.
-- @P4: keys to lock, as JSON. Holds, until the transaction ends: the number of partitions as it
-- is, and the lock of each key, taken in the order of the keys, so that a key's order in the feed
-- is the order of its commits. An error rolls the caller's transaction back whole.
set nocount on;
set xact_abort on;
declare @events table (
    n int not null primary key,
    id uniqueidentifier not null,
    given bit not null,
    [key] nvarchar(1024) collate Latin1_General_BIN2 not null,
    key_hash bigint not null,
    topic nvarchar(255) collate Latin1_General_BIN2 not null,
    [type] nvarchar(255) collate Latin1_General_BIN2 not null,
    content_type nvarchar(255) collate Latin1_General_BIN2 not null,
    headers nvarchar(max) null,
    payload_at int not null,
    payload_bytes int not null);
insert into @events (n, id, given, [key], key_hash, topic, [type], content_type, headers,
    payload_at, payload_bytes)
select n, convert(uniqueidentifier, i), g, k, h, t, e, c, d, o, l
from openjson(@P1) with (
    n int '$.n',
    i nvarchar(36) '$.i',
    g bit '$.g',
    k nvarchar(1024) '$.k',
    h bigint '$.h',
    t nvarchar(255) '$.t',
    e nvarchar(255) '$.e',
    c nvarchar(255) '$.c',
    d nvarchar(max) '$.d',
    o int '$.o',
    l int '$.l');
declare @first int, @count int;
exec [changefeed].[begin_append] @first output, @count output;
declare @keys table (
    n int not null primary key,
    [key] nvarchar(1024) collate Latin1_General_BIN2 not null);
insert into @keys (n, [key])
select n, k from openjson(@P4) with (n int '$.n', k nvarchar(1024) '$.k');
declare @q int = 0, @key nvarchar(1024);
declare @locks int = (select count(*) from @keys);
while @q < @locks
begin
    select @key = [key] from @keys where n = @q;
    exec [changefeed].[lock_key] @key;
    set @q = @q + 1;
end;
declare @now datetime2(3) = sysutcdatetime();
if @P3 = 1
    delete from @events
    where given = 1 and id in (select known.id from [changefeed].[event_id] as known);
insert into [changefeed].[event_id] (id, appended_at)
select id, @now from @events where given = 1;
declare @n int = 0;
declare @end int = (select max(n) + 1 from @events);
while @n < @end
begin
    insert into [changefeed].[outbox] (shard_id, time_hint, id, [key], topic, [type], content_type,
        headers, payload, appended_at)
    select @first + convert(int, key_hash % @count), @now, id, [key], topic, [type], content_type,
        headers, substring(@P2, payload_at + 1, payload_bytes), @now
    from @events where n = @n;
    set @n = @n + 1;
end;
