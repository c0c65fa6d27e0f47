-- Every consumer's standing. Rows of writers that are still open are passed over, not waited for,
-- where the server would wait: an event that has not been committed is not pending.
select c.consumer, c.[partition], c.[position], c.published, c.dropped,
    convert(int, c.ended) as ended,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), c.updated_at)
        as updated_ms,
    (select count_big(*) from [changefeed].[dead_letter] as d
        where d.consumer = c.consumer and d.[partition] = c.[partition]) as parked,
    case when c.ended = 1 then convert(bigint, 0) else
        (select count_big(*) from [changefeed].[feed:outbox] as f
            where f.shard_id = p.number and f.ulid > c.[position])
        + (select count_big(*) from [changefeed].[outbox] as o with (readpast)
            where o.shard_id = p.number) end as pending,
    case when c.ended = 1 then null else coalesce(
        (select top (1) datediff_big(millisecond,
                convert(datetime2(3), '1970-01-01T00:00:00'), f.appended_at)
            from [changefeed].[feed:outbox] as f
            where f.shard_id = p.number and f.ulid > c.[position] order by f.ulid),
        (select top (1) datediff_big(millisecond,
                convert(datetime2(3), '1970-01-01T00:00:00'), o.appended_at)
            from [changefeed].[outbox] as o with (readpast)
            where o.shard_id = p.number order by o.order_sequence)) end as oldest_ms
from [changefeed].[checkpoint] as c
left join [changefeed].[partition] as p
    on c.[partition] = convert(nvarchar(16), p.index_no) + N'/' + convert(nvarchar(15), p.count_no)
where c.[position] is not null
order by c.consumer, c.[partition];
