//! Keys that are remembered after their blocks are gone, 5 bytes each.
//!
//! Invariants: there is a fixed number of places, in buckets of 12 that fill one cache line. A key has one place at
//! most. A full bucket forgets the key that was used longest ago, and returns it. So keys are forgotten about in order
//! of age, without links. Times are kept in ticks of about a 256th of the residents. They wrap after 4,096 times as
//! many steps of the clock as there are residents. A key is mistaken for another one once in 40,000 lookups.

use crate::key::Fingerprint;
use std::hint::black_box;

const BUCKET: usize = 12;
const PLACE_BYTES: usize = 5;
const LINE_BYTES: usize = 64;
/// Behind the places of a bucket: a bit for each that is in use.
const IN_USE: usize = BUCKET * PLACE_BYTES;
/// Of a number in a bucket.
const BUCKET_BITS: u32 = 4;
const TICK_BITS: u32 = 20;
const TAG_BITS: u32 = 19;

/// What is remembered of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// The clock when its block was last used, to the tick.
    pub touched: u32,
    /// One bit for the policy.
    pub mark: bool,
}

/// See the module's head. The default has no place and remembers nothing.
#[derive(Default)]
pub struct Ghosts {
    /// From `first` on, which is aligned, one bucket a line: its places, and which are in use. A place holds tag (19
    /// bits, not zero), mark (1 bit) and tick (20 bits). Zero: empty.
    bytes: Box<[u8]>,
    first: usize,
    buckets: usize,
    used: usize,
    /// A tick is so many doublings of the clock's step.
    tick_shift: u32,
    /// Ticks that are told apart: they wrap where the clock does, or earlier.
    tick_mask: u64,
    /// Where the next sample begins.
    cursor: usize,
}

impl Ghosts {
    /// Places for `count` keys, of a class with so many residents. Pages are not touched before they are used.
    pub fn new(count: usize, residents: usize) -> Ghosts {
        let buckets = count.div_ceil(BUCKET);
        let bytes = vec![0; (buckets + 1) * LINE_BYTES].into_boxed_slice();
        let first = bytes.as_ptr().align_offset(LINE_BYTES);
        let tick_shift = (residents as u32 >> 8).max(1).ilog2();
        let tick_mask = mask(TICK_BITS.min(u32::BITS - tick_shift));
        Ghosts { bytes, first, buckets, used: 0, tick_shift, tick_mask, cursor: 0 }
    }

    /// Makes room for about `each` keys for each of `residents`. If there are less than half as many places (at the
    /// first eviction, or after the class has grown), a new table replaces the old one, and the old keys are forgotten.
    pub fn fit(&mut self, residents: usize, each: usize) {
        let count = residents * each;
        if self.buckets * BUCKET < count / 2 + 1 {
            *self = Ghosts::new(count, residents);
        }
    }

    /// Keys remembered.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether no key is remembered.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Remembers `key`, which is not remembered yet. Returns the ghost that was forgotten for it.
    pub fn insert(&mut self, key: Fingerprint, ghost: Ghost, clock: u32) -> Option<Ghost> {
        let now = self.tick(clock);
        let line = self.line(key)?;
        let bucket = self.bucket(line);
        let at = last_empty(bucket).unwrap_or_else(|| oldest(bucket, now, self.tick_mask));
        let lost = read(bucket, at);
        let place = tag(key) << (TICK_BITS + 1) | u64::from(ghost.mark) << TICK_BITS | self.tick(ghost.touched);
        self.write(line, at, place);
        self.used += usize::from(lost == 0);
        (lost != 0).then(|| self.unpack(lost, clock))
    }

    /// Forgets `key`. Returns what was remembered of it.
    pub fn take(&mut self, key: Fingerprint, clock: u32) -> Option<Ghost> {
        let line = self.line(key)?;
        let bucket = self.bucket(line);
        let at = (0..BUCKET).find(|at| read(bucket, *at) >> (TICK_BITS + 1) == tag(key))?;
        let ghost = self.unpack(read(bucket, at), clock);
        self.write(line, at, 0);
        self.used -= 1;
        Some(ghost)
    }

