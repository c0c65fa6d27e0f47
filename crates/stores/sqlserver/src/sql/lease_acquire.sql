-- Locks the lease's row for the length of the procedure's own transaction.
declare @epoch bigint, @holder nvarchar(255), @remaining bigint;
exec [changefeed].[acquire_lease] @P1, @P2, @P3, @P4, @epoch output, @holder output,
    @remaining output;
select @epoch as epoch, @holder as holder, @remaining as remaining_ms;
