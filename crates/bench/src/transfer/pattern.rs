//! Bytes that say where they belong, so that each that arrives is compared.

use forebay_fabric::Memory;

/// The eight bytes of the pattern at `word`.
fn pattern(seed: u64, word: u64) -> [u8; 8] {
    let mixed = (word ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).to_le_bytes()
}

/// Words at a time: one page.
const PAGE: usize = 4096;

fn page(seed: u64, offset: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    for (at, word) in page.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&pattern(seed, offset / 8 + at as u64));
    }
    page
}

/// With the pattern, or with zeros.
pub fn fill(memory: &Memory, start: u64, bytes: u64, seed: Option<u64>) {
    for offset in (0..bytes).step_by(PAGE) {
        let now = (bytes - offset).min(PAGE as u64) as usize;
        let page = seed.map_or([0; PAGE], |seed| page(seed, offset));
        memory.write(start + offset, &page[..now]);
    }
}

pub fn wrong_bytes(memory: &Memory, start: u64, bytes: u64, seed: u64) -> u64 {
    let mut found = [0; PAGE];
    let mut wrong = 0;
    for offset in (0..bytes).step_by(PAGE) {
        let now = (bytes - offset).min(PAGE as u64) as usize;
        memory.read(start + offset, &mut found[..now]);
        let expected = page(seed, offset);
        if found[..now] != expected[..now] {
            wrong += found[..now].iter().zip(&expected).filter(|(a, b)| a != b).count() as u64;
        }
    }
    wrong
}
