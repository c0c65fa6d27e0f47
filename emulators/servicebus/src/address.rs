//! Addresses, in the several ways in which clients spell them.
//!
//! What lives here: finding the path in an address, and what of an entity it names. What does not:
//! whether there is such an entity.
//! Invariant: an address is only read; what is sent back is always the client's own spelling.

/// What a link is attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// Where tokens are put.
    Cbs,
    /// Requests about an entity, whose path this is.
    Management(String),
    /// An entity's messages, by its path.
    Entity(String),
}

const MANAGEMENT: &str = "/$management";

/// Finds the place that an address names.
pub(crate) fn place(address: &str) -> Place {
    let path = path(address);
    let lower = path.to_lowercase();
    if lower == "$cbs" {
        return Place::Cbs;
    }
    match lower.strip_suffix(MANAGEMENT) {
        // Lower case may be longer or shorter: the path is cut, if it can be, where it was found.
        Some(entity) => Place::Management(path.get(..entity.len()).unwrap_or(entity).to_owned()),
        None => Place::Entity(path.to_owned()),
    }
}

/// The lower-case path of an address, by which entities are found.
pub(crate) fn key(address: &str) -> String {
    path(address).to_lowercase()
}

/// `orders` of `orders`, `/orders`, `sb://host/orders` and `amqps://host:5671/orders/`.
fn path(address: &str) -> &str {
    let path = match address.split_once("://") {
        Some((_, rest)) => rest.split_once('/').map_or("", |(_, path)| path),
        None => address,
    };
    path.trim_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_names_the_same_place() {
        for address in ["Orders", "/Orders", "sb://h/Orders/", "amqps://127.0.0.1:5672/Orders"] {
            assert_eq!(place(address), Place::Entity("Orders".to_owned()), "{address}");
            assert_eq!(key(address), "orders");
            let management = format!("{}/$Management", address.trim_end_matches('/'));
            assert_eq!(place(&management), Place::Management("Orders".to_owned()));
        }
        assert_eq!(place("$cbs"), Place::Cbs);
        assert_eq!(place("amqps://h:1/$CBS"), Place::Cbs);
        assert_eq!(key("sb://host"), "");
        let subscription = "t/Subscriptions/A/$DeadLetterQueue";
        assert_eq!(place(subscription), Place::Entity(subscription.to_owned()));
    }
}
