-- In the caller's transaction: applies the operations of @P1 (JSON; contents and versions in @P2)
-- to the documents of logical partition @P3, in order, up to the first that can't be. The
-- application lock @P4 keeps all other commits to the partition away until the transaction ends,
-- so that what is read here is still so when it is written. Outcome: 0 done, 1 there already, 2
-- missing, 3 another version (then etag is the current one), 4 no lock.
set nocount on;
declare @now datetime2(3);
declare @operations table (
    n int not null primary key,
    op char(1) not null,
    id nvarchar(255) collate Latin1_General_BIN2 not null,
    [type] nvarchar(255) null,
    ttl bigint null,
    deleted bit null,
    data_at int not null,
    data_bytes int not null,
    wanted binary(8) null);
insert into @operations (n, op, id, [type], ttl, deleted, data_at, data_bytes, wanted)
select n, p, i, t, s, d, o, l,
    case when w is null then null else convert(binary(8), substring(@P2, w + 1, 8)) end
from openjson(@P1) with (
    n int '$.n',
    p char(1) '$.p',
    i nvarchar(255) '$.i',
    t nvarchar(255) '$.t',
    s bigint '$.s',
    d bit '$.d',
    o int '$.o',
    l int '$.l',
    w int '$.w');
declare @saved table (n int not null primary key, etag binary(8) not null);
declare @n int = 0, @outcome int = 0, @count int = (select count(*) from @operations);
declare @op char(1), @id nvarchar(255), @wanted binary(8), @etag binary(8);
declare @number bigint, @alive bit;
declare @lock int;
exec @lock = sp_getapplock @Resource = @P4, @LockMode = 'Exclusive', @LockOwner = 'Transaction';
if @lock < 0
    set @outcome = 4;
-- Behind the lock: a document that expired while it was waited for is no longer there.
set @now = sysutcdatetime();
while @n < @count and @outcome = 0
begin
    set @number = null;
    set @etag = null;
    select @op = op, @id = id, @wanted = wanted from @operations where n = @n;
    select @number = number, @etag = convert(binary(8), etag),
        @alive = case when ttl < 0 or dateadd(second, convert(int, ttl), written_at) > @now
            then 1 else 0 end
    from [changefeed].[document] where partition_key = @P3 and id = @id;
    if @number is not null and @alive = 0
    begin
        delete from [changefeed].[document] where number = @number;
        set @number = null;
        set @etag = null;
    end;
    if @op = 'c' and @number is not null
        set @outcome = 1;
    else if @op <> 'c' and @number is null
        set @outcome = 2;
    else if @op <> 'c' and @wanted is not null and @wanted <> @etag
        set @outcome = 3;
    else
    begin
        if @op = 'c'
            insert into [changefeed].[document]
                (partition_key, id, [type], data, ttl, deleted, written_at)
            select @P3, id, [type], substring(@P2, data_at + 1, data_bytes), ttl, deleted, @now
            from @operations where n = @n;
        if @op = 'r'
        begin
            update x set [type] = y.[type], data = substring(@P2, y.data_at + 1, y.data_bytes),
                ttl = y.ttl, deleted = y.deleted, written_at = @now
            from [changefeed].[document] as x
            join @operations as y on y.n = @n
            where x.number = @number;
            -- Expired documents are swept without the lock.
            if @@rowcount = 0
                set @outcome = 2;
        end;
        if @op = 'd'
        begin
            delete from [changefeed].[document] where number = @number;
            if @@rowcount = 0
                set @outcome = 2;
        end
        else
            select @etag = convert(binary(8), etag)
            from [changefeed].[document] where partition_key = @P3 and id = @id;
        if @outcome = 0
        begin
            insert into @saved (n, etag) values (@n, @etag);
            set @n = @n + 1;
        end;
    end;
end;
select @outcome as outcome, @n as n, @etag as etag;
select n, etag from @saved order by n;
