//! What each reader of a frame gets: the frame, with the steps of its history that the reader does not have.

use std::collections::vec_deque::Iter;

use forebay_core::miss::MissReason;
use forebay_rpc::proto::{FrameHistory, FrameReply, FrameRequest, FrameSeries, FrameTierSeries};

use super::steps::{DAY, HOUR, Past, Row, Rows};

/// `frame` has no history.
pub fn answer(frame: &FrameReply, past: &Past, request: &FrameRequest) -> FrameReply {
    // Numbers of another start of the daemon mean nothing.
    let is_same = request.boot == frame.boot;
    let known = |last: u64| if is_same { last } else { 0 };
    let history = |rows: &Rows, step: f64, last: u64| history(rows, step, last, frame);
    FrameReply {
        hour: Some(history(&past.hour, HOUR.0.as_secs_f64(), known(request.hour_last))),
        day: Some(history(&past.day, DAY.0.as_secs_f64(), known(request.day_last))),
        ..frame.clone()
    }
}

/// The rows after the one with the number `known`.
fn history(rows: &Rows, step_seconds: f64, known: u64, frame: &FrameReply) -> FrameHistory {
    let lacking = || rows.after(known);
    let all = |of: &dyn Fn(&Row) -> f32| lacking().map(|row| rounded(of(row))).collect::<Vec<f32>>();
    let misses = MissReason::ALL.iter().map(|reason| FrameSeries {
        name: reason.name().to_owned(),
        per_second: all(&|row| row.misses[*reason as usize]),
    });
    let tiers = frame.tiers.iter().enumerate().map(|(at, tier)| FrameTierSeries {
        name: tier.name.clone(),
        hits_per_second: all(&|row| row.tiers[at].hits),
        up_bytes_per_second: all(&|row| row.tiers[at].up_bytes),
        down_bytes_per_second: all(&|row| row.tiers[at].down_bytes),
    });
    FrameHistory {
        step_seconds,
        last: rows.last,
        end_ms: lacking().map(|row| row.end_ms).collect(),
        keys_per_second: all(&|row| row.keys as f32 / row.seconds),
        // None is NaN.
        hit_ratio: all(&|row| row.hits as f32 / row.keys as f32),
        ceiling_ratio: all(&|row| row.ceiling),
        optimum_ratio: all(&|row| row.optimum),
        hit_bytes_per_second: all(&|row| row.hit_bytes),
        stored_bytes_per_second: all(&|row| row.stored_bytes),
        evicted_bytes_per_second: all(&|row| row.evicted_bytes),
        used_bytes: all(&|row| row.used_bytes),
        held_bytes: all(&|row| row.held_bytes),
        saved_tokens_per_second: all(&|row| row.saved_tokens),
        lookup_p99_seconds: lacking().map(|row| row.lookup_p99).collect(),
        misses: misses.collect(),
        tiers: tiers.collect(),
    }
}

impl Rows {
    /// Those with later numbers; all if there is no such number yet.
    fn after(&self, known: u64) -> Iter<'_, Row> {
        let lacking = self.last.checked_sub(known).unwrap_or(self.last);
        self.rows.range(self.rows.len() - self.rows.len().min(lacking as usize)..)
    }
}

/// To a ten-thousandth, which is enough of a ratio and makes rates short.
fn rounded(value: f32) -> f32 {
    if value.abs() < 1000.0 { (value * 10_000.0).round() / 10_000.0 } else { value.round() }
}
