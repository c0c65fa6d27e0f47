//! The parts of a `postgres://` address.
//!
//! What lives here: taking one apart and putting it together. What does not: escapes, which the
//! addresses of test servers do not have.
//! Invariant: what was taken apart and put together is the same.

use crate::error::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) user: String,
    pub(crate) password: Option<String>,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: String,
    pub(crate) query: Option<String>,
}

impl Address {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        Self::split(text).ok_or_else(|| {
            let expected = "expected postgres://user[:password]@host:port/database";
            Error::failed("reading the address of a PostgreSQL server", expected)
        })
    }

    fn split(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://")?;
        if !["postgres", "postgresql"].contains(&scheme) {
            return None;
        }
        let (authority, path) = rest.split_once('/')?;
        let (database, query) = match path.split_once('?') {
            Some((database, query)) => (database, Some(query.to_owned())),
            None => (path, None),
        };
        let (login, place) = authority.rsplit_once('@')?;
        let (user, password) = match login.split_once(':') {
            Some((user, password)) => (user, Some(password.to_owned())),
            None => (login, None),
        };
        let (host, port) = place.rsplit_once(':').unwrap_or((place, "5432"));
        Some(Self {
            user: user.to_owned(),
            password,
            host: host.to_owned(),
            port: port.parse().ok()?,
            database: database.to_owned(),
            query,
        })
    }

    pub(crate) fn with_database(&self, database: &str) -> Self {
        Self { database: database.to_owned(), ..self.clone() }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "postgres://{}", self.user)?;
        if let Some(password) = &self.password {
            write!(f, ":{password}")?;
        }
        write!(f, "@{}:{}/{}", self.host, self.port, self.database)?;
        match &self.query {
            Some(query) => write!(f, "?{query}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_out_as_it_went_in() {
        for text in [
            "postgres://postgres@127.0.0.1:20001/postgres",
            "postgres://app:secret@db:6432/app?sslmode=require",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        let other = Address::parse("postgresql://u@h/a?x=y").unwrap().with_database("b");
        assert_eq!(other.to_string(), "postgres://u@h:5432/b?x=y");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in ["", "127.0.0.1:5432", "mysql://u@h/d", "postgres://h/d", "postgres://u@h:x/d"]
        {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }
}
