-- The letter of consumer @P1 in partition @P2 at @P3. Takes no lock that lasts.
select d.number, d.consumer, d.[partition], d.[position], d.state, d.reason, d.attempts,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), d.parked_at)
        as parked_ms,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), d.updated_at)
        as updated_ms,
    d.appended_ms, d.malformed, d.id, d.[key], d.topic, d.[type], d.content_type, d.headers,
    d.payload
from [changefeed].[dead_letter] as d
where d.consumer = @P1 and d.[partition] = @P2 and d.[position] = convert(binary(16), @P3);
