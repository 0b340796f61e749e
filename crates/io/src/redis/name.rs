//! Names of values in a store: which key of the server holds which part of a block.
//!
//! `prefix{namespace:group:hash}` holds a block, or its first `value_bytes`; the same with `:1`, `:2`, … behind it the
//! parts that follow. Every part carries the header of the whole block. What is in braces chooses the slot of a
//! cluster, so a block's parts lie on one node and pass through one connection in order: the first part is written
//! last and read first.
//!
//! Names are readable, for those who look at a server with its own tools; the bytes saved otherwise would be 50 a
//! value.

use forebay_core::BlockKey;

use super::resp::decimal;

/// Slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// Into how many values a block of that length is cut.
pub fn parts(length_bytes: u64, value_bytes: u64) -> u32 {
    u32::try_from(length_bytes.div_ceil(value_bytes).max(1)).expect("a slot is not longer than 2^32 values")
}

/// Where part `part` of a block begins, and how long it is.
pub fn span(part: u32, length_bytes: u64, value_bytes: u64) -> (u64, u64) {
    let at = u64::from(part) * value_bytes;
    (at, value_bytes.min(length_bytes - at))
}

/// Writes the name of a part into `name`, in place of what it holds.
pub fn write(name: &mut Vec<u8>, prefix: &str, key: &BlockKey, part: u32) {
    name.clear();
    name.extend_from_slice(prefix.as_bytes());
    name.push(b'{');
    hex(name, &key.namespace.0.to_be_bytes());
    name.push(b':');
    decimal(name, u64::from(key.group));
    name.push(b':');
    hex(name, key.hash.as_bytes());
    name.push(b'}');
    if part > 0 {
        name.push(b':');
        decimal(name, u64::from(part));
    }
}

/// The slot of a name made by [`write`]: CRC-16/XMODEM of what is in its braces.
pub fn slot(name: &[u8]) -> u16 {
    let braces = name.iter().position(|byte| *byte == b'{').zip(name.iter().position(|byte| *byte == b'}'));
    let tag = braces.map_or(name, |(open, close)| &name[open + 1..close]);
    tag.iter().fold(0, |sum, byte| (sum << 8) ^ SUMS[usize::from((sum >> 8) as u8 ^ byte)]) % SLOTS
}

fn hex(name: &mut Vec<u8>, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    name.extend(bytes.iter().flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]));
}

/// CRC-16/XMODEM of each byte.
const SUMS: [u16; 256] = {
    let mut sums = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut sum = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            sum = if sum & 0x8000 == 0 { sum << 1 } else { sum << 1 ^ 0x1021 };
            bit += 1;
        }
        sums[byte] = sum;
        byte += 1;
    }
    sums
};

#[cfg(test)]
mod tests {
    use forebay_core::{BlockHash, NamespaceId};

    use super::*;

    #[test]
    fn names_are_readable_and_their_parts_share_a_slot() {
        let key = BlockKey { namespace: NamespaceId(0xAB), group: 12, hash: BlockHash::new(&[1, 0xFE]).unwrap() };
        let (mut first, mut third) = (Vec::new(), b"what was there".to_vec());
        write(&mut first, "forebay:", &key, 0);
        write(&mut third, "forebay:", &key, 2);
        assert_eq!(first, b"forebay:{000000000000000000000000000000ab:12:01fe}");
        assert_eq!(third, b"forebay:{000000000000000000000000000000ab:12:01fe}:2");
        assert_eq!(slot(&first), slot(&third));
    }

    /// The examples of the cluster's specification, and one that a server computed.
    #[test]
    fn slots_are_those_of_the_servers() {
        assert_eq!(slot(b"123456789"), 0x31C3);
        assert_eq!(slot(b"foo{hash_tag}bar"), 2515);
        assert_eq!(slot(b"somekey"), 11_058);
    }

    #[test]
    fn parts_cover_a_block_without_gap() {
        for (length, value) in [(1, 4), (4, 4), (5, 4), (12, 4), (1 << 20, 1 << 20), (100_003, 4096)] {
            let count = parts(length, value);
            let spans: Vec<_> = (0..count).map(|part| span(part, length, value)).collect();
            let mut at = 0;
            for (begin, len) in spans {
                assert!(begin == at && (1..=value).contains(&len), "{length} by {value}");
                at += len;
            }
            assert_eq!(at, length);
        }
    }
}
