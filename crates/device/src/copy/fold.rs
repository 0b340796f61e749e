//! CRC-64/NVME folded while bytes are copied with AVX-512.
//!
//! Holds true: `lanes` is a 256-byte message with the same CRC remainder as all bytes copied since `prefix` was
//! last brought up to date. Folding replaces the message so far, M, by 256 bytes congruent to M·x^2048 and adds
//! the next 256 bytes: two carry-less multiplications per 16 bytes, in registers that hold the bytes anyway.
//! No reduction is done here: at a ragged edge, or at the end, the 256 bytes go through the ordinary checksum.
//!
//! The register that a CRC starts from counts as added to the message's first 8 bytes. So a run that begins
//! with register r has r in the lanes before its first stride, and when the lanes are summed as a message of
//! their own, the usual start value is cancelled by adding it once more.

use forebay_core::checksum::Checksum;

use super::memory::Span;
use super::x86;

/// CRC-64/NVME's polynomial 0xad93d23594c93659 with its bits reversed: the lowest bit is the highest power.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

const STRIDE_BITS: u64 = x86::STRIDE_BYTES as u64 * 8;

/// Factors that carry the first and the second 8 bytes of a 16-byte lane across one stride. Multiplying two
/// bit-reversed numbers yields the product times x, hence one power less than the distance.
pub(super) const FACTORS: [u64; 2] = [power_of_x(STRIDE_BITS + 63), power_of_x(STRIDE_BITS - 1)];

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
#[repr(C, align(64))]
pub(super) struct Lanes {
    pub(super) words: [u64; x86::STRIDE_BYTES / 8],
    /// Nothing was added yet: the words are a start value, which is not carried.
    pub(super) is_start: bool,
}

/// The checksum of what was copied through it, in order.
pub(super) struct FoldedSum {
    prefix: Checksum,
    lanes: Option<Lanes>,
}

impl FoldedSum {
    pub(super) fn new() -> FoldedSum {
        FoldedSum { prefix: Checksum::new(), lanes: None }
    }

    /// Copies and sums fewer bytes than the kernel takes, or bytes before the destination's first cache line.
    pub(super) fn copy_edge(&mut self, to: Span<'_>, from: Span<'_>) {
        if !from.is_empty() {
            self.settle();
            self.prefix.update(from.bytes());
            to.copy_from(from);
        }
    }

    /// Copies and sums whole strides to whole cache lines; `next` is what is likely to be copied after them.
    pub(super) fn copy_body(&mut self, to: Span<'_>, from: Span<'_>, next: Span<'_>) {
        assert_eq!(to.len(), from.len(), "both spans of a copy are of one length");
        if from.is_empty() {
            return;
        }
        let lanes = self.lanes.get_or_insert_with(|| Lanes::start(!self.prefix.finish()));
        // SAFETY: only `Level`'s AVX-512 leads here; both spans lie in their memory and are equally long; the
        // caller cut them to whole strides with `to` on a cache line.
        unsafe { x86::fold_and_stream(to.as_mut_ptr(), from.as_ptr(), from.len(), next.as_ptr(), lanes) }
    }

    pub(super) fn finish(mut self) -> u64 {
        self.settle();
        self.prefix.finish()
    }

    /// Turns the lanes into a plain prefix.
    fn settle(&mut self) {
        if let Some(Lanes { mut words, .. }) = self.lanes.take() {
            words[0] ^= !0;
            let mut bytes = [0; x86::STRIDE_BYTES];
            bytes.chunks_exact_mut(8).zip(words).for_each(|(chunk, word)| chunk.copy_from_slice(&word.to_le_bytes()));
            self.prefix = Checksum::new();
            self.prefix.update(&bytes);
        }
    }
}

impl Lanes {
    fn start(register: u64) -> Lanes {
        let mut words = [0; x86::STRIDE_BYTES / 8];
        words[0] = register;
        Lanes { words, is_start: true }
    }
}
