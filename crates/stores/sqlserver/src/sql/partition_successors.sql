-- Those that take over from partition @P1 of @P2 in generation @P3. Takes no lock.
select index_no, count_no
from [changefeed].[partition]
where generation = @P3 + 1 and index_no % @P2 = @P1
order by number;
