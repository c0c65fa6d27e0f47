-- Locks the relay's own row.
delete from [changefeed].[relay] where group_name = @P1 and relay = @P2;
