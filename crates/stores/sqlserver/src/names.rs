//! The schema that holds everything, in the texts that are sent.
//!
//! What lives here: putting the schema's name into a text. What does not: the texts (`sql.rs`).
//! Invariant: every text names the schema as `[changefeed]`, with its brackets, so that a person
//! who reads or runs it needs a search and replace alone; it is quoted as SQL Server does.

use std::borrow::Cow;

use postrider_core::{Error, Result};

/// As the texts have it.
const WRITTEN: &str = "[changefeed]";

/// The schema's name, quoted.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    schema: String,
}

impl Names {
    pub(crate) fn new(schema: &str) -> Self {
        Self { schema: format!("[{}]", schema.replace(']', "]]")) }
    }

    /// A text about this schema. What stands between single quotation marks needs no other care:
    /// no schema's name may have one (`config.rs`).
    pub(crate) fn fill<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.schema == WRITTEN {
            true => Cow::Borrowed(text),
            false => Cow::Owned(text.replace(WRITTEN, &self.schema)),
        }
    }

    /// The name of an application lock of this schema.
    pub(crate) fn lock(&self, what: &str) -> String {
        format!("{}/{what}", self.schema)
    }
}

/// Refuses a name that SQL Server would take for another: it compares texts as if the shorter one
/// had spaces behind it.
pub(crate) fn exact(what: &str, name: &str) -> Result<()> {
    match name.ends_with(' ') {
        false => Ok(()),
        true => Err(Error::permanent(format!(
            "{what} {name:?} ends with a space, which SQL Server does not tell from none; remove it"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schemas_name_is_quoted_wherever_it_stands() {
        let text = "exec [changefeed].[read_feed:outbox]";
        assert_eq!(Names::new("changefeed").fill(text), text);
        assert_eq!(Names::new("a]b").fill(text), "exec [a]]b].[read_feed:outbox]");
    }
}
