//! Prompts and the names of their blocks, as the benchmarks of the core ask for them.

use forebay_core::layout::{Attention, GroupLayout, Layout};

/// One group of full attention, in blocks of 16 tokens.
pub fn layout(block_bytes: u64) -> Layout {
    let group = GroupLayout {
        attention: Attention::Full,
        tokens_per_block: 16,
        rank_bytes: vec![block_bytes],
        is_replicated: false,
    };
    Layout::new(vec![(0, group)]).expect("the layout is right")
}

/// The name of a prompt's block: 32 bytes, as of SHA-256.
pub fn hash(prompt: usize, position: usize) -> [u8; 32] {
    let mut bytes = [0; 32];
    let mut word = scramble(prompt as u64) ^ position as u64;
    for part in bytes.chunks_exact_mut(8) {
        word = scramble(word);
        part.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// SplitMix64.
pub fn scramble(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
