-- The ready-made outbox, and all that a relay keeps beside it. Run it behind 0001_changefeed.sql,
-- with the same schema in place of [changefeed]; running it again changes no table. Then, once:
--
--     exec [changefeed].create_partitions @count = 8;
--
-- The outbox carries whole events, so that nobody joins. Its feed, named outbox, is moved, read and
-- pruned by the same procedures as every other feed; a shard is a partition's number.
--
-- Part 1: tables                       Part 4: leases
-- Part 2: checks of an event           Part 5: the outbox as a feed, roles
-- Part 3: partitions and appending

-- Tools differ in these, and a procedure keeps those under which it was made.
set ansi_nulls on;
set quoted_identifier on;
go

------------------------------------------------------------------------------------------------
-- Part 1: tables. Texts compare bytewise. Times are UTC.
------------------------------------------------------------------------------------------------

if object_id(N'[changefeed].[migration]', N'U') is null
    create table [changefeed].[migration] (
        version    int          not null primary key,
        applied_at datetime2(3) not null default (sysutcdatetime())
    );
go

if object_id(N'[changefeed].[outbox]', N'U') is null
begin
    create table [changefeed].[outbox] (
        shard_id       int              not null,
        order_sequence bigint           not null default (next value for [changefeed].[sequence]),
        time_hint      datetime2(3)     not null default (sysutcdatetime()),
        id             uniqueidentifier not null,
        [key]          nvarchar(1024)   collate Latin1_General_BIN2 not null,
        topic          nvarchar(255)    collate Latin1_General_BIN2 not null,
        type           nvarchar(255)    collate Latin1_General_BIN2 not null,
        content_type   nvarchar(255)    collate Latin1_General_BIN2 not null,
        -- A JSON object of texts.
        headers        nvarchar(max)    collate Latin1_General_BIN2 null,
        payload        varbinary(max)   not null,
        appended_at    datetime2(3)     not null default (sysutcdatetime()),
        primary key (shard_id, order_sequence)
    );
    if serverproperty(N'BabelfishVersion') is null
        exec (N'alter table [changefeed].[outbox] set (lock_escalation = disable)');
end;
go

if object_id(N'[changefeed].[feed:outbox]', N'U') is null
begin
    create table [changefeed].[feed:outbox] (
        shard_id     int              not null,
        ulid         binary(16)       not null,
        id           uniqueidentifier not null,
        [key]        nvarchar(1024)   collate Latin1_General_BIN2 not null,
        topic        nvarchar(255)    collate Latin1_General_BIN2 not null,
        type         nvarchar(255)    collate Latin1_General_BIN2 not null,
        content_type nvarchar(255)    collate Latin1_General_BIN2 not null,
        headers      nvarchar(max)    collate Latin1_General_BIN2 null,
        payload      varbinary(max)   not null,
        appended_at  datetime2(3)     not null,
        primary key (shard_id, ulid)
    );
    if serverproperty(N'BabelfishVersion') is null
        exec (N'alter table [changefeed].[feed:outbox] set (lock_escalation = disable)');
end;
go

-- Ids that callers gave, so that an event is not appended twice. Ids made here can't repeat.
if object_id(N'[changefeed].[event_id]', N'U') is null
begin
    create table [changefeed].[event_id] (
        id          uniqueidentifier not null primary key,
        appended_at datetime2(3)     not null default (sysutcdatetime())
    );
    create index event_id_age on [changefeed].[event_id] (appended_at);
end;
go

-- One row: which data this is, and the partitions that new events go to.
if object_id(N'[changefeed].[store]', N'U') is null
    create table [changefeed].[store] (
        only_row        int              not null primary key check (only_row = 1),
        store_id        uniqueidentifier not null,
        generation      int              not null,
        first_partition int              not null,
        partition_count int              not null check (partition_count between 1 and 1024)
    );
go

-- Partition index_no of count_no. It has ended when the store's generation is a later one.
if object_id(N'[changefeed].[partition]', N'U') is null
    create table [changefeed].[partition] (
        number     int not null primary key,
        index_no   int not null,
        count_no   int not null,
        generation int not null,
        unique (count_no, index_no)
    );
go

