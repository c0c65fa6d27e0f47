-- Takes no lock that lasts.
declare @now datetime2(3) = sysutcdatetime();
select [partition], holder, epoch,
    case when released = 1 or expires_at <= @now then convert(bigint, 0)
        else datediff_big(millisecond, @now, expires_at) end as remaining_ms
from [changefeed].[lease]
where group_name = @P1
order by [partition];
