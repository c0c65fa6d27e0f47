-- Moves the shard's oldest outbox rows into its feed, at most @pagesize, and gives each its ULID.
-- Under the shard's lock, in READ COMMITTED: all that the select sees is committed. Rows are found
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
    set @last = 9223372036854775807;

    -- The order beats the time: a row's time is the largest hint up to it. One too far in the
    -- future would hold the shard's time there, and one before 1970 has no ULID.
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
    -- own time. Its counter may have come to its end even where the page's last time is newer.
    if exists (select 1 from @page where time_ms <= @previous_high / 65536)
        and (@previous_low < 0 and @previous_low >= 0 - @count
            or @previous_low > 9223372036854775807 - @count)
        throw 77109,
            N'changefeed: 2^62 ULIDs in one millisecond; give the rows a newer time_hint', 1;
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
        throw 77110, N'changefeed: outbox rows changed while they were moved; try again', 1;
end;
