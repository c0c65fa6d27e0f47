-- Takes no lock that lasts.
select count_big(*) as letters
from [changefeed].[dead_letter]
where consumer = @P1 and [partition] = @P2 and state in ('parked', 'waiting', 'requeued');
