//! Names of values in a Redis store: which key of the server holds which part of a block.
//!
//! `prefix{namespace:group:hash}` holds a block, or its first `value_bytes`; the same name with `:1`, `:2`, …
//! appended holds the following parts. Every part carries the header of the whole block. The text in braces chooses
//! the slot of a cluster, so a block's parts lie on one node and go through one connection in order: the first part
//! is written last and read first.
//!
//! From version 2 of the header on, `v2` and so on stands behind the braces. So a host never reads, replaces or removes
//! a value of another version, and no command has to ask for the version first.
//!
//! [`read`] is exact: a similar name of another program is not accepted, and is never removed. It accepts all versions:
//! a purge removes a block in whatever version.
//!
//! Names are readable for operators who use the server's own tools; binary names would save 50 bytes per value.

use forebay_core::{BlockHash, BlockKey, NamespaceId};

use super::resp::decimal;

/// Slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// Number of values for a block of that length.
pub fn parts(length_bytes: u64, value_bytes: u64) -> u32 {
    u32::try_from(length_bytes.div_ceil(value_bytes).max(1)).expect("a slot is not longer than 2^32 values")
}

/// Start and length of part `part` of a block.
pub fn span(part: u32, length_bytes: u64, value_bytes: u64) -> (u64, u64) {
    let at = u64::from(part) * value_bytes;
    (at, value_bytes.min(length_bytes - at))
}

/// Writes the name of a part into `name`, replacing its content. The version is that of the header before it.
pub fn write(name: &mut Vec<u8>, prefix: &str, key: &BlockKey, version: u32, part: u32) {
    name.clear();
    name.extend_from_slice(prefix.as_bytes());
    name.push(b'{');
    hex(name, &key.namespace.0.to_be_bytes());
    name.push(b':');
    decimal(name, u64::from(key.group));
    name.push(b':');
    hex(name, key.hash.as_bytes());
    name.push(b'}');
    if version > 1 {
        name.push(b'v');
        decimal(name, u64::from(version));
    }
    if part > 0 {
        name.push(b':');
        decimal(name, u64::from(part));
    }
}

/// The block and the part of a name that [`write`] makes, in whatever version; none for any other name.
pub fn read(name: &[u8], prefix: &str) -> Option<(BlockKey, u32)> {
    let text = str::from_utf8(name).ok()?.strip_prefix(prefix)?.strip_prefix('{')?;
    let (key, rest) = text.split_once('}')?;
    let (version, part) = match rest.strip_prefix('v') {
        None => (1, rest),
        Some(rest) => {
            let (version, part) = rest.split_at(rest.find(':').unwrap_or(rest.len()));
            (version.parse().ok()?, part)
        }
    };
    let mut fields = key.split(':');
    let namespace = NamespaceId(u128::from_str_radix(fields.next()?, 16).ok()?);
    let (group, hash) = (fields.next()?.parse().ok()?, BlockHash::from_hex(fields.next()?)?);
    let part = if part.is_empty() { 0 } else { part.strip_prefix(':')?.parse().ok()? };
    let key = BlockKey { namespace, group, hash };
    let mut again = Vec::with_capacity(name.len());
    write(&mut again, prefix, &key, version, part);
    (again == name).then_some((key, part))
}

/// A pattern for the server that matches all names of blocks of these namespaces. Other names may match too.
pub fn pattern(prefix: &str, namespaces: &[NamespaceId]) -> Vec<u8> {
    let mut pattern = Vec::new();
    for byte in prefix.bytes() {
        if b"*?[]\\".contains(&byte) {
            pattern.push(b'\\');
        }
        pattern.push(byte);
    }
    pattern.push(b'{');
    // Several namespaces share a pattern: one scan of all names costs a server less than one scan each.
    if let [namespace] = namespaces {
        hex(&mut pattern, &namespace.0.to_be_bytes());
        pattern.push(b':');
    }
    pattern.push(b'*');
    pattern
}

