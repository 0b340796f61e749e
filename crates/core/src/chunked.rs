//! A vector that grows without moving its elements, so that growth costs at most one chunk.
//!
//! A plain `Vec` of 8 million 64-byte records would copy half a gigabyte when it doubles. The thread that runs the core
//! must not be busy for more than about 200 µs.

use std::ops::{Index, IndexMut};

const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

pub struct Chunked<T> {
    /// Of a fixed length, so that an access checks one bound and follows one pointer.
    chunks: Vec<Box<[T; CHUNK]>>,
    len: u32,
}

impl<T> Default for Chunked<T> {
    fn default() -> Self {
        Chunked { chunks: Vec::new(), len: 0 }
    }
}

impl<T: Clone> Chunked<T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Appends `value` and returns its index.
    pub fn push(&mut self, value: T) -> u32 {
        let (index, is_new_chunk) = (self.len, (self.len as usize).is_multiple_of(CHUNK));
        self.len += 1;
        if is_new_chunk {
            let chunk = vec![value; CHUNK].into_boxed_slice();
            self.chunks.push(chunk.try_into().unwrap_or_else(|_| unreachable!("a chunk has its length")));
        } else {
            self[index] = value;
        }
        index
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.chunks.len() * size_of::<[T; CHUNK]>() + self.chunks.capacity() * size_of::<Box<[T; CHUNK]>>()
    }
}

impl<T> Index<u32> for Chunked<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        debug_assert!(index < self.len);
        &self.chunks[(index >> CHUNK_BITS) as usize][index as usize % CHUNK]
    }
}

impl<T> IndexMut<u32> for Chunked<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        debug_assert!(index < self.len);
        &mut self.chunks[(index >> CHUNK_BITS) as usize][index as usize % CHUNK]
    }
}
