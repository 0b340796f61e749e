//! The header before a block's bytes in every shared store: key, length and checksum. Other programs may write there
//! too. `docs/formats/block.md` gives the header byte by byte.
//!
//! Invariants: a header that [`Header::read`] returns was written whole, in a known version. The caller checks with
//! [`Header::is_of`] whether it is the requested block's. A block of a later version is a miss and stays: hosts that
//! were upgraded already read it.

use forebay_core::checksum::checksum;
use forebay_core::{BlockHash, BlockKey, NamespaceId};

/// Length of every version's header.
pub const HEADER_BYTES: usize = 96;

const MAGIC: &[u8; 8] = b"FOREBAYB";
/// Of the header before each block of a shared store.
pub const VERSION: u32 = 1;
const SEAL_AT: usize = HEADER_BYTES - 8;

/// See the module documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The block's key, in full: [`Header::is_of`] compares all of it.
    pub key: BlockKey,
    /// Length of the block without the header.
    pub length_bytes: u64,
    /// CRC-64/NVME of the block.
    pub checksum: u64,
}

impl Header {
    /// The header's bytes, with the seal that [`Header::read`] checks.
    pub fn write(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let hash = self.key.hash.as_bytes();
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.key.group.to_le_bytes());
        bytes[14] = hash.len() as u8;
        bytes[16..32].copy_from_slice(&self.key.namespace.0.to_le_bytes());
        bytes[32..32 + hash.len()].copy_from_slice(hash);
        bytes[64..72].copy_from_slice(&self.length_bytes.to_le_bytes());
        bytes[72..80].copy_from_slice(&self.checksum.to_le_bytes());
        let seal = checksum(&bytes[..SEAL_AT]);
        bytes[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are not a header: foreign, torn or damaged bytes, or a later version.
    pub fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        if version(bytes) != Some(VERSION) {
            return None;
        }
        let hash = bytes[32..64].get(..bytes[14] as usize).and_then(|hash| BlockHash::new(hash).ok())?;
        let namespace = NamespaceId(u128::from_le_bytes(field(bytes, 16)));
        let group = u16::from_le_bytes(field(bytes, 12));
        Some(Header {
            key: BlockKey { namespace, group, hash },
            length_bytes: u64::from_le_bytes(field(bytes, 64)),
            checksum: u64::from_le_bytes(field(bytes, 72)),
        })
    }

    /// Whether the bytes are a whole header of a later version.
    pub fn is_later(bytes: &[u8; HEADER_BYTES]) -> bool {
        version(bytes).is_some_and(|version| version > VERSION)
    }

    /// Whether this is the header of the block with that key and length.
    pub fn is_of(&self, key: &BlockKey, length_bytes: u64) -> bool {
        self.key == *key && self.length_bytes == length_bytes
    }
}

/// Of a whole header; every version has magic, version and seal in the same places.
fn version(bytes: &[u8; HEADER_BYTES]) -> Option<u32> {
    let is_whole = checksum(&bytes[..SEAL_AT]) == u64::from_le_bytes(field(bytes, SEAL_AT));
    (&bytes[..8] == MAGIC && is_whole).then(|| u32::from_le_bytes(field(bytes, 8)))
}

fn field<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a field of that length")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(hash: &[u8]) -> Header {
        let key = BlockKey { namespace: NamespaceId(7 << 100 | 9), group: 3, hash: BlockHash::new(hash).unwrap() };
        Header { key, length_bytes: 1 << 20, checksum: 0x0123_4567_89ab_cdef }
    }

    #[test]
    fn what_was_written_is_read() {
        for hash in [&[1][..], &[2; 8], &[3; 32]] {
            assert_eq!(Header::read(&header(hash).write()), Some(header(hash)));
        }
    }

    #[test]
    fn a_changed_bit_anywhere_makes_it_no_header() {
        let good = header(&[5; 32]).write();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::read(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn a_whole_header_of_another_version_is_known_as_later_or_as_none() {
        for (version, is_later) in [(0u32, false), (VERSION, false), (VERSION + 1, true), (u32::MAX, true)] {
            let mut bytes = header(&[5; 32]).write();
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            assert!(version == VERSION || !Header::is_later(&bytes), "its seal is not right");
            let seal = checksum(&bytes[..SEAL_AT]);
            bytes[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
            assert_eq!(Header::is_later(&bytes), is_later, "{version}");
            assert_eq!(Header::read(&bytes).is_some(), version == VERSION, "{version}");
        }
    }

    /// The bytes in `docs/formats`, so that a change of the format fails here.
    #[test]
    fn its_bytes_are_those_of_the_format_page() {
        let bytes = header(&[0xAB; 4]).write();
        assert_eq!(&bytes[..16], b"FOREBAYB\x01\0\0\0\x03\0\x04\0");
        assert_eq!(&bytes[16..32], &(7u128 << 100 | 9).to_le_bytes());
        assert_eq!(&bytes[32..37], &[0xAB, 0xAB, 0xAB, 0xAB, 0]);
        assert_eq!(&bytes[64..80], b"\0\0\x10\0\0\0\0\0\xef\xcd\xab\x89\x67\x45\x23\x01");
        assert_eq!(&bytes[80..88], &[0; 8]);
    }
}
