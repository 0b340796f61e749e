//! How much of the pool a ring has registered, and when it registers more.
//!
//! To register a piece pins its pages on the ring's thread, which serves no disk meanwhile. A GiB in pages of 4 KiB
//! took 25 to 34 ms of processor time. With huge pages and a memlock limit, the k-th GiB took about k ms (kernel 6.18):
//! the kernel looks for each page among those that are registered. What is not registered costs some processor time in
//! each transfer, and nothing else.
//!
//! Invariants: pieces are registered from the pool's start, one between two turns of the ring. After each, the thread
//! serves its disk for longer than the piece took. A piece that took too long is the last.

use std::time::{Duration, Instant};

/// The kernel's limit on a registered buffer.
const PIECE_BYTES: u64 = 1 << 30;
/// The rest after a piece, as a multiple of the time that the piece took.
const REST: u32 = 9;
/// The most processor time for a piece, if others are to follow. Without a memlock limit, more are an exception.
const MOST_FOR_A_PIECE: Duration = Duration::from_millis(50);

/// See the module documentation.
pub(super) struct Registration {
    pool_bytes: u64,
    pieces: u16,
    is_over: bool,
    /// When the next piece may be registered.
    next: Instant,
}

impl Registration {
    /// Nothing is registered yet. Nothing ever is if it `is_over`.
    pub fn new(pool_bytes: u64, is_over: bool, now: Instant) -> Registration {
        Registration { pool_bytes, pieces: 0, is_over, next: now }
    }

    /// Number of pieces that a pool has.
    pub fn pieces_of(pool_bytes: u64) -> u32 {
        pool_bytes.div_ceil(PIECE_BYTES) as u32
    }

    /// The piece that is to be registered now: number, offset and length. None while the thread rests, or if the
    /// first `populated_bytes` of the pool have no whole piece more.
    pub fn due(&self, populated_bytes: u64, now: Instant) -> Option<(u16, u64, u64)> {
        let from = u64::from(self.pieces) * PIECE_BYTES;
        let len = PIECE_BYTES.min(self.pool_bytes.saturating_sub(from));
        let is_due = !self.is_over && now >= self.next && len > 0 && from + len <= populated_bytes;
        is_due.then_some((self.pieces, from, len))
    }

    /// The due piece is registered. That took `wall` time until `now`, and `processor` time.
    pub fn registered(&mut self, wall: Duration, processor: Duration, now: Instant) {
        self.pieces += 1;
        self.next = now + REST * wall;
        self.is_over = processor > MOST_FOR_A_PIECE;
    }

    /// The kernel refused the due piece.
    pub fn refused(&mut self) {
        self.is_over = true;
    }

    /// The registered piece that has all of these bytes.
    pub fn piece(&self, offset: u64, len: u32) -> Option<u16> {
        let (first, last) = (offset / PIECE_BYTES, (offset + u64::from(len) - 1) / PIECE_BYTES);
        (first == last && first < u64::from(self.pieces)).then_some(first as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_populated_pool_is_registered_piece_by_piece_and_the_disk_is_served_in_between() {
        let start = Instant::now();
        let mut registration = Registration::new(5 * PIECE_BYTES / 2, false, start);
        let all = 5 * PIECE_BYTES / 2;
        assert_eq!(registration.due(PIECE_BYTES - 1, start), None, "no whole piece");
        assert_eq!(registration.due(all, start), Some((0, 0, PIECE_BYTES)));
        registration.registered(3 * MS, MS, start);
        assert_eq!(registration.due(all, start + 26 * MS), None, "it rests");
        assert_eq!(registration.due(all, start + 27 * MS), Some((1, PIECE_BYTES, PIECE_BYTES)));
        assert_eq!(registration.piece(PIECE_BYTES - 4096, 4096), Some(0));
        assert_eq!(registration.piece(PIECE_BYTES - 4096, 8192), None, "in two pieces");
        assert_eq!(registration.piece(PIECE_BYTES, 4096), None, "not registered");
        registration.registered(MS, MS, start + 30 * MS);
        assert_eq!(registration.due(all, start + 39 * MS), Some((2, 2 * PIECE_BYTES, PIECE_BYTES / 2)));
        registration.registered(MS, MS, start + 40 * MS);
        assert_eq!(registration.due(all, start + 1000 * MS), None, "all is registered");
    }

    #[test]
    fn a_piece_that_takes_too_long_or_is_refused_is_the_last() {
        let start = Instant::now();
        let begun = || Registration::new(9 * PIECE_BYTES, false, start);
        let later = start + 3600 * 1000 * MS;
        let [mut slow, mut starved, mut refused] = [begun(), begun(), begun()];
        slow.registered(51 * MS, 51 * MS, start);
        assert_eq!((slow.due(u64::MAX, later), slow.piece(0, 1)), (None, Some(0)));
        starved.registered(500 * MS, 20 * MS, start);
        assert!(starved.due(u64::MAX, later).is_some(), "others had the processor");
        refused.refused();
        assert_eq!((refused.due(u64::MAX, later), refused.piece(0, 1)), (None, None));
        assert_eq!(Registration::new(PIECE_BYTES, true, start).due(u64::MAX, later), None);
    }
}
