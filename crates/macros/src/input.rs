//! What both derives ask of their input.
//!
//! What lives here: named fields, marked fields, checked texts, and the path to our crate. What
//! does not: what is generated.
//! Invariant: every refusal points at the place and says what to write there.

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::punctuated::Punctuated;
use syn::{Data, DeriveInput, Error, Field, Fields, Ident, LitStr, Result, Token};

/// Longest name or topic, in bytes; the limit that the runtime has as well.
const MAX_NAME_BYTES: usize = 255;

/// The path of the crate that the traits are named by, where the derive is used.
pub(crate) fn our_crate() -> Result<TokenStream> {
    for name in ["postrider", "postrider-unit-of-work"] {
        let found = match crate_name(name) {
            Ok(FoundCrate::Itself) => name.replace('-', "_"),
            Ok(FoundCrate::Name(renamed)) => renamed,
            Err(_) => continue,
        };
        let found = Ident::new(&found, Span::call_site());
        return Ok(quote!(::#found));
    }
    Err(Error::new(Span::call_site(), "add `postrider` to the dependencies in Cargo.toml"))
}

/// The fields of a struct that has names for them.
pub(crate) fn named_fields<'a>(
    input: &'a DeriveInput,
    derive: &str,
) -> Result<&'a Punctuated<Field, Token![,]>> {
    if let Data::Struct(data) = &input.data
        && let Fields::Named(fields) = &data.fields
    {
        return Ok(&fields.named);
    }
    let message = format!("`{derive}` can be derived for a struct with named fields only");
    Err(Error::new_spanned(&input.ident, message))
}

/// The one field marked with `#[attribute(mark)]`, if there is one.
pub(crate) fn marked_field<'a>(
    fields: &'a Punctuated<Field, Token![,]>,
    attribute: &str,
    mark: &str,
    marks: &[&str],
) -> Result<Option<&'a Field>> {
    let mut found = None;
    for field in fields {
        for attr in field.attrs.iter().filter(|attr| attr.path().is_ident(attribute)) {
            attr.parse_nested_meta(|meta| {
                if !marks.iter().any(|known| meta.path.is_ident(known)) {
                    let all = marks.join("`, `");
                    return Err(meta.error(format!("unknown mark; a field can be `{all}`")));
                }
                if meta.path.is_ident(mark) && found.replace(field).is_some() {
                    return Err(meta.error(format!(
                        "`#[{attribute}({mark})]` is on two fields; keep it on one"
                    )));
                }
                Ok(())
            })?;
        }
    }
    Ok(found)
}

/// A text that the runtime would take as a name.
pub(crate) fn checked_text(what: &str, text: &LitStr) -> Result<()> {
    let value = text.value();
    let fault = if value.is_empty() {
        format!("{what} is empty; give it at least one character")
    } else if value.len() > MAX_NAME_BYTES {
        format!("{what} has {} bytes; {MAX_NAME_BYTES} are allowed", value.len())
    } else if value.contains(char::is_control) {
        format!("{what} has a control character; remove it")
    } else {
        return Ok(());
    };
    Err(Error::new_spanned(text, fault))
}

/// Puts `value` into `slot`, which must be empty.
pub(crate) fn set_once<T>(
    slot: &mut Option<T>,
    value: T,
    meta: &syn::meta::ParseNestedMeta<'_>,
) -> Result<()> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(meta.error("given twice; keep one")),
    }
}
