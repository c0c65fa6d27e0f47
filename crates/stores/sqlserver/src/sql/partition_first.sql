-- The first partitions of a new outbox; does nothing to one that has some. The procedure's own
-- transaction, under the application lock of the partitions.
exec [changefeed].[create_partitions] @P1;
