//! The namespaces of the model's world and the prompts asked for in them.
//!
//! Sizes are those of real models divided by some hundreds, so that a pool of a few units sees every kind of trouble:
//! 4 KiB stands for 16 KiB blocks, 160 KiB for 40 MiB, and 384 KiB for blocks larger than a unit. A unit has 64 of the
//! smallest slots, since one step of a drain looks at 32.

use forebay_core::layout::{Attention, GroupLayout, Layout};

pub const UNIT_BYTES: u64 = 256 << 10;
pub const NAMESPACES: u8 = 4;

pub fn layout(namespace: u8) -> Layout {
    let group = |attention, tokens_per_block, rank_bytes: &[u64]| GroupLayout {
        attention,
        tokens_per_block,
        rank_bytes: rank_bytes.to_vec(),
        is_replicated: false,
    };
    let groups = match namespace {
        0 => vec![(0, group(Attention::Full, 4, &[4096]))],
        1 => vec![(0, group(Attention::Full, 8, &[20_000, 20_000])), (3, group(Attention::Windowed, 8, &[163_840]))],
        2 => vec![(0, group(Attention::Full, 64, &[393_216]))],
        // Shares its class with namespace 0.
        _ => vec![(0, group(Attention::Full, 4, &[2048, 2048])), (1, group(Attention::Windowed, 2, &[4096]))],
    };
    Layout::new(groups).expect("the model's layouts are right")
}

/// Bytes of a hash in this namespace: the shortest, the usual, the longest.
pub fn hash_bytes(namespace: u8) -> usize {
    [8, 32, 1, 8][namespace as usize]
}

/// Prompts of different chains begin alike and part later. The same hash names blocks of all groups, and of
/// namespaces 0 and 3.
pub fn hash(namespace: u8, chain: u8, position: u8) -> Vec<u8> {
    let chain = chain % 6;
    let chain = if position < chain * 2 { 0 } else { chain };
    let mut hash = vec![0xa5; hash_bytes(namespace)];
    hash[0] = (chain << 5) | (position % 32);
    hash
}
