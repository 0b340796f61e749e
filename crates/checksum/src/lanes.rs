//! CRC-64/NVME folded in AVX registers, for callers that already have the bytes in registers.
//!
//! Invariant: the lanes are a 256-byte message with the same CRC remainder as all bytes of the checksum so far. Folding
//! replaces that message, M, by 256 bytes congruent to M·x^2048 and adds the next 256 bytes: two carry-less
//! multiplications per 16 bytes. There is no reduction here: at a ragged edge, and at the end, the 256 bytes are added
//! as any others are.
//!
//! The register that a CRC starts from counts as added to the message's first 8 bytes. So a run that begins with
//! register r has r in the lanes before its first stride. When the lanes are summed as a message of their own, the
//! register that they are added to is zero.
//!
//! Nothing here reads memory: the caller loads the bytes.

use std::arch::x86_64::*;

use super::polynomial::factors;
use super::x86;

/// What is folded at once.
pub const STRIDE_BYTES: usize = 256;
/// Of an AVX-512 register.
const WORDS: usize = 8;
/// Of a stride. Each hides another's latency.
const REGISTERS: usize = 4;
/// The same of AVX.
const WORDS_256: usize = 4;
const REGISTERS_256: usize = 8;

/// Carries a lane across one stride.
const FACTORS: [u64; 2] = factors(STRIDE_BYTES);

