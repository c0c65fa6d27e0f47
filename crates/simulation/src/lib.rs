//! The real relay in a seeded world with injected faults.
