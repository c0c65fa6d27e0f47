-- Renews the leases of @P1 (JSON) for @P2 ms, and the places of their holders on the list of live
-- relays; returns which leases were renewed, the live relays of group @P3, and whether any dead
-- letter waits to be sent again. Locks the rows of the leases until the transaction ends: nobody
-- takes one over in between.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @until datetime2(3) = dateadd(millisecond, @P2, @now);
declare @held table (
    n int not null primary key,
    group_name nvarchar(255) collate Latin1_General_BIN2 not null,
    [partition] nvarchar(32) collate Latin1_General_BIN2 not null,
    holder nvarchar(255) collate Latin1_General_BIN2 not null,
    epoch bigint not null);
insert into @held (n, group_name, [partition], holder, epoch)
select n, g, p, h, e
from openjson(@P1) with (
    n int '$.n',
    g nvarchar(255) '$.g',
    p nvarchar(32) '$.p',
    h nvarchar(255) '$.h',
    e bigint '$.e');
begin transaction;
update l set expires_at = @until
from [changefeed].[lease] as l
join @held as h on h.group_name = l.group_name and h.[partition] = l.[partition]
    and h.holder = l.holder and h.epoch = l.epoch
where l.released = 0;
update r set expires_at = @until
from [changefeed].[relay] as r
join (select distinct group_name, holder from @held) as h
    on h.group_name = r.group_name and h.holder = r.relay;
select h.n
from @held as h
join [changefeed].[lease] as l on h.group_name = l.group_name and h.[partition] = l.[partition]
    and h.holder = l.holder and h.epoch = l.epoch
where l.released = 0;
select relay from [changefeed].[relay] where group_name = @P3 and expires_at > @now order by relay;
select case when exists (select 1 from [changefeed].[dead_letter] where state = 'requeued')
    then 1 else 0 end as requeued;
commit transaction;
