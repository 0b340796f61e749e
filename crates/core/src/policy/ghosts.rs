//! Keys remembered after their blocks are gone, 8 bytes each.
//!
//! Invariants: a fixed number of places, in buckets of 16 (two cache lines); a key has one place at most; a full
//! bucket forgets the key used longest ago, and tells. So the whole forgets about in order of age, without links.
//! Two keys are taken for one another once in 2^27 lookups.

use std::hint::black_box;
use std::ops::{BitXor, Range};

use crate::index::Fingerprint;

const BUCKET: usize = 16;

/// What is remembered of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// The clock when its block was last used.
    pub touched: u32,
    /// One bit for the policy.
    pub mark: bool,
}

#[derive(Default)]
pub struct Ghosts {
    /// Tag (31 bits, not zero), mark (1 bit), touched (32 bits). Zero: empty.
    places: Box<[u64]>,
    used: usize,
}

impl Ghosts {
    /// The pages are not touched before they are used.
    pub fn new(count: usize) -> Ghosts {
        Ghosts { places: vec![0; count.next_multiple_of(BUCKET)].into_boxed_slice(), used: 0 }
    }

    /// Makes room for `count`, give or take. If that is much more than there is (the first eviction, or the
    /// class was given extents since), the little that was remembered is given up.
    pub fn fit(&mut self, count: usize) {
        if self.places.len() < count / 2 + 1 {
            *self = Ghosts::new(count);
        }
    }

    pub fn len(&self) -> usize {
        self.used
    }

    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Remembers `key`, which is not remembered yet. Returns what had to be forgotten for it.
    pub fn insert(&mut self, key: Fingerprint, ghost: Ghost, clock: u32) -> Option<Ghost> {
        let age = |place: &u64| if *place == 0 { u64::MAX } else { u64::from(clock.wrapping_sub(*place as u32)) };
        let place = self.bucket(key).iter_mut().max_by_key(|place| age(place))?;
        let lost = std::mem::replace(place, tag(key) << 33 | u64::from(ghost.mark) << 32 | u64::from(ghost.touched));
        self.used += usize::from(lost == 0);
        (lost != 0).then(|| unpack(lost))
    }

    /// Takes `key` out, if it is remembered.
    pub fn take(&mut self, key: Fingerprint) -> Option<Ghost> {
        let place = self.bucket(key).iter_mut().find(|place| **place >> 33 == tag(key))?;
        let ghost = unpack(std::mem::take(place));
        self.used -= 1;
        Some(ghost)
    }

    pub fn heap_bytes(&self) -> usize {
        self.places.len() * 8
    }

    /// Brings the buckets of `keys` into the processor's cache, all at once instead of one after another. A bucket
    /// may lie on three cache lines.
    pub fn warm(&self, keys: &[Fingerprint]) {
        let buckets = keys.iter().map(|key| &self.places[self.range(*key)]);
        let lines = buckets.flat_map(|bucket| [0, BUCKET / 2, BUCKET - 1].map(|at| bucket.get(at).unwrap_or(&0)));
        black_box(lines.fold(0, BitXor::bitxor));
    }

    fn bucket(&mut self, key: Fingerprint) -> &mut [u64] {
        let range = self.range(key);
        &mut self.places[range]
    }

    fn range(&self, key: Fingerprint) -> Range<usize> {
        let buckets = self.places.len() / BUCKET;
        let at = ((u128::from(key.0) * buckets as u128) >> 64) as usize * BUCKET;
        at..(at + BUCKET).min(at + buckets * BUCKET)
    }
}

/// From the lower bits: the upper ones chose the bucket.
fn tag(key: Fingerprint) -> u64 {
    (key.0 & 0x7fff_ffff).max(1)
}

fn unpack(place: u64) -> Ghost {
    Ghost { touched: place as u32, mark: place >> 32 & 1 == 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spreads small numbers over all bits.
    fn key(n: u64) -> Fingerprint {
        let product = u128::from(n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        let bits = (product >> 64) as u64;
        Fingerprint((bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    #[test]
    fn a_ghost_is_taken_once_with_what_was_remembered() {
        // Roomy: a bucket of 16 must not overflow.
        let mut ghosts = Ghosts::new(4000);
        for n in 0..500u32 {
            let ghost = Ghost { touched: n, mark: n % 3 == 0 };
            assert_eq!(ghosts.insert(key(n.into()), ghost, 500), None);
        }
        for n in 0..500u32 {
            assert_eq!(ghosts.take(key(n.into())), Some(Ghost { touched: n, mark: n % 3 == 0 }));
            assert_eq!(ghosts.take(key(n.into())), None);
        }
    }

    #[test]
    fn the_old_are_forgotten_first_and_none_silently() {
        let (count, total) = (4096, 40_000u32);
        let mut ghosts = Ghosts::new(count);
        let mut lost = 0;
        for n in 0..total {
            lost += u32::from(ghosts.insert(key(n.into()), Ghost { touched: n, mark: false }, n).is_some());
        }
        let kept: Vec<u32> = (0..total).filter(|n| ghosts.take(key((*n).into())).is_some()).collect();
        assert_eq!(kept.len() as u32 + lost, total);
        assert_eq!(kept.len(), count);
        let newest_half = kept.iter().filter(|n| **n >= total - count as u32 / 2).count();
        assert!(newest_half >= count / 2 * 95 / 100, "of the newest {} only {newest_half} are kept", count / 2);
    }

    #[test]
    fn an_empty_table_remembers_nothing() {
        let mut ghosts = Ghosts::default();
        assert_eq!(ghosts.insert(key(1), Ghost { touched: 1, mark: true }, 2), None);
        assert_eq!(ghosts.take(key(1)), None);
    }
}
