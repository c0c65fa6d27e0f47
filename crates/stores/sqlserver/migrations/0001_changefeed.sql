-- Changefeed: ordered, race-safe feeds of events inside a SQL Server database.
--
-- Run this file once, by sqlcmd, SSMS or any tool that ends a batch at a line "go". Running it
-- again upgrades procedures and functions and never changes a table. To use another schema,
-- replace [changefeed], with its brackets, by [yours] (at most 19 characters) in the whole file.
--
--     exec [changefeed].setup_feed @table = N'myservice.MyEvent', @outbox = 1;
--
-- Everything is decided under one lock: the application lock [changefeed]/FEED/SHARD, exclusive and
-- owned by the transaction. Whoever moves rows of a shard into its feed, prunes it, or numbers rows
-- as a serialised writer, takes it first and keeps it until commit. Writers of an outbox take none.
-- No row lock and no table hint is relied on.
--
-- Part 1: schema and tables          Part 4: templates of what each feed has
-- Part 2: where engines differ       Part 5: setting up, upgrading, tearing down
-- Part 3: ULIDs                      Part 6: upgrade of the feeds that exist

-- Tools differ in these, and a procedure keeps those under which it was made.
set ansi_nulls on;
set quoted_identifier on;
go

------------------------------------------------------------------------------------------------
-- Part 1: schema and tables
------------------------------------------------------------------------------------------------

if not exists (select 1 from sys.schemas where quotename(name) = N'[changefeed]')
    exec (N'create schema [changefeed]');
go

-- One row for each feed. Made together with the sequence from which order_sequence and the numbers
-- of serialised writers are drawn. All feeds share it: what matters is that it grows. Babelfish
-- caches for each session, which would break the order, so that it must not cache there.
if object_id(N'[changefeed].[feed]', N'U') is null
begin
    declare @sequence nvarchar(400) = N'create sequence [changefeed].[sequence] as bigint '
        + N'start with 1 increment by 1 '
        + case when serverproperty(N'BabelfishVersion') is null then N'cache 10000'
            else N'cache 1' end;
    exec sp_executesql @sequence;

    create table [changefeed].[feed] (
        feed_id        int           not null identity (1, 1) primary key,
        -- The T of its objects' names: schema.table, shortened where that is too long.
        name           nvarchar(100) not null unique,
        -- Quoted.
        table_name     nvarchar(520) not null,
        -- 1: outbox. 0: serialised writers.
        outbox         bit           not null,
        shard_key_type nvarchar(30)  not null,
        -- A time_hint further ahead of the clock is moved back to this far ahead.
        max_ahead_ms   bigint        not null,
        created_at     datetime2(3)  not null default (sysutcdatetime())
    );
end;
go

-- The text of every table, procedure and function that a feed has. {T}, {K} and so on are filled in
-- by make_feed; nothing else builds SQL.
if object_id(N'[changefeed].[template]', N'U') is null
    create table [changefeed].[template] (
        name       nvarchar(30)  not null primary key,
        -- Made in this order.
        position   int           not null,
        kind       nvarchar(10)  not null,
        outbox     bit           not null,
        serialized bit           not null,
        text       nvarchar(max) not null
    );
go

------------------------------------------------------------------------------------------------
-- Part 2: where engines differ. Three functions in two versions; everything else is common.
------------------------------------------------------------------------------------------------

drop function if exists [changefeed].[ulid];
drop function if exists [changefeed].[numbered_ulid];
drop function if exists [changefeed].[ulid_from_time];
drop function if exists [changefeed].[join_ulid];
drop function if exists [changefeed].[lock_token];
drop function if exists [changefeed].[token_holds];
go

