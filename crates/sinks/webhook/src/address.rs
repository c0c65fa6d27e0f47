//! Which addresses a webhook may reach by default: the public internet's.
//!
//! What lives here: the table of ranges that are not public. What does not: resolving names.
//! Invariant: whatever is not known to be public is refused, also when it is written as an IPv4
//! address inside an IPv6 one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Ranges that are not globally reachable: (address, prefix length), from IANA's special-purpose
/// registry and the multicast and reserved blocks.
const REFUSED_V4: [([u8; 4], u32); 16] = [
    ([0, 0, 0, 0], 8),        // this network
    ([10, 0, 0, 0], 8),       // private
    ([100, 64, 0, 0], 10),    // shared by a carrier's NAT
    ([127, 0, 0, 0], 8),      // loopback
    ([169, 254, 0, 0], 16),   // link-local; clouds' metadata services
    ([172, 16, 0, 0], 12),    // private
    ([192, 0, 0, 0], 24),     // protocol assignments
    ([192, 0, 2, 0], 24),     // documentation
    ([192, 88, 99, 0], 24),   // 6to4 relays, retired
    ([192, 168, 0, 0], 16),   // private
    ([198, 18, 0, 0], 15),    // benchmarks
    ([198, 51, 100, 0], 24),  // documentation
    ([203, 0, 113, 0], 24),   // documentation
    ([168, 63, 129, 16], 32), // Azure's host services, on a public address
    ([224, 0, 0, 0], 4),      // multicast
    ([240, 0, 0, 0], 4),      // reserved, broadcast
];

/// Within 2000::/3, the only block of global unicast; everything outside of it is refused.
const REFUSED_V6: [([u16; 4], u32); 4] = [
    ([0x2001, 0, 0, 0], 23),         // protocol assignments, Teredo
    ([0x2001, 0xdb8, 0, 0], 32),     // documentation
    ([0x3fff, 0, 0, 0], 20),         // documentation
    ([0x2620, 0x4f, 0x8000, 0], 48), // AS112, answers for private addresses
];

/// Whether the address is a public one.
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let bits = address.to_bits();
    let within = |(network, length): &([u8; 4], u32)| {
        (bits ^ Ipv4Addr::from(*network).to_bits()).leading_zeros() >= *length
    };
    !REFUSED_V4.iter().any(within)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    match [a, b, c, d, e, f] {
        // NAT64 carries an IPv4 address at the end, 6to4 one after its prefix.
        [0x64, 0xff9b, 0, 0, 0, 0] => return is_public_v4(v4(g, h)),
        [0x2002, high, low, ..] => return is_public_v4(v4(high, low)),
        // ::ffff:0:0/96 is what a socket makes of an IPv4 address.
        [0, 0, 0, 0, 0, 0xffff] => return is_public_v4(v4(g, h)),
        _ => {}
    }
    let upper = |[a, b, c, d]: [u16; 4]| {
        [a, b, c, d].into_iter().fold(0u64, |bits, part| bits << 16 | u64::from(part))
    };
    let bits = upper([a, b, c, d]);
    let within =
        |(network, length): &([u16; 4], u32)| (bits ^ upper(*network)).leading_zeros() >= *length;
    bits >> 61 == 1 && !REFUSED_V6.iter().any(within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_and_special_addresses_are_refused_in_every_disguise() {
        for text in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.19.0.1",
            "198.51.100.1",
            "203.0.113.9",
            "168.63.129.16",
            "224.0.0.1",
            "239.1.1.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "::10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a00:1::1",
            "3fff::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "5f00::1",
            "4000::1",
        ] {
            assert!(!is_public(text.parse().expect(text)), "{text}");
        }
    }

    #[test]
    fn public_addresses_are_not() {
        for text in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.0.0.1",
            "172.15.255.255",
            "172.32.0.0",
            "192.167.255.255",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450::1",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
            "2002:808:808::1",
            "2001:4860:4860::8888",
        ] {
            assert!(is_public(text.parse().expect(text)), "{text}");
        }
    }
}
