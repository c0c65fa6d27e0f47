-- One program at a time makes the tables; the session's lock, until it ends.
exec sp_getapplock @Resource = N'[changefeed]/init', @LockMode = 'Exclusive',
    @LockOwner = 'Session';
