//! How often keys were looked up, roughly and in fixed memory: a count-min sketch whose counts fade.

use crate::key::Fingerprint;

const ROWS: usize = 4;
/// The largest count. Keys that were popular once can be overtaken after a few halvings.
pub const MOST: u8 = 15;

/// See the module's head. The default is empty: it counts nothing and estimates 0.
#[derive(Default)]
pub struct Sketch {
    /// Row after row, each a power of two long.
    counts: Box<[u8]>,
}

impl Sketch {
    /// For about `keys` keys.
    pub fn new(keys: usize) -> Sketch {
        Sketch { counts: vec![0; keys.next_power_of_two() * ROWS].into_boxed_slice() }
    }

    /// Counters in a row: about as many keys as are told apart.
    pub fn capacity(&self) -> usize {
        self.counts.len() / ROWS
    }

    /// How often `key` was asked for, at most [`MOST`]; too high where others share all of its counters.
    pub fn estimate(&self, key: Fingerprint) -> u8 {
        self.places(key).map(|place| self.counts[place]).min().unwrap_or(0)
    }

    /// `key` was counted up to `count` elsewhere; its estimate is at least that from now on.
    pub fn raise(&mut self, key: Fingerprint, count: u8) {
        for place in self.places(key) {
            self.counts[place] = self.counts[place].max(count.min(MOST));
        }
    }

    /// Bytes of all counters, one each.
    pub fn heap_bytes(&self) -> usize {
        self.counts.len()
    }

    /// Halves all counts. Walks over all of them.
    pub fn halve(&mut self) {
        self.counts.iter_mut().for_each(|count| *count /= 2);
    }

    /// One a row; none while the sketch is empty.
    fn places(&self, key: Fingerprint) -> impl Iterator<Item = usize> + use<> {
        let (width, step) = (self.capacity(), key.0 >> 32 | 1);
        let rows = if width == 0 { 0 } else { ROWS };
        (0..rows).map(move |row| row * width + ((key.0.wrapping_add(step * row as u64)) as usize & (width - 1)))
    }
}
