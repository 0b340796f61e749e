//! The last hour and the last day of the made-up host: the same bytes at every run, so that pictures of it are too.
//!
//! The day has its quiet night, with half an hour in which nobody asked. A quarter of an hour ago the hit rate fell
//! from what it was all day to what the frame says of now. The histories of reasons and tiers are left out: nothing
//! draws them. Only sums and products are taken, which every machine rounds alike.

use forebay_rpc::proto::FrameHistory;

const GIB: f32 = (1 << 30) as f32;
const BLOCK_BYTES: f32 = (192 << 10) as f32;
const DAY_MS: u64 = 86_400_000;

/// From -1 to 1, and never the same from step to step.
fn noise(step: usize, stream: u32) -> f32 {
    let mixed = (step as u32 ^ (stream << 16)).wrapping_mul(0x9e37_79b9);
    let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca6b);
    ((mixed ^ (mixed >> 13)) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// From -1 to 1 and back, every `period` steps.
fn wave(step: usize, period: usize) -> f32 {
    let at = (step % period) as f32 / period as f32 * 2.0;
    if at < 1.0 { 4.0 * at * (1.0 - at) } else { -4.0 * (at - 1.0) * (2.0 - at) }
}

/// To three digits: what a person could read off a picture.
fn rounded(value: f32) -> f32 {
    let mut unit = 1e-9_f64;
    while f64::from(value.abs()) >= 1000.0 * unit {
        unit *= 10.0;
    }
    ((f64::from(value) / unit).round() * unit) as f32
}

/// 0 in the night, 1 in the early afternoon, of the hour of a day.
fn bustle(hour: f32) -> f32 {
    let away = (hour - 14.0).abs();
    let away = away.min(24.0 - away) / 12.0;
    1.0 - away * away * (3.0 - 2.0 * away)
}

/// `count` steps of `seconds`, the last of which has just ended; `last` is its number.
fn history(at_ms: u64, seconds: u64, count: usize, last: u64) -> FrameHistory {
    let step_ms = 1000 * seconds;
    let end = at_ms - at_ms % step_ms;
    let mut history = FrameHistory { step_seconds: seconds as f64, last, ..FrameHistory::default() };
    for step in 0..count {
        let end_ms = end - (count - 1 - step) as u64 * step_ms;
        let shake = |stream: u32, share: f32| 1.0 + share * noise(step, stream);
        let hour = (end_ms % DAY_MS) as f32 / 3.6e6;
        let is_quiet = (3.5..4.0).contains(&hour);
        let busy = bustle(hour);
        let keys = if is_quiet { 0.0 } else { (2300.0 + 10_400.0 * busy) * shake(1, 0.06) };
        // How far the hit rate has fallen, from 0 to 1.
        let fallen = ((1_080_000.0 - (at_ms - end_ms) as f32) / 360_000.0).clamp(0.0, 1.0);
        let usual = 0.676 - 0.05 * busy + 0.006 * wave(step, 57);
        let hit = (usual + (0.425 - usual) * fallen) * shake(2, 0.025);
        let served = keys * hit * BLOCK_BYTES;
        let stored = keys * (1.0 - hit) * 0.89 * BLOCK_BYTES;
        history.end_ms.push(end_ms);
        history.keys_per_second.push(rounded(keys));
        history.hit_ratio.push(if is_quiet { f32::NAN } else { rounded(hit) });
        history.ceiling_ratio.push(rounded(0.80 - 0.08 * fallen - 0.004 * wave(step, 195)));
        history.optimum_ratio.push(rounded(0.715 - 0.055 * fallen - 0.003 * wave(step, 145)));
        history.hit_bytes_per_second.push(rounded(served));
        history.stored_bytes_per_second.push(rounded(stored));
        history.evicted_bytes_per_second.push(rounded(stored * 0.95 * shake(3, 0.08)));
        history.used_bytes.push(rounded((171.0 + 13.0 * busy) * GIB * shake(4, 0.004)));
        history.held_bytes.push(rounded((2.0 + 16.0 * busy) * GIB * shake(5, 0.15)));
        history.saved_tokens_per_second.push(rounded(keys * hit * 16.0));
        history.lookup_p99_seconds.push(if is_quiet { f32::NAN } else { rounded(0.000_29 * shake(6, 0.2)) });
    }
    history
}

pub fn hour(at_ms: u64) -> FrameHistory {
    history(at_ms, 5, 720, 106_559)
}

pub fn day(at_ms: u64) -> FrameHistory {
    history(at_ms, 300, 288, 1775)
}
