-- Locks the lease's row.
update [changefeed].[lease] set released = 1
where group_name = @P1 and [partition] = @P2 and holder = @P3 and epoch = @P4;
