-- Forgets at most @P6 events that every consumer has passed and that are older than @P5 ms; only
-- counts them where @P7 is 1. Under the lease of @P1 to @P4, if @P1 is not empty. A consumer that
-- has not begun in a partition pins all of it. Each partition has a short transaction of its own:
-- its application lock, which may have to be waited for, comes first; the lease's row, which other
-- calls wait for, is locked by the fence behind it. Who has passed what is read under both.
set nocount on;
declare @older datetime2(3) = dateadd(millisecond, 1 - convert(int, @P5 % 86400000),
    dateadd(day, 0 - convert(int, @P5 / 86400000), sysutcdatetime()));
declare @bound binary(16) = [changefeed].[ulid_from_time](@older);
declare @number int = -1, @next int, @partition nvarchar(32), @upto binary(16);
declare @left int = @P6, @batch int, @deleted int, @events bigint = 0, @more int = 0;
declare @horizon binary(16), @oldest datetime2(3), @ids int;
while 1 = 1
begin
    set @next = null;
    select top (1) @next = number,
        @partition = convert(nvarchar(16), index_no) + N'/' + convert(nvarchar(15), count_no)
    from [changefeed].[partition] where number > @number order by number;
    if @next is null
        break;
    if @left <= 0
    begin
        set @more = 1;
        break;
    end;
    set @number = @next;
    -- Where nothing is old enough, nobody is kept waiting.
    if not exists (select 1 from [changefeed].[feed:outbox]
        where shard_id = @number and ulid <= @bound)
        continue;
    if @P7 = 0
    begin
        begin transaction;
        exec [changefeed].[lock_shard:outbox] @number;
        if @P1 <> N''
            exec [changefeed].[fence] @P1, @P2, @P3, @P4;
    end;
    set @upto = (select top (1) q.[position] from (
        select isnull(case when c.ended = 1 then 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF
            else c.[position] end, 0x00000000000000000000000000000000) as [position]
        from (select distinct consumer from [changefeed].[checkpoint]) as n
        left join [changefeed].[checkpoint] as c
            on c.consumer = n.consumer and c.[partition] = @partition) as q
        order by q.[position]);
    set @deleted = 0;
    set @batch = case when @left > 10000 then 10000 else @left end;
    if @upto is not null and @P7 = 1
        set @deleted = (select count(*) from (
            select top (@batch) ulid from [changefeed].[feed:outbox]
            where shard_id = @number and ulid <= @upto and ulid <= @bound order by ulid) as q);
    if @upto is not null and @P7 = 0
        exec [changefeed].[prune_feed:outbox] @number, @upto, @older, @batch, @deleted output,
            @horizon output;
    if @P7 = 0
        commit transaction;
    if @deleted = @batch
        set @more = 1;
    set @left = @left - @deleted;
    set @events = @events + @deleted;
end;
-- Ids that callers gave are forgotten once all that is left of the outbox is an hour younger. What
-- is appended meanwhile is younger still.
if @P7 = 0 and @events > 0
begin
    set @oldest = @older;
    set @oldest = isnull((select min(q.appended_at) from (
        select (select top (1) f.appended_at from [changefeed].[feed:outbox] as f
            where f.shard_id = p.number order by f.ulid) as appended_at
        from [changefeed].[partition] as p) as q where q.appended_at < @oldest), @oldest);
    set @oldest = isnull((select min(q.appended_at) from (
        select (select top (1) o.appended_at from [changefeed].[outbox] as o with (readpast)
            where o.shard_id = p.number order by o.order_sequence) as appended_at
        from [changefeed].[partition] as p) as q where q.appended_at < @oldest), @oldest);
    set @ids = @P6;
    begin transaction;
    if @P1 <> N''
        exec [changefeed].[fence] @P1, @P2, @P3, @P4;
    delete top (@ids) from [changefeed].[event_id] where appended_at < dateadd(hour, -1, @oldest);
    commit transaction;
end;
set @horizon = (select top (1) horizon from [changefeed].[state:outbox]
    where horizon is not null order by horizon);
select @events as events, @more as more, @horizon as horizon;
