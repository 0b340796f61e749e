//! A vector that grows without moving what it holds, so that growth never costs more than one chunk.
//!
//! A plain `Vec` of 8 million 64-byte records would copy half a gigabyte when it doubles; the thread that owns
//! the core may not be away for more than about 200 µs.

use std::ops::{Index, IndexMut};

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

pub struct Chunked<T> {
    chunks: Vec<Vec<T>>,
    len: u32,
}

impl<T> Default for Chunked<T> {
    fn default() -> Self {
        Chunked { chunks: Vec::new(), len: 0 }
    }
}

impl<T> Chunked<T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Appends `value` and returns its index.
    pub fn push(&mut self, value: T) -> u32 {
        if self.len as usize % CHUNK == 0 {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        self.chunks.last_mut().expect("a chunk was just added").push(value);
        self.len += 1;
        self.len - 1
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<T>() + self.chunks.capacity() * size_of::<Vec<T>>()
    }
}

impl<T> Index<u32> for Chunked<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        &self.chunks[(index >> CHUNK_BITS) as usize][index as usize & (CHUNK - 1)]
    }
}

impl<T> IndexMut<u32> for Chunked<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.chunks[(index >> CHUNK_BITS) as usize][index as usize & (CHUNK - 1)]
    }
}
