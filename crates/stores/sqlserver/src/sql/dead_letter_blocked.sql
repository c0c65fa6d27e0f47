-- Which of the keys of @P3 (JSON) have letters of consumer @P1 in partition @P2 that hold later
-- events back. Takes no lock that lasts.
select k.n
from openjson(@P3) with (n int '$.n', h bigint '$.h', k nvarchar(1024) '$.k') as k
where exists (select 1 from [changefeed].[dead_letter] as d
    where d.consumer = @P1 and d.[partition] = @P2 and d.key_hash = k.h
        and d.[key] = k.k collate Latin1_General_BIN2
        and d.state in ('parked', 'waiting', 'requeued'));
