//! Borrowed bytes in the widest registers of this machine.
//!
//! Invariant: a function that needs instructions is called only after this machine was asked for them.

#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::lanes::{Lanes, STRIDE_BYTES};

/// Fewer are faster without: the 256 bytes of the lanes have to be added at the end.
const WORTHWHILE_STRIDES: usize = 4;

/// Folds whole strides into `lanes` where that pays; returns the bytes behind them. Lanes that are not there yet begin
/// with `register`.
pub fn fold<'a>(lanes: &mut Option<Lanes>, register: u64, bytes: &'a [u8]) -> &'a [u8] {
    let (strides, rest) = bytes.as_chunks();
    if strides.len() < WORTHWHILE_STRIDES {
        return bytes;
    }
    let Some((_, fold)) = widths().find(|(is_here, _)| *is_here) else { return bytes };
    // SAFETY: the machine has the instructions.
    unsafe { fold(lanes.get_or_insert_with(|| Lanes::start(register)), strides) };
    rest
}

/// Folds strides; only for machines that have its instructions.
type Fold = unsafe fn(&mut Lanes, &[[u8; STRIDE_BYTES]]);

/// Widest first, each with whether this machine has its instructions.
fn widths() -> impl Iterator<Item = (bool, Fold)> {
    let has_vpclmul = is_x86_feature_detected!("vpclmulqdq");
    let has_avx2 = is_x86_feature_detected!("avx2");
    let widths: [(bool, Fold); 3] = [
        (has_vpclmul && is_x86_feature_detected!("avx512f"), fold_512),
        (has_vpclmul && has_avx2, fold_256),
        (has_avx2 && is_x86_feature_detected!("pclmulqdq"), fold_2_by_128),
    ];
    widths.into_iter()
}

/// The three widths differ in names only.
macro_rules! fold_borrowed {
    ($name:ident, $fold:ident, $load:ident, $features:literal) => {
        #[target_feature(enable = $features)]
        fn $name(lanes: &mut Lanes, strides: &[[u8; STRIDE_BYTES]]) {
            let bytes = strides.as_flattened();
            // SAFETY: the lanes ask for registers that lie within the strides; the loads need no alignment.
            lanes.$fold(strides.len(), |at| unsafe { $load(bytes.as_ptr().add(at).cast()) });
        }
    };
}

fold_borrowed!(fold_512, fold, _mm512_loadu_si512, "avx512f,vpclmulqdq");
fold_borrowed!(fold_256, fold_256, _mm256_loadu_si256, "avx2,vpclmulqdq");
fold_borrowed!(fold_2_by_128, fold_2_by_128, _mm256_loadu_si256, "avx2,pclmulqdq");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table;

    #[test]
    fn every_width_of_this_machine_agrees_with_the_tables() {
        let bytes: Vec<u8> = (0..10 * STRIDE_BYTES as u32).map(|i| (i.wrapping_mul(i) / 7) as u8).collect();
        for (number, (_, fold)) in widths().enumerate().filter(|(_, (is_here, _))| *is_here) {
            for strides in 1..=10 {
                let (mut lanes, bytes) = (Lanes::start(!0), &bytes[..strides * STRIDE_BYTES]);
                // SAFETY: the machine has the instructions.
                unsafe { fold(&mut lanes, bytes.as_chunks().0) };
                assert_eq!(lanes.register(), table::add(!0, bytes), "{strides} strides, width {number}");
            }
        }
    }
}
