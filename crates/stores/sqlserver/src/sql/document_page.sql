-- At most @P3 documents of type @P1 after number @P2. Takes no lock that lasts.
declare @now datetime2(3) = sysutcdatetime();
select top (@P3) id, partition_key, [type], data, ttl, convert(int, deleted) as deleted,
    convert(binary(8), etag) as etag,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), written_at)
        as written_ms,
    number
from [changefeed].[document]
where [type] = @P1 and number > @P2 and deleted = 0
    and (ttl < 0 or dateadd(second, convert(int, ttl), written_at) > @now)
order by number;