-- On SQL Server and Azure SQL.
if serverproperty(N'BabelfishVersion') is null
begin
    -- Two halves as 16 bytes, big-endian.
    exec (N'create function [changefeed].[join_ulid](@high bigint, @low bigint) returns binary(16)
as
begin
    return convert(binary(16), convert(binary(8), @high) + convert(binary(8), @low));
end');

    -- What a lock_feed leaves behind, by which ulid knows that its transaction still runs.
    exec (N'create function [changefeed].[lock_token](@resource nvarchar(255))
returns nvarchar(255)
as
begin
    return convert(nvarchar(255), current_transaction_id());
end');

    exec (N'create function [changefeed].[token_holds](@token nvarchar(255)) returns bit
as
begin
    return case when @token = convert(nvarchar(255), current_transaction_id()) then 1 else 0 end;
end');
end;
go

-- On Babelfish, where + adds binaries as numbers and current_transaction_id() is missing.
if serverproperty(N'BabelfishVersion') is not null
begin
    -- By way of a uniqueidentifier, whose first eight bytes stand in another order in its text.
    exec (N'create function [changefeed].[join_ulid](@high bigint, @low bigint) returns binary(16)
as
begin
    declare @h binary(8) = convert(binary(8), @high), @l binary(8) = convert(binary(8), @low);
    declare @digits char(16) = ''0123456789ABCDEF'', @order char(16) = ''4321658701234567'';
    declare @text varchar(36) = '''', @i int = 1, @at int, @byte int;
    while @i <= 16
    begin
        set @at = convert(int, substring(@order, @i, 1));
        set @byte = case when @i <= 8 then convert(int, substring(@h, @at, 1))
            else convert(int, substring(@l, @at + 1, 1)) end;
        set @text = @text + substring(@digits, @byte / 16 + 1, 1)
            + substring(@digits, @byte % 16 + 1, 1)
            + case when @i in (4, 6, 8, 10) then ''-'' else '''' end;
        set @i = @i + 1;
    end;
    return convert(binary(16), convert(uniqueidentifier, @text));
end');

    exec (N'create function [changefeed].[lock_token](@resource nvarchar(255))
returns nvarchar(255)
as
begin
    return @resource;
end');

    exec (N'create function [changefeed].[token_holds](@token nvarchar(255)) returns bit
as
begin
    if applock_mode(''public'', @token, ''Transaction'') = ''Exclusive''
        return 1;
    return 0;
end');
end;
go

-- Wrong bytes would be silent, so that the file stops here where an engine joins them otherwise.
if [changefeed].[join_ulid](72623859790382856, -8637548506983584830)
        <> 0x0102030405060708882143658709ABC2
    or [changefeed].[join_ulid](109620222033985535, -4611686018427387905)
        <> 0x01857302DA88FFFFBFFFFFFFFFFFFFFF
    throw 77114, N'changefeed: this engine joins two numbers to other bytes than expected', 1;
go

------------------------------------------------------------------------------------------------
-- Part 3: ULIDs: 48 bits of milliseconds since 1970, 16 random bits, a counter of 64 bits
------------------------------------------------------------------------------------------------

drop function if exists [changefeed].[ulid_time];
drop function if exists [changefeed].[ulid_text];
drop function if exists [changefeed].[time_ms];
drop function if exists [changefeed].[ms_time];
drop function if exists [changefeed].[fresh_high];
drop function if exists [changefeed].[fresh_low];
drop procedure if exists [changefeed].[random_bytes];
drop procedure if exists [changefeed].[allocate_ulids];
go

create function [changefeed].[time_ms](@time datetime2(3)) returns bigint
as
begin
    return datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), @time);
end;
go

create function [changefeed].[ms_time](@ms bigint) returns datetime2(3)
as
begin
    return dateadd(millisecond, convert(int, @ms % 86400000),
        dateadd(day, convert(int, @ms / 86400000), convert(datetime2(3), '1970-01-01T00:00:00')));
end;
go

-- The upper half of a newer time: its milliseconds and the first two of ten random bytes.
create function [changefeed].[fresh_high](@time_ms bigint, @random binary(10)) returns bigint
as
begin
    return @time_ms * 65536 + convert(bigint, convert(int, substring(@random, 1, 2)));
end;
go

-- Where a newer time's counter begins: the other eight, bit 62 cleared, so that 2^62 numbers pass
-- before the sign could change. Negative ones come after positive ones, as their bytes do.
create function [changefeed].[fresh_low](@random binary(10)) returns bigint
as
begin
    declare @mask bigint = -4611686018427387905;
    return convert(bigint, substring(@random, 3, 8)) & @mask;
end;
go

-- The position from which everything of a time follows.
create function [changefeed].[ulid_from_time](@time datetime2(3)) returns binary(16)
as
begin
    return [changefeed].[join_ulid]([changefeed].[time_ms](@time) * 65536, 0);
end;
go

create function [changefeed].[ulid_time](@ulid binary(16)) returns datetime2(3)
as
begin
    return [changefeed].[ms_time](convert(bigint, substring(@ulid, 1, 8)) / 65536);
end;
go

-- The 26 characters of a ULID: Crockford's base 32.
create function [changefeed].[ulid_text](@ulid binary(16)) returns varchar(26)
as
begin
    declare @letters varchar(32) = '0123456789ABCDEFGHJKMNPQRSTVWXYZ';
    declare @text varchar(26) = '', @i int = 0, @bits int = 0, @have int = 2, @byte int = 1;
    -- 130 bits: two that are zero stand before the 128.
    while @i < 26
    begin
        while @have < 5
        begin
            set @bits = @bits * 256 + convert(int, substring(@ulid, @byte, 1));
            set @have = @have + 8;
            set @byte = @byte + 1;
        end;
        set @have = @have - 5;
        set @text = @text + substring(@letters,
            @bits / convert(int, power(2, @have)) + 1, 1);
        set @bits = @bits % convert(int, power(2, @have));
        set @i = @i + 1;
    end;
    return @text;
end;
go

-- Ten bytes that nobody can foretell: a hash of a random UUID, whose own fixed bits it hides.
create procedure [changefeed].[random_bytes] @random binary(10) output
as
begin
    set @random = convert(binary(10),
        substring(hashbytes('SHA2_256', convert(varbinary(16), newid())), 1, 10));
end;
go

-- Where count ULIDs of a time begin. @high, @low: what would continue the last allocation; null
-- before the first. A newer time begins at random bytes; an equal or earlier one keeps the time and
-- goes on counting, so that no clock can repeat or reorder a ULID. The next allocation continues at
-- @next_low + @count. Called under the shard's lock.
create procedure [changefeed].[allocate_ulids]
    @time_ms bigint, @count bigint, @random binary(10), @high bigint, @low bigint,
    @next_high bigint output, @next_low bigint output
as
begin
    declare @limit bigint = 9223372036854775807;
    -- A counter that passes its largest bytes would begin again below them. A newer time has one of
    -- its own.
    if @time_ms <= @high / 65536
        and (@low < 0 and @low >= 0 - @count or @low >= 0 and @low > @limit - @count)
        throw 77109, N'changefeed: 2^62 ULIDs in one millisecond; try again a moment later', 1;
    set @next_high = @high;
    set @next_low = @low;
    if @high is null or @time_ms > @high / 65536
    begin
        set @next_high = [changefeed].[fresh_high](@time_ms, @random);
        set @next_low = [changefeed].[fresh_low](@random);
    end;
end;
go

-- The ULID of a number drawn from [sequence] after a lock_feed. @base: the number drawn by that
-- lock_feed, whose own ULID it is; @high, @low: the range of 10^11 that it reserved. A function
-- can't throw: a conversion that fails carries the text, as error 245.
create function [changefeed].[numbered_ulid](
    @n bigint, @token nvarchar(255), @base bigint, @high bigint, @low bigint)
returns binary(16)
as
begin
    declare @refused varchar(200) = '', @held bit = 0;
    if @token is not null
        set @held = [changefeed].[token_holds](@token);
    if @held = 0
        set @refused = 'changefeed: call lock_feed first, in the same transaction';
    if @refused = '' and (@n is null or @n < @base or @n - @base >= 100000000000)
        set @refused = 'changefeed: this number was not drawn after lock_feed; '
            + 'give next value for the sequence of the feeds';
    if @refused <> ''
        set @base = convert(int, @refused);
    return [changefeed].[join_ulid](@high, @low + (@n - @base));
end;
go

-- The same for the feed that was locked last; [ulid:T] names one.
create function [changefeed].[ulid](@n bigint) returns binary(16)
as
begin
    return [changefeed].[numbered_ulid](@n,
        convert(nvarchar(255), session_context(N'[changefeed]/token')),
        convert(bigint, session_context(N'[changefeed]/base')),
        convert(bigint, session_context(N'[changefeed]/high')),
        convert(bigint, session_context(N'[changefeed]/low')));
end;
go

grant execute on [changefeed].[ulid] to public;
grant execute on [changefeed].[ulid_text] to public;
grant execute on [changefeed].[ulid_time] to public;
grant execute on [changefeed].[ulid_from_time] to public;
go

------------------------------------------------------------------------------------------------
-- Part 4: templates of what each feed has
--
-- {T} the feed's name within brackets, {T_text} within quotes; {S} the shard key's type,
-- {S_default} and {S_parameter} a default of 0 where it is a number; {outbox} the outbox table;
-- {K} the columns that travel, {O} the same of the outbox, {K_definitions} with their types;
-- {feed_id}; {max_ahead_ms}.
------------------------------------------------------------------------------------------------

delete from [changefeed].[template];
go

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'state', 1, N'table', 1, 1, N'
create table [changefeed].[state:{T}] (
    shard_id  {S}        not null primary key,
    -- The time and the 16 bits after it of the last ULID, and the counter of the next one.
    ulid_high bigint     not null,
    ulid_low  bigint     not null,
    -- The last record that was pruned.
    horizon   binary(16) null
);
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'outbox', 2, N'table', 1, 0, N'
create table {outbox} (
    shard_id       {S}          not null{S_default},
    order_sequence bigint       not null default (next value for [changefeed].[sequence]),
    time_hint      datetime2(3) not null default (sysutcdatetime()),
    {K_definitions},
    primary key (shard_id, order_sequence)
);
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'feed', 3, N'table', 1, 0, N'
create table [changefeed].[feed:{T}] (
    shard_id {S}        not null,
    ulid     binary(16) not null,
    {K_definitions},
    primary key (shard_id, ulid)
);
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'lock_shard', 11, N'procedure', 1, 1, N'
-- Takes the shard''s lock until the transaction ends, waiting for lock_timeout at most. It protects
-- the shard''s row of the state, the head of its feed, and which outbox rows have been moved.
create procedure [changefeed].[lock_shard:{T}] @shard_id {S}
as
begin
    declare @resource nvarchar(255)
        = N''[changefeed]/{T_text}/'' + convert(nvarchar(36), @shard_id);
    declare @granted int, @message nvarchar(2048);
    exec @granted = sp_getapplock @Resource = @resource, @LockMode = ''Exclusive'',
        @LockOwner = ''Transaction'';
    if @granted in (-1, -999)
    begin
        set @message = N''changefeed: the lock '' + @resource + N'' was not granted within ''
            + N''lock_timeout; try again, or look for the transaction that keeps it open'';
        throw 77103, @message, 1;
    end;
    if @granted < 0
    begin
        set @message = N''changefeed: gave up waiting for the lock '' + @resource
            + N'': a deadlock or a cancellation; roll back and try again'';
        throw 77104, @message, 1;
    end;
    return @granted;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'update_state', 12, N'procedure', 1, 1, N'
-- Allocates @count ULIDs of a time, beginning with @next_high and @next_low. @previous_high and
-- @previous_low: what continues the allocation before; null on a new shard. Called under the
-- shard''s lock, which makes the read and the write one step, also where there is no row yet.
create procedure [changefeed].[update_state:{T}]
    @shard_id {S}, @time_ms bigint, @count bigint, @random binary(10),
    @previous_high bigint output, @previous_low bigint output,
    @next_high bigint output, @next_low bigint output
as
begin
    set nocount on;
    set @previous_high = null;
    set @previous_low = null;
    select @previous_high = s.ulid_high, @previous_low = s.ulid_low
    from [changefeed].[state:{T}] as s where s.shard_id = @shard_id;
    exec [changefeed].[allocate_ulids] @time_ms, @count, @random, @previous_high, @previous_low,
        @next_high output, @next_low output;
    if @previous_high is not null
        update [changefeed].[state:{T}] set ulid_high = @next_high, ulid_low = @next_low + @count
        where shard_id = @shard_id;
    -- The first allocation counts, too: without + @count the next one would repeat it.
    if @previous_high is null
        insert into [changefeed].[state:{T}] (shard_id, ulid_high, ulid_low)
        values (@shard_id, @next_high, @next_low + @count);
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'seed_state', 13, N'procedure', 1, 0, N'
-- A shard that has records and no state: they were put into the feed by hand before the first read,
-- and what is moved must come behind them. Under the shard''s lock.
create procedure [changefeed].[seed_state:{T}] @shard_id {S}
as
begin
    set nocount on;
    insert into [changefeed].[state:{T}] (shard_id, ulid_high, ulid_low)
    select top (1) f.shard_id, convert(bigint, substring(f.ulid, 1, 8)),
        convert(bigint, substring(f.ulid, 9, 8)) + 1
    from [changefeed].[feed:{T}] as f
    where f.shard_id = @shard_id and not exists (
        select 1 from [changefeed].[state:{T}] as s where s.shard_id = @shard_id)
    order by f.ulid desc;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'move_outbox', 14, N'procedure', 1, 0, N'
-- Moves the shard''s oldest outbox rows into its feed, at most @pagesize, and gives each its ULID.
-- Under the shard''s lock, in READ COMMITTED: all that the select sees is committed. Rows are found
-- first and then deleted by key, so that rows of open transactions are not even looked at where
-- READ_COMMITTED_SNAPSHOT is on.
create procedure [changefeed].[move_outbox:{T}] @shard_id {S}, @pagesize int
as
begin
    set nocount on;
    declare @page table (
        shard_id       {S}        not null,
        order_sequence bigint     not null,
        row_no         bigint     not null,
        time_ms        bigint     not null,
        ulid           binary(16) null,
        primary key (shard_id, order_sequence)
    );
    declare @latest_ms bigint = [changefeed].[time_ms](sysutcdatetime()) + {max_ahead_ms};

    -- A scan that waits for an open writer is not one point in time: behind it may stand rows that
    -- were drawn after the commit of one that went in before it, where the scan has been already.
    -- So there are two: whatever was committed before a row up to @last was drawn had been
    -- committed before the second one began, and is seen by it.
    declare @last bigint;
    set @last = (select top (1) q.order_sequence from (
            select top (@pagesize) o.order_sequence from {outbox} as o
            where o.shard_id = @shard_id order by o.order_sequence
        ) as q order by q.order_sequence desc);

    -- The order beats the time: a row''s time is the largest hint up to it. One too far in the
    -- future would hold the shard''s time there, and one before 1970 has no ULID.
    insert into @page (shard_id, order_sequence, row_no, time_ms)
    select q.shard_id, q.order_sequence,
        row_number() over (order by q.order_sequence),
        max(q.time_ms) over (order by q.order_sequence rows unbounded preceding)
    from (
        select top (@pagesize) o.shard_id, o.order_sequence,
            case when [changefeed].[time_ms](o.time_hint) > @latest_ms then @latest_ms
                when [changefeed].[time_ms](o.time_hint) < 0 then 0
                else [changefeed].[time_ms](o.time_hint) end as time_ms
        from {outbox} as o
        where o.shard_id = @shard_id and o.order_sequence <= @last
        order by o.order_sequence
    ) as q;

    declare @count bigint, @time_ms bigint;
    select @count = count(*), @time_ms = max(p.time_ms) from @page as p;
    if @count = 0
        return;

    declare @random binary(10), @previous_high bigint, @previous_low bigint;
    declare @next_high bigint, @next_low bigint, @moved bigint, @deleted bigint;
    exec [changefeed].[seed_state:{T}] @shard_id;
    exec [changefeed].[random_bytes] @random output;
    exec [changefeed].[update_state:{T}] @shard_id, @time_ms, @count, @random,
        @previous_high output, @previous_low output, @next_high output, @next_low output;

    -- Rows that are not newer than the last ULID continue it; the others begin anew, each at its
    -- own time. Its counter may have come to its end even where the page''s last time is newer.
    if exists (select 1 from @page where time_ms <= @previous_high / 65536)
        and (@previous_low < 0 and @previous_low >= 0 - @count
            or @previous_low > 9223372036854775807 - @count)
        throw 77109,
            N''changefeed: 2^62 ULIDs in one millisecond; give the rows a newer time_hint'', 1;
    update @page set ulid = [changefeed].[join_ulid](
        case when time_ms > isnull(@previous_high / 65536, -1)
            then time_ms * 65536 + @next_high % 65536 else @previous_high end,
        case when time_ms > isnull(@previous_high / 65536, -1)
            then @next_low else @previous_low end + row_no - 1);

    -- In the order of the feed, so that a scan which waits for one of them sees all that follow.
    insert into [changefeed].[feed:{T}] (shard_id, ulid, {K})
    select @shard_id, p.ulid, {O}
    from @page as p
    inner join {outbox} as o
        on o.shard_id = p.shard_id and o.order_sequence = p.order_sequence
    order by p.ulid
    option (loop join, force order, maxdop 1);
    set @moved = @@rowcount;

    delete o
    from @page as p
    inner join {outbox} as o
        on o.shard_id = p.shard_id and o.order_sequence = p.order_sequence
    option (loop join, force order);
    set @deleted = @@rowcount;

    if @moved <> @count or @deleted <> @count
        throw 77110, N''changefeed: outbox rows changed while they were moved; try again'', 1;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'check_cursor', 15, N'procedure', 1, 0, N'
-- Refuses a cursor that reading would answer with records below it or with a gap: one beyond the
-- head, below the horizon, or that names no record and no plain time. Called behind the read whose
-- rows it vouches for, or under the shard''s lock: pruning in between shows as a later horizon.
create procedure [changefeed].[check_cursor:{T}] @shard_id {S}, @cursor binary(16)
as
begin
    set nocount on;
    if @cursor = 0x00000000000000000000000000000000
        return;
    declare @named bit = 0, @head binary(16), @horizon binary(16), @message nvarchar(2048);
    if substring(@cursor, 7, 10) = 0x00000000000000000000
        or exists (select 1 from [changefeed].[feed:{T}]
            where shard_id = @shard_id and ulid = @cursor)
        set @named = 1;
    set @head = (select top (1) f.ulid from [changefeed].[feed:{T}] as f
        where f.shard_id = @shard_id order by f.ulid desc);
    set @horizon = (select s.horizon from [changefeed].[state:{T}] as s
        where s.shard_id = @shard_id);
    if @horizon is not null and @cursor < @horizon
    begin
        set @message = N''changefeed: the cursor '' + [changefeed].[ulid_text](@cursor)
            + N'' lies below the retention horizon '' + [changefeed].[ulid_text](@horizon)
            + N'': what followed it was pruned; begin at the oldest (16 zero bytes) knowing the ''
            + N''gap, or at the horizon'';
        throw 77112, @message, 1;
    end;
    if @cursor = @horizon
        return;
    if @head is null
        set @head = @horizon;
    if @head is null or @cursor > @head
    begin
        set @message = N''changefeed: the cursor '' + [changefeed].[ulid_text](@cursor)
            + N'' lies beyond the head of the shard''
            + isnull(N'', '' + [changefeed].[ulid_text](@head), N'', which has no record'')
            + N'': it is of another shard, feed or database, or this one was restored; ask ''
            + N''position_at where to begin'';
        throw 77111, @message, 1;
    end;
    if @named = 0
    begin
        set @message = N''changefeed: the cursor '' + [changefeed].[ulid_text](@cursor)
            + N'' names no record of the shard and no plain time; give one that was read, or ask ''
            + N''position_at'';
        throw 77113, @message, 1;
    end;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'fill_read', 16, N'procedure', 1, 0, N'
-- The page after the cursor, as far as the feed has it, into the caller''s #read.
create procedure [changefeed].[fill_read:{T}]
    @shard_id {S}, @cursor binary(16), @pagesize int
as
begin
    set nocount on;
    insert into #read (ulid, {K})
    select top (@pagesize) ulid, {K}
    from [changefeed].[feed:{T}]
    where shard_id = @shard_id and ulid > @cursor
    order by ulid;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'read_feed', 17, N'procedure', 1, 0, N'
-- Reads the next page of a shard into the caller''s #read (ulid binary(16) not null, and the key
-- columns of the table). The largest ulid is the next cursor; a page without rows means: at the
-- head now. A short page is not the end. Begin at 16 zero bytes, or where position_at says.
create procedure [changefeed].[read_feed:{T}]
    @shard_id {S}, @cursor binary(16), @pagesize int = 1000
as
begin
    set nocount on;
    set xact_abort on;
    -- In a caller''s transaction, events would be given places that could be rolled back; and a
    -- snapshot older than the lock would show a feed that others have moved on.
    if @@trancount > 0
        throw 77100, N''changefeed: read_feed was called inside a transaction; commit first'', 1;
    declare @message nvarchar(2048) = N''changefeed: read_feed needs a shard, a cursor (16 zero ''
        + N''bytes to begin) and a pagesize of 1 to 10000'';
    if @shard_id is null or @cursor is null or isnull(@pagesize, 0) not between 1 and 10000
        throw 77102, @message, 1;
    set implicit_transactions off;
    set transaction isolation level read committed;
    begin try
        delete from #read;
        exec [changefeed].[fill_read:{T}] @shard_id, @cursor, @pagesize;
        -- A scan that waits for a row may have passed the places of others of its transaction:
        -- what is there now, up to the page''s last row, has to be the page.
        declare @last binary(16) = (select top (1) r.ulid from #read as r order by r.ulid desc);
        declare @seen int = (select count(*) from #read);
        declare @there int = (select count(*) from [changefeed].[feed:{T}]
            where shard_id = @shard_id and ulid > @cursor and ulid <= @last);
        if @seen > 0 and @seen = @there
        begin
            exec [changefeed].[check_cursor:{T}] @shard_id, @cursor;
        end
        else
        begin
            delete from #read;
            begin transaction;
            exec [changefeed].[lock_shard:{T}] @shard_id;
            exec [changefeed].[check_cursor:{T}] @shard_id, @cursor;
            -- Whoever had the lock before may have moved events: they come first. Whether the
            -- lock had to be waited for says nothing about it.
            exec [changefeed].[fill_read:{T}] @shard_id, @cursor, @pagesize;
            if not exists (select 1 from #read)
            begin
                exec [changefeed].[move_outbox:{T}] @shard_id, @pagesize;
                exec [changefeed].[fill_read:{T}] @shard_id, @cursor, @pagesize;
            end;
            commit transaction;
        end;
    end try
    begin catch
        if @@trancount > 0
            rollback transaction;
        delete from #read;
        throw;
    end catch;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'read_page', 18, N'procedure', 1, 0, N'
-- read_feed as one result set, in order.
create procedure [changefeed].[read_page:{T}]
    @shard_id {S}, @cursor binary(16), @pagesize int = 1000
as
begin
    set nocount on;
    if @@trancount > 0
        throw 77100, N''changefeed: read_page was called inside a transaction; commit first'', 1;
    set implicit_transactions off;
    select top (0) ulid, {K} into #read from [changefeed].[feed:{T}];
    exec [changefeed].[read_feed:{T}] @shard_id, @cursor, @pagesize;
    select ulid, {K} from #read order by ulid;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'position_at', 19, N'procedure', 1, 0, N'
-- The cursor from which all events of a time follow; the head where @time is null or lies after
-- it. What is still in the outbox comes after the head, whatever its time.
create procedure [changefeed].[position_at:{T}]
    @shard_id {S}, @time datetime2(3), @cursor binary(16) output
as
begin
    set nocount on;
    declare @head binary(16), @horizon binary(16);
    set @head = (select top (1) f.ulid from [changefeed].[feed:{T}] as f
        where f.shard_id = @shard_id order by f.ulid desc);
    set @horizon = (select s.horizon from [changefeed].[state:{T}] as s
        where s.shard_id = @shard_id);
    if @head is null
        set @head = @horizon;
    if @head is null
        set @head = 0x00000000000000000000000000000000;
    set @cursor = @head;
    if @time is not null and [changefeed].[ulid_from_time](@time) < @head
        set @cursor = [changefeed].[ulid_from_time](@time);
    exec [changefeed].[check_cursor:{T}] @shard_id, @cursor;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'prune_feed', 20, N'procedure', 1, 0, N'
-- Forgets the oldest records of a shard, at most @batch: those up to @upto, the cursor of your
-- slowest consumer, that are older than @older_than. @horizon: below it, cursors are refused.
-- Under the shard''s lock, so that no reader meets records that go and a horizon that stays.
create procedure [changefeed].[prune_feed:{T}]
    @shard_id {S}, @upto binary(16), @older_than datetime2(3) = null, @batch int = 1000,
    @deleted int = null output, @horizon binary(16) = null output
as
begin
    set nocount on;
    set xact_abort on;
    declare @message nvarchar(2048) = N''changefeed: prune_feed needs a shard, the cursor of the ''
        + N''slowest consumer and a batch of 1 to 10000'';
    if @shard_id is null or @upto is null or isnull(@batch, 0) not between 1 and 10000
        throw 77102, @message, 1;
    declare @last binary(16), @bound binary(16) = @upto;
    if @older_than is not null and [changefeed].[ulid_from_time](@older_than) < @bound
        set @bound = [changefeed].[ulid_from_time](@older_than);
    begin transaction;
    exec [changefeed].[lock_shard:{T}] @shard_id;
    set @last = (select top (1) q.ulid from (
            select top (@batch) f.ulid from [changefeed].[feed:{T}] as f
            where f.shard_id = @shard_id and f.ulid <= @bound order by f.ulid
        ) as q order by q.ulid desc);
    set @deleted = 0;
    if @last is not null
    begin
        exec [changefeed].[seed_state:{T}] @shard_id;
        delete from [changefeed].[feed:{T}] where shard_id = @shard_id and ulid <= @last;
        set @deleted = @@rowcount;
        update [changefeed].[state:{T}] set horizon = @last where shard_id = @shard_id;
    end;
    set @horizon = (select s.horizon from [changefeed].[state:{T}] as s
        where s.shard_id = @shard_id);
    commit transaction;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'lock_feed', 21, N'procedure', 0, 1, N'
-- Lets no other writer into a shard until this transaction ends, and reserves 10^11 ULIDs of one
-- time for it: @ulid is the first. More of them: this feed''s ulid(n), where n is the next value of
-- the sequence of the feeds, or @base + 1, @base + 2 and so on: not both behind one call. Calling
-- it again begins the next range. Call it before anything that is to be numbered.
create procedure [changefeed].[lock_feed:{T}]
    @shard_id {S}{S_parameter}, @time_hint datetime2(3) = null,
    @base bigint = null output, @ulid binary(16) = null output
as
begin
    set nocount on;
    set xact_abort on;
    if @@trancount = 0
        throw 77101, N''changefeed: lock_feed was called outside a transaction; begin one'', 1;
    if @shard_id is null
        throw 77102, N''changefeed: lock_feed needs a shard'', 1;
    exec [changefeed].[lock_shard:{T}] @shard_id;

    -- The clock is read behind the lock, so that it is not older than that of the writer before.
    declare @now_ms bigint = [changefeed].[time_ms](sysutcdatetime()), @time_ms bigint;
    set @time_ms = isnull([changefeed].[time_ms](@time_hint), @now_ms);
    if @time_ms > @now_ms + {max_ahead_ms}
        set @time_ms = @now_ms + {max_ahead_ms};
    if @time_ms < 0
        set @time_ms = 0;
    declare @random binary(10), @previous_high bigint, @previous_low bigint;
    declare @high bigint, @low bigint, @token nvarchar(255), @range bigint = 100000000000;
    exec [changefeed].[random_bytes] @random output;
    exec [changefeed].[update_state:{T}] @shard_id, @time_ms, @range, @random,
        @previous_high output, @previous_low output, @high output, @low output;

    select @base = next value for [changefeed].[sequence];
    set @ulid = [changefeed].[join_ulid](@high, @low);
    set @token = [changefeed].[lock_token](
        N''[changefeed]/{T_text}/'' + convert(nvarchar(36), @shard_id));
    -- For this feed''s own ulid, and for [ulid], which means the feed that was locked last.
    exec sp_set_session_context N''[changefeed]/{feed_id}/token'', @token;
    exec sp_set_session_context N''[changefeed]/{feed_id}/base'', @base;
    exec sp_set_session_context N''[changefeed]/{feed_id}/high'', @high;
    exec sp_set_session_context N''[changefeed]/{feed_id}/low'', @low;
    exec sp_set_session_context N''[changefeed]/token'', @token;
    exec sp_set_session_context N''[changefeed]/base'', @base;
    exec sp_set_session_context N''[changefeed]/high'', @high;
    exec sp_set_session_context N''[changefeed]/low'', @low;
end;
');

insert into [changefeed].[template] (name, position, kind, outbox, serialized, text)
values (N'ulid', 22, N'function', 0, 1, N'
-- The ULID of a number that was drawn after this feed''s lock_feed, in the same transaction.
create function [changefeed].[ulid:{T}](@n bigint) returns binary(16)
as
begin
    return [changefeed].[numbered_ulid](@n,
        convert(nvarchar(255), session_context(N''[changefeed]/{feed_id}/token'')),
        convert(bigint, session_context(N''[changefeed]/{feed_id}/base'')),
        convert(bigint, session_context(N''[changefeed]/{feed_id}/high'')),
        convert(bigint, session_context(N''[changefeed]/{feed_id}/low'')));
end;
');
go

------------------------------------------------------------------------------------------------
-- Part 5: setting up, upgrading, tearing down
------------------------------------------------------------------------------------------------

drop procedure if exists [changefeed].[setup_feed];
drop procedure if exists [changefeed].[teardown_feed];
drop procedure if exists [changefeed].[upgrade_feeds];
drop procedure if exists [changefeed].[grant_feed];
drop procedure if exists [changefeed].[make_feed];
drop procedure if exists [changefeed].[describe_key];
drop procedure if exists [changefeed].[find_table];
drop function if exists [changefeed].[filled];
drop function if exists [changefeed].[outbox_of];
go

-- A template with one placeholder filled in. A brace in a value must not look like a placeholder
-- to the next call: {~} stands for it until make_feed has filled in all of them. Compared bytewise.
create function [changefeed].[filled](
    @text nvarchar(max), @placeholder nvarchar(30), @value nvarchar(max))
returns nvarchar(max)
as
begin
    return replace(@text collate Latin1_General_BIN2,
        N'{' + @placeholder + N'}' collate Latin1_General_BIN2,
        replace(@value collate Latin1_General_BIN2, N'{' collate Latin1_General_BIN2, N'{~}'));
end;
go

-- The outbox table of a feed. The ready-made one, whose feed has a name without a dot, is [outbox].
create function [changefeed].[outbox_of](@name nvarchar(100)) returns nvarchar(400)
as
begin
    return case when @name = N'outbox' then N'[changefeed].[outbox]'
        else N'[changefeed].' + quotename(N'outbox:' + @name) end;
end;
go

-- The table that a caller means by 'schema.table', in brackets where a name has a dot, and the name
-- that its feed has. @object_id is null where there is none.
create procedure [changefeed].[find_table]
    @table nvarchar(520), @object_id int output, @table_name nvarchar(520) output,
    @name nvarchar(100) output
as
begin
    declare @schema nvarchar(128) = isnull(parsename(@table, 2), schema_name());
    declare @bare nvarchar(128) = parsename(@table, 1), @full nvarchar(257);
    declare @positive bigint = 9223372036854775807;
    set @table_name = quotename(@schema) + N'.' + quotename(@bare);
    set @object_id = null;
    if parsename(@table, 3) is null
        set @object_id = object_id(@table_name, N'U');
    set @full = @schema + N'.' + @bare;
    -- The longest name that is made of it has 28 characters before it. The dot keeps len from
    -- leaving out spaces at the end; bytes would be others on another engine.
    if len(@full + N'.') > 101
        set @full = left(@full, 80) + N'~' + right(N'0000000000000000000' + convert(nvarchar(20),
            convert(bigint, substring(hashbytes('SHA2_256', @full), 1, 8)) & @positive), 19);
    set @name = @full;
end;
go

-- The columns of a table's primary key, in its order, as they are declared in an outbox and a feed:
-- [a] int not null, [b] nvarchar(20) collate X not null.
create procedure [changefeed].[describe_key]
    @object_id int, @definitions nvarchar(max) output
as
begin
    set nocount on;
    declare @key table (
        position   int           not null primary key,
        name       nvarchar(128) not null,
        type       nvarchar(128) not null,
        bytes      int           not null,
        digits     int           not null,
        scale      int           not null,
        collation_name nvarchar(128) null
    );
    -- key_ordinal is the place in the key; column_id is the column's number in the table, which
    -- has nothing to do with its place in the index.
    insert into @key (position, name, type, bytes, digits, scale, collation_name)
    select ic.key_ordinal, c.name, isnull(t.name, N'a type of its own'), c.max_length,
        c.[precision], c.scale, c.collation_name
    from sys.indexes as i
    inner join sys.index_columns as ic
        on ic.object_id = i.object_id and ic.index_id = i.index_id
    inner join sys.columns as c
        on c.object_id = ic.object_id and c.column_id = ic.column_id
    left join sys.types as t
        on t.user_type_id = c.system_type_id
    where i.object_id = @object_id and i.is_primary_key = 1 and ic.key_ordinal > 0;

    declare @i int = 1, @n int = (select count(*) from @key), @message nvarchar(2048);
    declare @name nvarchar(128), @type nvarchar(128), @collation nvarchar(128);
    if @n = 0
        throw 71001, N'changefeed: the table has no primary key, by which a feed names its rows', 1;
    set @definitions = N'';
    while @i <= @n
    begin
        select @name = k.name, @collation = k.collation_name, @type = case
            when k.type in (N'char', N'varchar', N'binary', N'varbinary')
                then k.type + N'(' + convert(nvarchar(10), k.bytes) + N')'
            when k.type in (N'nchar', N'nvarchar')
                then k.type + N'(' + convert(nvarchar(10), k.bytes / 2) + N')'
            when k.type in (N'decimal', N'numeric')
                then k.type + N'(' + convert(nvarchar(10), k.digits) + N', '
                    + convert(nvarchar(10), k.scale) + N')'
            when k.type in (N'datetime2', N'datetimeoffset', N'time')
                then k.type + N'(' + convert(nvarchar(10), k.scale) + N')'
            -- A row's version, which is no version of the outbox row.
            when k.type in (N'timestamp', N'rowversion') then N'binary(8)'
            when k.type in (N'bit', N'tinyint', N'smallint', N'int', N'bigint', N'money',
                N'smallmoney', N'real', N'float', N'date', N'smalldatetime', N'datetime',
                N'uniqueidentifier') then k.type
            else null end
        from @key as k where k.position = @i;
        if @type is null
        begin
            set @message = N'changefeed: the key column ' + quotename(@name) + N' has a type that '
                + N'a feed can''t keep; give the table a key of plain types';
            throw 71002, @message, 1;
        end;
        if lower(@name) in (N'shard_id', N'ulid', N'order_sequence', N'time_hint')
        begin
            set @message = N'changefeed: the key column ' + quotename(@name) + N' has the name of '
                + N'a column that each feed has; rename it, or use serialised writers';
            throw 71003, @message, 1;
        end;
        set @definitions = @definitions + case when @i > 1 then N', ' else N'' end
            + quotename(@name) + N' ' + @type
            + case when @collation is null or @collation
                    = convert(nvarchar(128), databasepropertyex(db_name(), 'Collation'))
                then N'' else N' collate ' + @collation end
            + N' not null';
        set @i = @i + 1;
    end;
end;
go

-- Makes the tables of a feed that are missing, and its procedures and functions anew. The columns
-- that travel are those of its feed table: a key that was changed later changes no feed.
create procedure [changefeed].[make_feed]
    @name nvarchar(100), @definitions nvarchar(max) = null
as
begin
    set nocount on;
    declare @feed_id int, @outbox bit, @shard_key_type nvarchar(30), @max_ahead_ms bigint;
    select @feed_id = f.feed_id, @outbox = f.outbox, @shard_key_type = f.shard_key_type,
        @max_ahead_ms = f.max_ahead_ms
    from [changefeed].[feed] as f where f.name = @name;

    declare @columns nvarchar(max), @of_outbox nvarchar(max), @column nvarchar(300);
    declare @position int = 0, @kind nvarchar(10), @template nvarchar(30), @text nvarchar(max);
    declare @object nvarchar(400), @drop nvarchar(500), @i int, @message nvarchar(2048);
    while 1 = 1
    begin
        set @text = null;
        select top (1) @position = t.position, @kind = t.kind, @template = t.name, @text = t.text
        from [changefeed].[template] as t
        where t.position > @position and (t.outbox = 1 and @outbox = 1
            or t.serialized = 1 and @outbox = 0)
        order by t.position;
        if @text is null
            break;

        -- Tables come first, so that they are there now.
        if @kind <> N'table' and @columns is null and @outbox = 1
        begin
            set @i = 2;
            while 1 = 1
            begin
                set @column = null;
                select top (1) @i = c.column_id, @column = quotename(c.name)
                from sys.columns as c
                where c.object_id = object_id(N'[changefeed].' + quotename(N'feed:' + @name), N'U')
                    and c.column_id > @i
                order by c.column_id;
                if @column is null
                    break;
                set @of_outbox = isnull(@of_outbox + N', ', N'') + N'o.' + @column;
                set @columns = isnull(@columns + N', ', N'') + @column;
            end;
            if @columns is null
            begin
                set @message = N'changefeed: the feed table of ' + @name + N' is missing; '
                    + N'teardown_feed takes away what is left of the feed';
                throw 71006, @message, 1;
            end;
        end;

        set @text = [changefeed].[filled](@text, N'T', replace(@name, N']', N']]'));
        set @text = [changefeed].[filled](@text, N'T_text', replace(@name, N'''', N''''''));
        set @text = [changefeed].[filled](@text, N'outbox', [changefeed].[outbox_of](@name));
        set @text = [changefeed].[filled](@text, N'S', @shard_key_type);
        set @text = [changefeed].[filled](@text, N'S_default',
            case when @shard_key_type = N'uniqueidentifier' then N'' else N' default (0)' end);
        set @text = [changefeed].[filled](@text, N'S_parameter',
            case when @shard_key_type = N'uniqueidentifier' then N'' else N' = 0' end);
        set @text = [changefeed].[filled](@text, N'feed_id', convert(nvarchar(20), @feed_id));
        set @text = [changefeed].[filled](@text, N'max_ahead_ms',
            convert(nvarchar(20), @max_ahead_ms));
        set @text = [changefeed].[filled](@text, N'K_definitions', isnull(@definitions, N''));
        set @text = [changefeed].[filled](@text, N'K', isnull(@columns, N''));
        set @text = [changefeed].[filled](@text, N'O', isnull(@of_outbox, N''));
        set @text = replace(@text collate Latin1_General_BIN2,
            N'{~}' collate Latin1_General_BIN2, N'{');

        set @object = case when @template = N'outbox' then [changefeed].[outbox_of](@name)
            else N'[changefeed].' + quotename(@template + N':' + @name) end;
        if @kind <> N'table'
        begin
            set @drop = N'drop ' + @kind + N' if exists ' + @object;
            exec sp_executesql @drop;
        end;
        if @kind <> N'table'
            exec sp_executesql @text;
        if @kind = N'table' and object_id(@object, N'U') is null
        begin
            exec sp_executesql @text;
            -- Who writes many rows locks those and no table: that would stop all other writers.
            -- Babelfish has no such locks, and refuses the statement.
            set @drop = N'alter table ' + @object + N' set (lock_escalation = disable)';
            if serverproperty(N'BabelfishVersion') is null
                exec sp_executesql @drop;
        end;
    end;
end;
go

-- Makes a feed's roles and says what each may do. What a procedure does is its owner's right, by
-- ownership chaining: a reader may execute read_feed, and neither see nor change what it works on.
create procedure [changefeed].[grant_feed] @name nvarchar(100)
as
begin
    set nocount on;
    declare @outbox bit, @sql nvarchar(max), @i int;
    declare @schema nvarchar(128) = substring(N'[changefeed]', 2, len(N'[changefeed]') - 2);
    declare @writers nvarchar(128) = @schema + N'.writers:' + @name;
    declare @readers nvarchar(128) = @schema + N'.readers:' + @name;
    select @outbox = f.outbox from [changefeed].[feed] as f where f.name = @name;

    if not exists (select 1 from sys.database_principals where name = @writers)
    begin
        set @sql = N'create role ' + quotename(@writers);
        exec sp_executesql @sql;
    end;
    -- The default of order_sequence draws from it where there is no ownership chaining, and
    -- serialised writers do.
    set @sql = N'grant update on [changefeed].[sequence] to ' + quotename(@writers);
    exec sp_executesql @sql;
    if @outbox = 0
    begin
        set @sql = N'grant execute on [changefeed].' + quotename(N'lock_feed:' + @name) + N' to '
            + quotename(@writers) + N'; grant execute on [changefeed].'
            + quotename(N'ulid:' + @name) + N' to ' + quotename(@writers) + N';';
        exec sp_executesql @sql;
        return;
    end;
    set @sql = N'grant insert on ' + [changefeed].[outbox_of](@name) + N' to '
        + quotename(@writers) + N';';
    exec sp_executesql @sql;

    if not exists (select 1 from sys.database_principals where name = @readers)
    begin
        set @sql = N'create role ' + quotename(@readers);
        exec sp_executesql @sql;
    end;
    set @sql = N'grant execute on [changefeed].' + quotename(N'read_feed:' + @name) + N' to '
        + quotename(@readers) + N'; grant execute on [changefeed].'
        + quotename(N'read_page:' + @name) + N' to ' + quotename(@readers)
        + N'; grant execute on [changefeed].' + quotename(N'position_at:' + @name) + N' to '
        + quotename(@readers) + N';';
    exec sp_executesql @sql;

    -- The ready-made outbox is read by relays, too. Making a procedure anew takes its rights away.
    if @name <> N'outbox'
        or not exists (select 1 from sys.database_principals where name = @schema + N'.relay')
        return;
    set @i = 1;
    while @i <= 7
    begin
        set @sql = N'grant execute on [changefeed].' + quotename(case @i
            when 1 then N'read_feed:outbox' when 2 then N'read_page:outbox'
            when 3 then N'position_at:outbox' when 4 then N'prune_feed:outbox'
            -- A quiet partition's time moves on by these, under the partition's lock.
            when 5 then N'lock_shard:outbox' when 6 then N'update_state:outbox'
            else N'random_bytes' end) + N' to ' + quotename(@schema + N'.relay');
        exec sp_executesql @sql;
        set @i = @i + 1;
    end;
end;
go

-- Sets up a feed for a table, by its outbox or by serialised writers. Calling it again with the
-- same arguments upgrades the feed's procedures and leaves its tables as they are.
create procedure [changefeed].[setup_feed]
    @table nvarchar(520), @shard_key_type nvarchar(30) = null, @outbox bit = 0,
    @serialize_writers bit = 0, @max_ahead_ms bigint = null
as
begin
    set nocount on;
    set xact_abort on;
    declare @message nvarchar(2048), @granted int, @definitions nvarchar(max);
    declare @object_id int, @table_name nvarchar(520), @name nvarchar(100);
    declare @known nvarchar(100), @known_table nvarchar(520), @known_outbox bit;
    declare @known_type nvarchar(30);
    if @@trancount > 0
        throw 77100, N'changefeed: setup_feed was called inside a transaction; commit first', 1;
    set implicit_transactions off;
    set @outbox = isnull(@outbox, 0);
    if @outbox = isnull(@serialize_writers, 0)
        throw 55000, N'changefeed: give exactly one of @outbox = 1 and @serialize_writers = 1', 1;
    set @shard_key_type = lower(@shard_key_type);
    set @message = N'changefeed: @shard_key_type must be tinyint, smallint, int, bigint or '
        + N'uniqueidentifier';
    if isnull(@shard_key_type, N'int') not in (N'tinyint', N'smallint', N'int', N'bigint',
        N'uniqueidentifier')
        throw 71004, @message, 1;
    if isnull(@max_ahead_ms, 0) not between 0 and 31622400000
        throw 77102, N'changefeed: @max_ahead_ms must lie between 0 and a year', 1;
    exec [changefeed].[find_table] @table, @object_id output, @table_name output, @name output;
    if @object_id is null
    begin
        set @message = N'changefeed: there is no table ' + isnull(@table, N'null')
            + N', or you may not see it; give schema.table, each in brackets where it has a dot';
        throw 71000, @message, 1;
    end;
    if quotename(substring(N'[changefeed]', 2, len(N'[changefeed]') - 2) + N'.writers:' + @name)
        is null
        throw 77102, N'changefeed: the name of the feeds'' schema has more than 19 characters', 1;
    if @outbox = 1
        exec [changefeed].[describe_key] @object_id, @definitions output;

    begin try
        begin transaction;
        -- One set-up at a time: what is there is looked at and added to in one step.
        exec @granted = sp_getapplock @Resource = N'[changefeed]', @LockMode = 'Exclusive',
            @LockOwner = 'Transaction';
        if @granted < 0
            throw 77103, N'changefeed: another set-up is going on; try again', 1;
        select @known = f.name, @known_table = f.table_name, @known_outbox = f.outbox,
            @known_type = f.shard_key_type
        from [changefeed].[feed] as f where f.name = @name;
        if @known_table <> @table_name
        begin
            set @message = N'changefeed: the feed of ' + @known_table + N' has the same name; '
                + N'rename one of the tables';
            throw 71005, @message, 1;
        end;
        if @known_outbox <> @outbox or @known_type <> isnull(@shard_key_type, @known_type)
        begin
            set @message = N'changefeed: the feed is set up with '
                + case when @known_outbox = 1 then N'@outbox = 1' else N'@serialize_writers = 1' end
                + N', @shard_key_type = ' + @known_type + N'; teardown_feed removes it first';
            throw 55001, @message, 1;
        end;
        if @known is null
        begin
            set @known = @name;
            insert into [changefeed].[feed]
                (name, table_name, outbox, shard_key_type, max_ahead_ms)
            values (@name, @table_name, @outbox, isnull(@shard_key_type, N'int'),
                isnull(@max_ahead_ms, 60000));
        end;
        if @max_ahead_ms is not null
            update [changefeed].[feed] set max_ahead_ms = @max_ahead_ms where name = @known;
        exec [changefeed].[make_feed] @known, @definitions;
        -- Where that can be, nobody meets a procedure without its rights.
        if serverproperty(N'BabelfishVersion') is null
            exec [changefeed].[grant_feed] @known;
        commit transaction;
    end try
    begin catch
        if @@trancount > 0
            rollback transaction;
        throw;
    end catch;
    if serverproperty(N'BabelfishVersion') is not null
        exec [changefeed].[grant_feed] @known;
end;
go

-- Makes the procedures of every feed anew, from the templates of this file.
create procedure [changefeed].[upgrade_feeds]
as
begin
    set nocount on;
    set xact_abort on;
    declare @feed_id int = 0, @name nvarchar(100), @granted int;
    while 1 = 1
    begin
        -- A caller meets the old procedures or the new ones, never none, and on SQL Server none
        -- without its rights.
        begin transaction;
        exec @granted = sp_getapplock @Resource = N'[changefeed]', @LockMode = 'Exclusive',
            @LockOwner = 'Transaction';
        if @granted < 0
            throw 77103, N'changefeed: another set-up is going on; try again', 1;
        set @name = null;
        select top (1) @feed_id = f.feed_id, @name = f.name from [changefeed].[feed] as f
        where f.feed_id > @feed_id order by f.feed_id;
        if @name is not null
            exec [changefeed].[make_feed] @name;
        if @name is not null and serverproperty(N'BabelfishVersion') is null
            exec [changefeed].[grant_feed] @name;
        commit transaction;
        if @name is null
            break;
        if serverproperty(N'BabelfishVersion') is not null
            exec [changefeed].[grant_feed] @name;
    end;
end;
go

-- Takes a feed away: its procedures, its tables and what they hold, its roles. Your own table
-- stays. Refused while the outbox has rows that nobody has read, unless @drop_unread = 1.
create procedure [changefeed].[teardown_feed] @table nvarchar(520), @drop_unread bit = 0
as
begin
    set nocount on;
    set xact_abort on;
    declare @object_id int, @table_name nvarchar(520), @name nvarchar(100), @sql nvarchar(max);
    declare @known nvarchar(100), @outbox bit, @unread int = 0, @message nvarchar(2048);
    declare @position int, @kind nvarchar(10), @template nvarchar(30), @object nvarchar(400);
    declare @role nvarchar(128), @member nvarchar(128), @i int = 1, @granted int;
    declare @count_unread nvarchar(max);
    declare @schema nvarchar(128) = substring(N'[changefeed]', 2, len(N'[changefeed]') - 2);
    if @@trancount > 0
        throw 77100, N'changefeed: teardown_feed was called inside a transaction; commit first', 1;
    set implicit_transactions off;
    exec [changefeed].[find_table] @table, @object_id output, @table_name output, @name output;
    begin try
        begin transaction;
        -- Not while somebody sets it up or makes it anew.
        exec @granted = sp_getapplock @Resource = N'[changefeed]', @LockMode = 'Exclusive',
            @LockOwner = 'Transaction';
        if @granted < 0
            throw 77103, N'changefeed: a set-up is going on; try again', 1;
        select @known = f.name, @outbox = f.outbox from [changefeed].[feed] as f
        where f.name = @name and f.table_name = @table_name;
        if @known is null
        begin
            set @message = N'changefeed: no feed is set up for ' + isnull(@table, N'null');
            throw 71006, @message, 1;
        end;
        set @object = [changefeed].[outbox_of](@known);
        if @outbox = 1 and isnull(@drop_unread, 0) = 0 and object_id(@object, N'U') is not null
        begin
            -- The table's lock keeps writers out until it is gone.
            set @count_unread = N'select @unread = count(*) from ' + @object
                + N' with (tablockx, holdlock)';
            exec sp_executesql @count_unread, N'@unread int output', @unread output;
        end;
        set @position = 1000;
        while 1 = 1
        begin
            set @template = null;
            select top (1) @position = t.position, @kind = t.kind, @template = t.name
            from [changefeed].[template] as t where t.position < @position
            order by t.position desc;
            if @template is null
                break;
            -- Counted once more where a hint takes no lock.
            if @template = N'outbox' and @count_unread is not null
                exec sp_executesql @count_unread, N'@unread int output', @unread output;
            if @unread > 0
            begin
                set @message = N'changefeed: the outbox has ' + convert(nvarchar(20), @unread)
                    + N' rows that nobody has read; read them, or give @drop_unread = 1';
                throw 71007, @message, 1;
            end;
            set @sql = N'drop ' + @kind + N' if exists ' + case when @template = N'outbox'
                then [changefeed].[outbox_of](@known)
                else N'[changefeed].' + quotename(@template + N':' + @known) end;
            exec sp_executesql @sql;
        end;
        delete from [changefeed].[feed] where name = @known;
        commit transaction;
    end try
    begin catch
        if @@trancount > 0
            rollback transaction;
        throw;
    end catch;

    while @i <= 2
    begin
        set @role = @schema + case @i when 1 then N'.writers:' else N'.readers:' end + @known;
        while exists (select 1 from sys.database_principals where name = @role)
        begin
            -- A role that has members can't be dropped.
            set @member = (select top (1) m.name from sys.database_role_members as r
                inner join sys.database_principals as p on p.principal_id = r.role_principal_id
                inner join sys.database_principals as m on m.principal_id = r.member_principal_id
                where p.name = @role);
            set @sql = isnull(
                N'alter role ' + quotename(@role) + N' drop member ' + quotename(@member),
                N'drop role ' + quotename(@role));
            exec sp_executesql @sql;
        end;
        set @i = @i + 1;
    end;
end;
go

------------------------------------------------------------------------------------------------
-- Part 6: upgrade of the feeds that exist
------------------------------------------------------------------------------------------------

exec [changefeed].[upgrade_feeds];
go
