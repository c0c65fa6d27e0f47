-- Document @P2 of logical partition @P1, if it is not past its time. Takes no lock that lasts.
declare @now datetime2(3) = sysutcdatetime();
select id, partition_key, [type], data, ttl, convert(int, deleted) as deleted,
    convert(binary(8), etag) as etag,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), written_at)
        as written_ms,
    number
from [changefeed].[document]
where partition_key = @P1 and id = @P2
    and (ttl < 0 or dateadd(second, convert(int, ttl), written_at) > @now);
