//! What a contact is made of, each value checked when it is made.
//!
//! What lives here: name, email, description, company and their rules; the list of violations. What
//! does not: the contact itself (`domain.rs`), and HTTP.
//! Invariant: a value that exists keeps its rule; limits count characters, not bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most characters of a first or last name.
pub(crate) const MAX_NAME_CHARS: usize = 100;
/// Most characters of a company's name, street, city or country.
pub(crate) const MAX_COMPANY_CHARS: usize = 250;
/// Most characters of a house number.
pub(crate) const MAX_HOUSE_NUMBER_CHARS: usize = 10;
/// Most characters of a postal code.
pub(crate) const MAX_POSTAL_CODE_CHARS: usize = 25;
/// Most characters of a description.
pub(crate) const MAX_DESCRIPTION_CHARS: usize = 500;
/// Most characters of an email address (RFC 5321, a path without its brackets).
pub(crate) const MAX_EMAIL_CHARS: usize = 254;

/// What is wrong, by field as the client names it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Violations(BTreeMap<&'static str, Vec<String>>);

impl Violations {
    /// A single one.
    pub(crate) fn one(field: &'static str, what: impl Into<String>) -> Self {
        Self(BTreeMap::from([(field, vec![what.into()])]))
    }

    /// All of several.
    pub(crate) fn all(several: impl IntoIterator<Item = Option<Self>>) -> Self {
        let mut all = Self::default();
        for (field, mut whats) in several.into_iter().flatten().flat_map(|one| one.0) {
            all.0.entry(field).or_default().append(&mut whats);
        }
        all
    }

    /// By field.
    pub(crate) fn into_fields(self) -> BTreeMap<&'static str, Vec<String>> {
        self.0
    }

    fn not_blank(&mut self, field: &'static str, text: &str) {
        if text.trim().is_empty() {
            self.add(field, "must not be blank");
        }
    }

    fn at_most(&mut self, field: &'static str, text: &str, limit: usize) {
        let chars = text.chars().count();
        if chars > limit {
            self.add(field, format!("has {chars} characters; {limit} are allowed"));
        }
    }

    fn add(&mut self, field: &'static str, what: impl Into<String>) {
        self.0.entry(field).or_default().push(what.into());
    }

    fn or<T>(self, value: T) -> Result<T, Self> {
        if self.0.is_empty() { Ok(value) } else { Err(self) }
    }
}

/// A person's name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Name {
    first_name: String,
    last_name: String,
}

impl Name {
    /// Both parts.
    ///
    /// # Errors
    /// A part is blank or longer than 100 characters.
    pub(crate) fn new(first_name: String, last_name: String) -> Result<Self, Violations> {
        let mut violations = Violations::default();
        for (field, text) in [("firstName", &first_name), ("lastName", &last_name)] {
            violations.not_blank(field, text);
            violations.at_most(field, text, MAX_NAME_CHARS);
        }
        violations.or(Self { first_name, last_name })
    }

    /// First and last, for a list.
    pub(crate) fn full(&self) -> String {
        format!("{} {}", self.first_name, self.last_name)
    }
}

/// An email address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct Email(String);

impl Email {
    /// One `@` with text on both sides, no spaces: whether it is right, only a mail can tell.
    ///
    /// # Errors
    /// It has another form, or more than 254 characters.
    pub(crate) fn new(text: String) -> Result<Self, Violations> {
        let mut violations = Violations::default();
        let well_formed = text.split_once('@').is_some_and(|(local, domain)| {
            !local.is_empty() && !domain.is_empty() && !domain.contains('@')
        }) && !text.chars().any(|c| c.is_whitespace() || c.is_control());
        if !well_formed {
            violations.add("email", "is no email address; leave it out, or write name@host");
        }
        violations.at_most("email", &text, MAX_EMAIL_CHARS);
        violations.or(Self(text))
    }
}

/// Free text about a contact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct Description(String);

impl Description {
    /// Any text of up to 500 characters.
    ///
    /// # Errors
    /// It is longer.
    pub(crate) fn new(text: String) -> Result<Self, Violations> {
        let mut violations = Violations::default();
        violations.at_most("description", &text, MAX_DESCRIPTION_CHARS);
        violations.or(Self(text))
    }
}

/// Where a contact works.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Company {
    company_name: String,
    street: String,
    house_number: String,
    postal_code: String,
    city: String,
    country: String,
}

/// A company's address as it comes in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Address {
    /// Street without number.
    pub(crate) street: String,
    /// House number with its letters.
    pub(crate) house_number: String,
    /// Postal code.
    pub(crate) postal_code: String,
    /// City.
    pub(crate) city: String,
    /// Country.
    pub(crate) country: String,
}

impl Company {
    /// A company, its address possibly empty.
    ///
    /// # Errors
    /// The name is blank, or a text is longer than its limit.
    pub(crate) fn new(company_name: String, address: Address) -> Result<Self, Violations> {
        let Address { street, house_number, postal_code, city, country } = address;
        let mut violations = Violations::default();
        violations.not_blank("companyName", &company_name);
        violations.at_most("companyName", &company_name, MAX_COMPANY_CHARS);
        violations.at_most("street", &street, MAX_COMPANY_CHARS);
        violations.at_most("houseNumber", &house_number, MAX_HOUSE_NUMBER_CHARS);
        violations.at_most("postalCode", &postal_code, MAX_POSTAL_CODE_CHARS);
        violations.at_most("city", &city, MAX_COMPANY_CHARS);
        violations.at_most("country", &country, MAX_COMPANY_CHARS);
        violations.or(Self { company_name, street, house_number, postal_code, city, country })
    }

    /// The company's name.
    pub(crate) fn name(&self) -> &str {
        &self.company_name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields<T: std::fmt::Debug>(result: Result<T, Violations>) -> Vec<&'static str> {
        result.map_or_else(|v| v.into_fields().into_keys().collect(), |_| Vec::new())
    }

    #[test]
    fn limits_count_characters_and_not_bytes() {
        let long = "ß".repeat(MAX_NAME_CHARS);
        assert_eq!(fields(Name::new(long.clone(), "Doe".into())), Vec::<&str>::new());
        assert_eq!(fields(Name::new(long + "ß", " \t".into())), ["firstName", "lastName"]);
    }

    #[test]
    fn an_email_needs_one_at_sign_between_texts_without_spaces() {
        for bad in ["", "@", "a@", "@b", "a@b@c", "a b@c", "a@b\n", "plain"] {
            assert_eq!(fields(Email::new(bad.into())), ["email"], "{bad:?}");
        }
        for good in ["johndoe@contoso.com", "ü@x", "a+b@[::1]"] {
            assert_eq!(fields(Email::new(good.into())), Vec::<&str>::new(), "{good:?}");
        }
        let long = format!("{}@b", "a".repeat(MAX_EMAIL_CHARS));
        assert_eq!(fields(Email::new(long)), ["email"]);
    }
}
