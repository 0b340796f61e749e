//! A list that grows without moving what is in it.
//!
//! Invariants: an element keeps its place in memory. A push writes one element, however many there are: memory is
//! reserved by the chunk, and not touched before it is filled, because fresh memory can take 10 us a page. Only the
//! list of chunks moves when it grows, 24 bytes for 4,096 elements.

use std::ops::{Index, IndexMut};

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

/// See the module documentation.
pub(super) struct Places<T>(Vec<Vec<T>>);

impl<T> Places<T> {
    pub fn new() -> Places<T> {
        Places(Vec::new())
    }

    pub fn len(&self) -> u32 {
        let whole = self.0.len().saturating_sub(1) << CHUNK_BITS;
        (whole + self.0.last().map_or(0, Vec::len)) as u32
    }

    /// Returns the place of the new element.
    pub fn push(&mut self, element: T) -> u32 {
        let place = self.len();
        if place.is_multiple_of(CHUNK as u32) {
            self.0.push(Vec::with_capacity(CHUNK));
        }
        self.0.last_mut().expect("there is a chunk with room").push(element);
        place
    }
}

impl<T> Index<u32> for Places<T> {
    type Output = T;

    fn index(&self, place: u32) -> &T {
        &self.0[(place >> CHUNK_BITS) as usize][place as usize % CHUNK]
    }
}

impl<T> IndexMut<u32> for Places<T> {
    fn index_mut(&mut self, place: u32) -> &mut T {
        &mut self.0[(place >> CHUNK_BITS) as usize][place as usize % CHUNK]
    }
}
