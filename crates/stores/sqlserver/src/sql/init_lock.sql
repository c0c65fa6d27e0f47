-- One program at a time makes the tables; the session's lock, until it ends.
declare @granted int;
exec @granted = sp_getapplock @Resource = N'[changefeed]/init', @LockMode = 'Exclusive',
    @LockOwner = 'Session';
if @granted < 0
    throw 77103, N'changefeed: another program makes the tables; try again', 1;
