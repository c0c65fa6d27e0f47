//! `#[derive(DomainEvent)]`.
//!
//! What lives here: its attribute and what it generates. What does not: the checks that `Entity`
//! shares (`input.rs`).
//! Invariant: topic, name, version and key are all written down; none is guessed, because a guess
//! would change when the code is renamed.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{DeriveInput, Error, LitInt, LitStr, Result, Type};

use crate::input::{checked_text, marked_field, named_fields, our_crate, set_once};

#[derive(Default)]
struct Attributes {
    topic: Option<LitStr>,
    name: Option<LitStr>,
    version: Option<LitInt>,
    entity: Option<Type>,
}

pub(crate) fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let fields = named_fields(input, "DomainEvent")?;
    let attributes = attributes(input)?;
    let example = || {
        format!("for example `#[event(topic = \"…\", name = \"{}\", version = 1)]`", input.ident)
    };
    let missing = |what: &str| {
        Error::new_spanned(&input.ident, format!("event without a {what}; add it, {}", example()))
    };
    let topic = attributes.topic.ok_or_else(|| missing("topic"))?;
    let name = attributes.name.ok_or_else(|| missing("name"))?;
    let version = attributes.version.ok_or_else(|| missing("version"))?;
    checked_text("topic", &topic)?;
    checked_text("name", &name)?;
    if version.base10_parse::<u32>()? == 0 {
        return Err(Error::new_spanned(version, "versions begin at 1"));
    }
    let key = marked_field(fields, "event", "key", &["key"])?.ok_or_else(|| {
        Error::new_spanned(
            &input.ident,
            "event without a key; put `#[event(key)]` on the field whose value orders it",
        )
    })?;
    let root = our_crate()?;
    let ident = &input.ident;
    let key_ident = &key.ident;
    let (generics, type_generics, conditions) = input.generics.split_for_impl();
    let key_text =
        quote_spanned!(key.ty.span()=> ::std::string::ToString::to_string(&self.#key_ident));
    let of_entity = attributes.entity.map(|entity| {
        quote!(impl #generics #root::EventOf<#entity> for #ident #type_generics #conditions {})
    });
    Ok(quote! {
        impl #generics #root::DomainEvent for #ident #type_generics #conditions {
            const TYPE: &'static str = #name;
            const VERSION: u32 = #version;
            const TOPIC: &'static str = #topic;

            fn key(&self) -> ::std::string::String {
                #key_text
            }
        }
        #of_entity
    })
}

fn attributes(input: &DeriveInput) -> Result<Attributes> {
    let mut found = Attributes::default();
    for attr in input.attrs.iter().filter(|attr| attr.path().is_ident("event")) {
        attr.parse_nested_meta(|meta| {
            if meta.path.is_ident("topic") {
                set_once(&mut found.topic, meta.value()?.parse()?, &meta)
            } else if meta.path.is_ident("name") {
                set_once(&mut found.name, meta.value()?.parse()?, &meta)
            } else if meta.path.is_ident("version") {
                set_once(&mut found.version, meta.value()?.parse()?, &meta)
            } else if meta.path.is_ident("entity") {
                set_once(&mut found.entity, meta.value()?.parse()?, &meta)
            } else {
                Err(meta.error("unknown; an event has `topic`, `name`, `version` and `entity`"))
            }
        })?;
    }
    Ok(found)
}
