//! A lookup as the analysis gets it.

use std::time::Instant;

use forebay_core::layout::Attention;
use forebay_core::{NamespaceId, NamespaceIndex};

/// One group of one lookup, as it was answered.
pub struct Seen {
    pub at: Instant,
    pub namespace: NamespaceIndex,
    pub id: NamespaceId,
    pub group: u16,
    pub block_tokens: u32,
    pub block_bytes: u64,
    pub attention: Attention,
    /// Packed, `hash_bytes` each, in prefix order.
    pub hashes: Vec<u8>,
    pub hash_bytes: usize,
    /// Ready ones from the first on.
    pub hits: usize,
}
