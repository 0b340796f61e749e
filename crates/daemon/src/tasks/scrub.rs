//! Reads ready blocks in the background, on a thread of its own. So a byte that changes in the pool is found even if
//! loads do not compare it, and before the block is copied or written to a tier.
//!
//! Invariants: no block is held for the scrub. The expected checksum is read together with the decision to read the
//! block. A mismatch counts only if the core still has the same block there afterwards.

use std::time::{Duration, Instant};

use forebay_core::report::ReadyBlock;
use forebay_core::stats::Finder;
use forebay_io::pool::{Entry, Pool};

use crate::state::{Shared, State};
use crate::vital;

/// The shortest rest, and the rest after a step that found nothing to read: at most 100 wake-ups per second.
const REST: Duration = Duration::from_millis(10);
/// The shortest time between two warnings.
const QUIET: Duration = Duration::from_secs(10);

/// Starts the thread, unless the scrub is switched off.
pub fn start(shared: &Shared) {
    let (pool, rate) = {
        let state = shared.lock();
        (state.table.pool().clone(), state.config.pool.scrub_bytes_per_second.0)
    };
    if rate == 0 {
        return;
    }
    let shared = shared.clone();
    let (mut pace, mut finds) = (Pace { rate, due: Instant::now() }, Finds::default());
    vital::thread("scrub", move || {
        loop {
            let began = Instant::now();
            let piece = shared.event(piece);
            let mut bytes = 0;
            for (block, entry) in piece {
                bytes += entry.as_ref().map_or(0, |entry| entry.length);
                // The second reading tells memory that is wrong from a reading that was.
                if !is_whole(&pool, &block, &entry) && !is_whole(&pool, &block, &entry) {
                    let drop = |state: &mut State| state.core.drop_corrupt(block.slot, block.generation, Finder::Scrub);
                    finds.add(shared.event(drop));
                }
            }
            finds.tell(Instant::now());
            std::thread::sleep(pace.rest(bytes, began, Instant::now()));
        }
    });
}

/// The next blocks to read, with what the table says of them.
pub fn piece(state: &mut State) -> Vec<(ReadyBlock, Option<Entry>)> {
    let entry = |block: ReadyBlock| (block, state.table.pool().entry(block.slot, block.generation));
    state.core.scrub_piece().into_iter().map(entry).collect()
}

pub fn is_whole(pool: &Pool, block: &ReadyBlock, entry: &Option<Entry>) -> bool {
    let is_same = |entry: &Entry| pool.checksum(block.slot.offset(), entry.length) == entry.checksum;
    entry.as_ref().is_some_and(|entry| entry.key == block.key && is_same(entry))
}

/// Spreads the reading over time. Time without reading is not made up for.
struct Pace {
    /// Bytes a second, at least 1.
    rate: u64,
    /// When the budget for the bytes read so far is used up.
    due: Instant,
}

impl Pace {
    /// How long to rest after a piece whose reading began at `began` and ended at `now`.
    fn rest(&mut self, bytes: u64, began: Instant, now: Instant) -> Duration {
        let cost = if bytes == 0 { REST } else { Duration::from_secs_f64(bytes as f64 / self.rate as f64) };
        self.due = self.due.max(began) + cost;
        let rest = self.due.saturating_duration_since(now);
        if rest < REST { Duration::ZERO } else { rest }
    }
}

/// Corrupt blocks that were found and are not in the log yet.
#[derive(Default)]
struct Finds {
    untold: u64,
    told: Option<Instant>,
}

impl Finds {
    fn add(&mut self, is_dropped: bool) {
        self.untold += u64::from(is_dropped);
    }

    fn tell(&mut self, now: Instant) {
        if self.untold > 0 && self.told.is_none_or(|told| now - told >= QUIET) {
            let (blocks, found_by) = (self.untold, Finder::Scrub.name());
            tracing::warn!(blocks, found_by, "dropped corrupt blocks: their bytes do not match their checksums");
            *self = Finds { untold: 0, told: Some(now) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_reads_what_the_budget_allows_and_no_more() {
        for (rate, piece) in [(256 << 20, 4 << 20), (256 << 20, 300 << 20), (1 << 20, 16 << 10), (1 << 40, 4 << 20)] {
            let start = Instant::now();
            let (mut now, mut bytes) = (start, 0);
            let mut pace = Pace { rate, due: start };
            while now < start + Duration::from_secs(10) {
                let began = now;
                // Reading at 10 GiB/s.
                now += Duration::from_secs_f64(piece as f64 / (10u64 << 30) as f64);
                bytes += piece;
                now += pace.rest(piece, began, now);
            }
            let allowed = rate as f64 * (now - start + REST).as_secs_f64();
            assert!(bytes as f64 <= allowed + piece as f64, "{bytes} of {allowed} bytes at {rate}");
            let possible = allowed.min((10u64 << 30) as f64 * (now - start).as_secs_f64());
            assert!(bytes as f64 >= 0.9 * possible, "{bytes} of {possible} bytes at {rate}");
        }
    }

    #[test]
    fn time_without_reading_is_not_made_up_for_and_an_empty_pool_lets_the_thread_rest() {
        let start = Instant::now();
        let mut pace = Pace { rate: 1 << 20, due: start };
        let late = start + Duration::from_secs(3600);
        assert_eq!(pace.rest(1 << 20, late, late), Duration::from_secs(1));
        assert_eq!(pace.rest(0, late + Duration::from_secs(9), late + Duration::from_secs(9)), REST);
    }

    #[test]
    fn many_finds_are_told_in_one_line() {
        let (mut finds, start) = (Finds::default(), Instant::now());
        let mut find = |after: Duration| {
            finds.add(true);
            finds.tell(start + after);
            finds.untold
        };
        let untold = [0, 1, 9].map(|seconds| find(Duration::from_secs(seconds)));
        assert_eq!((untold, find(QUIET)), ([0, 1, 2], 0));
    }
}
