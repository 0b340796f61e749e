//! The checksum of a block: CRC-64/NVME over its slices in rank order.
//!
//! Each rank reports the checksum of its own slice. The daemon combines these into one checksum for the whole block, so
//! every tier stores and verifies one number. CRC-64 was chosen over CRC-32C because with petabytes read per day, 32
//! bits do collide; it costs the same (25 GB/s per core with VPCLMULQDQ).
//!
//! [`Checksum::update`] sums bytes that can be borrowed. Bytes that other processes may write cannot be borrowed: a
//! crate that may read them by address folds the bytes that it read into [`Checksum::lanes`].
//!
//! The CRC's register starts with all bits set, and the checksum is the register with its bits inverted. Long runs of
//! bytes are folded in the widest registers that this machine has (`strides` and `lanes`, `x86`, `aarch64`); short ends
//! go through tables (`table`).

#![deny(missing_docs)]

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod lanes;
mod polynomial;
#[cfg(target_arch = "x86_64")]
mod strides;
mod table;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
use aarch64::add;
#[cfg(target_arch = "x86_64")]
pub use lanes::{Lanes, STRIDE_BYTES};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use table::add;
#[cfg(target_arch = "x86_64")]
use x86::add;

use polynomial::{SQUARES, multiply};

/// Checksum of `bytes`. About 25 GB/s from memory with AVX-512, more from cache.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::new();
    sum.update(bytes);
    sum.finish()
}

/// Checksum of `a` followed by `b`, from the checksums of both; `b_len` is in bytes. Below 2 µs.
///
/// Appending `n` zero bits multiplies a checksum by `x^n` modulo the polynomial, and the powers `x^(2^k)` are
/// known: one multiplication for each bit of the length.
pub fn combine(a: u64, b: u64, b_len: u64) -> u64 {
    let mut shifted = a;
    for bit in 0..u64::BITS - 3 {
        if b_len >> bit & 1 == 1 {
            shifted = multiply(SQUARES[bit as usize + 3], shifted);
        }
    }
    shifted ^ b
}

/// Checksum over several pieces in order.
pub struct Checksum {
    /// After all bytes so far, unless there are lanes.
    register: u64,
    /// If there are any, they stand for all bytes so far.
    #[cfg(target_arch = "x86_64")]
    lanes: Option<Lanes>,
}

impl Checksum {
    /// Over no bytes yet.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Checksum {
        Checksum {
            register: !0,
            #[cfg(target_arch = "x86_64")]
            lanes: None,
        }
    }

    /// Appends `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        #[cfg(target_arch = "x86_64")]
        let bytes = strides::fold(&mut self.lanes, self.register, bytes);
        if !bytes.is_empty() {
            self.register = add(self.register(), bytes);
            #[cfg(target_arch = "x86_64")]
            (self.lanes = None);
        }
    }

    /// Where whole strides are to be folded in.
    #[cfg(target_arch = "x86_64")]
    pub fn lanes(&mut self) -> &mut Lanes {
        self.lanes.get_or_insert_with(|| Lanes::start(self.register))
    }

    /// The checksum of all bytes appended so far; more may follow.
    pub fn finish(&self) -> u64 {
        !self.register()
    }

    fn register(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if let Some(lanes) = &self.lanes {
            return lanes.register();
        }
        self.register
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::polynomial::POLYNOMIAL;
    use super::*;

    /// By the definition: a bit at a time.
    fn defined(bytes: &[u8]) -> u64 {
        !bytes.iter().fold(!0, |register, byte| {
            (0..8).fold(register ^ u64::from(*byte), |r, _| if r & 1 == 1 { r >> 1 ^ POLYNOMIAL } else { r >> 1 })
        })
    }

    fn arbitrary_bytes(len: usize, seed: u64) -> Vec<u8> {
        let mut word = seed | 1;
        let mut next = || {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn the_check_value_is_the_published_one() {
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(checksum(b""), 0);
    }

    #[test]
    fn every_short_length_is_summed_as_defined() {
        let bytes = arbitrary_bytes(1_100, 7);
        for len in 0..bytes.len() {
            assert_eq!(checksum(&bytes[..len]), defined(&bytes[..len]), "{len} bytes");
            assert_eq!(!table::add(!0, &bytes[..len]), defined(&bytes[..len]), "{len} bytes by tables");
            assert_eq!(!add(!0, &bytes[..len]), defined(&bytes[..len]), "{len} bytes without strides");
        }
    }

    proptest! {
        /// Pieces of any length, at any place, with the checksum so far asked for in between.
        #[test]
        fn pieces_of_any_length_sum_up_as_defined(
            seed: u64,
            begin in 0..64usize,
            pieces in prop::collection::vec(prop_oneof![0..40usize, 200..600usize, 1_000..9_000usize], 0..8),
        ) {
            let bytes = arbitrary_bytes(begin + pieces.iter().sum::<usize>(), seed);
            let (mut sum, mut at) = (Checksum::new(), begin);
            for len in pieces {
                sum.update(&bytes[at..at + len]);
                at += len;
                prop_assert_eq!(sum.finish(), defined(&bytes[begin..at]));
            }
        }
    }

    #[test]
    fn long_slices_combine_as_zeros_appended_one_by_one() {
        // From the register's side: `n` zero bytes after a checksum multiply it by x^8n.
        for (length, power) in [(1, 1), (255, 255), (4_097, 4_097u64), (1 << 20, 1 << 20)] {
            let mut shifted = 17u64;
            for _ in 0..power {
                shifted = (0..8).fold(shifted, |r, _| if r & 1 == 1 { r >> 1 ^ POLYNOMIAL } else { r >> 1 });
            }
            assert_eq!(combine(17, 23, length), shifted ^ 23, "{length}");
        }
        // Lengths that no test can walk: two steps are one.
        for length in [(40 << 20) + 4_097, u64::from(u32::MAX) * 3] {
            assert_eq!(combine(combine(17, 0, length - 99), 23, 99), combine(17, 23, length), "{length}");
        }
    }

    #[test]
    fn slices_combine_to_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
        for cut in [0, 1, 17, 4096, 9_999, 10_000] {
            let (a, b) = bytes.split_at(cut);
            assert_eq!(combine(checksum(a), checksum(b), b.len() as u64), checksum(&bytes));
        }
    }
}
