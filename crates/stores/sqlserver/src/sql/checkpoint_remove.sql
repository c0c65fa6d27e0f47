-- Forgets consumer @P1, unless a lease under which it advanced still runs: then it returns that
-- partition. Locks the consumer's rows.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @busy nvarchar(32), @gone int = 0;
begin transaction;
select top (1) @busy = c.[partition]
from [changefeed].[checkpoint] as c
join [changefeed].[lease] as l on l.group_name = c.lease_group and l.[partition] = c.[partition]
where c.consumer = @P1 and l.released = 0 and l.expires_at > @now
order by c.[partition];
if @busy is null
begin
    delete from [changefeed].[checkpoint] where consumer = @P1;
    set @gone = @gone + @@rowcount;
    delete from [changefeed].[dead_letter] where consumer = @P1;
    set @gone = @gone + @@rowcount;
end;
commit transaction;
select @busy as busy, @gone as gone;
