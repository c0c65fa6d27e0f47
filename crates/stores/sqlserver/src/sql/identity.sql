-- Which store this is. Takes no lock.
select store_id from [changefeed].[store];
