-- Keeps relay @P2 of group @P1 on the list of live ones for @P3 ms, and returns the list. Locks
-- the relay's own row, and rows that are past their time.
declare @now datetime2(3) = sysutcdatetime();
declare @until datetime2(3) = dateadd(millisecond, @P3, @now);
begin transaction;
delete from [changefeed].[relay] where group_name = @P1 and expires_at <= @now;
update [changefeed].[relay] set expires_at = @until where group_name = @P1 and relay = @P2;
if @@rowcount = 0
    insert into [changefeed].[relay] (group_name, relay, expires_at) values (@P1, @P2, @until);
select relay from [changefeed].[relay] where group_name = @P1 order by relay;
commit transaction;
