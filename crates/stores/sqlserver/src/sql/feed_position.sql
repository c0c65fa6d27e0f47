-- Where reading partition @P1 of @P2 from time @P3 (ms since 1970) begins; its head where @P3 is
-- null. What has been committed is moved into the feed first, so that the head stands behind it;
-- how often is bounded, for writers may be faster. Takes the partition's application lock for each
-- page, in the procedure's own transaction.
set nocount on;
declare @number int, @head binary(16), @found int = 1, @rounds int = 0, @time datetime2(3);
select @number = number from [changefeed].[partition] where index_no = @P1 and count_no = @P2;
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
while @number is not null and @found > 0 and @rounds < 1000
begin
    set @head = isnull((select top (1) ulid from [changefeed].[feed:outbox]
        where shard_id = @number order by ulid desc),
        isnull((select horizon from [changefeed].[state:outbox] where shard_id = @number),
            0x00000000000000000000000000000000));
    exec [changefeed].[read_feed:outbox] @number, @head, 1000;
    set @found = (select count(*) from #read);
    set @rounds = @rounds + 1;
end;
drop table #read;
if @P3 is not null
    set @time = dateadd(millisecond, convert(int, @P3 % 86400000),
        dateadd(day, convert(int, @P3 / 86400000), convert(datetime2(3), '1970-01-01T00:00:00')));
if @number is not null
    exec [changefeed].[position_at:outbox] @number, @time, @head output;
select @number as number, @head as position;