/// The folding of 32 bytes at a time.
macro_rules! fold_256 {
    ($(#[$about:meta])* $name:ident, $carry:ident, $features:literal) => {
        $(#[$about])*
        ///
        /// # Safety
        /// For callers without these instructions of their own: the machine has them.
        #[inline]
        #[target_feature(enable = $features)]
        pub fn $name(&mut self, strides: usize, mut load: impl FnMut(usize) -> __m256i) {
            if strides == 0 {
                return;
            }
            let words = self.words.as_flattened();
            let mut lane: [__m256i; REGISTERS_256] = std::array::from_fn(|i| register_256(&words[i * WORDS_256..]));
            let mut carried = if self.is_start { lane } else { lane.map(|lane| $carry(lane)) };
            for number in 0..strides {
                for i in 0..REGISTERS_256 {
                    let bytes = load(number * STRIDE_BYTES + i * WORDS_256 * 8);
                    lane[i] = _mm256_xor_si256(carried[i], bytes);
                    carried[i] = $carry(lane[i]);
                }
            }
            let words = self.words.as_flattened_mut().chunks_exact_mut(WORDS_256);
            words.zip(lane).for_each(|(words, lane)| words.copy_from_slice(&words_of_256(lane)));
            self.is_start = false;
        }
    };
}

/// See the module's head.
pub struct Lanes {
    words: [[u64; WORDS]; REGISTERS],
    /// Nothing was added yet: the words are a start value, which is not carried.
    is_start: bool,
}

impl Lanes {
    pub(super) fn start(register: u64) -> Lanes {
        let mut words = [[0; WORDS]; REGISTERS];
        words[0][0] = register;
        Lanes { words, is_start: true }
    }

    /// The register after all bytes.
    pub(super) fn register(&self) -> u64 {
        if self.is_start {
            return self.words[0][0];
        }
        let mut message = [0; STRIDE_BYTES];
        for (bytes, word) in message.as_chunks_mut().0.iter_mut().zip(self.words.as_flattened()) {
            *bytes = word.to_le_bytes();
        }
        x86::add(0, &message)
    }

    /// Folds `strides` strides. `load` brings 64 bytes of them, by their offset; it is called in ascending order.
    ///
    /// # Safety
    /// For callers without these instructions of their own: the machine has AVX-512F and VPCLMULQDQ.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub fn fold(&mut self, strides: usize, mut load: impl FnMut(usize) -> __m512i) {
        if strides == 0 {
            return;
        }
        let [a, b, c, d] = &self.words;
        let mut lane = [register(a), register(b), register(c), register(d)];
        let mut carried = if self.is_start { lane } else { lane.map(|lane| carry(lane)) };
        for number in 0..strides {
            for i in 0..REGISTERS {
                let bytes = load(number * STRIDE_BYTES + i * WORDS * 8);
                lane[i] = _mm512_xor_si512(carried[i], bytes);
                carried[i] = carry(lane[i]);
            }
        }
        let [a, b, c, d] = lane;
        self.words = [words_of(a), words_of(b), words_of(c), words_of(d)];
        self.is_start = false;
    }

    fold_256!(
        /// As [`Lanes::fold`] with 32 bytes at a time, for machines with AVX2 and VPCLMULQDQ.
        fold_256, carry_256, "avx2,vpclmulqdq"
    );
    fold_256!(
        /// As [`Lanes::fold_256`], for machines without VPCLMULQDQ, which have PCLMULQDQ.
        fold_2_by_128, carry_2_by_128, "avx2,pclmulqdq"
    );
}

/// Carries four 16-byte lanes across one stride.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn carry(lane: __m512i) -> __m512i {
    let factors = _mm512_broadcast_i32x4(_mm_set_epi64x(FACTORS[1] as i64, FACTORS[0] as i64));
    let first = _mm512_clmulepi64_epi128::<0x00>(lane, factors);
    let second = _mm512_clmulepi64_epi128::<0x11>(lane, factors);
    _mm512_xor_si512(first, second)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn register(words: &[u64; WORDS]) -> __m512i {
    let [a, b, c, d, e, f, g, h] = words.map(u64::cast_signed);
    _mm512_set_epi64(h, g, f, e, d, c, b, a)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn words_of(register: __m512i) -> [u64; WORDS] {
    let (low, high) = (_mm512_castsi512_si256(register), _mm512_extracti64x4_epi64::<1>(register));
    [
        _mm256_extract_epi64::<0>(low),
        _mm256_extract_epi64::<1>(low),
        _mm256_extract_epi64::<2>(low),
        _mm256_extract_epi64::<3>(low),
        _mm256_extract_epi64::<0>(high),
        _mm256_extract_epi64::<1>(high),
        _mm256_extract_epi64::<2>(high),
        _mm256_extract_epi64::<3>(high),
    ]
    .map(i64::cast_unsigned)
}

/// Carries two 16-byte lanes across one stride.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn carry_256(lane: __m256i) -> __m256i {
    let factors = _mm256_set_epi64x(FACTORS[1] as i64, FACTORS[0] as i64, FACTORS[1] as i64, FACTORS[0] as i64);
    let first = _mm256_clmulepi64_epi128::<0x00>(lane, factors);
    let second = _mm256_clmulepi64_epi128::<0x11>(lane, factors);
    _mm256_xor_si256(first, second)
}

/// As [`carry_256`], one lane after the other.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq")]
fn carry_2_by_128(lane: __m256i) -> __m256i {
    let factors = _mm_set_epi64x(FACTORS[1] as i64, FACTORS[0] as i64);
    let (low, high) = (_mm256_castsi256_si128(lane), _mm256_extracti128_si256::<1>(lane));
    let firsts = [_mm_clmulepi64_si128::<0x00>(low, factors), _mm_clmulepi64_si128::<0x00>(high, factors)];
    let seconds = [_mm_clmulepi64_si128::<0x11>(low, factors), _mm_clmulepi64_si128::<0x11>(high, factors)];
    _mm256_set_m128i(_mm_xor_si128(firsts[1], seconds[1]), _mm_xor_si128(firsts[0], seconds[0]))
}

/// The first four of `words`.
#[inline]
#[target_feature(enable = "avx2")]
fn register_256(words: &[u64]) -> __m256i {
    let word = |at: usize| words[at].cast_signed();
    _mm256_set_epi64x(word(3), word(2), word(1), word(0))
}

#[inline]
#[target_feature(enable = "avx2")]
fn words_of_256(register: __m256i) -> [u64; WORDS_256] {
    [
        _mm256_extract_epi64::<0>(register),
        _mm256_extract_epi64::<1>(register),
        _mm256_extract_epi64::<2>(register),
        _mm256_extract_epi64::<3>(register),
    ]
    .map(i64::cast_unsigned)
}