    /// Shows about `count` of the ghosts to `see`, others each time, and returns how many each of them stands for. Keys
    /// are spread evenly over the buckets, so any bucket is a fair sample. Most may be empty: it looks at `count` at
    /// most.
    pub fn sample(&mut self, count: usize, clock: u32, mut see: impl FnMut(Ghost)) -> f64 {
        let (mut seen, mut looked_at) = (0, 0);
        while seen < count && looked_at < count.min(self.buckets) {
            self.cursor = (self.cursor + 1) % self.buckets;
            looked_at += 1;
            let bucket = self.bucket(self.first + self.cursor * LINE_BYTES);
            let places = (0..BUCKET).map(|at| read(bucket, at)).filter(|place| *place != 0);
            places.for_each(|place| {
                seen += 1;
                see(self.unpack(place, clock));
            });
        }
        self.buckets as f64 / f64::from(looked_at.max(1) as u32)
    }

    /// Bytes of all buckets, in use or not.
    pub fn heap_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Brings the buckets of `keys` into the processor's cache, all at once instead of one after another.
    pub fn touch_lines(&self, keys: &[Fingerprint]) {
        let lines = keys.iter().filter_map(|key| self.line(*key));
        black_box(lines.fold(0, |sum, line| sum ^ self.bytes[line]));
    }

    /// Where the bucket of `key` begins, if there are any.
    fn line(&self, key: Fingerprint) -> Option<usize> {
        let at = ((u128::from(key.0) * self.buckets as u128) >> 64) as usize;
        (self.buckets > 0).then_some(self.first + at * LINE_BYTES)
    }

    fn bucket(&self, line: usize) -> &[u8; LINE_BYTES] {
        self.bytes[line..].first_chunk().expect("a bucket is a whole line")
    }

    fn write(&mut self, line: usize, at: usize, place: u64) {
        let from = line + at * PLACE_BYTES;
        self.bytes[from..from + PLACE_BYTES].copy_from_slice(&place.to_le_bytes()[..PLACE_BYTES]);
        let in_use = in_use(self.bucket(line)) & !(1 << at) | u16::from(place != 0) << at;
        self.bytes[line + IN_USE..][..2].copy_from_slice(&in_use.to_le_bytes());
    }

    fn tick(&self, clock: u32) -> u64 {
        u64::from(clock >> self.tick_shift) & self.tick_mask
    }

    fn unpack(&self, place: u64, clock: u32) -> Ghost {
        let age = self.tick(clock).wrapping_sub(place) & self.tick_mask;
        Ghost { touched: clock.wrapping_sub((age as u32) << self.tick_shift), mark: place >> TICK_BITS & 1 == 1 }
    }
}

/// From the lower bits: the upper ones chose the bucket.
fn tag(key: Fingerprint) -> u64 {
    (key.0 & mask(TAG_BITS)).max(1)
}

fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

fn in_use(bucket: &[u8; LINE_BYTES]) -> u16 {
    u16::from_le_bytes(*bucket[IN_USE..].first_chunk().expect("2 bytes"))
}

fn last_empty(bucket: &[u8; LINE_BYTES]) -> Option<usize> {
    (!in_use(bucket) & mask(BUCKET as u32) as u16).checked_ilog2().map(|at| at as usize)
}

/// The place of a full bucket whose key was used longest ago.
fn oldest(bucket: &[u8; LINE_BYTES], now: u64, tick_mask: u64) -> usize {
    let age = |at: usize| now.wrapping_sub(read(bucket, at)) & tick_mask;
    // Age and number in one word, which one comparison keeps.
    let oldest = (0..BUCKET).map(|at| age(at) << BUCKET_BITS | at as u64).fold(0, u64::max);
    (oldest & mask(BUCKET_BITS)) as usize
}

