-- What an error has rolled back already is left alone.
if @@trancount > 0 rollback transaction;