-- Kept when released or expired: epochs must never repeat.
if object_id(N'[changefeed].[lease]', N'U') is null
    create table [changefeed].[lease] (
        group_name  nvarchar(255) collate Latin1_General_BIN2 not null,
        [partition] nvarchar(32)  collate Latin1_General_BIN2 not null,
        holder      nvarchar(255) collate Latin1_General_BIN2 not null,
        epoch       bigint        not null,
        released    bit           not null,
        expires_at  datetime2(3)  not null,
        primary key (group_name, [partition])
    );
go

-- Live relays, by which partitions are shared out.
if object_id(N'[changefeed].[relay]', N'U') is null
    create table [changefeed].[relay] (
        group_name nvarchar(255) collate Latin1_General_BIN2 not null,
        relay      nvarchar(255) collate Latin1_General_BIN2 not null,
        expires_at datetime2(3)  not null,
        primary key nonclustered (group_name, relay)
    );
go

if object_id(N'[changefeed].[checkpoint]', N'U') is null
    create table [changefeed].[checkpoint] (
        consumer    nvarchar(255) collate Latin1_General_BIN2 not null,
        [partition] nvarchar(32)  collate Latin1_General_BIN2 not null,
        -- Null: only counted so far, no position yet.
        position    binary(16)    null,
        published   bigint        not null default (0),
        dropped     bigint        not null default (0),
        ended       bit           not null default (0),
        -- The group whose lease it was last advanced under.
        lease_group nvarchar(255) collate Latin1_General_BIN2 null,
        updated_at  datetime2(3)  not null default (sysutcdatetime()),
        primary key (consumer, [partition])
    );
go

if object_id(N'[changefeed].[dead_letter]', N'U') is null
begin
    create table [changefeed].[dead_letter] (
        number       bigint           not null identity (1, 1) primary key,
        consumer     nvarchar(255)    collate Latin1_General_BIN2 not null,
        [partition]  nvarchar(32)     collate Latin1_General_BIN2 not null,
        position     binary(16)       not null,
        state        varchar(8)       not null
            check (state in ('parked', 'waiting', 'requeued', 'skipped')),
        reason       nvarchar(max)    not null,
        attempts     bigint           not null,
        parked_at    datetime2(3)     not null default (sysutcdatetime()),
        updated_at   datetime2(3)     not null default (sysutcdatetime()),
        -- When the event was appended, in milliseconds since 1970.
        appended_ms  bigint           not null,
        -- Not null when the event could not be read; payload then holds its bytes as found.
        malformed    nvarchar(max)    null,
        -- By which a key is found: the key itself is too long for an index.
        key_hash     bigint           null,
        id           uniqueidentifier null,
        [key]        nvarchar(1024)   collate Latin1_General_BIN2 null,
        topic        nvarchar(255)    collate Latin1_General_BIN2 null,
        type         nvarchar(255)    collate Latin1_General_BIN2 null,
        content_type nvarchar(255)    collate Latin1_General_BIN2 null,
        headers      nvarchar(max)    collate Latin1_General_BIN2 null,
        payload      varbinary(max)   not null,
        unique (consumer, [partition], position)
    );
    create index dead_letter_key
        on [changefeed].[dead_letter] (consumer, [partition], key_hash, number);
    create index dead_letter_state on [changefeed].[dead_letter] (state, consumer, [partition]);
end;
go

-- Pages follow number, the order of creation. On Babelfish a rowversion needs
-- babelfishpg_tsql.escape_hatch_rowversion = 'ignore'; nothing else here needs documents.
if object_id(N'[changefeed].[document]', N'U') is null
begin
    create table [changefeed].[document] (
        number        bigint         not null identity (1, 1) primary key,
        partition_key nvarchar(255)  collate Latin1_General_BIN2 not null,
        id            nvarchar(255)  collate Latin1_General_BIN2 not null,
        type          nvarchar(255)  collate Latin1_General_BIN2 not null,
        data          varbinary(max) not null,
        -- Seconds, or -1 for ever.
        ttl           bigint         not null check (ttl = -1 or ttl > 0),
        deleted       bit            not null,
        written_at    datetime2(3)   not null default (sysutcdatetime()),
        etag          rowversion     not null,
        unique nonclustered (partition_key, id)
    );
    create index document_type on [changefeed].[document] (type, number);
    create index document_age on [changefeed].[document] (ttl, written_at);
