//! Bytes on x86-64, with the carry-less multiplication of 16-byte registers.
//!
//! Invariants: as in `lanes`, the lanes are a message with the same remainder as all bytes so far. A function that
//! needs instructions is called only after this machine was asked for them.

#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::polynomial::factors;
use super::table;

/// Bytes of a lane.
const LANE: usize = 16;
/// Lanes at once. Each hides another's latency.
const LANES: usize = 4;
/// Carries a lane across the next one.
const NEXT: [u64; 2] = factors(LANE);
/// Carries a lane to its place in the next group.
const GROUP: [u64; 2] = factors(LANE * LANES);

/// The register after `bytes`: four lanes at a time, then a lane at a time, and the end by tables.
pub fn add(register: u64, bytes: &[u8]) -> u64 {
    let (lanes, end) = bytes.as_chunks::<LANE>();
    if lanes.len() < 2 || !is_x86_feature_detected!("pclmulqdq") {
        return table::add(register, bytes);
    }
    // SAFETY: the machine has the instructions.
    let message = unsafe { fold_lanes(register, lanes) };
    table::add(table::add(0, &message), end)
}

/// A lane with the same remainder as `lanes` behind `register`, from a register of zero.
#[target_feature(enable = "sse2,pclmulqdq")]
fn fold_lanes(register: u64, lanes: &[[u8; LANE]]) -> [u8; LANE] {
    // SAFETY: a lane is as long as a register, and the load needs no alignment.
    let load = |lane: &[u8; LANE]| unsafe { _mm_loadu_si128(lane.as_ptr().cast()) };
    let start = _mm_set_epi64x(0, register.cast_signed());
    let (groups, rest) = lanes.as_chunks::<LANES>();
    let mut message = None;
    if let Some((first, groups)) = groups.split_first() {
        let mut sums = first.map(|lane| load(&lane));
        sums[0] = _mm_xor_si128(sums[0], start);
        for group in groups {
            for (sum, lane) in sums.iter_mut().zip(group) {
                *sum = _mm_xor_si128(carry(*sum, GROUP), load(lane));
            }
        }
        message = sums.into_iter().reduce(|message, sum| _mm_xor_si128(carry(message, NEXT), sum));
    }
    for lane in rest {
        let before = message.map_or(start, |message| carry(message, NEXT));
        message = Some(_mm_xor_si128(before, load(lane)));
    }
    let mut bytes = [0; LANE];
    // SAFETY: the array is as long as a register, and the store needs no alignment.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), message.unwrap_or(start)) };
    bytes
}

/// Carries a lane across the distance of `factors`.
#[inline]
#[target_feature(enable = "sse2,pclmulqdq")]
fn carry(lane: __m128i, factors: [u64; 2]) -> __m128i {
    let factors = _mm_set_epi64x(factors[1].cast_signed(), factors[0].cast_signed());
    _mm_xor_si128(_mm_clmulepi64_si128::<0x00>(lane, factors), _mm_clmulepi64_si128::<0x11>(lane, factors))
}
