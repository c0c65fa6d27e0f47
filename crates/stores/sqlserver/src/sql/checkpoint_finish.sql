-- Ends the work of consumer @P5 on the lease's partition; @P6: its successors as JSON, @P7: where
-- the consumer begins in them, 16 bytes each. Letters go to the successor that has their key now,
-- for nobody leases the old partition any more; one without a readable key goes to the first. The
-- fence as in checkpoint_advance.sql.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @next table (
    n int not null primary key,
    [partition] nvarchar(32) collate Latin1_General_BIN2 not null,
    index_no int not null,
    count_no int not null,
    [position] binary(16) not null);
insert into @next (n, [partition], index_no, count_no, [position])
select n, p, i, c, convert(binary(16), substring(@P7, n * 16 + 1, 16))
from openjson(@P6) with (n int '$.n', p nvarchar(32) '$.p', i int '$.i', c int '$.c');
begin transaction;
exec [changefeed].[fence] @P1, @P2, @P3, @P4;
update c set [position] = s.[position]
from [changefeed].[checkpoint] as c
join @next as s on s.[partition] = c.[partition]
where c.consumer = @P5 and c.[position] is null;
insert into [changefeed].[checkpoint]
    (consumer, [partition], [position], published, dropped, ended, lease_group, updated_at)
select @P5, s.[partition], s.[position], 0, 0, 0, null, @now
from @next as s
where not exists (select 1 from [changefeed].[checkpoint] as c
    where c.consumer = @P5 and c.[partition] = s.[partition]);
update [changefeed].[checkpoint] set ended = 1, updated_at = @now
where consumer = @P5 and [partition] = @P2 and ended = 0;
insert into [changefeed].[checkpoint]
    (consumer, [partition], [position], published, dropped, ended, lease_group, updated_at)
select @P5, @P2, null, 0, 0, 1, null, @now
where not exists (select 1 from [changefeed].[checkpoint]
    where consumer = @P5 and [partition] = @P2);
update d set [partition] = s.[partition]
from [changefeed].[dead_letter] as d
join @next as s on d.key_hash % s.count_no = s.index_no
where d.consumer = @P5 and d.[partition] = @P2;
update d set [partition] = s.[partition]
from [changefeed].[dead_letter] as d
join @next as s on s.n = 0
where d.consumer = @P5 and d.[partition] = @P2 and d.key_hash is null;
commit transaction;
