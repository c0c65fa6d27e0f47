-- Letters that match @P1 (numbers, JSON), @P2 (consumer), @P3 and @P4 (key) and @P5 (state), each
-- of them empty (@P3: null) for any, after number @P6, at most @P7. Takes no lock that lasts.
select top (@P7) d.number, d.consumer, d.[partition], d.[position], d.state, d.reason, d.attempts,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), d.parked_at)
        as parked_ms,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), d.updated_at)
        as updated_ms,
    d.appended_ms, d.malformed, d.id, d.[key], d.topic, d.[type], d.content_type, d.headers,
    d.payload
from [changefeed].[dead_letter] as d
where (@P1 = N'[]' or d.number in (select i from openjson(@P1) with (i bigint '$.i')))
    and (@P2 = N'' or d.consumer = @P2)
    and (@P3 is null or (d.key_hash = @P3 and d.[key] = @P4))
    and (@P5 = N'' or d.state = @P5)
    and d.number > @P6
order by d.number
option (recompile);
