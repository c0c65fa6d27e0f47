-- Deletes letters that match (as in dead_letter_list.sql) for good, and counts them as dropped.
-- Locks the letters that it deletes, and the rows that count them, until the transaction ends.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @gone table (
    consumer nvarchar(255) collate Latin1_General_BIN2 not null,
    [partition] nvarchar(32) collate Latin1_General_BIN2 not null);
begin transaction;
delete from [changefeed].[dead_letter]
output deleted.consumer, deleted.[partition] into @gone
where number in (select d.number from [changefeed].[dead_letter] as d
    where (@P1 = N'[]' or d.number in (select i from openjson(@P1) with (i bigint '$.i')))
    and (@P2 = N'' or d.consumer = @P2)
    and (@P3 is null or (d.key_hash = @P3 and d.[key] = @P4))
    and (@P5 = N'' or d.state = @P5));
update c set dropped = c.dropped + g.letters
from [changefeed].[checkpoint] as c
join (select consumer, [partition], count_big(*) as letters from @gone
        group by consumer, [partition]) as g
    on g.consumer = c.consumer and g.[partition] = c.[partition];
insert into [changefeed].[checkpoint]
    (consumer, [partition], [position], published, dropped, ended, lease_group, updated_at)
select g.consumer, g.[partition], null, 0, count_big(*), 0, null, @now
from @gone as g
where not exists (select 1 from [changefeed].[checkpoint] as c
    where c.consumer = g.consumer and c.[partition] = g.[partition])
group by g.consumer, g.[partition];
commit transaction;
select count_big(*) as dropped from @gone;
