set nocount on;
set xact_abort on;
set transaction isolation level read committed;
set lock_timeout 30000;
