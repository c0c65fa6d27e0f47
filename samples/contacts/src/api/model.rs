//! The JSON that goes in and out.
//!
//! What lives here: request and answer bodies, and how a request becomes checked values. What does
//! not: the rules (`values.rs`) and the event payloads (`domain.rs`).
//! Invariant: a field that is unknown is refused, so that a misspelt one is never silently dropped.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::domain::{Contact, NewContact};
use crate::values::{Address, Company, Description, Email, Name, Violations};

/// A contact to be created.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({
    "firstName": "John", "lastName": "Doe", "email": "johndoe@contoso.com",
    "description": "This is a contact", "companyName": "Contoso"
}))]
pub(crate) struct CreateContact {
    /// Not blank.
    #[schema(required, nullable = false, min_length = 1, max_length = 100)]
    first_name: Option<String>,
    /// Not blank.
    #[schema(required, nullable = false, min_length = 1, max_length = 100)]
    last_name: Option<String>,
    /// An address, or nothing.
    #[schema(max_length = 254)]
    email: Option<String>,
    /// Free text.
    #[schema(max_length = 500)]
    description: Option<String>,
    /// Not blank.
    #[schema(required, nullable = false, min_length = 1, max_length = 250)]
    company_name: Option<String>,
}

impl CreateContact {
    pub(crate) fn check(self) -> Result<NewContact, Violations> {
        let name =
            Name::new(self.first_name.unwrap_or_default(), self.last_name.unwrap_or_default());
        let email = self.email.map(Email::new).transpose();
        let description = self.description.map(Description::new).transpose();
        let company = Company::new(self.company_name.unwrap_or_default(), Address::default());
        match (name, email, description, company) {
            (Ok(name), Ok(email), Ok(description), Ok(company)) => {
                Ok(NewContact { name, email, description, company })
            }
            (name, email, description, company) => {
                Err(Violations::all([name.err(), email.err(), description.err(), company.err()]))
            }
        }
    }
}

/// A new name.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({ "firstName": "Jane", "lastName": "Doe" }))]
pub(crate) struct UpdateName {
    /// Not blank.
    #[schema(required, nullable = false, min_length = 1, max_length = 100)]
    first_name: Option<String>,
    /// Not blank.
    #[schema(required, nullable = false, min_length = 1, max_length = 100)]
    last_name: Option<String>,
}

impl UpdateName {
    pub(crate) fn check(self) -> Result<Name, Violations> {
        Name::new(self.first_name.unwrap_or_default(), self.last_name.unwrap_or_default())
    }
}

/// A new description, or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({ "description": "Met at the fair" }))]
pub(crate) struct UpdateDescription {
    /// Free text; null or left out removes it.
    #[schema(max_length = 500)]
    description: Option<String>,
}

impl UpdateDescription {
    pub(crate) fn check(self) -> Result<Option<Description>, Violations> {
        self.description.map(Description::new).transpose()
    }
}

/// A new email address, or none.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({ "email": "jane@contoso.com" }))]
pub(crate) struct UpdateEmail {
    /// An address; null or left out removes it.
    #[schema(max_length = 254)]
    email: Option<String>,
}

impl UpdateEmail {
    pub(crate) fn check(self) -> Result<Option<Email>, Violations> {
        self.email.map(Email::new).transpose()
    }
}

/// A new company with its address.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(example = json!({
    "companyName": "Contoso", "street": "Street", "houseNumber": "1a",
    "postalCode": "092821", "city": "Palo Alto", "country": "US"
}))]
pub(crate) struct UpdateCompany {
    /// Not blank.
    #[schema(required, nullable = false, min_length = 1, max_length = 250)]
    company_name: Option<String>,
    /// Street without number.
    #[schema(max_length = 250)]
    street: Option<String>,
    /// House number.
    #[schema(max_length = 10)]
    house_number: Option<String>,
    /// Postal code.
    #[schema(max_length = 25)]
    postal_code: Option<String>,
    /// City.
    #[schema(max_length = 250)]
    city: Option<String>,
    /// Country.
    #[schema(max_length = 250)]
    country: Option<String>,
}

impl UpdateCompany {
    pub(crate) fn check(self) -> Result<Company, Violations> {
        let address = Address {
            street: self.street.unwrap_or_default(),
            house_number: self.house_number.unwrap_or_default(),
            postal_code: self.postal_code.unwrap_or_default(),
            city: self.city.unwrap_or_default(),
            country: self.country.unwrap_or_default(),
        };
        Company::new(self.company_name.unwrap_or_default(), address)
    }
}

/// One contact, whole.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ContactDetails {
    id: Uuid,
    description: Option<Description>,
    email: Option<Email>,
    name: Name,
    company: Company,
}

impl From<&Contact> for ContactDetails {
    fn from(contact: &Contact) -> Self {
        Self {
            id: contact.contact_id(),
            description: contact.description().cloned(),
            email: contact.email().cloned(),
            name: contact.name().clone(),
            company: contact.company().clone(),
        }
    }
}

/// One page of contacts.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactPage {
    /// Whether the answer's header `x-continuation-token` leads to another page.
    pub(crate) has_more: bool,
    /// The contacts of this page.
    pub(crate) items: Vec<ContactSummary>,
}

/// One contact in a list.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ContactSummary {
    id: Uuid,
    email: Option<Email>,
    full_name: String,
    company_name: String,
}

impl From<&Contact> for ContactSummary {
    fn from(contact: &Contact) -> Self {
        Self {
            id: contact.contact_id(),
            email: contact.email().cloned(),
            full_name: contact.name().full(),
            company_name: contact.company().name().to_owned(),
        }
    }
}
