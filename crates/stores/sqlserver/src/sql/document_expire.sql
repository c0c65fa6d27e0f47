-- Removes at most @P1 documents that are past their time. Locks what it removes.
declare @now datetime2(3) = sysutcdatetime();
delete top (@P1) from [changefeed].[document]
where ttl > 0 and dateadd(second, convert(int, ttl), written_at) <= @now;
