-- Waits for all open appends and holds new ones back for a moment; the procedure's own
-- transaction.
exec [changefeed].[raise_partitions] @P1;
