//! Outbox, feed and everything a relay keeps, in SQLite.
