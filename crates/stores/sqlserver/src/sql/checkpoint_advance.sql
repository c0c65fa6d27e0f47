-- Moves the checkpoint of consumer @P5 to @P6 and adds @P7 published events, under the lease of
-- @P1 to @P4. The fence keeps the lease's row until the transaction ends, so that nobody takes it
-- over in between; the checkpoint's row is compared by the statement that moves it.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @to binary(16) = convert(binary(16), @P6);
declare @moved int;
begin transaction;
exec [changefeed].[fence] @P1, @P2, @P3, @P4;
update [changefeed].[checkpoint]
set published = published + case when [position] = @to then 0 else @P7 end,
    [position] = @to, lease_group = @P1, updated_at = @now
where consumer = @P5 and [partition] = @P2 and ([position] is null or [position] <= @to);
set @moved = @@rowcount;
if @moved = 0
begin
    insert into [changefeed].[checkpoint]
        (consumer, [partition], [position], published, dropped, ended, lease_group, updated_at)
    select @P5, @P2, @to, @P7, 0, 0, @P1, @now
    where not exists (
        select 1 from [changefeed].[checkpoint] where consumer = @P5 and [partition] = @P2);
    set @moved = @@rowcount;
end;
commit transaction;
select @moved as moved;
