//! Copies of one size that lie evenly spaced on both sides, as one call of the driver: `cuMemcpy2DAsync`. Pure.
//!
//! Invariants: the rows of a call are copies that were asked for, each once, and the bytes between them are touched on
//! neither side. They lie in one tensor and in one registration, since a call does not reach across either. Rows never
//! overlap, and are no further apart than the device takes. Copies that fit no run are left to the next method.

use std::collections::HashMap;

use super::driver::Rows;
use super::ops::Op;
use crate::job::Direction;

/// A run of copies in the order in which they were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    first: Op,
    device_pitch: u64,
    host_pitch: u64,
    rows: u64,
}

/// The calls that take what lies in rows, and the copies that are left.
pub fn rows(direction: Direction, ops: &[Op], max_pitch: u64) -> (Vec<Rows>, Vec<Op>) {
    let (mut calls, mut left) = (Vec::new(), Vec::new());
    for run in runs(ops, max_pitch) {
        if run.rows == 1 {
            left.push(run.first);
            continue;
        }
        let ((to, from), Run { device_pitch, host_pitch, rows, .. }) = (run.first.ends(direction), run);
        let (to_pitch, from_pitch) = match direction {
            Direction::Store => (host_pitch, device_pitch),
            Direction::Load => (device_pitch, host_pitch),
        };
        calls.push(Rows { to, to_pitch, from, from_pitch, row_bytes: run.first.bytes, rows });
    }
    (calls, left)
}

/// Whether rows make of these copies a quarter as many calls, or fewer.
pub fn is_worth(ops: &[Op], max_pitch: u64) -> bool {
    4 * runs(ops, max_pitch).len() <= ops.len()
}

/// Places for copies to measure with, in units of a copy: two runs of eight rows side by side, so that no row ends
/// where the next one begins.
pub fn place(at: u64) -> u64 {
    const ROWS: u64 = 8;
    at / ROWS / 2 * 2 * ROWS + 2 * (at % ROWS) + at / ROWS % 2
}

/// The fragments of a block alternate between tensors, so each tensor has a run of its own that goes on.
fn runs(ops: &[Op], max_pitch: u64) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut last: HashMap<[u64; 2], usize> = HashMap::new();
    for op in ops {
        let open = last.get(&op.within).copied();
        if open.is_some_and(|open| runs[open].take(op, max_pitch)) {
            continue;
        }
        last.insert(op.within, runs.len());
        runs.push(Run { first: *op, device_pitch: 0, host_pitch: 0, rows: 1 });
    }
    runs
}

impl Run {
    /// Whether the copy is its next row.
    fn take(&mut self, op: &Op, max_pitch: u64) -> bool {
        let pitch = |last: u64, next: u64| {
            let pitch = next.checked_sub(last)?;
            (op.bytes..=max_pitch).contains(&pitch).then_some(pitch)
        };
        let last = |start: u64, pitch: u64| start + (self.rows - 1) * pitch;
        let device = pitch(last(self.first.device, self.device_pitch), op.device);
        let host = pitch(last(self.first.host, self.host_pitch), op.host);
        let (Some(device), Some(host)) = (device, host) else { return false };
        let goes_on = self.rows == 1 || (device, host) == (self.device_pitch, self.host_pitch);
        if op.bytes != self.first.bytes || !goes_on {
            return false;
        }
        (self.device_pitch, self.host_pitch, self.rows) = (device, host, self.rows + 1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 1 << 20;

    fn op(device: u64, host: u64, bytes: u64) -> Op {
        Op::new(device, host, bytes)
    }

    fn call(rows: Vec<Rows>) -> Rows {
        assert_eq!(rows.len(), 1, "{rows:?}");
        rows[0]
    }

    #[test]
    fn rows_with_odd_pitches_are_one_call_in_either_direction() {
        let ops: Vec<_> = (0..5).map(|row| op(1000 + 77 * row, 9000 + 31 * row, 29)).collect();
        let (loads, left) = rows(Direction::Load, &ops, MOST);
        assert!(left.is_empty());
        let expected = Rows { to: 1000, to_pitch: 77, from: 9000, from_pitch: 31, row_bytes: 29, rows: 5 };
        assert_eq!(call(loads), expected);
        let (stores, _) = rows(Direction::Store, &ops, MOST);
        let expected = Rows { to: 9000, to_pitch: 31, from: 1000, from_pitch: 77, row_bytes: 29, rows: 5 };
        assert_eq!(call(stores), expected);
    }

    #[test]
    fn strides_that_change_overlap_go_back_or_are_too_long_begin_another_run() {
        let counts = |second: Op, max_pitch| {
            let (calls, left) = rows(Direction::Load, &[op(1000, 9000, 16), second], max_pitch);
            (calls.len(), left.len())
        };
        assert_eq!(counts(op(1016, 9016, 16), MOST), (1, 0));
        assert_eq!(counts(op(1015, 9016, 16), MOST), (0, 2), "rows of the device overlap");
        assert_eq!(counts(op(1016, 9015, 16), MOST), (0, 2), "rows of the host overlap");
        assert_eq!(counts(op(900, 9016, 16), MOST), (0, 2), "a pitch is never negative");
        assert_eq!(counts(op(1016, 9016, 15), MOST), (0, 2), "rows are of one size");
        assert_eq!(counts(op(1100, 9016, 16), 100), (1, 0));
        assert_eq!(counts(op(1101, 9016, 16), 100), (0, 2), "further than the device takes");
        let ops = [op(0, 0, 8), op(10, 10, 8), op(21, 20, 8), op(32, 30, 8)];
        let (calls, left) = rows(Direction::Load, &ops, MOST);
        assert_eq!((calls.len(), calls[0].rows, calls[1].rows, left.len()), (2, 2, 2, 0));
    }

    #[test]
    fn no_call_reaches_across_tensors_or_registrations() {
        let within = |ends, at: u64| Op { within: ends, ..op(100 * at, 100 * at, 50) };
        let ops = [within([1, 1], 0), within([1, 2], 1), within([2, 2], 2)];
        assert_eq!(rows(Direction::Load, &ops, MOST), (Vec::new(), ops.to_vec()));
        // Two tensors whose fragments alternate in the slots.
        let both = |block: u64| {
            [[0, 7], [1, 7]].map(|ends| {
                let tensor = ends[0];
                Op { within: ends, ..op(10_000 * tensor + 64 * block, 96 * block + 48 * tensor, 48) }
            })
        };
        let ops: Vec<_> = (0..6).flat_map(both).collect();
        let (calls, left) = rows(Direction::Load, &ops, MOST);
        assert_eq!((calls.iter().map(|call| call.rows).collect::<Vec<_>>(), left.len()), (vec![6, 6], 0));
        assert!(is_worth(&ops, MOST));
        assert!(!is_worth(&ops[..6], MOST), "three rows are not worth it");
    }
}
