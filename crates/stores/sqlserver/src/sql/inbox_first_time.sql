-- In the caller's transaction: notes that consumer @P1 handles event @P2, and says whether it is
-- the first time (1). Of two deliveries at once one waits for the application lock @P3 until the
-- other's transaction has ended, and then sees its row. -1: no lock.
set nocount on;
declare @lock int, @first int = -1;
exec @lock = sp_getapplock @Resource = @P3, @LockMode = 'Exclusive', @LockOwner = 'Transaction',
    @LockTimeout = @P4;
if @lock >= 0
begin
    insert into [changefeed].[inbox] (consumer, id, seen_at)
    select @P1, @P2, sysutcdatetime()
    where not exists (select 1 from [changefeed].[inbox] where consumer = @P1 and id = @P2);
    set @first = @@rowcount;
end;
select @first as first_time;
