//! How an event becomes a message: plain and CloudEvents.
