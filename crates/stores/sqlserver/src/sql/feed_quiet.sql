-- Moves the time of partition @P1 of @P2 on to now, unless something follows position @P3: every
-- later event has its place behind that time, and so a quiet partition's readers may stand there.
-- Under the partition's application lock until the transaction ends, so that nobody moves an event
-- in between.
set nocount on;
declare @number int, @now_ms bigint, @random binary(10);
declare @previous_high bigint, @previous_low bigint, @next_high bigint, @next_low bigint;
declare @cursor binary(16) = convert(binary(16), @P3);
select @number = number from [changefeed].[partition] where index_no = @P1 and count_no = @P2;
begin transaction;
exec [changefeed].[lock_shard:outbox] @number;
if not exists (select 1 from [changefeed].[feed:outbox] where shard_id = @number and ulid > @cursor)
begin
    set @now_ms = datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'),
        sysutcdatetime());
    exec [changefeed].[random_bytes] @random output;
    exec [changefeed].[update_state:outbox] @number, @now_ms, 0, @random, @previous_high output,
        @previous_low output, @next_high output, @next_low output;
end;
commit transaction;
select @next_high / 65536 as state_ms;
