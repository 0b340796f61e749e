//! Identifiers: namespaces, block hashes, block keys, slots; and the short ones that only the core uses.
//!
//! A block key is (namespace, the engine's block hash, group). The hash is opaque: it is compared, stored and sent as
//! it came, and never computed here.

use std::fmt;

use crate::error::{Error, Result};

/// Digest of everything that makes two KV caches interchangeable; see [`crate::namespace`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u128);

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The engine's hash of a block and all before it: 1 to 32 opaque bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash {
    len: u8,
    bytes: [u8; BlockHash::MAX_LEN],
}

impl BlockHash {
    /// SHA-256 is the longest hash an engine uses today.
    pub const MAX_LEN: usize = 32;

    /// Equal to no hash: of a slot that has no key.
    pub(crate) const NONE: BlockHash = BlockHash { len: 0, bytes: [0; BlockHash::MAX_LEN] };

    /// Errors with `Invalid` if the hash is empty or longer than 32 bytes.
    pub fn new(hash: &[u8]) -> Result<BlockHash> {
        if hash.is_empty() || hash.len() > BlockHash::MAX_LEN {
            let error = Error::invalid("a block hash has 1 to 32 bytes").with("bytes", hash.len());
            return Err(error.hint("give a digest, such as SHA-256, of all that the block depends on"));
        }
        let mut bytes = [0; BlockHash::MAX_LEN];
        bytes[..hash.len()].copy_from_slice(hash);
        Ok(BlockHash { len: hash.len() as u8, bytes })
    }

    /// Whether these are its bytes. Hashes of full length, the usual ones, are compared without a call.
    #[inline]
    pub fn is(&self, hash: &[u8]) -> bool {
        match hash.as_chunks::<16>() {
            ([low, high], []) => {
                let (own, _) = self.bytes.as_chunks::<16>();
                let is_same = |at: usize, part| u128::from_ne_bytes(own[at]) == u128::from_ne_bytes(part);
                self.len as usize == BlockHash::MAX_LEN && is_same(0, *low) && is_same(1, *high)
            }
            _ => self.as_bytes() == hash,
        }
    }

    /// The 1 to 32 bytes that [`BlockHash::new`] was given.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }

    /// From pairs of hexadecimal digits, of either case. `Display` writes small letters: to check that a text is
    /// exactly what `Display` would write, compare the two.
    pub fn from_hex(text: &str) -> Option<BlockHash> {
        let digits = text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok());
        BlockHash::new(&digits.collect::<Option<Vec<u8>>>()?).ok()
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The name of one block in every tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockKey {
    /// The cache that the block belongs to.
    pub namespace: NamespaceId,
    /// Index of the block's group in the namespace's layout.
    pub group: u16,
    /// The engine's hash.
    pub hash: BlockHash,
}

/// Consecutive keys of one group, as they travel.
#[derive(Clone, Copy)]
pub struct PackedKeys<'a> {
    /// The cache that they belong to.
    pub namespace: NamespaceIndex,
    /// Index of their group in the namespace's layout.
    pub group: u16,
    /// One after another, in prefix order.
    pub hashes: &'a [u8],
    /// Of each of them.
    pub hash_bytes: usize,
}

impl PackedKeys<'_> {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.hashes.len() / self.hash_bytes
    }

    /// The hash of number `at`.
    pub fn hash(&self, at: usize) -> &[u8] {
        &self.hashes[at * self.hash_bytes..][..self.hash_bytes]
    }
}

/// A slot of the pool, named by the number of its first 4 KiB page in the data file, so that its byte offset
/// is `page * 4096` whatever its size class. 32 bits reach 16 TiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotId(pub u32);

/// Slots begin on multiples of this many bytes, and their sizes are multiples of it.
pub const PAGE_BYTES: u64 = 4096;

impl SlotId {
    /// Byte offset in the data file.
    pub fn offset(self) -> u64 {
        u64::from(self.0) * PAGE_BYTES
    }
}

/// Counts how often a slot was handed to a new owner; a holder of an older generation has lost the slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Generation(pub u32);

/// Number of an engine process group in this pool, 0 to 63: the bit it has in a slot's holder mask and the
/// range of lock bytes its workers hold.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Instance(pub u8);

impl Instance {
    /// A holder mask has 64 bits; one host runs a handful of engines.
    pub const MAX: usize = 64;

    /// The daemon itself, which fills slots for `Put` and reads blocks for `Get`. No engine has its number. The end of
    /// a session does not end what the daemon holds: each of its copies ends by itself.
    pub const DAEMON: Instance = Instance(63);

    /// This instance's bit in a holder mask.
    pub fn bit(self) -> u64 {
        1 << self.0
    }
}

/// Index of a block's record; reused after the block is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// No block: the end of a list.
    pub const NONE: BlockId = BlockId(u32::MAX);
}

/// Short name of a namespace inside the core; never on any medium.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct NamespaceIndex(pub u32);

impl NamespaceIndex {
    /// No namespace: of a record without a block.
    pub const NONE: NamespaceIndex = NamespaceIndex(u32::MAX);
}

/// Number of a tier, in the order they were opened: the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct TierId(pub u8);

impl TierId {
    /// A block's record has a bit for each.
    pub const MAX: usize = 8;

    #[inline]
    pub(crate) fn bit(self) -> u8 {
        1 << self.0
    }
}

/// A size class of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ClassId(pub u16);

/// A key's hash inside the core. Block hashes are opaque and may be chosen by a hostile client, hence the seed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint(pub u64);

impl Fingerprint {
    /// The hash of a key under `seed`; a core uses one seed for its whole life.
    #[inline]
    pub fn new(seed: u64, namespace: NamespaceIndex, group: u16, hash: &[u8]) -> Fingerprint {
        // Both factors of a product hold a part of the seed, or a client could make them zero.
        let one = seed ^ 0x9e37_79b9_7f4a_7c15 ^ (u64::from(namespace.0) << 16 | u64::from(group));
        let other = seed.rotate_left(32) ^ 0xd1b5_4a32_d192_ed03 ^ hash.len() as u64;
        let sum = match hash.as_chunks::<16>() {
            // The usual length, without a loop.
            ([low, high], []) => mix_part(low, one, other).rotate_left(23) ^ mix_part(high, one, other),
            (parts, rest) => mix_parts(parts, rest, one, other),
        };
        Fingerprint(mix(sum ^ one, other))
    }
}

#[inline(never)]
fn mix_parts(parts: &[[u8; 16]], rest: &[u8], one: u64, other: u64) -> u64 {
    let sum = parts.iter().fold(0u64, |sum, part| sum.rotate_left(23) ^ mix_part(part, one, other));
    if rest.is_empty() {
        return sum;
    }
    let mut last = [0; 16];
    last[..rest.len()].copy_from_slice(rest);
    sum.rotate_left(23) ^ mix_part(&last, one, other)
}

/// Each part is mixed on its own, so that the multiplications overlap.
#[inline]
fn mix_part(part: &[u8; 16], one: u64, other: u64) -> u64 {
    let part = u128::from_le_bytes(*part);
    mix(part as u64 ^ one, (part >> 64) as u64 ^ other)
}

#[inline]
fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}
