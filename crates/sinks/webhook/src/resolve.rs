//! Names to addresses, refusing private ones.
//!
//! What lives here: the resolver that the HTTP client connects by, and its error. What does not:
//! which addresses are private (`address.rs`), and addresses written in the URL (`target.rs`).
//! Invariant: the client connects to the very addresses that were checked here, so that a name
//! which changes its answer between check and use gains nothing.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::address::is_public;

/// Resolves by the operating system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GuardedResolver {
    pub(crate) allow_private: bool,
}

/// Why a name has no address to connect to.
#[derive(Debug)]
pub(crate) enum ResolveError {
    /// The name is unknown, or no server answered.
    Lookup(io::Error),
    /// There are addresses, and none may be used.
    Refused(IpAddr),
    /// There is no address.
    Empty,
}

impl GuardedResolver {
    /// The addresses that may be connected to, with port 0.
    pub(crate) async fn lookup(self, host: &str) -> Result<Vec<SocketAddr>, ResolveError> {
        let found = tokio::net::lookup_host((host, 0)).await.map_err(ResolveError::Lookup)?;
        self.permitted(found)
    }

    fn permitted(
        self,
        found: impl Iterator<Item = SocketAddr>,
    ) -> Result<Vec<SocketAddr>, ResolveError> {
        let (permitted, refused): (Vec<_>, Vec<_>) =
            found.partition(|address| self.allow_private || is_public(address.ip()));
        match (permitted.is_empty(), refused.first()) {
            (false, _) => Ok(permitted),
            (true, Some(address)) => Err(ResolveError::Refused(address.ip())),
            (true, None) => Err(ResolveError::Empty),
        }
    }
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = *self;
        Box::pin(async move {
            let addresses = resolver.lookup(name.as_str()).await?;
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lookup(_) => f.write_str("the host's name cannot be resolved"),
            Self::Refused(address) => {
                write!(f, "the host resolves to {address}, no public address")
            }
            Self::Empty => f.write_str("the host's name has no address"),
        }
    }
}

impl std::error::Error for ResolveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Lookup(cause) => Some(cause),
            Self::Refused(_) | Self::Empty => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().expect("an address")).collect()
    }

    #[test]
    fn a_name_with_public_and_private_addresses_yields_the_public_ones() {
        let guarded = GuardedResolver { allow_private: false };
        let mixed = addresses(&["10.0.0.1:0", "1.1.1.1:0", "[::1]:0"]);
        let permitted = guarded.permitted(mixed.clone().into_iter()).expect("one is public");
        assert_eq!(permitted, addresses(&["1.1.1.1:0"]));
        let private = addresses(&["10.0.0.1:0", "[::1]:0"]);
        assert!(matches!(
            guarded.permitted(private.into_iter()),
            Err(ResolveError::Refused(ip)) if ip.to_string() == "10.0.0.1"
        ));
        assert!(matches!(guarded.permitted(std::iter::empty()), Err(ResolveError::Empty)));
        let open = GuardedResolver { allow_private: true };
        assert_eq!(open.permitted(mixed.into_iter()).expect("all allowed").len(), 3);
    }
}
