//! Reliable, ordered events out of a database.
