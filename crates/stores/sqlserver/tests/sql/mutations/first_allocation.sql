-- Allocates @count ULIDs of a time, beginning with @next_high and @next_low. @previous_high and
-- @previous_low: what continues the allocation before; null on a new shard. Called under the
-- shard's lock, which makes the read and the write one step, also where there is no row yet.
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
        values (@shard_id, @next_high, @next_low);
end;
