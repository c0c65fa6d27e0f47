//! Entities that raise events, saved together in one commit.