end;
go

if object_id(N'[changefeed].[inbox]', N'U') is null
begin
    create table [changefeed].[inbox] (
        consumer nvarchar(255)    collate Latin1_General_BIN2 not null,
        id       uniqueidentifier not null,
        seen_at  datetime2(3)     not null default (sysutcdatetime()),
        primary key (consumer, id)
    );
    create index inbox_seen on [changefeed].[inbox] (consumer, seen_at);
end;
go

------------------------------------------------------------------------------------------------
-- Part 2: checks of an event
------------------------------------------------------------------------------------------------

drop procedure if exists [changefeed].[append];
drop procedure if exists [changefeed].[check_event];
drop function if exists [changefeed].[text_problem];
drop function if exists [changefeed].[headers_problem];
drop function if exists [changefeed].[key_hash];
drop function if exists [changefeed].[utf8];
drop function if exists [changefeed].[uuid7];
drop function if exists [changefeed].[sees_the_past];
go

-- The UTF-8 of a text, on SQL Server and Azure SQL. 2016 knows no other way. A half of a pair of
-- code units that stands alone becomes U+FFFD, as in every decoder.
if serverproperty(N'BabelfishVersion') is null
    exec (N'create function [changefeed].[utf8](@text nvarchar(1024)) returns varbinary(4096)
as
begin
    declare @raw varbinary(2048) = convert(varbinary(2048), @text);
    declare @bytes varbinary(4096) = 0x, @i int = 1, @c int, @d int;
    while @i < datalength(@raw)
    begin
        set @c = convert(int, substring(@raw, @i + 1, 1)) * 256
            + convert(int, substring(@raw, @i, 1));
        set @d = 0;
        if @c between 55296 and 56319 and @i + 2 < datalength(@raw)
            set @d = convert(int, substring(@raw, @i + 3, 1)) * 256
                + convert(int, substring(@raw, @i + 2, 1));
        set @i = @i + 2;
        if @d between 56320 and 57343
        begin
            set @c = 65536 + (@c - 55296) * 1024 + (@d - 56320);
            set @i = @i + 2;
        end;
        if @c between 55296 and 57343
            set @c = 65533;
        if @c < 128
            set @bytes = @bytes + convert(binary(1), @c);
        if @c between 128 and 2047
            set @bytes = @bytes + convert(binary(1), 192 + @c / 64);
        if @c between 2048 and 65535
            set @bytes = @bytes + convert(binary(1), 224 + @c / 4096);
        if @c > 65535
            set @bytes = @bytes + convert(binary(1), 240 + @c / 262144)
                + convert(binary(1), 128 + @c / 4096 % 64);
        if @c > 2047
            set @bytes = @bytes + convert(binary(1), 128 + @c / 64 % 64);
        if @c > 127
            set @bytes = @bytes + convert(binary(1), 128 + @c % 64);
    end;
    return @bytes;
end');
go

-- The stable hash of a key: the first four bytes of the SHA-256 of its UTF-8. The partition of a
-- key is its remainder.
if serverproperty(N'BabelfishVersion') is null
    exec (N'create function [changefeed].[key_hash](@key nvarchar(1024)) returns bigint
as
begin
    return convert(bigint, convert(varbinary(8),
        0x00000000 + substring(hashbytes(''SHA2_256'', [changefeed].[utf8](@key)), 1, 4)));
end');
go

-- On Babelfish a text is UTF-8 and hashed as such.
if serverproperty(N'BabelfishVersion') is not null
    exec (N'create function [changefeed].[key_hash](@key nvarchar(1024)) returns bigint
as
begin
    declare @hash varbinary(32) = hashbytes(''SHA2_256'', convert(varchar(4096), @key));
    return convert(bigint, convert(int, substring(@hash, 1, 1))) * 16777216
        + convert(int, substring(@hash, 2, 1)) * 65536
        + convert(int, substring(@hash, 3, 1)) * 256 + convert(int, substring(@hash, 4, 1));
end');
go

-- Whether the session reads from a snapshot that may be older than a lock which it has just got. A
-- session sees itself in the view, whatever its rights are.
if serverproperty(N'BabelfishVersion') is null
    exec (N'create function [changefeed].[sees_the_past]() returns bit
as
begin
    if exists (select 1 from sys.dm_exec_sessions as s
        where s.session_id = @@spid and s.transaction_isolation_level = 5)
        return 1;
    return 0;
end');
go

-- Babelfish has no way to tell that is known.
if serverproperty(N'BabelfishVersion') is not null
    exec (N'create function [changefeed].[sees_the_past]() returns bit
as
begin
    return 0;
end');
go

-- What is wrong with a text that travels beside the payload; null when nothing is. Bytes are those
-- of its UTF-8.
create function [changefeed].[text_problem](
    @what nvarchar(40), @text nvarchar(max), @bytes_allowed int, @tabs bit)
returns nvarchar(400)
as
begin
    declare @i int = 1, @n int = len(@text + N'.') - 1, @c int, @d int, @bytes int = 0;
    if @text is null or @n = 0
        return @what + N' is empty; give it at least one character';
    while @i <= @n and @bytes <= @bytes_allowed
    begin
        set @c = unicode(substring(@text, @i, 1));
        if (@c < 32 and not (@c = 9 and @tabs = 1)) or @c between 127 and 159
            return @what + N' has a control character at character ' + convert(nvarchar(10), @i)
                + N'; remove it';
        -- A pair is one character or two, as the collation has it; a half alone has no UTF-8.
        set @d = 0;
        if @c between 55296 and 56319 and @i < @n
            set @d = unicode(substring(@text, @i + 1, 1));
        if @c between 55296 and 57343 and @d not between 56320 and 57343
            return @what + N' has half of a surrogate pair at character '
                + convert(nvarchar(10), @i) + N'; remove it';
        set @bytes = @bytes + case when @c < 128 then 1 when @c < 2048 then 2
            when @c between 55296 and 57343 then 4 when @c < 65536 then 3 else 4 end;
        set @i = @i + case when @d > 0 then 2 else 1 end;
    end;
    if @bytes > @bytes_allowed
        return @what + N' has more than ' + convert(nvarchar(10), @bytes_allowed) + N' bytes';
    return null;
end;
go

-- What is wrong with headers: they are a JSON object of at most 64 texts under legal names that
-- differ in more than case.
create function [changefeed].[headers_problem](@headers nvarchar(max)) returns nvarchar(400)
as
begin
    declare @problem nvarchar(400);
    declare @allowed nvarchar(100) = N'!#$%&''*+-.^_`|~0123456789'
        + N'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz';
    declare @one table (n int not null identity (1, 1) primary key,
        name nvarchar(4000) collate Latin1_General_BIN2 not null, value nvarchar(max) null,
        type int not null);
    declare @i int = 1, @at int, @name nvarchar(4000), @value nvarchar(max), @type int;
    if isjson(@headers) = 0 or left(ltrim(@headers), 1) <> N'{'
        return N'headers are no JSON object; give an object of texts';
    insert into @one (name, value, type)
    select h.[key], h.value, h.type from openjson(@headers) as h;
    if (select count(*) from @one) > 64
        return N'there are more than 64 headers';
    if (select count(distinct lower(o.name)) from @one as o) < (select count(*) from @one)
        return N'two headers have the same name';
    while exists (select 1 from @one where n = @i)
    begin
        select @name = o.name, @value = o.value, @type = o.type from @one as o where o.n = @i;
        if @type <> 1
            return N'headers are no object of texts; quote the values';
        if len(@name + N'.') not between 2 and 129
            return N'a header name has more than 128 bytes, or none';
        set @at = 1;
        while @at < len(@name + N'.')
        begin
            if charindex(substring(@name, @at, 1) collate Latin1_General_BIN2,
                @allowed collate Latin1_General_BIN2) = 0
                return N'a header name has an illegal character; use letters, digits and '
                    + N'!#$%&''*+-.^_`|~';
            set @at = @at + 1;
        end;
        if @value <> N''
        begin
            set @problem = [changefeed].[text_problem](N'the value of a header', @value, 8192, 1);
            if @problem is not null
                return @problem;
        end;
        set @i = @i + 1;
    end;
    return null;
end;
go

-- A UUID of version 7: the milliseconds in front, the version, and the rest of a random one.
create function [changefeed].[uuid7](@time_ms bigint, @random uniqueidentifier)
returns uniqueidentifier
as
begin
    declare @text varchar(36) = convert(varchar(36), @random), @hex varchar(12) = '';
    declare @digits varchar(16) = '0123456789ABCDEF';
    while datalength(@hex) < 12
    begin
        set @hex = substring(@digits, convert(int, @time_ms % 16) + 1, 1) + @hex;
        set @time_ms = @time_ms / 16;
    end;
    return convert(uniqueidentifier, substring(@hex, 1, 8) + '-' + substring(@hex, 9, 4) + '-7'
        + substring(@text, 16, 21));
end;
go

-- Refuses an event that a reader would not take.
create procedure [changefeed].[check_event]
    @key nvarchar(max), @topic nvarchar(max), @type nvarchar(max), @content_type nvarchar(max),
    @headers nvarchar(max), @payload varbinary(max)
as
begin
    declare @problem nvarchar(2048);
    set @problem = [changefeed].[text_problem](N'key', @key, 1024, 0);
    if @problem is null
        set @problem = [changefeed].[text_problem](N'topic', @topic, 255, 0);
    if @problem is null
        set @problem = [changefeed].[text_problem](N'type', @type, 255, 0);
    if @problem is null
        set @problem = [changefeed].[text_problem](N'content_type', @content_type, 255, 0);
    if @problem is null and @headers is not null
        set @problem = [changefeed].[headers_problem](@headers);
    if @problem is null and (@payload is null or datalength(@payload) > 16777216)
        set @problem = N'payload is null or has more than 16777216 bytes; send a reference instead';
    if @problem is not null
    begin
        set @problem = N'changefeed: ' + @problem;
        throw 77102, @problem, 1;
    end;
end;
go

------------------------------------------------------------------------------------------------
-- Part 3: partitions and appending
------------------------------------------------------------------------------------------------

drop procedure if exists [changefeed].[raise_partitions];
drop procedure if exists [changefeed].[create_partitions];
drop procedure if exists [changefeed].[begin_append];
drop procedure if exists [changefeed].[lock_key];
drop procedure if exists [changefeed].[lock_name];
drop procedure if exists [changefeed].[acquire_lease];
drop procedure if exists [changefeed].[fence];
go

-- Takes an application lock for the caller's transaction. @text, which may be long, is hashed.
create procedure [changefeed].[lock_name]
    @what nvarchar(20), @text nvarchar(2000), @mode varchar(10)
as
begin
    declare @granted int, @message nvarchar(2048), @resource nvarchar(255);
    declare @hash varbinary(32) = hashbytes('SHA2_256', @text);
    set @resource = N'[changefeed]/' + @what
        + isnull(N'/' + convert(nvarchar(20), convert(bigint, substring(@hash, 1, 8))) + N'/'
            + convert(nvarchar(20), convert(bigint, substring(@hash, 9, 8))), N'');
    exec @granted = sp_getapplock @Resource = @resource, @LockMode = @mode,
        @LockOwner = 'Transaction';
    if @granted in (-1, -999)
    begin
        set @message = N'changefeed: the lock of ' + @what
            + N' was not granted within lock_timeout; roll back and try again';
        throw 77103, @message, 1;
    end;
    if @granted < 0
    begin
        set @message = N'changefeed: gave up waiting for the lock of ' + @what
            + N': a deadlock or a cancellation; roll back and try again';
        throw 77104, @message, 1;
    end;
end;
go

-- The first partitions. A second call does nothing.
create procedure [changefeed].[create_partitions] @count int
as
begin
    set nocount on;
    set xact_abort on;
    declare @i int = 0;
    if isnull(@count, 0) not between 1 and 1024
        throw 77202, N'changefeed: there can be 1 to 1024 partitions', 1;
    begin transaction;
    exec [changefeed].[lock_name] N'partitions', null, 'Exclusive';
    if not exists (select 1 from [changefeed].[store])
    begin
        while @i < @count
        begin
            insert into [changefeed].[partition] (number, index_no, count_no, generation)
            values (@i, @i, @count, 0);
            set @i = @i + 1;
        end;
        insert into [changefeed].[store]
            (only_row, store_id, generation, first_partition, partition_count)
        values (1, newid(), 0, 0, @count);
    end;
    commit transaction;
end;
go

-- Keeps the number of partitions as it is until the caller's transaction ends, and tells it.
-- Appends share this lock; raise_partitions takes it alone, so that no event lands in a partition
-- that has ended.
create procedure [changefeed].[begin_append] @first int output, @count int output
as
begin
    set nocount on;
    if @@trancount = 0
        throw 77101, N'changefeed: append was called outside a transaction; begin one', 1;
    -- The partitions that it would see might have ended before the lock was granted.
    if [changefeed].[sees_the_past]() = 1
        throw 77203, N'changefeed: append needs READ COMMITTED; it was called under SNAPSHOT', 1;
    exec [changefeed].[lock_name] N'partitions', null, 'Shared';
    set @first = null;
    select @first = s.first_partition, @count = s.partition_count from [changefeed].[store] as s;
    if @first is null
        throw 77202, N'changefeed: there are no partitions yet; call create_partitions once', 1;
end;
go

-- Lets no other transaction append to a key until the caller's ends: order_sequence is drawn behind
-- it, so that a key's order in the feed is the order of its commits.
create procedure [changefeed].[lock_key] @key nvarchar(1024)
as
begin
    set nocount on;
    if @@trancount = 0
        throw 77101, N'changefeed: append was called outside a transaction; begin one', 1;
    exec [changefeed].[lock_name] N'key', @key, 'Exclusive';
end;
go

-- Appends one event in the caller's transaction. An @id that the caller gives must be new, unless
-- @on_duplicate is 'ignore', which keeps the first event; else @id tells the one it was given. An
-- error ends the transaction. Holds the locks of the key and of a given id until it ends.
create procedure [changefeed].[append]
    @key nvarchar(max), @topic nvarchar(max), @type nvarchar(max), @payload varbinary(max),
    @content_type nvarchar(max) = N'application/octet-stream', @headers nvarchar(max) = null,
    @id uniqueidentifier = null output, @on_duplicate varchar(6) = 'fail'
as
begin
    set nocount on;
    -- Where one statement fails, none of the others may stand.
    set xact_abort on;
    declare @first int, @count int, @now datetime2(3), @key_text nvarchar(1024);
    declare @id_text nvarchar(36);
    exec [changefeed].[check_event] @key, @topic, @type, @content_type, @headers, @payload;
    if isnull(@on_duplicate, '') not in ('fail', 'ignore')
        throw 77102, N'changefeed: @on_duplicate is neither fail nor ignore', 1;
    exec [changefeed].[begin_append] @first output, @count output;
    set @key_text = @key;
    exec [changefeed].[lock_key] @key_text;
    if @id is not null
    begin
        -- Whoever appends the same id under another key is waited for, and then seen.
        set @id_text = convert(nvarchar(36), @id);
        exec [changefeed].[lock_name] N'id', @id_text, 'Exclusive';
    end;
    set @now = sysutcdatetime();
    if @id is not null
    begin
        if exists (select 1 from [changefeed].[event_id] where id = @id)
        begin
            if @on_duplicate = 'ignore'
                return;
            throw 77201, N'changefeed: an event with this id was appended before', 1;
        end;
        insert into [changefeed].[event_id] (id, appended_at) values (@id, @now);
    end;
    if @id is null
        set @id = [changefeed].[uuid7]([changefeed].[time_ms](@now), newid());
    insert into [changefeed].[outbox] (shard_id, time_hint, id, [key], topic, type, content_type,
        headers, payload, appended_at)
    values (@first + convert(int, [changefeed].[key_hash](@key_text) % @count), @now, @id, @key,
        @topic, @type, @content_type, @headers, @payload, @now);
end;
go

-- Ends all partitions and opens a multiple of them. Waits for open appends, and new ones wait for
-- it, for lock_timeout at most. A consumer reads an ended partition until a page is empty, then its
-- successors: those whose index_no leaves its index as the remainder of its count.
create procedure [changefeed].[raise_partitions] @count int
as
begin
    set nocount on;
    set xact_abort on;
    declare @generation int, @first int, @has int, @i int = 0, @message nvarchar(2048);
    if @@trancount > 0
        throw 77100, N'changefeed: raise_partitions was called inside a transaction; commit', 1;
    set implicit_transactions off;
    begin try
        begin transaction;
        exec [changefeed].[lock_name] N'partitions', null, 'Exclusive';
        select @generation = s.generation, @first = s.first_partition, @has = s.partition_count
        from [changefeed].[store] as s;
        if @has is null or isnull(@count, 0) not between @has + 1 and 1024 or @count % @has <> 0
        begin
            set @message = N'changefeed: ' + isnull(convert(nvarchar(10), @has), N'no')
                + N' partitions can''t become ' + isnull(convert(nvarchar(10), @count), N'null')
                + N'; give a multiple, at most 1024, so that every key moves as a whole';
            throw 77202, @message, 1;
        end;
        while @i < @count
        begin
            insert into [changefeed].[partition] (number, index_no, count_no, generation)
            values (@first + @has + @i, @i, @count, @generation + 1);
            set @i = @i + 1;
        end;
        update [changefeed].[store] set generation = @generation + 1,
            first_partition = @first + @has, partition_count = @count
        where only_row = 1;
        commit transaction;
    end try
    begin catch
        if @@trancount > 0
            rollback transaction;
        throw;
    end catch;
end;
go

------------------------------------------------------------------------------------------------
-- Part 4: leases, in the database's own time
------------------------------------------------------------------------------------------------

-- Takes a lease that is free, has expired, or is the caller's own; @epoch is null when another
-- relay holds it. The lease's application lock lets two first-ever callers come one after the
-- other; the update itself looks whether the lease may be taken, so that a renewal that comes in
-- between is not overlooked.
create procedure [changefeed].[acquire_lease]
    @group_name nvarchar(255), @partition nvarchar(32), @relay nvarchar(255), @ttl_ms bigint,
    @epoch bigint output, @holder nvarchar(255) output, @remaining_ms bigint output
as
begin
    set nocount on;
    set xact_abort on;
    declare @now datetime2(3), @until datetime2(3), @taken int, @text nvarchar(600);
    set @text = @group_name + N'/' + @partition;
    set @epoch = null;
    set @holder = null;
    begin transaction;
    exec [changefeed].[lock_name] N'lease', @text, 'Exclusive';
    set @now = sysutcdatetime();
    set @until = dateadd(millisecond, convert(int, @ttl_ms), @now);
    update [changefeed].[lease]
    set holder = @relay, epoch = epoch + 1, released = 0, expires_at = @until
    where group_name = @group_name and [partition] = @partition
        and (released = 1 or expires_at <= @now or holder = @relay);
    set @taken = @@rowcount;
    if @taken = 0
    begin
        insert into [changefeed].[lease]
            (group_name, [partition], holder, epoch, released, expires_at)
        select @group_name, @partition, @relay, 1, 0, @until
        where not exists (select 1 from [changefeed].[lease]
            where group_name = @group_name and [partition] = @partition);
        set @taken = @@rowcount;
    end;
    select @holder = l.holder, @epoch = case when @taken = 1 then l.epoch else null end,
        @remaining_ms = case
            when l.released = 1 or l.expires_at <= @now then 0
            else datediff_big(millisecond, @now, l.expires_at) end
    from [changefeed].[lease] as l
    where l.group_name = @group_name and l.[partition] = @partition;
    commit transaction;
end;
go

-- Refuses a write under a lease that is not the newest. The update of the lease's row, which
-- changes nothing, keeps everybody from taking it over until the caller's transaction ends.
create procedure [changefeed].[fence]
    @group_name nvarchar(255), @partition nvarchar(32), @holder nvarchar(255), @epoch bigint
as
begin
    set nocount on;
    declare @mine int, @message nvarchar(2048);
    if @@trancount = 0
        throw 77101, N'changefeed: fence was called outside a transaction', 1;
    update [changefeed].[lease] set epoch = epoch
    where group_name = @group_name and [partition] = @partition and holder = @holder
        and epoch = @epoch and released = 0;
    set @mine = @@rowcount;
    if @mine = 0
    begin
        set @message = N'changefeed: the lease of partition ' + @partition + N' under epoch '
            + convert(nvarchar(20), @epoch) + N' was taken over or released';
        throw 77200, @message, 1;
    end;
end;
go

------------------------------------------------------------------------------------------------
-- Part 5: the outbox as a feed, roles
------------------------------------------------------------------------------------------------

if not exists (select 1 from [changefeed].[feed] where name = N'outbox')
    insert into [changefeed].[feed] (name, table_name, outbox, shard_key_type, max_ahead_ms)
    values (N'outbox', N'[changefeed].[outbox]', 1, N'int', 60000);
go

-- [changefeed.writers:outbox] appends; [changefeed.readers:outbox] reads by hand;
-- [changefeed.relay] does what a relay does; [changefeed.documents] and [changefeed.inbox] are for
-- applications that keep documents here, or an inbox.
declare @schema nvarchar(128) = substring(N'[changefeed]', 2, len(N'[changefeed]') - 2);
declare @part nvarchar(20), @sql nvarchar(max), @i int = 1;
while @i <= 3
begin
    set @part = case @i when 1 then N'relay' when 2 then N'documents' else N'inbox' end;
    set @sql = N'create role ' + quotename(@schema + N'.' + @part);
    if not exists (select 1 from sys.database_principals where name = @schema + N'.' + @part)
        exec sp_executesql @sql;
    set @i = @i + 1;
end;
go

-- The feed's procedures, with the rights of its roles and of the relay's.
exec [changefeed].[upgrade_feeds];
go

-- What stands in this file alone.
declare @schema nvarchar(128) = substring(N'[changefeed]', 2, len(N'[changefeed]') - 2);
declare @grants table (n int not null primary key, role nvarchar(40) not null,
    what nvarchar(60) not null, object nvarchar(60) not null);
declare @i int = 1, @sql nvarchar(max);
insert into @grants (n, role, what, object) values
    (1, N'writers:outbox', N'execute', N'append'),
    (2, N'writers:outbox', N'execute', N'begin_append'),
    (3, N'writers:outbox', N'execute', N'lock_key'),
    (4, N'writers:outbox', N'select, insert', N'event_id'),
    (5, N'relay', N'execute', N'acquire_lease'),
    (6, N'relay', N'execute', N'fence'),
    (7, N'relay', N'select', N'store'),
    (8, N'relay', N'select', N'partition'),
    (9, N'relay', N'select', N'feed:outbox'),
    (10, N'relay', N'select', N'state:outbox'),
    (11, N'relay', N'select, delete', N'event_id'),
    (12, N'relay', N'select, insert, update, delete', N'lease'),
    (13, N'relay', N'select, insert, update, delete', N'relay'),
    (14, N'relay', N'select, insert, update, delete', N'checkpoint'),
    (15, N'relay', N'select, insert, update, delete', N'dead_letter'),
    (16, N'relay', N'select', N'outbox'),
    (17, N'relay', N'select', N'migration'),
    (18, N'documents', N'select, insert, update, delete', N'document'),
    (19, N'inbox', N'select, insert, delete', N'inbox'),
    (20, N'relay', N'select, delete', N'document'),
    (21, N'relay', N'select, delete', N'inbox'),
    -- Opening a store looks at these, whoever opens it.
    (22, N'writers:outbox', N'select', N'migration'),
    (23, N'writers:outbox', N'select', N'store'),
    (24, N'documents', N'select', N'migration'),
    (25, N'documents', N'select', N'store'),
    (26, N'inbox', N'select', N'migration'),
    (27, N'inbox', N'select', N'store');
while @i <= (select count(*) from @grants)
begin
    set @sql = null;
    select @sql = N'grant ' + g.what + N' on [changefeed].' + quotename(g.object) + N' to '
        + quotename(@schema + N'.' + g.role)
    from @grants as g where g.n = @i;
    exec sp_executesql @sql;
    set @i = @i + 1;
end;
go

if not exists (select 1 from [changefeed].[migration] where version = 2)
    insert into [changefeed].[migration] (version) values (2);
go
