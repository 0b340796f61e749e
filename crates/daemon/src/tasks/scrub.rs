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

/// The shortest rest, and the rest after a step of the walk that found nothing to read: at most 100 wake-ups per
/// second.
const REST: Duration = Duration::from_millis(10);
/// Between two looks for hits, while the walk rests and after a look that found none. Each look wakes the thread.
const LOOK: Duration = Duration::from_millis(250);
/// The shortest time between two warnings.
const QUIET: Duration = Duration::from_secs(10);

/// Starts the thread, unless the scrub is switched off.
pub fn start(shared: &Shared) {
    let (pool, rate, walk_seconds) = {
        let state = shared.lock();
        let settings = &state.config.pool;
        (state.table.pool().clone(), settings.scrub_bytes_per_second.0, settings.scrub_walk_seconds)
    };
    if rate == 0 {
        return;
    }
    let shared = shared.clone();
    let (mut pace, mut finds) = (Pace { rate, due: Instant::now() }, Finds::default());
    let mut walks = Walks { least: Duration::from_secs(walk_seconds), ended: 0, due: Instant::now() };
    vital::thread("scrub", move || {
        loop {
            let began = Instant::now();
            let (is_walking, piece) = shared.event(|state| {
                let is_due = walks.is_due(state.core.stats().scrubs, began);
                // There is no walk through a pool without blocks.
                let is_walking = is_due && state.core.resident_blocks() > 0;
                (is_walking, if is_walking { piece(state) } else { hits(state) })
            });
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
            let is_idle = !is_walking && bytes == 0;
            std::thread::sleep(if is_idle { LOOK } else { pace.rest(bytes, began, Instant::now()) });
        }
    });
}

/// The next blocks to read, with what the table says of them.
pub fn piece(state: &mut State) -> Vec<(ReadyBlock, Option<Entry>)> {
    let blocks = state.core.scrub_piece();
    with_entries(state, blocks)
}

/// As `piece`, without the walk.
fn hits(state: &mut State) -> Vec<(ReadyBlock, Option<Entry>)> {
    let blocks = state.core.scrub_hits();
    with_entries(state, blocks)
}

fn with_entries(state: &State, blocks: Vec<ReadyBlock>) -> Vec<(ReadyBlock, Option<Entry>)> {
    let entry = |block: ReadyBlock| (block, state.table.pool().entry(block.slot, block.generation));
    blocks.into_iter().map(entry).collect()
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

/// When the walk through the pool goes on. It rests after each walk, until the next may begin.
struct Walks {
    /// From the beginning of one to the beginning of the next.
    least: Duration,
    /// How many had ended when this was last asked.
    ended: u64,
    /// When the present one began, or the next may begin.
    due: Instant,
}

impl Walks {
    /// Whether to walk on, when so many have ended since the start.
    fn is_due(&mut self, ended: u64, now: Instant) -> bool {
        if ended > self.ended {
            (self.ended, self.due) = (ended, now.max(self.due + self.least));
        }
        now >= self.due
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
    fn a_walk_rests_until_the_next_may_begin_and_a_long_one_does_not() {
        let (start, least) = (Instant::now(), Duration::from_secs(60));
        let mut walks = Walks { least, ended: 0, due: start };
        let mut is_due = |ended, seconds| walks.is_due(ended, start + Duration::from_secs(seconds));
        assert!(is_due(0, 0) && is_due(0, 7), "the first is under way");
        assert_eq!([8, 59, 60].map(|seconds| is_due(1, seconds)), [false, false, true]);
        assert!(is_due(1, 125), "the second is under way for longer than a minute");
        assert_eq!([is_due(2, 125), is_due(2, 184)], [true, true]);
        assert_eq!([is_due(3, 130), is_due(3, 184), is_due(3, 185)], [false, false, true]);
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
