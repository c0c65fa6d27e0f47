//! Derives for domain events and entities.
