-- Which of the ids in @P1 (JSON) were appended before. Takes no lock.
select known.id
from [changefeed].[event_id] as known
where known.id in (
    select convert(uniqueidentifier, i) from openjson(@P1) with (i nvarchar(36) '$.i'));
