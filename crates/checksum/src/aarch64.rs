//! Borrowed bytes on aarch64, with the carry-less multiplication that its cryptographic extension has.
//!
//! Invariants: as in `lanes`, the lanes are a message with the same remainder as all bytes so far; eight of them hide
//! each other's latency. A function that needs instructions is called only after this machine was asked for them.

#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

use super::polynomial::factors;
use super::table;

/// Bytes of a lane.
const LANE: usize = 16;
/// Lanes at once.
const LANES: usize = 8;
/// Carries a lane across the next one.
const NEXT: [u64; 2] = factors(LANE);
/// Carries a lane to its place in the next group.
const GROUP: [u64; 2] = factors(LANE * LANES);

/// The register after `bytes`: eight lanes at a time, then a lane at a time, and the end by tables.
pub fn add(register: u64, bytes: &[u8]) -> u64 {
    let (lanes, end) = bytes.as_chunks::<LANE>();
    if lanes.len() < 2 || !is_aarch64_feature_detected!("aes") {
        return table::add(register, bytes);
    }
    // SAFETY: the machine has the instructions.
    let message = unsafe { fold_lanes(register, lanes) };
    table::add(table::add(0, &message), end)
}

/// A lane with the same remainder as `lanes` behind `register`, from a register of zero.
#[target_feature(enable = "neon,aes")]
fn fold_lanes(register: u64, lanes: &[[u8; LANE]]) -> [u8; LANE] {
    // SAFETY: a lane is as long as a register, and the load needs no alignment.
    let load = |lane: &[u8; LANE]| unsafe { vreinterpretq_u64_u8(vld1q_u8(lane.as_ptr())) };
    let start = vsetq_lane_u64::<0>(register, vdupq_n_u64(0));
    let (groups, rest) = lanes.as_chunks::<LANES>();
    let mut message = None;
    if let Some((first, groups)) = groups.split_first() {
        let mut sums = first.map(|lane| load(&lane));
        sums[0] = veorq_u64(sums[0], start);
        for group in groups {
            for (sum, lane) in sums.iter_mut().zip(group) {
                *sum = veorq_u64(carry(*sum, GROUP), load(lane));
            }
        }
        message = sums.into_iter().reduce(|message, sum| veorq_u64(carry(message, NEXT), sum));
    }
    for lane in rest {
        let before = message.map_or(start, |message| carry(message, NEXT));
        message = Some(veorq_u64(before, load(lane)));
    }
    let mut bytes = [0; LANE];
    // SAFETY: the array is as long as a register, and the store needs no alignment.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), vreinterpretq_u8_u64(message.unwrap_or(start))) };
    bytes
}

/// Carries a lane across the distance of `factors`.
#[inline]
#[target_feature(enable = "neon,aes")]
fn carry(lane: uint64x2_t, factors: [u64; 2]) -> uint64x2_t {
    let low = vmull_p64(vgetq_lane_u64::<0>(lane), factors[0]);
    let high = vmull_p64(vgetq_lane_u64::<1>(lane), factors[1]);
    veorq_u64(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(high))
}
