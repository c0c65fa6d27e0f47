-- Takes no lock that lasts.
select [position], published,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), updated_at)
        as updated_ms
from [changefeed].[checkpoint]
where consumer = @P1 and [partition] = @P2 and [position] is not null;
