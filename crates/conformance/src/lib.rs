//! One behavioural suite for stores, one for sources, one for sinks.
