//! Derives for domain events and entities.
//!
//! What lives here: `#[derive(DomainEvent)]` and `#[derive(Entity)]`, and the checks that make a
//! mistake a compile error that names the remedy. What does not: the traits (`unit-of-work`).
//! Invariant: the generated code names the façade `postrider`, or the crate `unit-of-work` where
//! only that one is a dependency, and nothing else.

mod domain_event;
mod entity;
mod input;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

/// Makes a struct a domain event.
///
/// On the struct: `#[event(topic = "orders", name = "OrderPlaced", version = 1)]`, and
/// `entity = Order` if it is raised on an entity. On exactly one field: `#[event(key)]`; the key is
/// the field's text. The struct must be `serde::Serialize` too.
#[proc_macro_derive(DomainEvent, attributes(event))]
pub fn derive_domain_event(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    domain_event::expand(&input).unwrap_or_else(|e| e.into_compile_error()).into()
}

/// Makes a struct an entity.
///
/// On the struct: `#[entity(type = "contact")]`, and `coalesce` if an action that is raised again
/// replaces the one that is still pending. On one field each: `#[entity(id)]`, and
/// `#[entity(pending)]` for the `PendingEvents<Self>`, which needs `#[serde(skip)]`; optionally
/// `#[entity(partition_key)]`. The struct must be `serde::Serialize` and `Deserialize` too.
#[proc_macro_derive(Entity, attributes(entity))]
pub fn derive_entity(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    entity::expand(&input).unwrap_or_else(|e| e.into_compile_error()).into()
}
