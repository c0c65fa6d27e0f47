-- What consumer @P1 has to read: the first generation and every successor that it has begun,
-- without those that it has finished. Takes no lock.
select p.index_no, p.count_no
from [changefeed].[partition] as p
left join [changefeed].[checkpoint] as c
    on c.consumer = @P1
    and c.[partition] = convert(nvarchar(16), p.index_no) + N'/' + convert(nvarchar(15), p.count_no)
where isnull(c.ended, 0) = 0 and (p.generation = 0 or c.[position] is not null)
order by p.number;
