-- Forgets at most @P4 ids of consumer @P1 that are older than @P2 ms and than the time @P3 (ms
-- since 1970, or null). Locks what it removes.
declare @now bigint = datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'),
    sysutcdatetime());
delete top (@P4) from [changefeed].[inbox]
where consumer = @P1
    and datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), seen_at)
        < @now - @P2
    and (@P3 is null
        or datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), seen_at) < @P3);
select convert(bigint, @@rowcount) as forgotten;
