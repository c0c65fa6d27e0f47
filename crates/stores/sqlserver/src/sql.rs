//! Every text that the client sends, one file each in `sql/`.
//!
//! What lives here: the list. What does not: the tables and procedures, which stand in
//! `migrations/`.
//! Invariant: nothing else in this crate is SQL, so that a check of these files is one of all that
//! is sent; the files name the schema as `[changefeed]` (`names.rs`).

macro_rules! texts {
    ($($name:ident = $file:literal;)*) => {
        $(pub(crate) const $name: &str = include_str!(concat!("sql/", $file, ".sql"));)*

        /// All of them, with their names.
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, &str)] = &[$(($file, $name)),*];
    };
}

texts! {
    ADVICE = "advice";
    APPEND = "append";
    APPEND_KNOWN = "append_known";
    BEGIN = "begin";
    CHECKPOINT_ADVANCE = "checkpoint_advance";
    CHECKPOINT_FINISH = "checkpoint_finish";
    CHECKPOINT_PROGRESS = "checkpoint_progress";
    CHECKPOINT_READ = "checkpoint_read";
    CHECKPOINT_REMOVE = "checkpoint_remove";
    COMMIT = "commit";
    DEAD_LETTER_AT = "dead_letter_at";
    DEAD_LETTER_BLOCKED = "dead_letter_blocked";
    DEAD_LETTER_BLOCKING = "dead_letter_blocking";
    DEAD_LETTER_DISCARD = "dead_letter_discard";
    DEAD_LETTER_LIST = "dead_letter_list";
    DEAD_LETTER_PARK = "dead_letter_park";
    DEAD_LETTER_REFUSE = "dead_letter_refuse";
    DEAD_LETTER_RELEASED = "dead_letter_released";
    DEAD_LETTER_RESOLVE = "dead_letter_resolve";
    DEAD_LETTER_TRANSIT = "dead_letter_transit";
    DOCUMENT_EXPIRE = "document_expire";
    DOCUMENT_PAGE = "document_page";
    DOCUMENT_READ = "document_read";
    DOCUMENT_SAVE = "document_save";
    FEED_POSITION = "feed_position";
    FEED_QUIET = "feed_quiet";
    FEED_READ = "feed_read";
    IDENTITY = "identity";
    INBOX_FIRST_TIME = "inbox_first_time";
    INBOX_PRUNE = "inbox_prune";
    INIT_LOCK = "init_lock";
    LEASE_ACQUIRE = "lease_acquire";
    LEASE_HEARTBEAT = "lease_heartbeat";
    LEASE_JOIN = "lease_join";
    LEASE_LEAVE = "lease_leave";
    LEASE_LIST = "lease_list";
    LEASE_RELEASE = "lease_release";
    PARTITION_FIRST = "partition_first";
    PARTITION_RAISE = "partition_raise";
    PARTITION_SUCCESSORS = "partition_successors";
    PARTITIONS_OF_CONSUMER = "partitions_of_consumer";
    RETENTION_PRUNE = "retention_prune";
    ROLLBACK = "rollback";
    SESSION = "session";
    VERSION = "version";
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files of a folder are what the parser checks; the list is what is sent.
    #[test]
    fn every_file_is_in_the_list_and_says_what_it_locks() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/sql");
        let files = std::fs::read_dir(folder).expect("the folder is there").count();
        assert_eq!(ALL.len(), files);
        for (name, text) in ALL {
            let head = text.lines().take_while(|line| line.starts_with("--")).count();
            assert!(head > 0 || text.lines().count() < 5, "{name}: say what it locks");
            assert!(text.lines().all(|line| line.len() <= 100), "{name}: a long line");
        }
    }
}
