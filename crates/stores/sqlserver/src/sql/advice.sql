-- How the database is set up, as far as it makes a difference here. Takes no lock.
select convert(int, is_read_committed_snapshot_on) as snapshots,
    convert(int, compatibility_level) as compatibility
from sys.databases
where name = db_name();
