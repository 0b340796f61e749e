//! Turns an engine's hashes into those of one adapter's weights.
//!
//! Invariant: the new hash is as long as the old one. It is SHA-256 of a block that stands for the adapter and of the
//! old hash, cut to that length. So two pairs of adapter and hash collide only if SHA-256 does, even for a tenant who
//! knows every key and chooses adapters and prompts. Exclusive or with a pad would let such a tenant balance one
//! against the other, which is cheaper than a collision.

use forebay_core::Error;
use sha2::{Digest, Sha256};

use crate::error::Raised;

// With the key it fills a block of SHA-256, so that a hash costs one round, 65 ns on a processor with SHA
// instructions.
const TAG: &[u8; 32] = b"forebay: a block of this adapter";

/// The state of SHA-256 after the adapter's block.
pub struct Mask(Sha256);

impl Mask {
    /// Errors with `Invalid` unless the key has 32 bytes.
    pub fn new(key: &[u8]) -> Result<Mask, Raised> {
        if key.len() != 32 {
            return Err(Error::invalid("a mask has 32 bytes").with("bytes", key.len()).into());
        }
        Ok(Mask(Sha256::new().chain_update(TAG).chain_update(key)))
    }

    #[inline]
    pub fn apply(&self, hash: &[u8]) -> Masked {
        let mut bytes = [0; MAX_LEN + 1];
        bytes[..MAX_LEN].copy_from_slice(&self.0.clone().chain_update(hash).finalize());
        // An input that is too long for a hash stays too long, so that it is refused.
        Masked { bytes, length: hash.len().min(MAX_LEN + 1) }
    }
}

const MAX_LEN: usize = forebay_core::BlockHash::MAX_LEN;

/// An adapter's hash.
pub struct Masked {
    bytes: [u8; MAX_LEN + 1],
    length: usize,
}

impl Masked {
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
