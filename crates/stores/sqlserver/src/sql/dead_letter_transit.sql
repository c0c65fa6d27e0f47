-- Letters that match (as in dead_letter_list.sql) and are in state @P6 or @P7 go to state @P8.
-- Locks the letters that it changes; what matches is judged by the statement that changes it.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
update d set state = convert(varchar(8), @P8), updated_at = @now
from [changefeed].[dead_letter] as d
where (@P1 = N'[]' or d.number in (select i from openjson(@P1) with (i bigint '$.i')))
    and (@P2 = N'' or d.consumer = @P2)
    and (@P3 is null or (d.key_hash = @P3 and d.[key] = @P4))
    and (@P5 = N'' or d.state = @P5)
    and d.state in (@P6, @P7)
option (recompile);
select convert(bigint, @@rowcount) as changed;
