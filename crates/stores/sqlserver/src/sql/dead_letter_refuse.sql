-- Parks letter @P5 again, or skips it (@P6), with reason @P7 and @P8 more attempts, under the
-- lease of @P1 to @P4. A person who gave it up meanwhile has the last word. The fence as in
-- checkpoint_advance.sql.
set nocount on;
declare @now datetime2(3) = sysutcdatetime();
begin transaction;
exec [changefeed].[fence] @P1, @P2, @P3, @P4;
update [changefeed].[dead_letter]
set state = case when state = 'skipped' then state else convert(varchar(8), @P6) end,
    reason = @P7,
    attempts = case when attempts + @P8 > 4294967295 then 4294967295 else attempts + @P8 end,
    updated_at = @now
where number = @P5 and [partition] = @P2;
commit transaction;
