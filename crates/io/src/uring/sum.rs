//! Checksums of bytes in place that other processes may write.
//!
//! Invariants: nobody forms a reference to the bytes. With AVX-512 they are folded as they are read; elsewhere they
//! go through a small buffer.

#![allow(unsafe_code)]

use std::ptr;

use forebay_core::checksum::Checksum;

/// Size of the buffer. Smaller ones cost more calls, larger ones more clearing: 4 KiB gives 9 GB/s, 16 KiB 17, 64 KiB
/// 18, against 28 for plain memory (`pool_speed` in `crates/bench`).
const BOUNCE_BYTES: usize = 16 << 10;

/// Adds the `len` bytes at `from` to `sum`.
///
/// # Safety
/// The bytes must be mapped and readable. If somebody writes them at the same time, the sum is that of a mix.
pub(crate) unsafe fn sum_up(sum: &mut Checksum, from: *const u8, len: usize) {
    // SAFETY: the caller guarantees `len` bytes, and no more than these are folded.
    let folded = unsafe { fold(sum, from, len) };
    let (mut buffer, mut done) = ([0; BOUNCE_BYTES], folded);
    while done < len {
        let piece = &mut buffer[..(len - done).min(BOUNCE_BYTES)];
        // SAFETY: the source ends within `len` bytes of `from`; the target is Rust's own.
        unsafe { ptr::copy_nonoverlapping(from.add(done), piece.as_mut_ptr(), piece.len()) };
        sum.update(piece);
        done += piece.len();
    }
}

/// Folds as many whole strides as there are, if this machine can; returns their length in bytes.
///
/// # Safety
/// As for [`sum_up`].
#[cfg(target_arch = "x86_64")]
unsafe fn fold(sum: &mut Checksum, from: *const u8, len: usize) -> usize {
    use std::arch::x86_64::*;

    use forebay_core::checksum::{Lanes, STRIDE_BYTES};

    #[target_feature(enable = "avx512f,vpclmulqdq")]
    unsafe fn fold(lanes: &mut Lanes, from: *const u8, strides: usize) {
        // SAFETY: `at` stays within the strides that the caller guarantees.
        lanes.fold(strides, |at| unsafe { _mm512_loadu_si512(from.add(at).cast()) });
    }

    let strides = len / STRIDE_BYTES;
    if strides == 0 || !is_x86_feature_detected!("avx512f") || !is_x86_feature_detected!("vpclmulqdq") {
        return 0;
    }
    // SAFETY: the machine has the instructions, and that many strides lie within `len` bytes.
    unsafe { fold(sum.lanes(), from, strides) };
    strides * STRIDE_BYTES
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn fold(_sum: &mut Checksum, _from: *const u8, _len: usize) -> usize {
    0
}

#[cfg(test)]
mod tests {
    use forebay_core::checksum::checksum;

    use super::*;
    use crate::uring::Region;

    #[test]
    fn pieces_of_any_length_and_place_sum_up_to_the_whole() {
        let bytes: Vec<u8> = (0..80_000u32).map(|i| (i.wrapping_mul(i) / 7 + 1) as u8).collect();
        let region = Region::anonymous(bytes.len()).unwrap();
        region.write(0, &bytes);
        for (begin, pieces) in [
            (0, [0, 1, 255, 256, 257, 4096]),
            (7, [512, 3, 768, 0, 40_000, 1]),
            (64, [17_000, 256, 256, 9, 16_384, 300]),
        ] {
            let (mut sum, mut at) = (Checksum::new(), begin);
            for len in pieces {
                region.sum(&mut sum, at as u64, len);
                at += len;
                assert_eq!(sum.finish(), checksum(&bytes[begin..at]), "{len} bytes up to {at} from {begin}");
            }
            sum.update(b"end");
            assert_eq!(sum.finish(), checksum(&[&bytes[begin..at], b"end"].concat()), "bytes of our own behind them");
        }
    }
}