/// The slot of a name made by [`write`]: CRC-16/XMODEM of the text in its braces.
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
    use super::*;

    #[test]
    fn names_are_readable_and_their_parts_share_a_slot() {
        let key = BlockKey { namespace: NamespaceId(0xAB), group: 12, hash: BlockHash::new(&[1, 0xFE]).unwrap() };
        let (mut first, mut third) = (Vec::new(), b"what was there".to_vec());
        write(&mut first, "forebay:", &key, 1, 0);
        write(&mut third, "forebay:", &key, 1, 2);
        assert_eq!(first, b"forebay:{000000000000000000000000000000ab:12:01fe}");
        assert_eq!(third, b"forebay:{000000000000000000000000000000ab:12:01fe}:2");
        assert_eq!(slot(&first), slot(&third));
    }

    #[test]
    fn a_name_is_read_back_and_no_other_is_taken_for_one() {
        let key = BlockKey { namespace: NamespaceId(0xAB), group: 12, hash: BlockHash::new(&[1, 0xFE]).unwrap() };
        let mut name = Vec::new();
        for (prefix, part) in [("forebay:", 0), ("", 7), ("a*[b]:", u32::MAX)] {
            write(&mut name, prefix, &key, 1, part);
            assert_eq!(read(&name, prefix), Some((key, part)), "{}", String::from_utf8_lossy(&name));
            assert_eq!(read(&name, "other:"), None);
        }
        let id = "000000000000000000000000000000ab";
        for other in [
            format!("forebay:{{{id}:12:01FE}}"),
            format!("forebay:{{{id}:012:01fe}}"),
            format!("forebay:{{{id}:12:+1fe}}"),
            format!("forebay:{{{id}:12:01f}}"),
            format!("forebay:{{{id}:12:}}"),
            format!("forebay:{{{id}:12:01fe:2}}"),
            format!("forebay:{{{id}:12:01fe}}:0"),
            format!("forebay:{{{id}:12:01fe}}:02"),
            format!("forebay:{{{id}:12:01fe}}x"),
            format!("forebay:{{{id}:12:01fe}}v"),
            format!("forebay:{{{id}:12:01fe}}v1"),
            format!("forebay:{{{id}:12:01fe}}v02"),
            format!("forebay:{{{id}:12:01fe}}v2:0"),
            format!("forebay:{{{id}:12:01fe}}v2x"),
            format!("forebay:{{{id}:12:01fe"),
            format!("forebay:{id}:12:01fe"),
            "forebay:{ab:12:01fe}".to_owned(),
            format!("forebay:{{{id}:70000:01fe}}"),
            format!("forebay:{{{id}:12:{}}}", "01".repeat(33)),
            format!("xforebay:{{{id}:12:01fe}}"),
        ] {
            assert_eq!(read(other.as_bytes(), "forebay:"), None, "{other}");
        }
        assert_eq!(read(b"forebay:{\xff}", "forebay:"), None);
    }

    #[test]
    fn each_version_has_names_of_its_own_which_are_all_read() {
        let key = BlockKey { namespace: NamespaceId(0xAB), group: 12, hash: BlockHash::new(&[1, 0xFE]).unwrap() };
        let mut names = std::collections::BTreeSet::new();
        for (version, part) in [(1, 0), (1, 2), (2, 0), (2, 2), (u32::MAX, 0)] {
            let mut name = Vec::new();
            write(&mut name, "forebay:", &key, version, part);
            assert_eq!(read(&name, "forebay:"), Some((key, part)), "{}", String::from_utf8_lossy(&name));
            names.insert(name);
        }
        assert_eq!(names.len(), 5);
        assert!(names.contains(&b"forebay:{000000000000000000000000000000ab:12:01fe}v2:2"[..]));
    }

    #[test]
    fn a_pattern_takes_the_prefix_at_its_word() {
        let id = "000000000000000000000000000000ab";
        let of = |prefix, ids: &[u128]| {
            let ids: Vec<_> = ids.iter().copied().map(NamespaceId).collect();
            String::from_utf8(pattern(prefix, &ids)).unwrap()
        };
        assert_eq!(of("forebay:", &[0xAB]), format!("forebay:{{{id}:*"));
        assert_eq!(of("forebay:", &[0xAB, 1]), "forebay:{*");
        assert_eq!(of(r"a*b?[c]\d", &[0xAB]), format!(r"a\*b\?\[c\]\\d{{{id}:*"));
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