/// A bucket's last place ends 4 bytes before its line does, so that all of them can be read as words.
fn read(bucket: &[u8; LINE_BYTES], at: usize) -> u64 {
    let word = bucket[at * PLACE_BYTES..].first_chunk().expect("8 bytes");
    u64::from_le_bytes(*word) & mask(8 * PLACE_BYTES as u32)
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
        // Roomy: a bucket of 12 must not overflow.
        let mut ghosts = Ghosts::new(8000, 500);
        for n in 0..500u32 {
            let ghost = Ghost { touched: n, mark: n % 3 == 0 };
            assert_eq!(ghosts.insert(key(n.into()), ghost, 500), None);
        }
        for n in 0..500u32 {
            assert_eq!(ghosts.take(key(n.into()), 700), Some(Ghost { touched: n, mark: n % 3 == 0 }));
            assert_eq!(ghosts.take(key(n.into()), 700), None);
        }
    }

    #[test]
    fn ages_are_right_to_the_tick_and_across_the_end_of_the_clock() {
        for residents in [10, 1 << 14, 1 << 20, 1 << 24] {
            let mut ghosts = Ghosts::new(1000, residents);
            let tick = (residents as u32 >> 8).max(1).next_power_of_two();
            for (nth, touched) in [5, 1 << 20, u32::MAX - 3, u32::MAX / 2].into_iter().enumerate() {
                for age in [0, 1000, 10 * residents as u32] {
                    let at = key((nth as u64) << 32 | u64::from(age));
                    ghosts.insert(at, Ghost { touched, mark: true }, touched);
                    let now = touched.wrapping_add(age);
                    let ghost = ghosts.take(at, now).unwrap();
                    let error = now.wrapping_sub(ghost.touched).abs_diff(age);
                    assert!(error <= tick, "{residents} residents, age {age}: wrong by {error}");
                }
            }
        }
    }

    #[test]
    fn the_old_are_forgotten_first_and_none_silently() {
        let (count, total) = (4096, 40_000u32);
        let mut ghosts = Ghosts::new(count, 400);
        let room = count.next_multiple_of(BUCKET);
        let mut lost = 0;
        for n in 0..total {
            lost += u32::from(ghosts.insert(key(n.into()), Ghost { touched: n, mark: false }, n).is_some());
        }
        assert_eq!(ghosts.len(), room);
        let mut seen = 0;
        let stands_for = ghosts.sample(room, total, |ghost| seen += u32::from(ghost.touched < total));
        assert_eq!((seen as usize, stands_for), (room, 1.0), "a sample of all sees each once");
        let kept: Vec<u32> = (0..total).filter(|n| ghosts.take(key((*n).into()), total).is_some()).collect();
        // A few are taken for others, which were forgotten.
        assert_eq!(kept.len() as u32 + lost, total);
        let newest_half = kept.iter().filter(|n| **n >= total - count as u32 / 2).count();
        assert!(newest_half >= count / 2 * 94 / 100, "of the newest {} only {newest_half} are kept", count / 2);
    }

    #[test]
    fn a_sample_tells_how_many_there_are_however_few() {
        let mut ghosts = Ghosts::new(100_000, 8000);
        let mut remembered = 0;
        for filled in [200u32, 3000, 40_000, 100_000] {
            (remembered..filled).for_each(|n| {
                ghosts.insert(key(n.into()), Ghost { touched: n, mark: false }, n);
            });
            remembered = filled;
            let mut seen = 0;
            let stands_for = ghosts.sample(1536, filled, |_| seen += 1);
            let (told, there) = (f64::from(seen) * stands_for, ghosts.len() as f64);
            assert!((told / there - 1.0).abs() < 0.3, "{told} of {there}");
        }
    }

    #[test]
    fn an_empty_table_remembers_nothing() {
        let mut ghosts = Ghosts::default();
        assert_eq!(ghosts.insert(key(1), Ghost { touched: 1, mark: true }, 2), None);
        assert_eq!(ghosts.take(key(1), 3), None);
        ghosts.sample(100, 3, |ghost| panic!("{ghost:?} was never remembered"));
    }
}
