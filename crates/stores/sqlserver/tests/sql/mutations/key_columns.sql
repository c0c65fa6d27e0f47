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
        on c.object_id = ic.object_id and c.column_id = ic.index_column_id
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
