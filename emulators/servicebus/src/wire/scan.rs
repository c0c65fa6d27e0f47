//! Looks over encoded AMQP values before anything decodes them.
//!
//! What lives here: lengths, nesting and counts of values, and where a message's sections lie. What
//! does not: what the values mean.
//! Invariant: what passed here is whole, nested at most [`DEPTH_MAX`] deep, and has no more
//! elements than bytes, so that a decoder's stack and memory are bounded by the bytes that were
//! received.

use std::ops::Range;

use super::Malformed;

/// How deep values may lie in each other. The deepest that a client has reason to send is about 8.
const DEPTH_MAX: u8 = 24;

/// The code that opens a described value.
const DESCRIBED: u8 = 0x00;

/// The length in bytes of the value at the start of `bytes`, which is looked through whole.
pub(crate) fn value_len(bytes: &[u8]) -> Result<usize, Malformed> {
    let mut scan = Scan { bytes, at: 0 };
    scan.value(0)?;
    Ok(scan.at)
}

/// One section of a message.
pub(crate) struct Section {
    /// The number of its descriptor.
    pub code: u64,
    /// All of it, descriptor included.
    pub whole: Range<usize>,
    /// What is described.
    pub value: Range<usize>,
}

/// Cuts a message, or a frame's body, into its described values.
pub(crate) fn sections(bytes: &[u8]) -> Result<Vec<Section>, Malformed> {
    let mut found = Vec::new();
    let mut scan = Scan { bytes, at: 0 };
    while scan.at < bytes.len() {
        let start = scan.at;
        if scan.byte()? != DESCRIBED {
            return Err(Malformed("a section has no descriptor"));
        }
        let descriptor = scan.at;
        scan.value(1)?;
        let code = descriptor_code(bytes.get(descriptor..scan.at).unwrap_or_default())?;
        let value = scan.at;
        scan.value(1)?;
        found.push(Section { code, whole: start..scan.at, value: value..scan.at });
    }
    Ok(found)
}

/// The bytes of a binary value, which `bytes` holds and nothing else.
pub(crate) fn binary(bytes: &[u8]) -> Option<Range<usize>> {
    let head = match bytes.first()? {
        0xa0 => 2,
        0xb0 => 5,
        _ => return None,
    };
    (bytes.len() >= head).then_some(head..bytes.len())
}

fn descriptor_code(bytes: &[u8]) -> Result<u64, Malformed> {
    match bytes {
        [0x53, code] => Ok(u64::from(*code)),
        [0x44] => Ok(0),
        [0x80, code @ ..] => code
            .try_into()
            .map(u64::from_be_bytes)
            .map_err(|_| Malformed("a descriptor is cut off")),
        [0xa3, _, name @ ..] | [0xb3, _, _, _, _, name @ ..] => named(name),
        _ => Err(Malformed("a descriptor is neither a number nor a symbol")),
    }
}

/// The few descriptors that may come by name.
fn named(name: &[u8]) -> Result<u64, Malformed> {
    const NAMES: &[(&str, u64)] = &[
        ("amqp:header:list", 0x70),
        ("amqp:delivery-annotations:map", 0x71),
        ("amqp:message-annotations:map", 0x72),
        ("amqp:properties:list", 0x73),
        ("amqp:application-properties:map", 0x74),
        ("amqp:data:binary", 0x75),
        ("amqp:amqp-sequence:list", 0x76),
        ("amqp:amqp-value:*", 0x77),
        ("amqp:footer:map", 0x78),
    ];
    let found = NAMES.iter().find(|(known, _)| known.as_bytes() == name);
    found.map(|(_, code)| *code).ok_or(Malformed("a descriptor has an unknown name"))
}

/// How many bytes follow a constructor.
#[derive(Clone, Copy)]
enum Width {
    Fixed(usize),
    /// A size of so many bytes, then the value.
    Variable(usize),
    /// A size and a count of so many bytes each, then the elements.
    Compound(usize),
    /// The same, then one constructor for all elements.
    Array(usize),
}

fn width(constructor: u8) -> Result<Width, Malformed> {
    Ok(match constructor {
        0x40..=0x45 => Width::Fixed(0),
        0x50..=0x56 => Width::Fixed(1),
        0x60 | 0x61 => Width::Fixed(2),
        0x70..=0x74 => Width::Fixed(4),
        0x80..=0x84 => Width::Fixed(8),
        0x94 | 0x98 => Width::Fixed(16),
        0xa0 | 0xa1 | 0xa3 => Width::Variable(1),
        0xb0 | 0xb1 | 0xb3 => Width::Variable(4),
        0xc0 | 0xc1 => Width::Compound(1),
        0xd0 | 0xd1 => Width::Compound(4),
        0xe0 => Width::Array(1),
        0xf0 => Width::Array(4),
        _ => return Err(Malformed("unknown type of a value")),
    })
}

struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    fn value(&mut self, depth: u8) -> Result<(), Malformed> {
        if depth > DEPTH_MAX {
            return Err(Malformed("values are nested too deep"));
        }
        let constructor = self.byte()?;
        if constructor == DESCRIBED {
            self.value(depth + 1)?;
            return self.value(depth + 1);
        }
        self.content(constructor, depth)
    }

    fn content(&mut self, constructor: u8, depth: u8) -> Result<(), Malformed> {
        match width(constructor)? {
            Width::Fixed(width) => self.skip(width),
            Width::Variable(width) => {
                let size = self.number(width)?;
                self.skip(size)
            }
            Width::Compound(width) => {
                let (count, end) = self.compound(width)?;
                if matches!(constructor, 0xc1 | 0xd1) && count % 2 != 0 {
                    return Err(Malformed("a map has a key without a value"));
                }
                for _ in 0..count {
                    self.value(depth + 1)?;
                }
                self.ends_at(end)
            }
            Width::Array(width) => self.array(width, depth),
        }
    }

    fn array(&mut self, width: usize, depth: u8) -> Result<(), Malformed> {
        let (count, end) = self.compound(width)?;
        let mut constructor = self.byte()?;
        if constructor == DESCRIBED {
            self.value(depth + 1)?;
            constructor = self.byte()?;
        }
        if constructor == DESCRIBED {
            return Err(Malformed("an array's elements are described twice"));
        }
        for _ in 0..count {
            if depth >= DEPTH_MAX {
                return Err(Malformed("values are nested too deep"));
            }
            self.content(constructor, depth + 1)?;
        }
        self.ends_at(end)
    }

    /// The count of elements, and where they end.
    fn compound(&mut self, width: usize) -> Result<(usize, usize), Malformed> {
        let size = self.number(width)?;
        let end = self.at.checked_add(size).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(Malformed("a list, map or array is cut off"))?;
        let count = self.number(width)?;
        // Elements without a byte of their own would be an array of any length for nothing.
        if count > size {
            return Err(Malformed("a list, map or array has more elements than bytes"));
        }
        Ok((count, end))
    }

    fn ends_at(&self, end: usize) -> Result<(), Malformed> {
        if self.at == end { Ok(()) } else { Err(Malformed("a size and a count disagree")) }
    }

    fn number(&mut self, width: usize) -> Result<usize, Malformed> {
        let mut number = 0;
        for _ in 0..width {
            number = number << 8 | usize::from(self.byte()?);
        }
        Ok(number)
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        let byte = self.bytes.get(self.at).copied().ok_or(Malformed("a value is cut off"))?;
        self.at += 1;
        Ok(byte)
    }

    fn skip(&mut self, count: usize) -> Result<(), Malformed> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        self.at = end.ok_or(Malformed("a value is cut off"))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_amqp::Value;
    use serde_amqp::primitives::{Array, OrderedMap, Symbol};

    use super::*;

    #[test]
    fn what_the_encoder_writes_is_whole() {
        let map = OrderedMap::from_iter([
            (Value::Symbol(Symbol::from("a")), Value::String("x".repeat(300))),
            (Value::Long(-7), Value::Array(Array(vec![Value::Long(1), Value::Long(1 << 40)]))),
        ]);
        let list = Value::List(vec![Value::Map(map), Value::Null, Value::Bool(true)]);
        let bytes = serde_amqp::to_vec(&list).expect("a value can be encoded");
        assert_eq!(value_len(&bytes).expect("it is whole"), bytes.len());
        for cut in 0..bytes.len() {
            assert!(value_len(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn an_array_of_a_billion_nothings_is_refused() {
        let bytes = [0xf0, 0, 0, 0, 5, 0x3f, 0xff, 0xff, 0xff, 0x40];
        assert!(value_len(&bytes).is_err());
    }

    #[test]
    fn nesting_has_an_end() {
        let nested = |depth: usize| {
            let mut bytes = vec![0x45];
            for _ in 0..depth {
                let size = u32::try_from(bytes.len() + 4).expect("it is small").to_be_bytes();
                let mut outer = vec![0xd0];
                outer.extend(size);
                outer.extend([0, 0, 0, 1]);
                outer.extend(&bytes);
                bytes = outer;
            }
            bytes
        };
        assert!(value_len(&nested(usize::from(DEPTH_MAX))).is_ok());
        assert!(value_len(&nested(usize::from(DEPTH_MAX) + 1)).is_err());
        assert!(value_len(&vec![0x00; 100_000]).is_err());
    }

    #[test]
    fn sections_are_found_by_number_and_by_name() {
        let mut bytes = vec![0x00, 0x53, 0x75, 0xa0, 1, b'x', 0x00, 0xa3, 16];
        bytes.extend(b"amqp:data:binary");
        bytes.extend([0xa0, 2, b'y', b'z']);
        let found = sections(&bytes).expect("both are whole");
        let values: Vec<_> =
            found.iter().map(|one| (one.code, &bytes[one.value.clone()])).collect();
        assert_eq!(values, [(0x75, &[0xa0, 1, b'x'][..]), (0x75, &[0xa0, 2, b'y', b'z'][..])]);
        assert!(sections(&[0x45]).is_err());
    }
}
