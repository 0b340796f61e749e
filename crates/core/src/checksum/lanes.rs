//! CRC-64/NVME folded in AVX-512 registers, for callers that already have the bytes in registers.
//!
//! Invariant: the lanes are a 256-byte message with the same CRC remainder as all bytes of the checksum so far. Folding
//! replaces that message, M, by 256 bytes congruent to M·x^2048 and adds the next 256 bytes: two carry-less
//! multiplications per 16 bytes. There is no reduction here: at a ragged edge, and at the end, the 256 bytes go through
//! the ordinary checksum.
//!
//! The register that a CRC starts from counts as added to the message's first 8 bytes. So a run that begins with
//! register r has r in the lanes before its first stride. When the lanes are summed as a message of their own, the
//! usual start value is cancelled by adding it once more.
//!
//! Nothing here reads memory: the caller loads the bytes.

use std::arch::x86_64::*;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use crc_fast::Digest;

use super::POLYNOMIAL;

/// What is folded at once.
pub const STRIDE_BYTES: usize = 256;
const STRIDE_BITS: u64 = STRIDE_BYTES as u64 * 8;
/// Of a register.
const WORDS: usize = 8;
/// Of a stride. Each hides another's latency.
const REGISTERS: usize = 4;

/// Factors that carry the first and the second 8 bytes of a 16-byte lane across one stride. Multiplying two
/// bit-reversed numbers yields the product times x, hence one power less than the distance.
const FACTORS: [u64; 2] = [power_of_x(STRIDE_BITS + 63), power_of_x(STRIDE_BITS - 1)];

/// x^n modulo the polynomial, bits reversed.
const fn power_of_x(n: u64) -> u64 {
    let mut power = 1 << 63;
    let mut i = 0;
    while i < n {
        power = (power >> 1) ^ (POLYNOMIAL * (power & 1));
        i += 1;
    }
    power
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

    /// What is to go on where the lanes end.
    pub(super) fn digest(&self) -> Digest {
        if self.is_start {
            return Digest::new_with_init_state(Crc64Nvme, self.words[0][0]);
        }
        let mut message = [0; STRIDE_BYTES];
        for (at, (bytes, word)) in message.chunks_exact_mut(8).zip(self.words.as_flattened()).enumerate() {
            let word = if at == 0 { !*word } else { *word };
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut digest = Digest::new(Crc64Nvme);
        digest.update(&message);
        digest
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
