//! The streaming kernels of x86-64: loads through the cache, stores past it.
//!
//! Each copies whole strides of 256 bytes to whole cache lines, so that one run of stores writes every line and the
//! write-combining buffers never flush half a line.

use std::arch::x86_64::*;

use forebay_core::checksum::Lanes;
pub(super) use forebay_core::checksum::STRIDE_BYTES;

pub(super) const LINE_BYTES: usize = 64;

/// Prefetch distance of the folding loop, also across the end of a fragment. Without the prefetch the loop keeps
/// fewer loads in flight than a plain copy (its multiplications seem to fill the schedulers), and each 4 KiB page
/// starts cold: blocks of 32 fragments of 16 KiB went from 1.0 to 1.2 times memcpy
/// (bench/reports/2026-11-21-copy.md).
const AHEAD_BYTES: usize = 4096;

/// In longer fragments the hardware prefetchers do better alone, except at the end: 1.36 against 1.25 times memcpy at
/// 1 MiB on one thread.
const SHORT_BYTES: usize = 64 << 10;

pub(super) fn store_fence() {
    // SAFETY: every x86-64 has SSE.
    unsafe { _mm_sfence() }
}

/// The two kernels of a width: one copies and folds, one folds.
macro_rules! kernels {
    ($copy:ident, $sum:ident, $fold:ident, $load:ident, $stream:ident, $features:literal) => {
        /// Copies `len` bytes and folds them into `lanes`; `next` is the source of the next copy.
        ///
        /// # Safety
        /// The machine has the instructions; both ranges are valid and disjoint; `len` is a multiple of `STRIDE_BYTES`
        /// and `to` of `LINE_BYTES`. `next` may be any address.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $copy(to: *mut u8, from: *const u8, len: usize, next: *const u8, lanes: &mut Lanes) {
            let prefetch_from = prefetch_from(from, len, next);
            lanes.$fold(len / STRIDE_BYTES, |at| {
                if at.is_multiple_of(STRIDE_BYTES) && at >= prefetch_from {
                    prefetch_stride(match (at + AHEAD_BYTES).checked_sub(len) {
                        None => from.wrapping_add(at + AHEAD_BYTES),
                        Some(past) => next.wrapping_add(past),
                    });
                }
                // SAFETY: `at` and a register lie within `len`, which the caller guarantees.
                let bytes = unsafe { $load(from.add(at).cast()) };
                // SAFETY: as above, and `to` is on a cache line.
                unsafe { $stream(to.add(at).cast(), bytes) };
                bytes
            });
        }

        /// Folds `len` bytes into `lanes`.
        ///
        /// # Safety
        /// The machine has the instructions; the range is valid; `len` is a multiple of `STRIDE_BYTES`.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $sum(from: *const u8, len: usize, lanes: &mut Lanes) {
            // SAFETY: `at` and a register lie within `len`, which the caller guarantees.
            lanes.$fold(len / STRIDE_BYTES, |at| unsafe { $load(from.add(at).cast()) });
        }
    };
}

kernels!(copy_512, sum_512, fold, _mm512_loadu_si512, _mm512_stream_si512, "avx512f,vpclmulqdq");
kernels!(copy_256, sum_256, fold_256, _mm256_loadu_si256, _mm256_stream_si256, "avx2,vpclmulqdq");
kernels!(copy_2_by_128, sum_2_by_128, fold_2_by_128, _mm256_loadu_si256, _mm256_stream_si256, "avx2,pclmulqdq");

/// Where in a fragment of `len` bytes the prefetch begins; `next` is the source of the next copy.
fn prefetch_from(from: *const u8, len: usize, next: *const u8) -> usize {
    match next {
        // The hardware prefetchers continue by themselves.
        _ if next == from.wrapping_add(len) => len,
        _ if len <= SHORT_BYTES => 0,
        _ => len - AHEAD_BYTES,
    }
}

fn prefetch_stride(start: *const u8) {
    for line in 0..STRIDE_BYTES / LINE_BYTES {
        // SAFETY: every x86-64 has SSE, and a prefetch of any address affects caches only.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(start.wrapping_add(line * LINE_BYTES).cast()) }
    }
}

/// # Safety
/// As for [`copy_512`], but VPCLMULQDQ is not needed.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn stream_avx512(to: *mut u8, from: *const u8, len: usize) {
    for at in (0..len).step_by(LINE_BYTES) {
        // SAFETY: `at + LINE_BYTES <= len`, which the caller guarantees in both ranges; `to` is aligned.
        unsafe { _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast())) };
    }
}

/// # Safety
/// As for [`copy_512`], on a machine with AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn stream_avx2(to: *mut u8, from: *const u8, len: usize) {
    for at in (0..len).step_by(LINE_BYTES / 2) {
        // SAFETY: `at + LINE_BYTES / 2 <= len`, which the caller guarantees in both ranges; `to` is aligned.
        unsafe { _mm256_stream_si256(to.add(at).cast(), _mm256_loadu_si256(from.add(at).cast())) };
    }
}
