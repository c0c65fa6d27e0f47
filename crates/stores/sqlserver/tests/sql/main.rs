//! The T-SQL of the store: its texts through Microsoft's own parser, and what it does on a server.

#![expect(
    clippy::disallowed_methods,
    reason = "tests drive connections and tasks as an application does"
)]

mod behaviour;
mod calls;
mod mutations;
mod parser;
mod rules;
mod text;
