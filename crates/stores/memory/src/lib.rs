//! A store in memory: the model that the real ones are compared with.
