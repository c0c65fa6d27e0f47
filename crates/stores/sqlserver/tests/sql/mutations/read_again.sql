-- Reads the next page of a shard into the caller's #read (ulid binary(16) not null, and the key
-- columns of the table). The largest ulid is the next cursor; a page without rows means: at the
-- head now. A short page is not the end. Begin at 16 zero bytes, or where position_at says.
create procedure [changefeed].[read_feed:{T}]
    @shard_id {S}, @cursor binary(16), @pagesize int = 1000
as
begin
    set nocount on;
    set xact_abort on;
    -- In a caller's transaction, events would be given places that could be rolled back; and a
    -- snapshot older than the lock would show a feed that others have moved on.
    if @@trancount > 0
        throw 77100, N'changefeed: read_feed was called inside a transaction; commit first', 1;
    declare @message nvarchar(2048) = N'changefeed: read_feed needs a shard, a cursor (16 zero '
        + N'bytes to begin) and a pagesize of 1 to 10000';
    if @shard_id is null or @cursor is null or isnull(@pagesize, 0) not between 1 and 10000
        throw 77102, @message, 1;
    set implicit_transactions off;
    set transaction isolation level read committed;
    begin try
        delete from #read;
        exec [changefeed].[fill_read:{T}] @shard_id, @cursor, @pagesize;
        -- A scan that waits for a row may have passed the places of others of its transaction:
        -- what is there now, up to the page's last row, has to be the page.
        declare @last binary(16) = (select top (1) r.ulid from #read as r order by r.ulid desc);
        declare @seen int = (select count(*) from #read);
        declare @there int = (select count(*) from [changefeed].[feed:{T}]
            where shard_id = @shard_id and ulid > @cursor and ulid <= @last);
        if @seen > 0 and @seen = @there
        begin
            exec [changefeed].[check_cursor:{T}] @shard_id, @cursor;
        end
        else
        begin
            delete from #read;
            begin transaction;
            declare @waited int, @head binary(16);
            exec @waited = [changefeed].[lock_shard:{T}] @shard_id;
            exec [changefeed].[check_cursor:{T}] @shard_id, @cursor;
            if @waited = 1
                exec [changefeed].[fill_read:{T}] @shard_id, @cursor, @pagesize;
            if not exists (select 1 from #read)
            begin
                set @head = (select top (1) f.ulid from [changefeed].[feed:{T}] as f
                    where f.shard_id = @shard_id order by f.ulid desc);
                if @head is null
                    set @head = @cursor;
                exec [changefeed].[move_outbox:{T}] @shard_id, @pagesize;
                exec [changefeed].[fill_read:{T}] @shard_id, @head, @pagesize;
            end;
            commit transaction;
        end;
    end try
    begin catch
        if @@trancount > 0
            rollback transaction;
        delete from #read;
        throw;
    end catch;
end;
