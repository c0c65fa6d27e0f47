-- Letters of consumer @P1 in partition @P2 that may be sent now, at most @P3 and about @P4 bytes
-- of them, one at least: of each key those before its first parked one, whose place the checkpoint
-- has passed. A letter that came from a partition which has ended has its place there, and in no
-- event of this one's feed. Takes no lock that lasts.
select d.number, d.consumer, d.[partition], d.[position], d.state, d.reason, d.attempts,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), d.parked_at)
        as parked_ms,
    datediff_big(millisecond, convert(datetime2(3), '1970-01-01T00:00:00'), d.updated_at)
        as updated_ms,
    d.appended_ms, d.malformed, d.id, d.[key], d.topic, d.[type], d.content_type, d.headers,
    d.payload
from [changefeed].[dead_letter] as d
join (
    select c.number, c.bytes, sum(c.bytes) over (order by c.number
        rows between unbounded preceding and current row) as total
    from (
        select top (@P3) l.number, convert(bigint, datalength(l.payload)) + 2048 as bytes
        from [changefeed].[dead_letter] as l
        where l.consumer = @P1 and l.[partition] = @P2 and l.state in ('waiting', 'requeued')
            and l.malformed is null
            and (l.[position] <= (select k.[position] from [changefeed].[checkpoint] as k
                    where k.consumer = @P1 and k.[partition] = @P2)
                or not exists (select 1
                    from [changefeed].[feed:outbox] as f
                    join [changefeed].[partition] as p on p.number = f.shard_id
                    where f.ulid = l.[position] and l.[partition] =
                        convert(nvarchar(16), p.index_no) + N'/'
                        + convert(nvarchar(15), p.count_no)))
            and not exists (select 1 from [changefeed].[dead_letter] as b
                where b.consumer = @P1 and b.[partition] = @P2 and b.key_hash = l.key_hash
                    and b.[key] = l.[key] and b.state = 'parked' and b.number < l.number)
        order by l.number) as c) as t
    on t.number = d.number
where t.total <= @P4 or t.total = t.bytes
order by d.number;
