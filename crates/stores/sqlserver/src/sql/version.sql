-- The version of the tables: 0 where there are none. Takes no lock.
declare @version int = 0;
if object_id(N'[changefeed].[migration]', N'U') is not null
    select @version = isnull(max(version), 0) from [changefeed].[migration];
select @version as version;
