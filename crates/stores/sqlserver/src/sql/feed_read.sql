-- A page of partition @P1 of @P2 after position @P3: at most @P4 events and about @P5 bytes of
-- them, one at least. Three things are read in this order, and would be wrong in another: the
-- generation (events of an ended partition were all committed before it ended, so that an empty
-- page of one that is seen to have ended is its end), the time of the partition's last ULID (later
-- ones are not before it, so that an empty page reaches up to it), and the page. A plain time up
-- to that time and beyond the head is a quiet partition's position: it stands for the head. Takes
-- no lock unless nothing follows @P3 in the feed; then the partition's application lock, in the
-- procedure's own transaction.
set nocount on;
declare @number int, @ended int, @generation int, @state_ms bigint, @head binary(16);
declare @cursor binary(16) = convert(binary(16), @P3);
select @number = p.number, @generation = p.generation,
    @ended = case when p.generation < s.generation then 1 else 0 end
from [changefeed].[partition] as p
cross join [changefeed].[store] as s
where p.index_no = @P1 and p.count_no = @P2;
select @state_ms = ulid_high / 65536, @head = horizon
from [changefeed].[state:outbox] where shard_id = @number;
select @number as number, @generation as generation, @ended as ended, @state_ms as state_ms,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'),
        sysutcdatetime()) as now_ms;
create table #read (
    ulid binary(16) not null,
    id uniqueidentifier not null,
    [key] nvarchar(1024) collate Latin1_General_BIN2 not null,
    topic nvarchar(255) collate Latin1_General_BIN2 not null,
    [type] nvarchar(255) collate Latin1_General_BIN2 not null,
    content_type nvarchar(255) collate Latin1_General_BIN2 not null,
    headers nvarchar(max) collate Latin1_General_BIN2 null,
    payload varbinary(max) not null,
    appended_at datetime2(3) not null);
if @number is not null
begin
    if substring(@cursor, 7, 10) = 0x00000000000000000000
        and convert(bigint, substring(@cursor, 1, 6)) <= @state_ms
    begin
        set @head = isnull((select top (1) ulid from [changefeed].[feed:outbox]
            where shard_id = @number order by ulid desc),
            isnull(@head, 0x00000000000000000000000000000000));
        if @cursor > @head
            set @cursor = @head;
    end;
    exec [changefeed].[read_feed:outbox] @number, @cursor, @P4;
end;
select t.ulid,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), t.appended_at)
        as appended_ms,
    t.id, t.[key], t.topic, t.[type], t.content_type, t.headers, t.payload, t.found
from (
    select r.ulid, r.appended_at, r.id, r.[key], r.topic, r.[type], r.content_type, r.headers,
        r.payload, count(*) over () as found,
        sum(convert(bigint, datalength(r.payload)) + 2048) over (order by r.ulid
            rows between unbounded preceding and current row) as total
    from #read as r) as t
where t.total <= @P5 or t.total = convert(bigint, datalength(t.payload)) + 2048
order by t.ulid;
drop table #read;
