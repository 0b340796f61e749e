//! The header before a block's bytes in every shared store: key, length, and what proves the bytes: their checksum, or
//! with a secret their MAC. Other programs may write there too. `docs/formats/block.md` gives the header byte by byte.
//!
//! Invariants: a header that [`Sealing::read`] returns was written whole, in the version of this host. The caller
//! checks with [`Header::is_of`] whether it is the requested block's, and with [`BlockSum::proves`] whether the bytes
//! are. A block of a later version is a miss and stays: other hosts already read it.

mod sealing;

pub use sealing::{BlockSum, Sealing};

use constant_time_eq::constant_time_eq_16;
use forebay_core::checksum::checksum;
use forebay_core::{BlockHash, BlockKey, NamespaceId};

/// Length of every version's header.
pub const HEADER_BYTES: usize = 96;
/// Of blocks without a MAC. A build with `--cfg forebay_next` plays a later release: `make rolling`.
pub const VERSION: u32 = if cfg!(forebay_next) { 3 } else { EARLIEST_VERSION };
/// Of blocks with a MAC. Names in Redis contain the version from this one on.
pub const VERSION_WITH_MAC: u32 = if cfg!(forebay_next) { 4 } else { 2 };

/// Of blocks without a MAC that every later build reads too.
const EARLIEST_VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"FOREBAYB";
const PROOF_AT: usize = 72;
const SEAL_AT: usize = HEADER_BYTES - 8;

/// See the module documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The block's key, in full: [`Header::is_of`] compares all of it.
    pub key: BlockKey,
    /// Length of the block without the header.
    pub length_bytes: u64,
    proof: Proof,
}

/// What the block's bytes are compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Proof {
    /// CRC-64/NVME, which anybody can compute.
    Checksum(u64),
    Mac(Mac),
}

/// Compared in a time that does not tell where two differ.
#[derive(Clone, Copy, Debug)]
struct Mac([u8; 16]);

impl PartialEq for Mac {
    fn eq(&self, other: &Mac) -> bool {
        constant_time_eq_16(&self.0, &other.0)
    }
}

impl Eq for Mac {}

impl Header {
    /// The header's bytes, with the seal that [`Sealing::read`] checks.
    pub fn write(&self) -> [u8; HEADER_BYTES] {
        self.write_as(if matches!(self.proof, Proof::Mac(_)) { VERSION_WITH_MAC } else { VERSION })
    }

    fn write_as(&self, version: u32) -> [u8; HEADER_BYTES] {
        let proof = match self.proof {
            Proof::Checksum(sum) => u128::from(sum).to_le_bytes(),
            Proof::Mac(mac) => mac.0,
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..PROOF_AT].copy_from_slice(&identity(version, &self.key, self.length_bytes));
        bytes[PROOF_AT..SEAL_AT].copy_from_slice(&proof);
        let seal = checksum(&bytes[..SEAL_AT]);
        bytes[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
        bytes
    }

    /// `None` if the bytes are no header of a version that this build knows: foreign, torn or damaged bytes, or a later
    /// version.
    fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let version = version(bytes)?;
        let proof = match version {
            VERSION_WITH_MAC => Proof::Mac(Mac(field(bytes, PROOF_AT))),
            version if [VERSION, EARLIEST_VERSION].contains(&version) => {
                Proof::Checksum(u64::from_le_bytes(field(bytes, PROOF_AT)))
            }
            _ => return None,
        };
        let hash = bytes[32..64].get(..bytes[14] as usize).and_then(|hash| BlockHash::new(hash).ok())?;
        let namespace = NamespaceId(u128::from_le_bytes(field(bytes, 16)));
        let group = u16::from_le_bytes(field(bytes, 12));
        let key = BlockKey { namespace, group, hash };
        let header = Header { key, length_bytes: u64::from_le_bytes(field(bytes, 64)), proof };
        // A MAC covers all that is read here, also the zeros.
        (header.write_as(version) == *bytes).then_some(header)
    }

    /// Whether this is the header of the block with that key and length.
    pub fn is_of(&self, key: &BlockKey, length_bytes: u64) -> bool {
        self.key == *key && self.length_bytes == length_bytes
    }
}

/// The header's first bytes: everything but proof and seal.
fn identity(version: u32, key: &BlockKey, length_bytes: u64) -> [u8; PROOF_AT] {
    let mut bytes = [0; PROOF_AT];
    let hash = key.hash.as_bytes();
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes[12..14].copy_from_slice(&key.group.to_le_bytes());
    bytes[14] = hash.len() as u8;
    bytes[16..32].copy_from_slice(&key.namespace.0.to_le_bytes());
    bytes[32..32 + hash.len()].copy_from_slice(hash);
    bytes[64..].copy_from_slice(&length_bytes.to_le_bytes());
    bytes
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

    fn key(hash: &[u8]) -> BlockKey {
        BlockKey { namespace: NamespaceId(7 << 100 | 9), group: 3, hash: BlockHash::new(hash).unwrap() }
    }

    fn header(hash: &[u8]) -> Header {
        Header { key: key(hash), length_bytes: 1 << 20, proof: Proof::Checksum(0x0123_4567_89ab_cdef) }
    }

    fn with_mac(hash: &[u8]) -> Header {
        Header { proof: Proof::Mac(Mac(*b"sixteen bytes ..")), ..header(hash) }
    }

    #[test]
    fn what_was_written_is_read() {
        for hash in [&[1][..], &[2; 8], &[3; 32]] {
            for header in [header(hash), with_mac(hash)] {
                assert_eq!(Header::read(&header.write()), Some(header));
            }
        }
    }

    #[test]
    fn zeros_of_the_format_are_zeros() {
        for (header, zeros) in [(header(&[5; 8]), &[15, 40, 63, 80, 87][..]), (with_mac(&[5; 8]), &[15, 40, 63])] {
            for at in zeros {
                let mut bytes = header.write();
                bytes[*at] = 1;
                let seal = checksum(&bytes[..SEAL_AT]);
                bytes[SEAL_AT..].copy_from_slice(&seal.to_le_bytes());
                assert_eq!(Header::read(&bytes), None, "byte {at}");
            }
        }
    }

    #[test]
    fn a_changed_bit_anywhere_makes_it_no_header() {
        for good in [header(&[5; 32]).write(), with_mac(&[5; 32]).write()] {
            for bit in 0..HEADER_BYTES * 8 {
                let mut bad = good;
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Header::read(&bad), None, "bit {bit}");
            }
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
        let bytes = with_mac(&[0xAB; 4]).write();
        assert_eq!(&bytes[..16], b"FOREBAYB\x02\0\0\0\x03\0\x04\0");
        assert_eq!(bytes[16..72], header(&[0xAB; 4]).write()[16..72]);
        assert_eq!(&bytes[72..88], b"sixteen bytes ..");
        assert_eq!(bytes[88..], checksum(&bytes[..88]).to_le_bytes());
    }
}
