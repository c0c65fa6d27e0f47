//! MurmurHash3, 32 bits: the hash by which RabbitMQ's clients spread keys over a super stream.
//!
//! What lives here: the function (Austin Appleby's, public domain). What does not: what is hashed.
//! Invariant: it gives what other clients' functions give, so that a key's messages stay together
//! whoever writes them.

/// The hash of some bytes.
pub(crate) fn murmur3(bytes: &[u8], seed: u32) -> u32 {
    let mixed =
        |block: u32| block.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    let (blocks, rest) = bytes.as_chunks::<4>();
    let mut hash = seed;
    for block in blocks {
        hash ^= mixed(u32::from_le_bytes(*block));
        hash = hash.rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64);
    }
    if !rest.is_empty() {
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        hash ^= mixed(u32::from_le_bytes(last));
    }
    hash ^= u32::try_from(bytes.len() & 0xffff_ffff).unwrap_or_default();
    hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the reference implementation.
    #[test]
    fn it_gives_what_others_give() {
        for (text, seed, hash) in [
            ("", 0, 0),
            ("", 1, 0x514e_28b7),
            ("test", 0, 0xba6b_d213),
            ("test", 0x9747_b28c, 0x704b_81dc),
            ("Hello, world!", 0, 0xc036_3e43),
            ("Hello, world!", 0x9747_b28c, 0x2488_4cba),
        ] {
            assert_eq!(murmur3(text.as_bytes(), seed), hash, "{text:?} {seed}");
        }
    }
}
