-- Removes letters of @P6 (JSON) that the sink of consumer @P5 confirmed, and counts them as
-- published, under the lease of @P1 to @P4. The fence as in checkpoint_advance.sql.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
declare @gone bigint;
begin transaction;
exec [changefeed].[fence] @P1, @P2, @P3, @P4;
delete from [changefeed].[dead_letter]
where consumer = @P5 and [partition] = @P2
    and number in (select i from openjson(@P6) with (i bigint '$.i'));
set @gone = @@rowcount;
update [changefeed].[checkpoint] set published = published + @gone
where consumer = @P5 and [partition] = @P2;
if @@rowcount = 0
    insert into [changefeed].[checkpoint]
        (consumer, [partition], [position], published, dropped, ended, lease_group, updated_at)
    values (@P5, @P2, null, @gone, 0, 0, null, @now);
commit transaction;
