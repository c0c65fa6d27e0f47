//! `#[derive(Entity)]`.
//!
//! What lives here: its attribute and what it generates. What does not: the checks that
//! `DomainEvent` shares (`input.rs`).
//! Invariant: an entity's type is written down, because it stands in every stored document.

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{DeriveInput, Error, LitStr, Result};

use crate::input::{checked_text, marked_field, named_fields, our_crate, set_once};

const MARKS: [&str; 3] = ["id", "partition_key", "pending"];

#[derive(Default)]
struct Attributes {
    document_type: Option<LitStr>,
    coalesce: Option<()>,
}

pub(crate) fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let fields = named_fields(input, "Entity")?;
    let attributes = attributes(input)?;
    let missing = |message: &str| Error::new_spanned(&input.ident, message);
    let document_type = attributes
        .document_type
        .ok_or_else(|| missing("entity without a type; add `#[entity(type = \"…\")]`"))?;
    checked_text("type", &document_type)?;
    let coalesce = attributes.coalesce.is_some();
    let id = marked_field(fields, "entity", "id", &MARKS)?
        .ok_or_else(|| missing("entity without an id; put `#[entity(id)]` on its field"))?;
    let pending = marked_field(fields, "entity", "pending", &MARKS)?.ok_or_else(|| {
        missing(
            "entity without pending events; add a field `#[serde(skip)] #[entity(pending)] \
             events: PendingEvents<Self>`, with the entity's name for `Self`",
        )
    })?;
    let partition_key = marked_field(fields, "entity", "partition_key", &MARKS)?;

    let root = our_crate()?;
    let ident = &input.ident;
    let (generics, type_generics, conditions) = input.generics.split_for_impl();
    let text = |field: &syn::Field| {
        let name = &field.ident;
        quote_spanned!(field.ty.span()=> ::std::string::ToString::to_string(&self.#name))
    };
    let id_text = text(id);
    let partition_key = partition_key.map(|field| {
        let text = text(field);
        quote!(fn partition_key(&self) -> ::std::string::String { #text })
    });
    let pending = &pending.ident;
    Ok(quote! {
        impl #generics #root::Entity for #ident #type_generics #conditions {
            const TYPE: &'static str = #document_type;
            const COALESCE: bool = #coalesce;

            fn id(&self) -> ::std::string::String {
                #id_text
            }

            #partition_key

            fn pending(&self) -> &#root::PendingEvents<Self> {
                &self.#pending
            }

            fn pending_mut(&mut self) -> &mut #root::PendingEvents<Self> {
                &mut self.#pending
            }
        }
    })
}

fn attributes(input: &DeriveInput) -> Result<Attributes> {
    let mut found = Attributes::default();
    for attr in input.attrs.iter().filter(|attr| attr.path().is_ident("entity")) {
        attr.parse_nested_meta(|meta| {
            if meta.path.is_ident("coalesce") {
                set_once(&mut found.coalesce, (), &meta)
            } else if meta.path.is_ident("type") {
                set_once(&mut found.document_type, meta.value()?.parse()?, &meta)
            } else {
                Err(meta.error("unknown; an entity has `type` and `coalesce`"))
            }
        })?;
    }
    Ok(found)
}
